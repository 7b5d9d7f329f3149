// One training step of the output layer, block by block of labels, each of which fits the second-level cache:
// logit gradients of the block, then from them the feature gradient, the weight gradient and the update. So
// weights and indices come from device memory once and go back once, whatever the batch, and no more than one
// block of logit gradients ever exists. The normalised losses pass over all logits before, without storing
// any.
#include <cfloat>

#include "gradients.h"
#include "scratch.h"
#include "tensor_products.cuh"
#include "xmlc/rounding.h"

namespace xmlc::cuda {
namespace {

constexpr int kRun = 16;  // values added in float32 before float64
constexpr unsigned kSumThreads = 256;

// The positives.
struct Positives : LabelPairs {
  const std::int32_t* instance;  // [pair], rising within a label

  // The pair of this instance among `count` from `next`; -1 if there is none.
  __device__ std::int64_t find(std::int64_t next, std::int64_t count, std::int64_t wanted) const {
    std::int64_t low = next, high = next + count;
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (instance[middle] < wanted)
        low = middle + 1;
      else
        high = middle;
    }
    return low < next + count && instance[low] == wanted ? low : -1;
  }
};

Positives positives(const FusedStepArguments& a) { return {{a.pair_label, a.pair}, a.pair_instance}; }

// Leaves the scaled gradient of every logit, and the loss unless a pass before had it.
struct VisitGradient {
  FusedStepArguments a;
  Scratch scratch;
  Positives positives;
  std::int64_t first_label;  // of the block

  template <int kVectors>
  struct State {
    std::int64_t next, next_offset;
    float run;
    int added;
    double loss;
  };

  template <int kVectors>
  __device__ void begin(State<kVectors>& state, std::int64_t label, std::int64_t,
                        const std::int64_t (&)[kVectors]) const {
    state = {positives.first_of(label), offsets().first_of(label), 0.0f, 0, 0.0};
  }

  __device__ LabelPairs offsets() const { return {a.offsets.label, a.offsets.entry}; }

  // Loss and gradient of one logit before the scale.
  __device__ LossGrad<float> evaluate(float logit, bool positive, float weight, std::int64_t instance) const {
    if (!is_normalised(a.loss)) {
      const float target = positive ? 1.0f : -1.0f;
      const LossGrad<float> value =
          a.loss == Loss::kBce ? Bce::evaluate(logit, target) : SquaredHinge::evaluate(logit, target);
      return positive ? LossGrad<float>{weight * value.loss, weight * value.grad} : value;
    }
    const float log_sum = scratch.log_sum[instance], factor = scratch.factor[instance];
    if (!positive) return {0.0f, factor * exponential(logit - log_sum)};
    const float shared = weight * scratch.share[instance];
    return {0.0f, a.loss == Loss::kSoftmax
                      ? Softmax::positive_gradient(logit, shared, log_sum, factor)
                      : DecoupledSoftmax::positive_gradient(logit, shared, log_sum, factor)};
  }

  template <int kVectors>
  __device__ void visit(State<kVectors>& state, std::int64_t label, const std::int64_t (&at)[kVectors],
                        const float (&logit)[kVectors]) const {
    const std::int64_t count = positives.advance(state.next, label);
    const float weight = count == 0 || a.positive_weight == nullptr ? 1.0f : a.positive_weight[label];
    float gradient[kVectors];
    bool beyond = false;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      gradient[v] = 0.0f;
      if (at[v] >= a.batch) continue;
      const bool positive = count != 0 && positives.find(state.next, count, at[v]) >= 0;
      const LossGrad<float> value = evaluate(logit[v], positive, weight, at[v]);
      gradient[v] = a.scale * value.grad;
      state.run += a.scale * value.loss;
      beyond |= !(absolute(gradient[v]) <= a.gradient_cutoff * a.scale);  // NaN is
    }
    const bool active = a.gradient_cutoff == 0.0f || __any_sync(kAllLanes, beyond) != 0;
    float* row = scratch.logit_gradient + (label - first_label) * a.batch;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (at[v] < a.batch) row[at[v]] = active ? gradient[v] : 0.0f;
    if (scratch.narrow_gradient != nullptr) {
      BFloat16* narrow = scratch.narrow_gradient + (label - first_label) * a.batch;
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (at[v] < a.batch) narrow[at[v]] = round_to_nearest(active ? gradient[v] : 0.0f);
    }
    const std::int64_t entries = offsets().advance(state.next_offset, label);
    for (std::int64_t e = state.next_offset; e < state.next_offset + entries; ++e)
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (at[v] == a.offsets.instance[e]) a.offsets.gradient[e] = active ? gradient[v] : 0.0f;
    if (++state.added == kRun) flush(state);
  }

