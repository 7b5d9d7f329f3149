// (label, instance) pairs of one tile of the batch, such as positives and logit offsets.
#pragma once

#include "simd.h"
#include "xmlc/arguments.h"

namespace xmlc::cpu::XMLC_ISA {
namespace {

// Pairs [pair] by rising label, read in the rising order of labels: like a merge, each pair once.
struct TilePairs {
  const std::int32_t* label;
  const std::int32_t* instance;
  std::int64_t pair, first_instance, width;
  std::int64_t next;

  TilePairs(const std::int32_t* labels, const std::int32_t* instances, std::int64_t pairs,
            std::int64_t tile_first, std::int64_t tile_width, std::int64_t first_label)
      : label(labels), instance(instances), pair(pairs), first_instance(tile_first), width(tile_width) {
    std::int64_t low = 0, high = pair;  // binary search for the label's first pair
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (label[middle] < first_label)
        low = middle + 1;
      else
        high = middle;
    }
    next = low;
  }

  // Whether the label may have pairs; the pairs of the labels before it are passed.
  XMLC_INLINE bool seek(std::int64_t wanted) {
    while (next < pair && label[next] < wanted) ++next;
    return next < pair && label[next] == wanted;
  }

  // Calls visit(lane, pair) for the label's pairs in this tile.
  template <class Visit>
  XMLC_INLINE void for_label(std::int64_t wanted, const Visit& visit) {
    if (!seek(wanted)) return;
    for (; next < pair && label[next] == wanted; ++next) {
      const std::int64_t lane = instance[next] - first_instance;
      if (lane >= 0 && lane < width) visit(lane, next);
    }
  }
};

// Logit offsets of one tile.
template <int kVectors>
struct TileOffsets {
  const LogitOffsets& offsets;
  TilePairs pairs;

  TileOffsets(const LogitOffsets& all, std::int64_t first_instance, std::int64_t first_label)
      : offsets(all),
        pairs(all.label, all.instance, all.entry, first_instance, kVectors * kLanes, first_label) {}

  // Adds the offsets of a few labels to their logits.
  template <int kLabels>
  XMLC_INLINE void add(std::int64_t label, Float (&logit)[kLabels][kVectors]) {
    if (offsets.entry == 0) return;
    for (int r = 0; r < kLabels; ++r)
      if (pairs.seek(label + r)) add_to(label + r, logit[r]);
  }

  // Leaves the gradients of the same offsets, zero for labels that are not active; to be called after `add`,
  // with the place where it began.
  template <int kLabels>
  XMLC_INLINE void leave_gradients(std::int64_t begin, std::int64_t label,
                                   const Float (&gradient)[kLabels][kVectors], const std::uint8_t* active) {
    if (offsets.entry == 0 || begin == pairs.next) return;
    pairs.next = begin;
    for (int r = 0; r < kLabels; ++r)
      if (pairs.seek(label + r)) take_from(label + r, gradient[r], active[r] != 0);
  }

 private:
  XMLC_OUTLINE void add_to(std::int64_t label, Float (&logit)[kVectors]) {
    float lanes[kVectors * kLanes];
    for (int v = 0; v < kVectors; ++v) store(lanes + v * kLanes, logit[v]);
    pairs.for_label(label,
                    [&](std::int64_t lane, std::int64_t entry) { lanes[lane] += offsets.value[entry]; });
    for (int v = 0; v < kVectors; ++v) logit[v] = load(lanes + v * kLanes);
  }

  XMLC_OUTLINE void take_from(std::int64_t label, const Float (&gradient)[kVectors], bool active) {
    float lanes[kVectors * kLanes];
    for (int v = 0; v < kVectors; ++v) store(lanes + v * kLanes, gradient[v]);
    pairs.for_label(label, [&](std::int64_t lane, std::int64_t entry) {
      offsets.gradient[entry] = active ? lanes[lane] : 0.0f;
    });
  }
};

}  // namespace
}  // namespace xmlc::cpu::XMLC_ISA
