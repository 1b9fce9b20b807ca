// The stages of the CPU back end other than attention. Arguments have been checked; every function
// runs on the executor's threads, allocates nothing, and fails only if the executor does.
#pragma once

#include "cpu/stage_kernels.h"
#include "sparsemla/attention.h"
#include "sparsemla/backend.h"
#include "sparsemla/status.h"

namespace sparsemla::cpu {

Status FitKpoolIndices(const FitKpoolIndicesParams& params, const StageKernels& kernels,
                       const Executor& executor);
Status ConvertIndices(const ConvertIndicesParams& params, const StageKernels& kernels,
                      const Executor& executor);
Status ConvertIndicesDense(const ConvertIndicesDenseParams& params, const StageKernels& kernels,
                           const Executor& executor);
Status Merge(const MergeParams& params, const StageKernels& kernels, const Executor& executor);

}  // namespace sparsemla::cpu
