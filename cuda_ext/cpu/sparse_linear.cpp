// Threads and scratch of the unfused layer. The logits and the weight gradient are split by label, the
// feature gradient, a sum over labels, by tile of the batch: each sum has one owner and one order.
#include "block_strips.h"
#include "ops.h"
#include "parallel.h"
#include "workspace.h"

namespace xmlc::cpu {
namespace {

std::int64_t groups_of(const Layer& layer) { return (layer.label + layer.group_size - 1) / layer.group_size; }

}  // namespace

std::int64_t sparse_linear(const SparseLinearArguments& a, int threads, void* workspace) {
  const Tiling tiling = choose_tiling(a.batch, a.layer.input, a.layer.group_size);
  Workspace scratch(workspace);
  float* features = scratch.take<float>(tiling.floats());
  float* rows = scratch.take<float>(threads * rows_floats(a.layer, tiling));
  const BlockStrips blocks(a.layer, tiling, 256, threads, scratch);
  if (workspace == nullptr) return scratch.bytes();
  const Kernels& isa = kernels();
  run_threads(threads, [&](int thread, Barrier& barrier) {
    const Range own_tiles = share(tiling.tiles, thread, threads);
    for (std::int64_t tile = own_tiles.first; tile < own_tiles.last; ++tile)
      pack(tiling, tile, a.features, features);
    barrier.wait();
    const Range own = share(groups_of(a.layer), thread, threads);
    const LogitsScratch logits{tiling, features, rows + thread * rows_floats(a.layer, tiling),
                               blocks.strips(thread), blocks.logits(thread)};
    for (std::int64_t first = own.first; first < own.last; first += blocks.groups()) {
      const GroupRange block{first, std::min(first + blocks.groups(), own.last)};
      blocks.sort(thread, block);
      for (std::int64_t tile = 0; tile < tiling.tiles; ++tile) isa.logits(a, logits, block, tile);
    }
  });
  return scratch.bytes();
}

std::int64_t sparse_linear_feature_gradient(const SparseLinearArguments& a, int threads, void* workspace) {
  const Tiling tiling = choose_tiling(a.batch, a.layer.input, a.layer.group_size);
  Workspace scratch(workspace);
  float* gradient = scratch.take<float>(tiling.floats());
  float* rows = scratch.take<float>(threads * rows_floats(a.layer, tiling));
  if (workspace == nullptr) return scratch.bytes();
  const Kernels& isa = kernels();
  run_threads(threads, [&](int thread, Barrier&) {
    const Range own = share(tiling.tiles, thread, threads);
    const std::int64_t tile_floats = tiling.input * tiling.width;
    for (std::int64_t tile = own.first; tile < own.last; ++tile) {
      std::memset(gradient + tile * tile_floats, 0, static_cast<std::size_t>(tile_floats) * sizeof(float));
      isa.feature_gradient(a, tiling, gradient, rows + thread * rows_floats(a.layer, tiling),
                           {0, groups_of(a.layer)}, tile);
      unpack(tiling, tile, gradient, a.feature_gradient);
    }
  });
  return scratch.bytes();
}

std::int64_t sparse_linear_weight_gradient(const SparseLinearArguments& a, int threads, void* workspace) {
  const Tiling tiling = choose_tiling(a.batch, a.layer.input, a.layer.group_size);
  Workspace scratch(workspace);
  float* features = scratch.take<float>(tiling.floats());
  float* row = scratch.take<float>(threads * rows_floats(a.layer, tiling));
  if (workspace == nullptr) return scratch.bytes();
  const Kernels& isa = kernels();
  run_threads(threads, [&](int thread, Barrier& barrier) {
    const Range own_tiles = share(tiling.tiles, thread, threads);
    for (std::int64_t tile = own_tiles.first; tile < own_tiles.last; ++tile)
      pack(tiling, tile, a.features, features);
    barrier.wait();
    const Range own = share(groups_of(a.layer), thread, threads);
    isa.weight_gradient(a, tiling, features, row + thread * rows_floats(a.layer, tiling),
                        {own.first, own.last});
  });
  return scratch.bytes();
}

}  // namespace xmlc::cpu
