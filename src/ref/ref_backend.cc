#include "ref/ref_backend.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/numeric.h"
#include "core/problem.h"
#include "core/validate.h"
#include "core/workspace.h"
#include "plan/schedule.h"

namespace sparsemla {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void LoadArray(const std::byte* data, DType dtype, int64_t count, double* values) {
  VisitDType(dtype, [&]<typename T>() {
    for (int64_t i = 0; i < count; ++i) {
      T value;
      std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
      values[i] = ToFloat(value);
    }
  });
}

void Store(const Tensor<3>& tensor, int64_t row, int64_t head, int64_t column, double value) {
  const int64_t offset =
      row * tensor.strides[0] + head * tensor.strides[1] + column * tensor.strides[2];
  VisitDType(tensor.dtype, [&]<typename T>() {
    static_cast<T*>(tensor.data)[offset] = FromFloat<T>(static_cast<float>(value));
  });
}

// ---- the cache ---------------------------------------------------------------------------------

DType ElementType(CacheFormat format) {
  switch (format) {
    case CacheFormat::kBFloat16:
      return DType::kBFloat16;
    case CacheFormat::kFloat16:
      return DType::kFloat16;
    case CacheFormat::kFp8E4M3:
    case CacheFormat::kFp8DsMla:
      return DType::kFloat8E4M3;
    case CacheFormat::kFp8E4M3Fnuz:
      return DType::kFloat8E4M3Fnuz;
    case CacheFormat::kFloat32:
      break;
  }
  return DType::kFloat32;
}

bool IsValidSlot(const KvCache& cache, int32_t slot) {
  return slot >= 0 && slot < cache.num_slots;
}

// The stored numbers of a cache row, without a per-tensor scale: row [head_dim_qk] (N10).
void LoadCacheRow(const KvCache& cache, const MlaDims& dims, int64_t slot, double* row) {
  const int64_t stride =
      cache.row_stride_bytes == 0 ? CacheRowBytes(cache.format, dims) : cache.row_stride_bytes;
  const std::byte* const data = static_cast<const std::byte*>(cache.data) + slot * stride;
  if (cache.format != CacheFormat::kFp8DsMla) {
    LoadArray(data, ElementType(cache.format), dims.head_dim_qk(), row);
    return;
  }
  constexpr int64_t kLatent = 512;
  constexpr int64_t kCodesPerScale = 128;
  double scales[kLatent / kCodesPerScale];
  LoadArray(data, DType::kFloat8E4M3, kLatent, row);
  LoadArray(data + kLatent, DType::kFloat32, kLatent / kCodesPerScale, scales);
  for (int64_t d = 0; d < kLatent; ++d) row[d] *= scales[d / kCodesPerScale];
  LoadArray(data + kLatent + 4 * kLatent / kCodesPerScale, DType::kBFloat16, dims.qk_rope_head_dim,
            row + kLatent);
}

// ---- the query ---------------------------------------------------------------------------------

double StoredQueryValue(const Query& query, const MlaDims& dims, int64_t row, int64_t head,
                        int64_t column) {
  const bool in_rope_part = !IsWhole(query) && column >= dims.kv_lora_rank;
  const ConstTensor<3>& part = IsWhole(query) ? query.q : in_rope_part ? query.q_pe : query.ql_nope;
  const int64_t offset = row * part.strides[0] + head * part.strides[1] +
                         (in_rope_part ? column - dims.kv_lora_rank : column) * part.strides[2];
  const auto bytes = static_cast<int64_t>(DTypeBytes(part.dtype));
  double value = 0.0;
  LoadArray(static_cast<const std::byte*>(part.data) + offset * bytes, part.dtype, 1, &value);
  return value;
}

// The query as attention sees it: the codes' values for a per-tensor fp8 cache (N11).
double QueryValue(const AttentionParams& params, const MlaDims& dims, int64_t row, int64_t head,
                  int64_t column) {
  const double stored = StoredQueryValue(params.query, dims, row, head, column);
  const DType element = ElementType(params.kv_cache.format);
  if (!IsPerTensorFp8(params.kv_cache.format) || QueryDType(params.query) == element) return stored;
  const float scaled = static_cast<float>(stored) * (1.0f / params.q_scale);
  return element == DType::kFloat8E4M3 ? ToFloat(FromFloat<Float8E4M3>(scaled))
                                       : ToFloat(FromFloat<Float8E4M3Fnuz>(scaled));
}

// ---- softmax -----------------------------------------------------------------------------------

// ln(e^a + e^b), from the definition.
double LogAddExp(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return a + b;
  const double max = std::max(a, b);
  return std::isinf(max) ? max : max + std::log(std::exp(a - max) + std::exp(b - max));
}

// e^(part - total), where an empty part weighs nothing and an infinite total leaves it nothing.
double Weight(double part, double total) {
  return part == -kInfinity || total == kInfinity ? 0.0 : std::exp(part - total);
}

// What one item needs: H heads, D query columns, R = kv_lora_rank.
struct ItemScratch {
  double* query = nullptr;   // [D, H]
  double* row = nullptr;     // [D], the cache row at hand
  double* logits = nullptr;  // [topk_tokens, H]
  double* lse = nullptr;     // [H]
  double* out = nullptr;     // [H, R]

