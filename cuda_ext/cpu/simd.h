// Sixteen lanes of float32 or uint32 in the widest registers of the instruction set that this file is
// compiled for: one AVX-512, two AVX or four 128-bit registers. Written with the vector extensions that
// GCC and Clang share; the instruction set itself shows only in `any`.
//
// Everything lives in a namespace named after the instruction set and is always_inline. A weak symbol
// compiled with -mavx512f could be kept by the linker for the generic code too, and crash older CPUs.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

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
#define XMLC_INLINE_LAMBDA __attribute__((always_inline))
#define XMLC_OUTLINE __attribute__((noinline))

namespace xmlc::cpu::XMLC_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
#if defined(__AVX512F__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
constexpr int kLanes = 16;
constexpr int kWidth = kVectorBytes / 4;  // lanes of one register
constexpr int kParts = kLanes / kWidth;   // registers of one value

typedef float FloatVector __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t MaskVector __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t WordVector __attribute__((vector_size(kVectorBytes)));
typedef std::uint64_t WideVector __attribute__((vector_size(kVectorBytes)));
typedef std::uint16_t HalfVector __attribute__((vector_size(kVectorBytes / 2)));
typedef std::uint8_t ByteVector __attribute__((vector_size(kVectorBytes / 4)));

// The largest power of two of values, at most `wanted`, that leaves a few registers to spare, where each
// takes `parts`.
constexpr int at_once(int wanted, int parts) {
  while (wanted > 1 && wanted * parts > kRegisters - 4) wanted /= 2;
  return wanted;
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

template <class Body, int... kIndex>
XMLC_INLINE void unroll_each(const Body& body, std::integer_sequence<int, kIndex...>) {
  (body(Constant<kIndex>{}), ...);
}
// Calls body(Constant<0>), ..., body(Constant<kCount - 1>). Compilers unroll a loop too late to see that an
// array that it indexes can live in registers.
template <int kCount, class Body>
XMLC_INLINE void unroll(const Body& body) {
  unroll_each(body, std::make_integer_sequence<int, kCount>{});
}
// body(row, column) for all rows and columns.
template <int kRows, int kColumns, class Body>
XMLC_INLINE void unroll(const Body& body) {
  unroll<kRows>([&](auto row) XMLC_INLINE_LAMBDA {
    unroll<kColumns>([&](auto column) XMLC_INLINE_LAMBDA { body(row, column); });
  });
}

// The same value in all lanes. `Vector{} + value` would cost an addition: 0 + -0 is not -0.
XMLC_INLINE FloatVector broadcast(float value) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(value);
#elif defined(__AVX2__)
  return _mm256_set1_ps(value);
#else
  return FloatVector{value, value, value, value};
#endif
}
XMLC_INLINE WordVector broadcast(std::uint32_t value) { return WordVector{} + value; }

// a * b + c, rounded as the vector code rounds it.
XMLC_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

struct Mask {
  MaskVector part[kParts];  // all ones or all zeros in each lane
};

// `for (p)` loops over one, two or four registers and is always unrolled.
template <class Vector, class Scalar>
struct Lanes {
  Vector part[kParts];

