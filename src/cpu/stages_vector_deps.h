// What stages_vector.h uses: included before the target region of each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/numeric.h"
#include "cpu/stage_kernels.h"
#include "cpu/target.h"
