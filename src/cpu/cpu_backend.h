// The CPU back end: threads and the best kernel that this machine runs.
#pragma once

#include <memory>

#include "sparsemla/backend.h"
#include "sparsemla/status.h"

namespace sparsemla {

// options.kernel forces a row of kernels.inc by name; environment variables have been applied.
Result<std::unique_ptr<Backend>> MakeCpuBackend(const BackendOptions& options);

}  // namespace sparsemla
