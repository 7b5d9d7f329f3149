// The three products of one label, or of sixteen that share their inputs, over one tile of the batch: gather
// (logits), scatter (feature gradient) and dot (weight gradient). kVectors * 16 = width of the tile.
//
// All names are in an unnamed namespace: nothing compiled for one instruction set is visible outside. The
// products are functions of their own, and the types of weights and indices are looked up in front of them: a
// branch and a call are nothing beside their work, and each pass is compiled for widths of the tile alone.
#pragma once

#include "kernels.h"
#include "shared_inputs.h"
#include "simd.h"

namespace xmlc::cpu::XMLC_ISA {
namespace {

// Float8 weights of labels that share a scale, as float32.
template <class Format>
XMLC_OUTLINE void widen_codes(const std::uint8_t* codes, std::int64_t count, float scale, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store(to + i, widen_float8<Format>(load_bytes(codes + i)) * Float(scale));
  for (; i < count; ++i) to[i] = widen_float8<Format>(std::uint32_t{codes[i]}) * scale;
}
XMLC_INLINE void widen_codes(const Layer& layer, std::int64_t label, std::int64_t count, float* to) {
  const auto* codes = static_cast<const std::uint8_t*>(layer.weight) + label * layer.fan_in;
  const float scale = layer.weight_scale[label / Layer::kScaleLabels];
  if (layer.weight_type == WeightType::kFloat8E4M3)
    widen_codes<Float8E4M3>(codes, count, scale, to);
  else
    widen_codes<Float8E5M2>(codes, count, scale, to);
}

// Weights of kLabels labels as float32 [kLabels, fan_in]: in place, or widened into `rows`.
template <int kLabels>
XMLC_INLINE const float* weight_rows(const Layer& layer, std::int64_t label, float* rows) {
  if (layer.weight_type == WeightType::kFloat32)
    return static_cast<const float*>(layer.weight) + label * layer.fan_in;
  if (is_float8(layer.weight_type)) {
    widen_codes(layer, label, kLabels * layer.fan_in, rows);
    return rows;
  }
  const auto* bits = static_cast<const std::uint16_t*>(layer.weight) + label * layer.fan_in;
  const std::int64_t flat = kLabels * layer.fan_in;
  std::int64_t i = 0;
  for (; i + kLanes <= flat; i += kLanes) store(rows + i, widen(bits + i));
  for (; i < flat; ++i) rows[i] = widen(BFloat16{bits[i]});
  return rows;
}

XMLC_INLINE float* packed_rows(const Layer& layer, float* rows) {
  return rows + kShared * ((layer.fan_in + kLanes - 1) / kLanes * kLanes);
}

// Calls visit(inputs of the group) with the type of index that the layer holds.
template <class Visit>
XMLC_INLINE void with_indices(const Layer& layer, std::int64_t group, const Visit& visit) {
  if (layer.index_type == IndexType::kUInt16)
    visit(static_cast<const std::uint16_t*>(layer.indices) + group * layer.fan_in);
  else
    visit(static_cast<const std::int32_t*>(layer.indices) + group * layer.fan_in);
}

// Asks for the rows of a label's inputs, which lie in the second-level cache at random places.
template <int kVectors>
XMLC_INLINE void prefetch_rows(const Layer& layer, std::int64_t group, const float* rows) {
  with_indices(layer, group, [&](const auto* indices) XMLC_INLINE_LAMBDA {
    for (std::int64_t k = 0; k < layer.fan_in; ++k)
      prefetch<kVectors>(rows + static_cast<std::int64_t>(indices[k]) * kVectors * kLanes);
  });
}

// Independent chains of additions that hide the latency of one, for `values` sums in registers.
constexpr int chains_for(int values) { return values >= 4 ? 1 : at_once(4 / values, values * kParts); }

// sum += weight . features[indices] of one label, for the vectors from kFirst on that fit the registers.
template <int kVectors, int kFirst = 0, class Index>
XMLC_OUTLINE void gather_rows(const float* features, const Index* indices, std::int64_t fan_in,
                              const float* weight, Float (&sum)[kVectors]) {
  constexpr int kCount = at_once(kVectors, kParts);
  constexpr int kChains = chains_for(kCount);
  Float chain[kChains][kCount];
  unroll<kCount>([&](auto v) XMLC_INLINE_LAMBDA {
    chain[0][v] = sum[kFirst + v];
    unroll<kChains - 1>([&](auto c) XMLC_INLINE_LAMBDA { chain[c + 1][v] = Float(0.0f); });
  });
  const auto add = [&](std::int64_t k, auto c) XMLC_INLINE_LAMBDA {
    const float* row = features + (static_cast<std::int64_t>(indices[k]) * kVectors + kFirst) * kLanes;
    unroll<kCount>([&](auto v) XMLC_INLINE_LAMBDA {
      chain[c][v] = chain[c][v] + Float(weight[k]) * load(row + v * kLanes);
    });
  };
  std::int64_t k = 0;
  for (; k + kChains <= fan_in; k += kChains)
    unroll<kChains>([&](auto c) XMLC_INLINE_LAMBDA { add(k + c, c); });
  for (; k < fan_in; ++k) add(k, Constant<0>{});
  unroll<kCount>([&](auto v) XMLC_INLINE_LAMBDA {
    Float total = chain[0][v];
    unroll<kChains - 1>([&](auto c) XMLC_INLINE_LAMBDA { total = total + chain[c + 1][v]; });
    sum[kFirst + v] = total;
  });
  if constexpr (kFirst + kCount < kVectors)
    gather_rows<kVectors, kFirst + kCount>(features, indices, fan_in, weight, sum);
}

// bias + weight . features[indices] for one instance, added in the order of `gather_rows` with as many
// chains.
template <int kChains, class Index>
XMLC_INLINE float gather_one(const float* features, const Index* indices, std::int64_t fan_in,
                             const float* weight, float bias) {
  float chain[kChains] = {bias};
  std::int64_t k = 0;
  for (; k + kChains <= fan_in; k += kChains)
    unroll<kChains>([&](auto c) XMLC_INLINE_LAMBDA {
      chain[c] = multiply_add(weight[k + c], features[indices[k + c]], chain[c]);
    });
  for (; k < fan_in; ++k) chain[0] = multiply_add(weight[k], features[indices[k]], chain[0]);
  float total = chain[0];
  for (int c = 1; c < kChains; ++c) total += chain[c];
  return total;
}

// gradient[indices] += weight^T logit_gradient of one label.
template <int kVectors, class Index>
XMLC_OUTLINE void scatter_rows(float* gradient, const Index* indices, std::int64_t fan_in,
                               const float* weight, const Float (&logit_gradient)[kVectors]) {
  for (std::int64_t k = 0; k < fan_in; ++k) {
    float* row = gradient + static_cast<std::int64_t>(indices[k]) * kVectors * kLanes;
    unroll<kVectors>([&](auto v) XMLC_INLINE_LAMBDA {
      store(row + v * kLanes, load(row + v * kLanes) + Float(weight[k]) * logit_gradient[v]);
    });
  }
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

// The logits of the labels: from the block's, where strips have gathered them, else from weights and
// features of one tile, whose rows stay packed in `rows` for sixteen labels. Returns the weights as float32
// rows, or null where they were not needed. By strips, labels come one at a time and tiles are sixteen wide.
template <int kLabels, int kVectors>
XMLC_INLINE const float* gather(const Layer& layer, std::int64_t group, std::int64_t label,
                                const float* features, float* rows, const float* block,
                                std::int64_t first_label, Float (&logit)[kLabels][kVectors]) {
  if (kLabels * kVectors == 1 && block != nullptr) {
    logit[0][0] = load(block + (label - first_label) * kLanes);
    return nullptr;
  }
  for (int r = 0; r < kLabels; ++r)
    for (int v = 0; v < kVectors; ++v) logit[r][v] = Float(layer.bias[label + r]);
  const float* weight = weight_rows<kLabels>(layer, label, rows);
  with_indices(layer, group, [&](const auto* indices) XMLC_INLINE_LAMBDA {
    if constexpr (kLabels == 1) {
      gather_rows(features, indices, layer.fan_in, weight, logit[0]);
    } else {
      float* packed = packed_rows(layer, rows);
      pack_rows<kVectors>(features, indices, layer.fan_in, packed);
      gather_shared(packed, layer.fan_in, weight, logit);
    }
  });
  return weight;
}

// Packs the rows of a group's inputs of one tile.
template <int kVectors>
XMLC_INLINE void pack(const Layer& layer, std::int64_t group, const float* features, float* rows) {
  with_indices(layer, group, [&](const auto* indices) XMLC_INLINE_LAMBDA {
    pack_rows<kVectors>(features, indices, layer.fan_in, packed_rows(layer, rows));
  });
}

// The feature gradient of one label, or of some of sixteen.
template <int kLabels, int kVectors>
XMLC_INLINE void scatter(const Layer& layer, std::int64_t group, float* gradient, const float* weight,
                         const Float (&logit_gradient)[kLabels][kVectors], const LabelList& some,
                         float* rows) {
  with_indices(layer, group, [&](const auto* indices) XMLC_INLINE_LAMBDA {
    if constexpr (kLabels == 1)
      scatter_rows(gradient, indices, layer.fan_in, weight, logit_gradient[0]);
    else
      scatter_shared(gradient, indices, layer.fan_in, weight, logit_gradient, some, packed_rows(layer, rows));
  });
}

// weight_gradient[k] (=, or += if kAdd) logit_gradient . features[indices[k]] of one label; padded to whole
// lanes.
template <bool kAdd, int kVectors>
XMLC_INLINE void dot(const Layer& layer, std::int64_t group, const float* features,
                     const Float (&logit_gradient)[kVectors], float* weight_gradient) {
  with_indices(layer, group, [&](const auto* indices) XMLC_INLINE_LAMBDA {
    for (std::int64_t k = 0; k < layer.fan_in; k += kLanes) {
      const auto* run = indices + k;
      std::decay_t<decltype(*run)> padded[kLanes];
      if (k + kLanes > layer.fan_in) {  // the last connection again; its sums fall into the padding
        for (int j = 0; j < kLanes; ++j) padded[j] = indices[k + j < layer.fan_in ? k + j : layer.fan_in - 1];
        run = padded;
      }
      Float total = dot_run(features, run, logit_gradient);
      if (kAdd) total = total + load(weight_gradient + k);
      store(weight_gradient + k, total);
    }
  });
}

// The same of some of sixteen labels, from the packed rows of their inputs; rows of weight_gradient are
// `stride` apart.
template <bool kAdd, int kVectors>
XMLC_INLINE void dot(const Layer& layer, float* rows, const Float (&logit_gradient)[kShared][kVectors],
                     const LabelList& some, float* weight_gradient, std::int64_t stride) {
  const std::int64_t fan_in = layer.fan_in;
  const float* packed = packed_rows(layer, rows);
  std::int64_t k = 0;
  for (; k + kLanes < fan_in; k += 2 * kLanes)
    dot_shared<kAdd, 2>(packed + k * kVectors * kLanes, logit_gradient, some, weight_gradient + k, stride);
  if (k < fan_in)
    dot_shared<kAdd, 1>(packed + k * kVectors * kLanes, logit_gradient, some, weight_gradient + k, stride);
}

XMLC_INLINE const Connection* connections(const Strips& s, std::int64_t run, std::int64_t strip) {
  return s.connections + run * s.stride + s.first[run * (s.strips + 1) + strip];
}

// Asks for the rows of the strip behind the present one, spread over the connections of the present one: its
// first touches would come in random order, which no hardware foresees.
class NextStrip {
 public:
  NextStrip(const Strips& strips, std::int64_t strip, const float* rows)
      : next_(rows + Strips::kInputs * kLanes) {
    std::int64_t chunks = 0;
    for (std::int64_t run = 0; run < Strips::kRuns; ++run)
      chunks += (connections(strips, run, strip + 1) - connections(strips, run, strip)) / kLanes;
    const std::int64_t inputs = strip + 1 < strips.strips ? Strips::kInputs : 0;
    end_ = next_ + inputs * kLanes;
    at_once_ = chunks == 0 ? 0 : (inputs + chunks - 1) / chunks;
  }
  // To be called once for every sixteen connections.
  XMLC_INLINE void prefetch() {
    for (std::int64_t i = 0; i < at_once_ && next_ < end_; ++i, next_ += kLanes)
      __builtin_prefetch(next_, 0, 2);
  }

 private:
  const float* next_;
  const float* end_;
  std::int64_t at_once_;
};

// Logits [label, 16] of a block of labels, and a row of no meaning behind them; features of one tile of
// sixteen.
XMLC_OUTLINE void gather_strips(const Layer& layer, GroupRange labels, const Strips& strips,
                                const float* features, float* logits) {
  for (std::int64_t label = labels.first; label < labels.last; ++label)
    store(logits + (label - labels.first) * kLanes, Float(layer.bias[label]));
  store(logits + strips.labels * kLanes, Float(0.0f));
  for (std::int64_t strip = 0; strip < strips.strips; ++strip, features += Strips::kInputs * kLanes) {
    NextStrip next(strips, strip, features);
    for (std::int64_t run = 0; run < Strips::kRuns; ++run) {
      const Connection* end = connections(strips, run, strip + 1);
      for (const Connection* c = connections(strips, run, strip); c < end; c += kLanes) {
        next.prefetch();
        unroll<kLanes>([&](auto j) XMLC_INLINE_LAMBDA {
          float* row = logits + c[j].label * kLanes;
          store(row, load(row) + Float(c[j].weight) * load(features + c[j].input * kLanes));
        });
      }
    }
  }
}

// Feature and weight gradients of all connections of a block, for logit gradients [label, 16] of one tile.
XMLC_OUTLINE void scatter_strips(const Strips& strips, const float* features, const float* logit_gradient,
                                 float* feature_gradient, float* weight_gradient) {
  for (std::int64_t strip = 0; strip < strips.strips; ++strip) {
    NextStrip next(strips, strip, features), next_gradient(strips, strip, feature_gradient);
    for (std::int64_t run = 0; run < Strips::kRuns; ++run) {
      const Connection* end = connections(strips, run, strip + 1);
      for (const Connection* c = connections(strips, run, strip); c < end; c += kLanes) {
        next.prefetch();
        next_gradient.prefetch();
        const Float sums = sum_each([&](auto j) XMLC_INLINE_LAMBDA {
          const Float gradient = load(logit_gradient + c[j].label * kLanes);
          float* row = feature_gradient + c[j].input * kLanes;
          store(row, load(row) + Float(c[j].weight) * gradient);
          return gradient * load(features + c[j].input * kLanes);
        });
        float lanes[kLanes];
        store(lanes, sums);
        for (int j = 0; j < kLanes; ++j) weight_gradient[c[j].slot] = lanes[j];
      }
    }
    features += Strips::kInputs * kLanes;
    feature_gradient += Strips::kInputs * kLanes;
  }
}

// Calls body for the labels of `range` in runs of sixteen with shared inputs, or one at a time.
// `body.run<kLabels>(group, label)`.
template <class Body>
XMLC_INLINE void for_labels(const Layer& layer, GroupRange range, Body&& body) {
  for (std::int64_t group = range.first; group < range.last; ++group) {
    std::int64_t label = group * layer.group_size;
    const std::int64_t next = label + layer.group_size;
    const std::int64_t end = next < layer.label ? next : layer.label;
    for (; label + kShared <= end; label += kShared) body.template run<kShared>(group, label);
    for (; label < end; ++label) body.template run<1>(group, label);
  }
}

// Calls visit(Constant<kVectors>) for tiles of this width.
template <class Visit>
XMLC_INLINE void with_width(std::int64_t width, const Visit& visit) {
  if (width == 16)
    visit(Constant<1>{});
  else if (width == 32)
    visit(Constant<2>{});
  else
    visit(Constant<4>{});
}

}  // namespace
}  // namespace xmlc::cpu::XMLC_ISA
