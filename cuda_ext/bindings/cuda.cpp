// The CUDA backend as a Python module. The CUDA runtime is linked statically: it imports without a driver.
#include "cuda_ops.h"

using namespace xmlc;

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of xmlc; see cuda_ext/include/xmlc/arguments.h.";
  m.attr("architectures") = XMLC_CUDA_ARCHITECTURES;
  m.attr("runtime_version") = CUDART_VERSION;
  // Devices that the driver reports; throws where there is no driver or an old one.
  m.def("device_count", [] {
    int count = 0;
    cuda::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
  });
  // Whether this build has code for a device.
  m.def("runs_on", [](int device) {
    const cuda::CurrentDevice current(device);
    return cuda::has_code();
  });
  cuda::define(m);
}
