// The CPU backend as a Python module: the ops, and the choice of the instruction set.
#include "../cpu/ops.h"
#include "../cpu/workspace.h"
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

  define_ops<int>(
      m, "threads",
      {&cpu::sparse_linear, &cpu::sparse_linear_feature_gradient, &cpu::sparse_linear_weight_gradient,
       &cpu::fused_step, &cpu::top_labels, &cpu::redistribute});
}
