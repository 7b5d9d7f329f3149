// The ops of the CPU backend. Each takes a workspace of the size that the function beside it states; with
// a null workspace it only measures.
#pragma once

#include "kernels.h"
#include "xmlc/arguments.h"

namespace xmlc::cpu {

// The instruction set in use: the best of this machine unless set.
Isa isa();
void set_isa(Isa);  // throws std::invalid_argument where the machine lacks it
bool isa_available(Isa);
const Kernels& kernels();

std::int64_t sparse_linear(const SparseLinearArguments&, int threads, void* workspace);
std::int64_t sparse_linear_feature_gradient(const SparseLinearArguments&, int threads, void* workspace);
std::int64_t sparse_linear_weight_gradient(const SparseLinearArguments&, int threads, void* workspace);
std::int64_t fused_step(const FusedStepArguments&, int threads, void* workspace);
std::int64_t top_labels(const TopLabelsArguments&, int threads, void* workspace);
std::int64_t redistribute(const RedistributeArguments&, int threads, void* workspace);

}  // namespace xmlc::cpu
