// Fibers, their schedule, and the checks that all threads of a block or warp meet.
#include "emulator.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#error "emulator: the switch between fibers is written for x86-64"
#endif

// Saves the registers that a call preserves on the stack, changes stacks, and restores the other's.
extern "C" void xmlc_emulator_switch(void** save, void* load);
asm(R"(
.text
.type xmlc_emulator_switch, @function
xmlc_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size xmlc_emulator_switch, .-xmlc_emulator_switch
)");

namespace xmlc::emulator {

const Position* position = nullptr;
unsigned char* shared = nullptr;

namespace {

constexpr std::size_t kStackBytes = 64 * 1024;

enum class State { kReady, kAtBlock, kAtWarp, kAtExchange, kDone };

struct Fiber {
  Position position;
  State state = State::kDone;
  int exchanges = 0;  // parity: the next exchange must not overwrite what other lanes have yet to read
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;
  std::unique_ptr<char[]> stack;
};

Order order = Order::kForward;
cudaStream_t expected_stream = nullptr;
std::mutex one_launch;

// Fibers live from launch to launch: each runs the body of one thread after the other.
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<std::uint64_t> exchanged;  // [2, thread]
const std::function<void()>* body = nullptr;
Fiber* running = nullptr;
std::exception_ptr thrown;
void* scheduler = nullptr;  // its stack pointer

#if defined(__SANITIZE_ADDRESS__)
void* scheduler_fake_stack = nullptr;
const void* scheduler_bottom = nullptr;
std::size_t scheduler_bytes = 0;
void leave(void** fake, const void* bottom, std::size_t bytes) {
  __sanitizer_start_switch_fiber(fake, bottom, bytes);
}
void enter_fiber(void* fake) { __sanitizer_finish_switch_fiber(fake, &scheduler_bottom, &scheduler_bytes); }
void enter_scheduler() { __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr); }
#else
void* scheduler_fake_stack = nullptr;
const void* scheduler_bottom = nullptr;
std::size_t scheduler_bytes = 0;
void leave(void**, const void*, std::size_t) {}
void enter_fiber(void*) {}
void enter_scheduler() {}
#endif

void to_scheduler(State state) {
  Fiber& fiber = *running;
  fiber.state = state;
  leave(&fiber.fake_stack, scheduler_bottom, scheduler_bytes);
  xmlc_emulator_switch(&fiber.stack_pointer, scheduler);
  enter_fiber(fiber.fake_stack);
}

void run_threads_for_ever() {
  enter_fiber(nullptr);
  for (;;) {
    try {
      (*body)();
    } catch (...) {
      thrown = std::current_exception();
    }
    to_scheduler(State::kDone);
  }
}

void resume(Fiber& fiber) {
  running = &fiber;
  position = &fiber.position;
  leave(&scheduler_fake_stack, fiber.stack.get(), kStackBytes);
  xmlc_emulator_switch(&scheduler, fiber.stack_pointer);
  enter_scheduler();
}

std::unique_ptr<Fiber> make_fiber() {
  auto fiber = std::make_unique<Fiber>();
  fiber->stack.reset(new char[kStackBytes]);
  const auto end = reinterpret_cast<std::uintptr_t>(fiber->stack.get() + kStackBytes) / 16 * 16;
  auto* top = reinterpret_cast<void**>(end);
  *--top = nullptr;  // where run_threads_for_ever would return to
  *--top = reinterpret_cast<void*>(&run_threads_for_ever);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  fiber->stack_pointer = top;
  return fiber;
}

// Lets the threads of a warp go on where all of them have arrived at the same point; true if it did.
bool release_warp(unsigned first, unsigned count) {
  const State state = fibers[first]->state;
  if (state != State::kAtWarp && state != State::kAtExchange) return false;
  for (unsigned i = first; i < first + count; ++i)
    if (fibers[i]->state != state) return false;
  for (unsigned i = first; i < first + count; ++i) fibers[i]->state = State::kReady;
  return true;
}

[[noreturn]] void refuse(const char* name, const std::string& what) {
  throw std::runtime_error(std::string("emulator: ") + name + ": " + what);
}

void run_block(const char* name, unsigned threads, std::mt19937& random) {
  std::vector<unsigned> sequence(threads);
  for (unsigned i = 0; i < threads; ++i) sequence[i] = order == Order::kReverse ? threads - 1 - i : i;
  for (;;) {
    if (order == Order::kRandom) std::shuffle(sequence.begin(), sequence.end(), random);
    bool progressed = false;
    for (unsigned i : sequence) {
      if (fibers[i]->state != State::kReady) continue;
      resume(*fibers[i]);
      if (thrown) std::rethrow_exception(std::exchange(thrown, nullptr));
      progressed = true;
    }
    for (unsigned first = 0; first < threads; first += kWarp) progressed |= release_warp(first, kWarp);
    unsigned done = 0, at_block = 0;
    for (unsigned i = 0; i < threads; ++i) {
      done += fibers[i]->state == State::kDone;
      at_block += fibers[i]->state == State::kAtBlock;
    }
    if (done == threads) return;
    if (at_block == threads)
      for (unsigned i = 0; i < threads; ++i) fibers[i]->state = State::kReady;
    else if (!progressed)
      refuse(name, "divergent barrier: " + std::to_string(at_block) + " threads wait for their block, " +
                       std::to_string(done) + " have left the kernel, " +
                       std::to_string(threads - done - at_block) + " wait for their warp");
  }
}

}  // namespace

