// Second step of planning: row ranges -> work items of every compute unit. Called by plan.cc; the
// tool and the tests also read the bounds.
#pragma once

#include <cstdint>
#include <span>

#include "sparsemla/plan.h"

namespace sparsemla::plan {

inline constexpr int32_t kKeysPerBlock = 16;  // granularity of cuts (AITER's kv_granularity)

// Preallocated arrays of a schedule and how much of them is in use. Both schedules hand out partial
// rows in walk order, rows in order and the pieces of a row in key order: reduce_partial_map is
// always 0, 1, 2, ... and reduce_final_map maps every virtual row to itself, so the plan writes
// those two once.
struct ScheduleBuffers {
  std::span<int32_t> work_indptr;    // [num_compute_units + 1]
  std::span<WorkItem> work_items;    // [MaxWorkItems]
  std::span<int32_t> reduce_indptr;  // [max virtual rows + 1]
  std::span<int32_t> cost_sums;      // [max rows + 1], scratch of the balanced schedule
  int32_t num_work_items = 0;
  int32_t num_partials = 0;
};

// What a schedule is made from.
struct ScheduleParams {
  std::span<const int32_t> kv_indptr;  // [num_rows + 1]
  int32_t num_rows = 0;
  int32_t num_compute_units = 0;
  int32_t max_splits = 0;  // < 0: uncapped; aiter: the planner's max_split_per_batch
  int32_t fold = 1;        // aiter: virtual rows per row
  bool batch_invariant = false;
  int32_t force_splits = 0;  // ScheduleForced only
};

// Virtual rows per row for AITER's kernels; 0 if they do not support the head count.
int32_t AiterFold(AiterTarget target, int32_t num_heads, DType q_dtype, CacheFormat cache_format);

// AITER's serial v1_2 planner with block size 1 and one-token rows. All of reduce_indptr is
// written, its tail with the total.
void ScheduleAiter(const ScheduleParams& params, ScheduleBuffers& buffers);

// Ours: docs/schedules.md.
void ScheduleBalanced(const ScheduleParams& params, ScheduleBuffers& buffers);

// Every row in min(force_splits, keys) pieces of nearly equal length, dealt to the workers in equal
// numbers; costs do not count.
void ScheduleForced(const ScheduleParams& params, ScheduleBuffers& buffers);

// Whether every limit is in its bounds; nothing is allocated before.
Status CheckCapacity(const PlanCapacity& capacity);
// The cap of a row's pieces that no step within the capacity exceeds; < 0: uncapped.
int32_t MaxSplitsOf(const PlanCapacity& capacity);

// Bounds over all steps within a capacity that has passed CheckCapacity; they size the buffers.
int64_t MaxVirtualRows(const PlanCapacity& capacity);
int64_t MaxWorkItems(const PlanCapacity& capacity);
// Bound of num_partials * heads_per_item, in heads: partial buffers hold so many rows of
// kv_lora_rank floats.
int64_t MaxPartialHeads(const PlanCapacity& capacity);
int64_t MaxPartialRows(const PlanCapacity& capacity);

}  // namespace sparsemla::plan
