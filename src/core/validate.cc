#include "core/validate.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "core/require.h"
#include "core/workspace.h"

namespace sparsemla {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxExtent = int64_t{1} << 60;  // elements that an array may span

template <int Rank>
std::string ShapeText(const std::array<int64_t, Rank>& shape) {
  std::string text = "[";
  for (int d = 0; d < Rank; ++d) text += StrCat(d == 0 ? "" : ", ", shape[static_cast<size_t>(d)]);
  return text + "]";
}

template <typename Array>
bool IsEmptyShape(const Array& array) {
  for (const int64_t extent : array.shape) {
    if (extent == 0) return true;
  }
  return false;
}

// No negative size, a pointer if there is anything to point to, a pointer aligned for its elements.
template <int Rank, typename Array>
Status CheckArray(std::string_view name, const Array& array, size_t element_bytes) {
  for (const int64_t extent : array.shape) {
    SPARSEMLA_REQUIRE(extent >= 0, name, " has shape ", ShapeText<Rank>(array.shape),
                      "; sizes may not be negative");
  }
  if (IsEmptyShape(array)) return {};
  SPARSEMLA_REQUIRE(array.data != nullptr, name, " is null; its shape is ",
                    ShapeText<Rank>(array.shape));
  SPARSEMLA_REQUIRE(reinterpret_cast<uintptr_t>(array.data) % element_bytes == 0, name,
                    " is not aligned to its elements of ", element_bytes, " bytes");
  return {};
}

template <typename T, int Rank>
Status CheckView(std::string_view name, const View<T, Rank>& view) {
  return CheckArray<Rank>(name, view, sizeof(T));
}

template <typename Pointer>
Status CheckTensor(std::string_view name, const BasicTensor<Pointer, 3>& tensor) {
  SPARSEMLA_RETURN_IF_ERROR(CheckArray<3>(name, tensor, DTypeBytes(tensor.dtype)));
  if (IsEmptyShape(tensor)) return {};
  SPARSEMLA_REQUIRE(tensor.shape[2] <= 1 || tensor.strides[2] == 1, name, " has innermost stride ",
                    tensor.strides[2], "; it must be 1");
  return {};
}

// Written arrays: two elements must not share a place. From the inside out, every stride steps over
// all that lies within it.
template <typename Array>
Status CheckNoOverlap(std::string_view name, const Array& array, int64_t inner_extent) {
  if (IsEmptyShape(array)) return {};
  const size_t inner = array.strides[0] < array.strides[1] ? 0 : 1;
  int64_t extent = inner_extent;
  for (const size_t d : {inner, 1 - inner}) {
    if (array.shape[d] <= 1) continue;
    SPARSEMLA_REQUIRE(array.strides[d] >= extent, name, " has stride ", array.strides[d],
                      " in dimension ", d, "; rows would overlap: it must be at least ", extent);
    SPARSEMLA_REQUIRE(array.strides[d] <= kMaxExtent / array.shape[d], name, " has stride ",
                      array.strides[d], " in dimension ", d, " of ", array.shape[d],
                      "; it may span at most ", kMaxExtent, " elements");
    extent += array.strides[d] * (array.shape[d] - 1);
  }
  return {};
}

Status CheckOutputs(const Tensor<3>& out, const View<float, 2>& lse, int64_t num_rows,
                    int64_t num_heads) {
  SPARSEMLA_RETURN_IF_ERROR(CheckTensor("out", out));
  SPARSEMLA_RETURN_IF_ERROR(CheckNoOverlap("out", out, out.shape[2]));
  SPARSEMLA_REQUIRE(
      out.dtype == DType::kBFloat16 || out.dtype == DType::kFloat16 || out.dtype == DType::kFloat32,
      "out is ", DTypeName(out.dtype), "; it must be bf16, fp16 or fp32");
  if (lse.empty()) return {};
  SPARSEMLA_RETURN_IF_ERROR(CheckView("lse", lse));
  SPARSEMLA_REQUIRE(lse.shape[0] >= num_rows && lse.shape[1] == num_heads, "lse has shape ",
                    ShapeText<2>(lse.shape), "; it must be [>= ", num_rows, ", ", num_heads, "]");
  return CheckNoOverlap("lse", lse, 1);
}

Status CheckSinks(std::span<const float> sinks, int64_t num_heads) {
  SPARSEMLA_REQUIRE(sinks.empty() || static_cast<int64_t>(sinks.size()) == num_heads, "sinks has ",
                    sinks.size(), " entries; num_heads is ", num_heads);
  return {};
}

Status CheckBlockTable(const BlockTable& table) {
  SPARSEMLA_RETURN_IF_ERROR(CheckView("block_table", table.blocks));
  SPARSEMLA_REQUIRE(table.block_size >= 1, "block_size is ", table.block_size,
                    "; it must be at least 1");
  SPARSEMLA_REQUIRE(table.num_blocks >= 0, "num_blocks is ", table.num_blocks,
                    "; it may not be negative");
  SPARSEMLA_REQUIRE(table.block_stride_rows == 0 || table.block_stride_rows >= table.block_size,
                    "block_stride_rows is ", table.block_stride_rows,
                    "; it must be 0 or at least the block_size ", table.block_size);
  SPARSEMLA_REQUIRE(table.num_blocks <= kMaxInt32 && table.block_stride_rows <= kMaxInt32 &&
                        NumCacheSlots(table) <= kMaxInt32,
                    "the cache has ", table.num_blocks, " blocks of ", table.block_size,
                    " rows; slots are 32-bit, so it may have at most ", kMaxInt32, " rows");
  return {};
}

Status CheckQuery(const Query& query, const Plan& plan) {
  const MlaDims& dims = plan.dims();
  const bool whole = IsWhole(query);
  SPARSEMLA_REQUIRE(!whole || query.q_pe.shape[2] == 0,
                    "q_pe is given without ql_nope; give `q` alone or both parts");
  SPARSEMLA_REQUIRE(whole || query.q.shape[2] == 0, "both q and ql_nope are given; give one form");
  const bool has_rope_part = !whole && dims.qk_rope_head_dim > 0;
  const ConstTensor<3>& first = whole ? query.q : query.ql_nope;
  const std::string_view name = whole ? "q" : "ql_nope";
  const int64_t width = whole ? dims.head_dim_qk() : dims.kv_lora_rank;
  SPARSEMLA_RETURN_IF_ERROR(CheckTensor(name, first));
  SPARSEMLA_CHECK(first.shape[0] >= plan.num_tokens() && first.shape[1] == dims.num_heads &&
                      first.shape[2] == width,
                  StatusCode::kFailedPrecondition, name, " has shape ", ShapeText<3>(first.shape),
                  "; the plan was made for [>= ", plan.num_tokens(), ", ", dims.num_heads, ", ",
                  width, "]");
  SPARSEMLA_CHECK(first.dtype == plan.q_dtype(), StatusCode::kFailedPrecondition, name, " is ",
                  DTypeName(first.dtype), "; the plan was made for ", DTypeName(plan.q_dtype()));
  if (!has_rope_part) {
    SPARSEMLA_CHECK(query.q_pe.shape[2] == 0, StatusCode::kFailedPrecondition, "q_pe is ",
                    query.q_pe.shape[2], " wide; the plan is rope-free");
    return {};
  }
  SPARSEMLA_RETURN_IF_ERROR(CheckTensor("q_pe", query.q_pe));
  SPARSEMLA_CHECK(query.q_pe.shape[0] >= plan.num_tokens() &&
                      query.q_pe.shape[1] == dims.num_heads &&
                      query.q_pe.shape[2] == dims.qk_rope_head_dim,
                  StatusCode::kFailedPrecondition, "q_pe has shape ",
                  ShapeText<3>(query.q_pe.shape), "; the plan was made for [>= ", plan.num_tokens(),
                  ", ", dims.num_heads, ", ", dims.qk_rope_head_dim, "]");
  SPARSEMLA_REQUIRE(query.q_pe.dtype == first.dtype, "q_pe is ", DTypeName(query.q_pe.dtype),
                    " and ql_nope ", DTypeName(first.dtype), "; they must be the same");
  return {};
}

Status CheckKvCache(const KvCache& cache, const MlaDims& dims) {
  const int64_t row_bytes = CacheRowBytes(cache.format, dims);
  SPARSEMLA_REQUIRE(cache.num_slots >= 0 && cache.num_slots <= kMaxInt32, "num_slots is ",
                    cache.num_slots, "; it must be in [0, ", kMaxInt32, "]");
  SPARSEMLA_REQUIRE(cache.num_slots == 0 || cache.data != nullptr,
                    "kv_cache is null; num_slots is ", cache.num_slots);
  SPARSEMLA_REQUIRE(cache.row_stride_bytes == 0 || cache.row_stride_bytes >= row_bytes,
                    "row_stride_bytes is ", cache.row_stride_bytes, "; a ",
                    CacheFormatName(cache.format), " row has ", row_bytes, " bytes");
  const int64_t alignment =
      cache.format == CacheFormat::kFloat32 || cache.format == CacheFormat::kFp8DsMla ? 4
      : IsPerTensorFp8(cache.format)                                                  ? 1
                                                                                      : 2;
  SPARSEMLA_REQUIRE(
      reinterpret_cast<uintptr_t>(cache.data) % static_cast<uintptr_t>(alignment) == 0 &&
          cache.row_stride_bytes % alignment == 0,
      "kv_cache rows of ", CacheFormatName(cache.format), " must be aligned to ", alignment,
      " bytes; row_stride_bytes is ", cache.row_stride_bytes);
  return {};
}

Status CheckScale(std::string_view name, float scale, CacheFormat format) {
  SPARSEMLA_REQUIRE(std::isfinite(scale) && scale > 0.0f, name, " is ", scale,
                    "; it must be finite and positive");
  SPARSEMLA_REQUIRE(scale == 1.0f || IsPerTensorFp8(format), name, " is ", scale, "; a ",
                    CacheFormatName(format), " cache has no scale per tensor, so it must be 1");
  return {};
}

}  // namespace

