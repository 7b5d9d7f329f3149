// The unfused layer, and the gradients that the fused step shares.
//
// The feature gradient of many labels meets in the same rows: by atomics (a warp adds 128 bytes at a time,
// which the second-level cache does), or, where bits must not depend on the order, each warp owns some inputs
// and reads all connections in order. The weight gradient needs no atomics: a warp owns its row tile, every
// lane sums its own instances for 32 weights at a time, and 31 exchanges then add the lanes.
#include "gradients.h"
#include "tensor_products.cuh"

namespace xmlc::cuda {
namespace {

constexpr int kOwnInputs = 16;  // of one warp, in the order that needs no atomics

struct StoreLogits {
  float* logits;  // [label, batch]
  std::int64_t batch;

  template <int kVectors>
  struct State {};
  template <int kVectors>
  __device__ void begin(State<kVectors>&, std::int64_t, std::int64_t,
                        const std::int64_t (&)[kVectors]) const {}
  template <int kVectors>
  __device__ void visit(State<kVectors>&, std::int64_t label, const std::int64_t (&at)[kVectors],
                        const float (&logit)[kVectors]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (at[v] < batch) logits[label * batch + at[v]] = logit[v];
  }
  template <int kVectors>
  __device__ void end(State<kVectors>&, std::int64_t, const std::int64_t (&)[kVectors]) const {}
};

struct GradientArguments {
  Rows rows;
  const float* features;        // [input, batch]
  const float* logit_gradient;  // [rows.count, batch]
  float* gradient;              // [input, batch] or [rows.count, fan_in]
  std::int64_t tiles, segments;
};

template <int kRows>
struct GradientShared {
  Stage<kRows> stage[kWarps];
};

template <int kRows, int kVectors>
struct OwnerShared {
  Stage<kRows> stage[kWarps];
  float sum[kWarps][kOwnInputs][kVectors * kWarp];
};

// Logit gradients of a row tile for this lane's instances; zero beyond labels and batch. True if any lane has
// one.
template <int kRows, int kVectors>
__device__ __forceinline__ bool load_gradients(const GradientArguments& a, std::int64_t label, int rows,
                                               const std::int64_t (&at)[kVectors],
                                               float (&gradient)[kRows][kVectors]) {
  bool any = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const bool inside = r < rows && at[v] < a.rows.batch;
      gradient[r][v] = inside ? a.logit_gradient[(label - a.rows.first + r) * a.rows.batch + at[v]] : 0.0f;
      any |= gradient[r][v] != 0.0f;
    }
  return __any_sync(kAllLanes, any) != 0;
}

template <int kRows, int kVectors>
__global__ void feature_gradient_kernel(GradientArguments a) {
  Stage<kRows>& stage = shared_memory<GradientShared<kRows>>().stage[warp()];
  const Range own = own_tiles(a.tiles, a.segments);
  std::int64_t at[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) at[v] = instance<kVectors>(v);
  for (std::int64_t tile = own.first; tile < own.last; ++tile) {
    const std::int64_t label = a.rows.first + tile * kRows;
    const int rows = rows_from(a.rows, label, kRows);
    float gradient[kRows][kVectors];
    if (!load_gradients(a, label, rows, at, gradient)) continue;
    for (std::int64_t first = 0; first < a.rows.layer.fan_in; first += kColumns) {
      const int count = fill(stage, a.rows.layer, label, rows, first);
#pragma unroll 4
      for (int c = 0; c < count; ++c) {
        float* row = a.gradient + std::int64_t{stage.index[c]} * a.rows.batch;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          float sum = 0.0f;
#pragma unroll
          for (int r = 0; r < kRows; ++r) sum += stage.weight[c][r] * gradient[r][v];
          if (at[v] < a.rows.batch && sum != 0.0f) atomicAdd(row + at[v], sum);
        }
      }
    }
  }
}

