// Gradients of features and weights on the tensor cores, for logit gradients in bfloat16: small dense
// products of sixteen labels of a group, summed in float32.
//
//   feature_gradient[k, b] += sum over 16 labels    weight^T [16 connections, 16 labels] gradient [16, 64]
//   weight_gradient[l, k]   = sum over instances    gradient [16 labels, 16] features^T [16, 8 connections]
#include "gradients.h"
#include "tensor_products.cuh"

namespace xmlc::cuda {
namespace {

constexpr int kConnections = 64;  // of a row tile, whose weight gradients are in registers at a time

struct ProductGradientArguments {
  Rows rows;                       // weights in bfloat16, groups of at least 16
  const BFloat16* features;        // [input, batch]
  const BFloat16* logit_gradient;  // [rows.count, batch]
  float* gradient;                 // [input, batch] or [rows.count, fan_in]
  std::int64_t tiles, segments;
  bool whole_features, whole_gradients, whole_weights;  // see load_run
};

template <int count>
__device__ __forceinline__ bool any_set(const Run<count>& run) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < count / 2; ++i) any |= run.word[i] != 0;
  return any;
}

__device__ __forceinline__ const BFloat16* gradient_row(const ProductGradientArguments& a,
                                                        std::int64_t label) {
  return a.logit_gradient + (label - a.rows.first) * a.rows.batch;
}

__global__ void product_feature_gradient_kernel(ProductGradientArguments a) {
  constexpr int kVectors = kProductInstances / kWarp;
  auto& value = shared_memory<ProductShared>().value[warp()];
  const Layer& layer = a.rows.layer;
  const auto* weights = static_cast<const BFloat16*>(layer.weight);
  const Range own = own_tiles(a.tiles, a.segments);
  const std::int64_t own_instances = std::int64_t{blockIdx.y} * kProductInstances + 8 * fragment_g();
  for (std::int64_t tile = own.first; tile < own.last; ++tile) {
    const std::int64_t label = a.rows.first + tile * kProductRows;
    const int rows = rows_from(a.rows, label, kProductRows);
    Run<8> gradient[4] = {};  // of labels 2t, 2t + 1, 2t + 8 and 2t + 9
    bool any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 2 * fragment_t() + i % 2 + i / 2 * 8;
      if (r >= rows) continue;
      gradient[i] = load_run<8>(gradient_row(a, label + r), own_instances, a.rows.batch, a.whole_gradients);
      any |= any_set(gradient[i]);
    }
    if (__any_sync(kAllLanes, any) == 0) continue;
    for (std::int64_t first = 0; first < layer.fan_in; first += kProductDepth) {
      // Rows g and g + 8 of the product are connections 2g and 2g + 1.
      Run<2> weight[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 2 * fragment_t() + i % 2 + i / 2 * 8;
        if (r < rows)
          weight[i] = load_run<2>(weights + (label + r) * layer.fan_in, first + 2 * fragment_g(),
                                  layer.fan_in, a.whole_weights);
      }
      const FragmentA factor{{low_halves(weight[0].word[0], weight[1].word[0]),
                              high_halves(weight[0].word[0], weight[1].word[0]),
                              low_halves(weight[2].word[0], weight[3].word[0]),
                              high_halves(weight[2].word[0], weight[3].word[0])}};
      __syncwarp();  // the former products have been read
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        FragmentC product{};
        multiply_add(product, factor, column_of(gradient, j));
        store_product(value, product, 2 * fragment_g(), 2 * fragment_g() + 1, j);
      }
      __syncwarp();
      const std::int64_t left = layer.fan_in - first;
      const int count = left < kProductDepth ? static_cast<int>(left) : kProductDepth;
      for (int c = 0; c < count; ++c) {
        const std::int64_t input = load_index(layer, label / layer.group_size * layer.fan_in + first + c);
        float* row = a.gradient + input * a.rows.batch;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const std::int64_t at = instance<kVectors>(v);
          if (at < a.rows.batch) atomicAdd(row + at, value[c][v * kWarp + lane()]);
        }
      }
    }
  }
}

