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

// Sixteen (or the first `count`) codes of a float8.
XMLC_INLINE Word load_codes(const std::uint8_t* from, std::int64_t count) {
  std::uint8_t lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<std::size_t>(count < kLanes ? count : kLanes));
  return load_bytes(lanes);
}
XMLC_INLINE void store_codes(std::uint8_t* to, const Word& codes, std::int64_t count) {
  std::uint8_t lanes[kLanes];
  store_low_bytes(lanes, codes);
  std::memcpy(to, lanes, static_cast<std::size_t>(count < kLanes ? count : kLanes));
}

// The random words of a label's connections, sixteen at a time by rising k.
struct RowWords {
  RandomKey key;
  std::int64_t label;
  RandomWords<Word> words = {};

  XMLC_INLINE Word next(std::int64_t k) {
    const std::int64_t part = k / kLanes % 4;
    if (part == 0)
      words = weight_words(key, static_cast<std::uint64_t>(label),
                           static_cast<std::uint32_t>(k / (4 * kLanes)), lane_numbers());
    return words.word[part];
  }
};

// A label's weights while they are updated: float32 or bfloat16 go back to where they are.
template <class Weight>
struct WeightRow {
  const FusedStepArguments& a;
  std::int64_t label;
  Weight* weight = static_cast<Weight*>(a.layer.weight) + label * a.layer.fan_in;
  RowWords words{a.rounding, label};

  XMLC_INLINE Float load(std::int64_t k, std::int64_t count) const { return load_weights(weight + k, count); }
  XMLC_INLINE void store(std::int64_t k, const Float& updated, std::int64_t count, float*) {
    store_weights(weight + k, updated, count, sizeof(Weight) == sizeof(BFloat16) ? words.next(k) : Word());
  }
};

// The larger of a size so far and those of values, as far as they are finite.
XMLC_INLINE Float larger_finite(const Float& value, const Float& largest) {
  const Float size = absolute(value);
  return larger(select(size < Float(HUGE_VALF), size, Float(0.0f)), largest);
}
XMLC_INLINE float largest_lane(const Float& sizes) {
  float lanes[kLanes], largest = 0.0f;
  store(lanes, sizes);
  for (const float size : lanes) largest = xmlc::larger(size, largest);
  return largest;
}

// Float8 weights go to the row of the gradient, in float32, until the scale that they share is known.
template <class Format>
struct ScaledRow {
  const std::uint8_t* codes;
  float scale;
  Float& largest;  // size of the finite ones so far

  XMLC_INLINE Float load(std::int64_t k, std::int64_t count) const {
    return widen_float8<Format>(load_codes(codes + k, count)) * Float(scale);
  }
  XMLC_INLINE void store(std::int64_t, const Float& updated, std::int64_t, float* gradient) {
    largest = larger_finite(updated, largest);
    cpu::XMLC_ISA::store(gradient, updated);
  }
};

// What the optimizer keeps for the connections of one label. `Stored`: how.
template <Optimizer kind, class Stored>
struct LabelMoments {
  static constexpr bool kScaled = sizeof(Stored) == 1, kRounded = sizeof(Stored) < sizeof(float);
  using Row = std::conditional_t<kScaled, std::uint8_t, Stored>;
  const FusedStepArguments& a;
  std::int64_t label;
  Row* first = row(a.moments.first, has_first(kind));
  Row* second = row(a.moments.second, has_second(kind));
  RowWords first_words{a.moments.first_rounding, label}, second_words{a.moments.second_rounding, label};
  float unit = 1.0f, inverse = 1.0f;  // of float8: the former scale, and one over the next

  XMLC_INLINE Row* row(void* values, bool used) const {
    return used ? static_cast<Row*>(values) + label * a.layer.fan_in : nullptr;
  }

  // Chooses the scale in which `store` rounds: the next values are computed for their size alone.
  XMLC_INLINE void choose_scale(const float* gradient) {
    if constexpr (kScaled && has_first(kind)) {
      std::uint8_t& scale = a.moments.scale[label];
      unit = moment_unit(scale);
      Float largest(0.0f), largest_square(0.0f);
      for (std::int64_t k = 0; k < a.layer.fan_in; k += kLanes) {
        const std::int64_t count = a.layer.fan_in - k;
        Float m(0.0f), v(0.0f);
        load(k, count, m, v);
        advance<kind>(a.optimizer, load_weights(gradient + k, count), m, v);
        largest = larger_finite(m, largest);
        largest_square = larger_finite(v, largest_square);
      }
      scale = moment_scale(largest_lane(larger(square_root(largest_square), largest)));
      inverse = inverse_unit(scale);
    }
  }

  XMLC_INLINE void load(std::int64_t k, std::int64_t count, Float& m, Float& v) const {
    if constexpr (kScaled) {
      if (has_first(kind)) m = widen_float8<Stored>(load_codes(first + k, count)) * Float(unit);
      if (!has_second(kind)) return;
      const Float root = widen_float8<Stored>(load_codes(second + k, count)) * Float(unit);
      v = root * root;
    } else {
      if (has_first(kind)) m = load_weights(first + k, count);
      if (has_second(kind)) v = load_weights(second + k, count);
    }
  }

