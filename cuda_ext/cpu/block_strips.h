// Strips for the drivers alone: a vector must not be compiled for one instruction set.
#pragma once

#include <vector>

#include "strips.h"

namespace xmlc::cpu {

// For the ops whose threads walk over labels of their own: the blocks, and each thread's strips and logits.
class BlockStrips {
 public:
  // `groups`: of a block whose passes do not go by strips, so that its weights stay cached from tile to tile.
  BlockStrips(const Layer& layer, const Tiling& tiling, std::int64_t groups, int threads,
              Workspace& workspace)
      : layer_(layer), by_strips_(use_strips(layer, tiling)), groups_(by_strips_ ? kLabels : groups) {
    if (!by_strips_) return;
    strips_.reserve(static_cast<std::size_t>(threads));
    for (int thread = 0; thread < threads; ++thread)
      strips_.push_back(plan_strips(layer, kLabels, layer.fan_in, workspace));
    logits_ = workspace.take<float>(threads * kLogits);
  }
  std::int64_t groups() const { return groups_; }
  Strips strips(int thread) const {
    return by_strips_ ? strips_[static_cast<std::size_t>(thread)] : Strips{};
  }
  float* logits(int thread) const { return by_strips_ ? logits_ + thread * kLogits : nullptr; }
  // To be called by the thread before its passes over a block.
  void sort(int thread, GroupRange block) const {
    if (!by_strips_) return;
    for (std::int64_t run = 0; run < Strips::kRuns; ++run)
      sort_into_strips(layer_, strips(thread), block.first, block.last, run);
  }

 private:
  static constexpr std::int64_t kLabels = 4096;
  static constexpr std::int64_t kLogits = (kLabels + 1) * 16;
  const Layer& layer_;
  bool by_strips_;
  std::int64_t groups_;
  std::vector<Strips> strips_;
  float* logits_ = nullptr;
};

}  // namespace xmlc::cpu