template <int kRows, int kVectors>
__global__ void ordered_feature_gradient_kernel(GradientArguments a) {
  auto& shared = shared_memory<OwnerShared<kRows, kVectors>>();
  Stage<kRows>& stage = shared.stage[warp()];
  float (&sum)[kOwnInputs][kVectors * kWarp] = shared.sum[warp()];
  const std::int64_t first_input = segment() * kOwnInputs;
  if (first_input >= a.rows.layer.input) return;  // the whole warp; no barrier of the block follows
  std::int64_t at[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) at[v] = instance<kVectors>(v);
  const auto each_own = [&](const auto& visit) {
    for (int i = 0; i < kOwnInputs && first_input + i < a.rows.layer.input; ++i)
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (at[v] < a.rows.batch)
          visit(a.gradient[(first_input + i) * a.rows.batch + at[v]], sum[i][v * kWarp + lane()]);
  };
  each_own([](float& global, float& own) { own = global; });  // each lane reads only what it wrote itself
  for (std::int64_t tile = 0; tile < a.tiles; ++tile) {
    const std::int64_t label = a.rows.first + tile * kRows;
    const int rows = rows_from(a.rows, label, kRows);
    float gradient[kRows][kVectors] = {};
    bool loaded = false;
    for (std::int64_t first = 0; first < a.rows.layer.fan_in; first += kColumns) {
      const int count = fill(stage, a.rows.layer, label, rows, first);
      const std::int64_t mine = lane() < count ? stage.index[lane()] - first_input : -1;
      unsigned hits = __ballot_sync(kAllLanes, mine >= 0 && mine < kOwnInputs);
      if (hits != 0 && !loaded) loaded = (load_gradients(a, label, rows, at, gradient), true);
      for (; hits != 0; hits &= hits - 1) {
        const int c = __ffs(static_cast<int>(hits)) - 1;
        const int input = static_cast<int>(stage.index[c] - first_input);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          float added = 0.0f;
#pragma unroll
          for (int r = 0; r < kRows; ++r) added += stage.weight[c][r] * gradient[r][v];
          if (at[v] < a.rows.batch) sum[input][v * kWarp + lane()] += added;
        }
      }
    }
  }
  each_own([](float& global, float& own) { global = own; });
}

// Adds 32 values over all lanes: lane i gets the sum of the i-th. Each exchange halves what is left to add.
__device__ __forceinline__ float sum_transposed(float (&value)[kWarp]) {
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) {
    const bool upper = (lane() & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? value[i] : value[i + half];
      const float kept = upper ? value[i + half] : value[i];
      value[i] = kept + __shfl_xor_sync(kAllLanes, sent, static_cast<unsigned>(half));
    }
  }
  return value[0];
}

template <int kRows>
__global__ void weight_gradient_kernel(GradientArguments a) {
  constexpr int kAtOnce = kWarp / kRows;  // connections: together 32 weights
  const Range own = own_tiles(a.tiles, a.segments);
  const Layer& layer = a.rows.layer;
  for (std::int64_t tile = own.first; tile < own.last; ++tile) {
    const std::int64_t label = a.rows.first + tile * kRows;
    const int rows = rows_from(a.rows, label, kRows);
    for (std::int64_t first = 0; first < layer.fan_in; first += kAtOnce) {
      const float* row[kAtOnce];  // of the features; null beyond fan_in
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c)
        row[c] = first + c < layer.fan_in
                     ? a.features + a.rows.batch *
                                        load_index(layer, label / layer.group_size * layer.fan_in + first + c)
                     : nullptr;
      float sum[kWarp] = {};
      for (std::int64_t begin = 0; begin < a.rows.batch; begin += kWarp) {
        const std::int64_t at[1] = {begin + lane()};
        float gradient[kRows][1];
        if (!load_gradients(a, label, rows, at, gradient)) continue;
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          const float feature = row[c] != nullptr && at[0] < a.rows.batch ? row[c][at[0]] : 0.0f;
#pragma unroll
          for (int r = 0; r < kRows; ++r) sum[r * kAtOnce + c] += gradient[r][0] * feature;
        }
      }
      const float total = sum_transposed(sum);
      const int r = lane() / kAtOnce;
      const std::int64_t k = first + lane() % kAtOnce;
      if (r < rows && k < layer.fan_in) a.gradient[(label - a.rows.first + r) * layer.fan_in + k] = total;
    }
  }
}

