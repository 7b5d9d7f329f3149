// Stochastic rounding to bfloat16, exact: E[round(x)] = x for every finite x, subnormals included, since
// bfloat16 has float32's exponents and the discarded 16 bits are the probability of rounding up.
#pragma once

#include "xmlc/types.h"

namespace xmlc {

// Bits of the bfloat16 (in the low half) for `value`; `random` is uniform, its low 16 bits are used.
// NaN stays NaN, infinity stays infinite, and a finite value stays finite.
template <class Real, class Word>
XMLC_HOST_DEVICE Word round_stochastically(Real value, Word random) {
  const Word bits = to_bits(value);
  const Word magnitude = bits & Word(0x7fffffffu);
  const Word rounded = (bits + (random & Word(0xffffu))) >> 16;
  const Word truncated = bits >> 16;
  const Word result = select(magnitude < Word(0x7f7f0000u), rounded, truncated);
  return select(Word(0x7f800000u) < magnitude, Word(0x7fc0u), result);
}

// Bits of the bfloat16 nearest to `value`, ties to even.
XMLC_HOST_DEVICE BFloat16 round_to_nearest(float value) {
  const std::uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0u};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

}  // namespace xmlc