__global__ void product_weight_gradient_kernel(ProductGradientArguments a) {
  const Layer& layer = a.rows.layer;
  const Range own = own_tiles(a.tiles, a.segments);
  for (std::int64_t tile = own.first; tile < own.last; ++tile) {
    const std::int64_t label = a.rows.first + tile * kProductRows;
    const int rows = rows_from(a.rows, label, kProductRows);
    for (std::int64_t block = 0; block < layer.fan_in; block += kConnections) {
      FragmentC sum[kConnections / 8] = {};
      for (std::int64_t begin = 0; begin < a.rows.batch; begin += kProductInstances) {
        const std::int64_t own_instances = begin + 16 * fragment_t();
        Run<8> gradient[2][2] = {};  // of labels g and g + 8
        bool any = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = fragment_g() + 8 * half;
          if (r >= rows) continue;
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            gradient[half][part] = load_run<8>(gradient_row(a, label + r), own_instances + 8 * part,
                                               a.rows.batch, a.whole_gradients);
            any |= any_set(gradient[half][part]);
          }
        }
        if (__any_sync(kAllLanes, any) == 0) continue;
#pragma unroll
        for (int column = 0; column < kConnections / 8; ++column) {
          if (block + 8 * column >= layer.fan_in) continue;  // all lanes alike
          const std::int64_t k = block + 8 * column + fragment_g();
          Run<8> feature[2] = {};
          if (k < layer.fan_in) {
            const std::int64_t input = load_index(layer, label / layer.group_size * layer.fan_in + k);
#pragma unroll
            for (int part = 0; part < 2; ++part)
              feature[part] = load_run<8>(a.features + input * a.rows.batch, own_instances + 8 * part,
                                          a.rows.batch, a.whole_features);
          }
          // Positions 2t, 2t + 1, 2t + 8 and 2t + 9 of the s-th product are the lane's instances 4s to 4s
          // + 3.
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            const int part = s / 2, word = s % 2 * 2;
            const FragmentA factor{{gradient[0][part].word[word], gradient[1][part].word[word],
                                    gradient[0][part].word[word + 1], gradient[1][part].word[word + 1]}};
            multiply_add(sum[column], factor, {{feature[part].word[word], feature[part].word[word + 1]}});
          }
        }
      }
#pragma unroll
      for (int column = 0; column < kConnections / 8; ++column)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = fragment_g() + i / 2 * 8;
          const std::int64_t k = block + 8 * column + 2 * fragment_t() + i % 2;
          if (r < rows && k < layer.fan_in)
            a.gradient[(label - a.rows.first + r) * layer.fan_in + k] = sum[column].value[i];
        }
    }
  }
}

ProductGradientArguments arguments_of(const Rows& rows, const BFloat16* features,
                                      const BFloat16* logit_gradient, float* gradient, int weights_at_once) {
  return {rows,
          features,
          logit_gradient,
          gradient,
          row_tiles(rows),
          segments_for(rows),
          whole_runs(features, rows.batch, 8),
          whole_runs(logit_gradient, rows.batch, 8),
          whole_runs(rows.layer.weight, rows.layer.fan_in, weights_at_once)};
}

}  // namespace

void add_feature_gradient(const Rows& rows, const BFloat16* logit_gradient, float* feature_gradient,
                          const Queue& queue) {
  const ProductGradientArguments arguments = arguments_of(rows, nullptr, logit_gradient, feature_gradient, 2);
  launch("product_feature_gradient", &product_feature_gradient_kernel,
         grid_for(arguments.segments, batch_tiles(rows.batch)), kWarps * kWarp, sizeof(ProductShared),
         queue.stream, arguments);
}

void compute_weight_gradient(const Rows& rows, const BFloat16* features, const BFloat16* logit_gradient,
                             float* weight_gradient, const Queue& queue) {
  const ProductGradientArguments arguments = arguments_of(rows, features, logit_gradient, weight_gradient, 2);
  launch("product_weight_gradient", &product_weight_gradient_kernel, grid_for(arguments.segments, 1),
         kWarps * kWarp, 0, queue.stream, arguments);
}

}  // namespace xmlc::cuda
