#include "tools/bench/memory.h"

#include <unistd.h>

#include "core/require.h"

namespace sparsemla::bench {

Status CheckFitsMemory(int64_t bytes) {
  const int64_t memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  SPARSEMLA_CHECK(bytes <= memory, StatusCode::kResourceExhausted, "needs ", bytes >> 20,
                  " MB of memory; this machine has ", memory >> 20);
  return {};
}

}  // namespace sparsemla::bench
