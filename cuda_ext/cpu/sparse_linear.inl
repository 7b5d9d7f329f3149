// The unfused layer: logits, and the gradients of features and weights for given logit gradients.
// Logits are [label, batch]; a tile of them is a strip of columns.
#include "gather.h"

namespace xmlc::cpu::XMLC_ISA {
namespace {

// A strip of up to 64 columns of [label, batch], as lanes; columns beyond the batch read as zero.
template <int kVectors>
XMLC_INLINE void load_strip(const float* row, std::int64_t count, Float (&value)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t left = count - v * kLanes;
    value[v] = left >= kLanes ? load(row + v * kLanes)
               : left > 0     ? load_first(row + v * kLanes, left)
                              : Float(0.0f);
  }
}
template <int kVectors>
XMLC_INLINE void store_strip(float* row, std::int64_t count, const Float (&value)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t left = count - v * kLanes;
    if (left >= kLanes)
      store(row + v * kLanes, value[v]);
    else if (left > 0)
      store_first(row + v * kLanes, value[v], left);
  }
}

// What the three passes share: the layer, one tile, and the strip of logits that belongs to it.
template <int kVectors>
struct LinearTile {
  const SparseLinearArguments& arguments;
  std::int64_t first, count;  // columns of the tile
  float* rows;

  LinearTile(const SparseLinearArguments& a, const Tiling& tiling, float* scratch, std::int64_t tile)
      : arguments(a), first(tile * tiling.width), count(a.batch - first), rows(scratch) {
    if (count > tiling.width) count = tiling.width;
  }
  template <int kLabels>
  const float* weight(std::int64_t label) const {
    return weight_rows<kLabels>(arguments.layer, label, rows);
  }
  float* logits(std::int64_t label) const { return arguments.logits + label * arguments.batch + first; }
};

template <int kVectors>
struct LogitsPass {
  LinearTile<kVectors> tile;
  const float* features;
  const float* block;  // logits of the block, gathered by strips; null otherwise
  std::int64_t first_label;

  template <int kLabels>
  void run(std::int64_t group, std::int64_t label) const {
    Float logit[kLabels][kVectors];
    gather(tile.arguments.layer, group, label, features, tile.rows, block, first_label, logit);
    for (int r = 0; r < kLabels; ++r) store_strip(tile.logits(label + r), tile.count, logit[r]);
  }
};

template <int kVectors>
struct FeatureGradientPass {
  LinearTile<kVectors> tile;
  float* gradient;

  template <int kLabels>
  void run(std::int64_t group, std::int64_t label) const {
    const float* weight = tile.template weight<kLabels>(label);
    Float logit_gradient[kLabels][kVectors];
    LabelList all;
    for (int r = 0; r < kLabels; ++r) {
      load_strip(tile.logits(label + r), tile.count, logit_gradient[r]);
      all.add(r);
    }
    scatter(tile.arguments.layer, group, gradient, weight, logit_gradient, all, tile.rows);
  }
};

// Sums over all tiles into a padded row of scratch, then copies the row.
template <int kVectors>
struct WeightGradientPass {
  const SparseLinearArguments& arguments;
  const Tiling& tiling;
  const float* features;
  float* row;

  template <int kLabels>
  void run(std::int64_t group, std::int64_t label) const {
    const std::int64_t fan_in = arguments.layer.fan_in;
    const std::int64_t padded = (fan_in + kLanes - 1) / kLanes * kLanes;
    for (std::int64_t i = 0; i < kLabels * padded; i += kLanes) store(row + i, Float(0.0f));
    for (std::int64_t tile = 0; tile < tiling.tiles; ++tile) {
      const LinearTile<kVectors> at(arguments, tiling, nullptr, tile);
      Float logit_gradient[kLabels][kVectors];
      LabelList all;
      for (int r = 0; r < kLabels; ++r) {
        load_strip(at.logits(label + r), at.count, logit_gradient[r]);
        all.add(r);
      }
      const float* rows = features + tile * tiling.input * tiling.width;
      if constexpr (kLabels == 1) {
        dot<true>(arguments.layer, group, rows, logit_gradient[0], row);
      } else {
        pack<kVectors>(arguments.layer, group, rows, row);
        dot<true>(arguments.layer, row, logit_gradient, all, row, padded);
      }
    }
    for (int r = 0; r < kLabels; ++r)
      std::memcpy(arguments.weight_gradient + (label + r) * fan_in, row + r * padded, fan_in * sizeof(float));
  }
};

void logits(const SparseLinearArguments& a, const LogitsScratch& s, GroupRange range, std::int64_t tile) {
  const float* features = s.features + tile * s.tiling.input * s.tiling.width;
  if (s.logits != nullptr) gather_strips(a.layer, range, s.strips, features, s.logits);
  with_width(s.tiling.width, [&](auto vectors) {
    using Pass = LogitsPass<vectors.value>;
    for_labels(a.layer, range,
               Pass{{a, s.tiling, s.rows, tile}, features, s.logits, range.first * a.layer.group_size});
  });
}

void feature_gradient(const SparseLinearArguments& a, const Tiling& tiling, float* gradient, float* rows,
                      GroupRange range, std::int64_t tile) {
  with_width(tiling.width, [&](auto vectors) {
    using Pass = FeatureGradientPass<vectors.value>;
    for_labels(a.layer, range, Pass{{a, tiling, rows, tile}, gradient + tile * tiling.input * tiling.width});
  });
}

void weight_gradient(const SparseLinearArguments& a, const Tiling& tiling, const float* features, float* row,
                     GroupRange range) {
  with_width(tiling.width, [&](auto vectors) {
    using Pass = WeightGradientPass<vectors.value>;
    for_labels(a.layer, range, Pass{a, tiling, features, row});
  });
}

}  // namespace
}  // namespace xmlc::cpu::XMLC_ISA
