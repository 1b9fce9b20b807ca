// AITER's plan: the serial v1_2 planner and the sizes of its buffers, for one-token rows, one KV
// head and page size 1 (fast mode, sparse). Facts: docs/schedules.md.
#include <algorithm>
#include <cstdint>

#include "core/require.h"
#include "plan/schedule.h"

namespace sparsemla {
namespace {

constexpr int32_t kHeadGroup = 16;     // heads of a virtual row where a kernel needs folding
constexpr int64_t kItemOverhead = 16;  // AITER counts an item as so many extra blocks

bool IsFp8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E4M3Fnuz;
}
bool IsFp8(CacheFormat format) {
  return IsPerTensorFp8(format) || format == CacheFormat::kFp8DsMla;
}

}  // namespace

Result<AiterBufferSizes> GetAiterBufferSizes(const AiterSizeParams& params) {
  SPARSEMLA_REQUIRE(
      params.num_heads >= 8 && params.num_heads <= kMaxNumHeads && params.num_heads % 8 == 0,
      "num_heads = ", params.num_heads, " is not a multiple of 8 in 8..", kMaxNumHeads);
  SPARSEMLA_REQUIRE(params.num_compute_units >= 1, "num_compute_units = ", params.num_compute_units,
                    " is less than 1");
  SPARSEMLA_REQUIRE(params.max_num_tokens >= 0, "max_num_tokens = ", params.max_num_tokens,
                    " is negative");
  const bool both_fp8 = IsFp8(params.q_dtype) && IsFp8(params.cache_format);
  const bool no_fp8 = !IsFp8(params.q_dtype) && !IsFp8(params.cache_format);
  const bool one_tile = (both_fp8 && (params.num_heads == 64 || params.num_heads == 128)) ||
                        (no_fp8 && params.target == AiterTarget::kGfx950 && params.num_heads >= 64);
  const int64_t tiles_per_row = one_tile ? 1 : (params.num_heads + kHeadGroup - 1) / kHeadGroup;
  const int64_t rows = params.max_num_tokens;
  const int64_t workers = params.num_compute_units;
  AiterBufferSizes sizes;
  sizes.work_indptr = workers + 1;
  sizes.work_info_set = (rows + workers - 1) * tiles_per_row;
  sizes.reduce_indptr = rows * tiles_per_row + 1;
  sizes.reduce_final_map = rows * tiles_per_row;
  sizes.reduce_partial_map = std::min(rows + workers - 1, 2 * (workers - 1)) * tiles_per_row;
  return sizes;
}

namespace plan {

int32_t AiterFold(AiterTarget target, int32_t num_heads, DType q_dtype, CacheFormat cache_format) {
  if (num_heads < kHeadGroup || num_heads > kMaxNumHeads || num_heads % kHeadGroup != 0) return 0;
  const bool both_fp8 = IsFp8(q_dtype) && IsFp8(cache_format);
  const bool no_fp8 = !IsFp8(q_dtype) && !IsFp8(cache_format);
  const bool native = num_heads == kHeadGroup ||
                      (both_fp8 && (num_heads == 64 || num_heads == 128)) ||
                      (target == AiterTarget::kGfx950 && (no_fp8 || (both_fp8 && num_heads == 32)));
  return native ? 1 : num_heads / kHeadGroup;
}

void ScheduleAiter(const ScheduleParams& params, ScheduleBuffers& buffers) {
  const int32_t* const kv_indptr = params.kv_indptr.data();
  const int32_t fold = params.fold;
  const int32_t num_rows = params.num_rows * fold;  // virtual
  const auto blocks_of = [&](int32_t v) {
    const int32_t row = v / fold;
    return (kv_indptr[row + 1] - kv_indptr[row] + kKeysPerBlock - 1) / kKeysPerBlock;
  };

  int64_t sum = 0;
  for (int32_t row = 0; row < params.num_rows; ++row) sum += blocks_of(row * fold);
  sum = (sum + params.num_rows * kItemOverhead) * fold;
  // The cap limits the number of workers, not the pieces of a row.
  const int64_t splits =
      params.max_splits < 0
          ? params.num_compute_units
          : std::min<int64_t>(params.num_compute_units, int64_t{params.max_splits} * num_rows);
  const int64_t payload = splits == 0 ? 0 : (sum + splits - 1) / splits + kItemOverhead;

  WorkItem* item = buffers.work_items.data();
  int32_t* const reduce_indptr = buffers.reduce_indptr.data();
  int32_t v = 0;
  int32_t row = 0;           // v / fold
  int32_t head_group = 0;    // v % fold
  int32_t done = 0;          // blocks of row v that are planned
  int32_t pieces = 0;        // items of row v so far
  int32_t num_partials = 0;  // handed out in walk order
  buffers.work_indptr[0] = 0;
  reduce_indptr[0] = 0;
  for (int32_t worker = 0; worker < params.num_compute_units; ++worker) {
    int64_t room = payload;
    while (v < num_rows) {
      const int32_t begin = kv_indptr[row] + done * kKeysPerBlock;
      const int32_t row_end = kv_indptr[row + 1];
      const int32_t left = (row_end - begin + kKeysPerBlock - 1) / kKeysPerBlock;
      if (room >= left + kItemOverhead) {
        *item++ = {v, pieces == 0 ? -1 : num_partials++, v, v + 1, begin, row_end, 0, 0};
        reduce_indptr[v + 1] = num_partials;
        room -= left + kItemOverhead;
        ++v;
        if (++head_group == fold) {
          head_group = 0;
          ++row;
        }
        done = 0;
        pieces = 0;
        continue;
      }
      if (room > kItemOverhead) {
        const int32_t take = static_cast<int32_t>(room - kItemOverhead);
        const int32_t end = begin + take * kKeysPerBlock;
        *item++ = {v, num_partials++, v, v + 1, begin, end, row_end - end, 0};
        done += take;
        ++pieces;
      }
      break;
    }
    buffers.work_indptr[static_cast<size_t>(worker) + 1] =
        static_cast<int32_t>(item - buffers.work_items.data());
  }
  std::fill(reduce_indptr + v + 1, reduce_indptr + buffers.reduce_indptr.size(), num_partials);
  buffers.num_work_items = static_cast<int32_t>(item - buffers.work_items.data());
  buffers.num_partials = num_partials;
}

}  // namespace plan
}  // namespace sparsemla
