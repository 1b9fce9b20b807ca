#include "trace/run_case.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include "core/require.h"
#include "sparsemla/attention.h"

namespace sparsemla::trace {
namespace {

struct AlignedDelete {
  void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{64}); }
};

// Memory for a Workspace; its contents are a pattern, since they may not matter.
class WorkspaceMemory {
 public:
  explicit WorkspaceMemory(size_t bytes)
      : data_(static_cast<std::byte*>(
            ::operator new (std::max<size_t>(bytes, 1), std::align_val_t{64}))),
        bytes_(bytes) {
    std::fill_n(data_.get(), bytes, std::byte{0xFF});
  }
  Workspace workspace() const { return {data_.get(), bytes_}; }

 private:
  std::unique_ptr<std::byte, AlignedDelete> data_;
  size_t bytes_;
};

// Fills selected_indptr and selected_slots: what the index stages leave to attention.
Status SelectSlots(const Case& input, const Backend& backend, const Plan& plan,
                   CaseResult* result) {
  const int64_t width = plan.topk_tokens();
  std::vector<int32_t> fitted(static_cast<size_t>(plan.num_tokens() * width));
  const auto rows = FitKpoolIndices(
      backend, {.topk_indices = input.topk_indices,
                .topk_tokens = plan.topk_tokens(),
                .fitted = View<int32_t, 2>::Contiguous(fitted.data(), {plan.num_tokens(), width})});
  if (!rows.ok()) return rows.status();
  std::vector<int32_t> slots(static_cast<size_t>(plan.num_kv_indices()));
  SPARSEMLA_RETURN_IF_ERROR(ConvertIndices(backend, {.topk_indices = rows.value(),
                                                     .block_table = input.block_table,
                                                     .req_id_per_token = plan.req_id_per_token(),
                                                     .kv_indptr = plan.kv_indptr(),
                                                     .kv_indices = slots}));
  result->selected_indptr.assign(1, 0);
  for (size_t token = 0; token + 1 < plan.kv_indptr().size(); ++token) {
    std::copy_if(
        slots.begin() + plan.kv_indptr()[token], slots.begin() + plan.kv_indptr()[token + 1],
        std::back_inserter(result->selected_slots), [](int32_t slot) { return slot >= 0; });
    result->selected_indptr.push_back(static_cast<int32_t>(result->selected_slots.size()));
  }
  return {};
}

template <typename T>
std::span<const std::byte> Bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

template <typename T>
int64_t Size(const std::vector<T>& values) {
  return static_cast<int64_t>(values.size());
}

}  // namespace

Result<Plan> PlanCase(const Case& input, const RunOptions& options, int32_t num_compute_units) {
  PlanCapacity capacity = {.schedule = options.schedule,
                           .num_compute_units = num_compute_units,
                           .max_num_tokens = std::max(input.num_tokens, 1),
                           .max_num_reqs = std::max(input.num_reqs, 1),
                           .topk_tokens = input.topk_tokens,
                           .dims = input.dims};
  const bool balanced = options.schedule == ScheduleKind::kBalanced;
  (balanced ? capacity.force_splits : capacity.max_splits) = options.splits;
  Result<Plan> plan = Plan::Create(capacity);
  if (!plan.ok()) return plan;
  const Result<bool> built = plan->Build({.query_start_loc = input.query_start_loc,
                                          .seq_lens = input.seq_lens,
                                          .num_tokens = input.num_tokens,
                                          .dims = input.dims,
                                          .q_dtype = input.q_dtype(),
                                          .cache_format = input.kv_cache.format,
                                          .topk_tokens = input.topk_tokens});
  if (!built.ok()) return built.status();
  return plan;
}

Result<CaseResult> RunCase(const Case& input, const Backend& backend, const RunOptions& options) {
  const int32_t units = options.num_compute_units != 0 ? options.num_compute_units
                                                       : backend.device().num_compute_units;
  const Result<Plan> made = PlanCase(input, options, units);
  if (!made.ok()) return made.status();
  const Plan& plan = made.value();
  const auto bytes =
      WorkspaceBytes(backend, plan.capacity(), static_cast<int32_t>(input.topk_indices.shape[1]));
  if (!bytes.ok()) return bytes.status();
  const WorkspaceMemory memory(bytes.value());

  const int64_t tokens = input.num_tokens;
  const int64_t heads = input.dims.num_heads;
  const int64_t rank = input.dims.kv_lora_rank;
  CaseResult result;
  // All bits set are NaN in every type: an element that nobody writes does not pass for an answer.
  result.out.assign(static_cast<size_t>(tokens * heads * rank) * DTypeBytes(input.model_dtype),
                    std::byte{0xFF});
  result.lse.assign(static_cast<size_t>(tokens * heads), std::numeric_limits<float>::quiet_NaN());
  SPARSEMLA_RETURN_IF_ERROR(SparseMla(
      backend,
      {.topk_indices = input.topk_indices,
       .block_table = input.block_table,
       .attention = {.query = input.query,
                     .kv_cache = input.kv_cache,
                     .softmax_scale = input.softmax_scale,
                     .q_scale = input.q_scale,
                     .kv_scale = input.kv_scale,
                     .sinks = input.sinks,
                     .out = Tensor<3>::Contiguous(result.out.data(), input.model_dtype,
                                                  {tokens, heads, rank}),
                     .lse = View<float, 2>::Contiguous(result.lse.data(), {tokens, heads})}},
      plan, memory.workspace()));
  result.req_id_per_token.assign(plan.req_id_per_token().begin(), plan.req_id_per_token().end());
  result.paged_kv_indptr.assign(plan.kv_indptr().begin(), plan.kv_indptr().end());
  SPARSEMLA_RETURN_IF_ERROR(SelectSlots(input, backend, plan, &result));
  return result;
}

Status WriteCaseResult(const std::string& path, const Case& input, const CaseResult& result) {
  const int64_t tokens = input.num_tokens;
  const int64_t heads = input.dims.num_heads;
  const std::string_view dtype = input.model_dtype == DType::kBFloat16  ? "BF16"
                                 : input.model_dtype == DType::kFloat16 ? "F16"
                                                                        : "F32";
  return WriteSafetensors(
      path, {{"format", "sparsemla-result-1"}, {"name", input.name}},
      {{"out", {dtype, {tokens, heads, input.dims.kv_lora_rank}, result.out}},
       {"lse", {"F32", {tokens, heads}, Bytes(result.lse)}},
       {"req_id_per_token", {"I32", {tokens}, Bytes(result.req_id_per_token)}},
       {"paged_kv_indptr", {"I32", {tokens + 1}, Bytes(result.paged_kv_indptr)}},
       {"selected_indptr", {"I32", {tokens + 1}, Bytes(result.selected_indptr)}},
       {"selected_slots", {"I32", {Size(result.selected_slots)}, Bytes(result.selected_slots)}}});
}

}  // namespace sparsemla::trace
