// The passes of all ops, compiled for one instruction set (flags: CMakeLists.txt).
#include "fused_step.inl"
#include "kernels.h"
#include "sparse_linear.inl"
#include "top_labels.inl"

namespace xmlc::cpu::generic {
const Kernels kernels = {logits,     feature_gradient, weight_gradient, fused_normaliser,
                         fused_tile, fused_update,     top_labels,      top_labels_one};
}
