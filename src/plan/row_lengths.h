// First step of planning: lengths of requests -> rows. Called by plan.cc only.
#pragma once

#include <cstdint>
#include <span>

#include "sparsemla/plan.h"
#include "sparsemla/status.h"

namespace sparsemla::plan {

// The limits are in their bounds and their products representable.
Status CheckCapacity(const PlanCapacity& capacity);

// Checks one step against the capacity: query_start_loc starts with 0 and never decreases, seq_lens
// are 0 or at least the query length, everything fits. Names the request and both values.
Status CheckLengths(const PlanCapacity& capacity, const PlanParams& params);

// Fills req_id_per_token [num_tokens] and kv_indptr [max_num_tokens + 1]: row j of a request with
// query length l and sequence length s > 0 has min(s - l + j + 1, topk_tokens) keys; rows of
// requests with s = 0 and padding rows have none (and padding rows request id 0); the tail of
// kv_indptr repeats the total. Lengths have passed CheckLengths. (vLLM metadata builder, spec of
// the reference.)
void FillRows(const PlanParams& params, int32_t num_tokens, std::span<int32_t> req_id_per_token,
              std::span<int32_t> kv_indptr);

BatchSplit SplitBatch(std::span<const int32_t> query_start_loc, int32_t num_tokens,
                      int32_t reorder_batch_threshold);

}  // namespace sparsemla::plan
