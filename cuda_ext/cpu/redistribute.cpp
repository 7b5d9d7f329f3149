// Connection redistribution in place: prune the weakest connections, regrow as many at random.
//
// The connection to prune is found by a radix selection over the 64-bit key (score, hash): four passes of
// 65,536 counters each find the exact boundary in half a megabyte per thread, whatever the layer's size.
// (Temporaries of this step set the peak memory of the published implementation.) The hash breaks ties of
// the score at random, so that a layer of equal weights loses connections everywhere. The few
// equal keys that then remain go by position.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "ops.h"
#include "parallel.h"
#include "workspace.h"
#include "xmlc/rounding.h"

namespace xmlc::cpu {
namespace {

constexpr int kDigitBits = 16;
constexpr std::int64_t kDigits = std::int64_t{1} << kDigitBits;
constexpr std::uint32_t kGrowStream = 0, kValueStream = 1;

// Connections whose key is below `key` are pruned, and the first `equal` of those with this key.
struct Boundary {
  std::uint64_t key;
  std::int64_t equal;
};

template <class Index, class Weight>
class Redistribution {
 public:
  Redistribution(const RedistributeArguments& arguments, int threads, Workspace& workspace)
      : a_(arguments), layer_(arguments.layer), threads_(threads), fan_in_(layer_.fan_in) {
    groups_ = (layer_.label + layer_.group_size - 1) / layer_.group_size;
    counts_ = workspace.take<std::int64_t>(threads * kDigits);
    per_thread_ = workspace.take<std::int64_t>(threads);
    pruned_ = workspace.take<std::int64_t>(threads);
    present_ = workspace.take<std::int32_t>(threads * fan_in_);
    keys_ = workspace.take<std::uint64_t>(threads * fan_in_);
    order_ = workspace.take<std::int32_t>(threads * fan_in_);
    prune_here_ = workspace.take<std::uint8_t>(threads * fan_in_);
  }

  void run(int thread, Barrier& barrier) {
    const Range own = share_of_groups(layer_, groups_, thread, threads_);
    if constexpr (kScaled)
      if (a_.new_value == NewValue::kRandom) raise_scales(own);
    const bool over_layer = !a_.by_threshold && !a_.within_group;
    Boundary boundary{0, 0};
    if (over_layer) boundary = select_boundary(own, thread, barrier);
    pruned_[thread] = 0;
    for (std::int64_t group = own.first; group < own.last; ++group) {
      std::uint8_t* prune = prune_here_ + thread * fan_in_;
      if (a_.by_threshold)
        mark_below_threshold(group, prune);
      else if (a_.within_group)
        mark_within_group(group, thread, prune);
      else
        mark_below(boundary, group, prune);
      pruned_[thread] += regrow(group, thread, prune);
    }
    barrier.wait();
    if (thread == 0) {
      *a_.pruned = 0;
      for (int t = 0; t < threads_; ++t) *a_.pruned += pruned_[t];
    }
  }

 private:
  static constexpr bool kScaled = sizeof(Weight) == 1;

  Weight* weight(std::int64_t label) const { return static_cast<Weight*>(layer_.weight) + label * fan_in_; }
  float& scale(std::int64_t label) const { return layer_.weight_scale[label / Layer::kScaleLabels]; }
  float value_of(std::int64_t label, std::int64_t k) const {
    const Weight stored = weight(label)[k];
    if constexpr (kScaled)
      return widen_float8<Weight>(std::uint32_t{stored.bits}) * scale(label);
    else if constexpr (std::is_same_v<Weight, BFloat16>)
      return widen(stored);
    else
      return stored;
  }
  void assign(std::int64_t label, std::int64_t k, float value) const {
    Weight& stored = weight(label)[k];
    if constexpr (kScaled)
      stored = round_to_nearest_float8<Weight>(value / scale(label));
    else if constexpr (std::is_same_v<Weight, BFloat16>)
      stored = round_to_nearest(value);
    else
      stored = value;
  }

  // Makes room for the new values: no scale of these groups stays too small for them.
  void raise_scales(Range groups) const {
    if (groups.first == groups.last) return;
    const std::int64_t end = last_label(groups.last - 1);
    for (std::int64_t first = first_label(groups.first); first < end; first += Layer::kScaleLabels) {
      const float old = scale(first), raised = raised_scale<Weight>(old, absolute(a_.new_value_bound));
      if (raised == old) continue;
      const std::int64_t past = std::min(first + Layer::kScaleLabels, end);
      for (Weight* stored = weight(first); stored < weight(past); ++stored)
        *stored = round_to_nearest_float8<Weight>(widen_float8<Weight>(std::uint32_t{stored->bits}) *
                                                  (old / raised));
      scale(first) = raised;
    }
  }

