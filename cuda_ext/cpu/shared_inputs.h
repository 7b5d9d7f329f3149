// The three products of sixteen labels that share their inputs, over one tile of the batch. The rows of the
// inputs are packed first: a loop that does nothing else has many rows under way. What remains are small
// dense products, [16, fan_in] x [fan_in, width] and the like, from the first-level cache: a block of the
// result stays in registers, one factor comes in vectors and the other is broadcast.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace xmlc::cpu::XMLC_ISA {
namespace {

// A block of a product is rows x columns vectors. As many columns as rows halve the loads.
constexpr int kBlock = at_once(kShared, kParts);
constexpr int columns_of(int columns) {
  int fitting = 1;
  while (fitting < columns && 4 * fitting * fitting <= kBlock) fitting *= 2;
  return fitting;
}

// sum[row][column] += scalar(row, n) * vector(n, column) over n < count.
template <int kRows, int kColumns, class Scalar, class Vector>
XMLC_INLINE void accumulate(std::int64_t count, const Scalar& scalar, const Vector& vector,
                            Float (&sum)[kRows][kColumns]) {
  for (std::int64_t n = 0; n < count; ++n) {
    Float factor[kColumns];
    unroll<kColumns>([&](auto column) XMLC_INLINE_LAMBDA { factor[column] = vector(n, column); });
    unroll<kRows>([&](auto row) XMLC_INLINE_LAMBDA {
      const Float same(scalar(row, n));
      unroll<kColumns>([&](auto column) XMLC_INLINE_LAMBDA {
        sum[row][column] = sum[row][column] + same * factor[column];
      });
    });
  }
}

// Copies the rows of a group's inputs of one tile to `packed` [padded_fan_in, width]; padding rows are zero.
template <int kVectors, class Index>
XMLC_OUTLINE void pack_rows(const float* features, const Index* indices, std::int64_t fan_in, float* packed) {
  std::int64_t k = 0;
  for (; k < fan_in; ++k) {
    const float* row = features + static_cast<std::int64_t>(indices[k]) * kVectors * kLanes;
    unroll<kVectors>([&](auto v) XMLC_INLINE_LAMBDA {
      store(packed + (k * kVectors + v) * kLanes, load(row + v * kLanes));
    });
  }
  for (; k % kLanes != 0; ++k)
    unroll<kVectors>([&](auto v)
                         XMLC_INLINE_LAMBDA { store(packed + (k * kVectors + v) * kLanes, Float(0.0f)); });
}

// logit[r] += weight[r] . packed
template <int kVectors>
XMLC_OUTLINE void gather_shared(const float* packed, std::int64_t fan_in, const float* weight,
                                Float (&logit)[kShared][kVectors]) {
  constexpr int kColumns = columns_of(kVectors), kRows = kBlock / kColumns;
  for (int v = 0; v < kVectors; v += kColumns)
    for (int r = 0; r < kShared; r += kRows) {
      Float sum[kRows][kColumns];
      unroll<kRows, kColumns>([&](auto i, auto j) XMLC_INLINE_LAMBDA { sum[i][j] = logit[r + i][v + j]; });
      accumulate(
          fan_in, [&](auto i, std::int64_t k) XMLC_INLINE_LAMBDA { return weight[(r + i) * fan_in + k]; },
          [&](std::int64_t k, auto j)
              XMLC_INLINE_LAMBDA { return load(packed + (k * kVectors + v + j) * kLanes); },
          sum);
      unroll<kRows, kColumns>([&](auto i, auto j) XMLC_INLINE_LAMBDA { logit[r + i][v + j] = sum[i][j]; });
    }
}

// Some of the sixteen labels.
struct LabelList {
  int count = 0;
  int label[kShared];

