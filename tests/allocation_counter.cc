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

void* operator new(size_t bytes) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
