// Planning: host lengths of one step -> rows, their key ranges, and the work items of every compute
// unit. One plan is made per step and used by every layer. Planning is integer arithmetic on host
// memory: same input, same plan, on any machine; nothing is read from a device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sparsemla/status.h"
#include "sparsemla/types.h"

#pragma GCC visibility push(default)
namespace sparsemla {

// Which rule cuts rows into work items. The values are part of the C ABI.
enum class ScheduleKind : int32_t {
  kBalanced = 0,  // ours: minimal longest worker, no split finer than pays off
  kAiter = 1,  // AITER's get_mla_metadata_v1 (fast mode), bit for bit; empty rows keep their item
};

// The AMD target whose kernels the aiter schedule is for: it decides head folding and buffer sizes.
enum class AiterTarget : int32_t { kGfx942 = 0, kGfx950 = 1 };

// One contiguous key range of one virtual row on one worker; AITER's work_info_set row, word for
// word. A virtual row v is row v / fold, heads [(v % fold) * heads_per_item, +heads_per_item).
struct WorkItem {
  int32_t batch_idx = 0;     // virtual row
  int32_t partial_row = -1;  // row of the partial buffers to write; -1: the whole row, write `out`
  int32_t row_begin = 0;     // virtual row range, end exclusive; always one row here
  int32_t row_end = 0;
  int32_t kv_begin = 0;  // positions in kv_indices, end exclusive
  int32_t kv_end = 0;
  int32_t kv_offset = 0;  // (end of the row's keys) - kv_end; 0 marks the row's last item
  int32_t pad = 0;

  friend bool operator==(const WorkItem&, const WorkItem&) = default;
};
static_assert(sizeof(WorkItem) == 32);

// Half-open range of virtual rows that one group of partials is merged into.
struct RowRange {
  int32_t begin = 0;
  int32_t end = 0;

  friend bool operator==(const RowRange&, const RowRange&) = default;
};

// Who does what. The spans point into the plan that returned the schedule and hold the written
// prefixes; V is the number of virtual rows (num_tokens * fold).
struct Schedule {
  std::span<const int32_t> work_indptr = {};         // [num_compute_units + 1] into work_items
  std::span<const WorkItem> work_items = {};         // [work_indptr.back()], in worker order
  std::span<const int32_t> reduce_indptr = {};       // [V + 1] into reduce_partial_map
  std::span<const RowRange> reduce_final_map = {};   // [V]; written where a row has partials
  std::span<const int32_t> reduce_partial_map = {};  // [num_partials] rows of the partial buffers
  int32_t num_compute_units = 0;
  int32_t fold = 1;            // virtual rows per row
  int32_t heads_per_item = 0;  // num_heads / fold
  int32_t num_partials = 0;    // rows of partial_out [num_partials, heads_per_item, kv_lora_rank]
};

// Limits given once; they size every buffer of the plan and the workspace.
struct PlanCapacity {
  ScheduleKind schedule = ScheduleKind::kBalanced;
  // Workers to plan for, at most 65536; DeviceInfo::num_compute_units of the back end.
  int32_t num_compute_units = 0;
  int32_t max_num_tokens = 0;  // query tokens of a step, padding rows included; at most 2^20
  int32_t max_num_reqs = 0;    // at most 2^20
  int32_t topk_tokens = 2048;  // upper bound of PlanParams::topk_tokens
  MlaDims dims = {};           // num_heads is the upper bound of PlanParams::dims.num_heads
  int32_t max_splits = 0;      // most pieces of a row (aiter: max_split_per_batch, which limits the
                               // workers to rows * max_splits); -1: no cap; 0: DefaultMaxSplits of
                               // each step, or 4 in batch-invariant mode
  // balanced only, for tests and kernel engineers: cut every row into min(force_splits, keys) equal
  // pieces whatever it costs; overrules max_splits and batch_invariant. 0: the schedule decides.
  int32_t force_splits = 0;
  // balanced only: a row's cut depends on that row's length alone, so its result does not depend on
  // the rest of the batch. Costs partial buffers of up to max_num_tokens * pieces rows.
  bool batch_invariant = false;
  AiterTarget aiter_target = AiterTarget::kGfx942;  // aiter only
};

// One step. The arrays are copied: the caller may overwrite them as soon as Build returns.
struct PlanParams {
  std::span<const int32_t> query_start_loc = {};  // [num_reqs + 1], starts with 0, non-decreasing
  std::span<const int32_t> seq_lens = {};  // [num_reqs], cached tokens, this step's included;
                                           // 0: a dummy request, all its rows are empty
  int32_t num_tokens = -1;  // rows, >= query_start_loc.back(); the rest is padding. -1: no padding
  MlaDims dims = {};
  DType q_dtype = DType::kBFloat16;
  CacheFormat cache_format = CacheFormat::kBFloat16;
  int32_t topk_tokens = 2048;
  int32_t max_splits = 0;               // 0: the capacity's; otherwise at most the capacity's
  int32_t reorder_batch_threshold = 1;  // requests of at most so many query tokens are decodes
};

// How the batch divides; requests are expected in the order decodes, then prefills. From the first
// request longer than the threshold on, everything counts as prefill.
struct BatchSplit {
  int32_t num_decodes = 0;
  int32_t num_prefills = 0;
  int32_t num_decode_tokens = 0;
  int32_t num_prefill_tokens = 0;

