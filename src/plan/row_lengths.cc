#include "plan/row_lengths.h"

#include <algorithm>

#include "core/require.h"

namespace sparsemla::plan {

Status CheckLengths(const PlanCapacity& capacity, const PlanParams& params) {
  const auto& starts = params.query_start_loc;
  const auto& seq_lens = params.seq_lens;
  SPARSEMLA_REQUIRE(starts.size() == seq_lens.size() + 1, "query_start_loc has ", starts.size(),
                    " entries, expected one more than the ", seq_lens.size(), " seq_lens");
  SPARSEMLA_REQUIRE(seq_lens.size() <= static_cast<size_t>(capacity.max_num_reqs), seq_lens.size(),
                    " requests exceed the capacity max_num_reqs = ", capacity.max_num_reqs);
  SPARSEMLA_REQUIRE(starts[0] == 0, "query_start_loc starts with ", starts[0], ", expected 0");
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    SPARSEMLA_REQUIRE(starts[r + 1] >= starts[r], "request ", r,
                      ": query_start_loc decreases from ", starts[r], " to ", starts[r + 1]);
    SPARSEMLA_REQUIRE(seq_lens[r] >= 0, "request ", r, ": seq_len ", seq_lens[r], " is negative");
    const int32_t query_len = starts[r + 1] - starts[r];
    SPARSEMLA_REQUIRE(seq_lens[r] == 0 || seq_lens[r] >= query_len, "request ", r, ": seq_len ",
                      seq_lens[r], " is less than its query_len ", query_len);
  }
  const int32_t num_query_tokens = starts[seq_lens.size()];
  SPARSEMLA_REQUIRE(num_query_tokens <= capacity.max_num_tokens, num_query_tokens,
                    " query tokens exceed the capacity max_num_tokens = ", capacity.max_num_tokens);
  SPARSEMLA_REQUIRE(params.num_tokens == -1 || params.num_tokens >= num_query_tokens,
                    "num_tokens = ", params.num_tokens, " is less than the ", num_query_tokens,
                    " query tokens of query_start_loc (-1 means no padding)");
  SPARSEMLA_REQUIRE(params.num_tokens <= capacity.max_num_tokens,
                    "num_tokens = ", params.num_tokens,
                    " exceeds the capacity max_num_tokens = ", capacity.max_num_tokens);
  return Status();
}

namespace {

// Writes `count` prefix sums of the row lengths context + 1, context + 2, ... after *indptr. The
// closed form has no dependence between rows; count is at most sqrt(2^31), as rows * topk_tokens is
// bounded, so the unsigned product fits.
void FillRamp(int32_t context, int32_t count, int32_t* indptr) {
  const uint32_t total = static_cast<uint32_t>(indptr[0]);
  for (uint32_t i = 1; i <= static_cast<uint32_t>(count); ++i) {
    indptr[i] = static_cast<int32_t>(total + i * static_cast<uint32_t>(context) + i * (i + 1) / 2);
  }
}

void FillConstant(int32_t length, int32_t count, int32_t* indptr) {
  const int32_t total = indptr[0];
  for (int32_t i = 1; i <= count; ++i) indptr[i] = total + i * length;
}

}  // namespace

void FillRows(const PlanParams& params, int32_t num_tokens, std::span<int32_t> req_id_per_token,
              std::span<int32_t> kv_indptr) {
  const auto& starts = params.query_start_loc;
  int32_t* const ids = req_id_per_token.data();
  kv_indptr[0] = 0;
  for (size_t r = 0; r < params.seq_lens.size(); ++r) {
    const int32_t query_len = starts[r + 1] - starts[r];
    const int32_t context = params.seq_lens[r] - query_len;
    int32_t* const indptr = kv_indptr.data() + starts[r];
    std::fill_n(ids + starts[r], query_len, static_cast<int32_t>(r));
    if (params.seq_lens[r] == 0) {
      FillConstant(0, query_len, indptr);
    } else {
      const int32_t ramp = std::clamp(params.topk_tokens - context - 1, 0, query_len);
      FillRamp(context, ramp, indptr);
      FillConstant(params.topk_tokens, query_len - ramp, indptr + ramp);
    }
  }
  const int32_t num_query_tokens = starts[params.seq_lens.size()];
  std::fill(req_id_per_token.begin() + num_query_tokens, req_id_per_token.begin() + num_tokens, 0);
  std::fill(kv_indptr.begin() + num_query_tokens + 1, kv_indptr.end(),
            kv_indptr[static_cast<size_t>(num_query_tokens)]);
}

BatchSplit SplitBatch(std::span<const int32_t> query_start_loc, int32_t num_tokens,
                      int32_t reorder_batch_threshold) {
  const int32_t num_reqs = static_cast<int32_t>(query_start_loc.size()) - 1;
  int32_t first_prefill = 0;
  while (first_prefill < num_reqs && query_start_loc[static_cast<size_t>(first_prefill) + 1] -
                                             query_start_loc[static_cast<size_t>(first_prefill)] <=
                                         reorder_batch_threshold) {
    ++first_prefill;
  }
  BatchSplit split;
  split.num_decodes = first_prefill;
  split.num_prefills = num_reqs - first_prefill;
  // Padding rows belong to the last group.
  split.num_decode_tokens =
      split.num_prefills == 0 ? num_tokens : query_start_loc[static_cast<size_t>(first_prefill)];
  split.num_prefill_tokens = num_tokens - split.num_decode_tokens;
  return split;
}

}  // namespace sparsemla::plan
