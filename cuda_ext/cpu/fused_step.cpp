// Order, threads and scratch of the fused step.
//
// A block of labels passes over all tiles of the batch, then its weights are updated. Tiles are split
// among threads: a tile's feature gradient has one owner that adds the blocks in order, and its weight
// gradient has a buffer of its own that the update adds in the order of tiles. So no sum depends on the
// number of threads.
#include <cfloat>
#include <cmath>

#include "ops.h"
#include "parallel.h"
#include "workspace.h"

namespace xmlc::cpu {
namespace {

FusedScratch plan(const FusedStepArguments& a, int threads, Workspace& workspace) {
  FusedScratch s{};
  s.tiling = choose_tiling(a.batch, a.layer.input, a.layer.group_size);
  s.padded_fan_in = (a.layer.fan_in + 15) / 16 * 16;
  const bool by_strips = use_strips(a.layer, s.tiling);
  // The tiles' weight gradients of one block: few megabytes, so that they stay cached until the update. With
  // strips more, so that the connections of a strip visit its inputs several times.
  const std::int64_t block_floats = by_strips ? 1 << 21 : 1 << 19;
  // Whole blocks of labels that share a scale, which one thread updates.
  constexpr std::int64_t kMultiple = Layer::kScaleLabels;
  const std::int64_t fitting = block_floats / (s.tiling.tiles * s.padded_fan_in) / kMultiple;
  const std::int64_t all = (a.layer.label + kMultiple - 1) / kMultiple;
  s.block_labels = std::clamp<std::int64_t>(fitting, 1, all) * kMultiple;
  s.block_groups = s.block_labels / a.layer.group_size;
  s.slots = s.block_labels + 1;
  s.features = workspace.take<float>(s.tiling.floats());
  s.feature_gradient = workspace.take<float>(s.tiling.floats());
  s.weight_gradient = workspace.take<float>(s.tiling.tiles * s.slots * s.padded_fan_in);
  s.bias_gradient = workspace.take<float>(s.tiling.tiles * s.slots);
  s.active = workspace.take<std::uint8_t>(s.tiling.tiles * s.slots);
  s.loss = workspace.take<double>(s.tiling.tiles);
  s.rows = workspace.take<float>(threads * rows_floats(a.layer, s.tiling));
  const std::int64_t lanes = is_normalised(a.loss) ? s.tiling.tiles * s.tiling.width : 0;
  s.reference = workspace.take<float>(lanes);
  s.exponentials = workspace.take<double>(lanes);
  s.log_sum = workspace.take<float>(lanes);
  s.factor = workspace.take<float>(lanes);
  s.share = workspace.take<float>(lanes);
  s.pair_logit = a.spread.own_pair_logit != nullptr ? a.spread.own_pair_logit
                                                    : workspace.take<float>(lanes > 0 ? a.pair : 0);
  if (by_strips) {
    s.strips = plan_strips(a.layer, s.block_labels, s.padded_fan_in, workspace);
    s.logits = workspace.take<float>(threads * s.slots * s.tiling.width);
  }
  return s;
}

// S of loss.h, after the first pass.
double log_sum_of(const FusedScratch& s, std::int64_t instance) {
  return static_cast<double>(s.reference[instance]) + std::log(s.exponentials[instance]);
}

// From the sums of the first pass to what the gradient pass needs of each instance; returns the loss.
// The formulas stand in loss.h.
double normalise(const FusedStepArguments& a, const FusedScratch& s) {
  const std::int64_t lanes = s.tiling.tiles * s.tiling.width;
  std::fill(s.share, s.share + lanes, 0.0f);
  for (std::int64_t pair = 0; pair < a.pair; ++pair) s.share[a.pair_instance[pair]] += 1.0f;
  for (std::int64_t i = 0; i < lanes; ++i) {
    s.share[i] = a.share_positives && s.share[i] > 0.0f ? 1.0f / s.share[i] : 1.0f;
    s.log_sum[i] = static_cast<float>(log_sum_of(s, i));
    s.exponentials[i] = 0.0;  // from here on the sum that makes the factor
  }
  double loss = 0.0;
  for (std::int64_t pair = 0; pair < a.pair; ++pair) {
    const std::int32_t instance = a.pair_instance[pair];
    const double label_weight = a.positive_weight == nullptr ? 1.0 : a.positive_weight[a.pair_label[pair]];
    const double weight = label_weight * static_cast<double>(s.share[instance]);
    const double u = static_cast<double>(s.log_sum[instance]) - static_cast<double>(s.pair_logit[pair]);
    if (a.loss == Loss::kSoftmax) {
      loss += weight * u;
      s.exponentials[instance] += weight;
    } else {  // log(1 + exp(u)) and sigmoid(u)
      const double e = std::exp(-std::abs(u));
      loss += weight * (std::max(u, 0.0) + std::log1p(e));
      s.exponentials[instance] += weight * (u < 0.0 ? e : 1.0) / (1.0 + e);
    }
  }
  for (std::int64_t i = 0; i < lanes; ++i) s.factor[i] = static_cast<float>(s.exponentials[i]);
  return loss * static_cast<double>(a.scale);
}

// Takes what the gradient pass needs of each instance from the caller.
void take_normalised(const FusedStepArguments& a, const FusedScratch& s) {
  for (std::int64_t i = 0; i < s.tiling.tiles * s.tiling.width; ++i) {
    const bool inside = i < a.batch;
    s.log_sum[i] = inside ? a.spread.log_sum[i] : FLT_MAX;  // exp(logit - FLT_MAX) overflows for no bias
    s.factor[i] = inside ? a.spread.factor[i] : 0.0f;
    s.share[i] = inside ? a.spread.share[i] : 1.0f;
  }
}

}  // namespace

std::int64_t fused_step(const FusedStepArguments& a, int threads, void* workspace) {
  Workspace arrays(workspace);
  const FusedScratch scratch = plan(a, threads, arrays);
  if (workspace == nullptr) return arrays.bytes();
  const Kernels& isa = kernels();
  const Tiling& tiling = scratch.tiling;
  const std::int64_t tile_floats = tiling.input * tiling.width;
  const std::int64_t groups = (a.layer.label + a.layer.group_size - 1) / a.layer.group_size;
  run_threads(threads, [&](int thread, Barrier& barrier) {
    const Range own = share(tiling.tiles, thread, threads);
    const auto sort_block = [&](GroupRange block) {
      if (scratch.logits == nullptr) return;
      for (std::int64_t run = thread; run < Strips::kRuns; run += threads)
        sort_into_strips(a.layer, scratch.strips, block.first, block.last, run);
      barrier.wait();
    };
    for (std::int64_t tile = own.first; tile < own.last; ++tile) {
      pack(tiling, tile, a.features, scratch.features);
      std::memset(scratch.feature_gradient + tile * tile_floats, 0,
                  static_cast<std::size_t>(tile_floats) * sizeof(float));
      scratch.loss[tile] = 0.0;
    }
    if (is_normalised(a.loss) && a.spread.log_sum == nullptr) {
      std::fill(scratch.reference + own.first * tiling.width, scratch.reference + own.last * tiling.width,
                -FLT_MAX);
      std::fill(scratch.exponentials + own.first * tiling.width,
                scratch.exponentials + own.last * tiling.width, 0.0);
      for (std::int64_t first = 0; first < groups; first += scratch.block_groups) {
        const GroupRange block{first, std::min(first + scratch.block_groups, groups)};
        sort_block(block);
        for (std::int64_t tile = own.first; tile < own.last; ++tile)
          isa.fused_normaliser(a, scratch, thread, block, tile);
        barrier.wait();
      }
      if (a.spread.own_log_sum != nullptr) return;  // all threads
      if (thread == 0) scratch.loss[0] = normalise(a, scratch);
      barrier.wait();
    } else if (is_normalised(a.loss)) {
      if (thread == 0) take_normalised(a, scratch);
      barrier.wait();
    }
    for (std::int64_t first = 0; first < groups; first += scratch.block_groups) {
      const GroupRange block{first, std::min(first + scratch.block_groups, groups)};
      sort_block(block);
      for (std::int64_t tile = own.first; tile < own.last; ++tile)
        isa.fused_tile(a, scratch, thread, block, tile);
      barrier.wait();
      const Range part = share_of_groups(a.layer, block.last - block.first, thread, threads);
      isa.fused_update(a, scratch, block, {block.first + part.first, block.first + part.last});
      barrier.wait();
    }
    for (std::int64_t tile = own.first; tile < own.last; ++tile)
      unpack(tiling, tile, scratch.feature_gradient, a.feature_gradient);
  });
  if (a.spread.own_log_sum != nullptr) {
    for (std::int64_t i = 0; i < a.batch; ++i) a.spread.own_log_sum[i] = log_sum_of(scratch, i);
    return arrays.bytes();
  }
  *a.loss_sum = 0.0;
  for (std::int64_t tile = 0; tile < tiling.tiles; ++tile) *a.loss_sum += scratch.loss[tile];
  return arrays.bytes();
}

}  // namespace xmlc::cpu
