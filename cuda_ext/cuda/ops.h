// The ops of the CUDA backend. Each takes a workspace of the size that it returns; with a null workspace it
// only measures. All work is queued on the stream; nothing waits for the device.
#pragma once

#include <cstdint>

#include "xmlc/arguments.h"
#include "xmlc/launch.cuh"

namespace xmlc::cuda {

// Where to work, and whether sums must have one order: the feature gradient is otherwise added by atomics.
struct Queue {
  cudaStream_t stream;
  bool deterministic;
};

bool has_code();  // for the current device

std::int64_t sparse_linear(const SparseLinearArguments&, const Queue&, void* workspace);
std::int64_t sparse_linear_feature_gradient(const SparseLinearArguments&, const Queue&, void* workspace);
std::int64_t sparse_linear_weight_gradient(const SparseLinearArguments&, const Queue&, void* workspace);
std::int64_t fused_step(const FusedStepArguments&, const Queue&, void* workspace);
std::int64_t top_labels(const TopLabelsArguments&, const Queue&, void* workspace);
std::int64_t redistribute(const RedistributeArguments&, const Queue&, void* workspace);

}  // namespace xmlc::cuda
