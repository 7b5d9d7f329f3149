// One pass over the logits of some labels, which no memory needs to hold: a visitor takes them from the
// registers.
//
// A visitor has a State for each thread and
//   begin(State&, Range labels, segment)           before the first label of the warp,
//   visit(State&, label, instance[], logit[])      for each label, rising; all lanes together,
//   end(State&, segment)                           after the last.
#pragma once

#include "rows.cuh"

namespace xmlc::cuda {

// Pairs by rising label, read in the rising order of labels: like a merge. All lanes of a warp read the same.
struct LabelPairs {
  const std::int32_t* label;  // [pair]
  std::int64_t pair;

  // The first pair whose label is not below.
  __device__ std::int64_t first_of(std::int64_t wanted) const {
    std::int64_t low = 0, high = pair;
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (label[middle] < wanted)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  // Moves to a label's first pair; returns how many it has.
  __device__ std::int64_t advance(std::int64_t& next, std::int64_t wanted) const {
    while (next < pair && label[next] < wanted) ++next;
    std::int64_t end = next;
    while (end < pair && label[end] == wanted) ++end;
    return end - next;
  }
};

// Adds a label's entries to its logits; labels come in rising order.
template <int kVectors>
__device__ __forceinline__ void add_offsets(const LabelPairs& pairs, const LogitOffsets& offsets,
                                            std::int64_t& next, std::int64_t label,
                                            const std::int64_t (&at)[kVectors], float (&logit)[kVectors]) {
  const std::int64_t count = pairs.advance(next, label);
  for (std::int64_t e = next; e < next + count; ++e)
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (at[v] == offsets.instance[e]) logit[v] += offsets.value[e];
}

template <class Visitor>
struct LogitsArguments {
  Rows rows;
  const float* features;  // [input, batch]
  LogitOffsets offsets;
  std::int64_t tiles, segments;
  Visitor visitor;
};

template <int kRows>
struct LogitsShared {
  Stage<kRows> stage[kWarps];
};

template <int kRows, int kVectors, class Visitor>
__global__ void logits_kernel(LogitsArguments<Visitor> a) {
  Stage<kRows>& stage = shared_memory<LogitsShared<kRows>>().stage[warp()];
  const Layer& layer = a.rows.layer;
  const Range own = own_tiles(a.tiles, a.segments);
  if (own.first >= own.last) return;  // the whole warp; no barrier of the block follows
  std::int64_t at[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) at[v] = instance<kVectors>(v);
  typename Visitor::template State<kVectors> state;
  const LabelPairs offsets{a.offsets.label, a.offsets.entry};
  std::int64_t next_offset = offsets.first_of(a.rows.first + own.first * kRows);
  a.visitor.begin(state, a.rows.first + own.first * kRows, segment(), at);
  for (std::int64_t tile = own.first; tile < own.last; ++tile) {
    const std::int64_t label = a.rows.first + tile * kRows;
    const int rows = rows_from(a.rows, label, kRows);
    float logit[kRows][kVectors];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) logit[r][v] = r < rows ? layer.bias[label + r] : 0.0f;
    for (std::int64_t first = 0; first < layer.fan_in; first += kColumns) {
      const int count = fill(stage, layer, label, rows, first);
#pragma unroll 8
      for (int c = 0; c < count; ++c) {
        const float* row = a.features + std::int64_t{stage.index[c]} * a.rows.batch;
        float feature[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) feature[v] = at[v] < a.rows.batch ? row[at[v]] : 0.0f;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int v = 0; v < kVectors; ++v) logit[r][v] += stage.weight[c][r] * feature[v];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
      add_offsets(offsets, a.offsets, next_offset, label + r, at, logit[r]);
      a.visitor.visit(state, label + r, at, logit[r]);
    }
  }
  a.visitor.end(state, segment(), at);
}

template <class Visitor>
void visit_logits(const char* name, const Rows& rows, const float* features, const LogitOffsets& offsets,
                  std::int64_t segments, const Visitor& visitor, cudaStream_t stream) {
  const LogitsArguments<Visitor> arguments{rows, features, offsets, row_tiles(rows), segments, visitor};
  with_tile(rows, [&](auto height, auto vectors) {
    constexpr int kRows = decltype(height)::kValue, kVectors = decltype(vectors)::kValue;
    launch(name, &logits_kernel<kRows, kVectors, Visitor>, grid_for(segments, batch_tiles(rows.batch)),
           kWarps * kWarp, sizeof(LogitsShared<kRows>), stream, arguments);
  });
}

}  // namespace xmlc::cuda
