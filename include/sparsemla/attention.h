// The stages of one attention call, in the order of the data flow:
//
//   FitKpoolIndices -> ConvertIndices -> Attention -> Merge          (or SparseMla: all of them)
//
// Every stage is checked at its door and then handed to a back end (backend.h). All arrays belong
// to the caller and live in memory that the back end can address. Calls are asynchronous on
// `stream` where the back end has streams; the arrays must stay valid until the work is done. No
// call allocates. On an error nothing has been written, unless it is one of the caller's executor
// (backend.h).
#pragma once

#include <cstdint>
#include <span>

#include "sparsemla/backend.h"
#include "sparsemla/plan.h"
#include "sparsemla/status.h"
#include "sparsemla/types.h"

#pragma GCC visibility push(default)
namespace sparsemla {

// ---- indices -----------------------------------------------------------------------------------

struct FitKpoolIndicesParams {
  View<const int32_t, 2> topk_indices =
      {};                        // [num_tokens, W], W >= topk_tokens: history, then tail
  int32_t topk_tokens = 0;       // K
  View<int32_t, 2> fitted = {};  // [num_tokens, K]; unused and may be empty if W = K
};

// Fits the rows of a k-pool indexer to K columns: all vt valid tail entries stay, and the first
// min(vh, K - vt) of the vh valid history entries before them; the rest is -1. Valid entries are
// expected as compact prefixes; a hole is copied through. Any negative value is invalid. Returns
// the fitted indices: the input itself if W = K. W < K is kInvalidArgument.
Result<View<const int32_t, 2>> FitKpoolIndices(const Backend& backend,
                                               const FitKpoolIndicesParams& params,
                                               Stream stream = {});

// Where the blocks of the paged cache lie.
struct BlockTable {
  View<const int32_t, 2> blocks =
      {};                         // [num_reqs, max_blocks]; outside [0, num_blocks): not mapped
  int32_t block_size = 0;         // tokens per block, >= 1
  int64_t num_blocks = 0;         // blocks of the cache
  int64_t block_stride_rows = 0;  // distance of two blocks in rows; 0: block_size (adjacent)
};

// Rows of a cache with `num_blocks` blocks whose starts are `block_stride_rows` apart: what
// KvCache::num_slots must be. 0 for an empty cache.
constexpr int64_t NumCacheSlots(const BlockTable& table) {
  const int64_t stride = table.block_stride_rows == 0 ? table.block_size : table.block_stride_rows;
  return table.num_blocks == 0 ? 0 : (table.num_blocks - 1) * stride + table.block_size;
}

struct ConvertIndicesParams {
  View<const int32_t, 2> topk_indices = {};  // [num_tokens, W] positions in the request
  BlockTable block_table = {};
  std::span<const int32_t> req_id_per_token = {};  // [num_tokens]
  std::span<const int32_t> kv_indptr = {};         // [num_tokens + 1]
  int32_t invalid_slot = -1;                       // written for entries that name no row
  std::span<int32_t> kv_indices = {};              // [>= kv_indptr.back()]
};

// Translates request-local positions to cache slots: for column c below the row's length,
// kv_indices[kv_indptr[t] + c] = block * block_stride_rows + position % block_size. A position that
// is negative or in an unmapped block, a request id outside the table, and a column beyond W give
// invalid_slot, wherever they stand. Entries at and beyond kv_indptr.back() are not written.
Status ConvertIndices(const Backend& backend, const ConvertIndicesParams& params,
                      Stream stream = {});

struct ConvertIndicesDenseParams {
  View<const int32_t, 2> topk_indices = {};  // [num_tokens, W]
  BlockTable block_table = {};
  std::span<const int32_t> req_id_per_token = {};  // [num_tokens]
  int32_t invalid_slot = -1;
  View<int32_t, 2> slots = {};           // [num_tokens, W]
  std::span<int32_t> valid_counts = {};  // [num_tokens] entries that name a row, or empty
};

// The same translation for a padded matrix of all W columns.
Status ConvertIndicesDense(const Backend& backend, const ConvertIndicesDenseParams& params,
                           Stream stream = {});

// ---- attention ---------------------------------------------------------------------------------

// The absorbed query, whole (`q`) or in its two parts; one form is given and the other left empty.
// Element type bf16, fp16 or fp32; `q` may also be the cache's fp8 type (already quantised). The
// innermost stride is 1.
struct Query {
  ConstTensor<3> q = {};        // [rows, num_heads, head_dim_qk], rows >= plan.num_tokens()
  ConstTensor<3> ql_nope = {};  // [rows, num_heads, kv_lora_rank]
  ConstTensor<3> q_pe = {};     // [rows, num_heads, qk_rope_head_dim]; may be empty if rope-free
};

struct AttentionParams {
  Query query = {};
  KvCache kv_cache = {};
  std::span<const int32_t> kv_indices =
      {};                      // [>= plan.num_kv_indices()] slots; outside the cache: skip
  float softmax_scale = 0.0f;  // multiplies q.k, natural units
  float q_scale = 1.0f;        // per-tensor fp8 caches: value = code * scale; > 0, finite
  float kv_scale = 1.0f;
  std::span<const float> sinks = {};  // [num_heads] logits without a value row; empty: none
  Tensor<3> out = {};                 // [rows, num_heads, kv_lora_rank] bf16, fp16 or fp32
  View<float, 2> lse = {};            // [rows, num_heads] natural log, sink included; may be empty
  bool write_empty_rows = true;       // false: rows without keys are left as they are
};

// Runs the plan's work items: rows that one item covers go to `out` and `lse` (sinks applied),
// pieces of split rows to the partials in `workspace`, for Merge. Rows at and beyond
// plan.num_tokens() are never touched. kFailedPrecondition if the plan was made for other sizes or
// types; kUnsupported, with the reason, if the back end cannot; kResourceExhausted if the workspace
// is too small.
Status Attention(const Backend& backend, const AttentionParams& params, const Plan& plan,
                 Workspace workspace, Stream stream = {});

// Partial attention states and the rows they belong to.
struct Partials {
  View<const float, 3> out = {};                // [num_partials, heads, kv_lora_rank], normalised
  View<const float, 2> lse = {};                // [num_partials, heads], natural log, without sinks
  std::span<const int32_t> reduce_indptr = {};  // [groups + 1]
  std::span<const RowRange> reduce_final_map = {};   // [groups]
  std::span<const int32_t> reduce_partial_map = {};  // [reduce_indptr.back()]
  int32_t fold = 1;  // `out` rows are virtual rows of num_heads / fold heads, as in WorkItem
};

// The partials that Attention left in `workspace`; valid until the workspace's next use.
Partials PlanPartials(const Plan& plan, Workspace workspace);

struct MergeParams {
  Partials partials = {};
  std::span<const float> sinks = {};  // [num_heads], added once here; empty: none
  Tensor<3> out = {};                 // [rows, num_heads, kv_lora_rank] bf16, fp16 or fp32
  View<float, 2> lse = {};            // [rows, num_heads]; may be empty
  bool write_empty_rows = true;       // false: heads without a live partial are left as they are
};

// Merges each group of partials into its row: lse = log sum exp(lse_p), out = sum exp(lse_p - lse)
// * out_p, then the sink. A partial whose lse is infinite (-inf ours, +inf FlashMLA's mark of a
// state without keys) is left out whatever its values; NaN is not hidden. Rows of groups without
// partials are not touched. The order of the sum is the order of reduce_partial_map. Serves split
// rows (PlanPartials) and the states of several ranks alike.
Status Merge(const Backend& backend, const MergeParams& params, Stream stream = {});

// ---- all stages --------------------------------------------------------------------------------

struct SparseMlaParams {
  View<const int32_t, 2> topk_indices =
      {};  // [>= num_tokens, W], W >= 1; W > topk_tokens: k-pool rows
  BlockTable block_table = {};
  AttentionParams attention = {};  // kv_indices is not used: they live in the workspace
};

// One attention call: fit, convert, attention, merge. The workspace is of at least
// WorkspaceBytes(backend, plan.capacity(), W) bytes.
Status SparseMla(const Backend& backend, const SparseMlaParams& params, const Plan& plan,
                 Workspace workspace, Stream stream = {});

// Bytes that SparseMla (and so Attention alone) needs for any step within the capacity, where the
// top-k rows are `topk_width` wide (at most capacity.topk_tokens: no k-pool).
Result<size_t> WorkspaceBytes(const Backend& backend, const PlanCapacity& capacity,
                              int32_t topk_width = 0);

}  // namespace sparsemla
#pragma GCC visibility pop
