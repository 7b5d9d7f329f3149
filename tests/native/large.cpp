// The last labels of a layer of 2^27 labels, whose places in weights, logits and indices lie beyond 2^31 and
// 2^32, against the same labels as a layer of their own: the same bits. What redistribution draws depends on
// the place, so its rules are checked instead. Pages that nothing touches take no memory.
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

// The passes over a part of the labels are theirs alone.
#include "cuda/fused_step.cu"
#include "cuda/redistribute.cu"
#include "cuda/sparse_linear.cu"
#include "cuda/top_labels.cu"

using namespace xmlc;
using namespace xmlc::cuda;

namespace {

constexpr std::int64_t kLabels = std::int64_t{1} << 27, kLast = 64, kFanIn = 40, kBatch = 72, kInput = 300;

// A zeroed array that the system only promises.
template <class Value>
struct Array {
  std::size_t bytes;
  Value* values;
  explicit Array(std::int64_t count) : bytes(static_cast<std::size_t>(count) * sizeof(Value)) {
    void* mapped =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::runtime_error("no address space of " + std::to_string(bytes));
    values = static_cast<Value*>(mapped);
  }
  Array(const Array&) = delete;
  ~Array() { munmap(values, bytes); }
};

template <class Value>
void require_same(const Value* found, const Value* expected, std::int64_t count, const char* what) {
  if (std::memcmp(found, expected, static_cast<std::size_t>(count) * sizeof(Value)) != 0)
    throw std::runtime_error(std::string("wrong result: ") + what);
}

// A layer, of which the last labels are filled in.
struct Side {
  std::int64_t label, group_size;
  bool narrow;
  Array<std::int32_t> indices;
  Array<float> weight, bias, logits, first, bias_first;
  Array<BFloat16> narrow_weight;
  std::vector<float> features;
  std::vector<BFloat16> narrow_features;

  Side(std::int64_t labels, std::int64_t of_group, bool is_narrow)
      : label(labels),
        group_size(of_group),
        narrow(is_narrow),
        indices(labels / of_group * kFanIn),
        weight(labels * kFanIn),
        bias(labels),
        logits(labels * kBatch),
        first(labels * kFanIn),
        bias_first(labels),
        narrow_weight(labels * kFanIn),
        features(kInput * kBatch),
        narrow_features(kInput * kBatch) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const std::int64_t groups = kLast / group_size, from = (label - kLast) * kFanIn;
    for (std::int64_t at = 0; at < groups * kFanIn; ++at)
      indices.values[label / group_size * kFanIn - groups * kFanIn + at] =
          static_cast<std::int32_t>((at * 7 + static_cast<std::int64_t>(random() % 7)) % kInput);
    for (std::int64_t at = 0; at < kLast * kFanIn; ++at) {
      narrow_weight.values[from + at] = round_to_nearest(normal(random));
      weight.values[from + at] = widen(narrow_weight.values[from + at]);
    }
    for (std::int64_t at = 0; at < kLast; ++at) bias.values[label - kLast + at] = normal(random);
    for (std::size_t at = 0; at < features.size(); ++at) {
      narrow_features[at] = round_to_nearest(normal(random));
      features[at] = widen(narrow_features[at]);
    }
  }
  Rows rows() {
    const Layer layer{indices.values,
                      narrow ? static_cast<void*>(narrow_weight.values) : weight.values,
                      bias.values,
                      IndexType::kInt32,
                      narrow ? WeightType::kBFloat16 : WeightType::kFloat32,
                      kInput,
                      label,
                      group_size,
                      kFanIn};
    return {layer, label - kLast, kLast, kBatch};
  }
  Features seen() const {
    return narrow ? Features{nullptr, narrow_features.data()} : Features{features.data(), nullptr};
  }
  std::int64_t last(std::int64_t columns) const { return (label - kLast) * columns; }
};

const Queue queue{nullptr, false}, ordered{nullptr, true};

// The logits, from where the layer has their labels.
void logits(Side& side) {
  const Rows rows = side.rows();
  visit_logits("logits", rows, side.seen(), {}, segments_for(rows), StoreLogits{side.logits.values, kBatch},
               nullptr);
}