  std::int64_t first_label(std::int64_t group) const { return group * layer_.group_size; }
  std::int64_t last_label(std::int64_t group) const {
    return std::min(first_label(group) + layer_.group_size, layer_.label);
  }

  // Mean magnitude of a connection over the labels of its group. NaN ranks above infinity: it stays.
  float score(std::int64_t group, std::int64_t k) const {
    float sum = 0.0f;
    for (std::int64_t label = first_label(group); label < last_label(group); ++label)
      sum += absolute(value_of(label, k));
    return sum / static_cast<float>(last_label(group) - first_label(group));
  }

  std::uint64_t seed() const { return (std::uint64_t{a_.random.high} << 32) | a_.random.low; }

  std::uint64_t key(std::int64_t group, std::int64_t k) const {
    const std::uint64_t slot = static_cast<std::uint64_t>(group * fan_in_ + k);
    return (std::uint64_t{to_bits(absolute(score(group, k)))} << 32) | (mix(seed() ^ slot) >> 32);
  }

  Boundary select_boundary(Range own, int thread, Barrier& barrier) {
    std::uint64_t prefix = 0;
    std::int64_t rank = a_.prune;  // connections to prune among those with this prefix
    for (int shift = 64 - kDigitBits; shift >= 0; shift -= kDigitBits) {
      std::int64_t* counts = counts_ + thread * kDigits;
      std::fill(counts, counts + kDigits, 0);
      for (std::int64_t group = own.first; group < own.last; ++group)
        for (std::int64_t k = 0; k < fan_in_; ++k) {
          const std::uint64_t at = key(group, k);
          if (shift + kDigitBits == 64 || at >> (shift + kDigitBits) == prefix)
            ++counts[(at >> shift) & (kDigits - 1)];
        }
      barrier.wait();
      // Every thread walks the same sums, so all agree without another exchange.
      std::int64_t digit = 0;
      for (;; ++digit) {
        std::int64_t total = 0;
        for (int t = 0; t < threads_; ++t) total += counts_[t * kDigits + digit];
        if (rank <= total || digit + 1 == kDigits) break;
        rank -= total;
      }
      prefix = (prefix << kDigitBits) | static_cast<std::uint64_t>(digit);
      if (shift == 0) per_thread_[thread] = counts[digit];
      barrier.wait();
    }
    // Earlier shares of the groups take their equal keys first.
    for (int t = 0; t < thread; ++t) rank -= std::min(rank, per_thread_[t]);
    return {prefix, rank};
  }

  void mark_below(Boundary& boundary, std::int64_t group, std::uint8_t* prune) const {
    for (std::int64_t k = 0; k < fan_in_; ++k) {
      const std::uint64_t at = key(group, k);
      const bool equal = at == boundary.key && boundary.equal > 0;
      if (equal) --boundary.equal;
      prune[k] = at < boundary.key || equal;
    }
  }

  void mark_below_threshold(std::int64_t group, std::uint8_t* prune) const {
    for (std::int64_t k = 0; k < fan_in_; ++k) prune[k] = score(group, k) < a_.threshold;
  }

  void mark_within_group(std::int64_t group, int thread, std::uint8_t* prune) const {
    // Groups take floor or ceil of their share such that the layer's total is exact.
    const std::int64_t count = (group + 1) * a_.prune / groups_ - group * a_.prune / groups_;
    std::uint64_t* keys = keys_ + thread * fan_in_;
    std::int32_t* order = order_ + thread * fan_in_;
    for (std::int64_t k = 0; k < fan_in_; ++k) {
      keys[k] = key(group, k);
      order[k] = static_cast<std::int32_t>(k);
      prune[k] = 0;
    }
    std::nth_element(order, order + count, order + fan_in_, [&](std::int32_t x, std::int32_t y) {
      return keys[x] != keys[y] ? keys[x] < keys[y] : x < y;
    });
    for (std::int64_t i = 0; i < count; ++i) prune[order[i]] = 1;
  }

