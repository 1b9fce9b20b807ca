#include "tools/bench/thread_team.h"

namespace sparsemla::bench {
namespace {

constexpr uint64_t kOneLoop = uint64_t{1} << 32;
constexpr int kSpins = 4096;  // then others may have the core, where there are fewer than threads

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadTeam::ThreadTeam(int32_t num_threads) : num_threads_(num_threads) {
  for (int32_t i = 1; i < num_threads; ++i) {
    threads_.emplace_back([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        for (int spin = 0; spin < kSpins; ++spin) {
          if (!RunOne()) Pause();
        }
        std::this_thread::yield();
      }
    });
  }
}

Executor ThreadTeam::executor() {
  return {.context = this,
          .num_threads = num_threads_,
          .parallel_for = [](void* context, int32_t count, Task task, void* argument) {
            static_cast<ThreadTeam*>(context)->ParallelFor(count, task, argument);
          }};
}

bool ThreadTeam::RunOne() {
  uint64_t state = state_.load(std::memory_order_acquire);
  do {
    if (state % kOneLoop == 0) return false;
  } while (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acquire));
  task_(argument_, count_ - static_cast<int32_t>(state % kOneLoop));
  num_done_.fetch_add(1, std::memory_order_release);
  return true;
}

void ThreadTeam::ParallelFor(int32_t count, Task task, void* argument) {
  task_ = task;
  argument_ = argument;
  count_ = count;
  num_done_.store(0, std::memory_order_relaxed);
  const uint64_t loop = state_.load(std::memory_order_relaxed) / kOneLoop + 1;
  state_.store(loop * kOneLoop + static_cast<uint64_t>(count), std::memory_order_release);
  while (RunOne()) {
  }
  for (int spin = 0; num_done_.load(std::memory_order_acquire) != count; ++spin) {
    Pause();
    if (spin % kSpins == kSpins - 1) std::this_thread::yield();
  }
}

}  // namespace sparsemla::bench
