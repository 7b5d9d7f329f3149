// One training step of the output layer in one pass over blocks of labels.
//
// For a block and a tile of the batch: logits by gather, loss and logit gradient, then (only where some
// gradient is not exactly zero) scatter into the feature gradient and dot into the tile's own weight
// gradient. When all tiles have passed, the block's weights are updated. The rows that the gather brought
// in are still in the first-level cache when scatter and dot need them.
#include "gather.h"
#include "xmlc/rounding.h"

namespace xmlc::cpu::XMLC_ISA {
namespace {

template <int kVectors, class Index, class Weight, class LossFunction>
struct FusedTilePass {
  const FusedStepArguments& a;
  const FusedScratch& scratch;
  float* rows;
  std::int64_t tile, first_instance, first_label;  // first label of the block
  const std::int32_t* pair;                        // next pair of the block
  const std::int32_t* pair_end;
  Float scale[kVectors] = {};  // the factor on loss and gradient; zero beyond the batch
  Float loss = Float(0.0f);
  double loss_sum = 0.0;

  // Targets +-1 and weights of the positives of one label; false if it has none in this tile.
  // Labels come in rising order, so the pairs are read once, like a merge.
  bool read_positives(std::int64_t label, float (&target)[kVectors * kLanes]) {
    while (pair < pair_end && *pair < label) ++pair;
    bool found = false;
    for (const std::int32_t* at = pair; at < pair_end && *at == label; ++at) {
      const std::int64_t lane = a.pair_instance[at - a.pair_label] - first_instance;
      if (lane < 0 || lane >= kVectors * kLanes) continue;
      if (!found)
        for (float& t : target) t = -1.0f;
      found = true;
      target[lane] = 1.0f;
    }
    return found;
  }

  // Loss and scaled gradient of one label's logits.
  void evaluate(std::int64_t label, const Float (&logit)[kVectors], Float (&gradient)[kVectors]) {
    float targets[kVectors * kLanes];
    if (read_positives(label, targets)) {
      const float weight = a.positive_weight == nullptr ? 1.0f : a.positive_weight[label];
      for (int v = 0; v < kVectors; ++v) {
        const Float target = load(targets + v * kLanes);
        const auto value = LossFunction::evaluate(logit[v], target);
        const Float factor = select(Float(0.0f) < target, scale[v] * Float(weight), scale[v]);
        gradient[v] = factor * value.grad;
        loss = loss + factor * value.loss;
      }
    } else {
      for (int v = 0; v < kVectors; ++v) {
        const auto value = LossFunction::evaluate(logit[v], Float(-1.0f));
        gradient[v] = scale[v] * value.grad;
        loss = loss + scale[v] * value.loss;
      }
    }
  }

