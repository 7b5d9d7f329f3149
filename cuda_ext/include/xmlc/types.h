// Storage types and the scalar primitives that the pointwise headers are written in.
//
// Every pointwise function is a template over `Real`. A backend provides for its Real: the arithmetic
// operators, comparisons that yield a mask, and select, to_bits, from_bits, absolute, larger,
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

enum class WeightType { kFloat32, kBFloat16 };
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
XMLC_HOST_DEVICE float absolute(float value) { return from_bits(to_bits(value) & 0x7fffffffu); }
XMLC_HOST_DEVICE float larger(float a, float b) { return a > b ? a : b; }
XMLC_HOST_DEVICE float square_root(float value) { return sqrtf(value); }
XMLC_HOST_DEVICE float widen(BFloat16 value) { return from_bits(std::uint32_t{value.bits} << 16); }

}  // namespace xmlc
