// The reference back end: every stage in double, one thread, readable. It is the contract.
#pragma once

#include <memory>

#include "sparsemla/backend.h"

namespace sparsemla {

std::unique_ptr<Backend> MakeRefBackend();

}  // namespace sparsemla