  template <int kVectors>
  __device__ static void flush(State<kVectors>& state) {
    state.loss += static_cast<double>(state.run);
    state.run = 0.0f;
    state.added = 0;
  }

  template <int kVectors>
  __device__ void end(State<kVectors>& state, std::int64_t segment, const std::int64_t (&)[kVectors]) const {
    if (is_normalised(a.loss)) return;
    flush(state);
    const double loss = sum_over_lanes(state.loss);
    if (lane() == 0) scratch.loss[std::int64_t{blockIdx.y} * scratch.segments + segment] += loss;
  }
};

// Sums exp(logit - reference) of each instance over the labels of a warp. The reference rises only when a
// logit is far above it, so that one exponential for each logit does.
struct VisitNormaliser {
  FusedStepArguments a;
  Scratch scratch;
  Positives positives;

  template <int kVectors>
  struct State {
    std::int64_t next;
    int added;
    float reference[kVectors], run[kVectors];
    double sum[kVectors];
  };

  template <int kVectors>
  __device__ void begin(State<kVectors>& state, std::int64_t label, std::int64_t,
                        const std::int64_t (&)[kVectors]) const {
    state.next = positives.first_of(label);
    state.added = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      state.reference[v] = -FLT_MAX;
      state.run[v] = 0.0f;
      state.sum[v] = 0.0;
    }
  }

  template <int kVectors>
  __device__ void visit(State<kVectors>& state, std::int64_t label, const std::int64_t (&at)[kVectors],
                        const float (&logit)[kVectors]) const {
    constexpr float kFarAbove = 40.0f;  // exp(40) times many labels is still far from overflow
    const std::int64_t count = positives.advance(state.next, label);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (at[v] >= a.batch) continue;
      float counted = logit[v];
      const std::int64_t pair = count == 0 ? -1 : positives.find(state.next, count, at[v]);
      if (pair >= 0) {
        scratch.pair_logit[pair] = logit[v];
        if (a.loss == Loss::kDecoupledSoftmax) counted = -HUGE_VALF;  // the sum is that of the negatives
      }
      if (state.reference[v] + kFarAbove < counted) {
        state.sum[v] += static_cast<double>(state.run[v]);
        state.run[v] = 0.0f;
        state.sum[v] *= exp(static_cast<double>(state.reference[v]) - static_cast<double>(counted));
        state.reference[v] = counted;
      }
      state.run[v] += exponential(counted - state.reference[v]);
    }
    if (++state.added == kRun) flush(state);
  }

  template <int kVectors>
  __device__ static void flush(State<kVectors>& state) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      state.sum[v] += static_cast<double>(state.run[v]);
      state.run[v] = 0.0f;
    }
    state.added = 0;
  }

  template <int kVectors>
  __device__ void end(State<kVectors>& state, std::int64_t segment,
                      const std::int64_t (&at)[kVectors]) const {
    flush(state);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (at[v] >= a.batch) continue;
      scratch.reference[segment * a.batch + at[v]] = state.reference[v];
      scratch.exponentials[segment * a.batch + at[v]] = state.sum[v];
    }
  }
};

struct StepArguments {
  FusedStepArguments a;
  Scratch scratch;
  Rows rows;
};