// The best labels among the last.
struct Top {
  static constexpr std::int64_t kBest = 5;
  std::vector<float> scores = std::vector<float>(kBatch * kBest);
  std::vector<std::int64_t> labels = std::vector<std::int64_t>(kBatch * kBest);

  explicit Top(Side& side) {
    const Rows rows = side.rows();
    Lists lists{};
    lists.segments = segments_for(rows) < 8 ? segments_for(rows) : 8;
    std::vector<float> list_scores(static_cast<std::size_t>(lists.segments * kBatch * kBest));
    std::vector<std::int64_t> list_labels(list_scores.size());
    std::vector<std::int32_t> next(static_cast<std::size_t>(kBatch * lists.segments));
    lists.scores = list_scores.data();
    lists.labels = list_labels.data();
    lists.next = next.data();
    TopLabelsArguments a{};
    a.layer = rows.layer;
    a.scores = scores.data();
    a.labels = labels.data();
    a.batch = kBatch;
    a.k = kBest;
    visit_logits("top_labels", rows, side.seen(), {}, lists.segments, VisitTop{a, lists}, nullptr);
    launch("merge_top_labels", &merge_kernel, dim3(kBatch), kWarp, 0, nullptr, MergeArguments{a, lists});
    for (std::int64_t& label : labels) label -= side.label - kLast;
  }
};

// Prunes and regrows the last groups, one for each thread of one block.
__global__ void regrow_last_kernel(Arguments s) {
  const std::int64_t count = kLast / s.a.layer.group_size;
  if (threadIdx.x >= count) return;
  const Group group(s, s.groups - count + threadIdx.x);
  mark(s, group, threadIdx.x);
  regrow(s, group, threadIdx.x);
}

void redistribute_last(std::int64_t group_size) {
  Side side(kLabels, group_size, false), before(kLast, group_size, false);
  for (std::int64_t at = 0; at < kLast * kFanIn; ++at) side.first.values[side.last(kFanIn) + at] = 1.0f;
  std::vector<unsigned long long> counts(kDigits);
  std::vector<std::int32_t> present(kFanIn * kLast);
  std::vector<std::uint64_t> keys(kFanIn * kLast);
  std::vector<std::uint8_t> prune(kFanIn * kLast);
  std::int64_t pruned = 0;
  Boundary boundary{0, 0, 1, false};
  Arguments s{};
  s.a.layer = side.rows().layer;
  s.a.states[0] = side.first.values;
  s.a.state_bytes = sizeof *side.first.values;
  s.a.by_threshold = true;
  s.a.threshold = 0.5f;
  s.a.new_value = NewValue::kZero;
  s.a.pruned = &pruned;
  s.groups = kLabels / group_size;
  s.threads = kLast;
  s.counts = counts.data();
  s.boundary = &boundary;
  s.present = present.data();
  s.keys = keys.data();
  s.prune = prune.data();

  // Thread t counts connection t of the first groups, and then, a step of nearly all of them further, the
  // t-th of the last 64.
  Arguments counted = s;
  counted.threads = s.groups * kFanIn - kLast;
  launch("redistribute_count", &count_kernel, dim3(1), kThreads, 0, nullptr, counted);
  unsigned long long far = 0;
  for (std::int64_t digit = 1; digit < kDigits; ++digit) far += counts[static_cast<std::size_t>(digit)];
  if (far != kLast || counts[0] != kThreads) throw std::runtime_error("wrong result: counts of scores");

  launch("regrow_last", &regrow_last_kernel, dim3(1), kThreads, 0, nullptr, s);
  const std::int64_t groups = kLast / group_size, from = (s.groups - groups) * kFanIn;
  std::int64_t gone = 0, same = 0;
  for (std::int64_t slot = 0; slot < groups * kFanIn; ++slot) {
    const std::int64_t group = slot / kFanIn, k = slot % kFanIn;
    float score = 0.0f;
    for (std::int64_t label = group * group_size; label < (group + 1) * group_size; ++label)
      score += absolute(before.weight.values[label * kFanIn + k]);
    const bool goes = score / static_cast<float>(group_size) < s.a.threshold;
    gone += goes;
    const std::int32_t old = before.indices.values[slot], now = side.indices.values[from + slot];
    if (now < 0 || now >= kInput || (!goes && now != old)) throw std::runtime_error("wrong result: inputs");
    same += goes && now == old;
    for (std::int64_t label = group * group_size; label < (group + 1) * group_size; ++label) {
      const std::int64_t at = label * kFanIn + k, far_at = side.last(kFanIn) + at;
      if (side.weight.values[far_at] != (goes ? 0.0f : before.weight.values[at]))
        throw std::runtime_error("wrong result: regrown weights");
      if (side.first.values[far_at] != (goes ? 0.0f : 1.0f))
        throw std::runtime_error("wrong result: regrown state");
    }
  }
  if (same * 10 > gone) throw std::runtime_error("wrong result: regrown inputs");  // one in 260 by chance
  if (gone == 0 || gone == groups * kFanIn) throw std::runtime_error("wrong result: nothing to tell apart");
}