Status Validate(const FitKpoolIndicesParams& params) {
  const int64_t width = params.topk_indices.shape[1];
  SPARSEMLA_RETURN_IF_ERROR(CheckView("topk_indices", params.topk_indices));
  SPARSEMLA_REQUIRE(params.topk_tokens >= 1, "topk_tokens is ", params.topk_tokens,
                    "; it must be at least 1");
  SPARSEMLA_REQUIRE(width >= params.topk_tokens, "topk_indices is ", width,
                    " wide; the width must be at least topk_tokens, ", params.topk_tokens);
  if (width == params.topk_tokens) return {};
  SPARSEMLA_RETURN_IF_ERROR(CheckView("fitted", params.fitted));
  SPARSEMLA_REQUIRE(params.fitted.shape[0] >= params.topk_indices.shape[0] &&
                        params.fitted.shape[1] == params.topk_tokens,
                    "fitted has shape ", ShapeText<2>(params.fitted.shape),
                    "; it must be [>= ", params.topk_indices.shape[0], ", ", params.topk_tokens,
                    "]");
  return CheckNoOverlap("fitted", params.fitted, 1);
}

Status Validate(const ConvertIndicesParams& params) {
  SPARSEMLA_RETURN_IF_ERROR(CheckView("topk_indices", params.topk_indices));
  SPARSEMLA_RETURN_IF_ERROR(CheckBlockTable(params.block_table));
  const size_t num_tokens = params.req_id_per_token.size();
  SPARSEMLA_REQUIRE(params.kv_indptr.size() == num_tokens + 1, "kv_indptr has ",
                    params.kv_indptr.size(), " entries; req_id_per_token has ", num_tokens,
                    ", so it must have ", num_tokens + 1);
  SPARSEMLA_REQUIRE(params.topk_indices.shape[0] >= static_cast<int64_t>(num_tokens),
                    "topk_indices has ", params.topk_indices.shape[0], " rows; there are ",
                    num_tokens, " tokens");
  return {};
}

