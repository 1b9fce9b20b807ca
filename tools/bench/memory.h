// Whether a run fits into this machine, asked before anything is allocated.
#pragma once

#include <cstdint>

#include "sparsemla/status.h"

namespace sparsemla::bench {

// kResourceExhausted, with both sizes, if this machine has less memory than `bytes`.
Status CheckFitsMemory(int64_t bytes);

}  // namespace sparsemla::bench
