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

// What a kind keeps for each weight.
XMLC_HOST_DEVICE constexpr bool has_first(Optimizer kind) {
  return kind == Optimizer::kMomentum || kind == Optimizer::kAdam;
}
XMLC_HOST_DEVICE constexpr bool has_second(Optimizer kind) { return kind == Optimizer::kAdam; }

// Takes it one step further: the velocity or first moment, and the second moment.
template <Optimizer kind, class Real>
XMLC_HOST_DEVICE void advance(const OptimizerArguments& o, Real gradient, Real& first, Real& second) {
  if constexpr (kind == Optimizer::kMomentum) {
    first = Real(o.momentum) * first + gradient;
  } else if constexpr (kind == Optimizer::kAdam) {
    first = first + Real(o.complement1) * (gradient - first);
    second = Real(o.beta2) * second + Real(o.complement2) * gradient * gradient;
  }
}

// The weight after a step of torch.optim.SGD, of SGD(momentum, dampening=0), or of AdamW.
template <Optimizer kind, class Real>
XMLC_HOST_DEVICE Real updated(const OptimizerArguments& o, Real weight, Real gradient, Real& first,
                              Real& second) {
  advance<kind>(o, gradient, first, second);
  if constexpr (kind == Optimizer::kMomentum) {
    return weight * Real(o.keep) - Real(o.learning_rate) * first;
  } else if constexpr (kind == Optimizer::kAdam) {
    const Real denominator = square_root(second) * Real(o.inverse_correction) + Real(o.eps);
    return weight * Real(o.keep) - Real(o.corrected_rate) * (first / denominator);
  } else {
    return weight * Real(o.keep) - Real(o.learning_rate) * gradient;
  }
}

// Adam with beta1 = 0 and one second moment for all parameters of a label: the running mean of their mean
// squared gradient. Returns the label's rate; its weights then follow `kSgd` with that rate.
XMLC_HOST_DEVICE float label_adam_rate(const OptimizerArguments& o, float mean_square, float& second) {
  second = o.beta2 * second + o.complement2 * mean_square;
  return o.learning_rate / (square_root(second) * o.inverse_correction + o.eps);
}

}  // namespace xmlc
