// Runs the emulated CUDA ops on small layers, in every order of threads, against plain loops in float64. Ends
// with status 1 and a line that says what was wrong. `harness bad-index` gives the ops an index out of range.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/ops.h"
#include "cuda/tensor_products.cuh"
#include "emulator/emulator.h"
#include "xmlc/rounding.h"

using namespace xmlc;

namespace {

int stream_of_the_caller;
cuda::Queue queue(bool deterministic) { return {&stream_of_the_caller, deterministic}; }

struct Problem {
  std::int64_t label, fan_in, input, batch, group_size;
  std::vector<std::int32_t> indices;
  std::vector<float> weight, bias, features;
  std::vector<BFloat16> narrow_weight, narrow_features;  // the same values, of a problem in bfloat16

  Problem(std::int64_t l, std::int64_t f, std::int64_t i, std::int64_t b, std::int64_t g)
      : label(l), fan_in(f), input(i), batch(b), group_size(g) {
    std::mt19937 random(static_cast<unsigned>(l + f + i + b + g));
    std::normal_distribution<float> normal;
    for (std::int64_t group = 0; group * g < l; ++group) {
      std::vector<std::int32_t> all(static_cast<std::size_t>(i));
      for (std::int64_t at = 0; at < i; ++at) all[at] = static_cast<std::int32_t>(at);
      for (std::int64_t k = 0; k < f; ++k) {
        std::swap(all[k], all[k + static_cast<std::int64_t>(random() % static_cast<unsigned>(i - k))]);
        indices.push_back(all[k]);
      }
    }
    for (std::int64_t at = 0; at < l * f; ++at) weight.push_back(normal(random));
    for (std::int64_t at = 0; at < l; ++at) bias.push_back(normal(random));
    for (std::int64_t at = 0; at < i * b; ++at) features.push_back(normal(random));
  }
  // Rounds weights and features, so that both types hold the same values.
  void narrow() {
    for (auto [wide, to] : {std::pair{&weight, &narrow_weight}, std::pair{&features, &narrow_features}})
      for (float& value : *wide) {
        to->push_back(round_to_nearest(value));
        value = widen(to->back());
      }
  }
  Layer layer() {
    const bool is_narrow = !narrow_weight.empty();
    return {indices.data(),
            is_narrow ? static_cast<void*>(narrow_weight.data()) : weight.data(),
            bias.data(),
            IndexType::kInt32,
            is_narrow ? WeightType::kBFloat16 : WeightType::kFloat32,
            input,
            label,
            group_size,
            fan_in};
  }
  std::int64_t index(std::int64_t l, std::int64_t k) const { return indices[l / group_size * fan_in + k]; }
  double logit(std::int64_t l, std::int64_t b) const {
    double sum = bias[l];
    for (std::int64_t k = 0; k < fan_in; ++k)
      sum += double{weight[l * fan_in + k]} * features[index(l, k) * batch + b];
    return sum;
  }
};

template <class Op, class Arguments>
void run(Op op, const Arguments& arguments, bool deterministic = false) {
  const std::int64_t bytes = op(arguments, queue(deterministic), nullptr);
  std::vector<unsigned char> workspace(static_cast<std::size_t>(std::max<std::int64_t>(1, bytes)), 0xff);
  op(arguments, queue(deterministic), workspace.data());
}

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("wrong result: " + what);
}
void require_near(const std::vector<float>& found, const std::vector<double>& expected, const char* what) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    require(std::abs(found[i] - expected[i]) <= 1e-4 * (1.0 + std::abs(expected[i])),
            std::string(what) + " " + std::to_string(i) + ": " + std::to_string(found[i]) + " for " +
                std::to_string(expected[i]));
}