  // Gives every pruned connection an input that the group does not have, uniformly at random.
  std::int64_t regrow(std::int64_t group, int thread, const std::uint8_t* prune) {
    Index* indices = static_cast<Index*>(const_cast<void*>(layer_.indices)) + group * fan_in_;
    std::int32_t* present = present_ + thread * fan_in_;  // the group's inputs, rising
    std::int64_t count = 0;
    for (std::int64_t k = 0; k < fan_in_; ++k)
      if (!prune[k]) present[count++] = static_cast<std::int32_t>(indices[k]);
    const std::int64_t kept = count;
    if (kept == fan_in_) return 0;
    std::sort(present, present + count);
    for (std::int64_t k = 0; k < fan_in_; ++k) {
      if (!prune[k]) continue;
      const std::uint64_t slot = static_cast<std::uint64_t>(group * fan_in_ + k);
      const auto words = random_words(slot, kGrowStream, 0);
      const std::uint64_t bits = (std::uint64_t{words.word[0]} << 32) | words.word[1];
      // The r-th absent input: step over every present one that is not above it.
      std::int32_t input =
          static_cast<std::int32_t>(bounded(bits, static_cast<std::uint32_t>(layer_.input - count)));
      std::int64_t at = 0;
      while (at < count && present[at] <= input) ++input, ++at;
      std::copy_backward(present + at, present + count, present + count + 1);
      present[at] = input;
      ++count;
      indices[k] = static_cast<Index>(input);
      reset(group, k, slot);
    }
    return fan_in_ - kept;
  }

  // Weight and optimizer state of a regrown connection, for every label of the group.
  void reset(std::int64_t group, std::int64_t k, std::uint64_t slot) {
    for (std::int64_t label = first_label(group); label < last_label(group); ++label) {
      if (a_.new_value == NewValue::kZero) assign(label, k, 0.0f);
      if (a_.new_value == NewValue::kRandom) {
        const auto within = static_cast<std::uint32_t>(label - first_label(group));
        const std::uint32_t word = random_words(slot, kValueStream, within).word[0];
        const float unit = static_cast<float>(word >> 8) * 0x1p-23f - 1.0f;  // [-1, 1)
        assign(label, k, a_.new_value_bound * unit);
      }
      for (void* state : a_.states)
        if (state != nullptr)
          std::memset(
              static_cast<char*>(state) + (label * fan_in_ + k) * static_cast<std::int64_t>(a_.state_bytes),
              0, a_.state_bytes);
    }
  }

  RandomWords<std::uint32_t> random_words(std::uint64_t slot, std::uint32_t stream,
                                          std::uint32_t within) const {
    return philox(a_.random, static_cast<std::uint32_t>(slot), static_cast<std::uint32_t>(slot >> 32), stream,
                  within);
  }

  const RedistributeArguments& a_;
  const Layer& layer_;
  const int threads_;
  const std::int64_t fan_in_;
  std::int64_t groups_;
  std::int64_t* counts_;      // [thread, digit]
  std::int64_t* per_thread_;  // [thread] keys equal to the boundary
  std::int64_t* pruned_;      // [thread]
  std::int32_t* present_;     // [thread, fan_in]
  std::uint64_t* keys_;       // [thread, fan_in]
  std::int32_t* order_;       // [thread, fan_in]
  std::uint8_t* prune_here_;  // [thread, fan_in]
};

template <class Index, class Weight>
std::int64_t redistribute_layer(const RedistributeArguments& a, int threads, void* workspace) {
  Workspace arrays(workspace);
  Redistribution<Index, Weight> redistribution(a, threads, arrays);
  if (workspace != nullptr)
    run_threads(threads, [&](int thread, Barrier& barrier) { redistribution.run(thread, barrier); });
  return arrays.bytes();
}

template <class Index>
std::int64_t with_index(const RedistributeArguments& a, int threads, void* workspace) {
  switch (a.layer.weight_type) {
    case WeightType::kBFloat16:
      return redistribute_layer<Index, BFloat16>(a, threads, workspace);
    case WeightType::kFloat8E4M3:
      return redistribute_layer<Index, Float8E4M3>(a, threads, workspace);
    case WeightType::kFloat8E5M2:
      return redistribute_layer<Index, Float8E5M2>(a, threads, workspace);
    default:
      return redistribute_layer<Index, float>(a, threads, workspace);
  }
}

}  // namespace

std::int64_t redistribute(const RedistributeArguments& a, int threads, void* workspace) {
  return a.layer.index_type == IndexType::kUInt16 ? with_index<std::uint16_t>(a, threads, workspace)
                                                  : with_index<std::int32_t>(a, threads, workspace);
}

}  // namespace xmlc::cpu
