// The CUDA ops for Python: a call says where it works by (device, stream, deterministic).
#pragma once

#include <tuple>

#include "../cuda/ops.h"
#include "module.h"

namespace xmlc::cuda {

using Where = std::tuple<int, std::uintptr_t, bool>;

// Makes a device current for as long as it lives.
struct CurrentDevice {
#if defined(XMLC_EMULATE)
  explicit CurrentDevice(int) {}
#else
  int former = 0;
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&former), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  CurrentDevice(const CurrentDevice&) = delete;
  ~CurrentDevice() { cudaSetDevice(former); }
#endif
};

template <class Arguments, std::int64_t (*op)(const Arguments&, const Queue&, void*)>
std::int64_t run(const Arguments& arguments, Where where, void* workspace) {
  const auto [device, stream, deterministic] = where;
  const CurrentDevice current(device);
  return op(arguments, Queue{reinterpret_cast<cudaStream_t>(stream), deterministic}, workspace);
}

inline void define(py::module_& m) {
  define_arguments(m);
  define_ops<Where>(
      m, "queue",
      {&run<SparseLinearArguments, &sparse_linear>,
       &run<SparseLinearArguments, &sparse_linear_feature_gradient>,
       &run<SparseLinearArguments, &sparse_linear_weight_gradient>, &run<FusedStepArguments, &fused_step>,
       &run<TopLabelsArguments, &top_labels>, &run<RedistributeArguments, &redistribute>});
}

}  // namespace xmlc::cuda
