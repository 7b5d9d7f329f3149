// What the ops of the device allocate beside their results: how a layer is cut into tiles, and the arrays of
// each op's workspace. Sizes alone, in plain C++: the CPU's module answers with them where there is no
// device.
#pragma once

#include <cstdint>

#include "../cpu/workspace.h"
#include "xmlc/arguments.h"

namespace xmlc::cuda {

constexpr int kWarp = 32;
constexpr std::int64_t kMostSegments = std::int64_t{1} << 14;

// Consecutive labels of a layer, from the beginning of a group, and a batch.
struct Rows {
  Layer layer;
  std::int64_t first, count;  // labels
  std::int64_t batch;
};

inline int rows_of_tile(const Layer& layer) { return layer.group_size == 1 ? 1 : 16; }
inline int vectors_for(std::int64_t batch) { return batch <= kWarp ? 1 : 2; }
inline std::int64_t row_tiles(const Rows& rows) {
  const std::int64_t height = rows_of_tile(rows.layer);
  return (rows.count + height - 1) / height;
}
inline std::int64_t batch_tiles(std::int64_t batch) {
  const std::int64_t width = std::int64_t{kWarp} * vectors_for(batch);
  return (batch + width - 1) / width;
}
inline std::int64_t segments_for(const Rows& rows) {
  const std::int64_t tiles = row_tiles(rows);
  return tiles < kMostSegments ? tiles : kMostSegments;
}

// Of the fused step.

constexpr std::int64_t kBlockFloats = std::int64_t{1} << 20;  // logit and weight gradients of a block: 4 MiB

struct Scratch {
  std::int64_t block_labels, segments, loss_parts;
  float* logit_gradient;      // [block_labels, batch]
  float* weight_gradient;     // [block_labels, fan_in]
  BFloat16* narrow_gradient;  // [block_labels, batch]: logit_gradient rounded, for the tensor cores; or null
  std::uint8_t* changed;      // [block_labels]: of float8 weights; null otherwise
  double* loss;               // [loss_parts]: of each warp, or of each instance
  // Of the normalised losses; see loss.h. Null otherwise.
  float* reference;      // [segments, batch]: an early large logit of each warp
  double* exponentials;  // [segments, batch]: the sum of exp(logit - reference)
  float* pair_logit;     // [pair]
  float* log_sum;        // [batch]
  float* factor;         // [batch]
  float* share;          // [batch]
};

inline Rows rows_of(const FusedStepArguments& a, std::int64_t first, std::int64_t labels) {
  const std::int64_t left = a.layer.label - first;
  return {a.layer, first, left < labels ? left : labels, a.batch};
}

inline Scratch plan(const FusedStepArguments& a, cpu::Workspace& workspace) {
  Scratch s{};
  constexpr std::int64_t kMultiple = Layer::kScaleLabels;
  const std::int64_t fitting = kBlockFloats / (a.batch + a.layer.fan_in) / kMultiple * kMultiple;
  const std::int64_t all = (a.layer.label + kMultiple - 1) / kMultiple * kMultiple;
  s.block_labels = fitting < kMultiple ? kMultiple : fitting < all ? fitting : all;
  s.segments = segments_for(rows_of(a, 0, s.block_labels));
  s.logit_gradient = workspace.take<float>(s.block_labels * a.batch);
  s.weight_gradient = workspace.take<float>(s.block_labels * a.layer.fan_in);
  if (a.narrow_features != nullptr) s.narrow_gradient = workspace.take<BFloat16>(s.block_labels * a.batch);
  if (is_float8(a.layer.weight_type)) s.changed = workspace.take<std::uint8_t>(s.block_labels);
  const bool normalised = is_normalised(a.loss);
  s.loss_parts = normalised ? a.batch : s.segments * batch_tiles(a.batch);
  s.loss = workspace.take<double>(s.loss_parts);
  if (normalised) {
    s.reference = workspace.take<float>(s.segments * a.batch);
    s.exponentials = workspace.take<double>(s.segments * a.batch);
    const auto given_or_own = [&](float* given, std::int64_t size) {
      return given != nullptr ? given : workspace.take<float>(size);
    };
    s.pair_logit = given_or_own(a.spread.own_pair_logit, a.pair);
    s.log_sum = given_or_own(a.spread.log_sum, a.batch);
    s.factor = given_or_own(a.spread.factor, a.batch);
    s.share = given_or_own(a.spread.share, a.batch);
  }
  return s;
}

// Of top_labels.

constexpr std::int64_t kListBytes = std::int64_t{64}
                                    << 20;  // of all lists together, unless one list needs more

struct Lists {
  std::int64_t segments;
  float* scores;         // [segments, batch, k], falling
  std::int64_t* labels;  // [segments, batch, k]
  std::int32_t* next;    // [batch, segments]: the merge's place in each list
};

inline Lists plan(const TopLabelsArguments& a, cpu::Workspace& workspace) {
  Lists lists{};
  lists.segments = segments_for({a.layer, 0, a.layer.label, a.batch});
  const std::int64_t list_bytes =
      a.batch * a.k * static_cast<std::int64_t>(sizeof(float) + sizeof(std::int64_t));
  const std::int64_t fitting = kListBytes / list_bytes;
  const std::int64_t worthwhile =
      a.layer.label / a.k;  // more, and lists are longer than what they choose from
  const std::int64_t most = fitting < worthwhile ? fitting : worthwhile;
  if (most < lists.segments) lists.segments = most < 1 ? 1 : most;
  lists.scores = workspace.take<float>(lists.segments * a.batch * a.k);
  lists.labels = workspace.take<std::int64_t>(lists.segments * a.batch * a.k);
  lists.next = workspace.take<std::int32_t>(a.batch * lists.segments);
  return lists;
}

// Of redistribute.

constexpr int kDigitBits = 16;
constexpr std::int64_t kDigits = std::int64_t{1} << kDigitBits;
constexpr std::int64_t kRegrowThreads = 256;  // of a block
constexpr std::int64_t kMostThreads = std::int64_t{1} << 16;

// Connections are pruned whose (key, slot) is below (key, slot) of the boundary, or equal. `rank`: how many
// of those with the digits found so far.
struct Boundary {
  std::uint64_t key, slot;
  std::int64_t rank;
  bool found;
};

struct Regrowth {
  RedistributeArguments a;
  std::int64_t groups, threads;
  int pass;                    // 0 to 3: a digit of the key, 4 to 7: of the slot
  unsigned long long* counts;  // [kDigits]
  Boundary* boundary;          // [1]
  std::int32_t* present;       // [fan_in, threads]: a group's inputs, rising
  std::uint64_t* keys;         // [fan_in, threads]
  std::uint8_t* prune;         // [fan_in, threads]
};

inline Regrowth plan(const RedistributeArguments& a, cpu::Workspace& workspace) {
  Regrowth s{};
  s.a = a;
  s.groups = (a.layer.label + a.layer.group_size - 1) / a.layer.group_size;
  s.threads = (s.groups + kRegrowThreads - 1) / kRegrowThreads * kRegrowThreads;
  if (s.threads > kMostThreads) s.threads = kMostThreads;
  s.counts = workspace.take<unsigned long long>(kDigits);
  s.boundary = workspace.take<Boundary>(1);
  s.present = workspace.take<std::int32_t>(s.threads * a.layer.fan_in);
  s.keys = workspace.take<std::uint64_t>(a.within_group ? s.threads * a.layer.fan_in : 0);
  s.prune = workspace.take<std::uint8_t>(s.threads * a.layer.fan_in);
  return s;
}

// The unfused layer needs none.

struct None {};
inline None plan(const SparseLinearArguments&, cpu::Workspace&) { return {}; }

// The bytes of an op's workspace.
template <class Arguments>
std::int64_t workspace_bytes(const Arguments& a) {
  cpu::Workspace measured(nullptr);
  plan(a, measured);
  return measured.bytes();
}

}  // namespace xmlc::cuda