  static ItemScratch Carve(Arena& arena, const MlaDims& dims, int64_t topk_tokens) {
    ItemScratch scratch;
    const int64_t heads = dims.num_heads;
    scratch.query = arena.Take<double>(dims.head_dim_qk() * heads);
    scratch.row = arena.Take<double>(dims.head_dim_qk());
    scratch.logits = arena.Take<double>(topk_tokens * heads);
    scratch.lse = arena.Take<double>(heads);
    scratch.out = arena.Take<double>(heads * dims.kv_lora_rank);
    return scratch;
  }
};

// Some heads of one row over one range of its keys.
struct Item {
  int64_t row = 0;
  int64_t head_begin = 0;
  int64_t num_heads = 0;
  std::span<const int32_t> slots;
};

// First pass: logits[k, h] for every valid slot (N1). Returns whether there is one.
bool ComputeLogits(const AttentionParams& params, const MlaDims& dims, const Item& item,
                   const ItemScratch& scratch) {
  const int64_t heads = item.num_heads;
  for (int64_t d = 0; d < dims.head_dim_qk(); ++d) {
    for (int64_t h = 0; h < heads; ++h) {
      scratch.query[d * heads + h] = QueryValue(params, dims, item.row, item.head_begin + h, d);
    }
  }
  const double scale =
      double{params.softmax_scale} * (IsPerTensorFp8(params.kv_cache.format)
                                          ? double{params.q_scale} * double{params.kv_scale}
                                          : 1.0);
  bool any = false;
  for (size_t k = 0; k < item.slots.size(); ++k) {
    if (!IsValidSlot(params.kv_cache, item.slots[k])) continue;
    any = true;
    LoadCacheRow(params.kv_cache, dims, item.slots[k], scratch.row);
    double* const logits = scratch.logits + static_cast<int64_t>(k) * heads;
    std::fill_n(logits, heads, 0.0);
    for (int64_t d = 0; d < dims.head_dim_qk(); ++d) {
      for (int64_t h = 0; h < heads; ++h)
        logits[h] += scratch.query[d * heads + h] * scratch.row[d];
    }
    for (int64_t h = 0; h < heads; ++h) logits[h] *= scale;
  }
  return any;
}

// The lse of one head; -inf if it has no key, or only keys whose logits are -inf.
double HeadLse(const AttentionParams& params, const Item& item, const ItemScratch& scratch,
               int64_t h) {
  double max = -kInfinity;
  for (size_t k = 0; k < item.slots.size(); ++k) {
    if (!IsValidSlot(params.kv_cache, item.slots[k])) continue;
    const double logit = scratch.logits[static_cast<int64_t>(k) * item.num_heads + h];
    if (std::isnan(logit)) return logit;  // N12
    max = std::max(max, logit);
  }
  if (max == -kInfinity) return max;
  double sum = 0.0;
  for (size_t k = 0; k < item.slots.size(); ++k) {
    if (!IsValidSlot(params.kv_cache, item.slots[k])) continue;
    sum += std::exp(scratch.logits[static_cast<int64_t>(k) * item.num_heads + h] - max);
  }
  return max + std::log(sum);
}

// Second pass: out[h, :] = sum over keys of e^(logit - lse) * value.
void ComputeOutputs(const AttentionParams& params, const MlaDims& dims, const Item& item,
                    const ItemScratch& scratch) {
  const int64_t rank = dims.kv_lora_rank;
  std::fill_n(scratch.out, item.num_heads * rank, 0.0);
  for (size_t k = 0; k < item.slots.size(); ++k) {
    if (!IsValidSlot(params.kv_cache, item.slots[k])) continue;
    LoadCacheRow(params.kv_cache, dims, item.slots[k], scratch.row);
    for (int64_t h = 0; h < item.num_heads; ++h) {
      if (scratch.lse[h] == -kInfinity) continue;
      const double logit = scratch.logits[static_cast<int64_t>(k) * item.num_heads + h];
      const double weight = std::exp(logit - scratch.lse[h]);
      for (int64_t d = 0; d < rank; ++d) scratch.out[h * rank + d] += weight * scratch.row[d];
    }
  }
  if (!IsPerTensorFp8(params.kv_cache.format)) return;
  for (int64_t i = 0; i < item.num_heads * rank; ++i) scratch.out[i] *= double{params.kv_scale};
}

// Completes a whole row: the sink, then rounding (N5, N8).
void StoreRow(const AttentionParams& params, const MlaDims& dims, const Item& item,
              const ItemScratch& scratch) {
  for (int64_t h = 0; h < item.num_heads; ++h) {
    const int64_t head = item.head_begin + h;
    double lse = scratch.lse[h];
    double weight = 1.0;
    if (!params.sinks.empty()) {
      lse = LogAddExp(lse, double{params.sinks[static_cast<size_t>(head)]});
      weight = Weight(scratch.lse[h], lse);
    }
    for (int64_t d = 0; d < dims.kv_lora_rank; ++d) {
      Store(params.out, item.row, head, d, weight * scratch.out[h * dims.kv_lora_rank + d]);
    }
    if (!params.lse.empty()) params.lse(item.row, head) = static_cast<float>(lse);
  }
}

// ---- index stages ------------------------------------------------------------------------------

// The slot of a request-local position, or `invalid_slot` (N9).
int32_t SlotOf(const BlockTable& table, int32_t req_id, int32_t position, int32_t invalid_slot) {
  if (position < 0 || req_id < 0 || req_id >= table.blocks.shape[0]) return invalid_slot;
  const int32_t column = position / table.block_size;
  if (column >= table.blocks.shape[1]) return invalid_slot;
  const int32_t block = table.blocks(req_id, column);
  if (block < 0 || block >= table.num_blocks) return invalid_slot;
  const int64_t stride = table.block_stride_rows == 0 ? table.block_size : table.block_stride_rows;
  return static_cast<int32_t>(block * stride + position % table.block_size);
}

class RefBackend final : public Backend {
 public:
  std::string_view name() const override { return "ref"; }

