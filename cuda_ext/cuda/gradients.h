// Gradients of features and weights for the logit gradients of some labels: what the unfused layer and the
// fused step share.
#pragma once

#include "ops.h"
#include "rows.cuh"

namespace xmlc::cuda {

// feature_gradient[indices[l, k], b] += sum_l weight[l, k] * logit_gradient[l, b]
void add_feature_gradient(const Rows&, const float* logit_gradient,  // [rows.count, batch]
                          float* feature_gradient,                   // [input, batch]
                          const Queue&);

// weight_gradient[l, k] = sum_b logit_gradient[l, b] * features[indices[l, k], b]
void compute_weight_gradient(const Rows&, const float* features, const float* logit_gradient,
                             float* weight_gradient,  // [rows.count, fan_in]
                             const Queue&);

// The same on the tensor cores, for weights and features in bfloat16 and groups of at least 16.
void add_feature_gradient(const Rows&, const BFloat16* logit_gradient, float* feature_gradient, const Queue&);
void compute_weight_gradient(const Rows&, const BFloat16* features, const BFloat16* logit_gradient,
                             float* weight_gradient, const Queue&);

}  // namespace xmlc::cuda
