#include "lost_pages.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>

namespace xmlc::cpu {
namespace {

constexpr std::size_t kMostRanges = 512, kMostText = 1024;

// The handler may read while a thread writes: a range counts while its begin is not 0, which is set last.
struct Range {
  std::atomic<std::uintptr_t> begin{0}, end{0};
  std::size_t length = 0;
  std::array<char, kMostText> text;
};

std::array<Range, kMostRanges> ranges;
std::mutex writing;
bool installed = false;
std::atomic_flag told = ATOMIC_FLAG_INIT;
struct sigaction former;

void on_bus_error(int number, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const Range& range : ranges) {
    const std::uintptr_t begin = range.begin.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= range.end.load(std::memory_order_relaxed)) continue;
    while (told.test_and_set()) pause();  // another thread, of as many as read the pages, tells and ends
    if (write(STDERR_FILENO, range.text.data(), range.length) < 0) _exit(2);
    _exit(2);
  }
  if (former.sa_flags & SA_SIGINFO) return former.sa_sigaction(number, info, context);
  if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) return former.sa_handler(number);
  signal(number, SIG_DFL);  // the access is tried again, and ends the process as ever
}

}  // namespace

bool watch_pages(std::uintptr_t address, std::int64_t bytes, const std::string& message) {
  const std::lock_guard<std::mutex> lock(writing);
  if (!installed) {
    struct sigaction action{};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &former) != 0) return false;
    installed = true;
  }
  for (Range& range : ranges) {
    if (range.begin.load(std::memory_order_relaxed) != 0) continue;
    range.length = message.size() < kMostText ? message.size() : kMostText;
    std::memcpy(range.text.data(), message.data(), range.length);
    range.end.store(address + static_cast<std::uintptr_t>(bytes), std::memory_order_relaxed);
    range.begin.store(address, std::memory_order_release);
    return true;
  }
  return false;
}

void forget_pages(std::uintptr_t address) {
  const std::lock_guard<std::mutex> lock(writing);
  for (Range& range : ranges) {
    if (range.begin.load(std::memory_order_relaxed) != address) continue;
    range.begin.store(0, std::memory_order_release);
    return;
  }
}

}  // namespace xmlc::cpu
