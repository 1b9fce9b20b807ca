#include "sparsemla/plan.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <utility>

#include "core/require.h"
#include "plan/row_lengths.h"
#include "plan/schedule.h"

namespace sparsemla {
namespace {

constexpr int32_t kEmptyRequest = -1;  // in a key, in place of the context length
constexpr size_t kKeyHeader = 15;

// Everything of a step but its lengths that the plan depends on, resolved.
struct Step {
  MlaDims dims = {};
  DType q_dtype = DType::kBFloat16;
  CacheFormat cache_format = CacheFormat::kBFloat16;
  int32_t num_tokens = 0;
  int32_t num_reqs = 0;
  int32_t topk_tokens = 0;
  int32_t max_splits = 0;
  int32_t max_query_len = 0;
  int32_t max_seq_len = 0;
  int32_t fold = 1;
  BatchSplit batch_split = {};
};

Status CheckLimits(const PlanCapacity& capacity, const PlanParams& params) {
  const MlaDims& dims = params.dims;
  const MlaDims& limit = capacity.dims;
  SPARSEMLA_REQUIRE(dims.num_heads >= 1 && dims.num_heads <= limit.num_heads,
                    "num_heads = ", dims.num_heads, " is not in 1..", limit.num_heads,
                    ", the plan's capacity");
  SPARSEMLA_REQUIRE(
      dims.kv_lora_rank == limit.kv_lora_rank && dims.qk_rope_head_dim == limit.qk_rope_head_dim,
      "kv_lora_rank + qk_rope_head_dim = ", dims.kv_lora_rank, " + ", dims.qk_rope_head_dim,
      " differ from the plan's ", limit.kv_lora_rank, " + ", limit.qk_rope_head_dim);
  SPARSEMLA_REQUIRE(params.topk_tokens >= 1 && params.topk_tokens <= capacity.topk_tokens,
                    "topk_tokens = ", params.topk_tokens, " is not in 1..", capacity.topk_tokens,
                    ", the plan's capacity");
  SPARSEMLA_REQUIRE(params.q_dtype >= DType::kFloat32 && params.q_dtype <= DType::kFloat8E4M3Fnuz,
                    "q_dtype = ", static_cast<int32_t>(params.q_dtype), " is unknown");
  SPARSEMLA_REQUIRE(
      params.cache_format >= CacheFormat::kFloat32 && params.cache_format <= CacheFormat::kFp8DsMla,
      "cache_format = ", static_cast<int32_t>(params.cache_format), " is unknown");
  SPARSEMLA_REQUIRE(params.reorder_batch_threshold >= 0,
                    "reorder_batch_threshold = ", params.reorder_batch_threshold, " is negative");
  const int32_t max_splits = plan::MaxSplitsOf(capacity);
  if (max_splits < 0) {
    SPARSEMLA_REQUIRE(params.max_splits >= -1, "max_splits = ", params.max_splits,
                      " is less than -1");
  } else {
    SPARSEMLA_REQUIRE(params.max_splits >= 0 && params.max_splits <= max_splits,
                      "max_splits = ", params.max_splits, " is not in 0..", max_splits,
                      ", the plan's capacity");
  }
  return Status();
}

Step Resolve(const PlanCapacity& capacity, const PlanParams& params) {
  Step step;
  step.dims = params.dims;
  step.q_dtype = params.q_dtype;
  step.cache_format = params.cache_format;
  step.num_reqs = static_cast<int32_t>(params.seq_lens.size());
  step.num_tokens = params.num_tokens == -1 ? params.query_start_loc.back() : params.num_tokens;
  step.topk_tokens = params.topk_tokens;
  for (size_t r = 0; r < params.seq_lens.size(); ++r) {
    const int32_t query_len = params.query_start_loc[r + 1] - params.query_start_loc[r];
    step.max_query_len = std::max(step.max_query_len, query_len);
    step.max_seq_len = std::max(step.max_seq_len, params.seq_lens[r]);
  }
  const bool by_rule =
      params.max_splits == 0 && capacity.max_splits == 0 && !capacity.batch_invariant;
  if (by_rule) {
    step.max_splits =
        DefaultMaxSplits(step.max_seq_len, step.topk_tokens, capacity.num_compute_units);
  } else {
    step.max_splits = params.max_splits != 0 ? params.max_splits : plan::MaxSplitsOf(capacity);
  }
  step.batch_split =
      plan::SplitBatch(params.query_start_loc, step.num_tokens, params.reorder_batch_threshold);
  return step;
}

uint64_t Hash(const std::vector<int32_t>& words) {
  uint64_t hash = words.size();
  for (const int32_t word : words) {
    hash = (hash ^ static_cast<uint32_t>(word)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

struct Plan::Impl {
  PlanCapacity capacity;
  Step step = {};
  bool built = false;
  uint64_t generation = 0;
  uint64_t fingerprint = 0;
  // What the arrays were made from, and the same of the step under way. Lengths count only as far
  // as they matter: requests whose rows are all saturated differ in nothing.
  std::vector<int32_t> key;
  std::vector<int32_t> new_key;

  std::vector<int32_t> req_id_per_token;    // [max_num_tokens]
  std::vector<int32_t> kv_indptr;           // [max_num_tokens + 1]
  std::vector<int32_t> work_indptr;         // [num_compute_units + 1]
  std::vector<WorkItem> work_items;         // [MaxWorkItems]
  std::vector<int32_t> reduce_indptr;       // [MaxVirtualRows + 1]
  std::vector<RowRange> reduce_final_map;   // [MaxVirtualRows]
  std::vector<int32_t> reduce_partial_map;  // [MaxPartialRows]
  std::vector<int32_t> cost_sums;           // [max_num_tokens + 1]
  Schedule schedule = {};

  explicit Impl(const PlanCapacity& limits);
  void MakeKey(const PlanParams& params, const Step& next);
  void Fill(const PlanParams& params, const Step& next);
};

Plan::Impl::Impl(const PlanCapacity& limits) : capacity(limits) {
  const size_t max_num_tokens = static_cast<size_t>(capacity.max_num_tokens);
  const size_t max_virtual_rows = static_cast<size_t>(plan::MaxVirtualRows(capacity));
  const size_t max_key = kKeyHeader + 2 * static_cast<size_t>(capacity.max_num_reqs);
  key.reserve(max_key);
  new_key.reserve(max_key);
  req_id_per_token.resize(max_num_tokens);
  kv_indptr.resize(max_num_tokens + 1);
  work_indptr.resize(static_cast<size_t>(capacity.num_compute_units) + 1);
  work_items.resize(static_cast<size_t>(plan::MaxWorkItems(capacity)));
  reduce_indptr.resize(max_virtual_rows + 1);
  reduce_final_map.resize(max_virtual_rows);
  for (size_t v = 0; v < max_virtual_rows; ++v) {
    reduce_final_map[v] = {static_cast<int32_t>(v), static_cast<int32_t>(v) + 1};
  }
  reduce_partial_map.resize(static_cast<size_t>(plan::MaxPartialRows(capacity)));
  std::iota(reduce_partial_map.begin(), reduce_partial_map.end(), 0);
  if (capacity.schedule == ScheduleKind::kBalanced) cost_sums.resize(max_num_tokens + 1);
}

void Plan::Impl::MakeKey(const PlanParams& params, const Step& next) {
  const size_t num_reqs = params.seq_lens.size();
  new_key.resize(kKeyHeader + 2 * num_reqs);
  const int32_t header[kKeyHeader] = {static_cast<int32_t>(capacity.schedule),
                                      static_cast<int32_t>(capacity.aiter_target),
                                      capacity.num_compute_units,
                                      capacity.batch_invariant ? 1 : 0,
                                      capacity.force_splits,
                                      next.dims.num_heads,
                                      next.dims.kv_lora_rank,
                                      next.dims.qk_rope_head_dim,
                                      static_cast<int32_t>(next.q_dtype),
                                      static_cast<int32_t>(next.cache_format),
                                      next.num_tokens,
                                      next.num_reqs,
                                      next.topk_tokens,
                                      next.max_splits,
                                      params.reorder_batch_threshold};
  std::copy_n(header, kKeyHeader, new_key.begin());
  int32_t* entry = new_key.data() + kKeyHeader;
  for (size_t r = 0; r < num_reqs; ++r) {
    const int32_t query_len = params.query_start_loc[r + 1] - params.query_start_loc[r];
    const int32_t seq_len = params.seq_lens[r];
    *entry++ = query_len;
    *entry++ = seq_len == 0 ? kEmptyRequest : std::min(seq_len - query_len, next.topk_tokens - 1);
  }
}

void Plan::Impl::Fill(const PlanParams& params, const Step& next) {
  plan::FillRows(params, next.num_tokens, req_id_per_token, kv_indptr);
  const plan::ScheduleParams schedule_params{
      kv_indptr, next.num_tokens,          capacity.num_compute_units, next.max_splits,
      next.fold, capacity.batch_invariant, capacity.force_splits};
  plan::ScheduleBuffers buffers{work_indptr, work_items, reduce_indptr, cost_sums};
  if (capacity.schedule == ScheduleKind::kAiter) {
    plan::ScheduleAiter(schedule_params, buffers);
  } else if (capacity.force_splits > 0) {
    plan::ScheduleForced(schedule_params, buffers);
  } else {
    plan::ScheduleBalanced(schedule_params, buffers);
  }
  const size_t rows = static_cast<size_t>(next.num_tokens) * static_cast<size_t>(next.fold);
  schedule.work_indptr = work_indptr;
  schedule.work_items = {work_items.data(), static_cast<size_t>(buffers.num_work_items)};
  schedule.reduce_indptr = {reduce_indptr.data(), rows + 1};
  schedule.reduce_final_map = {reduce_final_map.data(), rows};
  schedule.reduce_partial_map = {reduce_partial_map.data(),
                                 static_cast<size_t>(buffers.num_partials)};
  schedule.num_compute_units = capacity.num_compute_units;
  schedule.fold = next.fold;
  schedule.heads_per_item = next.dims.num_heads / next.fold;
  schedule.num_partials = buffers.num_partials;
}

Plan::Plan(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;
Plan::~Plan() = default;

Result<Plan> Plan::Create(const PlanCapacity& capacity) {
  SPARSEMLA_RETURN_IF_ERROR(plan::CheckCapacity(capacity));
  try {
    return Plan(std::make_unique<Impl>(capacity));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("no memory for a plan of max_num_tokens = ", capacity.max_num_tokens,
                         " on ", capacity.num_compute_units, " compute units"));
  }
}

Result<bool> Plan::Build(const PlanParams& params) {
  SPARSEMLA_CHECK(impl_ != nullptr, StatusCode::kFailedPrecondition,
                  "the plan has been moved from");
  SPARSEMLA_RETURN_IF_ERROR(CheckLimits(impl_->capacity, params));
  SPARSEMLA_RETURN_IF_ERROR(plan::CheckLengths(impl_->capacity, params));
  Step step = Resolve(impl_->capacity, params);
  if (impl_->capacity.schedule == ScheduleKind::kAiter) {
    step.fold = plan::AiterFold(impl_->capacity.aiter_target, step.dims.num_heads, step.q_dtype,
                                step.cache_format);
    SPARSEMLA_CHECK(step.fold > 0, StatusCode::kUnsupported,
                    "the aiter schedule takes multiples of 16 heads, not num_heads = ",
                    step.dims.num_heads, ": pad the heads, or use the balanced schedule");
  }
  impl_->MakeKey(params, step);
  const bool changed = !impl_->built || impl_->key != impl_->new_key;
  impl_->step = step;
  if (!changed) return false;
  impl_->Fill(params, step);
  impl_->key.swap(impl_->new_key);
  impl_->fingerprint = Hash(impl_->key);
  impl_->built = true;
  ++impl_->generation;
  return true;
}

bool Plan::built() const {
  return impl_ != nullptr && impl_->built;
}
uint64_t Plan::generation() const {
  return impl_->generation;
}
uint64_t Plan::fingerprint() const {
  return impl_->fingerprint;
}
const PlanCapacity& Plan::capacity() const {
  return impl_->capacity;
}
const MlaDims& Plan::dims() const {
  return impl_->step.dims;
}
DType Plan::q_dtype() const {
  return impl_->step.q_dtype;
}
CacheFormat Plan::cache_format() const {
  return impl_->step.cache_format;
}
int32_t Plan::num_tokens() const {
  return impl_->step.num_tokens;
}
int32_t Plan::num_reqs() const {
  return impl_->step.num_reqs;
}
int32_t Plan::topk_tokens() const {
  return impl_->step.topk_tokens;
}
int32_t Plan::max_splits() const {
  return impl_->step.max_splits;
}
int32_t Plan::max_query_len() const {
  return impl_->step.max_query_len;
}
int32_t Plan::max_seq_len() const {
  return impl_->step.max_seq_len;
}
const BatchSplit& Plan::batch_split() const {
  return impl_->step.batch_split;
}

std::span<const int32_t> Plan::req_id_per_token() const {
  return {impl_->req_id_per_token.data(), static_cast<size_t>(impl_->step.num_tokens)};
}
std::span<const int32_t> Plan::kv_indptr() const {
  return {impl_->kv_indptr.data(), static_cast<size_t>(impl_->step.num_tokens) + 1};
}
std::span<const int32_t> Plan::kv_indptr_padded() const {
  return impl_->kv_indptr;
}
int64_t Plan::num_kv_indices() const {
  return kv_indptr().back();
}
const Schedule& Plan::schedule() const {
  return impl_->schedule;
}

}  // namespace sparsemla
