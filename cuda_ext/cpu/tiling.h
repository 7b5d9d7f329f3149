// The batch is cut into tiles of 16, 32 or 64 instances whose features stay in the caches, and the features
// are packed tile by tile: [tile, input, width]. A gathered input is then one contiguous run: the wider, the
// less it costs that it lies at a random place, and the fewer times a label's own work is done.
//
// The width depends on shapes alone, never on the machine or the number of threads: sums over the batch
// run tile by tile, so it decides the last bits of the results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace xmlc::cpu {

constexpr std::int64_t kMostTiledInputs = 1 << 14;  // beyond, uniform fan-in goes by strips; see strips.h

struct Tiling {
  std::int64_t batch, input;
  std::int64_t width;  // instances of one tile; the last tile is padded with zeros
  std::int64_t tiles;

  std::int64_t floats() const { return tiles * input * width; }
};

inline Tiling choose_tiling(std::int64_t batch, std::int64_t input, std::int64_t group_size) {
  const std::int64_t tile_floats = group_size > 1              ? 1 << 20  // 4 MiB
                                   : input <= kMostTiledInputs ? 1 << 19
                                                               : 0;
  std::int64_t width = group_size == 1 || batch <= 16 ? 16 : 32;
  while (width < 64 && width < batch && 2 * width * input <= tile_floats) width *= 2;
  return {batch, input, width, (batch + width - 1) / width};
}

// [input, batch] -> one tile [input, width] and back.
inline void pack(const Tiling& tiling, std::int64_t tile, const float* from, float* to) {
  const std::int64_t first = tile * tiling.width;
  const std::int64_t count = std::min(tiling.width, tiling.batch - first);
  float* row = to + tile * tiling.input * tiling.width;
  for (std::int64_t i = 0; i < tiling.input; ++i, row += tiling.width) {
    std::memcpy(row, from + i * tiling.batch + first, count * sizeof(float));
    std::memset(row + count, 0, (tiling.width - count) * sizeof(float));
  }
}
inline void unpack(const Tiling& tiling, std::int64_t tile, const float* from, float* to) {
  const std::int64_t first = tile * tiling.width;
  const std::int64_t count = std::min(tiling.width, tiling.batch - first);
  const float* row = from + tile * tiling.input * tiling.width;
  for (std::int64_t i = 0; i < tiling.input; ++i, row += tiling.width)
    std::memcpy(to + i * tiling.batch + first, row, count * sizeof(float));
}

}  // namespace xmlc::cpu
