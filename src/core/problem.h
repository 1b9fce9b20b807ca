// What no back end can solve, and why: the part of UnsupportedReason that they share.
#pragma once

#include <string>

#include "sparsemla/backend.h"

namespace sparsemla {

// Empty if the problem is well-formed.
std::string UnsupportedReason(const Problem& problem);

}  // namespace sparsemla
