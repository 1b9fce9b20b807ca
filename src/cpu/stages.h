// The stages of the CPU back end other than attention. Arguments have been checked; every function
// runs on the executor's threads and allocates nothing.
#pragma once

#include "sparsemla/attention.h"
#include "sparsemla/backend.h"

namespace sparsemla::cpu {

void FitKpoolIndices(const FitKpoolIndicesParams& params, const Executor& executor);
void ConvertIndices(const ConvertIndicesParams& params, const Executor& executor);
void ConvertIndicesDense(const ConvertIndicesDenseParams& params, const Executor& executor);
void Merge(const MergeParams& params, const Executor& executor);

}  // namespace sparsemla::cpu
