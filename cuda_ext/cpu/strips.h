// The connections of a block of labels, sorted by strips of inputs.
//
// With many inputs, a tile of the batch outgrows its share of the caches even at its least width, and every
// gathered row comes from memory. The passes of uniform fan-in then walk over a block of labels strip
// by strip: a strip's rows fit the cache, and the block's logits (one row for each label) are the only other
// thing that they touch. Sorting costs each step two passes over the indices of a block, which then serve all
// tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiling.h"
#include "workspace.h"
#include "xmlc/arguments.h"

namespace xmlc::cpu {

struct GroupRange {
  std::int64_t first, last;
};

struct Connection {
  std::uint16_t input;  // within the strip
  std::uint16_t label;  // within the block; `Strips::labels` for padding
  std::uint32_t slot;   // of its weight gradient, in a row of padded_fan_in for each label of the block
  float weight;
};

struct Strips {
  static constexpr std::int64_t kInputs = 1024;  // of a strip: 64 KiB of a tile
  static constexpr std::int64_t kRuns = 4;  // parts of a block that are sorted on their own, by any thread
  static constexpr std::int64_t kPadding = 16;  // a strip's connections of a run are padded to a multiple

  std::int64_t strips;
  std::int64_t labels;      // of a block
  std::int64_t run_labels;  // of a run
  std::int64_t stride;      // connections of a run, at most
  std::int64_t padded_fan_in;
  Connection* connections;  // [kRuns, stride]
  std::int32_t* first;      // [kRuns, strips + 1]
};

// Whether the layer's passes go by strips: depends on shapes alone, as the order of sums does.
inline bool use_strips(const Layer& layer, const Tiling& tiling) {
  constexpr std::int64_t kTiles = 4;  // fewer do not repay the sorting
  return layer.group_size == 1 && tiling.tiles >= kTiles && tiling.input > kMostTiledInputs;
}

inline Strips plan_strips(const Layer& layer, std::int64_t labels, std::int64_t padded_fan_in,
                          Workspace& workspace) {
  Strips s;
  s.strips = (layer.input + Strips::kInputs - 1) / Strips::kInputs;
  s.labels = labels;
  s.run_labels = (labels + Strips::kRuns - 1) / Strips::kRuns;
  s.stride = s.run_labels * layer.fan_in + s.strips * Strips::kPadding;
  s.padded_fan_in = padded_fan_in;
  s.connections = workspace.take<Connection>(Strips::kRuns * s.stride);
  s.first = workspace.take<std::int32_t>(Strips::kRuns * (s.strips + 1));
  return s;
}

// Sorts one run of the block of labels [first_label, last_label) by strip.
void sort_into_strips(const Layer& layer, const Strips& strips, std::int64_t first_label,
                      std::int64_t last_label, std::int64_t run);

}  // namespace xmlc::cpu
