// The three products of a few labels that share their inputs, over one tile of the batch: gather (logits),
// scatter (feature gradient) and dot (weight gradient). kLabels = 1 for uniform fan-in, 4 within a group;
// kVectors * 16 = width of the tile.
//
// All names are in an unnamed namespace: nothing compiled for one instruction set is visible outside. The
// products are functions of their own, not inlined into each pass: a call is nothing beside their work, and
// the passes come in some hundred combinations of types.
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

// Asks for the rows of a label's inputs, which lie in the second-level cache at random places.
template <int kVectors, class Index>
XMLC_INLINE void prefetch_rows(const float* rows, const Index* indices, std::int64_t fan_in) {
  for (std::int64_t k = 0; k < fan_in; ++k)
    prefetch<kVectors>(rows + static_cast<std::int64_t>(indices[k]) * kVectors * kLanes);
}

// The largest power of two of registers, at most `wanted`, whose `parts` fit with a few to spare.
constexpr int at_once(int wanted, int parts) {
  while (wanted > 1 && wanted * parts > kRegisters - 4) wanted /= 2;
  return wanted;
}

// sum[r][v] += weight[r] . features[indices], for the vectors from kFirst on that fit the registers.
template <int kLabels, int kVectors, int kFirst = 0, class Index>
XMLC_OUTLINE void gather(const float* features, const Index* indices, std::int64_t fan_in,
                         const float* weight, std::int64_t stride, Float (&sum)[kLabels][kVectors]) {
  constexpr int kCount = at_once(kVectors, kLabels * kParts);
  // Several independent chains of additions hide the latency of one.
  constexpr int kChains =
      kLabels * kCount >= 4 ? 1 : at_once(4 / (kLabels * kCount), kLabels * kCount * kParts);
  constexpr std::int64_t kTile = kVectors * kLanes;
  Float chain[kChains][kLabels][kCount];
  unroll<kLabels, kCount>([&](auto r, auto v) XMLC_INLINE_LAMBDA {
    chain[0][r][v] = sum[r][kFirst + v];
    unroll<kChains - 1>([&](auto c) XMLC_INLINE_LAMBDA { chain[c + 1][r][v] = Float(0.0f); });
  });
  const auto add = [&](std::int64_t k, auto c) XMLC_INLINE_LAMBDA {
    const float* row = features + static_cast<std::int64_t>(indices[k]) * kTile + kFirst * kLanes;
    unroll<kCount>([&](auto v) XMLC_INLINE_LAMBDA {
      const Float x = load(row + v * kLanes);
      unroll<kLabels>([&](auto r) XMLC_INLINE_LAMBDA {
        chain[c][r][v] = chain[c][r][v] + Float(weight[r * stride + k]) * x;
      });
    });
  };
  std::int64_t k = 0;
  for (; k + kChains <= fan_in; k += kChains)
    unroll<kChains>([&](auto c) XMLC_INLINE_LAMBDA { add(k + c, c); });
  for (; k < fan_in; ++k) add(k, Constant<0>{});
  unroll<kLabels, kCount>([&](auto r, auto v) XMLC_INLINE_LAMBDA {
    Float total = chain[0][r][v];
    unroll<kChains - 1>([&](auto c) XMLC_INLINE_LAMBDA { total = total + chain[c + 1][r][v]; });
    sum[r][kFirst + v] = total;
  });
  if constexpr (kFirst + kCount < kVectors)
    gather<kLabels, kVectors, kFirst + kCount>(features, indices, fan_in, weight, stride, sum);
}

// gradient[indices] += weight^T logit_gradient. An input occurs once in a group, so rows never alias.
template <int kLabels, int kVectors, int kFirst = 0, class Index>
XMLC_OUTLINE void scatter(float* gradient, const Index* indices, std::int64_t fan_in, const float* weight,
                          std::int64_t stride, const Float (&logit_gradient)[kLabels][kVectors]) {
  constexpr int kCount = at_once(kVectors, kLabels * kParts);
  constexpr std::int64_t kTile = kVectors * kLanes;
  for (std::int64_t k = 0; k < fan_in; ++k) {
    float* row = gradient + static_cast<std::int64_t>(indices[k]) * kTile + kFirst * kLanes;
    unroll<kCount>([&](auto v) XMLC_INLINE_LAMBDA {
      Float total = load(row + v * kLanes);
      unroll<kLabels>([&](auto r) XMLC_INLINE_LAMBDA {
        total = total + Float(weight[r * stride + k]) * logit_gradient[r][kFirst + v];
      });
      store(row + v * kLanes, total);
    });
  }
  if constexpr (kFirst + kCount < kVectors)
    scatter<kLabels, kVectors, kFirst + kCount>(gradient, indices, fan_in, weight, stride, logit_gradient);
}

// One label's sums of sixteen connections: logit_gradient . features[run[j]] in lane j.
template <int kVectors, class Index>
XMLC_OUTLINE Float dot_run(const float* features, const Index* run, const Float (&logit_gradient)[kVectors]) {
  constexpr std::int64_t kTile = kVectors * kLanes;
  Float gradient[kVectors];
  unroll<kVectors>([&](auto v) XMLC_INLINE_LAMBDA { gradient[v] = logit_gradient[v]; });
  return sum_each([&](auto j) XMLC_INLINE_LAMBDA {
    const float* row = features + static_cast<std::int64_t>(run[j]) * kTile;
    Float product = gradient[0] * load(row);
    unroll<kVectors - 1>([&](auto v) XMLC_INLINE_LAMBDA {
      product = product + gradient[v + 1] * load(row + (v + 1) * kLanes);
    });
    return product;
  });
}

// weight_gradient[r][k] (=, or += if kAdd) logit_gradient[r] . features[indices[k]];
// rows of weight_gradient are padded to whole lanes.
template <int kLabels, int kVectors, bool kAdd, class Index>
XMLC_INLINE void dot(const float* features, const Index* indices, std::int64_t fan_in,
                     const Float (&logit_gradient)[kLabels][kVectors], float* weight_gradient,
                     std::int64_t stride) {
  for (std::int64_t k = 0; k < fan_in; k += kLanes) {
    const Index* run = indices + k;
    Index padded[kLanes];
    if (k + kLanes > fan_in) {  // the last connection again; its sums fall into the padding
      for (int j = 0; j < kLanes; ++j) padded[j] = indices[k + j < fan_in ? k + j : fan_in - 1];
      run = padded;
    }
    for (int r = 0; r < kLabels; ++r) {
      Float total = dot_run(features, run, logit_gradient[r]);
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
