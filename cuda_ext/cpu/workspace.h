// Cuts one caller-owned buffer into aligned arrays. The same code that takes the arrays measures the
// buffer: with a null base, only the bytes are counted.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xmlc::cpu {

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

}  // namespace xmlc::cpu
