// Threads that never sleep, lent to the back end as those of an engine: what is timed is then the
// kernel and not how fast the system wakes a thread, and reference runs reach every thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "sparsemla/backend.h"

namespace sparsemla::bench {

class ThreadTeam {
 public:
  // The calling thread and num_threads - 1 others, which spin as long as the team lives.
  explicit ThreadTeam(int32_t num_threads);

  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int32_t num_threads() const { return num_threads_; }
  // Valid as long as the team; one loop at a time, from one thread.
  Executor executor();

  // Calls function(i) for every i below the number of threads: one on each thread if calls last
  // some microseconds and every thread has a core.
  template <typename Function>
  void OnEveryThread(const Function& function) {
    ParallelFor(
        num_threads_,
        [](void* argument, int32_t i) { (*static_cast<const Function*>(argument))(i); },
        const_cast<Function*>(&function));
  }

 private:
  using Task = void (*)(void* argument, int32_t index);

  void ParallelFor(int32_t count, Task task, void* argument);
  bool RunOne();  // false if there is nothing to claim

  int32_t num_threads_;
  // The loop that runs; stable from its publication in `state_` until `num_done_` is `count_`.
  Task task_ = nullptr;
  void* argument_ = nullptr;
  int32_t count_ = 0;
  // Number of the loop in the upper half, indices not yet claimed in the lower one: a claim cannot
  // hit another loop than it has seen.
  std::atomic<uint64_t> state_ = 0;
  std::atomic<int32_t> num_done_ = 0;
  std::vector<std::jthread> threads_;  // last: they end before the rest
};

}  // namespace sparsemla::bench