void set_order(Order value) { order = value; }

void expect_stream(cudaStream_t stream) { expected_stream = stream; }

void check_stream(const char* name, cudaStream_t stream) {
  if (expected_stream != nullptr && stream != expected_stream)
    refuse(name, "launched on another stream than the caller's");
}

void wait(Wait what) { to_scheduler(what == Wait::kBlock ? State::kAtBlock : State::kAtWarp); }

const std::uint64_t* exchange(unsigned mask, std::uint64_t bits) {
  if (mask != 0xffffffffu) throw std::runtime_error("emulator: the mask of an exchange must name all lanes");
  Fiber& fiber = *running;
  const std::size_t thread = fiber.position.thread.x;
  std::uint64_t* half = exchanged.data() + (fiber.exchanges++ % 2 == 0 ? 0 : exchanged.size() / 2);
  half[thread] = bits;
  to_scheduler(State::kAtExchange);
  return half + thread / kWarp * kWarp;
}

void launch(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes,
            const std::function<void()>& thread_body) {
  const std::lock_guard<std::mutex> alone(one_launch);
  if (block.y != 1 || block.z != 1 || block.x % kWarp != 0 || block.x > 1024)
    refuse(name, "blocks must be whole warps along x, at most 1024 threads");
  if (grid.x == 0 || grid.y == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z != 1)
    refuse(name, "the grid must be at least 1 and at most 2^31 - 1 by 65535 blocks");
  while (fibers.size() < block.x) fibers.push_back(make_fiber());
  exchanged.assign(2 * block.x, 0);
  body = &thread_body;
  std::mt19937 random(1);
  try {
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        const std::unique_ptr<unsigned char[]> memory(new unsigned char[shared_bytes]);
        std::memset(memory.get(), 0xff, shared_bytes);  // NaN in every float
        shared = memory.get();
        for (unsigned i = 0; i < block.x; ++i) {
          fibers[i]->position = {dim3(i), dim3(x, y), block, grid, i % kWarp};
          fibers[i]->state = State::kReady;
          fibers[i]->exchanges = 0;
        }
        run_block(name, block.x, random);
      }
  } catch (...) {
    fibers.clear();  // some stand in the middle of a thread
    shared = nullptr;
    throw;
  }
  shared = nullptr;
}

}  // namespace xmlc::emulator