  template <int kLabels>
  void run(std::int64_t group, std::int64_t label) {
    const Layer& layer = a.layer;
    const Index* indices = static_cast<const Index*>(layer.indices) + group * layer.fan_in;
    std::int64_t stride;
    const float* weight = weight_rows<kLabels>(
        static_cast<const Weight*>(layer.weight) + label * layer.fan_in, layer.fan_in, rows, stride);
    const std::int64_t tile_floats = scratch.tiling.input * scratch.tiling.width;
    const float* features = scratch.features + tile * tile_floats;

    Float logit[kLabels][kVectors];
    for (int r = 0; r < kLabels; ++r)
      for (int v = 0; v < kVectors; ++v) logit[r][v] = Float(layer.bias[label + r]);
    gather(features, indices, layer.fan_in, weight, stride, logit);

    Float gradient[kLabels][kVectors];
    Float bias_gradient[kLabels];
    bool active = false;
    for (int r = 0; r < kLabels; ++r) {
      evaluate(label + r, logit[r], gradient[r]);
      for (int v = 0; v < kVectors; ++v) active |= any_nonzero(gradient[r][v]);
      bias_gradient[r] = gradient[r][0];
      for (int v = 1; v < kVectors; ++v) bias_gradient[r] = bias_gradient[r] + gradient[r][v];
    }
    const std::int64_t slot = tile * scratch.block_labels + label - first_label;
    for (int r = 0; r < kLabels; ++r) scratch.active[slot + r] = active;
    if (!active) return;

    for (int r = 0; r < kLabels; ++r) scratch.bias_gradient[slot + r] = sum_lanes(bias_gradient[r]);
    dot<kLabels, kVectors, false>(features, indices, layer.fan_in, gradient,
                                  scratch.weight_gradient + slot * scratch.padded_fan_in,
                                  scratch.padded_fan_in);
    scatter(scratch.feature_gradient + tile * tile_floats, indices, layer.fan_in, weight, stride, gradient);
  }
};

template <int kVectors, class Index, class Weight, class LossFunction>
void fused_tile_of(const FusedStepArguments& a, const FusedScratch& scratch, float* rows, GroupRange block,
                   std::int64_t tile) {
  const std::int64_t first_label = block.first * a.layer.group_size;
  // Binary search for the block's first pair.
  std::int64_t low = 0, high = a.pair;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (a.pair_label[middle] < first_label)
      low = middle + 1;
    else
      high = middle;
  }
  FusedTilePass<kVectors, Index, Weight, LossFunction> pass{a,
                                                            scratch,
                                                            rows,
                                                            tile,
                                                            tile * scratch.tiling.width,
                                                            first_label,
                                                            a.pair_label + low,
                                                            a.pair_label + a.pair};
  for (int v = 0; v < kVectors; ++v) {
    float factor[kLanes];
    for (int i = 0; i < kLanes; ++i)
      factor[i] = pass.first_instance + v * kLanes + i < a.batch ? a.scale : 0.0f;
    pass.scale[v] = load(factor);
  }
  // Lanes add up in float32 over a few labels only, then in float64.
  const std::int64_t groups_at_once = a.layer.group_size == 1 ? 64 : 1;
  for (std::int64_t group = block.first; group < block.last; group += groups_at_once) {
    const std::int64_t end = group + groups_at_once;
    pass.loss = Float(0.0f);
    for_labels(a.layer, {group, end < block.last ? end : block.last}, pass);
    pass.loss_sum += static_cast<double>(sum_lanes(pass.loss));
  }
  scratch.loss[tile] += pass.loss_sum;
}

void fused_tile(const FusedStepArguments& a, const FusedScratch& scratch, float* rows, GroupRange block,
                std::int64_t tile) {
  with_types(a.layer, scratch.tiling.width, [&](auto vectors, auto index, auto weight) {
    using Index = typename decltype(index)::type;
    using Weight = typename decltype(weight)::type;
    constexpr int kVectors = decltype(vectors)::value;
    if (a.loss == Loss::kSquaredHinge)
      fused_tile_of<kVectors, Index, Weight, SquaredHinge>(a, scratch, rows, block, tile);
    else
      fused_tile_of<kVectors, Index, Weight, Bce>(a, scratch, rows, block, tile);
  });
}

// Sixteen (or the first `count`) weights of a row.
XMLC_INLINE Float load_weights(const float* from, std::int64_t count) {
  return count >= kLanes ? load(from) : load_first(from, count);
}
XMLC_INLINE Float load_weights(const BFloat16* from, std::int64_t count) {
  std::uint16_t bits[kLanes] = {};
  std::memcpy(bits, from, static_cast<std::size_t>(count < kLanes ? count : kLanes) * sizeof bits[0]);
  return widen(bits);
}
XMLC_INLINE void store_weights(float* to, const Float& value, std::int64_t count, const Word&) {
  if (count >= kLanes)
    store(to, value);
  else
    store_first(to, value, count);
}
XMLC_INLINE void store_weights(BFloat16* to, const Float& value, std::int64_t count, const Word& random) {
  std::uint16_t bits[kLanes];
  store_low_halves(bits, round_stochastically(value, random));
  std::memcpy(to, bits, static_cast<std::size_t>(count < kLanes ? count : kLanes) * sizeof bits[0]);
}

// Sums the tiles' gradients of one label into the first active tile's row and returns that row; null if no
// tile is active.
XMLC_INLINE float* sum_tiles(const FusedScratch& scratch, std::int64_t block_label, float& bias_gradient) {
  float* total = nullptr;
  bias_gradient = 0.0f;
  for (std::int64_t tile = 0; tile < scratch.tiling.tiles; ++tile) {
    const std::int64_t slot = tile * scratch.block_labels + block_label;
    if (!scratch.active[slot]) continue;
    bias_gradient += scratch.bias_gradient[slot];
    float* row = scratch.weight_gradient + slot * scratch.padded_fan_in;
    if (total == nullptr) {
      total = row;
      continue;
    }
    for (std::int64_t k = 0; k < scratch.padded_fan_in; k += kLanes)
      store(total + k, load(total + k) + load(row + k));
  }
  return total;
}

template <Optimizer kind, class Weight>
XMLC_INLINE void update_label(const FusedStepArguments& a, const FusedScratch& scratch, std::int64_t label,
                              std::int64_t block_label) {
  const OptimizerArguments& o = a.optimizer;
  const std::int64_t fan_in = a.layer.fan_in;
  float bias_gradient;
  float* gradient = sum_tiles(scratch, block_label, bias_gradient);
  if (gradient == nullptr) {
    if (kind == Optimizer::kSgd && o.keep == 1.0f) return;  // nothing would change
    gradient = scratch.weight_gradient + block_label * scratch.padded_fan_in;
    for (std::int64_t k = 0; k < scratch.padded_fan_in; k += kLanes) store(gradient + k, Float(0.0f));
  }

  OptimizerArguments rate = o;
  if (kind == Optimizer::kLabelAdam) {
    Float squares(0.0f);
    for (std::int64_t k = 0; k < fan_in; k += kLanes) {
      const std::int64_t count = fan_in - k;
      const Float g = load_weights(gradient + k, count);
      squares = squares + g * g;
    }
    const float sum = sum_lanes(squares) + bias_gradient * bias_gradient;
    rate.learning_rate = label_adam_rate(o, sum / static_cast<float>(fan_in + 1), a.weight_second[label]);
  }

  auto* weight = static_cast<Weight*>(a.layer.weight) + label * fan_in;
  float* first = a.weight_first == nullptr ? nullptr : a.weight_first + label * fan_in;
  float* second = kind != Optimizer::kAdam ? nullptr : a.weight_second + label * fan_in;
  RandomWords<Word> words;
  for (std::int64_t k = 0; k < fan_in; k += kLanes) {
    const std::int64_t count = fan_in - k;
    const std::int64_t part = k / kLanes % 4;
    if (sizeof(Weight) == sizeof(BFloat16) && part == 0)
      words = weight_words(a.rounding, static_cast<std::uint64_t>(label),
                           static_cast<std::uint32_t>(k / (4 * kLanes)), lane_numbers());
    const Float old = load_weights(weight + k, count);
    const Float g = load_weights(gradient + k, count);
    Float updated;
    if (kind == Optimizer::kMomentum) {
      Float velocity = load_weights(first + k, count);
      updated = momentum(rate, old, g, velocity);
      store_weights(first + k, velocity, count, Word());
    } else if (kind == Optimizer::kAdam) {
      Float m = load_weights(first + k, count), v = load_weights(second + k, count);
      updated = adam(rate, old, g, m, v);
      store_weights(first + k, m, count, Word());
      store_weights(second + k, v, count, Word());
    } else {
      updated = sgd(rate, old, g);
    }
    store_weights(weight + k, updated, count, words.word[part]);
  }

  rate.keep = 1.0f;  // weight decay spares the bias
  float& bias = a.layer.bias[label];
  if (kind == Optimizer::kMomentum)
    bias = momentum(rate, bias, bias_gradient, a.bias_first[label]);
  else if (kind == Optimizer::kAdam)
    bias = adam(rate, bias, bias_gradient, a.bias_first[label], a.bias_second[label]);
  else
    bias = sgd(rate, bias, bias_gradient);
}

template <Optimizer kind>
void update_labels(const FusedStepArguments& a, const FusedScratch& scratch, GroupRange block,
                   GroupRange part) {
  const std::int64_t block_first = block.first * a.layer.group_size;
  const std::int64_t past = part.last * a.layer.group_size;
  const std::int64_t last = past < a.layer.label ? past : a.layer.label;
  for (std::int64_t label = part.first * a.layer.group_size; label < last; ++label) {
    if (a.layer.weight_type == WeightType::kFloat32)
      update_label<kind, float>(a, scratch, label, label - block_first);
    else
      update_label<kind, BFloat16>(a, scratch, label, label - block_first);
  }
}

void fused_update(const FusedStepArguments& a, const FusedScratch& scratch, GroupRange block,
                  GroupRange part) {
  switch (a.optimizer.kind) {
    case Optimizer::kSgd:
      return update_labels<Optimizer::kSgd>(a, scratch, block, part);
    case Optimizer::kMomentum:
      return update_labels<Optimizer::kMomentum>(a, scratch, block, part);
    case Optimizer::kAdam:
      return update_labels<Optimizer::kAdam>(a, scratch, block, part);
    case Optimizer::kLabelAdam:
      return update_labels<Optimizer::kLabelAdam>(a, scratch, block, part);
  }
}

}  // namespace
}  // namespace xmlc::cpu::XMLC_ISA
