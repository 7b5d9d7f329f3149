// Losses of one logit: value and derivative together, because they share their expensive part.
#pragma once

#include "xmlc/types.h"

namespace xmlc {

enum class Loss { kSquaredHinge, kBce };

template <class Real>
struct LossGrad {
  Real loss;
  Real grad;  // d loss / d logit
};

// exp(x) for x <= 0; relative error below 2e-7, and 0 (not a subnormal) below -87.
template <class Real>
XMLC_HOST_DEVICE Real exp_of_nonpositive(Real x) {
  const Real magic(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const Real clamped = larger(x, Real(-87.0f));
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
  template <class Real>
  XMLC_HOST_DEVICE static LossGrad<Real> evaluate(Real logit, Real target) {
    const Real one(1.0f);
    const Real u = Real(0.0f) - target * logit;
    const Real e = exp_of_nonpositive(Real(0.0f) - absolute(u));
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

}  // namespace xmlc