// From the sums of all warps to what the gradient pass needs of each instance, and its loss. One thread for
// each instance, every sum in one order.
__global__ void normalise_kernel(StepArguments arguments) {
  const FusedStepArguments& a = arguments.a;
  const Scratch& s = arguments.scratch;
  const std::int64_t instance = std::int64_t{blockIdx.x} * kWarp + lane();
  if (instance >= a.batch) return;
  float reference = -FLT_MAX;
  for (std::int64_t segment = 0; segment < s.segments; ++segment)
    reference = larger(s.reference[segment * a.batch + instance], reference);
  double sum = 0.0;
  for (std::int64_t segment = 0; segment < s.segments; ++segment) {
    const double below =
        static_cast<double>(s.reference[segment * a.batch + instance]) - static_cast<double>(reference);
    sum += s.exponentials[segment * a.batch + instance] * exp(below);
  }
  const double exact_log_sum = static_cast<double>(reference) + log(sum);
  if (a.spread.own_log_sum != nullptr) {
    a.spread.own_log_sum[instance] = exact_log_sum;
    return;
  }
  const float log_sum = static_cast<float>(exact_log_sum);
  std::int64_t count = 0;
  for (std::int64_t pair = 0; pair < a.pair; ++pair) count += a.pair_instance[pair] == instance;
  const float share = a.share_positives && count > 0 ? 1.0f / static_cast<float>(count) : 1.0f;
  double loss = 0.0, factor = 0.0;
  for (std::int64_t pair = 0; pair < a.pair; ++pair) {
    if (a.pair_instance[pair] != instance) continue;
    const double label_weight = a.positive_weight == nullptr ? 1.0 : a.positive_weight[a.pair_label[pair]];
    const double weight = label_weight * static_cast<double>(share);
    const double u = static_cast<double>(log_sum) - static_cast<double>(s.pair_logit[pair]);
    if (a.loss == Loss::kSoftmax) {
      loss += weight * u;
      factor += weight;
    } else {  // log(1 + exp(u)) and sigmoid(u)
      const double e = exp(-fabs(u));
      loss += weight * ((u < 0.0 ? 0.0 : u) + log1p(e));
      factor += weight * (u < 0.0 ? e : 1.0) / (1.0 + e);
    }
  }
  s.log_sum[instance] = log_sum;
  s.factor[instance] = static_cast<float>(factor);
  s.share[instance] = share;
  s.loss[instance] = loss * static_cast<double>(a.scale);
}

struct SumShared {
  double part[kSumThreads / kWarp];
};

// One block adds the parts of the loss in an order of its own that never changes.
__global__ void loss_kernel(StepArguments arguments) {
  auto& shared = shared_memory<SumShared>();
  const Scratch& s = arguments.scratch;
  double sum = 0.0;
  for (std::int64_t part = threadIdx.x; part < s.loss_parts; part += kSumThreads) sum += s.loss[part];
  sum = sum_over_lanes(sum);
  if (lane() == 0) shared.part[warp()] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0.0;
  for (const double part : shared.part) sum += part;
  *arguments.a.loss_sum = sum;
}

__device__ __forceinline__ void store_weight(float& weight, float value, std::uint32_t) { weight = value; }
__device__ __forceinline__ void store_weight(BFloat16& weight, float value, std::uint32_t random) {
  weight.bits = static_cast<std::uint16_t>(round_stochastically(value, random));
}
// Float8 weights are left where the gradient was, in float32, until the scale that they share is known.
template <class Weight>
constexpr bool kScaled = sizeof(Weight) == 1;

// The random word of connection k of a label, as every backend draws it.
__device__ __forceinline__ std::uint32_t weight_word(RandomKey key, std::int64_t label, std::int64_t k) {
  const auto words =
      weight_words(key, static_cast<std::uint64_t>(label), static_cast<std::uint32_t>(k / (4 * kWordLanes)),
                   static_cast<std::uint32_t>(k % kWordLanes));
  const int part = static_cast<int>(k / kWordLanes % 4);
  return part == 0 ? words.word[0] : part == 1 ? words.word[1] : part == 2 ? words.word[2] : words.word[3];
}

// The update rules by a kind that only the launch knows.
__device__ __forceinline__ void advance_as(const OptimizerArguments& o, float gradient, float& first,
                                           float& second) {
  if (o.kind == Optimizer::kMomentum)
    advance<Optimizer::kMomentum>(o, gradient, first, second);
  else if (o.kind == Optimizer::kAdam)
    advance<Optimizer::kAdam>(o, gradient, first, second);
}
__device__ __forceinline__ float updated_as(const OptimizerArguments& o, float weight, float gradient,
                                            float& first, float& second) {
  if (o.kind == Optimizer::kMomentum)
    return updated<Optimizer::kMomentum>(o, weight, gradient, first, second);
  if (o.kind == Optimizer::kAdam) return updated<Optimizer::kAdam>(o, weight, gradient, first, second);
  return updated<Optimizer::kSgd>(o, weight, gradient, first, second);
}

