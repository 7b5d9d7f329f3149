// Threads and scratch of exact top-k. Each thread keeps the best of its own share of the labels; the
// shares are merged in rising order of labels, so ties go to the lowest label for any number of threads.
#include <limits>

#include "block_strips.h"
#include "ops.h"
#include "parallel.h"
#include "workspace.h"

namespace xmlc::cpu {
namespace {

// Merges the threads' falling lists of one instance, each `stride` apart; the first list wins ties.
void merge(const float* scores, const std::int64_t* labels, std::int64_t stride, int threads, std::int64_t k,
           std::int64_t* next, float* out_scores, std::int64_t* out_labels) {
  std::fill(next, next + threads, 0);
  for (std::int64_t rank = 0; rank < k; ++rank) {
    int winner = 0;
    float best = -std::numeric_limits<float>::infinity();
    std::int64_t label = -1;
    for (int t = 0; t < threads; ++t) {
      const std::int64_t at = t * stride + next[t];
      if (next[t] < k && labels[at] >= 0 && (label < 0 || scores[at] > best)) {
        winner = t;
        best = scores[at];
        label = labels[at];
      }
    }
    out_scores[rank] = best;
    out_labels[rank] = label;
    if (label >= 0) ++next[winner];
  }
}

}  // namespace

std::int64_t top_labels(const TopLabelsArguments& a, int threads, void* workspace) {
  const Tiling tiling = choose_tiling(a.batch, a.layer.input, a.layer.group_size);
  const std::int64_t stride = tiling.tiles * tiling.width * a.k;  // of one thread's lists
  Workspace arrays(workspace);
  constexpr std::int64_t kFew = 2;  // instances up to which a pass for each is faster than a padded tile
  const bool few = a.batch <= kFew;
  float* features = arrays.take<float>(few ? a.batch * a.layer.input : tiling.floats());
  float* scores = arrays.take<float>(threads * stride);
  std::int64_t* labels = arrays.take<std::int64_t>(threads * stride);
  float* rows = arrays.take<float>(threads * rows_floats(a.layer, tiling));
  const BlockStrips blocks(a.layer, tiling, 1024, threads, arrays);
  std::int64_t* next = arrays.take<std::int64_t>(threads * threads);
  if (workspace == nullptr) return arrays.bytes();
  const Kernels& isa = kernels();
  const std::int64_t groups = (a.layer.label + a.layer.group_size - 1) / a.layer.group_size;
  run_threads(threads, [&](int thread, Barrier& barrier) {
    if (few) {
      const Range inputs = share(a.layer.input, thread, threads);
      for (std::int64_t i = inputs.first; i < inputs.last; ++i)
        for (std::int64_t b = 0; b < a.batch; ++b)
          features[b * a.layer.input + i] = a.features[i * a.batch + b];
    } else {
      const Range tiles = share(tiling.tiles, thread, threads);
      for (std::int64_t tile = tiles.first; tile < tiles.last; ++tile)
        pack(tiling, tile, a.features, features);
    }
    const TopScratch scratch{{tiling, features, rows + thread * rows_floats(a.layer, tiling),
                              blocks.strips(thread), blocks.logits(thread)},
                             scores + thread * stride,
                             labels + thread * stride};
    std::fill(scratch.scores, scratch.scores + stride, -std::numeric_limits<float>::infinity());
    std::fill(scratch.labels, scratch.labels + stride, -1);
    barrier.wait();
    const Range own = share(groups, thread, threads);
    for (std::int64_t first = own.first; first < own.last; first += blocks.groups()) {
      const GroupRange block{first, std::min(first + blocks.groups(), own.last)};
      blocks.sort(thread, block);
      if (few)
        for (std::int64_t b = 0; b < a.batch; ++b) isa.top_labels_one(a, scratch, block, b);
      else
        for (std::int64_t tile = 0; tile < tiling.tiles; ++tile) isa.top_labels(a, scratch, block, tile);
    }
    barrier.wait();
    const Range instances = share(a.batch, thread, threads);
    for (std::int64_t b = instances.first; b < instances.last; ++b)
      merge(scores + b * a.k, labels + b * a.k, stride, threads, a.k, next + thread * threads,
            a.scores + b * a.k, a.labels + b * a.k);
  });
  return arrays.bytes();
}

}  // namespace xmlc::cpu
