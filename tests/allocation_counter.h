// Counts calls of operator new, for tests that a call allocates nothing.
#pragma once

#include <cstdint>

namespace sparsemla {

// Allocations of this program so far, on all threads.
int64_t NumAllocations();

}  // namespace sparsemla
