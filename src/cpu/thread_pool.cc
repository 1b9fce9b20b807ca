#include "cpu/thread_pool.h"

#include <chrono>
#include <new>
#include <system_error>

#include "core/require.h"

namespace sparsemla::cpu {
namespace {

// How long an idle thread looks for work before it sleeps: longer than the gap between two stages
// or layers of an engine, short enough not to be seen beside one.
constexpr std::chrono::microseconds kSpinTime(50);

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until done() or for kSpinTime; returns done().
template <typename Condition>
bool SpinUntil(Condition done) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

}  // namespace

Result<std::unique_ptr<ThreadPool>> ThreadPool::Create(int32_t num_threads) {
  std::unique_ptr<ThreadPool> pool;
  try {
    pool.reset(new ThreadPool);
    pool->threads_.reserve(static_cast<size_t>(num_threads - 1));
    for (int32_t i = 1; i < num_threads; ++i) {
      pool->threads_.emplace_back([raw = pool.get()] { raw->Work(); });
    }
  } catch (const std::system_error& error) {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("cannot start ", num_threads, " threads: ", error.what()));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("no memory for a pool of ", num_threads, " threads"));
  }
  return pool;
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  num_loops_started_.fetch_add(1);  // ends the spinning
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Executor ThreadPool::executor() {
  return {.context = this,
          .num_threads = static_cast<int32_t>(threads_.size()) + 1,
          .parallel_for = [](void* context, int32_t count, Task task, void* argument) {
            static_cast<ThreadPool*>(context)->ParallelFor(count, task, argument);
          }};
}

void ThreadPool::Loop::RunClaimed() {
  for (int32_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(argument, i);
}

void ThreadPool::ParallelFor(int32_t count, Task task, void* argument) {
  Loop loop;
  loop.task = task;
  loop.argument = argument;
  loop.count = count;
  int32_t num_sleepers = 0;
  {
    std::lock_guard lock(mutex_);
    loop.below = loops_;
    loops_ = &loop;
    num_sleepers = num_sleepers_;
    num_loops_started_.fetch_add(1);
  }
  if (num_sleepers < count) {
    if (num_sleepers > 0) wake_.notify_all();
  } else {  // no more than there are indices besides this thread's own
    for (int32_t i = 1; i < count; ++i) wake_.notify_one();
  }
  loop.RunClaimed();
  {
    std::lock_guard lock(mutex_);
    Unlink(&loop);  // from here on no thread joins
  }
  // The last touch of a helper is under mutex_, so that the loop may be taken off the stack only
  // after this thread has held the mutex with no helper left.
  SpinUntil([&loop] { return loop.helpers.load() == 0; });
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&loop] { return loop.helpers.load() == 0; });
}

void ThreadPool::Work() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (Loop* const loop = FindLoop()) {
      loop->helpers.fetch_add(1);
      lock.unlock();
      loop->RunClaimed();
      lock.lock();
      if (loop->helpers.fetch_sub(1) == 1) finished_.notify_all();
      continue;
    }
    const uint32_t seen = num_loops_started_.load();
    lock.unlock();
    const bool changed = SpinUntil([this, seen] { return num_loops_started_.load() != seen; });
    lock.lock();
    if (changed) continue;
    ++num_sleepers_;
    wake_.wait(lock, [this] { return stop_ || FindLoop() != nullptr; });
    --num_sleepers_;
  }
}

ThreadPool::Loop* ThreadPool::FindLoop() {
  Loop* loop = loops_;
  while (loop != nullptr && loop->next.load() >= loop->count) loop = loop->below;
  return loop;
}

void ThreadPool::Unlink(Loop* loop) {
  Loop** link = &loops_;
  while (*link != loop) link = &(*link)->below;
  *link = loop->below;
}

}  // namespace sparsemla::cpu
