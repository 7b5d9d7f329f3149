// Everything that differs between a device and the emulator: how kernels start, shared memory, and clearing
// memory.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#if defined(XMLC_EMULATE)
#include "../../emulator/emulator.h"
#else
#include <cuda_runtime.h>
#endif

namespace xmlc::cuda {

#if defined(XMLC_EMULATE)

// The block's shared memory, laid out as one struct for each kernel.
template <class Shared>
Shared& shared_memory() {
  return *reinterpret_cast<Shared*>(emulator::shared);
}

template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), dim3 grid, unsigned threads,
            std::size_t shared_bytes, cudaStream_t stream, const Arguments& arguments) {
  emulator::check_stream(name, stream);
  emulator::launch(name, grid, dim3(threads), shared_bytes, [&] { kernel(arguments); });
}

inline void clear(void* memory, std::size_t bytes, cudaStream_t stream) {
  emulator::check_stream("clear", stream);
  std::memset(memory, 0, bytes);
}

#else

inline void check(cudaError_t error, const char* name) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("native: ") + name +
                             " must run on the device, found: " + cudaGetErrorString(error));
}

inline void clear(void* memory, std::size_t bytes, cudaStream_t stream) {
  check(cudaMemsetAsync(memory, 0, bytes, stream), "clear");
}

#if defined(__CUDACC__)  // the bindings are compiled without nvcc

template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
  extern __shared__ __align__(16) unsigned char storage[];
  return *reinterpret_cast<Shared*>(storage);
}

// Starts a kernel on a stream and reports what the driver refuses; what fails later shows at the next
// synchronisation.
template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), dim3 grid, unsigned threads,
            std::size_t shared_bytes, cudaStream_t stream, const Arguments& arguments) {
  constexpr std::size_t kDefaultSharedBytes = 48 * 1024;  // beyond, a kernel must ask
  if (shared_bytes > kDefaultSharedBytes)
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          name);
  // clang-format off
  kernel<<<grid, threads, shared_bytes, stream>>>(arguments);
  // clang-format on
  check(cudaGetLastError(), name);
}

#endif
#endif

}  // namespace xmlc::cuda
