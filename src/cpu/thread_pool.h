// Threads of the CPU back end, used where the embedding engine passes none: an Executor like the
// caller's (parallel_for.h).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "sparsemla/backend.h"
#include "sparsemla/status.h"

namespace sparsemla::cpu {

// num_threads - 1 threads that live as long as the pool; the caller of a parallel loop is one more.
// A thread without work spins for some microseconds and then sleeps. Several threads may run loops
// at once, and a task may run a loop itself. Tasks must not throw.
class ThreadPool {
 public:
  // Starts the threads. kResourceExhausted if the system refuses.
  static Result<std::unique_ptr<ThreadPool>> Create(int32_t num_threads);
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Valid as long as the pool. Its parallel_for allocates nothing.
  Executor executor();

 private:
  using Task = void (*)(void* argument, int32_t index);

  // One parallel loop; lives on its caller's stack, linked while it has indices to give out.
  struct Loop {
    Task task = nullptr;
    void* argument = nullptr;
    int32_t count = 0;
    std::atomic<int32_t> next = 0;     // first index not claimed
    std::atomic<int32_t> helpers = 0;  // pool threads inside; rises under mutex_ only
    Loop* below = nullptr;

    void RunClaimed();
  };

  ThreadPool() = default;
  void ParallelFor(int32_t count, Task task, void* argument);
  void Work();
  Loop* FindLoop();  // with mutex_ held: a loop that has indices left, or null
  void Unlink(Loop* loop);

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;      // loops_ or stop_ changed
  std::condition_variable finished_;  // some loop's helpers fell to 0
  Loop* loops_ = nullptr;             // newest first
  int32_t num_sleepers_ = 0;
  bool stop_ = false;
  std::atomic<uint32_t> num_loops_started_ = 0;  // what idle threads spin on
};

}  // namespace sparsemla::cpu
