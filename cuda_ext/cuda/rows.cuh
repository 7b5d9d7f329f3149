// How the layer is cut for the device. A warp takes a row tile: one label, or sixteen of a group (which share
// their inputs), and 32 or 64 instances, one or two for each lane. So a gathered input is one coalesced run
// of 128 bytes for each register, and all lanes need the same index and weight, which go through shared
// memory, 32 connections at a time. Row tiles are shared among warps by `segment`: any number of labels fits
// any grid.
#pragma once

#include <cstdint>

#include "scratch.h"
#include "xmlc/launch.cuh"

namespace xmlc::cuda {

constexpr int kWarps = 4;  // of a block
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kColumns = 32;  // connections that are staged at a time

struct Range {
  std::int64_t first, last;
};

// The part-th of `parts` nearly equal shares of [0, total).
XMLC_HOST_DEVICE Range share(std::int64_t total, std::int64_t part, std::int64_t parts) {
  return {total * part / parts, total * (part + 1) / parts};
}

inline dim3 grid_for(std::int64_t segments, std::int64_t tiles) {
  return dim3(static_cast<unsigned>((segments + kWarps - 1) / kWarps), static_cast<unsigned>(tiles));
}

// Calls go(rows, vectors) with the constants of a row tile.
template <int value>
struct Constant {
  static constexpr int kValue = value;
};
template <class Go>
void with_tile(const Rows& rows, const Go& go) {
  const bool one_row = rows_of_tile(rows.layer) == 1, one_vector = vectors_for(rows.batch) == 1;
  if (one_row && one_vector)
    go(Constant<1>(), Constant<1>());
  else if (one_row)
    go(Constant<1>(), Constant<2>());
  else if (one_vector)
    go(Constant<16>(), Constant<1>());
  else
    go(Constant<16>(), Constant<2>());
}

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % kWarp); }
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / kWarp); }
__device__ __forceinline__ std::int64_t segment() { return std::int64_t{blockIdx.x} * kWarps + warp(); }

// The row tiles of this warp.
__device__ __forceinline__ Range own_tiles(std::int64_t tiles, std::int64_t segments) {
  return segment() < segments ? share(tiles, segment(), segments) : Range{0, 0};
}

// Instance of this lane's register v; may lie beyond the batch.
template <int kVectors>
__device__ __forceinline__ std::int64_t instance(int v) {
  return (std::int64_t{blockIdx.y} * kVectors + v) * kWarp + lane();
}

__device__ __forceinline__ std::int32_t load_index(const Layer& layer, std::int64_t at) {
  return layer.index_type == IndexType::kUInt16 ? static_cast<const std::uint16_t*>(layer.indices)[at]
                                                : static_cast<const std::int32_t*>(layer.indices)[at];
}

// Up to 32 connections of a row tile, for all lanes of one warp.
template <int kRows>
struct Stage {
  std::int32_t index[kColumns];
  float weight[kColumns][kRows];
};

// Lane k brings connection first + k. Between two calls the warp must have read what it needs: it meets
// twice.
template <int kRows>
__device__ __forceinline__ int fill(Stage<kRows>& stage, const Layer& layer, std::int64_t label, int rows,
                                    std::int64_t first) {
  const std::int64_t left = layer.fan_in - first;
  const int count = left < kColumns ? static_cast<int>(left) : kColumns;
  __syncwarp();
  if (lane() < count) {
    const std::int64_t k = first + lane();
    stage.index[lane()] = load_index(layer, label / layer.group_size * layer.fan_in + k);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      stage.weight[lane()][r] =
          r < rows ? load_weight(layer, label + r, (label + r) * layer.fan_in + k) : 0.0f;
  }
  __syncwarp();
  return count;
}

__device__ __forceinline__ int rows_from(const Rows& rows, std::int64_t label, int most) {
  const std::int64_t left = rows.first + rows.count - label;
  return left < most ? static_cast<int>(left) : most;
}

template <class Real>
__device__ __forceinline__ Real sum_over_lanes(Real value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(kAllLanes, value, static_cast<unsigned>(distance));
  return value;
}

}  // namespace xmlc::cuda
