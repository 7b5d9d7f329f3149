// Connection redistribution in place, with the same choices and draws as on the CPU, bit for bit.
//
// The boundary of what is pruned is found by a radix selection over (score, hash, position): passes of 65,536
// counters, 16 bits each. The last four, over the position, decide only among equal (score, hash) and
// otherwise end at once. Then one thread for each group draws new inputs.
#include "ops.h"
#include "rows.cuh"
#include "scratch.h"
#include "xmlc/rounding.h"

namespace xmlc::cuda {
namespace {

constexpr unsigned kThreads = kRegrowThreads;
constexpr std::uint32_t kGrowStream = 0, kValueStream = 1;

using Arguments = Regrowth;

__device__ __forceinline__ std::int64_t thread_number() {
  return std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
}

// One group of the layer.
struct Group {
  const Arguments& arguments;
  const Layer& layer;
  std::int64_t group, first_label, last_label;

  __device__ Group(const Arguments& of, std::int64_t number)
      : arguments(of), layer(of.a.layer), group(number), first_label(number * layer.group_size) {
    last_label = first_label + layer.group_size;
    if (last_label > layer.label) last_label = layer.label;
  }

  // Mean magnitude of a connection over the group's labels. NaN ranks above infinity: it stays.
  __device__ float score(std::int64_t k) const {
    float sum = 0.0f;
    for (std::int64_t label = first_label; label < last_label; ++label)
      sum += absolute(load_weight(layer, label, label * layer.fan_in + k));
    return sum / static_cast<float>(last_label - first_label);
  }
  __device__ std::uint64_t slot(std::int64_t k) const {
    return static_cast<std::uint64_t>(group * layer.fan_in + k);
  }
  __device__ std::uint64_t key(std::int64_t k) const {
    const RandomKey& random = arguments.a.random;
    const std::uint64_t seed = (std::uint64_t{random.high} << 32) | random.low;
    return (std::uint64_t{to_bits(absolute(score(k)))} << 32) | (mix(seed ^ slot(k)) >> 32);
  }
  __device__ RandomWords<std::uint32_t> words(std::int64_t k, std::uint32_t stream,
                                              std::uint32_t within) const {
    return philox(arguments.a.random, static_cast<std::uint32_t>(slot(k)),
                  static_cast<std::uint32_t>(slot(k) >> 32), stream, within);
  }
};

// Counts the digit of this pass among the connections whose digits before are the boundary's.
__global__ void count_kernel(Arguments s) {
  const Boundary boundary = *s.boundary;
  if (boundary.found) return;
  const Layer& layer = s.a.layer;
  const int shift = 64 - kDigitBits * (s.pass % 4 + 1);
  for (std::int64_t at = thread_number(); at < s.groups * layer.fan_in; at += s.threads) {
    const Group group(s, at / layer.fan_in);
    const std::uint64_t key = group.key(at % layer.fan_in);
    const std::uint64_t value = s.pass < 4 ? key : static_cast<std::uint64_t>(at);
    const std::uint64_t wanted = s.pass < 4 ? boundary.key : boundary.slot;
    const bool same_before =
        shift + kDigitBits == 64 || value >> (shift + kDigitBits) == wanted >> (shift + kDigitBits);
    if (same_before && (s.pass < 4 || key == boundary.key))
      atomicAdd(s.counts + ((value >> shift) & (kDigits - 1)), 1ull);
  }
}

struct SelectShared {
  std::int64_t total[kThreads];
};

// One block finds the digit in which the rank falls.
__global__ void select_kernel(Arguments s) {
  auto& shared = shared_memory<SelectShared>();
  constexpr std::int64_t kShare = kDigits / kThreads;
  if (s.boundary->found) return;  // all threads alike
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < kShare; ++i)
    total += static_cast<std::int64_t>(s.counts[threadIdx.x * kShare + i]);
  shared.total[threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Boundary& boundary = *s.boundary;
  std::int64_t part = 0;
  while (part + 1 < kThreads && boundary.rank > shared.total[part]) boundary.rank -= shared.total[part++];
  std::int64_t digit = part * kShare;
  while (digit + 1 < kDigits && boundary.rank > static_cast<std::int64_t>(s.counts[digit]))
    boundary.rank -= static_cast<std::int64_t>(s.counts[digit++]);
  const int shift = 64 - kDigitBits * (s.pass % 4 + 1);
  (s.pass < 4 ? boundary.key : boundary.slot) |= static_cast<std::uint64_t>(digit) << shift;
  if (s.pass != 3 || boundary.rank != static_cast<std::int64_t>(s.counts[digit])) return;
  boundary.slot = ~std::uint64_t{0};  // everything with this key goes
  boundary.found = true;
}

__global__ void begin_kernel(Arguments s) {
  if (threadIdx.x != 0) return;
  *s.boundary = {0, 0, s.a.prune, s.a.prune == 0};
  *s.a.pruned = 0;
}

// What goes, of one group. `prune` and the rest of the scratch are this thread's.
__device__ void mark(const Arguments& s, const Group& group, std::int64_t thread) {
  const std::int64_t fan_in = s.a.layer.fan_in;
  if (s.a.by_threshold) {
    for (std::int64_t k = 0; k < fan_in; ++k)
      s.prune[k * s.threads + thread] = group.score(k) < s.a.threshold;
  } else if (s.a.within_group) {
    // Groups take floor or ceil of their share such that the layer's total is exact.
    const std::int64_t count = (group.group + 1) * s.a.prune / s.groups - group.group * s.a.prune / s.groups;
    for (std::int64_t k = 0; k < fan_in; ++k) s.keys[k * s.threads + thread] = group.key(k);
    for (std::int64_t k = 0; k < fan_in; ++k) {
      const std::uint64_t own = s.keys[k * s.threads + thread];
      std::int64_t rank = 0;
      for (std::int64_t other = 0; other < fan_in; ++other) {
        const std::uint64_t key = s.keys[other * s.threads + thread];
        rank += key < own || (key == own && other < k);
      }
      s.prune[k * s.threads + thread] = rank < count;
    }
  } else {
    const Boundary boundary = *s.boundary;
    for (std::int64_t k = 0; k < fan_in; ++k) {
      const std::uint64_t key = group.key(k);
      const bool equal = key == boundary.key && group.slot(k) <= boundary.slot;
      s.prune[k * s.threads + thread] = s.a.prune > 0 && (key < boundary.key || equal);
    }
  }
}

__device__ __forceinline__ void store(const Layer& layer, std::int64_t label, std::int64_t at, float value) {
  const auto scale = [&] { return layer.weight_scale[label / Layer::kScaleLabels]; };
  switch (layer.weight_type) {
    case WeightType::kBFloat16:
      static_cast<BFloat16*>(layer.weight)[at] = round_to_nearest(value);
      break;
    case WeightType::kFloat8E4M3:
      static_cast<Float8E4M3*>(layer.weight)[at] = round_to_nearest_float8<Float8E4M3>(value / scale());
      break;
    case WeightType::kFloat8E5M2:
      static_cast<Float8E5M2*>(layer.weight)[at] = round_to_nearest_float8<Float8E5M2>(value / scale());
      break;
    default:
      static_cast<float*>(layer.weight)[at] = value;
  }
}

// Makes room for new values: one thread for every block of labels whose scale is too small for them.
template <class Format>
__global__ void raise_scales_kernel(Arguments s) {
  const Layer& layer = s.a.layer;
  const std::int64_t blocks = (layer.label + Layer::kScaleLabels - 1) / Layer::kScaleLabels;
  for (std::int64_t block = thread_number(); block < blocks; block += s.threads) {
    const float old = layer.weight_scale[block];
    const float raised = raised_scale<Format>(old, absolute(s.a.new_value_bound));
    if (raised == old) continue;
    const std::int64_t past = (block + 1) * Layer::kScaleLabels;
    auto* weight = static_cast<Format*>(layer.weight);
    for (std::int64_t at = block * Layer::kScaleLabels * layer.fan_in;
         at < (past < layer.label ? past : layer.label) * layer.fan_in; ++at)
      weight[at] = round_to_nearest_float8<Format>(widen_float8<Format>(std::uint32_t{weight[at].bits}) *
                                                   (old / raised));
    layer.weight_scale[block] = raised;
  }
}

// Weight and optimizer state of a regrown connection, for every label of the group.
__device__ void reset(const Arguments& s, const Group& group, std::int64_t k) {
  for (std::int64_t label = group.first_label; label < group.last_label; ++label) {
    const std::int64_t at = label * s.a.layer.fan_in + k;
    if (s.a.new_value == NewValue::kZero) store(s.a.layer, label, at, 0.0f);
    if (s.a.new_value == NewValue::kRandom) {
      const auto within = static_cast<std::uint32_t>(label - group.first_label);
      const std::uint32_t word = group.words(k, kValueStream, within).word[0];
      const float unit = static_cast<float>(word >> 8) * 0x1p-23f - 1.0f;  // [-1, 1)
      store(s.a.layer, label, at, s.a.new_value_bound * unit);
    }
    for (void* state : s.a.states)
      for (std::size_t byte = 0; state != nullptr && byte < s.a.state_bytes; ++byte)
        static_cast<char*>(
            state)[at * static_cast<std::int64_t>(s.a.state_bytes) + static_cast<std::int64_t>(byte)] = 0;
  }
}

__device__ __forceinline__ void store_index(const Layer& layer, std::int64_t at, std::int32_t input) {
  void* indices = const_cast<void*>(layer.indices);
  if (layer.index_type == IndexType::kUInt16)
    static_cast<std::uint16_t*>(indices)[at] = static_cast<std::uint16_t>(input);
  else
    static_cast<std::int32_t*>(indices)[at] = input;
}

// Gives every pruned connection of a group an input that it does not have, uniformly at random.
__device__ std::int64_t regrow(const Arguments& s, const Group& group, std::int64_t thread) {
  const Layer& layer = s.a.layer;
  const std::int64_t fan_in = layer.fan_in;
  const auto present = [&](std::int64_t i) -> std::int32_t& { return s.present[i * s.threads + thread]; };
  // Puts an input in its place among those before it, which rise.
  const auto insert = [&](std::int64_t count, std::int32_t input) {
    std::int64_t at = count;
    for (; at > 0 && present(at - 1) > input; --at) present(at) = present(at - 1);
    present(at) = input;
  };
  std::int64_t count = 0;
  for (std::int64_t k = 0; k < fan_in; ++k)
    if (!s.prune[k * s.threads + thread]) insert(count++, load_index(layer, group.group * fan_in + k));
  const std::int64_t kept = count;
  for (std::int64_t k = 0; k < fan_in; ++k) {
    if (!s.prune[k * s.threads + thread]) continue;
    const auto words = group.words(k, kGrowStream, 0);
    const std::uint64_t bits = (std::uint64_t{words.word[0]} << 32) | words.word[1];
    // The r-th absent input: step over every present one that is not above it.
    auto input = static_cast<std::int32_t>(bounded(bits, static_cast<std::uint32_t>(layer.input - count)));
    for (std::int64_t at = 0; at < count && present(at) <= input; ++at) ++input;
    insert(count++, input);
    store_index(layer, group.group * fan_in + k, input);
    reset(s, group, k);
  }
  return fan_in - kept;
}

__global__ void regrow_kernel(Arguments s) {
  const std::int64_t thread = thread_number();
  std::int64_t pruned = 0;
  for (std::int64_t number = thread; number < s.groups; number += s.threads) {
    const Group group(s, number);
    mark(s, group, thread);
    pruned += regrow(s, group, thread);
  }
  if (pruned > 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(s.a.pruned), static_cast<unsigned long long>(pruned));
}

}  // namespace

std::int64_t redistribute(const RedistributeArguments& a, const Queue& queue, void* workspace) {
  cpu::Workspace arrays(workspace);
  Arguments s = plan(a, arrays);
  if (workspace == nullptr) return arrays.bytes();
  const dim3 grid(static_cast<unsigned>(s.threads / kThreads));
  if (a.new_value == NewValue::kRandom) {
    if (a.layer.weight_type == WeightType::kFloat8E4M3)
      launch("redistribute_scales", &raise_scales_kernel<Float8E4M3>, grid, kThreads, 0, queue.stream, s);
    if (a.layer.weight_type == WeightType::kFloat8E5M2)
      launch("redistribute_scales", &raise_scales_kernel<Float8E5M2>, grid, kThreads, 0, queue.stream, s);
  }
  launch("redistribute_begin", &begin_kernel, dim3(1), kWarp, 0, queue.stream, s);
  if (!a.by_threshold && !a.within_group) {
    for (s.pass = 0; s.pass < 8; ++s.pass) {
      clear(s.counts, static_cast<std::size_t>(kDigits) * sizeof *s.counts, queue.stream);
      launch("redistribute_count", &count_kernel, grid, kThreads, 0, queue.stream, s);
      launch("redistribute_select", &select_kernel, dim3(1), kThreads, sizeof(SelectShared), queue.stream, s);
    }
  }
  launch("redistribute_regrow", &regrow_kernel, grid, kThreads, 0, queue.stream, s);
  return arrays.bytes();
}

}  // namespace xmlc::cuda
