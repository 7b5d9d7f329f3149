// Qualifiers that let one header compile under nvcc, g++ and clang++.
#pragma once

#if defined(__CUDACC__)
#define XMLC_HOST_DEVICE __host__ __device__ __forceinline__
#else
// always_inline and not merely inline: a function compiled for AVX-512 must never become a weak symbol
// that the linker may keep for the generic code as well.
#define XMLC_HOST_DEVICE inline __attribute__((always_inline))
#endif