  XMLC_INLINE void add(int r) { label[count++] = r; }
};

// sums[k] = sum_r weight[r][k] * logit_gradient[r] over some labels r, for kRows connections from `first` on.
template <int kRows, int kVectors>
XMLC_INLINE void scatter_block(std::int64_t fan_in, std::int64_t first, const float* weight,
                               const Float (&logit_gradient)[kShared][kVectors], const LabelList& some,
                               float* sums) {
  constexpr int kColumns = columns_of(kVectors);
  for (int v = 0; v < kVectors; v += kColumns) {
    Float sum[kRows][kColumns];
    unroll<kRows, kColumns>([&](auto i, auto j) XMLC_INLINE_LAMBDA { sum[i][j] = Float(0.0f); });
    accumulate(
        some.count,
        [&](auto i, std::int64_t n) XMLC_INLINE_LAMBDA { return weight[some.label[n] * fan_in + first + i]; },
        [&](std::int64_t n, auto j) XMLC_INLINE_LAMBDA { return logit_gradient[some.label[n]][v + j]; }, sum);
    unroll<kRows, kColumns>([&](auto i, auto j) XMLC_INLINE_LAMBDA {
      store(sums + ((first + i) * kVectors + v + j) * kLanes, sum[i][j]);
    });
  }
}

// gradient[indices] += weight^T logit_gradient of some labels, by way of `sums` [padded_fan_in, width].
template <int kVectors, class Index>
XMLC_OUTLINE void scatter_shared(float* gradient, const Index* indices, std::int64_t fan_in,
                                 const float* weight, const Float (&logit_gradient)[kShared][kVectors],
                                 const LabelList& some, float* sums) {
  constexpr int kRows = kBlock / columns_of(kVectors);
  std::int64_t k = 0;
  for (; k + kRows <= fan_in; k += kRows) scatter_block<kRows>(fan_in, k, weight, logit_gradient, some, sums);
  for (; k < fan_in; ++k) scatter_block<1>(fan_in, k, weight, logit_gradient, some, sums);
  for (k = 0; k < fan_in; ++k) {
    float* row = gradient + static_cast<std::int64_t>(indices[k]) * kVectors * kLanes;
    unroll<kVectors>([&](auto v) XMLC_INLINE_LAMBDA {
      store(row + v * kLanes, load(row + v * kLanes) + load(sums + (k * kVectors + v) * kLanes));
    });
  }
}

// to[labels[i]] (=, or += if kAdd) gradient[i] . transposed, for kRows labels; rows are `stride` apart.
template <bool kAdd, int kRows, int kRuns, int kWidth>
XMLC_INLINE void dot_block(const float (&transposed)[kWidth][kRuns * kLanes], const float (*gradient)[kWidth],
                           const int* labels, float* to, std::int64_t stride) {
  constexpr int kColumns = columns_of(kRuns);
  for (int c = 0; c < kRuns; c += kColumns) {
    Float sum[kRows][kColumns];
    unroll<kRows, kColumns>([&](auto i, auto j) XMLC_INLINE_LAMBDA {
      sum[i][j] = kAdd ? load(to + labels[i] * stride + (c + j) * kLanes) : Float(0.0f);
    });
    accumulate(
        kWidth, [&](auto i, std::int64_t b) XMLC_INLINE_LAMBDA { return gradient[i][b]; },
        [&](std::int64_t b, auto j) XMLC_INLINE_LAMBDA { return load(transposed[b] + (c + j) * kLanes); },
        sum);
    unroll<kRows, kColumns>([&](auto i, auto j) XMLC_INLINE_LAMBDA {
      store(to + labels[i] * stride + (c + j) * kLanes, sum[i][j]);
    });
  }
}

// weight_gradient[r][k] (=, or += if kAdd) logit_gradient[r] . packed[k] of some labels and kRuns * 16
// connections. With the packed rows transposed, connections are lanes and instances are summed one after the
// other.
template <bool kAdd, int kRuns, int kVectors>
XMLC_OUTLINE void dot_shared(const float* packed, const Float (&logit_gradient)[kShared][kVectors],
                             const LabelList& some, float* weight_gradient, std::int64_t stride) {
  constexpr int kWidth = kVectors * kLanes;
  float transposed[kWidth][kRuns * kLanes];  // [instance, connection]
  for (int v = 0; v < kVectors; ++v)
    for (int c = 0; c < kRuns; ++c) {
      Float row[kLanes];
      unroll<kLanes>([&](auto j) XMLC_INLINE_LAMBDA {
        row[j] = load(packed + ((c * kLanes + j) * kVectors + v) * kLanes);
      });
      transpose(row);
      unroll<kLanes>([&](auto i)
                         XMLC_INLINE_LAMBDA { store(transposed[v * kLanes + i] + c * kLanes, row[i]); });
    }
  float gradient[kShared][kWidth];
  for (int n = 0; n < some.count; ++n)
    for (int v = 0; v < kVectors; ++v) store(gradient[n] + v * kLanes, logit_gradient[some.label[n]][v]);
  constexpr int kRows = kBlock / columns_of(kRuns);
  int n = 0;
  for (; n + kRows <= some.count; n += kRows)
    dot_block<kAdd, kRows, kRuns>(transposed, gradient + n, some.label + n, weight_gradient, stride);
  for (; n < some.count; ++n)
    dot_block<kAdd, 1, kRuns>(transposed, gradient + n, some.label + n, weight_gradient, stride);
}

}  // namespace
}  // namespace xmlc::cpu::XMLC_ISA