  DeviceInfo device() const override {
    return {.name = "reference, one thread",
            .features = "double precision",
            .num_compute_units = 32,
            .num_threads = 1};
  }

  std::vector<KernelInfo> kernels() const override {
    return {{.name = "attention_ref", .unavailable_reason = {}, .selected = true}};
  }

  std::string_view KernelName(const Problem&) const override { return "attention_ref"; }

  std::string UnsupportedReason(const Problem& problem) const override {
    return sparsemla::UnsupportedReason(problem);
  }

  size_t AttentionWorkspaceBytes(const PlanCapacity& capacity) const override {
    Arena measure;
    PartialBuffers::Carve(measure, plan::MaxPartialHeads(capacity), 1, capacity.dims.kv_lora_rank);
    ItemScratch::Carve(measure, capacity.dims, capacity.topk_tokens);
    return measure.used();
  }

  Status FitKpoolIndices(const FitKpoolIndicesParams& params, Stream) const override {
    const int64_t k = params.topk_tokens;
    const int64_t width = params.topk_indices.shape[1];
    for (int64_t row = 0; row < params.topk_indices.shape[0]; ++row) {
      const auto num_valid = [&](int64_t begin, int64_t end) {
        int64_t count = 0;
        for (int64_t c = begin; c < end; ++c) count += params.topk_indices(row, c) >= 0;
        return count;
      };
      const int64_t tail = std::min(num_valid(k, width), k);
      const int64_t kept = std::min(num_valid(0, k), k - tail);
      for (int64_t c = 0; c < k; ++c) {
        params.fitted(row, c) = c < kept          ? params.topk_indices(row, c)
                                : c < kept + tail ? params.topk_indices(row, k + c - kept)
                                                  : -1;
      }
    }
    return {};
  }

  Status ConvertIndices(const ConvertIndicesParams& params, Stream) const override {
    for (size_t t = 0; t < params.req_id_per_token.size(); ++t) {
      const int32_t begin = params.kv_indptr[t];
      for (int32_t c = 0; c < params.kv_indptr[t + 1] - begin; ++c) {
        const bool in_matrix = c < params.topk_indices.shape[1];
        params.kv_indices[static_cast<size_t>(begin + c)] =
            in_matrix ? SlotOf(params.block_table, params.req_id_per_token[t],
                               params.topk_indices(t, c), params.invalid_slot)
                      : params.invalid_slot;
      }
    }
    return {};
  }

