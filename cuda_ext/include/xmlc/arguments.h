// Arguments of the ops: plain pointers and sizes, the same for every backend. Whoever fills them has
// checked dtypes, shapes and contiguity; indices are in range.
#pragma once

#include <cstddef>
#include <cstdint>

#include "xmlc/loss.h"
#include "xmlc/optimizer.h"
#include "xmlc/random.h"
#include "xmlc/types.h"

namespace xmlc {

// The fixed fan-in layer. Label l belongs to group l / group_size, group = ceil(label / group_size).
struct Layer {
  static constexpr std::int64_t kScaleLabels = 64;  // labels that share a scale: whole groups of any size
  const void* indices;                              // [group, fan_in] of index_type, values in [0, input)
  void* weight;                                     // [label, fan_in] of weight_type
  float* bias;                                      // [label]
  IndexType index_type;
  WeightType weight_type;
  std::int64_t input, label, group_size, fan_in;
  float* weight_scale;  // [ceil(label / kScaleLabels)], powers of two: of float8 weights; null otherwise
};

XMLC_HOST_DEVICE constexpr bool is_float8(WeightType type) {
  return type == WeightType::kFloat8E4M3 || type == WeightType::kFloat8E5M2;
}

// Value `at` of an array of this type as float32; float8 in units of a scale.
XMLC_HOST_DEVICE float load_stored(WeightType type, const void* values, std::int64_t at, float scale) {
  const auto code = [&] { return std::uint32_t{static_cast<const std::uint8_t*>(values)[at]}; };
  switch (type) {
    case WeightType::kBFloat16:
      return widen(static_cast<const BFloat16*>(values)[at]);
    case WeightType::kFloat8E4M3:
      return widen_float8<Float8E4M3>(code()) * scale;
    case WeightType::kFloat8E5M2:
      return widen_float8<Float8E5M2>(code()) * scale;
    default:
      return static_cast<const float*>(values)[at];
  }
}

// Weight `at` = label * fan_in + k as float32.
XMLC_HOST_DEVICE float load_weight(const Layer& layer, std::int64_t label, std::int64_t at) {
  const float scale = is_float8(layer.weight_type) ? layer.weight_scale[label / Layer::kScaleLabels] : 1.0f;
  return load_stored(layer.weight_type, layer.weight, at, scale);
}

// What the optimizer keeps for each connection: in float32, or rounded stochastically to bfloat16 or e4m3fn.
//
// In float8 the values of a label are in units of one power of two, chosen anew in every step, and the second
// moment is kept as its root. So both moments have one range, in which no first moment is much larger than
// the root; and where the root is not zero it stays at least one unit, the least that a first moment can be
// rounded up to. A small second moment can never make a large step.
struct Moments {
  void* first;   // [label, fan_in] velocity or first moment; null where unused
  void* second;  // [label, fan_in] second moment; of kLabelAdam float32 [label]; null where unused
  WeightType type;
  std::uint8_t* scale;  // [label] of float8; see moment_scale. Null otherwise
  RandomKey first_rounding, second_rounding;
};

// Features in bfloat16 stand in the place of those in float32 only for a backend that multiplies them as they
// are: CUDA, where weights are bfloat16 and group_size is at least 16. It then rounds logit gradients to
// bfloat16 for the gradients of features and weights; all sums are float32.

// Forward and both gradients of the unfused layer.
struct SparseLinearArguments {
  Layer layer;
  const float* features;    // [input, batch]
  float* logits;            // [label, batch]: output of the forward, input of the gradients
  float* feature_gradient;  // [input, batch]
  float* weight_gradient;   // [label, fan_in]
  std::int64_t batch;
  // In the place of features, and of logits as an input: see above.
  const BFloat16* narrow_features;        // [input, batch] or null
  const BFloat16* narrow_logit_gradient;  // [label, batch] or null
};

// Numbers that are added to single logits: logit[label, instance] += value, in their order. A pair may occur
// several times.
struct LogitOffsets {
  const std::int32_t* label;     // [entry], rising
  const std::int32_t* instance;  // [entry], in [0, batch)
  const float* value;            // [entry]
  float* gradient;               // [entry], output of the fused step: d loss / d value
  std::int64_t entry;
};

// Of the normalised losses, where an instance's labels lie in several layers. Each gives the sums of its own
// labels, then takes its step by the sums of all. Null where one layer has all labels.
struct SpreadSums {
  // With these outputs no more happens than the first pass.
  double* own_log_sum;    // [batch]: S of loss.h; -inf where nothing is summed
  float* own_pair_logit;  // [pair]
  // With these inputs there is no first pass, and the loss, which the caller knows, is left at 0.
  float* log_sum;  // [batch]: S, factor and share of loss.h
  float* factor;
  float* share;
};

struct FusedStepArguments {
  Layer layer;
  const float* features;              // [input, batch]
  float* feature_gradient;            // [input, batch], overwritten
  const std::int32_t* pair_label;     // [pair], rising: the positives of the batch, each once
  const std::int32_t* pair_instance;  // [pair], in [0, batch)
  const float* positive_weight;       // [label] or null for 1
  std::int64_t batch, pair;
  Loss loss;
  float scale;            // factor on loss and gradient: 1 / batch, or 1 / (batch * label)
  bool share_positives;   // of the normalised losses: weigh a positive by 1 / positives of its instance
  float gradient_cutoff;  // a label's gradients up to cutoff * scale throughout a tile count as zero
  OptimizerArguments optimizer;
  Moments moments;     // of the weights
  float* bias_first;   // [label]
  float* bias_second;  // [label]
  RandomKey rounding;  // stochastic rounding of bfloat16 and float8 weights
  double* loss_sum;    // [1], output
  LogitOffsets offsets;
  const BFloat16* narrow_features;  // [input, batch] or null
  SpreadSums spread;
};

struct TopLabelsArguments {
  Layer layer;
  const float* features;  // [input, batch]
  float* scores;          // [batch, k], falling
  std::int64_t* labels;   // [batch, k]; -1 where fewer than k logits are numbers
  std::int64_t batch, k;
  LogitOffsets offsets;
  const BFloat16* narrow_features;  // [input, batch] or null
};

enum class NewValue { kZero, kRandom, kKeep };

struct RedistributeArguments {
  Layer layer;
  void* states[2];          // [label, fan_in] optimizer state to reset; null where unused
  std::size_t state_bytes;  // of one value, whose zero has no bit set
  bool by_threshold;        // prune scores below `threshold`; otherwise exactly `prune` connections
  bool within_group;        // rank within each group, `prune` still counts the whole layer
  float threshold;
  std::int64_t prune;  // connections to prune, at most group * fan_in
  NewValue new_value;
  float new_value_bound;  // kRandom: uniform in [-bound, bound)
  RandomKey random;
  std::int64_t* pruned;  // [1], output
};

}  // namespace xmlc