  friend bool operator==(const BatchSplit&, const BatchSplit&) = default;
};

// max_splits where none is given: next_pow2(max(1, min(max_seq_len, topk_tokens) / 128)), at most
// num_compute_units (the reference backend's rule).
int32_t DefaultMaxSplits(int32_t max_seq_len, int32_t topk_tokens, int32_t num_compute_units);

// The buffer sizes of AITER's get_mla_metadata_info_v1 (fast mode, one KV head, sparse), in
// elements.
struct AiterBufferSizes {
  int64_t work_meta_data = 2;
  int64_t work_indptr = 0;
  int64_t work_info_set = 0;  // rows of 8
  int64_t reduce_indptr = 0;
  int64_t reduce_final_map = 0;  // rows of 2
  int64_t reduce_partial_map = 0;
};
struct AiterSizeParams {
  AiterTarget target = AiterTarget::kGfx942;
  int32_t num_compute_units = 0;
  int32_t max_num_tokens = 0;
  int32_t num_heads = 0;             // a multiple of 8
  DType q_dtype = DType::kBFloat16;  // bf16 or an fp8 kind
  CacheFormat cache_format = CacheFormat::kBFloat16;
};
Result<AiterBufferSizes> GetAiterBufferSizes(const AiterSizeParams& params);

// All metadata of a step. Create allocates everything once; Build fills it, allocates nothing, and
// the arrays keep their addresses for the life of the plan (a graph may hold them). Movable, not
// copyable. Not thread-safe: one Build at a time, and no use of the spans during a Build.
class Plan {
 public:
  // kInvalidArgument names the limit that is out of bounds; kResourceExhausted: no memory.
  static Result<Plan> Create(const PlanCapacity& capacity);

  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;
  ~Plan();

  // Plans a step and returns whether anything changed: false means that every array is as before
  // and may be reused where it already is (on a device, in a graph). Any change of a row length,
  // the number of rows or requests, the head count, a format or a limit re-plans. On an error the
  // plan is left as it was before the call. kInvalidArgument names the request and both values.
  Result<bool> Build(const PlanParams& params);

  bool built() const;           // a Build has succeeded
  uint64_t generation() const;  // increases with every Build that changed something
  uint64_t fingerprint()
      const;  // of everything the plan depends on; equal on all ranks or machines

  const PlanCapacity& capacity() const;
  const MlaDims& dims() const;
  DType q_dtype() const;
  CacheFormat cache_format() const;
  int32_t num_tokens() const;
  int32_t num_reqs() const;
  int32_t topk_tokens() const;
  int32_t max_splits() const;  // the cap in force
  int32_t max_query_len() const;
  int32_t max_seq_len() const;
  const BatchSplit& batch_split() const;

  std::span<const int32_t> req_id_per_token() const;  // [num_tokens]; padding rows say 0
  std::span<const int32_t> kv_indptr() const;         // [num_tokens + 1]
  std::span<const int32_t> kv_indptr_padded() const;  // [max_num_tokens + 1], tail = the total
  int64_t num_kv_indices() const;                     // kv_indptr().back()
  const Schedule& schedule() const;

 private:
  struct Impl;
  explicit Plan(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// What a plan costs its workers, in blocks of 16 keys, each item counted with its overhead.
struct PlanCosts {
  std::vector<int64_t> worker_cost;  // [num_compute_units]
  int64_t total = 0;                 // of all items
  int64_t unsplit_total = 0;         // of all rows, had each been one item
  int64_t max = 0;                   // of the busiest worker
  int64_t longest_unsplittable = 0;  // least cost of the largest piece that the limits allow
  // No plan can do better: at least max(ceil(unsplit_total / workers), longest_unsplittable), and
  // so large that all rows, cut as finely as it demands, fit into the workers.
  int64_t lower_bound = 0;
  double imbalance() const {  // 0: perfect
    return lower_bound == 0 ? 0.0 : static_cast<double>(max) / static_cast<double>(lower_bound) - 1;
  }
};
PlanCosts ComputePlanCosts(const Plan& plan);

}  // namespace sparsemla
#pragma GCC visibility pop
