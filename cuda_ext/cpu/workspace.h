// Cuts one caller-owned buffer into aligned arrays. The same code that takes the arrays measures the
// buffer: with a null base, only the bytes are counted.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace xmlc::cpu {

constexpr std::uintptr_t kHugePage = 2 << 20;

class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <class T>
  T* take(std::int64_t count) {
    constexpr std::int64_t kAlignment = 64;
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::int64_t bytes_ = 0;
};

// Asks the system to back whole multiples of 2 MiB within a buffer by huge pages: kernels gather rows at
// random places, and with pages of 4 KiB most rows would cost a walk through the page tables. A system that
// cannot do it changes nothing but the speed.
inline void prefer_huge_pages(void* base, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto first = (reinterpret_cast<std::uintptr_t>(base) + kHugePage - 1) / kHugePage * kHugePage;
  const auto last = (reinterpret_cast<std::uintptr_t>(base) + bytes) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)base, (void)bytes;
#endif
}

}  // namespace xmlc::cpu