Status Validate(const ConvertIndicesDenseParams& params) {
  SPARSEMLA_RETURN_IF_ERROR(CheckView("topk_indices", params.topk_indices));
  SPARSEMLA_RETURN_IF_ERROR(CheckBlockTable(params.block_table));
  SPARSEMLA_RETURN_IF_ERROR(CheckView("slots", params.slots));
  const int64_t num_tokens = static_cast<int64_t>(params.req_id_per_token.size());
  SPARSEMLA_REQUIRE(params.topk_indices.shape[0] >= num_tokens, "topk_indices has ",
                    params.topk_indices.shape[0], " rows; there are ", num_tokens, " tokens");
  SPARSEMLA_REQUIRE(
      params.slots.shape[0] >= num_tokens && params.slots.shape[1] == params.topk_indices.shape[1],
      "slots has shape ", ShapeText<2>(params.slots.shape), "; it must be [>= ", num_tokens, ", ",
      params.topk_indices.shape[1], "]");
  SPARSEMLA_RETURN_IF_ERROR(CheckNoOverlap("slots", params.slots, 1));
  SPARSEMLA_REQUIRE(
      params.valid_counts.empty() || static_cast<int64_t>(params.valid_counts.size()) >= num_tokens,
      "valid_counts has ", params.valid_counts.size(), " entries; there are ", num_tokens,
      " tokens");
  return {};
}

