// Exact top-k over all labels: every lane keeps its k best so far, and a label is looked at closely only if
// its logit beats the worst of them in some lane. Labels come in rising order and only a strictly larger
// logit replaces, so ties stay with the lowest label.
#include "gather.h"
#include "pairs.h"

namespace xmlc::cpu::XMLC_ISA {
namespace {

// Puts a score among the k best of an instance and returns the new worst of them. Scores fall; equal ones
// stay behind the earlier label.
XMLC_OUTLINE float insert(const TopLabelsArguments& a, const TopScratch& scratch, std::int64_t instance,
                          float score, std::int64_t label) {
  float* scores = scratch.scores + instance * a.k;
  std::int64_t* labels = scratch.labels + instance * a.k;
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
struct TopLabelsPass {
  const TopLabelsArguments& a;
  const TopScratch& scratch;
  const float* features;           // of the tile
  std::int64_t tile, first_label;  // first label of the block
  TileOffsets<kVectors> offsets;
  Float worst[kVectors];  // the k-th best logit of each lane

  template <int kLabels>
  void run(std::int64_t group, std::int64_t label) {
    Float logit[kLabels][kVectors];
    gather(a.layer, group, label, features, scratch.rows, scratch.logits, first_label, logit);
    offsets.add(label, logit);
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
      if (bound[i] < score[i]) bound[i] = insert(a, scratch, first + i, score[i], label);
    worst[v] = load(bound);
  }
};

// One instance alone, where most lanes of a tile would be padding.
struct TopLabelsOnePass {
  const TopLabelsArguments& a;
  const TopScratch& scratch;
  std::int64_t instance;
  TilePairs offsets;  // of the instance
  float worst;

  template <int kLabels>
  XMLC_INLINE void run(std::int64_t group, std::int64_t label) {
    const Layer& layer = a.layer;
    const float* features = scratch.features + instance * layer.input;
    const float* weight = weight_rows<kLabels>(layer, label, scratch.rows);
    float score[kLabels];
    with_indices(layer, group, [&](const auto* indices) XMLC_INLINE_LAMBDA {
      for (int r = 0; r < kLabels; ++r)
        score[r] = gather_one<chains_for(kLabels)>(features, indices, layer.fan_in, weight + r * layer.fan_in,
                                                   layer.bias[label + r]);
    });
    for (int r = 0; r < kLabels; ++r) {
      offsets.for_label(label + r,
                        [&](std::int64_t, std::int64_t entry) { score[r] += a.offsets.value[entry]; });
      if (worst < score[r]) worst = insert(a, scratch, instance, score[r], label + r);
    }
  }
};

void top_labels_one(const TopLabelsArguments& a, const TopScratch& scratch, GroupRange range,
                    std::int64_t instance) {
  const std::int64_t first_label = range.first * a.layer.group_size;
  const LogitOffsets& o = a.offsets;
  for_labels(a.layer, range,
             TopLabelsOnePass{a, scratch, instance,
                              TilePairs(o.label, o.instance, o.entry, instance, 1, first_label),
                              scratch.scores[instance * a.k + a.k - 1]});
}

void top_labels(const TopLabelsArguments& a, const TopScratch& scratch, GroupRange range, std::int64_t tile) {
  const float* features = scratch.features + tile * scratch.tiling.input * scratch.tiling.width;
  if (scratch.logits != nullptr) gather_strips(a.layer, range, scratch.strips, features, scratch.logits);
  with_width(scratch.tiling.width, [&](auto vectors) {
    constexpr int kVectors = vectors.value;
    const std::int64_t first_label = range.first * a.layer.group_size;
    TopLabelsPass<kVectors> pass{
        a,    scratch,     features,
        tile, first_label, TileOffsets<kVectors>(a.offsets, tile * scratch.tiling.width, first_label),
        {}};
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
