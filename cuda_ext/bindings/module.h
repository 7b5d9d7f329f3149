// The ops as a Python module, the same for every backend. Tensors arrive as addresses that xmlc/ops has
// checked; every op is called twice, first with workspace = 0 to learn the bytes of its workspace.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "xmlc/arguments.h"

namespace xmlc {

namespace py = pybind11;

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

template <class Value>
Value named(const std::string& name, std::initializer_list<std::pair<const char*, Value>> known) {
  for (const auto& [known_name, value] : known)
    if (name == known_name) return value;
  throw std::invalid_argument("native: unknown name '" + name + "'");
}

inline WeightType weight_type(const std::string& name) {
  return named<WeightType>(name, {{"float32", WeightType::kFloat32},
                                  {"bfloat16", WeightType::kBFloat16},
                                  {"float8_e4m3fn", WeightType::kFloat8E4M3},
                                  {"float8_e5m2", WeightType::kFloat8E5M2}});
}
inline IndexType index_type(const std::string& name) {
  return named<IndexType>(name, {{"uint16", IndexType::kUInt16}, {"int32", IndexType::kInt32}});
}
inline OptimizerArguments optimizer(const std::string& kind, double learning_rate, double weight_decay,
                                    double momentum, double beta1, double beta2, double eps,
                                    std::int64_t step) {
  OptimizerArguments o{};
  o.kind = named<Optimizer>(kind, {{"sgd", Optimizer::kSgd},
                                   {"momentum", Optimizer::kMomentum},
                                   {"adam", Optimizer::kAdam},
                                   {"label_adam", Optimizer::kLabelAdam}});
  const double steps = static_cast<double>(step);
  o.learning_rate = static_cast<float>(learning_rate);
  o.keep = static_cast<float>(1.0 - learning_rate * weight_decay);
  o.momentum = static_cast<float>(momentum);
  o.beta2 = static_cast<float>(beta2);
  o.eps = static_cast<float>(eps);
  o.complement1 = static_cast<float>(1.0 - beta1);
  o.complement2 = static_cast<float>(1.0 - beta2);
  o.corrected_rate = static_cast<float>(learning_rate / (1.0 - std::pow(beta1, steps)));
  o.inverse_correction = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, steps)));
  return o;
}

inline Layer layer(Address indices, Address weight, Address bias, const std::string& indices_dtype,
                   const std::string& weight_dtype, std::int64_t input, std::int64_t label,
                   std::int64_t group_size, std::int64_t fan_in, Address weight_scale) {
  return {at<const void>(indices),
          at<void>(weight),
          at<float>(bias),
          index_type(indices_dtype),
          weight_type(weight_dtype),
          input,
          label,
          group_size,
          fan_in,
          at<float>(weight_scale)};
}

// The ops of a backend. Where: what a call says beside its arguments, such as the number of threads.
template <class Where>
struct Ops {
  template <class Arguments>
  using Op = std::int64_t (*)(const Arguments&, Where, void* workspace);
  Op<SparseLinearArguments> sparse_linear, sparse_linear_feature_gradient, sparse_linear_weight_gradient;
  Op<FusedStepArguments> fused_step;
  Op<TopLabelsArguments> top_labels;
  Op<RedistributeArguments> redistribute;
};

inline void define_arguments(py::module_& m) {
  py::class_<Layer>(m, "Layer", py::module_local())
      .def(py::init(&layer), py::kw_only(), py::arg("indices"), py::arg("weight"), py::arg("bias"),
           py::arg("indices_dtype"), py::arg("weight_dtype"), py::arg("input"), py::arg("label"),
           py::arg("group_size"), py::arg("fan_in"), py::arg("weight_scale"));

  py::class_<LogitOffsets>(m, "LogitOffsets", py::module_local())
      .def(py::init([](Address label, Address instance, Address value, Address gradient, std::int64_t entry) {
             return LogitOffsets{at<const std::int32_t>(label), at<const std::int32_t>(instance),
                                 at<const float>(value), at<float>(gradient), entry};
           }),
           py::kw_only(), py::arg("label"), py::arg("instance"), py::arg("value"), py::arg("gradient"),
           py::arg("entry"));
}

