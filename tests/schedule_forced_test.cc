// Plans with force_splits: the cut that is asked for, whatever it costs.
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "sparsemla/plan.h"

namespace sparsemla {
namespace {

Result<Plan> ForcedPlan(int32_t force_splits, const std::vector<int32_t>& lengths) {
  std::vector<int32_t> query_start_loc = {0};
  for (size_t row = 0; row < lengths.size(); ++row) {
    query_start_loc.push_back(static_cast<int32_t>(row) + 1);
  }
  const auto num_rows = static_cast<int32_t>(lengths.size());
  Result<Plan> plan = Plan::Create({.num_compute_units = 3,
                                    .max_num_tokens = num_rows,
                                    .max_num_reqs = num_rows,
                                    .dims = {.num_heads = 16},
                                    .force_splits = force_splits});
  if (!plan.ok()) return plan;
  const auto built = plan->Build(
      {.query_start_loc = query_start_loc, .seq_lens = lengths, .dims = {.num_heads = 16}});
  return built.ok() ? std::move(plan) : Result<Plan>(built.status());
}

TEST(ForcedScheduleTest, EveryRowHasThePiecesAskedForOrOneAKey) {
  const std::vector<int32_t> lengths = {100, 5, 1, 0, 2048};
  for (const int32_t splits : {1, 2, 5, 16}) {
    const auto plan = ForcedPlan(splits, lengths);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    std::map<int32_t, int32_t> pieces;
    for (const WorkItem& item : plan.value().schedule().work_items) ++pieces[item.batch_idx];
    for (size_t row = 0; row < lengths.size(); ++row) {
      EXPECT_EQ(pieces[static_cast<int32_t>(row)], std::max(1, std::min(splits, lengths[row])))
          << "row " << row << ", splits " << splits;
    }
  }
}

TEST(ForcedScheduleTest, PiecesFollowEachOtherAndDifferByOneKeyAtMost) {
  const auto plan = ForcedPlan(16, {100});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  int32_t covered = 0;
  for (const WorkItem& item : plan.value().schedule().work_items) {
    EXPECT_EQ(item.kv_begin, covered);
    EXPECT_EQ(item.kv_offset, 100 - item.kv_end);
    EXPECT_GE(item.kv_end - item.kv_begin, 100 / 16);
    EXPECT_LE(item.kv_end - item.kv_begin, 100 / 16 + 1);
    covered = item.kv_end;
  }
  EXPECT_EQ(covered, 100);
  EXPECT_EQ(plan.value().schedule().num_partials, 16);
}

TEST(ForcedScheduleTest, AiterAndNegativeCountsAreRefused) {
  EXPECT_EQ(ForcedPlan(-1, {1}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Plan::Create({.schedule = ScheduleKind::kAiter,
                          .num_compute_units = 1,
                          .max_num_tokens = 1,
                          .max_num_reqs = 1,
                          .dims = {.num_heads = 16},
                          .force_splits = 2})
                .status()
                .code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace sparsemla
