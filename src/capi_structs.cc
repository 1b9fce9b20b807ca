#include "capi_structs.h"

#include <cstddef>

namespace sparsemla::capi {

static_assert(SPARSEMLA_INTERNAL == static_cast<int32_t>(StatusCode::kInternal));
static_assert(SPARSEMLA_FLOAT8_E4M3_FNUZ == static_cast<int32_t>(DType::kFloat8E4M3Fnuz));
static_assert(SPARSEMLA_CACHE_FP8_DS_MLA == static_cast<int32_t>(CacheFormat::kFp8DsMla));
static_assert(SPARSEMLA_SCHEDULE_AITER == static_cast<int32_t>(ScheduleKind::kAiter));
static_assert(SPARSEMLA_AITER_GFX950 == static_cast<int32_t>(AiterTarget::kGfx950));
static_assert(sizeof(sparsemla_work_item) == sizeof(WorkItem) &&
              offsetof(sparsemla_work_item, kv_offset) == offsetof(WorkItem, kv_offset));
static_assert(sizeof(sparsemla_row_range) == sizeof(RowRange));

MlaDims ToDims(const sparsemla_dims& dims) {
  return {.num_heads = dims.num_heads,
          .kv_lora_rank = dims.kv_lora_rank,
          .qk_rope_head_dim = dims.qk_rope_head_dim};
}

Status ReadCapacity(const sparsemla_plan_capacity* given, PlanCapacity& capacity) {
  sparsemla_plan_capacity in = SPARSEMLA_PLAN_CAPACITY_INIT;
  SPARSEMLA_RETURN_IF_ERROR(ReadStruct("capacity", given, in));
  SPARSEMLA_RETURN_IF_ERROR(
      ReadEnum("schedule", in.schedule, ScheduleKind::kAiter, capacity.schedule));
  SPARSEMLA_RETURN_IF_ERROR(
      ReadEnum("aiter_target", in.aiter_target, AiterTarget::kGfx950, capacity.aiter_target));
  capacity.num_compute_units = in.num_compute_units;
  capacity.max_num_tokens = in.max_num_tokens;
  capacity.max_num_reqs = in.max_num_reqs;
  capacity.topk_tokens = in.topk_tokens;
  capacity.dims = ToDims(in.dims);
  capacity.max_splits = in.max_splits;
  capacity.batch_invariant = in.batch_invariant != 0;
  return {};
}

Status ReadPlanParams(const sparsemla_plan_params* given, PlanParams& params) {
  sparsemla_plan_params in = SPARSEMLA_PLAN_PARAMS_INIT;
  SPARSEMLA_RETURN_IF_ERROR(ReadStruct("params", given, in));
  SPARSEMLA_RETURN_IF_ERROR(ReadDType("q_dtype", in.q_dtype, params.q_dtype));
  SPARSEMLA_RETURN_IF_ERROR(ReadCacheFormat(in.cache_format, params.cache_format));
  SPARSEMLA_RETURN_IF_ERROR(ReadArray("seq_lens", in.seq_lens, in.num_reqs, params.seq_lens));
  SPARSEMLA_RETURN_IF_ERROR(ReadArray("query_start_loc", in.query_start_loc,
                                      int64_t{in.num_reqs} + 1, params.query_start_loc));
  params.num_tokens = in.num_tokens;
  params.dims = ToDims(in.dims);
  params.topk_tokens = in.topk_tokens;
  params.max_splits = in.max_splits;
  params.reorder_batch_threshold = in.reorder_batch_threshold;
  return {};
}

Status ReadSinks(const float* sinks, int64_t num_heads, std::span<const float>& out) {
  return sinks == nullptr ? Status() : ReadArray("sinks", sinks, num_heads, out);
}

Status ReadAttention(std::string_view name, const sparsemla_attention_params* given,
                     const Plan& plan, AttentionParams& params) {
  sparsemla_attention_params in = SPARSEMLA_ATTENTION_PARAMS_INIT;
  SPARSEMLA_RETURN_IF_ERROR(ReadStruct(name, given, in));
  SPARSEMLA_RETURN_IF_ERROR(ReadTensor("q", in.q, params.query.q));
  SPARSEMLA_RETURN_IF_ERROR(ReadTensor("ql_nope", in.ql_nope, params.query.ql_nope));
  SPARSEMLA_RETURN_IF_ERROR(ReadTensor("q_pe", in.q_pe, params.query.q_pe));
  params.kv_cache = {
      .data = in.kv_cache, .num_slots = in.num_slots, .row_stride_bytes = in.row_stride_bytes};
  SPARSEMLA_RETURN_IF_ERROR(ReadCacheFormat(in.cache_format, params.kv_cache.format));
  SPARSEMLA_RETURN_IF_ERROR(
      ReadArray("kv_indices", in.kv_indices, in.num_kv_indices, params.kv_indices));
  SPARSEMLA_RETURN_IF_ERROR(ReadSinks(in.sinks, plan.dims().num_heads, params.sinks));
  SPARSEMLA_RETURN_IF_ERROR(ReadTensor("out", in.out, params.out));
  SPARSEMLA_RETURN_IF_ERROR(ReadTensor("lse", in.lse, params.lse));
  params.softmax_scale = in.softmax_scale;
  params.q_scale = in.q_scale;
  params.kv_scale = in.kv_scale;
  params.write_empty_rows = in.write_empty_rows != 0;
  return {};
}

Status ReadPartials(const sparsemla_partials* given, Partials& partials) {
  sparsemla_partials in = SPARSEMLA_PARTIALS_INIT;
  SPARSEMLA_RETURN_IF_ERROR(ReadStruct("partials", given, in));
  SPARSEMLA_RETURN_IF_ERROR(ReadTensor("partials.out", in.out, partials.out));
  SPARSEMLA_RETURN_IF_ERROR(ReadTensor("partials.lse", in.lse, partials.lse));
  SPARSEMLA_REQUIRE(in.num_groups >= 0 && in.num_groups < INT64_MAX, "num_groups is ",
                    in.num_groups, "; it may not be negative");
  SPARSEMLA_RETURN_IF_ERROR(
      ReadArray("reduce_indptr", in.reduce_indptr, in.num_groups + 1, partials.reduce_indptr));
  SPARSEMLA_RETURN_IF_ERROR(ReadArray("reduce_final_map",
                                      reinterpret_cast<const RowRange*>(in.reduce_final_map),
                                      in.num_groups, partials.reduce_final_map));
  SPARSEMLA_RETURN_IF_ERROR(ReadArray("reduce_partial_map", in.reduce_partial_map,
                                      in.num_reduce_partials, partials.reduce_partial_map));
  partials.fold = in.fold;
  return {};
}

sparsemla_plan_info PlanInfo(const Plan& plan) {
  sparsemla_plan_info info = {};
  if (!plan.built()) return info;
  const BatchSplit& split = plan.batch_split();
  const MlaDims& dims = plan.dims();
  info.built = 1;
  info.generation = plan.generation();
  info.fingerprint = plan.fingerprint();
  info.dims = {dims.num_heads, dims.kv_lora_rank, dims.qk_rope_head_dim};
  info.q_dtype = static_cast<sparsemla_dtype>(plan.q_dtype());
  info.cache_format = static_cast<sparsemla_cache_format>(plan.cache_format());
  info.num_tokens = plan.num_tokens();
  info.num_reqs = plan.num_reqs();
  info.topk_tokens = plan.topk_tokens();
  info.max_splits = plan.max_splits();
  info.max_query_len = plan.max_query_len();
  info.max_seq_len = plan.max_seq_len();
  info.num_decodes = split.num_decodes;
  info.num_prefills = split.num_prefills;
  info.num_decode_tokens = split.num_decode_tokens;
  info.num_prefill_tokens = split.num_prefill_tokens;
  info.num_kv_indices = plan.num_kv_indices();
  info.num_kv_indptr_padded = static_cast<int64_t>(plan.kv_indptr_padded().size());
  info.req_id_per_token = plan.req_id_per_token().data();
  info.kv_indptr = plan.kv_indptr().data();
  info.kv_indptr_padded = plan.kv_indptr_padded().data();
  return info;
}

sparsemla_schedule ScheduleInfo(const Plan& plan) {
  sparsemla_schedule out = {};
  if (!plan.built()) return out;
  const Schedule& schedule = plan.schedule();
  out.num_compute_units = schedule.num_compute_units;
  out.fold = schedule.fold;
  out.heads_per_item = schedule.heads_per_item;
  out.num_virtual_rows = static_cast<int32_t>(schedule.reduce_final_map.size());
  out.num_work_items = static_cast<int32_t>(schedule.work_items.size());
  out.num_partials = schedule.num_partials;
  out.work_indptr = schedule.work_indptr.data();
  out.work_items = reinterpret_cast<const sparsemla_work_item*>(schedule.work_items.data());
  out.reduce_indptr = schedule.reduce_indptr.data();
  out.reduce_final_map =
      reinterpret_cast<const sparsemla_row_range*>(schedule.reduce_final_map.data());
  out.reduce_partial_map = schedule.reduce_partial_map.data();
  return out;
}

}  // namespace sparsemla::capi
