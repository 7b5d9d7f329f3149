// One training step of the output layer in one pass over blocks of labels.
//
// For a block and a tile of the batch: logits by gather, loss and logit gradient, then (only where some
// gradient is not exactly zero) scatter into the feature gradient and dot into the tile's own weight
// gradient. When all tiles have passed, the block's weights are updated. The rows that the gather brought
// in are still in the first-level cache when scatter and dot need them. The normalised losses take one pass
// before this one, for the sum over all labels of each instance.
#include <cmath>

#include "gather.h"
#include "pairs.h"
#include "xmlc/rounding.h"

namespace xmlc::cpu::XMLC_ISA {
namespace {

// The positives of one tile.
template <int kVectors>
struct Positives : TilePairs {
  Positives(const FusedStepArguments& a, std::int64_t first_instance, std::int64_t first_label)
      : TilePairs(a.pair_label, a.pair_instance, a.pair, first_instance, kVectors * kLanes, first_label) {}

  // Targets +-1 of one label; false if it has no positive in this tile.
  XMLC_INLINE bool read(std::int64_t label, float (&target)[kVectors * kLanes]) {
    bool found = false;
    for_label(label, [&](std::int64_t lane, std::int64_t) {
      if (!found)
        for (float& t : target) t = -1.0f;
      found = true;
      target[lane] = 1.0f;
    });
    return found;
  }
};

template <int kVectors>
struct FusedTilePass {
  const FusedStepArguments& a;
  const FusedScratch& scratch;
  float* rows;
  float* logits;                   // of the block, gathered by strips; then their gradients. Null otherwise
  std::int64_t tile, first_label;  // first label of the block
  Positives<kVectors> positives;
  TileOffsets<kVectors> offsets;
  Float scale[kVectors] = {};  // the factor on loss and gradient; zero beyond the batch
  Float cutoff = Float(0.0f);
  Float loss = Float(0.0f);
  double loss_sum = 0.0;
  std::int64_t active_labels = 0;

  // Scaled gradient of one label's logits, and its loss unless the driver has it.
  template <class LossFunction>
  XMLC_OUTLINE void evaluate_as(std::int64_t label, const Float (&logit)[kVectors],
                                Float (&gradient)[kVectors]) {
    float targets[kVectors * kLanes];
    const bool found = positives.read(label, targets);
    const float weight = !found || a.positive_weight == nullptr ? 1.0f : a.positive_weight[label];
    if constexpr (LossFunction::kNormalised) {
      const std::int64_t first = tile * kVectors * kLanes;
      unroll<kVectors>([&](auto v) XMLC_INLINE_LAMBDA {
        const Float log_sum = load(scratch.log_sum + first + v * kLanes);
        const Float factor = load(scratch.factor + first + v * kLanes);
        gradient[v] = scale[v] * factor * exponential(logit[v] - log_sum);
        if (!found) return;
        const Float share = load(scratch.share + first + v * kLanes);
        const Float value = LossFunction::positive_gradient(logit[v], Float(weight) * share, log_sum, factor);
        gradient[v] = select(Float(0.0f) < load(targets + v * kLanes), scale[v] * value, gradient[v]);
      });
    } else if (found) {
      unroll<kVectors>([&](auto v) XMLC_INLINE_LAMBDA {
        const Float target = load(targets + v * kLanes);
        const auto value = LossFunction::evaluate(logit[v], target);
        const Float factor = select(Float(0.0f) < target, scale[v] * Float(weight), scale[v]);
        gradient[v] = factor * value.grad;
        loss = loss + factor * value.loss;
      });
    } else {
      unroll<kVectors>([&](auto v) XMLC_INLINE_LAMBDA {
        const auto value = LossFunction::evaluate(logit[v], Float(-1.0f));
        gradient[v] = scale[v] * value.grad;
        loss = loss + scale[v] * value.loss;
      });
    }
  }

  XMLC_INLINE void evaluate(std::int64_t label, const Float (&logit)[kVectors], Float (&gradient)[kVectors]) {
    switch (a.loss) {
      case Loss::kSquaredHinge:
        return evaluate_as<SquaredHinge>(label, logit, gradient);
      case Loss::kBce:
        return evaluate_as<Bce>(label, logit, gradient);
      case Loss::kSoftmax:
        return evaluate_as<Softmax>(label, logit, gradient);
      default:
        return evaluate_as<DecoupledSoftmax>(label, logit, gradient);
    }
  }

