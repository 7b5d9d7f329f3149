// Chooses the instruction set at run time.
#include <atomic>
#include <stdexcept>

#include "ops.h"

namespace xmlc::cpu {
namespace {

Isa best() {
  if (isa_available(Isa::kAvx512)) return Isa::kAvx512;
  if (isa_available(Isa::kAvx2)) return Isa::kAvx2;
  return Isa::kGeneric;
}
std::atomic<Isa> selected{best()};

}  // namespace

bool isa_available(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kGeneric:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("fma");
  }
#endif
  return isa == Isa::kGeneric;
}

Isa isa() { return selected; }

void set_isa(Isa isa) {
  if (!isa_available(isa))
    throw std::invalid_argument("native: this machine lacks the instruction set asked for");
  selected = isa;
}

const Kernels& kernels() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx2:
      return avx2::kernels;
    case Isa::kAvx512:
      return avx512::kernels;
    case Isa::kGeneric:
      break;
  }
#endif
  return generic::kernels;
}

}  // namespace xmlc::cpu
