// A counting sort; `Strips::first` holds the counts, then the places, then the starts of the strips.
#include "strips.h"

namespace xmlc::cpu {
namespace {

template <class Index>
void sort_run(const Layer& layer, const Strips& s, std::int64_t block, GroupRange labels, std::int64_t run) {
  const auto* indices = static_cast<const Index*>(layer.indices);
  Connection* connections = s.connections + run * s.stride;
  std::int32_t* next = s.first + run * (s.strips + 1);
  std::fill(next, next + s.strips + 1, 0);
  for (std::int64_t i = labels.first * layer.fan_in; i < labels.last * layer.fan_in; ++i)
    ++next[static_cast<std::int64_t>(indices[i]) / Strips::kInputs];
  std::int32_t start = 0;
  for (std::int64_t strip = 0; strip <= s.strips; ++strip) {
    const std::int32_t count = next[strip], end = start + count;
    next[strip] = start;
    start = (end + Strips::kPadding - 1) / Strips::kPadding * Strips::kPadding;
    for (std::int32_t i = end; i < start; ++i)
      connections[i] = {0, static_cast<std::uint16_t>(s.labels),
                        static_cast<std::uint32_t>(s.labels * s.padded_fan_in), 0.0f};
  }
  for (std::int64_t label = labels.first; label < labels.last; ++label)
    for (std::int64_t k = 0; k < layer.fan_in; ++k) {
      const std::int64_t i = label * layer.fan_in + k, input = indices[i];
      connections[next[input / Strips::kInputs]++] = {
          static_cast<std::uint16_t>(input % Strips::kInputs), static_cast<std::uint16_t>(label - block),
          static_cast<std::uint32_t>((label - block) * s.padded_fan_in + k), load_weight(layer, label, i)};
    }
  // A strip's next place is now its end; rounded up, it is the start of the next strip.
  std::int32_t before = 0;
  for (std::int64_t strip = 0; strip <= s.strips; ++strip) {
    const std::int32_t end = next[strip];
    next[strip] = before;
    before = (end + Strips::kPadding - 1) / Strips::kPadding * Strips::kPadding;
  }
}

}  // namespace

void sort_into_strips(const Layer& layer, const Strips& strips, std::int64_t first_label,
                      std::int64_t last_label, std::int64_t run) {
  const std::int64_t first = std::min(first_label + run * strips.run_labels, last_label);
  const GroupRange labels{first, std::min(first + strips.run_labels, last_label)};
  if (layer.index_type == IndexType::kUInt16)
    sort_run<std::uint16_t>(layer, strips, first_label, labels, run);
  else
    sort_run<std::int32_t>(layer, strips, first_label, labels, run);
}

}  // namespace xmlc::cpu
