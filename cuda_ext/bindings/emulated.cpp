// The CUDA backend on the emulator, for the tests: the ops take addresses of this machine's memory.
#include "../emulator/emulator.h"
#include "cuda_ops.h"

using namespace xmlc;

PYBIND11_MODULE(_emulated, m) {
  m.doc() = "CUDA kernels of xmlc, run by the emulator; see cuda_ext/emulator/emulator.h.";
  m.def("set_order", [](const std::string& name) {
    emulator::set_order(named<emulator::Order>(name, {{"forward", emulator::Order::kForward},
                                                      {"reverse", emulator::Order::kReverse},
                                                      {"random", emulator::Order::kRandom}}));
  });
  m.def("expect_stream", [](Address stream) { emulator::expect_stream(at<void>(stream)); });
  cuda::define(m);
}
