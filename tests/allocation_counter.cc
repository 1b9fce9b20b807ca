#include "tests/allocation_counter.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<int64_t> num_allocations = 0;
}

namespace sparsemla {
int64_t NumAllocations() {
  return num_allocations.load(std::memory_order_relaxed);
}
}  // namespace sparsemla

// Every form that ends in the delete below is replaced: sanitizers replace what is left out.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new(size_t bytes) {
  if (void* const memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
