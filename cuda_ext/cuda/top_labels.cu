// Exact top-k without storing logits: every lane keeps the k best of its instance among the labels of its
// warp, and a label is looked at closely only if it beats the worst of them. Labels come in rising order and
// only a strictly larger logit replaces, so ties stay with the lowest label; then a warp for each instance
// merges the lists, of which earlier ones hold lower labels.
#include "ops.h"
#include "scratch.h"
#include "tensor_products.cuh"

namespace xmlc::cuda {
namespace {

struct MergeArguments {
  TopLabelsArguments a;
  Lists lists;
};

struct VisitTop {
  TopLabelsArguments a;
  Lists lists;

  template <int kVectors>
  struct State {
    std::int64_t list[kVectors];  // where this lane's lists begin
    float worst[kVectors];
  };

  template <int kVectors>
  __device__ void begin(State<kVectors>& state, std::int64_t, std::int64_t segment,
                        const std::int64_t (&at)[kVectors]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      state.list[v] = (segment * a.batch + at[v]) * a.k;
      state.worst[v] = -HUGE_VALF;
      if (at[v] >= a.batch) continue;
      for (std::int64_t rank = 0; rank < a.k; ++rank) {
        lists.scores[state.list[v] + rank] = -HUGE_VALF;
        lists.labels[state.list[v] + rank] = -1;
      }
    }
  }

  template <int kVectors>
  __device__ void visit(State<kVectors>& state, std::int64_t label, const std::int64_t (&at)[kVectors],
                        const float (&logit)[kVectors]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (at[v] < a.batch && state.worst[v] < logit[v])
        state.worst[v] = insert(lists.scores + state.list[v], lists.labels + state.list[v], logit[v], label);
  }

  // Puts a score behind those that are at least as large; returns the new worst.
  __device__ float insert(float* scores, std::int64_t* labels, float score, std::int64_t label) const {
    std::int64_t at = a.k - 1;
    for (; at > 0 && scores[at - 1] < score; --at) {
      scores[at] = scores[at - 1];
      labels[at] = labels[at - 1];
    }
    scores[at] = score;
    labels[at] = label;
    return scores[a.k - 1];
  }

  template <int kVectors>
  __device__ void end(State<kVectors>&, std::int64_t, const std::int64_t (&)[kVectors]) const {}
};

// The best entry of a list that is left, by score, then label; label -1: none.
struct Best {
  float score;
  std::int64_t label;
  std::int64_t segment;
};
__device__ __forceinline__ bool better(const Best& x, const Best& y) {
  if (x.label < 0 || y.label < 0) return x.label >= 0;
  return x.score > y.score || (x.score == y.score && x.label < y.label);
}

__global__ void merge_kernel(MergeArguments m) {
  const TopLabelsArguments& a = m.a;
  const Lists& lists = m.lists;
  const std::int64_t b = blockIdx.x;
  std::int32_t* next = lists.next + b * lists.segments;
  for (std::int64_t segment = lane(); segment < lists.segments; segment += kWarp) next[segment] = 0;
  for (std::int64_t rank = 0; rank < a.k; ++rank) {
    Best best{-HUGE_VALF, -1, -1};
    for (std::int64_t segment = lane(); segment < lists.segments; segment += kWarp) {  // its own: no barrier
      if (next[segment] >= a.k) continue;
      const std::int64_t at = (segment * a.batch + b) * a.k + next[segment];
      const Best candidate{lists.scores[at], lists.labels[at], segment};
      if (better(candidate, best)) best = candidate;
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const auto other = static_cast<unsigned>(distance);
      const Best candidate{__shfl_xor_sync(kAllLanes, best.score, other),
                           __shfl_xor_sync(kAllLanes, best.label, other),
                           __shfl_xor_sync(kAllLanes, best.segment, other)};
      if (better(candidate, best)) best = candidate;
    }
    if (best.label >= 0 && best.segment % kWarp == lane()) ++next[best.segment];
    if (lane() == 0) {
      a.scores[b * a.k + rank] = best.score;
      a.labels[b * a.k + rank] = best.label;
    }
  }
}

}  // namespace

std::int64_t top_labels(const TopLabelsArguments& a, const Queue& queue, void* workspace) {
  const Rows rows{a.layer, 0, a.layer.label, a.batch};
  cpu::Workspace arrays(workspace);
  const Lists lists = plan(a, arrays);
  if (workspace == nullptr) return arrays.bytes();
  visit_logits("top_labels", rows, Features{a.features, a.narrow_features}, a.offsets, lists.segments,
               VisitTop{a, lists}, queue.stream);
  launch("merge_top_labels", &merge_kernel, dim3(static_cast<unsigned>(a.batch)), kWarp, 0, queue.stream,
         MergeArguments{a, lists});
  return arrays.bytes();
}

}  // namespace xmlc::cuda