void sparse_linear(Problem& p) {
  std::vector<float> logits(static_cast<std::size_t>(p.label * p.batch), NAN);
  std::vector<double> exact, feature_gradient(p.features.size()), weight_gradient(p.weight.size());
  for (std::int64_t l = 0; l < p.label; ++l)
    for (std::int64_t b = 0; b < p.batch; ++b) exact.push_back(p.logit(l, b));
  SparseLinearArguments a{};
  a.layer = p.layer();
  a.features = p.features.data();
  a.logits = logits.data();
  a.batch = p.batch;
  std::vector<BFloat16> narrow_gradient;
  if (!p.narrow_features.empty()) a.narrow_features = p.narrow_features.data();
  run(cuda::sparse_linear, a);
  require_near(logits, exact, "logit");
  if (!p.narrow_features.empty()) {  // the logits serve as their gradients
    for (float& logit : logits) {
      narrow_gradient.push_back(round_to_nearest(logit));
      logit = widen(narrow_gradient.back());
    }
    a.narrow_logit_gradient = narrow_gradient.data();
  }
  for (std::int64_t l = 0; l < p.label; ++l)
    for (std::int64_t k = 0; k < p.fan_in; ++k)
      for (std::int64_t b = 0; b < p.batch; ++b) {
        const double g = logits[l * p.batch + b];
        feature_gradient[p.index(l, k) * p.batch + b] += g * p.weight[l * p.fan_in + k];
        weight_gradient[l * p.fan_in + k] += g * p.features[p.index(l, k) * p.batch + b];
      }
  for (bool deterministic : {false, true}) {
    if (deterministic) a.narrow_logit_gradient = nullptr;  // knows no tensor cores
    std::vector<float> found(p.features.size(), NAN);
    a.feature_gradient = found.data();
    run(cuda::sparse_linear_feature_gradient, a, deterministic);
    require_near(found, feature_gradient, "feature gradient");
  }
  std::vector<float> found(p.weight.size(), NAN);
  a.weight_gradient = found.data();
  if (!narrow_gradient.empty()) a.narrow_logit_gradient = narrow_gradient.data();
  run(cuda::sparse_linear_weight_gradient, a);
  require_near(found, weight_gradient, "weight gradient");
}

void fused_step(Problem p, Loss loss) {
  const Problem before = p;
  std::vector<std::int32_t> pair_label, pair_instance;
  for (std::int64_t l = 0; l < std::min<std::int64_t>(p.label, p.batch); ++l) {
    pair_label.push_back(static_cast<std::int32_t>(l));
    pair_instance.push_back(static_cast<std::int32_t>(l));
  }
  std::vector<float> feature_gradient(p.features.size(), NAN);
  double total = NAN;
  FusedStepArguments a{};
  a.layer = p.layer();
  a.features = p.features.data();
  if (!p.narrow_features.empty()) a.narrow_features = p.narrow_features.data();
  a.feature_gradient = feature_gradient.data();
  a.pair_label = pair_label.data();
  a.pair_instance = pair_instance.data();
  a.batch = p.batch;
  a.pair = static_cast<std::int64_t>(pair_label.size());
  a.loss = loss;
  a.scale = 1.0f / static_cast<float>(p.batch);
  a.optimizer.kind = Optimizer::kSgd;
  a.optimizer.learning_rate = 0.5f;
  a.optimizer.keep = 1.0f;
  a.loss_sum = &total;
  run(cuda::fused_step, a);
  require(std::isfinite(total), "the loss is no number");
  if (loss != Loss::kSquaredHinge)
    return;  // the others are for the sanitizers; the op tests know their values
  double exact = 0.0;
  std::vector<double> bias;
  for (std::int64_t l = 0; l < p.label; ++l) {
    double gradient = 0.0;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      const double target = l == b ? 1.0 : -1.0, slack = std::max(0.0, 1.0 - target * before.logit(l, b));
      exact += slack * slack / static_cast<double>(p.batch);
      gradient -= 2.0 * target * slack / static_cast<double>(p.batch);
    }
    bias.push_back(before.bias[l] - 0.5 * gradient);
  }
  require(std::abs(total - exact) <= 1e-4 * exact, "loss " + std::to_string(total));
  require_near(p.bias, bias, "bias");
}

void top_labels(Problem& p, std::int64_t k) {
  std::vector<float> scores(static_cast<std::size_t>(p.batch * k), NAN);
  std::vector<std::int64_t> labels(scores.size(), -2);
  TopLabelsArguments a{p.layer(), p.features.data(), scores.data(), labels.data(), p.batch, k, {}, nullptr};
  if (!p.narrow_features.empty()) a.narrow_features = p.narrow_features.data();
  run(cuda::top_labels, a);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    std::vector<double> sorted;
    for (std::int64_t l = 0; l < p.label; ++l) sorted.push_back(p.logit(l, b));
    std::sort(sorted.rbegin(), sorted.rend());
    for (std::int64_t rank = 0; rank < k; ++rank)
      require(std::abs(scores[b * k + rank] - sorted[rank]) <= 1e-4 * (1.0 + std::abs(sorted[rank])),
              "score");
  }
}

