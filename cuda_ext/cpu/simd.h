// Sixteen lanes of float32 or uint32 in the widest registers of the instruction set that this file is
// compiled for: one AVX-512, two AVX or four 128-bit registers. Written with the vector extensions that
// GCC and Clang share; the instruction set itself shows only in `any`.
//
// Everything lives in a namespace named after the instruction set and is always_inline. A weak symbol
// compiled with -mavx512f could be kept by the linker for the generic code too, and crash older CPUs.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xmlc/types.h"

#if defined(__AVX512F__)
#define XMLC_ISA avx512
#elif defined(__AVX2__)
#define XMLC_ISA avx2
#else
#define XMLC_ISA generic
#endif
#define XMLC_INLINE inline __attribute__((always_inline))

namespace xmlc::cpu::XMLC_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = 16;
constexpr int kWidth = kVectorBytes / 4;  // lanes of one register
constexpr int kParts = kLanes / kWidth;   // registers of one value

typedef float FloatVector __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t MaskVector __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t WordVector __attribute__((vector_size(kVectorBytes)));
typedef std::uint64_t WideVector __attribute__((vector_size(kVectorBytes)));
typedef std::uint16_t HalfVector __attribute__((vector_size(kVectorBytes / 2)));

struct Mask {
  MaskVector part[kParts];  // all ones or all zeros in each lane
};

// `for (p)` loops over one, two or four registers and is always unrolled.
template <class Vector, class Scalar>
struct Lanes {
  Vector part[kParts];

  Lanes() = default;
  XMLC_INLINE explicit Lanes(Scalar value) {
    for (int p = 0; p < kParts; ++p) part[p] = Vector{} + value;
  }
  XMLC_INLINE friend Lanes operator+(Lanes a, const Lanes& b) {
    for (int p = 0; p < kParts; ++p) a.part[p] += b.part[p];
    return a;
  }
  XMLC_INLINE friend Lanes operator-(Lanes a, const Lanes& b) {
    for (int p = 0; p < kParts; ++p) a.part[p] -= b.part[p];
    return a;
  }
  XMLC_INLINE friend Lanes operator*(Lanes a, const Lanes& b) {
    for (int p = 0; p < kParts; ++p) a.part[p] *= b.part[p];
    return a;
  }
  XMLC_INLINE friend Lanes operator/(Lanes a, const Lanes& b) {
    for (int p = 0; p < kParts; ++p) a.part[p] /= b.part[p];
    return a;
  }
  XMLC_INLINE friend Lanes operator&(Lanes a, const Lanes& b) {
    for (int p = 0; p < kParts; ++p) a.part[p] &= b.part[p];
    return a;
  }
  XMLC_INLINE friend Lanes operator^(Lanes a, const Lanes& b) {
    for (int p = 0; p < kParts; ++p) a.part[p] ^= b.part[p];
    return a;
  }
  XMLC_INLINE friend Lanes operator<<(Lanes a, int bits) {
    for (int p = 0; p < kParts; ++p) a.part[p] <<= bits;
    return a;
  }
  XMLC_INLINE friend Lanes operator>>(Lanes a, int bits) {
    for (int p = 0; p < kParts; ++p) a.part[p] >>= bits;
    return a;
  }
  XMLC_INLINE friend Mask operator<(const Lanes& a, const Lanes& b) {
    Mask mask;
    for (int p = 0; p < kParts; ++p) mask.part[p] = a.part[p] < b.part[p];
    return mask;
  }
};
using Float = Lanes<FloatVector, float>;
using Word = Lanes<WordVector, std::uint32_t>;

XMLC_INLINE Word to_bits(const Float& value) {
  Word bits;
  for (int p = 0; p < kParts; ++p) bits.part[p] = reinterpret_cast<WordVector>(value.part[p]);
  return bits;
}
XMLC_INLINE Float from_bits(const Word& bits) {
  Float value;
  for (int p = 0; p < kParts; ++p) value.part[p] = reinterpret_cast<FloatVector>(bits.part[p]);
  return value;
}
template <class V, class S>
XMLC_INLINE Lanes<V, S> select(const Mask& mask, const Lanes<V, S>& yes, const Lanes<V, S>& no) {
  Lanes<V, S> result;
  for (int p = 0; p < kParts; ++p) result.part[p] = mask.part[p] ? yes.part[p] : no.part[p];
  return result;
}
XMLC_INLINE Float absolute(const Float& value) { return from_bits(to_bits(value) & Word(0x7fffffffu)); }
XMLC_INLINE Float larger(const Float& a, const Float& b) { return select(b < a, a, b); }

XMLC_INLINE Float square_root(const Float& value) {
  Float root;
  for (int p = 0; p < kParts; ++p) {
#if defined(__AVX512F__)
    root.part[p] =
        _mm512_maskz_sqrt_ps(0xffff, value.part[p]);  // the unmasked one trips GCC's -Wmaybe-uninitialized
#elif defined(__AVX2__)
    root.part[p] = _mm256_sqrt_ps(value.part[p]);
#else
    for (int i = 0; i < kWidth; ++i) root.part[p][i] = __builtin_sqrtf(value.part[p][i]);
#endif
  }
  return root;
}

// Whether any lane is true.
XMLC_INLINE bool any(const Mask& mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask.part[0]),
                                reinterpret_cast<__m512i>(mask.part[0])) != 0;
#elif defined(__AVX2__)
  const __m256i both = reinterpret_cast<__m256i>(mask.part[0] | mask.part[1]);
  return !_mm256_testz_si256(both, both);