template <class Where>
void define_ops(py::module_& m, const char* where_name, const Ops<Where>& ops) {
  m.def(
      "sparse_linear",
      [ops](const Layer& layer, Address features, Address logits, std::int64_t batch, const Where& where,
            Address workspace, Address narrow_features) {
        SparseLinearArguments a{};
        a.layer = layer;
        a.features = at<const float>(features);
        a.narrow_features = at<const BFloat16>(narrow_features);
        a.logits = at<float>(logits);
        a.batch = batch;
        py::gil_scoped_release release;
        return ops.sparse_linear(a, where, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("features"), py::arg("logits"), py::arg("batch"),
      py::arg(where_name), py::arg("workspace"), py::arg("narrow_features") = 0);
  m.def(
      "sparse_linear_feature_gradient",
      [ops](const Layer& layer, Address logit_gradient, Address feature_gradient, std::int64_t batch,
            const Where& where, Address workspace, Address narrow_logit_gradient) {
        SparseLinearArguments a{};
        a.layer = layer;
        a.logits = at<float>(logit_gradient);
        a.narrow_logit_gradient = at<const BFloat16>(narrow_logit_gradient);
        a.feature_gradient = at<float>(feature_gradient);
        a.batch = batch;
        py::gil_scoped_release release;
        return ops.sparse_linear_feature_gradient(a, where, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("logit_gradient"), py::arg("feature_gradient"),
      py::arg("batch"), py::arg(where_name), py::arg("workspace"), py::arg("narrow_logit_gradient") = 0);
  m.def(
      "sparse_linear_weight_gradient",
      [ops](const Layer& layer, Address features, Address logit_gradient, Address weight_gradient,
            std::int64_t batch, const Where& where, Address workspace, Address narrow_features,
            Address narrow_logit_gradient) {
        SparseLinearArguments a{};
        a.layer = layer;
        a.features = at<const float>(features);
        a.narrow_features = at<const BFloat16>(narrow_features);
        a.logits = at<float>(logit_gradient);
        a.narrow_logit_gradient = at<const BFloat16>(narrow_logit_gradient);
        a.weight_gradient = at<float>(weight_gradient);
        a.batch = batch;
        py::gil_scoped_release release;
        return ops.sparse_linear_weight_gradient(a, where, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("features"), py::arg("logit_gradient"),
      py::arg("weight_gradient"), py::arg("batch"), py::arg(where_name), py::arg("workspace"),
      py::arg("narrow_features") = 0, py::arg("narrow_logit_gradient") = 0);
  m.def(
      "fused_step",
      [ops](const Layer& layer, Address features, Address feature_gradient, Address pair_label,
            Address pair_instance, std::int64_t pair, Address positive_weight, std::int64_t batch,
            const std::string& loss, double scale, bool share_positives, double gradient_cutoff,
            const std::string& optimizer_kind, double learning_rate, double weight_decay, double momentum,
            double beta1, double beta2, double eps, std::int64_t step, Address weight_first,
            Address weight_second, const std::string& state_dtype, Address state_scale, Address bias_first,
            Address bias_second, std::uint64_t seed, Address loss_sum, const LogitOffsets& offsets,
            const Where& where, Address workspace, Address narrow_features, Address own_log_sum,
            Address own_pair_logit, Address log_sum, Address factor, Address share) {
        const auto key = [&](Purpose purpose) {
          return make_key(seed, static_cast<std::uint64_t>(step), purpose);
        };
        const FusedStepArguments a{
            layer,
            at<const float>(features),
            at<float>(feature_gradient),
            at<const std::int32_t>(pair_label),
            at<const std::int32_t>(pair_instance),
            at<const float>(positive_weight),
            batch,
            pair,
            named<Loss>(loss, {{"squared_hinge", Loss::kSquaredHinge},
                               {"bce", Loss::kBce},
                               {"softmax", Loss::kSoftmax},
                               {"decoupled_softmax", Loss::kDecoupledSoftmax}}),
            static_cast<float>(scale),
            share_positives,
            static_cast<float>(gradient_cutoff),
            optimizer(optimizer_kind, learning_rate, weight_decay, momentum, beta1, beta2, eps, step),
            {at<void>(weight_first), at<void>(weight_second), weight_type(state_dtype),
             at<std::uint8_t>(state_scale), key(Purpose::kFirstMoment), key(Purpose::kSecondMoment)},
            at<float>(bias_first),
            at<float>(bias_second),
            key(Purpose::kRounding),
            at<double>(loss_sum),
            offsets,
            at<const BFloat16>(narrow_features),
            {at<double>(own_log_sum), at<float>(own_pair_logit), at<float>(log_sum), at<float>(factor),
             at<float>(share)}};
        py::gil_scoped_release release;
        return ops.fused_step(a, where, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("features"), py::arg("feature_gradient"),
      py::arg("pair_label"), py::arg("pair_instance"), py::arg("pair"), py::arg("positive_weight"),
      py::arg("batch"), py::arg("loss"), py::arg("scale"), py::arg("share_positives"),
      py::arg("gradient_cutoff"), py::arg("optimizer"), py::arg("learning_rate"), py::arg("weight_decay"),
      py::arg("momentum"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("step"),
      py::arg("weight_first"), py::arg("weight_second"), py::arg("state_dtype"), py::arg("state_scale"),
      py::arg("bias_first"), py::arg("bias_second"), py::arg("seed"), py::arg("loss_sum"), py::arg("offsets"),
      py::arg(where_name), py::arg("workspace"), py::arg("narrow_features") = 0, py::arg("own_log_sum") = 0,
      py::arg("own_pair_logit") = 0, py::arg("log_sum") = 0, py::arg("factor") = 0, py::arg("share") = 0);
  m.def(
      "top_labels",
      [ops](const Layer& layer, Address features, Address scores, Address labels, std::int64_t batch,
            std::int64_t k, const LogitOffsets& offsets, const Where& where, Address workspace,
            Address narrow_features) {
        const TopLabelsArguments a{layer,
                                   at<const float>(features),
                                   at<float>(scores),
                                   at<std::int64_t>(labels),
                                   batch,
                                   k,
                                   offsets,
                                   at<const BFloat16>(narrow_features)};
        py::gil_scoped_release release;
        return ops.top_labels(a, where, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("features"), py::arg("scores"), py::arg("labels"),
      py::arg("batch"), py::arg("k"), py::arg("offsets"), py::arg(where_name), py::arg("workspace"),
      py::arg("narrow_features") = 0);
  m.def(
      "redistribute",
      [ops](const Layer& layer, Address state0, Address state1, std::size_t state_bytes, bool by_threshold,
            bool within_group, double threshold, std::int64_t prune, const std::string& new_value,
            double new_value_bound, std::uint64_t seed, std::uint64_t step, Address pruned,
            const Where& where, Address workspace) {
        const RedistributeArguments a{layer,
                                      {at<void>(state0), at<void>(state1)},
                                      state_bytes,
                                      by_threshold,
                                      within_group,
                                      static_cast<float>(threshold),
                                      prune,
                                      named<NewValue>(new_value, {{"zero", NewValue::kZero},
                                                                  {"random", NewValue::kRandom},
                                                                  {"keep", NewValue::kKeep}}),
                                      static_cast<float>(new_value_bound),
                                      make_key(seed, step, Purpose::kRedistribution),
                                      at<std::int64_t>(pruned)};
        py::gil_scoped_release release;
        return ops.redistribute(a, where, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("state0"), py::arg("state1"), py::arg("state_bytes"),
      py::arg("by_threshold"), py::arg("within_group"), py::arg("threshold"), py::arg("prune"),
      py::arg("new_value"), py::arg("new_value_bound"), py::arg("seed"), py::arg("step"), py::arg("pruned"),
      py::arg(where_name), py::arg("workspace"));
}

}  // namespace xmlc