  XMLC_INLINE void store(std::int64_t k, std::int64_t count, const Float& m, const Float& v) {
    const auto words = [&](RowWords& of) XMLC_INLINE_LAMBDA { return kRounded ? of.next(k) : Word(); };
    if constexpr (kScaled) {
      if (has_first(kind))
        store_codes(first + k, round_stochastically_float8<Stored>(m * Float(inverse), words(first_words)),
                    count);
      if (has_second(kind))
        store_codes(second + k,
                    round_root_float8<Stored>(square_root(v), Float(inverse), words(second_words)), count);
    } else {
      if (has_first(kind)) store_weights(first + k, m, count, words(first_words));
      if (has_second(kind)) store_weights(second + k, v, count, words(second_words));
    }
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
template <Optimizer kind, class Stored, class Row>
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
    auto* second = static_cast<float*>(a.moments.second);
    rate.learning_rate = label_adam_rate(o, sum / static_cast<float>(fan_in + 1), second[label]);
  }

  LabelMoments<kind, Stored> moments{a, label};
  moments.choose_scale(gradient);
  for (std::int64_t k = 0; k < fan_in; k += kLanes) {
    const std::int64_t count = fan_in - k;
    const Float old = row.load(k, count);
    Float m(0.0f), v(0.0f);
    moments.load(k, count, m, v);
    const Float weight = updated<kind>(rate, old, load_weights(gradient + k, count), m, v);
    moments.store(k, count, m, v);
    row.store(k, weight, count, gradient + k);
  }

  rate.keep = 1.0f;  // weight decay spares the bias
  float unused = 0.0f, &bias = a.layer.bias[label];
  bias = updated<kind>(rate, bias, bias_gradient, has_first(kind) ? a.bias_first[label] : unused,
                       has_second(kind) ? a.bias_second[label] : unused);
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
  RowWords words{a.rounding, label};
  for (std::int64_t k = 0; k < a.layer.fan_in; k += kLanes) {
    const Float value = load(updated + k) * Float(1.0f / scale);
    store_codes(codes + k, round_stochastically_float8<Format>(value, words.next(k)), a.layer.fan_in - k);
  }
}

// Updates labels that share a scale: all weights first, then the scale, then the rounding.
template <Optimizer kind, class Stored, class Format>
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
    float* row = update_label<kind, Stored>(a, scratch, label, label - block_first,
                                            ScaledRow<Format>{codes + label * fan_in, old, sizes});
    updated[label - labels.first] = row;
    any |= row != nullptr;
  }
  if (!any) return;
  float largest = largest_lane(sizes);
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

template <Optimizer kind, class Stored, class Format>
void update_all_scaled(const FusedStepArguments& a, const FusedScratch& scratch, std::int64_t block_first,
                       GroupRange labels) {
  if (changes_nothing(a.optimizer)) return;  // nor a scale
  for (std::int64_t first = labels.first; first < labels.last; first += Layer::kScaleLabels) {
    const std::int64_t end = first + Layer::kScaleLabels;
    update_scaled<kind, Stored, Format>(a, scratch, block_first,
                                        {first, end < labels.last ? end : labels.last});
  }
}

template <Optimizer kind, class Stored>
void update_labels(const FusedStepArguments& a, const FusedScratch& scratch, GroupRange block,
                   GroupRange part) {
  const std::int64_t block_first = block.first * a.layer.group_size;
  const std::int64_t past = part.last * a.layer.group_size;
  const std::int64_t last = past < a.layer.label ? past : a.layer.label;
  const std::int64_t first = part.first * a.layer.group_size;
  if (a.layer.weight_type == WeightType::kFloat8E4M3)
    return update_all_scaled<kind, Stored, Float8E4M3>(a, scratch, block_first, {first, last});
  if (a.layer.weight_type == WeightType::kFloat8E5M2)
    return update_all_scaled<kind, Stored, Float8E5M2>(a, scratch, block_first, {first, last});
  for (std::int64_t label = first; label < last; ++label) {
    if (a.layer.weight_type == WeightType::kFloat32)
      update_label<kind, Stored>(a, scratch, label, label - block_first, WeightRow<float>{a, label});
    else
      update_label<kind, Stored>(a, scratch, label, label - block_first, WeightRow<BFloat16>{a, label});
  }
}

template <Optimizer kind>
void update_as_stored(const FusedStepArguments& a, const FusedScratch& scratch, GroupRange block,
                      GroupRange part) {
  switch (a.moments.type) {
    case WeightType::kBFloat16:
      return update_labels<kind, BFloat16>(a, scratch, block, part);
    case WeightType::kFloat8E4M3:
      return update_labels<kind, Float8E4M3>(a, scratch, block, part);
    default:
      return update_labels<kind, float>(a, scratch, block, part);
  }
}

void fused_update(const FusedStepArguments& a, const FusedScratch& scratch, GroupRange block,
                  GroupRange part) {
  switch (a.optimizer.kind) {
    case Optimizer::kSgd:
      return update_labels<Optimizer::kSgd, float>(a, scratch, block, part);
    case Optimizer::kMomentum:
      return update_as_stored<Optimizer::kMomentum>(a, scratch, block, part);
    case Optimizer::kAdam:
      return update_as_stored<Optimizer::kAdam>(a, scratch, block, part);
    case Optimizer::kLabelAdam:
      return update_labels<Optimizer::kLabelAdam, float>(a, scratch, block, part);
  }
}

}  // namespace
}  // namespace xmlc::cpu::XMLC_ISA
