// The CPU backend as a Python module. Tensors arrive as addresses that xmlc/ops has checked; every op is
// called twice, first with workspace = 0 to learn the bytes of its workspace.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "../cpu/ops.h"
#include "../cpu/sparse_text.h"
#include "../cpu/workspace.h"

namespace py = pybind11;
using namespace xmlc;

namespace {

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

WeightType weight_type(const std::string& name) {
  return named<WeightType>(name, {{"float32", WeightType::kFloat32}, {"bfloat16", WeightType::kBFloat16}});
}
IndexType index_type(const std::string& name) {
  return named<IndexType>(name, {{"uint16", IndexType::kUInt16}, {"int32", IndexType::kInt32}});
}
cpu::Isa isa(const std::string& name) {
  return named<cpu::Isa>(
      name, {{"generic", cpu::Isa::kGeneric}, {"avx2", cpu::Isa::kAvx2}, {"avx512", cpu::Isa::kAvx512}});
}
const char* isa_name(cpu::Isa isa) {
  switch (isa) {
    case cpu::Isa::kAvx2:
      return "avx2";
    case cpu::Isa::kAvx512:
      return "avx512";
    default:
      return "generic";
  }
}

OptimizerArguments optimizer(const std::string& kind, double learning_rate, double weight_decay,
                             double momentum, double beta1, double beta2, double eps, std::int64_t step) {
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

Layer layer(Address indices, Address weight, Address bias, const std::string& indices_dtype,
            const std::string& weight_dtype, std::int64_t input, std::int64_t label, std::int64_t group_size,
            std::int64_t fan_in) {
  return {at<const void>(indices),
          at<void>(weight),
          at<float>(bias),
          index_type(indices_dtype),
          weight_type(weight_dtype),
          input,
          label,
          group_size,
          fan_in};
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of xmlc; see cuda_ext/include/xmlc/arguments.h.";
  m.def("isa", [] { return isa_name(cpu::isa()); });
  m.def("set_isa", [](const std::string& name) { cpu::set_isa(isa(name)); });
  m.def("available_isas", [] {
    py::list names;
    for (const cpu::Isa one : {cpu::Isa::kGeneric, cpu::Isa::kAvx2, cpu::Isa::kAvx512})
      if (cpu::isa_available(one)) names.append(isa_name(one));
    return names;
  });

  m.attr("HUGE_PAGE") = cpu::kHugePage;
  m.def("prefer_huge_pages",
        [](Address base, std::int64_t bytes) { cpu::prefer_huge_pages(at<void>(base), bytes); });

  py::class_<cpu::TextProgress>(m, "TextProgress")
      .def(py::init<>())
      .def_readwrite("at", &cpu::TextProgress::at)
      .def_readwrite("lines", &cpu::TextProgress::lines)
      .def_readwrite("pairs", &cpu::TextProgress::pairs)
      .def_readwrite("labels", &cpu::TextProgress::labels)
      .def_readwrite("unordered", &cpu::TextProgress::unordered);
  m.def(
      "parse_sparse_text",
      [](const py::bytes& text, std::int64_t columns, std::int64_t first_column, std::int64_t labels,
         std::int64_t first_label, Address offsets, Address indices, Address values, Address label_offsets,
         Address label_indices, cpu::TextProgress& progress) {
        const std::string_view view = text;
        const cpu::SparseText lines{view.data(),
                                    view.data() + view.size(),
                                    columns,
                                    first_column,
                                    labels,
                                    first_label,
                                    at<std::int64_t>(offsets),
                                    at<std::int32_t>(indices),
                                    at<float>(values),
                                    at<std::int64_t>(label_offsets),
                                    at<std::int32_t>(label_indices)};
        py::gil_scoped_release release;
        cpu::parse_sparse_text(lines, progress);
      },
      py::kw_only(), py::arg("text"), py::arg("columns"), py::arg("first_column"), py::arg("labels"),
      py::arg("first_label"), py::arg("offsets"), py::arg("indices"), py::arg("values"),
      py::arg("label_offsets"), py::arg("label_indices"), py::arg("progress"));
  m.def(
      "parse_index_pairs",
      [](const py::bytes& text, std::int64_t rows, std::int64_t first_row, std::int64_t columns,
         std::int64_t first_column, Address pairs, cpu::TextProgress& progress) {
        const std::string_view view = text;
        py::gil_scoped_release release;
        cpu::parse_index_pairs(view.data(), view.data() + view.size(), rows, first_row, columns, first_column,
                               at<std::int64_t>(pairs), progress);
      },
      py::kw_only(), py::arg("text"), py::arg("rows"), py::arg("first_row"), py::arg("columns"),
      py::arg("first_column"), py::arg("pairs"), py::arg("progress"));

  py::class_<Layer>(m, "Layer")
      .def(py::init(&layer), py::kw_only(), py::arg("indices"), py::arg("weight"), py::arg("bias"),
           py::arg("indices_dtype"), py::arg("weight_dtype"), py::arg("input"), py::arg("label"),
           py::arg("group_size"), py::arg("fan_in"));

  py::class_<LogitOffsets>(m, "LogitOffsets")
      .def(py::init([](Address label, Address instance, Address value, Address gradient, std::int64_t entry) {
             return LogitOffsets{at<const std::int32_t>(label), at<const std::int32_t>(instance),
                                 at<const float>(value), at<float>(gradient), entry};
           }),
           py::kw_only(), py::arg("label"), py::arg("instance"), py::arg("value"), py::arg("gradient"),
           py::arg("entry"));

  m.def(
      "sparse_linear",
      [](const Layer& layer, Address features, Address logits, std::int64_t batch, int threads,
         Address workspace) {
        const SparseLinearArguments a{layer, at<const float>(features), at<float>(logits), nullptr, nullptr,
                                      batch};
        py::gil_scoped_release release;
        return cpu::sparse_linear(a, threads, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("features"), py::arg("logits"), py::arg("batch"),
      py::arg("threads"), py::arg("workspace"));
  m.def(
      "sparse_linear_feature_gradient",
      [](const Layer& layer, Address logit_gradient, Address feature_gradient, std::int64_t batch,
         int threads, Address workspace) {
        const SparseLinearArguments a{
            layer, nullptr, at<float>(logit_gradient), at<float>(feature_gradient), nullptr, batch};
        py::gil_scoped_release release;
        return cpu::sparse_linear_feature_gradient(a, threads, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("logit_gradient"), py::arg("feature_gradient"),
      py::arg("batch"), py::arg("threads"), py::arg("workspace"));
  m.def(
      "sparse_linear_weight_gradient",
      [](const Layer& layer, Address features, Address logit_gradient, Address weight_gradient,
         std::int64_t batch, int threads, Address workspace) {
        const SparseLinearArguments a{layer,   at<const float>(features),  at<float>(logit_gradient),
                                      nullptr, at<float>(weight_gradient), batch};
        py::gil_scoped_release release;
        return cpu::sparse_linear_weight_gradient(a, threads, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("features"), py::arg("logit_gradient"),
      py::arg("weight_gradient"), py::arg("batch"), py::arg("threads"), py::arg("workspace"));
  m.def(
      "fused_step",
      [](const Layer& layer, Address features, Address feature_gradient, Address pair_label,
         Address pair_instance, std::int64_t pair, Address positive_weight, std::int64_t batch,
         const std::string& loss, double scale, bool share_positives, double gradient_cutoff,
         const std::string& optimizer_kind, double learning_rate, double weight_decay, double momentum,
         double beta1, double beta2, double eps, std::int64_t step, Address weight_first,
         Address weight_second, Address bias_first, Address bias_second, std::uint64_t seed, Address loss_sum,
         const LogitOffsets& offsets, int threads, Address workspace) {
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
            at<float>(weight_first),
            at<float>(weight_second),
            at<float>(bias_first),
            at<float>(bias_second),
            make_key(seed, static_cast<std::uint64_t>(step), Purpose::kRounding),
            at<double>(loss_sum),
            offsets};
        py::gil_scoped_release release;
        return cpu::fused_step(a, threads, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("features"), py::arg("feature_gradient"),
      py::arg("pair_label"), py::arg("pair_instance"), py::arg("pair"), py::arg("positive_weight"),
      py::arg("batch"), py::arg("loss"), py::arg("scale"), py::arg("share_positives"),
      py::arg("gradient_cutoff"), py::arg("optimizer"), py::arg("learning_rate"), py::arg("weight_decay"),
      py::arg("momentum"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("step"),
      py::arg("weight_first"), py::arg("weight_second"), py::arg("bias_first"), py::arg("bias_second"),
      py::arg("seed"), py::arg("loss_sum"), py::arg("offsets"), py::arg("threads"), py::arg("workspace"));
  m.def(
      "top_labels",
      [](const Layer& layer, Address features, Address scores, Address labels, std::int64_t batch,
         std::int64_t k, const LogitOffsets& offsets, int threads, Address workspace) {
        const TopLabelsArguments a{
            layer, at<const float>(features), at<float>(scores), at<std::int64_t>(labels), batch, k, offsets};
        py::gil_scoped_release release;
        return cpu::top_labels(a, threads, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("features"), py::arg("scores"), py::arg("labels"),
      py::arg("batch"), py::arg("k"), py::arg("offsets"), py::arg("threads"), py::arg("workspace"));
  m.def(
      "redistribute",
      [](const Layer& layer, Address state0, Address state1, bool by_threshold, bool within_group,
         double threshold, std::int64_t prune, const std::string& new_value, double new_value_bound,
         std::uint64_t seed, std::uint64_t step, Address pruned, int threads, Address workspace) {
        const RedistributeArguments a{layer,
                                      {at<float>(state0), at<float>(state1)},
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
        return cpu::redistribute(a, threads, at<void>(workspace));
      },
      py::kw_only(), py::arg("layer"), py::arg("state0"), py::arg("state1"), py::arg("by_threshold"),
      py::arg("within_group"), py::arg("threshold"), py::arg("prune"), py::arg("new_value"),
      py::arg("new_value_bound"), py::arg("seed"), py::arg("step"), py::arg("pruned"), py::arg("threads"),
      py::arg("workspace"));
}
