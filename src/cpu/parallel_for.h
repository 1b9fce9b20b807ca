// The one way to run something in parallel: on an Executor, which is held to its contract. It may
// be the caller's, so what it gets wrong becomes a Status.
#pragma once

#include <cstdint>
#include <type_traits>

#include "sparsemla/backend.h"
#include "sparsemla/status.h"

namespace sparsemla::cpu {

// As ParallelFor below, for a function and its argument.
Status RunOnExecutor(const Executor& executor, int32_t count,
                     void (*task)(void* argument, int32_t index), void* argument);

// Runs function(i) once for every i in [0, count), on the caller's thread if the executor has only
// one. kInternal, with what can be said about it, if the executor throws (kResourceExhausted for
// bad_alloc), leaves indices out, or runs others than those asked for; function has then run at
// most once for each i, and is not running any more. `function` must not throw.
template <typename Function>
Status ParallelFor(const Executor& executor, int32_t count, Function&& function) {
  if (count <= 1 || executor.num_threads <= 1) {
    for (int32_t i = 0; i < count; ++i) function(i);
    return {};
  }
  using Callable = std::remove_reference_t<Function>;
  return RunOnExecutor(
      executor, count,
      [](void* argument, int32_t index) { (*static_cast<Callable*>(argument))(index); }, &function);
}

}  // namespace sparsemla::cpu
