#include "cpu/parallel_for.h"

#include <atomic>
#include <exception>
#include <new>
#include <thread>

#include "core/require.h"

namespace sparsemla::cpu {
namespace {

// Stands between the executor and the tasks. Indices are given out here, whatever the executor
// says, so that none runs twice and none is out of range; the executor's own are only checked.
struct Loop {
  void (*task)(void* argument, int32_t index) = nullptr;
  void* argument = nullptr;
  int64_t count = 0;
  std::atomic<int64_t> entered = 0;
  std::atomic<int64_t> left = 0;
  std::atomic<int64_t> index_sum = 0;

  static constexpr int64_t kClosed = int64_t{1} << 40;  // added to `entered`: nothing runs any more

  void Run(int32_t executor_index) {
    const int64_t index = entered.fetch_add(1, std::memory_order_relaxed);
    if (index < count) {
      index_sum.fetch_add(executor_index, std::memory_order_relaxed);
      task(argument, static_cast<int32_t>(index));
    }
    left.fetch_add(1, std::memory_order_release);
  }

  // Keeps further tasks out, waits for those inside, and returns how many there were.
  int64_t Close() {
    const int64_t num_entered = entered.fetch_add(kClosed);
    while (left.load(std::memory_order_acquire) < num_entered) std::this_thread::yield();
    return num_entered;
  }
};

}  // namespace

Status RunOnExecutor(const Executor& executor, int32_t count,
                     void (*task)(void* argument, int32_t index), void* argument) {
  Loop loop;
  loop.task = task;
  loop.argument = argument;
  loop.count = count;
  Status status;
  try {
    executor.parallel_for(
        executor.context, count,
        [](void* that, int32_t index) { static_cast<Loop*>(that)->Run(index); }, &loop);
  } catch (const std::bad_alloc&) {
    status = Status(StatusCode::kResourceExhausted, "the executor ran out of memory");
  } catch (const std::exception& error) {
    status = Status(StatusCode::kInternal, StrCat("the executor threw: ", error.what()));
  } catch (...) {
    status = Status(StatusCode::kInternal, "the executor threw something that is no exception");
  }
  const int64_t num_entered = loop.Close();
  if (!status.ok()) return status;
  SPARSEMLA_CHECK(num_entered == count, StatusCode::kInternal, "the executor ran ", num_entered,
                  " tasks; it was asked for ", count);
  SPARSEMLA_CHECK(loop.index_sum == int64_t{count} * (count - 1) / 2, StatusCode::kInternal,
                  "the executor ran ", count, " tasks, but not one for each index in [0, ", count,
                  ")");
  return status;
}

}  // namespace sparsemla::cpu
