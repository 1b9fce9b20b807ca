// The checks at the door of every stage, one function a params struct. They look at sizes, strides,
// types and pointers, never at the contents of an array: those may lie on a device.
#pragma once

#include "sparsemla/attention.h"
#include "sparsemla/plan.h"
#include "sparsemla/status.h"

namespace sparsemla {

Status Validate(const FitKpoolIndicesParams& params);
Status Validate(const ConvertIndicesParams& params);
Status Validate(const ConvertIndicesDenseParams& params);
// Also that the plan was made for this call: sizes and types agree.
Status Validate(const AttentionParams& params, const Plan& plan);
Status Validate(const MergeParams& params);

// `workspace` is aligned and has at least `needed` bytes.
Status ValidateWorkspace(Workspace workspace, size_t needed);

// The query's row count, element type and widths, whichever form it has.
inline bool IsWhole(const Query& query) {
  return query.ql_nope.shape[2] == 0;
}
inline int64_t NumRows(const Query& query) {
  return IsWhole(query) ? query.q.shape[0] : query.ql_nope.shape[0];
}
inline DType QueryDType(const Query& query) {
  return IsWhole(query) ? query.q.dtype : query.ql_nope.dtype;
}

}  // namespace sparsemla
