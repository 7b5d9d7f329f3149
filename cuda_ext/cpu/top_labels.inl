// Exact top-k over all labels: every lane keeps its k best so far, and a label is looked at closely only if
// its logit beats the worst of them in some lane. Labels come in rising order and only a strictly larger
// logit replaces, so ties stay with the lowest label.
#include "gather.h"

namespace xmlc::cpu::XMLC_ISA {
namespace {

template <int kVectors>
struct TopLabelsPass {
  const TopLabelsArguments& a;
  const TopScratch& scratch;
  std::int64_t tile;
  Float worst[kVectors];  // the k-th best logit of each lane

  // Keeps a lane's scores falling; equal scores stay behind the earlier label.
  float insert(std::int64_t lane, float score, std::int64_t label) {
    float* scores = scratch.scores + lane * a.k;
    std::int64_t* labels = scratch.labels + lane * a.k;
    std::int64_t at = a.k - 1;
    for (; at > 0 && scores[at - 1] < score; --at) {
      scores[at] = scores[at - 1];
      labels[at] = labels[at - 1];
    }
    scores[at] = score;
    labels[at] = label;
    return scores[a.k - 1];
  }

  template <int kLabels>
  void run(std::int64_t group, std::int64_t label) {
    const Layer& layer = a.layer;
    const float* weight = weight_rows<kLabels>(layer, label, scratch.rows);
    Float logit[kLabels][kVectors];
    for (int r = 0; r < kLabels; ++r)
      for (int v = 0; v < kVectors; ++v) logit[r][v] = Float(layer.bias[label + r]);
    gather(layer, group, scratch.features + tile * scratch.tiling.input * scratch.tiling.width, weight,
           logit);
    for (int r = 0; r < kLabels; ++r)
      for (int v = 0; v < kVectors; ++v)
        if (any(worst[v] < logit[r][v])) update(v, label + r, logit[r][v]);
  }

  XMLC_OUTLINE void update(int v, std::int64_t label, const Float& logit) {
    float score[kLanes], bound[kLanes];
    store(score, logit);
    store(bound, worst[v]);
    const std::int64_t first = tile * scratch.tiling.width + v * kLanes;
    for (int i = 0; i < kLanes; ++i)
      if (bound[i] < score[i]) bound[i] = insert(first + i, score[i], label);
    worst[v] = load(bound);
  }
};

void top_labels(const TopLabelsArguments& a, const TopScratch& scratch, GroupRange range, std::int64_t tile) {
  with_width(scratch.tiling.width, [&](auto vectors) {
    constexpr int kVectors = vectors.value;
    TopLabelsPass<kVectors> pass{a, scratch, tile, {}};
    for (int v = 0; v < kVectors; ++v) {
      float bound[kLanes];
      for (int i = 0; i < kLanes; ++i)
        bound[i] = scratch.scores[(tile * scratch.tiling.width + v * kLanes + i) * a.k + a.k - 1];
      pass.worst[v] = load(bound);
    }
    for_labels(a.layer, range, pass);
  });
}

}  // namespace
}  // namespace xmlc::cpu::XMLC_ISA
