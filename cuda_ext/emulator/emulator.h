// Runs CUDA kernels on the CPU: one fiber for each CUDA thread, one block at a time. Replaces the CUDA
// headers in a build with XMLC_EMULATE; the .cu files are compiled unchanged.
//
// A fiber runs until it meets a barrier or an exchange between the lanes of its warp. The order in which
// fibers run is chosen (`set_order`): what depends on it lacks a barrier. Shared memory is a fresh heap block
// of NaN for every block of threads, so that a sanitizer sees what runs past it and a test sees what was
// never written. Barriers and exchanges that not all threads reach end in an exception. There is no model of
// the memory's order, atomics are plain additions, and nothing is said about speed.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
using cudaStream_t = void*;

#define __global__
#define __device__
#define __forceinline__ inline

namespace xmlc::emulator {

constexpr unsigned kWarp = 32;

enum class Order { kForward, kReverse, kRandom };
void set_order(Order);

// Where the running fiber is.
struct Position {
  dim3 thread, block, block_size, grid;
  unsigned lane;
};
extern const Position* position;
extern unsigned char* shared;  // of the running block

enum class Wait { kBlock, kWarp, kExchange };
void wait(Wait);

// Leaves eight bytes to the other lanes of the warp and returns those of all lanes, [32].
const std::uint64_t* exchange(unsigned mask, std::uint64_t bits);

// Runs `body` once for every thread of every block; throws std::runtime_error where they do not meet.
void launch(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes,
            const std::function<void()>& body);

// Streams are addresses that a test may list: work on another stream than the one given is refused.
void expect_stream(cudaStream_t);  // null: any
void check_stream(const char* name, cudaStream_t);

template <class T>
T from_lane(unsigned mask, T value, unsigned lane) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  std::memcpy(&value, &exchange(mask, bits)[lane % kWarp], sizeof value);
  return value;
}

}  // namespace xmlc::emulator

#define threadIdx (xmlc::emulator::position->thread)
#define blockIdx (xmlc::emulator::position->block)
#define blockDim (xmlc::emulator::position->block_size)
#define gridDim (xmlc::emulator::position->grid)

inline void __syncthreads() { xmlc::emulator::wait(xmlc::emulator::Wait::kBlock); }
inline void __syncwarp() { xmlc::emulator::wait(xmlc::emulator::Wait::kWarp); }
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned other) {
  return xmlc::emulator::from_lane(mask, value, xmlc::emulator::position->lane ^ other);
}
template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane) {
  return xmlc::emulator::from_lane(mask, value, lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint64_t* lanes = xmlc::emulator::exchange(mask, predicate != 0);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < xmlc::emulator::kWarp; ++lane)
    bits |= static_cast<unsigned>(lanes[lane]) << lane;
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
template <class T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}