Rows all_rows(const SparseLinearArguments& a) { return {a.layer, 0, a.layer.label, a.batch}; }

}  // namespace

void add_feature_gradient(const Rows& rows, const float* logit_gradient, float* feature_gradient,
                          const Queue& queue) {
  const std::int64_t owners = (rows.layer.input + kOwnInputs - 1) / kOwnInputs;
  const std::int64_t segments = queue.deterministic ? owners : segments_for(rows);
  const GradientArguments arguments{rows,    nullptr, logit_gradient, feature_gradient, row_tiles(rows),
                                    segments};
  const dim3 grid = grid_for(segments, batch_tiles(rows.batch));
  with_tile(rows, [&](auto height, auto vectors) {
    constexpr int kRows = decltype(height)::kValue, kVectors = decltype(vectors)::kValue;
    if (queue.deterministic)
      launch("ordered_feature_gradient", &ordered_feature_gradient_kernel<kRows, kVectors>, grid,
             kWarps * kWarp, sizeof(OwnerShared<kRows, kVectors>), queue.stream, arguments);
    else
      launch("feature_gradient", &feature_gradient_kernel<kRows, kVectors>, grid, kWarps * kWarp,
             sizeof(GradientShared<kRows>), queue.stream, arguments);
  });
}

void compute_weight_gradient(const Rows& rows, const float* features, const float* logit_gradient,
                             float* weight_gradient, const Queue& queue) {
  const std::int64_t segments = segments_for(rows);
  const GradientArguments arguments{rows,    features, logit_gradient, weight_gradient, row_tiles(rows),
                                    segments};
  if (rows_of_tile(rows.layer) == 1)
    launch("weight_gradient", &weight_gradient_kernel<1>, grid_for(segments, 1), kWarps * kWarp, 0,
           queue.stream, arguments);
  else
    launch("weight_gradient", &weight_gradient_kernel<16>, grid_for(segments, 1), kWarps * kWarp, 0,
           queue.stream, arguments);
}

std::int64_t sparse_linear(const SparseLinearArguments& a, const Queue& queue, void* workspace) {
  if (workspace == nullptr) return 0;
  const Rows rows = all_rows(a);
  visit_logits("sparse_linear", rows, Features{a.features, a.narrow_features}, {}, segments_for(rows),
               StoreLogits{a.logits, a.batch}, queue.stream);
  return 0;
}

std::int64_t sparse_linear_feature_gradient(const SparseLinearArguments& a, const Queue& queue,
                                            void* workspace) {
  if (workspace == nullptr) return 0;
  clear(a.feature_gradient, static_cast<std::size_t>(a.layer.input * a.batch) * sizeof(float), queue.stream);
  if (a.narrow_logit_gradient != nullptr)
    add_feature_gradient(all_rows(a), a.narrow_logit_gradient, a.feature_gradient, queue);
  else
    add_feature_gradient(all_rows(a), a.logits, a.feature_gradient, queue);
  return 0;
}

std::int64_t sparse_linear_weight_gradient(const SparseLinearArguments& a, const Queue& queue,
                                           void* workspace) {
  if (workspace == nullptr) return 0;
  if (a.narrow_features != nullptr)
    compute_weight_gradient(all_rows(a), a.narrow_features, a.narrow_logit_gradient, a.weight_gradient,
                            queue);
  else
    compute_weight_gradient(all_rows(a), a.features, a.logits, a.weight_gradient, queue);
  return 0;
}

}  // namespace xmlc::cuda
