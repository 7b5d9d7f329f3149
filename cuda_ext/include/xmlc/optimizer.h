// Update rules of one weight. `step` counts from 1; bias corrections come precomputed from the caller.
// Weight decay is decoupled (AdamW's) in all of them.
#pragma once

#include "xmlc/types.h"

namespace xmlc {

enum class Optimizer { kSgd, kMomentum, kAdam, kLabelAdam };

struct OptimizerArguments {
  Optimizer kind;
  float learning_rate;
  float keep;                // 1 - learning_rate * weight_decay
  float momentum;            // kMomentum
  float beta2, eps;          // kAdam, kLabelAdam
  float complement1;         // 1 - beta1, rounded once from float64
  float complement2;         // 1 - beta2
  float corrected_rate;      // learning_rate / (1 - beta1^step)
  float inverse_correction;  // 1 / sqrt(1 - beta2^step)
};

// Whether a step leaves every weight as it is, whatever finite gradient it has.
XMLC_HOST_DEVICE bool changes_nothing(const OptimizerArguments& o) {
  return o.kind == Optimizer::kSgd && o.learning_rate == 0.0f && o.keep == 1.0f;
}

// torch.optim.SGD
template <class Real>
XMLC_HOST_DEVICE Real sgd(const OptimizerArguments& o, Real weight, Real gradient) {
  return weight * Real(o.keep) - Real(o.learning_rate) * gradient;
}

// torch.optim.SGD(momentum, dampening=0)
template <class Real>
XMLC_HOST_DEVICE Real momentum(const OptimizerArguments& o, Real weight, Real gradient, Real& velocity) {
  velocity = Real(o.momentum) * velocity + gradient;
  return weight * Real(o.keep) - Real(o.learning_rate) * velocity;
}

// torch.optim.AdamW
template <class Real>
XMLC_HOST_DEVICE Real adam(const OptimizerArguments& o, Real weight, Real gradient, Real& first,
                           Real& second) {
  first = first + Real(o.complement1) * (gradient - first);
  second = Real(o.beta2) * second + Real(o.complement2) * gradient * gradient;
  const Real denominator = square_root(second) * Real(o.inverse_correction) + Real(o.eps);
  return weight * Real(o.keep) - Real(o.corrected_rate) * (first / denominator);
}

// Adam with beta1 = 0 and one second moment for all parameters of a label: the running mean of their mean
// squared gradient. Returns the label's rate; its weights then follow `sgd` with that rate.
XMLC_HOST_DEVICE float label_adam_rate(const OptimizerArguments& o, float mean_square, float& second) {
  second = o.beta2 * second + o.complement2 * mean_square;
  return o.learning_rate / (square_root(second) * o.inverse_correction + o.eps);
}

}  // namespace xmlc
