// What each instruction set provides: the inner passes of the ops, over a range of groups and one tile of
// the batch. The drivers in <op>.cpp own threads, order and workspace; the passes only compute.
#pragma once

#include <cstdint>

#include "strips.h"
#include "tiling.h"
#include "xmlc/arguments.h"

namespace xmlc::cpu {

constexpr int kShared = 16;  // labels of a group that are computed together

// One thread's scratch for the products of labels: weights [kShared, padded_fan_in] as float32, and the rows
// of a group's inputs, packed [padded_fan_in, tiling.width].
inline std::int64_t rows_floats(const Layer& layer, const Tiling& tiling) {
  return (kShared + tiling.width) * ((layer.fan_in + 15) / 16 * 16);
}

enum class Isa { kGeneric, kAvx2, kAvx512 };

// Scratch of one fused step. A block of labels is passed over tile by tile, then updated.
struct FusedScratch {
  Tiling tiling;
  std::int64_t block_groups;   // groups of one block
  std::int64_t block_labels;   // block_groups * group_size
  std::int64_t slots;          // of a tile: block_labels, and one for what pads the strips
  std::int64_t padded_fan_in;  // fan_in rounded up to 16
  float* features;             // [tile, input, tiling.width]
  float* feature_gradient;     // [tile, input, tiling.width]
  float* weight_gradient;      // [tile, slots, padded_fan_in]: each tile's own sum
  float* bias_gradient;        // [tile, slots]
  std::uint8_t* active;        // [tile, slots]: whether any gradient of the tile is nonzero
  double* loss;                // [tile]
  // Of the normalised losses, by instance of the tiles, [tile * tiling.width]; null otherwise.
  float* reference;      // an early large logit: the sum is that of exp(logit - reference)
  double* exponentials;  // the sum, over all labels or over the negatives
  float* log_sum;        // S, factor and share of loss.h
  float* factor;
  float* share;
  float* pair_logit;  // [pair]
  float* rows;        // [thread, rows_floats]
  Strips strips;      // of the block
  float* logits;      // [thread, slots, 16]: of one tile; null unless the passes go by strips
};

// What one thread needs for the logits of a block.
struct LogitsScratch {
  Tiling tiling;
  const float* features;  // [tile, input, tiling.width], or [instance, input] for `top_labels_one`
  float* rows;            // [rows_floats]
  Strips strips;          // the thread's own
  float* logits;          // [strips.labels + 1, 16]; null unless the passes go by strips
};

// One thread's best labels so far.
struct TopScratch : LogitsScratch {
  float* scores;         // [tile * tiling.width, k], falling
  std::int64_t* labels;  // [tile * tiling.width, k]
};

struct Kernels {
  void (*logits)(const SparseLinearArguments&, const LogitsScratch&, GroupRange, std::int64_t tile);
  void (*feature_gradient)(const SparseLinearArguments&, const Tiling&, float* gradient, float* rows,
                           GroupRange, std::int64_t tile);
  void (*weight_gradient)(const SparseLinearArguments&, const Tiling&, const float* features, float* row,
                          GroupRange);
  void (*fused_normaliser)(const FusedStepArguments&, const FusedScratch&, int thread, GroupRange block,
                           std::int64_t tile);
  void (*fused_tile)(const FusedStepArguments&, const FusedScratch&, int thread, GroupRange block,
                     std::int64_t tile);
  void (*fused_update)(const FusedStepArguments&, const FusedScratch&, GroupRange block, GroupRange part);
  void (*top_labels)(const TopLabelsArguments&, const TopScratch&, GroupRange, std::int64_t tile);
  void (*top_labels_one)(const TopLabelsArguments&, const TopScratch&, GroupRange, std::int64_t instance);
};

namespace generic {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace xmlc::cpu