// What the optimizer keeps for the connections of one label. All lanes of the warp are here.
struct LabelMoments {
  const Moments& stored;
  bool has_first, has_second;
  std::int64_t label, fan_in;
  float unit = 1.0f, inverse = 1.0f;  // of float8: the former scale, and one over the next

  __device__ LabelMoments(const FusedStepArguments& a, std::int64_t of)
      : stored(a.moments),
        has_first(xmlc::has_first(a.optimizer.kind)),
        has_second(xmlc::has_second(a.optimizer.kind)),
        label(of),
        fan_in(a.layer.fan_in) {}

  __device__ bool scaled() const { return has_first && is_float8(stored.type); }

  // Chooses the scale in which `store` rounds: the next values are computed for their size alone.
  __device__ void choose_scale(const OptimizerArguments& o, const float* gradient) {
    if (!scaled()) return;
    unit = moment_unit(stored.scale[label]);
    float largest = 0.0f;
    for (std::int64_t k = lane(); k < fan_in; k += kWarp) {
      float m, v;
      load(k, m, v);
      advance_as(o, gradient[k], m, v);
      const float size = absolute(m), root = square_root(v);
      largest = larger(size < HUGE_VALF ? size : 0.0f, largest);
      largest = larger(root < HUGE_VALF ? root : 0.0f, largest);
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2)
      largest = larger(__shfl_xor_sync(kAllLanes, largest, static_cast<unsigned>(distance)), largest);
    const std::uint8_t scale = moment_scale(largest);
    inverse = inverse_unit(scale);
    __syncwarp();  // all lanes have read it
    if (lane() == 0) stored.scale[label] = scale;
  }

  __device__ void load(std::int64_t k, float& m, float& v) const {
    const std::int64_t from = label * fan_in + k;
    m = has_first ? load_stored(stored.type, stored.first, from, unit) : 0.0f;
    v = has_second ? load_stored(stored.type, stored.second, from, unit) : 0.0f;
    if (scaled()) v *= v;
  }

  __device__ void store(std::int64_t k, float m, float v) const {
    if (has_first) store_in(stored.first, k, m, stored.first_rounding, false);
    if (has_second) store_in(stored.second, k, v, stored.second_rounding, true);
  }

  __device__ void store_in(void* values, std::int64_t k, float value, RandomKey key, bool square) const {
    const std::int64_t to = label * fan_in + k;
    if (stored.type == WeightType::kFloat32) {
      static_cast<float*>(values)[to] = value;
    } else if (stored.type == WeightType::kBFloat16) {
      static_cast<BFloat16*>(values)[to].bits =
          static_cast<std::uint16_t>(round_stochastically(value, weight_word(key, label, k)));
    } else {
      const std::uint32_t random = weight_word(key, label, k);
      static_cast<std::uint8_t*>(values)[to] = static_cast<std::uint8_t>(
          square ? round_root_float8<Float8E4M3>(square_root(value), inverse, random)
                 : round_stochastically_float8<Float8E4M3>(value * inverse, random));
    }
  }
};

