// Storage types and the scalar primitives that the pointwise headers are written in.
//
// Every pointwise function is a template over `Real`. A backend provides for its Real: the arithmetic
// operators, comparisons that yield a mask, and select, to_bits, from_bits, truncate, absolute, larger,
// square_root. Here for float; cpu/simd.h for sixteen lanes at once.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "xmlc/platform.h"

namespace xmlc {

struct BFloat16 {
  std::uint16_t bits;
};

// Eight bits: sign, exponent, and kMantissa bits of mantissa, in units of a scale that many weights share.
// e4m3fn (the OCP's format without infinities) and e5m2.
template <int kMantissaBits>
struct Float8 {
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kBias = (1 << (6 - kMantissa)) - 1;
  static constexpr std::uint32_t kLargestCode = kMantissa == 3 ? 0x7e : 0x7b;  // of a finite value
  static constexpr float kLargest = kMantissa == 3 ? 448.0f : 57344.0f;
  static constexpr float kSmallestNormal = kMantissa == 3 ? 0x1p-6f : 0x1p-14f;
  // Scales are powers of two between these: their inverse and the largest weight are finite.
  static constexpr float kLeastScale = 0x1p-64f;
  static constexpr float kMostScale = kMantissa == 3 ? 0x1p119f : 0x1p112f;
  std::uint8_t bits;
};
using Float8E4M3 = Float8<3>;
using Float8E5M2 = Float8<2>;

enum class WeightType { kFloat32, kBFloat16, kFloat8E4M3, kFloat8E5M2 };
enum class IndexType { kUInt16, kInt32 };

XMLC_HOST_DEVICE std::uint32_t to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
XMLC_HOST_DEVICE float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
XMLC_HOST_DEVICE float select(bool mask, float yes, float no) { return mask ? yes : no; }
XMLC_HOST_DEVICE std::uint32_t select(bool mask, std::uint32_t yes, std::uint32_t no) {
  return mask ? yes : no;
}
XMLC_HOST_DEVICE std::uint32_t truncate(float value) { return static_cast<std::uint32_t>(value); }
XMLC_HOST_DEVICE float absolute(float value) { return from_bits(to_bits(value) & 0x7fffffffu); }
XMLC_HOST_DEVICE float larger(float a, float b) { return a > b ? a : b; }
XMLC_HOST_DEVICE float square_root(float value) { return sqrtf(value); }
XMLC_HOST_DEVICE float widen(BFloat16 value) { return from_bits(std::uint32_t{value.bits} << 16); }

// The value of a float8 code, in units of its scale.
template <class Format, class Word>
XMLC_HOST_DEVICE auto widen_float8(Word code) {
  using Real = decltype(from_bits(code));
  constexpr auto kMantissa = Format::kMantissa;
  const Word magnitude = code & Word(0x7fu), sign = (code & Word(0x80u)) << 24;
  const Word bits = magnitude << (23 - kMantissa);
  const Real normal = from_bits(bits + Word(static_cast<std::uint32_t>(127 - Format::kBias) << 23));
  // With one more in the exponent, the digits of a subnormal stand behind those of the smallest normal.
  const Real shifted = from_bits(bits + Word(static_cast<std::uint32_t>(128 - Format::kBias) << 23));
  const Real finite =
      select(magnitude < Word(1u << kMantissa), shifted - Real(Format::kSmallestNormal), normal);
  const Word special = bits | Word(0x7f800000u);
  return from_bits(select(Word(Format::kLargestCode) < magnitude, special, to_bits(finite)) | sign);
}

}  // namespace xmlc
