// What attention_vector.h uses: included before the target region of each instruction set.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/numeric.h"
#include "core/softmax_state.h"
#include "cpu/kernels.h"
#include "cpu/target.h"
#include "cpu/vector_scratch.h"
