// Stochastic rounding. To bfloat16 it is exact: E[round(x)] = x for every finite x, subnormals included,
// since bfloat16 has float32's exponents and the discarded 16 bits are the probability of rounding up. To
// float8 it is exact, too, where x is normal; a subnormal is rounded by its place between multiples of the
// spacing, of which 28 bits count: exact from 2^-5 of the spacing on, and below off by less than 2^-28 of it.
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

// Code of the float8 for `value`, which is in units of the scale; of `random`, 28 bits are used. NaN stays
// NaN, infinity stays infinite (NaN in e4m3fn, which has no infinity), and a finite value stays finite.
template <class Format, class Real, class Word>
XMLC_HOST_DEVICE Word round_stochastically_float8(Real value, Word random) {
  constexpr int kDropped = 23 - Format::kMantissa, kPoint = 28;
  const Word bits = to_bits(value), sign = (bits >> 24) & Word(0x80u), magnitude = bits & Word(0x7fffffffu);
  const Word below(static_cast<std::uint32_t>(127 - Format::kBias) << Format::kMantissa);
  const Word normal = ((magnitude + (random & Word((1u << kDropped) - 1u))) >> kDropped) - below;
  // Codes of subnormals count multiples of the spacing, and the next one is that of the smallest normal.
  const Real size = absolute(value), smallest(Format::kSmallestNormal);
  constexpr float kSpacings = static_cast<float>(1u << Format::kMantissa) / Format::kSmallestNormal;
  const Real fixed = select(size < smallest, size, Real(0.0f)) * Real(kSpacings * (1u << kPoint));
  const Word subnormal = (truncate(fixed) + (random & Word((1u << kPoint) - 1u))) >> kPoint;
  const Word code = select(size < smallest, subnormal, normal);
  const Word largest(Format::kLargestCode), infinity(0x7f800000u);
  const Word finite = select(largest < code, largest, code);
  const Word special = select(infinity < magnitude, Word(0x7fu), Word(Format::kLargestCode + 1u));
  return select(magnitude < infinity, finite, special) ^ sign;
}

// Code of the float8 nearest to `value` in units of the scale, ties to even; the largest beyond it.
template <class Format>
XMLC_HOST_DEVICE Format round_to_nearest_float8(float value) {
  constexpr int kDropped = 23 - Format::kMantissa;
  const std::uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffffu;
  const auto with_sign = [&](std::uint32_t code) {
    return Format{static_cast<std::uint8_t>(code | (bits >> 24 & 0x80u))};
  };
  if (magnitude >= 0x7f800000u) return with_sign(magnitude > 0x7f800000u ? 0x7fu : Format::kLargestCode + 1u);
  if (absolute(value) < Format::kSmallestNormal) {  // the sum is rounded to a multiple of the spacing
    constexpr float kWhole = Format::kSmallestNormal * (1 << kDropped);
    return with_sign(to_bits(absolute(value) + kWhole) - to_bits(kWhole));
  }
  const std::uint32_t half = (1u << (kDropped - 1)) - 1u + (magnitude >> kDropped & 1u);
  const std::uint32_t code = ((magnitude + half) >> kDropped) -
                             (static_cast<std::uint32_t>(127 - Format::kBias) << Format::kMantissa);
  return with_sign(code < Format::kLargestCode ? code : Format::kLargestCode);
}

// The scale of a block of labels for its next weights, the largest finite of which has this size. It rises as
// far as the largest needs, and falls by half where the largest takes less than an eighth of what is there: a
// factor of four then lies between a fall and the next rise. Both are powers of two, so that what does not
// change keeps its value, except for the subnormals of a rise.
template <class Format>
XMLC_HOST_DEVICE float raised_scale(float scale, float largest) {
  while (scale * Format::kLargest < largest && scale < Format::kMostScale) scale *= 2.0f;
  return scale;
}
template <class Format>
XMLC_HOST_DEVICE float next_scale(float scale, float largest) {
  scale = raised_scale<Format>(scale, largest);
  const bool falls = largest > 0.0f && largest < scale * (Format::kLargest / 8.0f);
  return falls && scale > Format::kLeastScale ? scale * 0.5f : scale;
}

// The scale of a label's moments is kept as the exponent of a power of two, biased by 127; 0 where all are
// zero. That of the next moments, the largest finite of which has this size: the least power of two in whose
// units none is beyond e4m3fn's largest, 1.75 * 2^8. It lies in [1, 247], so that its inverse is normal, too.
XMLC_HOST_DEVICE std::uint8_t moment_scale(float largest) {
  const std::uint32_t bits = to_bits(largest);
  const std::uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) > 0x600000u ? 1u : 0u);
  return static_cast<std::uint8_t>(exponent > 9u ? exponent - 8u : 1u);
}
XMLC_HOST_DEVICE float moment_unit(std::uint8_t scale) { return from_bits(std::uint32_t{scale} << 23); }
XMLC_HOST_DEVICE float inverse_unit(std::uint8_t scale) { return from_bits((254u - scale) << 23); }

// Code of the root of a second moment: stochastic, too, but what is not zero becomes at least one unit.
template <class Format, class Real, class Word>
XMLC_HOST_DEVICE Word round_root_float8(Real root, Real inverse, Word random) {
  const Word code = round_stochastically_float8<Format>(root * inverse, random);
  return select(Real(0.0f) < root, select(code < Word(1u), Word(1u), code), code);
}

// Bits of the bfloat16 nearest to `value`, ties to even.
XMLC_HOST_DEVICE BFloat16 round_to_nearest(float value) {
  const std::uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0u};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

}  // namespace xmlc