// A warp updates one label after the other, 32 weights at a time.
template <class Weight>
__global__ void update_kernel(StepArguments arguments) {
  const FusedStepArguments& a = arguments.a;
  const Scratch& s = arguments.scratch;
  const std::int64_t fan_in = a.layer.fan_in;
  const Range own = own_tiles(arguments.rows.count,
                              arguments.rows.count < kMostSegments ? arguments.rows.count : kMostSegments);
  for (std::int64_t row = own.first; row < own.last; ++row) {
    const std::int64_t label = arguments.rows.first + row;
    float* gradient = s.weight_gradient + row * fan_in;
    float bias_gradient = 0.0f, squares = 0.0f;
    for (std::int64_t b = lane(); b < a.batch; b += kWarp)
      bias_gradient += s.logit_gradient[row * a.batch + b];
    bias_gradient = sum_over_lanes(bias_gradient);
    bool any = bias_gradient != 0.0f;
    for (std::int64_t k = lane(); k < fan_in; k += kWarp) {
      squares += gradient[k] * gradient[k];
      any |= gradient[k] != 0.0f;
    }
    OptimizerArguments rate = a.optimizer;
    const bool still = __any_sync(kAllLanes, any) == 0;
    const bool keeps = still && rate.kind == Optimizer::kSgd && rate.keep == 1.0f;
    if (kScaled<Weight> && lane() == 0) s.changed[row] = !keeps;
    if (keeps && !kScaled<Weight>) continue;
    if (rate.kind == Optimizer::kLabelAdam) {
      const float sum = sum_over_lanes(squares) + bias_gradient * bias_gradient;
      float* seconds = static_cast<float*>(a.moments.second);
      float second = seconds[label];
      rate.learning_rate = label_adam_rate(a.optimizer, sum / static_cast<float>(fan_in + 1), second);
      __syncwarp();  // all lanes have read it
      if (lane() == 0) seconds[label] = second;
    }
    LabelMoments moments(a, label);
    moments.choose_scale(rate, gradient);
    for (std::int64_t k = lane(); k < fan_in; k += kWarp) {
      const std::int64_t at = label * fan_in + k;
      const float old = load_weight(a.layer, label, at);
      float m, v;
      moments.load(k, m, v);
      const float weight = updated_as(rate, old, gradient[k], m, v);
      moments.store(k, m, v);
      if constexpr (kScaled<Weight>)
        gradient[k] = weight;
      else
        store_weight(static_cast<Weight*>(a.layer.weight)[at], weight,
                     sizeof(Weight) == sizeof(BFloat16) ? weight_word(a.rounding, label, k) : 0u);
    }
    if (lane() != 0) continue;
    rate.keep = 1.0f;  // weight decay spares the bias
    float unused = 0.0f, &bias = a.layer.bias[label];
    bias = updated_as(rate, bias, bias_gradient, moments.has_first ? a.bias_first[label] : unused,
                      moments.has_second ? a.bias_second[label] : unused);
  }
}

struct RoundShared {
  float largest[kWarps];
  bool changed[kWarps];
};