  template <int kLabels>
  void run(std::int64_t group, std::int64_t label) {
    Float logit[kLabels][kVectors];
    const float* weight = gather(a.layer, group, label, features(), rows, logits, first_label, logit);
    const std::int64_t first_offset = offsets.pairs.next;
    offsets.add(label, logit);

    Float gradient[kLabels][kVectors];
    LabelList active;
    const std::int64_t slot = slot_of(label);
    for (int r = 0; r < kLabels; ++r) {
      evaluate(label + r, logit[r], gradient[r]);
      Float sum(0.0f);
      bool beyond = false;
      unroll<kVectors>([&](auto v) XMLC_INLINE_LAMBDA {
        beyond |= any_beyond(gradient[r][v], cutoff);
        sum = sum + gradient[r][v];
      });
      scratch.active[slot + r] = beyond;
      if (!beyond) continue;
      active.add(r);
      scratch.bias_gradient[slot + r] = sum_lanes(sum);
    }
    offsets.leave_gradients(first_offset, label, gradient, scratch.active + slot);
    if (weight == nullptr) {
      store(logits + (label - first_label) * kLanes, active.count > 0 ? gradient[0][0] : Float(0.0f));
      active_labels += active.count;
    } else if (active.count > 0) {
      backward(group, label, weight, gradient, active);
    }
  }

  // Weight and feature gradients of the active labels.
  template <int kLabels>
  XMLC_INLINE void backward(std::int64_t group, std::int64_t label, const float* weight,
                            const Float (&gradient)[kLabels][kVectors], const LabelList& active) {
    prefetch_rows<kVectors>(a.layer, group, feature_gradient());
    float* to = scratch.weight_gradient + slot_of(label) * scratch.padded_fan_in;
    if constexpr (kLabels == 1)
      dot<false>(a.layer, group, features(), gradient[0], to);
    else
      dot<false>(a.layer, rows, gradient, active, to, scratch.padded_fan_in);
    scatter(a.layer, group, feature_gradient(), weight, gradient, active, rows);
  }

  // The same for all labels of the block, after `run` has left their logit gradients.
  void backward_by_strips(GroupRange labels) {
    constexpr std::int64_t kFew = 4;  // walking over all connections costs about as much as a fourth of them
    if (kFew * active_labels >= labels.last - labels.first)
      return scatter_strips(scratch.strips, features(), logits, feature_gradient(),
                            scratch.weight_gradient + slot_of(first_label) * scratch.padded_fan_in);
    for (std::int64_t label = labels.first; label < labels.last; ++label) {
      if (!scratch.active[slot_of(label)]) continue;
      const Float gradient[1][kVectors] = {{load(logits + (label - first_label) * kLanes)}};
      backward(label, label, weight_rows<1>(a.layer, label, rows), gradient, {});
    }
  }

