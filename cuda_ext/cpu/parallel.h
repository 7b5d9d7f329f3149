// Threads that live for one call. No pool, no global state: nothing to break after a fork, and a start
// costs tens of microseconds beside a step of milliseconds. Who splits work must see to it that results do
// not depend on the number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "xmlc/arguments.h"

namespace xmlc::cpu {

struct Range {
  std::int64_t first, last;
};

// Part `index` of `parts` about equal parts of [0, count).
inline Range share(std::int64_t count, std::int64_t index, std::int64_t parts) {
  return {count * index / parts, count * (index + 1) / parts};
}

// The same of `groups` groups of a layer, from one that begins a block of labels with a scale of their own.
// Labels that share a scale stay together.
inline Range share_of_groups(const Layer& layer, std::int64_t groups, std::int64_t index,
                             std::int64_t parts) {
  const std::int64_t together = is_float8(layer.weight_type) ? Layer::kScaleLabels / layer.group_size : 1;
  const Range own = share((groups + together - 1) / together, index, parts);
  const auto end = [&](std::int64_t block) { return std::min(block * together, groups); };
  return {end(own.first), end(own.last)};
}

// Waits by spinning for a moment, then by yielding: the threads' shares are about equal.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  void wait() {
    const unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins)
      if (spins > 4000) std::this_thread::yield();
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

// Runs body(thread, barrier) on `threads` threads, the caller's among them. `body` must not throw.
template <class Body>
void run_threads(int threads, const Body& body) {
  Barrier barrier(threads);
  enum : int { kWait, kGo, kCancel };
  std::atomic<int> gate{kWait};
  std::vector<std::thread> others;
  others.reserve(static_cast<std::size_t>(threads - 1));
  std::string failure;
  try {
    for (int thread = 1; thread < threads; ++thread)
      others.emplace_back([&, thread] {
        int state;
        while ((state = gate.load(std::memory_order_acquire)) == kWait) std::this_thread::yield();
        if (state == kGo) body(thread, barrier);
      });
  } catch (const std::system_error& error) {
    failure = error.what();
  }
  gate.store(failure.empty() ? kGo : kCancel, std::memory_order_release);
  if (failure.empty()) body(0, barrier);
  for (std::thread& other : others) other.join();
  if (!failure.empty())
    throw std::runtime_error("native: " + std::to_string(threads) +
                             " threads must start, the system refused (" + failure +
                             "); set training.threads lower");
}

}  // namespace xmlc::cpu