#else
  const WideVector all =
      reinterpret_cast<WideVector>((mask.part[0] | mask.part[1]) | (mask.part[2] | mask.part[3]));
  return (all[0] | all[1]) != 0;
#endif
}
// Whether any lane is larger in size than a bound. NaN is.
XMLC_INLINE bool any_beyond(const Float& value, const Float& bound) {
  const Float size = absolute(value);
  Mask mask;
  for (int p = 0; p < kParts; ++p) mask.part[p] = ~(size.part[p] <= bound.part[p]);
  return any(mask);
}

XMLC_INLINE Float load(const float* from) {
  Float value;
  std::memcpy(value.part, from, sizeof value.part);
  return value;
}
XMLC_INLINE void store(float* to, const Float& value) { std::memcpy(to, value.part, sizeof value.part); }

// The first `count` lanes; the others are zero / left alone.
XMLC_INLINE Float load_first(const float* from, std::int64_t count) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<std::size_t>(count) * sizeof(float));
  return load(lanes);
}
XMLC_INLINE void store_first(float* to, const Float& value, std::int64_t count) {
  float lanes[kLanes];
  store(lanes, value);
  std::memcpy(to, lanes, static_cast<std::size_t>(count) * sizeof(float));
}

XMLC_INLINE Float widen(const std::uint16_t* from) {  // bfloat16 bits
  Word bits;
  for (int p = 0; p < kParts; ++p) {
    HalfVector half;
    std::memcpy(&half, from + p * kWidth, sizeof half);
    bits.part[p] = __builtin_convertvector(half, WordVector);
  }
  return from_bits(bits << 16);
}
XMLC_INLINE void store_low_halves(std::uint16_t* to, const Word& value) {
  for (int p = 0; p < kParts; ++p) {
    const HalfVector half = __builtin_convertvector(value.part[p], HalfVector);
    std::memcpy(to + p * kWidth, &half, sizeof half);
  }
}

XMLC_INLINE Word lane_numbers() {
  Word numbers;
  for (int p = 0; p < kParts; ++p)
    for (int i = 0; i < kWidth; ++i) numbers.part[p][i] = static_cast<std::uint32_t>(p * kWidth + i);
  return numbers;
}

// 32 x 32 -> 64 bits in each lane (Philox): even and odd lanes separately, as the hardware multiplies.
XMLC_INLINE void multiply_wide(const Word& a, const Word& b, Word& high, Word& low) {
  for (int p = 0; p < kParts; ++p) {
    const WideVector mask = WideVector{} + 0xffffffffull;
    const WideVector wide_a = reinterpret_cast<WideVector>(a.part[p]);
    const WideVector wide_b = reinterpret_cast<WideVector>(b.part[p]);
    const WideVector even = (wide_a & mask) * (wide_b & mask);
    const WideVector odd = (wide_a >> 32) * (wide_b >> 32);
    high.part[p] = reinterpret_cast<WordVector>((even >> 32) | (odd & ~mask));
    low.part[p] = reinterpret_cast<WordVector>((even & mask) | (odd << 32));
  }
}

XMLC_INLINE float sum_lanes(const Float& value) {
  FloatVector folded = value.part[0];
  for (int p = 1; p < kParts; ++p) folded += value.part[p];
  float sum = 0.0f;
  for (int i = 0; i < kWidth; ++i) sum += folded[i];
  return sum;
}

// One level of `sum_each`: halves of width kHalf of every 2 * kHalf lanes are added together; those of `a`
// land in the lower, those of `b` in the upper half.
template <int kHalf>
XMLC_INLINE Float fold(const Float& a, const Float& b) {
  Float result;
  if constexpr (kHalf >= kWidth) {
    constexpr int half = kHalf / kWidth;
    for (int base = 0; base < kParts; base += 2 * half)
      for (int p = 0; p < half; ++p) {
        result.part[base + p] = a.part[base + p] + a.part[base + half + p];
        result.part[base + half + p] = b.part[base + p] + b.part[base + half + p];
      }
  } else {
    MaskVector lower, upper;
    for (int i = 0; i < kWidth; ++i) {
      const int block = i / (2 * kHalf) * (2 * kHalf), within = i % kHalf;
      const int source = block + within + (i % (2 * kHalf) < kHalf ? 0 : kWidth);
      lower[i] = source;
      upper[i] = source + kHalf;
    }
    for (int p = 0; p < kParts; ++p) {
#if defined(__clang__)
      FloatVector low, high;
      for (int i = 0; i < kWidth; ++i) {
        low[i] = lower[i] < kWidth ? a.part[p][lower[i]] : b.part[p][lower[i] - kWidth];
        high[i] = upper[i] < kWidth ? a.part[p][upper[i]] : b.part[p][upper[i] - kWidth];
      }
      result.part[p] = low + high;
#else
      result.part[p] =
          __builtin_shuffle(a.part[p], b.part[p], lower) + __builtin_shuffle(a.part[p], b.part[p], upper);
#endif
    }
  }
  return result;
}

// Lane j of the result is the sum over the lanes of value[j]: a transpose and a sum in fifteen folds.
XMLC_INLINE Float sum_each(const Float (&value)[kLanes]) {
  Float eight[8], four[4];
  for (int i = 0; i < 8; ++i) eight[i] = fold<8>(value[i], value[i + 8]);
  for (int i = 0; i < 4; ++i) four[i] = fold<4>(eight[i], eight[i + 4]);
  const Float even = fold<2>(four[0], four[2]), odd = fold<2>(four[1], four[3]);
  return fold<1>(even, odd);
}

}  // namespace xmlc::cpu::XMLC_ISA
