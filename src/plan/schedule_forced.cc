// The schedule of PlanCapacity::force_splits: any cut on demand, so that tests reach every merge.
#include <algorithm>
#include <cstdint>

#include "plan/schedule.h"

namespace sparsemla::plan {
namespace {

int32_t ForcedPieces(int32_t num_keys, int32_t force_splits) {
  return std::max(1, std::min(num_keys, force_splits));
}

}  // namespace

void ScheduleForced(const ScheduleParams& params, ScheduleBuffers& buffers) {
  const std::span<const int32_t> kv_indptr = params.kv_indptr;
  std::span<int32_t> reduce_indptr = buffers.reduce_indptr;
  int32_t num_items = 0;
  int32_t num_partials = 0;
  reduce_indptr[0] = 0;
  for (int32_t row = 0; row < params.num_rows; ++row) {
    const auto r = static_cast<size_t>(row);
    const int32_t num_keys = kv_indptr[r + 1] - kv_indptr[r];
    const int32_t pieces = ForcedPieces(num_keys, params.force_splits);
    const auto end_of = [&](int32_t piece) {  // in the row
      return static_cast<int32_t>(int64_t{num_keys} * piece / pieces);
    };
    for (int32_t piece = 0; piece < pieces; ++piece) {
      WorkItem& item = buffers.work_items[static_cast<size_t>(num_items++)];
      item = {.batch_idx = row,
              .partial_row = pieces == 1 ? -1 : num_partials++,
              .row_begin = row,
              .row_end = row + 1,
              .kv_begin = kv_indptr[r] + end_of(piece),
              .kv_end = kv_indptr[r] + end_of(piece + 1),
              .kv_offset = num_keys - end_of(piece + 1)};
    }
    reduce_indptr[r + 1] = num_partials;
  }
  std::fill(reduce_indptr.begin() + params.num_rows + 1, reduce_indptr.end(), num_partials);
  for (int32_t worker = 0; worker <= params.num_compute_units; ++worker) {
    buffers.work_indptr[static_cast<size_t>(worker)] =
        static_cast<int32_t>(int64_t{num_items} * worker / params.num_compute_units);
  }
  buffers.num_work_items = num_items;
  buffers.num_partials = num_partials;
}

}  // namespace sparsemla::plan
