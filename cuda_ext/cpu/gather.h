// The three products of a few labels that share their inputs, over one tile of the batch: gather (logits),
// scatter (feature gradient) and dot (weight gradient). kLabels = 1 for uniform fan-in, 4 within a group;
// kVectors * 16 = width of the tile.
//
// All names are in an unnamed namespace: nothing compiled for one instruction set is visible outside.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace xmlc::cpu::XMLC_ISA {
namespace {

// Weights of kLabels labels as float32 [kLabels, stride]: in place, or widened into `rows`.
template <int kLabels>
XMLC_INLINE const float* weight_rows(const float* weight, std::int64_t fan_in, float*, std::int64_t& stride) {
  stride = fan_in;
  return weight;
}
template <int kLabels>
XMLC_INLINE const float* weight_rows(const BFloat16* weight, std::int64_t fan_in, float* rows,
                                     std::int64_t& stride) {
  const auto* bits = reinterpret_cast<const std::uint16_t*>(weight);
  const std::int64_t flat = kLabels * fan_in;
  std::int64_t i = 0;
  for (; i + kLanes <= flat; i += kLanes) store(rows + i, widen(bits + i));
  for (; i < flat; ++i) rows[i] = widen(weight[i]);
  stride = fan_in;
  return rows;
}

// sum[r][v] += weight[r] . features[indices]
template <int kLabels, int kVectors, class Index>
XMLC_INLINE void gather(const float* features, const Index* indices, std::int64_t fan_in, const float* weight,
                        std::int64_t stride, Float (&sum)[kLabels][kVectors]) {
  // Several independent chains of additions hide the latency of one.
  constexpr int kChains = kLabels * kVectors >= 4 ? 1 : 4 / (kLabels * kVectors);
  constexpr std::int64_t kTile = kVectors * kLanes;
  Float chain[kChains][kLabels][kVectors];
  for (int c = 0; c < kChains; ++c)
    for (int r = 0; r < kLabels; ++r)
      for (int v = 0; v < kVectors; ++v) chain[c][r][v] = c == 0 ? sum[r][v] : Float(0.0f);
  std::int64_t k = 0;
  for (; k + kChains <= fan_in; k += kChains)
    for (int c = 0; c < kChains; ++c) {
      const float* row = features + static_cast<std::int64_t>(indices[k + c]) * kTile;
      for (int v = 0; v < kVectors; ++v) {
        const Float x = load(row + v * kLanes);
        for (int r = 0; r < kLabels; ++r)
          chain[c][r][v] = chain[c][r][v] + Float(weight[r * stride + k + c]) * x;
      }
    }
  for (; k < fan_in; ++k) {
    const float* row = features + static_cast<std::int64_t>(indices[k]) * kTile;
    for (int v = 0; v < kVectors; ++v) {
      const Float x = load(row + v * kLanes);
      for (int r = 0; r < kLabels; ++r) chain[0][r][v] = chain[0][r][v] + Float(weight[r * stride + k]) * x;
    }
  }
  for (int r = 0; r < kLabels; ++r)
    for (int v = 0; v < kVectors; ++v) {
      Float total = chain[0][r][v];
      for (int c = 1; c < kChains; ++c) total = total + chain[c][r][v];
      sum[r][v] = total;
    }
}

// gradient[indices] += weight^T logit_gradient. An input occurs once in a group, so rows never alias.
template <int kLabels, int kVectors, class Index>
XMLC_INLINE void scatter(float* gradient, const Index* indices, std::int64_t fan_in, const float* weight,
                         std::int64_t stride, const Float (&logit_gradient)[kLabels][kVectors]) {
  constexpr std::int64_t kTile = kVectors * kLanes;
  for (std::int64_t k = 0; k < fan_in; ++k) {
    float* row = gradient + static_cast<std::int64_t>(indices[k]) * kTile;
    for (int v = 0; v < kVectors; ++v) {
      Float total = load(row + v * kLanes);
      for (int r = 0; r < kLabels; ++r) total = total + Float(weight[r * stride + k]) * logit_gradient[r][v];
      store(row + v * kLanes, total);
    }
  }
}

// weight_gradient[r][k] (=, or += if kAdd) logit_gradient[r] . features[indices[k]];
// rows of weight_gradient are padded to whole lanes.
template <int kLabels, int kVectors, bool kAdd, class Index>
XMLC_INLINE void dot(const float* features, const Index* indices, std::int64_t fan_in,
                     const Float (&logit_gradient)[kLabels][kVectors], float* weight_gradient,
                     std::int64_t stride) {
  constexpr std::int64_t kTile = kVectors * kLanes;
  for (std::int64_t k = 0; k < fan_in; k += kLanes) {
    const Index* run = indices + k;
    Index padded[kLanes];
    if (k + kLanes > fan_in) {  // the last connection again; its sums fall into the padding
      for (int j = 0; j < kLanes; ++j) padded[j] = indices[k + j < fan_in ? k + j : fan_in - 1];
      run = padded;
    }
    for (int r = 0; r < kLabels; ++r) {
      Float product[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        const float* row = features + static_cast<std::int64_t>(run[j]) * kTile;
        product[j] = logit_gradient[r][0] * load(row);
        for (int v = 1; v < kVectors; ++v)
          product[j] = product[j] + logit_gradient[r][v] * load(row + v * kLanes);
      }
      Float total = sum_each(product);
      float* to = weight_gradient + r * stride + k;
      if (kAdd) total = total + load(to);
      store(to, total);
    }
  }
}

// Calls body for the labels of `range` in runs of four with shared inputs, or one at a time.
// `body.run<kLabels>(group, label)`.
template <class Body>
XMLC_INLINE void for_labels(const Layer& layer, GroupRange range, Body&& body) {
  for (std::int64_t group = range.first; group < range.last; ++group) {
    std::int64_t label = group * layer.group_size;
    const std::int64_t next = label + layer.group_size;
    const std::int64_t end = next < layer.label ? next : layer.label;
    for (; label + 4 <= end; label += 4) body.template run<4>(group, label);
    for (; label < end; ++label) body.template run<1>(group, label);
  }
}

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
template <class T>
struct Type {
  using type = T;
};

// Calls visit(Constant<kVectors>, Type<Index>, Type<Weight>) for the types that the layer holds.
template <class Visit>
XMLC_INLINE void with_types(const Layer& layer, std::int64_t width, const Visit& visit) {
  const auto with_index = [&](auto vectors, auto weight) {
    if (layer.index_type == IndexType::kUInt16)
      visit(vectors, Type<std::uint16_t>{}, weight);
    else
      visit(vectors, Type<std::int32_t>{}, weight);
  };
  const auto with_weight = [&](auto vectors) {
    if (layer.weight_type == WeightType::kFloat32)
      with_index(vectors, Type<float>{});
    else
      with_index(vectors, Type<BFloat16>{});
  };
  if (width == 16)
    with_weight(Constant<1>{});
  else if (width == 32)
    with_weight(Constant<2>{});
  else
    with_weight(Constant<4>{});
}

}  // namespace
}  // namespace xmlc::cpu::XMLC_ISA
