// Whether this build has code for the current device. The driver is asked about an empty kernel, which was
// compiled for the same architectures as the others.
#include "ops.h"

namespace xmlc::cuda {
namespace {

__global__ void probe_kernel(int) {}

}  // namespace

bool has_code() {
#if defined(XMLC_EMULATE)
  launch("probe", &probe_kernel, dim3(1), 32, 0, nullptr, 0);
  return true;
#else
  cudaFuncAttributes attributes;
  const bool found = cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess;
  cudaGetLastError();  // that there is none is an answer, not a failure
  return found;
#endif
}

}  // namespace xmlc::cuda