  const float* features() const {
    return scratch.features + tile * scratch.tiling.input * scratch.tiling.width;
  }
  float* feature_gradient() const {
    return scratch.feature_gradient + tile * scratch.tiling.input * scratch.tiling.width;
  }
  std::int64_t slot_of(std::int64_t label) const { return tile * scratch.slots + label - first_label; }
};

// Logits of all labels of a block, by strips; null where the passes do not go by strips.
XMLC_INLINE float* gather_block(const FusedStepArguments& a, const FusedScratch& scratch, int thread,
                                GroupRange block, std::int64_t tile) {
  if (scratch.logits == nullptr) return nullptr;
  float* logits = scratch.logits + thread * scratch.slots * kLanes;
  gather_strips(a.layer, block, scratch.strips, scratch.features + tile * scratch.tiling.input * kLanes,
                logits);
  return logits;
}

template <int kVectors>
void fused_tile_of(const FusedStepArguments& a, const FusedScratch& scratch, int thread, GroupRange block,
                   std::int64_t tile) {
  const std::int64_t first_label = block.first * a.layer.group_size;
  const std::int64_t first_instance = tile * scratch.tiling.width;
  FusedTilePass<kVectors> pass{a,
                               scratch,
                               scratch.rows + thread * rows_floats(a.layer, scratch.tiling),
                               gather_block(a, scratch, thread, block, tile),
                               tile,
                               first_label,
                               Positives<kVectors>(a, first_instance, first_label),
                               TileOffsets<kVectors>(a.offsets, first_instance, first_label)};
  pass.cutoff = Float(a.gradient_cutoff * a.scale);
  for (int v = 0; v < kVectors; ++v) {
    float factor[kLanes];
    for (int i = 0; i < kLanes; ++i) factor[i] = first_instance + v * kLanes + i < a.batch ? a.scale : 0.0f;
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
  if (pass.logits != nullptr) pass.backward_by_strips(block);
  scratch.loss[tile] += pass.loss_sum;
}

void fused_tile(const FusedStepArguments& a, const FusedScratch& scratch, int thread, GroupRange block,
                std::int64_t tile) {
  with_width(scratch.tiling.width,
             [&](auto vectors) { fused_tile_of<vectors.value>(a, scratch, thread, block, tile); });
}

// First pass of the normalised losses: the sum of exp(logit - reference) of each instance, and the logits of
// its positives. The reference rises only when a logit is far above it, so that one exponential per logit
// does.
template <int kVectors>
struct NormaliserPass {
  const FusedStepArguments& a;
  const FusedScratch& scratch;
  float* rows;
  const float* logits;  // of the block, gathered by strips; null otherwise
  std::int64_t tile, first_label;
  Positives<kVectors> positives;
  TileOffsets<kVectors> offsets;
  Float reference[kVectors], sum[kVectors];

  // Adds the sums to the totals in float64.
  XMLC_OUTLINE void flush() {
    double* total = scratch.exponentials + tile * kVectors * kLanes;
    for (int v = 0; v < kVectors; ++v) {
      float lanes[kLanes];
      store(lanes, sum[v]);
      for (int i = 0; i < kLanes; ++i) total[v * kLanes + i] += static_cast<double>(lanes[i]);
      sum[v] = Float(0.0f);
    }
  }

  // Raises the references of one register to the logits above them.
  XMLC_OUTLINE void raise(int v, const Float& logit) {
    flush();
    float old[kLanes], next[kLanes];
    double* total = scratch.exponentials + (tile * kVectors + v) * kLanes;
    store(old, reference[v]);
    store(next, larger(logit, reference[v]));
    for (int i = 0; i < kLanes; ++i)
      total[i] *= std::exp(static_cast<double>(old[i]) - static_cast<double>(next[i]));
    reference[v] = load(next);
  }

  template <int kLabels>
  XMLC_INLINE void run(std::int64_t group, std::int64_t label) {
    Float logit[kLabels][kVectors];
    gather(a.layer, group, label, scratch.features + tile * scratch.tiling.input * scratch.tiling.width, rows,
           logits, first_label, logit);
    offsets.add(label, logit);
    for (int r = 0; r < kLabels; ++r) {
      positives.for_label(label + r, [&](std::int64_t lane, std::int64_t pair) {
        float lanes[kLanes];
        Float& z = logit[r][lane / kLanes];
        store(lanes, z);
        scratch.pair_logit[pair] = lanes[lane % kLanes];
        if (a.loss != Loss::kDecoupledSoftmax) return;
        lanes[lane % kLanes] = -HUGE_VALF;  // the sum is that of the negatives
        z = load(lanes);
      });
      unroll<kVectors>([&](auto v) XMLC_INLINE_LAMBDA {
        constexpr float kFarAbove = 40.0f;  // exp(40) times many labels is still far from overflow
        if (any(reference[v] + Float(kFarAbove) < logit[r][v])) raise(v, logit[r][v]);
        sum[v] = sum[v] + exponential(logit[r][v] - reference[v]);
      });
    }
  }
};

template <int kVectors>
void fused_normaliser_of(const FusedStepArguments& a, const FusedScratch& scratch, int thread,
                         GroupRange block, std::int64_t tile) {
  const std::int64_t first = tile * scratch.tiling.width;
  const std::int64_t first_label = block.first * a.layer.group_size;
  NormaliserPass<kVectors> pass{a,
                                scratch,
                                scratch.rows + thread * rows_floats(a.layer, scratch.tiling),
                                gather_block(a, scratch, thread, block, tile),
                                tile,
                                first_label,
                                Positives<kVectors>(a, first, first_label),
                                TileOffsets<kVectors>(a.offsets, first, first_label),
                                {},
                                {}};
  for (int v = 0; v < kVectors; ++v) {
    pass.reference[v] = load(scratch.reference + first + v * kLanes);
    pass.sum[v] = Float(0.0f);
  }
  const std::int64_t groups_at_once = a.layer.group_size == 1 ? 64 : 1;
  for (std::int64_t group = block.first; group < block.last; group += groups_at_once) {
    const std::int64_t end = group + groups_at_once;
    for_labels(a.layer, {group, end < block.last ? end : block.last}, pass);
    pass.flush();
  }
  for (int v = 0; v < kVectors; ++v) store(scratch.reference + first + v * kLanes, pass.reference[v]);
}

void fused_normaliser(const FusedStepArguments& a, const FusedScratch& scratch, int thread, GroupRange block,
                      std::int64_t tile) {
  with_width(scratch.tiling.width,
             [&](auto vectors) { fused_normaliser_of<vectors.value>(a, scratch, thread, block, tile); });
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

// The random words of the 64 connections from k on.
XMLC_INLINE RandomWords<Word> words_of(const FusedStepArguments& a, std::int64_t label, std::int64_t k) {
  return weight_words(a.rounding, static_cast<std::uint64_t>(label),
                      static_cast<std::uint32_t>(k / (4 * kLanes)), lane_numbers());
}

// A label's weights while they are updated: float32 or bfloat16 go back to where they are.
template <class Weight>
struct WeightRow {
  const FusedStepArguments& a;
  std::int64_t label;
  Weight* weight = static_cast<Weight*>(a.layer.weight) + label * a.layer.fan_in;
  RandomWords<Word> words = {};

  XMLC_INLINE Float load(std::int64_t k, std::int64_t count) const { return load_weights(weight + k, count); }
  XMLC_INLINE void store(std::int64_t k, const Float& updated, std::int64_t count, float*) {
    const std::int64_t part = k / kLanes % 4;
    if (sizeof(Weight) == sizeof(BFloat16) && part == 0) words = words_of(a, label, k);
    store_weights(weight + k, updated, count, words.word[part]);
  }
};

// Float8 weights go to the row of the gradient, in float32, until the scale that they share is known.
template <class Format>
struct ScaledRow {
  const std::uint8_t* codes;
  float scale;
  Float& largest;  // size of the finite ones so far

  XMLC_INLINE Float load(std::int64_t k, std::int64_t count) const {
    std::uint8_t lanes[kLanes] = {};
    std::memcpy(lanes, codes + k, static_cast<std::size_t>(count < kLanes ? count : kLanes));
    return widen_float8<Format>(load_bytes(lanes)) * Float(scale);
  }
  XMLC_INLINE void store(std::int64_t, const Float& updated, std::int64_t, float* gradient) {
    const Float size = absolute(updated);
    largest = larger(select(size < Float(HUGE_VALF), size, Float(0.0f)), largest);
    cpu::XMLC_ISA::store(gradient, updated);
  }
};

// Sums the tiles' gradients of one label into the first active tile's row and returns that row; null if no
// tile is active.
XMLC_INLINE float* sum_tiles(const FusedScratch& scratch, std::int64_t block_label, float& bias_gradient) {
  float* total = nullptr;
  bias_gradient = 0.0f;
  for (std::int64_t tile = 0; tile < scratch.tiling.tiles; ++tile) {
    const std::int64_t slot = tile * scratch.slots + block_label;
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

// Updates a label's bias and hands its updated weights to `row`; returns the gradient's row in scratch, or
// null where nothing changes.
template <Optimizer kind, class Row>
XMLC_INLINE float* update_label(const FusedStepArguments& a, const FusedScratch& scratch, std::int64_t label,
                                std::int64_t block_label, Row row) {
  const OptimizerArguments& o = a.optimizer;
  const std::int64_t fan_in = a.layer.fan_in;
  float bias_gradient;
  float* gradient = sum_tiles(scratch, block_label, bias_gradient);
  if (gradient == nullptr) {
    if (kind == Optimizer::kSgd && o.keep == 1.0f) return nullptr;
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

  float* first = a.weight_first == nullptr ? nullptr : a.weight_first + label * fan_in;
  float* second = kind != Optimizer::kAdam ? nullptr : a.weight_second + label * fan_in;
  for (std::int64_t k = 0; k < fan_in; k += kLanes) {
    const std::int64_t count = fan_in - k;
    const Float old = row.load(k, count);
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
    row.store(k, updated, count, gradient + k);
  }

  rate.keep = 1.0f;  // weight decay spares the bias
  float& bias = a.layer.bias[label];
  if (kind == Optimizer::kMomentum)
    bias = momentum(rate, bias, bias_gradient, a.bias_first[label]);
  else if (kind == Optimizer::kAdam)
    bias = adam(rate, bias, bias_gradient, a.bias_first[label], a.bias_second[label]);
  else
    bias = sgd(rate, bias, bias_gradient);
  return gradient;
}

// The largest finite code among those of a label, without signs.
template <class Format>
XMLC_OUTLINE std::uint32_t largest_code(const std::uint8_t* codes, std::int64_t count) {
  std::uint8_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint8_t code = codes[i] & 0x7f;
    largest = code <= Format::kLargestCode && code > largest ? code : largest;
  }
  return largest;
}

// Rounds a label's weights, float32 and padded to whole lanes.
template <class Format>
XMLC_INLINE void round_row(const FusedStepArguments& a, std::int64_t label, const float* updated, float scale,
                           std::uint8_t* codes) {
  RandomWords<Word> words;
  for (std::int64_t k = 0; k < a.layer.fan_in; k += kLanes) {
    const std::int64_t part = k / kLanes % 4, count = a.layer.fan_in - k;
    if (part == 0) words = words_of(a, label, k);
    const Float value = load(updated + k) * Float(1.0f / scale);
    std::uint8_t lanes[kLanes];
    store_low_bytes(lanes, round_stochastically_float8<Format>(value, words.word[part]));
    std::memcpy(codes + k, lanes, static_cast<std::size_t>(count < kLanes ? count : kLanes));
  }
}

// Updates labels that share a scale: all weights first, then the scale, then the rounding.
template <Optimizer kind, class Format>
void update_scaled(const FusedStepArguments& a, const FusedScratch& scratch, std::int64_t block_first,
                   GroupRange labels) {
  const std::int64_t fan_in = a.layer.fan_in;
  auto* codes = static_cast<std::uint8_t*>(a.layer.weight);
  float& scale = a.layer.weight_scale[labels.first / Layer::kScaleLabels];
  const float old = scale;
  float* updated[Layer::kScaleLabels];  // null where a label keeps its weights
  Float sizes(0.0f);
  bool any = false;
  for (std::int64_t label = labels.first; label < labels.last; ++label) {
    float* row = update_label<kind>(a, scratch, label, label - block_first,
                                    ScaledRow<Format>{codes + label * fan_in, old, sizes});
    updated[label - labels.first] = row;
    any |= row != nullptr;
  }
  if (!any) return;
  float lanes[kLanes], largest = 0.0f;
  store(lanes, sizes);
  for (const float size : lanes) largest = xmlc::larger(size, largest);
  std::uint32_t kept = 0;
  for (std::int64_t label = labels.first; label < labels.last; ++label) {
    if (updated[label - labels.first] != nullptr) continue;
    const std::uint32_t code = largest_code<Format>(codes + label * fan_in, fan_in);
    kept = code > kept ? code : kept;
  }
  largest = xmlc::larger(widen_float8<Format>(kept) * old, largest);
  scale = next_scale<Format>(old, largest);
  for (std::int64_t label = labels.first; label < labels.last; ++label) {
    float* row = updated[label - labels.first];
    if (row == nullptr) {
      if (scale == old) continue;
      row = scratch.weight_gradient + (label - block_first) * scratch.padded_fan_in;
      widen_codes<Format>(codes + label * fan_in, fan_in, old, row);
    }
    round_row<Format>(a, label, row, scale, codes + label * fan_in);
  }
}

template <Optimizer kind, class Format>
void update_all_scaled(const FusedStepArguments& a, const FusedScratch& scratch, std::int64_t block_first,
                       GroupRange labels) {
  if (changes_nothing(a.optimizer)) return;  // nor a scale
  for (std::int64_t first = labels.first; first < labels.last; first += Layer::kScaleLabels) {
    const std::int64_t end = first + Layer::kScaleLabels;
    update_scaled<kind, Format>(a, scratch, block_first, {first, end < labels.last ? end : labels.last});
  }
}

template <Optimizer kind>
void update_labels(const FusedStepArguments& a, const FusedScratch& scratch, GroupRange block,
                   GroupRange part) {
  const std::int64_t block_first = block.first * a.layer.group_size;
  const std::int64_t past = part.last * a.layer.group_size;
  const std::int64_t last = past < a.layer.label ? past : a.layer.label;
  const std::int64_t first = part.first * a.layer.group_size;
  if (a.layer.weight_type == WeightType::kFloat8E4M3)
    return update_all_scaled<kind, Float8E4M3>(a, scratch, block_first, {first, last});
  if (a.layer.weight_type == WeightType::kFloat8E5M2)
    return update_all_scaled<kind, Float8E5M2>(a, scratch, block_first, {first, last});
  for (std::int64_t label = first; label < last; ++label) {
    if (a.layer.weight_type == WeightType::kFloat32)
      update_label<kind>(a, scratch, label, label - block_first, WeightRow<float>{a, label});
    else
      update_label<kind>(a, scratch, label, label - block_first, WeightRow<BFloat16>{a, label});
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
