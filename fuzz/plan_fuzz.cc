// Any limits and lengths: a clean error, or a plan that covers every key of every row exactly once
// and stays inside the sizes told beforehand.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "plan/schedule.h"
#include "sparsemla/plan.h"

namespace {

using namespace sparsemla;

#define REQUIRE(condition)                                    \
  do {                                                        \
    if (!(condition)) {                                       \
      std::fprintf(stderr, "%d: %s\n", __LINE__, #condition); \
      __builtin_trap();                                       \
    }                                                         \
  } while (false)

PlanCapacity TakeCapacity(FuzzedDataProvider& input) {
  PlanCapacity capacity;
  capacity.schedule = input.PickValueInArray({ScheduleKind::kBalanced, ScheduleKind::kAiter});
  capacity.num_compute_units = input.ConsumeIntegralInRange(-1, 400);
  capacity.max_num_tokens = input.ConsumeIntegralInRange(-1, 300);
  capacity.max_num_reqs = input.ConsumeIntegralInRange(-1, 300);
  capacity.topk_tokens = input.ConsumeIntegralInRange(-1, 5000);
  capacity.dims.num_heads = input.ConsumeIntegralInRange(-1, 129);
  capacity.max_splits = input.ConsumeIntegralInRange(-2, 40);
  capacity.force_splits = input.ConsumeBool() ? input.ConsumeIntegralInRange(-1, 20) : 0;
  capacity.batch_invariant = input.ConsumeBool();
  capacity.aiter_target = input.PickValueInArray({AiterTarget::kGfx942, AiterTarget::kGfx950});
  return capacity;
}

struct Step {
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> seq_lens;
  PlanParams params;
};

Step TakeStep(FuzzedDataProvider& input, const PlanCapacity& capacity) {
  Step step;
  const int num_reqs = input.ConsumeIntegralInRange(0, 64);
  for (int r = 0; r < num_reqs; ++r) {
    const auto query_len = input.ConsumeIntegralInRange<int32_t>(-1, 9);
    step.query_start_loc.push_back(step.query_start_loc.back() + query_len);
    step.seq_lens.push_back(input.ConsumeBool() ? input.ConsumeIntegral<int32_t>()
                                                : input.ConsumeIntegralInRange(0, 6000));
  }
  step.params.num_tokens = input.ConsumeBool() ? -1 : input.ConsumeIntegralInRange(-2, 301);
  step.params.dims = capacity.dims;
  step.params.dims.num_heads = input.ConsumeIntegralInRange(0, 129);
  step.params.q_dtype = input.PickValueInArray(
      {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E4M3Fnuz});
  step.params.cache_format =
      static_cast<CacheFormat>(input.ConsumeIntegralInRange(0, kNumCacheFormats - 1));
  step.params.topk_tokens = input.ConsumeIntegralInRange(0, 5001);
  step.params.max_splits = input.ConsumeIntegralInRange(-2, 40);
  step.params.reorder_batch_threshold = input.ConsumeIntegralInRange(-1, 9);
  return step;
}

void CheckRows(const Plan& plan) {
  const auto kv_indptr = plan.kv_indptr();
  REQUIRE(static_cast<int32_t>(kv_indptr.size()) == plan.num_tokens() + 1);
  REQUIRE(kv_indptr.front() == 0);
  for (size_t row = 0; row + 1 < kv_indptr.size(); ++row) {
    const int32_t keys = kv_indptr[row + 1] - kv_indptr[row];
    REQUIRE(keys >= 0 && keys <= plan.topk_tokens());
    const int32_t req = plan.req_id_per_token()[row];
    REQUIRE(req >= 0 && req < std::max(plan.num_reqs(), 1));
  }
  for (size_t i = kv_indptr.size(); i < plan.kv_indptr_padded().size(); ++i) {
    REQUIRE(plan.kv_indptr_padded()[i] == kv_indptr.back());
  }
}

// Items of a virtual row follow each other from its first key to its last, and its partials are
// merged in that order.
void CheckVirtualRow(const Plan& plan, size_t virtual_row, std::vector<WorkItem> items) {
  const Schedule& schedule = plan.schedule();
  const size_t row = virtual_row / static_cast<size_t>(schedule.fold);
  const int32_t end = plan.kv_indptr()[row + 1];
  std::sort(items.begin(), items.end(),
            [](const WorkItem& a, const WorkItem& b) { return a.kv_begin < b.kv_begin; });
  REQUIRE(!items.empty());
  int32_t covered = plan.kv_indptr()[row];
  for (const WorkItem& item : items) {
    REQUIRE(item.kv_begin == covered && item.kv_end >= item.kv_begin);
    REQUIRE(items.size() == 1 || item.kv_end > item.kv_begin);
    REQUIRE(item.kv_offset == end - item.kv_end);
    covered = item.kv_end;
  }
  REQUIRE(covered == end);

  const auto begin_partial = static_cast<size_t>(schedule.reduce_indptr[virtual_row]);
  const auto num_partials =
      static_cast<size_t>(schedule.reduce_indptr[virtual_row + 1]) - begin_partial;
  if (num_partials == 0) {
    REQUIRE(items.size() == 1 && items[0].partial_row == -1);
    return;
  }
  REQUIRE(num_partials == items.size());
  const RowRange group = schedule.reduce_final_map[virtual_row];
  REQUIRE(group.begin == static_cast<int32_t>(virtual_row) && group.end == group.begin + 1);
  for (size_t p = 0; p < num_partials; ++p) {
    REQUIRE(schedule.reduce_partial_map[begin_partial + p] == items[p].partial_row);
  }
  const bool capped = plan.capacity().schedule == ScheduleKind::kBalanced &&
                      plan.capacity().force_splits == 0 && plan.max_splits() > 0;
  REQUIRE(!capped || static_cast<int32_t>(items.size()) <= plan.max_splits());
}

void CheckSchedule(const Plan& plan) {
  const Schedule& schedule = plan.schedule();
  const PlanCapacity& capacity = plan.capacity();
  const auto num_items = static_cast<int64_t>(schedule.work_items.size());
  REQUIRE(schedule.num_compute_units == capacity.num_compute_units);
  REQUIRE(schedule.work_indptr.front() == 0 && schedule.work_indptr.back() == num_items);
  REQUIRE(std::is_sorted(schedule.work_indptr.begin(), schedule.work_indptr.end()));
  REQUIRE(num_items <= plan::MaxWorkItems(capacity));
  REQUIRE(schedule.num_partials <= plan::MaxPartialRows(capacity));
  REQUIRE(int64_t{schedule.num_partials} * schedule.heads_per_item <=
          plan::MaxPartialHeads(capacity));
  REQUIRE(schedule.fold * schedule.heads_per_item == plan.dims().num_heads);

  const auto num_rows = static_cast<size_t>(plan.num_tokens()) * static_cast<size_t>(schedule.fold);
  REQUIRE(schedule.reduce_indptr.size() == num_rows + 1);
  std::vector<std::vector<WorkItem>> items_of_row(num_rows);
  std::vector<bool> used(static_cast<size_t>(schedule.num_partials));
  for (const WorkItem& item : schedule.work_items) {
    const auto row = static_cast<size_t>(item.batch_idx);
    REQUIRE(item.batch_idx >= 0 && row < num_rows);
    REQUIRE(item.row_begin == item.batch_idx && item.row_end == item.batch_idx + 1);
    items_of_row[row].push_back(item);
    if (item.partial_row < 0) continue;
    const auto partial = static_cast<size_t>(item.partial_row);
    REQUIRE(partial < used.size() && !used[partial]);
    used[partial] = true;
  }
  for (size_t row = 0; row < num_rows; ++row) CheckVirtualRow(plan, row, items_of_row[row]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  const PlanCapacity capacity = TakeCapacity(input);
  Result<Plan> made = Plan::Create(capacity);
  if (!made.ok()) return 0;
  Plan& plan = made.value();
  for (int i = 0; i < 3; ++i) {
    Step step = TakeStep(input, capacity);
    step.params.query_start_loc = step.query_start_loc;
    step.params.seq_lens = step.seq_lens;
    const uint64_t generation = plan.generation();
    const Result<bool> built = plan.Build(step.params);
    if (!built.ok()) {
      REQUIRE(!built.status().message().empty() && plan.generation() == generation);
      continue;
    }
    REQUIRE(built.value() == (plan.generation() != generation));
    CheckRows(plan);
    CheckSchedule(plan);
    const PlanCosts costs = ComputePlanCosts(plan);
    REQUIRE(costs.max >= 0 && costs.lower_bound >= 0);
    const Result<bool> again = plan.Build(step.params);
    REQUIRE(again.ok() && !again.value());
  }
  return 0;
}
