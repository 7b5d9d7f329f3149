// Losses of one logit: value and derivative together, because they share their expensive part.
#pragma once

#include "xmlc/types.h"

namespace xmlc {

enum class Loss { kSquaredHinge, kBce, kSoftmax, kDecoupledSoftmax };

// Losses whose gradient needs a sum over all labels of the instance first.
XMLC_HOST_DEVICE constexpr bool is_normalised(Loss loss) {
  return loss == Loss::kSoftmax || loss == Loss::kDecoupledSoftmax;
}

template <class Real>
struct LossGrad {
  Real loss;
  Real grad;  // d loss / d logit
};

// exp(x) for x <= 64; relative error below 2e-7, and 0 (not a subnormal) below -87. NaN stays NaN.
template <class Real>
XMLC_HOST_DEVICE Real exponential(Real x) {
  const Real magic(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const Real clamped = larger(Real(-87.0f), x);  // in this order: larger(a, NaN) is NaN
  const Real shifted = clamped * Real(1.44269504088896f) + magic;
  const Real whole = shifted - magic;
  // ln 2 in two parts, so that the remainder keeps its last bits.
  const Real rest = (clamped - whole * Real(0.693359375f)) + whole * Real(2.12194440e-4f);
  Real poly = Real(1.9875691500e-4f);
  poly = poly * rest + Real(1.3981999507e-3f);
  poly = poly * rest + Real(8.3334519073e-3f);
  poly = poly * rest + Real(4.1665795894e-2f);
  poly = poly * rest + Real(1.6666665459e-1f);
  poly = poly * rest + Real(5.0000001201e-1f);
  poly = poly * rest * rest + rest + Real(1.0f);
  using Word = decltype(to_bits(x));
  const Real power = from_bits((to_bits(shifted) - to_bits(magic) + Word(127u)) << 23);  // 2^whole
  return select(x < Real(-87.0f), Real(0.0f), poly * power);
}

// Squared hinge, target in {-1, +1}: max(0, 1 - target * logit)^2. Exactly zero beyond the margin, which
// lets the caller skip the whole backward work of that logit.
struct SquaredHinge {
  static constexpr bool kNormalised = false;
  template <class Real>
  XMLC_HOST_DEVICE static LossGrad<Real> evaluate(Real logit, Real target) {
    const Real difference = Real(1.0f) - target * logit;
    const Real slack = select(difference < Real(0.0f), Real(0.0f), difference);  // keeps NaN visible
    return {slack * slack, Real(-2.0f) * target * slack};
  }
};

// Binary cross-entropy with logits, target in {-1, +1}: log(1 + exp(-target * logit)).
// With u = -target * logit and e = exp(-|u|): max(u, 0) + log1p(e), derivative -target * sigmoid(u).
struct Bce {
  static constexpr bool kNormalised = false;
  template <class Real>
  XMLC_HOST_DEVICE static LossGrad<Real> evaluate(Real logit, Real target) {
    const Real one(1.0f);
    const Real u = Real(0.0f) - target * logit;
    const Real e = exponential(Real(0.0f) - absolute(u));
    // One division serves 1 / (1 + e) and s = e / (2 + e); log1p(e) = 2 atanh(s), s <= 1/3.
    const Real inverse = one / ((one + e) * (Real(2.0f) + e));
    const Real sigmoid = select(u < Real(0.0f), e, one) * (Real(2.0f) + e) * inverse;
    const Real s = e * (one + e) * inverse;
    const Real square = s * s;
    Real series = Real(2.0f / 13.0f);
    series = series * square + Real(2.0f / 11.0f);
    series = series * square + Real(2.0f / 9.0f);
    series = series * square + Real(2.0f / 7.0f);
    series = series * square + Real(2.0f / 5.0f);
    series = series * square + Real(2.0f / 3.0f);
    series = series * square + Real(2.0f);
    const Real positive_part = select(u < Real(0.0f), Real(0.0f), u);
    return {positive_part + series * s, Real(0.0f) - target * sigmoid};
  }
};

// The normalised losses. Of an instance, S is the log of the sum of exp(z) over labels (its negatives only,
// if decoupled), and w_p the weight of a positive times its share (1, or 1 / positives of the instance). The
// gradient of a negative is factor * exp(z - S).

// sum_p w_p (S - z_p); factor = sum_p w_p.
struct Softmax {
  static constexpr bool kNormalised = true;
  template <class Real>
  XMLC_HOST_DEVICE static Real positive_gradient(Real logit, Real weight, Real log_sum, Real factor) {
    return factor * exponential(logit - log_sum) - weight;
  }
};

// sum_p w_p (log(exp(z_p) + exp(S)) - z_p): positives do not compete with each other.
// factor = sum_p w_p sigmoid(S - z_p).
struct DecoupledSoftmax {
  static constexpr bool kNormalised = true;
  template <class Real>
  XMLC_HOST_DEVICE static Real positive_gradient(Real logit, Real weight, Real log_sum, Real) {
    const Real one(1.0f);
    const Real u = log_sum - logit;
    const Real e = exponential(Real(0.0f) - absolute(u));
    return Real(0.0f) - weight * select(u < Real(0.0f), e, one) / (one + e);
  }
};

}  // namespace xmlc