void redistribute(Problem p, bool within_group) {
  std::int64_t pruned = -1;
  RedistributeArguments a{};
  a.layer = p.layer();
  a.prune = static_cast<std::int64_t>(p.indices.size()) / 3;
  a.within_group = within_group;
  a.pruned = &pruned;
  run(cuda::redistribute, a);
  require(pruned == a.prune, "pruned " + std::to_string(pruned) + " of " + std::to_string(a.prune));
  for (std::size_t at = 0; at < p.indices.size(); at += static_cast<std::size_t>(p.fan_in)) {
    const std::set<std::int32_t> row(p.indices.begin() + at, p.indices.begin() + at + p.fan_in);
    require(static_cast<std::int64_t>(row.size()) == p.fan_in && *row.rbegin() < p.input,
            "inputs of a group");
  }
}

// The plain product against the instruction's own description (PTX ISA, "Matrix fragments for mma.m16n8k16
// with floating point type"), written down apart from the code that it checks.
struct Product {
  float a[16][16], b[16][8], c[16][8];
};

void product_kernel(Product* product) {
  const int lane = cuda::lane(), group = lane >> 2, in_group = lane & 3;
  cuda::FragmentA a{};
  cuda::FragmentB b{};
  cuda::FragmentC c{};
  for (int i = 0; i < 8; ++i) {
    const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
    const int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
    a.word[i / 2] |= std::uint32_t{round_to_nearest(product->a[row][column]).bits} << (16 * (i & 1));
  }
  for (int i = 0; i < 4; ++i) {
    const int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
    b.word[i / 2] |= std::uint32_t{round_to_nearest(product->b[row][group]).bits} << (16 * (i & 1));
  }
  const auto place = [&](int i) -> float& {
    return product->c[i < 2 ? group : group + 8][in_group * 2 + (i & 1)];
  };
  for (int i = 0; i < 4; ++i) c.value[i] = place(i);
  cuda::multiply_add(c, a, b);
  for (int i = 0; i < 4; ++i) place(i) = c.value[i];
}

void product() {
  std::mt19937 random(7);
  Product p{}, before{};
  for (auto* matrix : {&p.a[0][0], &p.b[0][0], &p.c[0][0]})
    for (int at = 0; at < (matrix == &p.a[0][0] ? 256 : 128); ++at)
      matrix[at] = static_cast<float>(static_cast<int>(random() % 17) - 8);
  before = p;
  cuda::launch("product", &product_kernel, dim3(1), cuda::kWarp, 0, &stream_of_the_caller, &p);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) {
      float sum = before.c[i][j];  // of small whole numbers: exact
      for (int k = 0; k < 16; ++k) sum += before.a[i][k] * before.b[k][j];
      require(p.c[i][j] == sum, "element of a product");
    }
}

}  // namespace

int main(int count, char** arguments) {
  emulator::expect_stream(&stream_of_the_caller);
  try {
    for (auto order : {emulator::Order::kForward, emulator::Order::kReverse, emulator::Order::kRandom}) {
      emulator::set_order(order);
      product();
      for (auto [label, fan_in, input, batch, group_size] : {std::array<std::int64_t, 5>{7, 5, 40, 3, 1},
                                                             {70, 33, 90, 35, 1},
                                                             {70, 33, 90, 70, 16},
                                                             {3, 64, 64, 33, 64}}) {
        Problem p(label, fan_in, input, batch, group_size);
        if (count > 1 && std::strcmp(arguments[1], "bad-index") == 0)
          p.indices.back() = static_cast<std::int32_t>(input + 1);
        sparse_linear(p);
        for (Loss loss : {Loss::kSquaredHinge, Loss::kBce, Loss::kSoftmax, Loss::kDecoupledSoftmax})
          fused_step(p, loss);
        top_labels(p, std::min<std::int64_t>(label, 4));
        redistribute(p, false);
        redistribute(p, true);
        if (group_size == 1) continue;
        p.narrow();
        sparse_linear(p);
        for (Loss loss : {Loss::kSquaredHinge, Loss::kSoftmax}) fused_step(p, loss);
        top_labels(p, std::min<std::int64_t>(label, 4));
      }
    }
    emulator::set_order(emulator::Order::kForward);
    Problem many(40'000, 1, 3, 1, 1);  // more labels than warps
    sparse_linear(many);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
