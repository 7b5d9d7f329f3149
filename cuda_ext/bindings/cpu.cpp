// The CPU backend as a Python module: the ops, and the choice of the instruction set.
#include <string_view>

#include "../cpu/lost_pages.h"
#include "../cpu/ops.h"
#include "../cpu/sparse_text.h"
#include "../cpu/workspace.h"
#include "../cuda/scratch.h"
#include "module.h"

using namespace xmlc;

namespace {

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

// Stands for an op of the device where there is none: says the bytes of its workspace, and can do no more.
template <class Arguments>
std::int64_t measure(const Arguments& arguments, int, void* workspace) {
  if (workspace != nullptr) throw std::logic_error("native: sizes of the device's ops work on nothing");
  return cuda::workspace_bytes(arguments);
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

  m.def("watch_pages", &cpu::watch_pages, py::arg("address"), py::arg("bytes"), py::arg("message"));
  m.def("forget_pages", &cpu::forget_pages, py::arg("address"));

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

  py::module_ sizes = m.def_submodule("cuda_sizes", "The device's ops with workspace = 0.");
  define_ops<int>(
      sizes, "threads",
      {&measure<SparseLinearArguments>, &measure<SparseLinearArguments>, &measure<SparseLinearArguments>,
       &measure<FusedStepArguments>, &measure<TopLabelsArguments>, &measure<RedistributeArguments>});
  define_arguments(m);
  define_ops<int>(
      m, "threads",
      {&cpu::sparse_linear, &cpu::sparse_linear_feature_gradient, &cpu::sparse_linear_weight_gradient,
       &cpu::fused_step, &cpu::top_labels, &cpu::redistribute});
}