struct Step {
  std::vector<float> feature_gradient = std::vector<float>(kInput * kBatch);
  std::vector<float> logit_gradient, weight_gradient;
  std::vector<unsigned char> memory;
  FusedStepArguments a{};
  Scratch scratch{};

  Step(Side& side, bool in_order) {
    a.layer = side.rows().layer;
    a.features = side.seen().wide;
    a.narrow_features = side.seen().narrow;
    a.feature_gradient = feature_gradient.data();
    a.batch = kBatch;
    positive_label = {static_cast<std::int32_t>(side.label - kLast),
                      static_cast<std::int32_t>(side.label - 1)};
    a.pair_label = positive_label.data();
    a.pair_instance = positive_instance.data();
    a.pair = 2;
    a.loss = Loss::kBce;
    a.scale = 0.1f;
    a.optimizer.kind = Optimizer::kMomentum;
    a.optimizer.learning_rate = 0.5f;
    a.optimizer.keep = 1.0f;
    a.moments.first = side.first.values;
    a.bias_first = side.bias_first.values;
    cpu::Workspace measured(nullptr);
    plan(a, measured);
    memory.resize(static_cast<std::size_t>(measured.bytes()));
    cpu::Workspace arrays(memory.data());
    scratch = plan(a, arrays);
    step_block(a, scratch, side.rows(), in_order ? ordered : queue);
  }
  std::vector<std::int32_t> positive_label, positive_instance{5, 71};
};

void compare(std::int64_t group_size, bool narrow) {
  Side large(kLabels, group_size, narrow), small(kLast, group_size, narrow);
  logits(large), logits(small);
  require_same(large.logits.values + large.last(kBatch), small.logits.values, kLast * kBatch, "logits");
  bool any = false;
  for (std::int64_t at = 0; at < kLast * kBatch; ++at) any |= small.logits.values[at] != 0.0f;
  if (!any) throw std::runtime_error("wrong result: no logits");
  const Top of_all(large), of_few(small);
  require_same(of_all.scores.data(), of_few.scores.data(), kBatch * Top::kBest, "best scores");
  require_same(of_all.labels.data(), of_few.labels.data(), kBatch * Top::kBest, "best labels");
  for (bool in_order : {false, true}) {
    if (narrow && in_order) break;  // its weights have been rounded by numbers drawn for the label
    const Step of_large(large, in_order), of_small(small, in_order);
    require_same(of_large.scratch.logit_gradient, of_small.scratch.logit_gradient, kLast * kBatch,
                 "logit gradient");
    require_same(of_large.feature_gradient.data(), of_small.feature_gradient.data(), kInput * kBatch,
                 "feature gradient");
    require_same(of_large.scratch.weight_gradient, of_small.scratch.weight_gradient, kLast * kFanIn,
                 "weight gradient");
    require_same(large.first.values + large.last(kFanIn), small.first.values, kLast * kFanIn, "velocity");
    require_same(large.bias.values + large.last(1), small.bias.values, kLast, "bias");
    if (!narrow)
      require_same(large.weight.values + large.last(kFanIn), small.weight.values, kLast * kFanIn, "weight");
  }
}

}  // namespace

int main() {
  try {
    for (std::int64_t group_size : {1, 16, 64}) compare(group_size, false);
    for (std::int64_t group_size : {16, 64}) compare(group_size, true);
    for (std::int64_t group_size : {1, 4}) redistribute_last(group_size);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
