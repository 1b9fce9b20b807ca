// The doors of the stages: check, ask the back end, hand over.
#include "sparsemla/attention.h"

#include <algorithm>
#include <string>

#include "core/require.h"
#include "core/validate.h"
#include "core/workspace.h"
#include "plan/row_lengths.h"

namespace sparsemla {
namespace {

// Layout of the whole call's scratch. It depends on the capacity alone, so a graph finds every
// array at the same address in every step.
struct CallScratch {
  Workspace attention;
  int32_t* kv_indices = nullptr;  // [max_num_tokens * topk_tokens]
  int32_t* fitted = nullptr;      // [max_num_tokens, topk_tokens], k-pool rows only

  static CallScratch Carve(Arena& arena, const Backend& backend, const PlanCapacity& capacity,
                           bool kpool) {
    CallScratch scratch;
    const size_t attention_bytes = backend.AttentionWorkspaceBytes(capacity);
    const int64_t keys = int64_t{capacity.max_num_tokens} * capacity.topk_tokens;
    scratch.attention = {arena.Take<std::byte>(static_cast<int64_t>(attention_bytes)),
                         attention_bytes};
    scratch.kv_indices = arena.Take<int32_t>(keys);
    scratch.fitted = arena.Take<int32_t>(kpool ? keys : 0);
    return scratch;
  }
};

}  // namespace

Result<View<const int32_t, 2>> FitKpoolIndices(const Backend& backend,
                                               const FitKpoolIndicesParams& params, Stream stream) {
  SPARSEMLA_RETURN_IF_ERROR(Validate(params));
  const int64_t num_tokens = params.topk_indices.shape[0];
  if (params.topk_indices.shape[1] == params.topk_tokens) return params.topk_indices;
  if (num_tokens > 0) SPARSEMLA_RETURN_IF_ERROR(backend.FitKpoolIndices(params, stream));
  return View<const int32_t, 2>{
      params.fitted.data, {num_tokens, params.topk_tokens}, params.fitted.strides};
}

Status ConvertIndices(const Backend& backend, const ConvertIndicesParams& params, Stream stream) {
  SPARSEMLA_RETURN_IF_ERROR(Validate(params));
  if (params.req_id_per_token.empty()) return {};
  return backend.ConvertIndices(params, stream);
}

Status ConvertIndicesDense(const Backend& backend, const ConvertIndicesDenseParams& params,
                           Stream stream) {
  SPARSEMLA_RETURN_IF_ERROR(Validate(params));
  if (params.req_id_per_token.empty()) return {};
  return backend.ConvertIndicesDense(params, stream);
}

Status Attention(const Backend& backend, const AttentionParams& params, const Plan& plan,
                 Workspace workspace, Stream stream) {
  SPARSEMLA_RETURN_IF_ERROR(Validate(params, plan));
  const std::string reason = backend.UnsupportedReason({.dims = plan.dims(),
                                                        .q_dtype = plan.q_dtype(),
                                                        .cache_format = plan.cache_format(),
                                                        .out_dtype = params.out.dtype});
  SPARSEMLA_CHECK(reason.empty(), StatusCode::kUnsupported, backend.name(), ": ", reason);
  SPARSEMLA_RETURN_IF_ERROR(
      ValidateWorkspace(workspace, backend.AttentionWorkspaceBytes(plan.capacity())));
  if (plan.num_tokens() == 0) return {};
  return backend.Attention(params, plan, workspace, stream);
}

Partials PlanPartials(const Plan& plan, Workspace workspace) {
  const Schedule& schedule = plan.schedule();
  const int64_t heads = schedule.heads_per_item;
  const int64_t width = plan.dims().kv_lora_rank;
  Arena arena(workspace);
  const auto buffers = PartialBuffers::Carve(arena, schedule.num_partials, heads, width);
  return {
      .out = View<const float, 3>::Contiguous(buffers.out, {schedule.num_partials, heads, width}),
      .lse = View<const float, 2>::Contiguous(buffers.lse, {schedule.num_partials, heads}),
      .reduce_indptr = schedule.reduce_indptr,
      .reduce_final_map = schedule.reduce_final_map,
      .reduce_partial_map = schedule.reduce_partial_map,
      .fold = schedule.fold};
}

Status Merge(const Backend& backend, const MergeParams& params, Stream stream) {
  SPARSEMLA_RETURN_IF_ERROR(Validate(params));
  if (params.partials.out.shape[0] == 0) return {};
  return backend.Merge(params, stream);
}

Result<size_t> WorkspaceBytes(const Backend& backend, const PlanCapacity& capacity,
                              int32_t topk_width) {
  SPARSEMLA_RETURN_IF_ERROR(plan::CheckCapacity(capacity));
  SPARSEMLA_REQUIRE(topk_width >= 0, "topk_width is ", topk_width, "; it may not be negative");
  Arena measure;
  CallScratch::Carve(measure, backend, capacity, topk_width > capacity.topk_tokens);
  return measure.used();
}

Status SparseMla(const Backend& backend, const SparseMlaParams& params, const Plan& plan,
                 Workspace workspace, Stream stream) {
  SPARSEMLA_CHECK(plan.built(), StatusCode::kFailedPrecondition,
                  "the plan is empty: Build has not succeeded yet");
  const int64_t num_tokens = plan.num_tokens();
  const int64_t width = params.topk_indices.shape[1];
  SPARSEMLA_REQUIRE(num_tokens == 0 || width >= 1, "topk_indices is ", width,
                    " wide; the width must be at least 1");
  SPARSEMLA_REQUIRE(params.topk_indices.shape[0] >= num_tokens, "topk_indices has ",
                    params.topk_indices.shape[0], " rows; the plan has ", num_tokens, " tokens");

  const bool kpool = width > plan.topk_tokens();
  Arena measure;
  CallScratch::Carve(measure, backend, plan.capacity(), kpool);
  SPARSEMLA_RETURN_IF_ERROR(ValidateWorkspace(workspace, measure.used()));
  Arena arena(workspace);
  const CallScratch scratch = CallScratch::Carve(arena, backend, plan.capacity(), kpool);

  AttentionParams attention = params.attention;
  attention.kv_indices = {scratch.kv_indices, static_cast<size_t>(plan.num_kv_indices())};
  // Every later stage is checked before the first one writes.
  SPARSEMLA_RETURN_IF_ERROR(Validate(attention, plan));

  View<const int32_t, 2> topk_indices = params.topk_indices;
  topk_indices.shape[0] = num_tokens;
  if (kpool) {
    auto fitted = FitKpoolIndices(
        backend,
        {.topk_indices = topk_indices,
         .topk_tokens = plan.topk_tokens(),
         .fitted = View<int32_t, 2>::Contiguous(scratch.fitted, {num_tokens, plan.topk_tokens()})},
        stream);
    if (!fitted.ok()) return fitted.status();
    topk_indices = fitted.value();
  }
  SPARSEMLA_RETURN_IF_ERROR(ConvertIndices(
      backend,
      {.topk_indices = topk_indices,
       .block_table = params.block_table,
       .req_id_per_token = plan.req_id_per_token(),
       .kv_indptr = plan.kv_indptr(),
       .kv_indices = {scratch.kv_indices, static_cast<size_t>(plan.num_kv_indices())}},
      stream));
  SPARSEMLA_RETURN_IF_ERROR(Attention(backend, attention, plan, scratch.attention, stream));
  return Merge(backend,
               {.partials = PlanPartials(plan, scratch.attention),
                .sinks = attention.sinks,
                .out = attention.out,
                .lse = attention.lse,
                .write_empty_rows = attention.write_empty_rows},
               stream);
}

}  // namespace sparsemla