  Status ConvertIndicesDense(const ConvertIndicesDenseParams& params, Stream) const override {
    for (size_t t = 0; t < params.req_id_per_token.size(); ++t) {
      int32_t valid = 0;
      for (int64_t c = 0; c < params.slots.shape[1]; ++c) {
        const int32_t slot =
            SlotOf(params.block_table, params.req_id_per_token[t], params.topk_indices(t, c), -1);
        valid += slot >= 0;
        params.slots(t, c) = slot >= 0 ? slot : params.invalid_slot;
      }
      if (!params.valid_counts.empty()) params.valid_counts[t] = valid;
    }
    return {};
  }

  Status Attention(const AttentionParams& params, const Plan& plan, Workspace workspace,
                   Stream) const override {
    const Schedule& schedule = plan.schedule();
    const MlaDims& dims = plan.dims();
    const int64_t heads = schedule.heads_per_item;
    Arena arena(workspace);
    const auto partials =
        PartialBuffers::Carve(arena, schedule.num_partials, heads, dims.kv_lora_rank);
    const auto scratch = ItemScratch::Carve(arena, dims, plan.topk_tokens());
    for (const WorkItem& work : schedule.work_items) {
      const Item item{
          .row = work.row_begin / schedule.fold,
          .head_begin = work.row_begin % schedule.fold * heads,
          .num_heads = heads,
          .slots = params.kv_indices.subspan(static_cast<size_t>(work.kv_begin),
                                             static_cast<size_t>(work.kv_end - work.kv_begin))};
      const bool any = ComputeLogits(params, dims, item, scratch);
      const bool is_piece = work.partial_row >= 0;
      if (!any && !is_piece && !params.write_empty_rows) continue;
      for (int64_t h = 0; h < heads; ++h) scratch.lse[h] = HeadLse(params, item, scratch, h);
      ComputeOutputs(params, dims, item, scratch);
      if (!is_piece) {
        StoreRow(params, dims, item, scratch);
        continue;
      }
      const int64_t state = work.partial_row * heads;
      std::copy_n(scratch.lse, heads, partials.lse + state);
      std::copy_n(scratch.out, heads * dims.kv_lora_rank, partials.out + state * dims.kv_lora_rank);
    }
    return {};
  }

  Status Merge(const MergeParams& params, Stream) const override {
    const Partials& partials = params.partials;
    for (size_t g = 0; g + 1 < partials.reduce_indptr.size(); ++g) {
      const auto begin = static_cast<size_t>(partials.reduce_indptr[g]);
      const auto end = static_cast<size_t>(partials.reduce_indptr[g + 1]);
      if (begin >= end) continue;
      const auto group = partials.reduce_partial_map.subspan(begin, end - begin);
      const RowRange rows = partials.reduce_final_map[g];
      for (int32_t v = rows.begin; v < rows.end; ++v) {
        for (int64_t h = 0; h < partials.lse.shape[1]; ++h) {
          MergeHead(params, group, v, v - rows.begin, h);
        }
      }
    }
    return {};
  }

 private:
  // Virtual row `v`, the `offset`-th of its group's range, and head `h` within it.
  static void MergeHead(const MergeParams& params, std::span<const int32_t> group, int64_t v,
                        int64_t offset, int64_t h) {
    const Partials& partials = params.partials;
    const int64_t row = v / partials.fold;
    const int64_t head = v % partials.fold * partials.lse.shape[1] + h;
    double lse = -kInfinity;
    for (const int32_t p : group) {
      const double part = partials.lse(p + offset, h);
      if (!std::isinf(part)) lse = LogAddExp(lse, part);
    }
    if (lse == -kInfinity && !params.write_empty_rows) return;
    const double total = params.sinks.empty()
                             ? lse
                             : LogAddExp(lse, double{params.sinks[static_cast<size_t>(head)]});
    for (int64_t d = 0; d < params.out.shape[2]; ++d) {
      double value = 0.0;
      for (const int32_t p : group) {
        const double part = partials.lse(p + offset, h);
        if (!std::isinf(part)) value += Weight(part, total) * partials.out(p + offset, h, d);
      }
      Store(params.out, row, head, d, value);
    }
    if (!params.lse.empty()) params.lse(row, head) = static_cast<float>(total);
  }
};

}  // namespace

std::unique_ptr<Backend> MakeRefBackend() {
  return std::make_unique<RefBackend>();
}

}  // namespace sparsemla