  Lanes() = default;
  XMLC_INLINE explicit Lanes(Scalar value) {
    for (int p = 0; p < kParts; ++p) part[p] = broadcast(value);
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
  XMLC_INLINE friend Lanes operator|(Lanes a, const Lanes& b) {
    for (int p = 0; p < kParts; ++p) a.part[p] |= b.part[p];
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
// Of values in [0, 2^31).
XMLC_INLINE Word truncate(const Float& value) {
  Word whole;
  for (int p = 0; p < kParts; ++p)
    whole.part[p] = reinterpret_cast<WordVector>(__builtin_convertvector(value.part[p], MaskVector));
  return whole;
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

// Register by register: GCC copies a whole `Float` in pieces of 16 bytes by way of the stack.
typedef float UnalignedVector __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
XMLC_INLINE Float load(const float* from) {
  Float value;
  for (int p = 0; p < kParts; ++p) value.part[p] = reinterpret_cast<const UnalignedVector*>(from)[p];
  return value;
}
XMLC_INLINE void store(float* to, const Float& value) {
  for (int p = 0; p < kParts; ++p) reinterpret_cast<UnalignedVector*>(to)[p] = value.part[p];
}

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

XMLC_INLINE Word load_bytes(const std::uint8_t* from) {
  Word value;
  for (int p = 0; p < kParts; ++p) {
    ByteVector bytes;
    std::memcpy(&bytes, from + p * kWidth, sizeof bytes);
    value.part[p] = __builtin_convertvector(bytes, WordVector);
  }
  return value;
}
XMLC_INLINE void store_low_bytes(std::uint8_t* to, const Word& value) {
  for (int p = 0; p < kParts; ++p) {
    const ByteVector bytes = __builtin_convertvector(value.part[p], ByteVector);
    std::memcpy(to + p * kWidth, &bytes, sizeof bytes);
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

// a[kIndex] for an index below kWidth, b[kIndex - kWidth] for the others.
template <int... kIndex>
XMLC_INLINE FloatVector shuffle(const FloatVector& a, const FloatVector& b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kIndex...);
#else
  return __builtin_shuffle(a, b, MaskVector{kIndex...});
#endif
}

template <int kHalf, int... kLane>
XMLC_INLINE FloatVector fold_register(const FloatVector& a, const FloatVector& b,
                                      std::integer_sequence<int, kLane...>) {
  return shuffle<(kLane % (2 * kHalf) < kHalf ? kLane : kWidth + kLane)...>(a, b) +
         shuffle<(kLane % (2 * kHalf) < kHalf ? kLane + kHalf : kWidth + kLane - kHalf)...>(a, b);
}

// One level of `sum_each`: halves of width kHalf of every 2 * kHalf lanes are added together; those of `a`
// land in the lower, those of `b` in the upper half. One operand of the sum keeps every lane in its place,
// which is a blend: cheaper than a second shuffle.
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
    for (int p = 0; p < kParts; ++p)
      result.part[p] = fold_register<kHalf>(a.part[p], b.part[p], std::make_integer_sequence<int, kWidth>{});
  }
  return result;
}

// One level of `transpose`: swaps the blocks of width kHalf off the diagonal of every two.
template <int kHalf, int... kLane>
XMLC_INLINE void swap_in_register(FloatVector& a, FloatVector& b, std::integer_sequence<int, kLane...>) {
  const FloatVector low = a;
  a = shuffle<(kLane % (2 * kHalf) < kHalf ? kLane : kWidth + kLane - kHalf)...>(low, b);
  b = shuffle<(kLane % (2 * kHalf) < kHalf ? kLane + kHalf : kWidth + kLane)...>(low, b);
}
template <int kHalf>
XMLC_INLINE void swap_halves(Float& a, Float& b) {
  if constexpr (kHalf >= kWidth) {
    constexpr int half = kHalf / kWidth;
    for (int base = 0; base < kParts; base += 2 * half)
      for (int p = 0; p < half; ++p) {
        const FloatVector moved = a.part[base + half + p];
        a.part[base + half + p] = b.part[base + p];
        b.part[base + p] = moved;
      }
  } else {
    for (int p = 0; p < kParts; ++p)
      swap_in_register<kHalf>(a.part[p], b.part[p], std::make_integer_sequence<int, kWidth>{});
  }
}
// Lane j of row i becomes lane i of row j.
template <int kHalf = kLanes / 2>
XMLC_INLINE void transpose(Float (&row)[kLanes]) {
  unroll<kLanes>([&](auto i) XMLC_INLINE_LAMBDA {
    if constexpr (i % (2 * kHalf) < kHalf) swap_halves<kHalf>(row[i], row[i + kHalf]);
  });
  if constexpr (kHalf > 1) transpose<kHalf / 2>(row);
}

XMLC_INLINE float sum_lanes(const Float& value) {
  const Float eight = fold<8>(value, value), four = fold<4>(eight, eight), two = fold<2>(four, four);
  return fold<1>(two, two).part[0][0];
}

// Asks for the cache lines of one tile row ahead of its use.
template <int kVectors>
XMLC_INLINE void prefetch(const float* row) {
  for (int v = 0; v < kVectors; ++v) __builtin_prefetch(row + v * kLanes, 1);
}

// Lane j of the result is the sum over the lanes of value(Constant<j>): a transpose and a sum in fifteen
// folds, each as soon as it can, so that few values wait in registers. Instances of the template: sums of
// the values kFirst, kFirst + kStep, ...
template <int kStep = 1, int kFirst = 0, class Value>
XMLC_INLINE Float sum_each(const Value& value) {
  if constexpr (kStep == kLanes)
    return value(Constant<kFirst>{});
  else
    return fold<kStep>(sum_each<2 * kStep, kFirst>(value), sum_each<2 * kStep, kFirst + kStep>(value));
}

}  // namespace xmlc::cpu::XMLC_ISA