Status Validate(const AttentionParams& params, const Plan& plan) {
  SPARSEMLA_CHECK(plan.built(), StatusCode::kFailedPrecondition,
                  "the plan is empty: Build has not succeeded yet");
  const MlaDims& dims = plan.dims();
  SPARSEMLA_RETURN_IF_ERROR(CheckQuery(params.query, plan));
  SPARSEMLA_CHECK(params.kv_cache.format == plan.cache_format(), StatusCode::kFailedPrecondition,
                  "kv_cache is ", CacheFormatName(params.kv_cache.format),
                  "; the plan was made for ", CacheFormatName(plan.cache_format()));
  SPARSEMLA_RETURN_IF_ERROR(CheckKvCache(params.kv_cache, dims));
  SPARSEMLA_REQUIRE(static_cast<int64_t>(params.kv_indices.size()) >= plan.num_kv_indices(),
                    "kv_indices has ", params.kv_indices.size(), " entries; the plan's rows have ",
                    plan.num_kv_indices());
  SPARSEMLA_REQUIRE(std::isfinite(params.softmax_scale), "softmax_scale is ", params.softmax_scale,
                    "; it must be finite");
  SPARSEMLA_RETURN_IF_ERROR(CheckScale("q_scale", params.q_scale, params.kv_cache.format));
  SPARSEMLA_RETURN_IF_ERROR(CheckScale("kv_scale", params.kv_scale, params.kv_cache.format));
  SPARSEMLA_RETURN_IF_ERROR(CheckSinks(params.sinks, dims.num_heads));
  SPARSEMLA_REQUIRE(
      params.out.shape[0] >= plan.num_tokens() && params.out.shape[1] == dims.num_heads &&
          params.out.shape[2] == dims.kv_lora_rank,
      "out has shape ", ShapeText<3>(params.out.shape), "; it must be [>= ", plan.num_tokens(),
      ", ", dims.num_heads, ", ", dims.kv_lora_rank, "]");
  return CheckOutputs(params.out, params.lse, plan.num_tokens(), dims.num_heads);
}

Status Validate(const MergeParams& params) {
  const Partials& partials = params.partials;
  SPARSEMLA_REQUIRE(partials.fold >= 1, "fold is ", partials.fold, "; it must be at least 1");
  SPARSEMLA_RETURN_IF_ERROR(CheckView("partials.out", partials.out));
  SPARSEMLA_RETURN_IF_ERROR(CheckView("partials.lse", partials.lse));
  const int64_t num_heads = params.out.shape[1];
  SPARSEMLA_REQUIRE(partials.out.shape[0] == partials.lse.shape[0] &&
                        partials.out.shape[1] == partials.lse.shape[1],
                    "partials.out has shape ", ShapeText<3>(partials.out.shape),
                    " and partials.lse ", ShapeText<2>(partials.lse.shape),
                    "; the first two sizes must agree");
  SPARSEMLA_REQUIRE(!partials.reduce_indptr.empty(),
                    "reduce_indptr is empty; it has one entry more than there are groups");
  SPARSEMLA_REQUIRE(partials.reduce_final_map.size() + 1 >= partials.reduce_indptr.size(),
                    "reduce_final_map has ", partials.reduce_final_map.size(),
                    " entries; reduce_indptr names ", partials.reduce_indptr.size() - 1, " groups");
  SPARSEMLA_RETURN_IF_ERROR(
      CheckOutputs(params.out, params.lse, params.out.shape[0], params.out.shape[1]));
  if (partials.out.shape[0] > 0) {
    SPARSEMLA_REQUIRE(partials.out.shape[1] * partials.fold == num_heads &&
                          partials.out.shape[2] == params.out.shape[2],
                      "partials.out has shape ", ShapeText<3>(partials.out.shape), " and fold ",
                      partials.fold, "; out has ", num_heads, " heads of ", params.out.shape[2]);
    SPARSEMLA_REQUIRE(partials.out.shape[2] <= 1 || partials.out.strides[2] == 1,
                      "partials.out has innermost stride ", partials.out.strides[2],
                      "; it must be 1");
  }
  return CheckSinks(params.sinks, num_heads);
}

Status ValidateWorkspace(Workspace workspace, size_t needed) {
  if (needed == 0) return {};
  SPARSEMLA_REQUIRE(reinterpret_cast<uintptr_t>(workspace.data) % Arena::kAlignment == 0,
                    "the workspace is not aligned to ", Arena::kAlignment, " bytes");
  const size_t bytes = workspace.data == nullptr ? 0 : workspace.bytes;
  SPARSEMLA_CHECK(bytes >= needed, StatusCode::kResourceExhausted, "the workspace has ", bytes,
                  " bytes; the plan's capacity needs ", needed);
  return {};
}

}  // namespace sparsemla
