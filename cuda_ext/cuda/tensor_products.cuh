// Products of bfloat16 on the tensor cores, for sixteen labels of a group at a time, and a pass over logits
// by them. A warp takes 16 labels and 64 instances, as in rows.cuh.
//
// A product sums over 16 positions, and any order of them will do as long as both factors have the same. So
// every lane reads runs of memory: 16 bytes of a gathered row (eight instances, one for each of eight
// products), 8 bytes of a label's weights.
#pragma once

#include "logits.cuh"

namespace xmlc::cuda {

constexpr int kProductRows = 16;       // labels
constexpr int kProductInstances = 64;  // eight products of eight
constexpr int kProductDepth = 16;

// Fragments of mma.m16n8k16 in a warp: c[16, 8] += a[16, 16] b[16, 8]. A word holds two bfloat16, the first
// in its low half. With lane = 4 g + t (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   a  word 0: (g, 2t) (g, 2t + 1); word 1: row g + 8; words 2, 3: the same of columns 2t + 8, 2t + 9
//   b  word 0: (2t, g) (2t + 1, g); word 1: rows 2t + 8, 2t + 9
//   c  value 0: (g, 2t), 1: (g, 2t + 1), 2: (g + 8, 2t), 3: (g + 8, 2t + 1)
struct FragmentA {
  std::uint32_t word[4];
};
struct FragmentB {
  std::uint32_t word[2];
};
struct FragmentC {
  float value[4];
};

__device__ __forceinline__ int fragment_g() { return lane() / 4; }
__device__ __forceinline__ int fragment_t() { return lane() % 4; }

__device__ __forceinline__ float low_half(std::uint32_t word) { return from_bits(word << 16); }
__device__ __forceinline__ float high_half(std::uint32_t word) { return from_bits(word & 0xffff0000u); }
// The low and the high halves of two words.
__device__ __forceinline__ std::uint32_t low_halves(std::uint32_t first, std::uint32_t second) {
  return (first & 0xffffu) | (second << 16);
}
__device__ __forceinline__ std::uint32_t high_halves(std::uint32_t first, std::uint32_t second) {
  return (first >> 16) | (second & 0xffff0000u);
}

// c += a b without tensor cores, in float32: for devices before sm_80 and for the emulator. Every element is
// fetched from the lane and the word where the instruction has it.
__device__ __forceinline__ void multiply_plain(FragmentC& c, const FragmentA& a, const FragmentB& b) {
  const auto joined = [](std::uint32_t low, std::uint32_t high) {
    return static_cast<unsigned long long>(high) << 32 | low;
  };
  const auto low = [](unsigned long long words) { return static_cast<std::uint32_t>(words); };
  const auto high = [](unsigned long long words) { return static_cast<std::uint32_t>(words >> 32); };
  const auto g = static_cast<unsigned>(fragment_g()), t = static_cast<unsigned>(fragment_t());
#pragma unroll
  for (unsigned q = 0; q < 4; ++q) {  // positions 2q, 2q + 1, 2q + 8, 2q + 9
    const unsigned long long near = __shfl_sync(kAllLanes, joined(a.word[0], a.word[1]), 4 * g + q);
    const unsigned long long far = __shfl_sync(kAllLanes, joined(a.word[2], a.word[3]), 4 * g + q);
#pragma unroll
    for (unsigned column = 0; column < 2; ++column) {
      const unsigned long long factor =
          __shfl_sync(kAllLanes, joined(b.word[0], b.word[1]), 4 * (2 * t + column) + q);
      c.value[column] += low_half(low(near)) * low_half(low(factor));
      c.value[column] += high_half(low(near)) * high_half(low(factor));
      c.value[column] += low_half(low(far)) * low_half(high(factor));
      c.value[column] += high_half(low(far)) * high_half(high(factor));
      c.value[2 + column] += low_half(high(near)) * low_half(low(factor));
      c.value[2 + column] += high_half(high(near)) * high_half(low(factor));
      c.value[2 + column] += low_half(high(far)) * low_half(high(factor));
      c.value[2 + column] += high_half(high(far)) * high_half(high(factor));
    }
  }
}

// c += a b, all lanes together.
__device__ __forceinline__ void multiply_add(FragmentC& c, const FragmentA& a, const FragmentB& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.value[0]), "+f"(c.value[1]), "+f"(c.value[2]), "+f"(c.value[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]), "r"(b.word[1]));
#else
  multiply_plain(c, a, b);
#endif
}

// `count` consecutive bfloat16, read at once.
template <int count>
struct alignas(2 * count) Run {
  std::uint32_t word[count / 2];
};

// Reads row[first, first + count); zeros from `end` on. Whether all of a matrix's runs may be read at once,
// says `whole_runs`.
template <int count>
__device__ __forceinline__ Run<count> load_run(const BFloat16* row, std::int64_t first, std::int64_t end,
                                               bool whole) {
  Run<count> run{};
  if (whole) {
    if (first < end) run = *reinterpret_cast<const Run<count>*>(row + first);
    return run;
  }
#pragma unroll
  for (int i = 0; i < count / 2; ++i) {
    const std::int64_t at = first + 2 * i;
    if (at < end) run.word[i] = row[at].bits;
    if (at + 1 < end) run.word[i] |= std::uint32_t{row[at + 1].bits} << 16;
  }
  return run;
}
inline bool whole_runs(const void* matrix, std::int64_t columns, int count) {
  return columns % count == 0 &&
         reinterpret_cast<std::uintptr_t>(matrix) % (2 * static_cast<unsigned>(count)) == 0;
}