// A block of threads rounds labels that share a scale, after it has found the scale.
template <class Format>
__global__ void round_kernel(StepArguments arguments) {
  auto& shared = shared_memory<RoundShared>();
  const Layer& layer = arguments.a.layer;
  const std::int64_t first = std::int64_t{blockIdx.x} * Layer::kScaleLabels;
  const std::int64_t left = arguments.rows.count - first;
  const std::int64_t rows = left < Layer::kScaleLabels ? left : Layer::kScaleLabels;
  const float* updated = arguments.scratch.weight_gradient + first * layer.fan_in;
  float& scale = layer.weight_scale[(arguments.rows.first + first) / Layer::kScaleLabels];
  const float old = scale;
  float largest = 0.0f;
  bool changed = false;
  for (std::int64_t row = threadIdx.x; row < rows; row += kWarps * kWarp)
    changed |= arguments.scratch.changed[first + row] != 0;
  for (std::int64_t i = threadIdx.x; i < rows * layer.fan_in; i += kWarps * kWarp) {
    const float size = absolute(updated[i]);
    largest = larger(size < HUGE_VALF ? size : 0.0f, largest);
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    largest = larger(__shfl_xor_sync(kAllLanes, largest, static_cast<unsigned>(distance)), largest);
  changed = __any_sync(kAllLanes, changed) != 0;
  if (lane() == 0) {
    shared.largest[warp()] = largest;
    shared.changed[warp()] = changed;
  }
  __syncthreads();  // and all threads have read the scale
  for (int w = 0; w < kWarps; ++w) {
    largest = larger(shared.largest[w], largest);
    changed |= shared.changed[w];
  }
  if (!changed) return;  // all threads alike
  const float next = next_scale<Format>(old, largest), inverse = 1.0f / next;
  if (threadIdx.x == 0) scale = next;
  auto* codes = static_cast<std::uint8_t*>(layer.weight) + (arguments.rows.first + first) * layer.fan_in;
  for (std::int64_t i = threadIdx.x; i < rows * layer.fan_in; i += kWarps * kWarp) {
    const std::int64_t label = arguments.rows.first + first + i / layer.fan_in;
    const std::uint32_t random = weight_word(arguments.a.rounding, label, i % layer.fan_in);
    codes[i] = static_cast<std::uint8_t>(round_stochastically_float8<Format>(updated[i] * inverse, random));
  }
}

template <class Weight>
void update(const StepArguments& arguments, const Queue& queue) {
  const std::int64_t count = arguments.rows.count;
  if (kScaled<Weight> && changes_nothing(arguments.a.optimizer)) return;  // nor a scale
  launch("fused_update", &update_kernel<Weight>, grid_for(count < kMostSegments ? count : kMostSegments, 1),
         kWarps * kWarp, 0, queue.stream, arguments);
  if constexpr (kScaled<Weight>)
    launch("fused_round", &round_kernel<Weight>,
           dim3(static_cast<unsigned>((count + Layer::kScaleLabels - 1) / Layer::kScaleLabels)),
           kWarps * kWarp, sizeof(RoundShared), queue.stream, arguments);
}

void normalise(const FusedStepArguments& a, const Scratch& s, const Queue& queue) {
  const Rows all = rows_of(a, 0, a.layer.label);
  visit_logits("fused_normaliser", all, Features{a.features, a.narrow_features}, a.offsets, s.segments,
               VisitNormaliser{a, s, positives(a)}, queue.stream);
  launch("normalise", &normalise_kernel, dim3(static_cast<unsigned>((a.batch + kWarp - 1) / kWarp)), kWarp, 0,
         queue.stream, StepArguments{a, s, all});
}

void step_block(const FusedStepArguments& a, const Scratch& s, const Rows& rows, const Queue& queue) {
  const std::int64_t tiles = row_tiles(rows);
  visit_logits("fused_gradient", rows, Features{a.features, a.narrow_features}, a.offsets,
               tiles < s.segments ? tiles : s.segments, VisitGradient{a, s, positives(a), rows.first},
               queue.stream);
  if (s.narrow_gradient != nullptr && !queue.deterministic)
    add_feature_gradient(rows, s.narrow_gradient, a.feature_gradient, queue);
  else
    add_feature_gradient(rows, s.logit_gradient, a.feature_gradient, queue);
  if (s.narrow_gradient != nullptr)
    compute_weight_gradient(rows, a.narrow_features, s.narrow_gradient, s.weight_gradient, queue);
  else
    compute_weight_gradient(rows, a.features, s.logit_gradient, s.weight_gradient, queue);
  const StepArguments arguments{a, s, rows};
  switch (a.layer.weight_type) {
    case WeightType::kFloat32:
      return update<float>(arguments, queue);
    case WeightType::kBFloat16:
      return update<BFloat16>(arguments, queue);
    case WeightType::kFloat8E4M3:
      return update<Float8E4M3>(arguments, queue);
    case WeightType::kFloat8E5M2:
      return update<Float8E5M2>(arguments, queue);
  }
}

}  // namespace

std::int64_t fused_step(const FusedStepArguments& a, const Queue& queue, void* workspace) {
  cpu::Workspace arrays(workspace);
  const Scratch scratch = plan(a, arrays);
  if (workspace == nullptr) return arrays.bytes();
  if (a.spread.own_log_sum != nullptr) {
    normalise(a, scratch, queue);
    return arrays.bytes();
  }
  clear(a.feature_gradient, static_cast<std::size_t>(a.layer.input * a.batch) * sizeof(float), queue.stream);
  clear(scratch.loss, static_cast<std::size_t>(scratch.loss_parts) * sizeof(double), queue.stream);
  if (is_normalised(a.loss) && a.spread.log_sum == nullptr) normalise(a, scratch, queue);
  for (std::int64_t first = 0; first < a.layer.label; first += scratch.block_labels)
    step_block(a, scratch, rows_of(a, first, scratch.block_labels), queue);
  launch("fused_loss", &loss_kernel, dim3(1), kSumThreads, sizeof(SumShared), queue.stream,
         StepArguments{a, scratch, {}});
  return arrays.bytes();
}

}  // namespace xmlc::cuda