// The factor b of the j-th product of eight: rows (positions) are four runs, columns g their lanes'
// instances.
__device__ __forceinline__ FragmentB column_of(const Run<8> (&row)[4], int j) {
  const int word = j / 2;
  if (j % 2 == 0)
    return {
        {low_halves(row[0].word[word], row[1].word[word]), low_halves(row[2].word[word], row[3].word[word])}};
  return {
      {high_halves(row[0].word[word], row[1].word[word]), high_halves(row[2].word[word], row[3].word[word])}};
}

// A warp's products as rows, which every lane then reads along the instances. The odd stride spreads over
// banks what the fragments put into one column.
struct ProductShared {
  float value[kWarps][kProductRows][kProductInstances + 1];
};

// Leaves c of the j-th product of eight: its columns are instances 8 c + j.
__device__ __forceinline__ void store_product(float (&value)[kProductRows][kProductInstances + 1],
                                              const FragmentC& c, int row, int other_row, int j) {
  const int instance = 16 * fragment_t() + j;
  value[row][instance] = c.value[0];
  value[row][instance + 8] = c.value[1];
  value[other_row][instance] = c.value[2];
  value[other_row][instance + 8] = c.value[3];
}

template <class Visitor>
struct ProductLogitsArguments {
  Rows rows;                 // weights in bfloat16, groups of at least 16
  const BFloat16* features;  // [input, batch]
  LogitOffsets offsets;
  std::int64_t tiles, segments;
  bool whole_features, whole_weights;  // see load_run
  Visitor visitor;
};

template <class Visitor>
__global__ void product_logits_kernel(ProductLogitsArguments<Visitor> a) {
  constexpr int kVectors = kProductInstances / kWarp;
  auto& value = shared_memory<ProductShared>().value[warp()];
  const Layer& layer = a.rows.layer;
  const auto* weights = static_cast<const BFloat16*>(layer.weight);
  const Range own = own_tiles(a.tiles, a.segments);
  if (own.first >= own.last) return;  // the whole warp; no barrier of the block follows
  std::int64_t at[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) at[v] = instance<kVectors>(v);
  const std::int64_t own_instances = std::int64_t{blockIdx.y} * kProductInstances + 8 * fragment_g();
  typename Visitor::template State<kVectors> state;
  const LabelPairs offsets{a.offsets.label, a.offsets.entry};
  std::int64_t next_offset = offsets.first_of(a.rows.first + own.first * kProductRows);
  a.visitor.begin(state, a.rows.first + own.first * kProductRows, segment(), at);
  for (std::int64_t tile = own.first; tile < own.last; ++tile) {
    const std::int64_t label = a.rows.first + tile * kProductRows;
    const int rows = rows_from(a.rows, label, kProductRows);
    FragmentC sum[8] = {};
    for (std::int64_t first = 0; first < layer.fan_in; first += kProductDepth) {
      // Positions 2t, 2t + 1, 2t + 8 and 2t + 9 of the product are connections 4t to 4t + 3.
      const std::int64_t k = first + 4 * fragment_t();
      FragmentA weight{};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = fragment_g() + 8 * half;
        if (r >= rows) continue;
        const Run<4> run =
            load_run<4>(weights + (label + r) * layer.fan_in, k, layer.fan_in, a.whole_weights);
        weight.word[half] = run.word[0];
        weight.word[2 + half] = run.word[1];
      }
      Run<8> feature[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (k + i < layer.fan_in) {
          const std::int64_t input = load_index(layer, label / layer.group_size * layer.fan_in + k + i);
          feature[i] =
              load_run<8>(a.features + input * a.rows.batch, own_instances, a.rows.batch, a.whole_features);
        }
#pragma unroll
      for (int j = 0; j < 8; ++j) multiply_add(sum[j], weight, column_of(feature, j));
    }
    __syncwarp();  // the former rows have been read
#pragma unroll
    for (int j = 0; j < 8; ++j) store_product(value, sum[j], fragment_g(), fragment_g() + 8, j);
    __syncwarp();
    for (int r = 0; r < rows; ++r) {
      float logit[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) logit[v] = layer.bias[label + r] + value[r][v * kWarp + lane()];
      add_offsets(offsets, a.offsets, next_offset, label + r, at, logit);
      a.visitor.visit(state, label + r, at, logit);
    }
  }
  a.visitor.end(state, segment(), at);
}

// Features in one of their types; the other is null.
struct Features {
  const float* wide;       // [input, batch]
  const BFloat16* narrow;  // [input, batch]: only with weights in bfloat16 and groups of at least 16
};

template <class Visitor>
void visit_logits(const char* name, const Rows& rows, const Features& features, const LogitOffsets& offsets,
                  std::int64_t segments, const Visitor& visitor, cudaStream_t stream) {
  if (features.narrow == nullptr) {
    visit_logits(name, rows, features.wide, offsets, segments, visitor, stream);
    return;
  }
  const ProductLogitsArguments<Visitor> arguments{rows,
                                                  features.narrow,
                                                  offsets,
                                                  row_tiles(rows),
                                                  segments,
                                                  whole_runs(features.narrow, rows.batch, 8),
                                                  whole_runs(rows.layer.weight, rows.layer.fan_in, 4),
                                                  visitor};
  launch(name, &product_logits_kernel<Visitor>, grid_for(segments, batch_tiles(rows.batch)), kWarps * kWarp,
         sizeof(ProductShared), stream, arguments);
}

}  // namespace xmlc::cuda
