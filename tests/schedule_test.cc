// What holds for the schedules of all steps: nothing lost, nothing twice, balanced, cut no finer
// than allowed.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>

#include "tests/plan_testing.h"

namespace sparsemla {
namespace {

using namespace plan_testing;  // NOLINT: the helpers of these tests

int32_t NumPieces(const Plan& plan, int32_t row) {
  const auto& items = plan.schedule().work_items;
  return static_cast<int32_t>(std::count_if(
      items.begin(), items.end(), [&](const WorkItem& item) { return item.row_begin == row; }));
}

// Calls `check(plan)` for many random steps and limits of one schedule.
template <typename Check>
void ForRandomPlans(ScheduleKind kind, bool batch_invariant, uint32_t seed, Check&& check) {
  constexpr std::array kComputeUnits = {1, 2, 3, 8, 32, 80, 132, 304};
  Random random(seed);
  for (int32_t limits = 0; limits < 60; ++limits) {
    PlanCapacity capacity =
        MakeCapacity(kComputeUnits[static_cast<size_t>(random(0, kComputeUnits.size() - 1))],
                     kind == ScheduleKind::kAiter ? 16 * random(1, 8) : random(1, 128));
    capacity.schedule = kind;
    capacity.batch_invariant = batch_invariant;
    capacity.aiter_target = random.OneIn(2) ? AiterTarget::kGfx942 : AiterTarget::kGfx950;
    capacity.max_splits = random(-1, 3) * random(1, 8);
    capacity.max_splits = std::max(capacity.max_splits, -1);
    capacity.topk_tokens = random.OneIn(3) ? random(1, 600) : 2048;
    Plan plan = CreatePlan(capacity);
    for (int32_t step = 0; step < 40; ++step) {
      const Lengths lengths = RandomLengths(random, 900, random.OneIn(2) ? 20 : 300);
      PlanParams params = MakeParams(lengths, capacity);
      if (random.OneIn(4)) params.num_tokens = lengths.query_start_loc.back() + random(0, 100);
      if (random.OneIn(3)) params.topk_tokens = random(1, capacity.topk_tokens);
      if (random.OneIn(4)) params.q_dtype = DType::kFloat8E4M3;
      if (random.OneIn(4)) params.cache_format = CacheFormat::kFp8E4M3;
      const Result<bool> built = plan.Build(params);
      ASSERT_TRUE(built.ok()) << built.status().message();
      check(plan);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// The whole list of checks is FirstInconsistency: every row-slot once and in order, partials and
// reduce maps, offsets, monotone buffers, bounds of the buffers.
TEST(BalancedSchedule, CoversEveryRowSlotOnceWithConsistentMaps) {
  ForRandomPlans(ScheduleKind::kBalanced, false, 1,
                 [](const Plan& plan) { EXPECT_EQ(FirstInconsistency(plan), ""); });
}

TEST(BalancedSchedule, CoversEveryRowSlotOnceInBatchInvariantMode) {
  ForRandomPlans(ScheduleKind::kBalanced, true, 2,
                 [](const Plan& plan) { EXPECT_EQ(FirstInconsistency(plan), ""); });
}

// A57 of the serial planner's kind: no empty row is dropped, whatever the folding.
TEST(AiterSchedule, CoversEveryRowSlotOnceWithConsistentMaps) {
  ForRandomPlans(ScheduleKind::kAiter, false, 3,
                 [](const Plan& plan) { EXPECT_EQ(FirstInconsistency(plan), ""); });
}

TEST(BalancedSchedule, CutsNoRowFinerThanTheCapAndTheLeastPiece) {
  ForRandomPlans(ScheduleKind::kBalanced, false, 4, [](const Plan& plan) {
    std::map<int32_t, int32_t> pieces;
    for (const WorkItem& item : plan.schedule().work_items) {
      ++pieces[item.row_begin];
      if (item.partial_row >= 0) {
        EXPECT_GE(plan::Blocks(item.kv_end - item.kv_begin), plan::kMinPieceBlocks);
      }
      if (item.kv_offset != 0) {
        EXPECT_EQ((item.kv_end - item.kv_begin) % plan::kKeysPerBlock, 0);
      }
    }
    const int32_t cap = plan.max_splits() < 0 ? INT32_MAX : plan.max_splits();
    for (const auto& [row, count] : pieces) EXPECT_LE(count, cap) << "row " << row;
  });
}

TEST(BalancedSchedule, MakesAtMostOneCutPerWorker) {
  ForRandomPlans(ScheduleKind::kBalanced, false, 5, [](const Plan& plan) {
    const Schedule& schedule = plan.schedule();
    for (size_t w = 0; w + 1 < schedule.work_indptr.size(); ++w) {
      for (int32_t i = schedule.work_indptr[w]; i + 1 < schedule.work_indptr[w + 1]; ++i) {
        EXPECT_EQ(schedule.work_items[static_cast<size_t>(i)].kv_offset, 0);
      }
    }
  });
}

// The bound that holds for any step at all: the average, a row and one cut's overhead.
TEST(BalancedSchedule, NeverExceedsTheAverageByMoreThanOneRow) {
  for (const bool invariant : {false, true}) {
    ForRandomPlans(ScheduleKind::kBalanced, invariant, 6, [&](const Plan& plan) {
      int64_t total = 0;
      int64_t longest = 0;
      for (size_t row = 0; row + 1 < plan.kv_indptr().size(); ++row) {
        const int32_t keys = plan.kv_indptr()[row + 1] - plan.kv_indptr()[row];
        const int32_t pieces = invariant ? plan::InvariantPieces(keys, plan.max_splits()) : 1;
        const int64_t cost =
            plan::ItemCost(plan::Blocks(keys)) + (pieces - 1) * plan::kItemOverhead;
        total += cost;
        longest = std::max(longest, cost);
      }
      const int64_t workers = plan.capacity().num_compute_units;
      const PlanCosts costs = ComputePlanCosts(plan);
      EXPECT_LE(costs.max, (total + workers - 1) / workers + longest + plan::kItemOverhead);
      EXPECT_GE(costs.max, costs.lower_bound);
    });
  }
}

// Prompt lengths as in the Mooncake conversation trace: log-linear between its quantiles.
int32_t ConversationLength(Random& random) {
  constexpr std::array<std::pair<double, double>, 9> kQuantiles = {{{0, 891},
                                                                    {.05, 902},
                                                                    {.1, 1000},
                                                                    {.25, 2787},
                                                                    {.5, 8450},
                                                                    {.75, 17071},
                                                                    {.9, 29265},
                                                                    {.95, 47816},
                                                                    {1, 121924}}};
  const double u = random(0, 1 << 20) / static_cast<double>(1 << 20);
  size_t i = 1;
  while (kQuantiles[i].first < u) ++i;
  const auto [u0, low] = kQuantiles[i - 1];
  const auto [u1, high] = kQuantiles[i];
  return static_cast<int32_t>(low * std::pow(high / low, (u - u0) / (u1 - u0)));
}

void AddDecodes(Random& random, int32_t count, int32_t longest_query, Lengths& lengths) {
  for (int32_t r = 0; r < count; ++r) {
    lengths.Add(random(1, longest_query), ConversationLength(random) + random(0, 400));
  }
}

// A token budget filled with the next chunks of waiting prompts.
void AddPrefills(Random& random, int32_t budget, Lengths& lengths) {
  while (budget > 0) {
    const int32_t prompt = ConversationLength(random);
    const int32_t done = std::min(random.OneIn(3) ? random(0, prompt / 512) * 512 : 0, prompt - 1);
    const int32_t query_len = std::min(budget, prompt - done);
    lengths.Add(query_len, done + query_len);
    budget -= query_len;
  }
}

TEST(BalancedSchedule, StaysWithin15PercentOfTheLowerBoundOnServingTraffic) {
  Random random(7);
  for (const int32_t workers : {2, 8, 32, 64, 132, 256, 304}) {
    PlanCapacity capacity = MakeCapacity(workers);
    capacity.max_num_tokens = 10000;
    Plan plan = CreatePlan(capacity);
    const auto expect_balanced = [&](const char* what, const Lengths& lengths) {
      ASSERT_TRUE(plan.Build(MakeParams(lengths, capacity)).ok());
      const PlanCosts costs = ComputePlanCosts(plan);
      EXPECT_LE(costs.imbalance(), 0.15)
          << what << ", " << lengths.seq_lens.size() << " requests on " << workers
          << " workers: max " << costs.max << ", lower bound " << costs.lower_bound;
    };
    for (int32_t step = 0; step < 150; ++step) {
      Lengths decode, verify, prefill, mixed;
      AddDecodes(random, random.OneIn(2) ? random(1, 24) : random(25, 256), 1, decode);
      AddDecodes(random, random(1, 128), 4, verify);
      AddPrefills(random, 512 << random(0, 4), prefill);
      AddDecodes(random, random(1, 128), 1, mixed);
      AddPrefills(random, 512 << random(0, 3), mixed);
      expect_balanced("decode", decode);
      expect_balanced("verify", verify);
      expect_balanced("prefill", prefill);
      expect_balanced("mixed", mixed);
    }
  }
}

TEST(BalancedSchedule, DoesNotCutRowsThatDivideEvenly) {
  const Plan plan = PlanOf(Lengths::OfRows(std::vector<int32_t>(320, 2048)), MakeCapacity(32));
  EXPECT_EQ(plan.schedule().num_partials, 0);
  EXPECT_EQ(ComputePlanCosts(plan).imbalance(), 0);
}

TEST(BalancedSchedule, DoesNotCutForARemainderThatGainsLittle) {
  // 20 rows each, and one row more: cutting 31 rows would gain less than 5 %.
  const Plan plan = PlanOf(Lengths::OfRows(std::vector<int32_t>(641, 2048)), MakeCapacity(32));
  EXPECT_EQ(plan.schedule().num_partials, 0);
}

TEST(BalancedSchedule, SpreadsOneRowOverAllWorkersThatTheCapAllows) {
  const Lengths one = Lengths::OfRows({2048});
  PlanCapacity capacity = MakeCapacity(304);
  EXPECT_EQ(NumPieces(PlanOf(one, capacity), 0), 16);  // DefaultMaxSplits
  capacity.max_splits = 5;
  EXPECT_EQ(NumPieces(PlanOf(one, capacity), 0), 5);
  capacity.max_splits = 1;
  EXPECT_EQ(NumPieces(PlanOf(one, capacity), 0), 1);
  capacity.max_splits = -1;  // pieces of 64 keys
  EXPECT_EQ(NumPieces(PlanOf(one, capacity), 0), 32);
  capacity.num_compute_units = 8;
  EXPECT_EQ(NumPieces(PlanOf(one, capacity), 0), 8);
}

TEST(BalancedSchedule, CapsTheLongRowAmongShortOnesWhereAiterDoesNot) {
  const Lengths lengths = Lengths::OfRows({1, 1, 1, 1, 1, 1, 1, 2048});
  PlanCapacity capacity = MakeCapacity(304);
  capacity.max_splits = 16;
  EXPECT_EQ(NumPieces(PlanOf(lengths, capacity), 7), 16);
  capacity.schedule = ScheduleKind::kAiter;
  EXPECT_EQ(NumPieces(PlanOf(lengths, capacity), 7), 43);
}

std::vector<std::pair<int32_t, int32_t>> CutsOf(const Plan& plan, int32_t row) {
  std::vector<std::pair<int32_t, int32_t>> cuts;
  const int32_t begin = plan.kv_indptr()[static_cast<size_t>(row)];
  for (const WorkItem& item : plan.schedule().work_items) {
    if (item.row_begin == row) cuts.emplace_back(item.kv_begin - begin, item.kv_end - begin);
  }
  return cuts;
}

// A65: a row alone is cut as among others.
TEST(BatchInvariantSchedule, CutsARowTheSameWayAloneAndAmongOthers) {
  Random random(8);
  PlanCapacity capacity = MakeCapacity(132);
  capacity.batch_invariant = true;
  Plan alone = CreatePlan(capacity);
  for (int32_t step = 0; step < 50; ++step) {
    std::vector<int32_t> rows(64);
    for (int32_t& keys : rows) keys = random(0, 3000);
    const Plan together = PlanOf(Lengths::OfRows(rows), capacity);
    for (int32_t row = 0; row < 64; ++row) {
      const Lengths one = Lengths::OfRows({rows[static_cast<size_t>(row)]});
      ASSERT_TRUE(alone.Build(MakeParams(one, capacity)).ok());
      ASSERT_EQ(CutsOf(alone, 0), CutsOf(together, row));
    }
  }
}

TEST(BatchInvariantSchedule, CutsRowsIntoPiecesOfAbout512KeysUpToTheCap) {
  PlanCapacity capacity = MakeCapacity(2);
  capacity.batch_invariant = true;
  const Plan plan = PlanOf(Lengths::OfRows({0, 512, 513, 2048}), capacity);
  EXPECT_EQ(NumPieces(plan, 0), 1);
  EXPECT_EQ(NumPieces(plan, 1), 1);
  EXPECT_EQ(NumPieces(plan, 2), 2);
  EXPECT_EQ(NumPieces(plan, 3), 4);
}

// A11: padding rows keep their item, so that they are written, and do not upset the balance of the
// live ones.
TEST(BalancedSchedule, BalancesLiveRowsAmongManyEmptyOnes) {
  std::vector<int32_t> rows(1024, 0);
  std::fill_n(rows.begin(), 64, 2048);
  for (const int32_t workers : {4, 8, 16, 32}) {
    const Plan plan = PlanOf(Lengths::OfRows(rows), MakeCapacity(workers));
    int64_t most_keys = 0;
    for (size_t w = 0; w < static_cast<size_t>(workers); ++w) {
      int64_t keys = 0;
      for (int32_t i = plan.schedule().work_indptr[w]; i < plan.schedule().work_indptr[w + 1];
           ++i) {
        const WorkItem& item = plan.schedule().work_items[static_cast<size_t>(i)];
        keys += item.kv_end - item.kv_begin;
      }
      most_keys = std::max(most_keys, keys);
    }
    EXPECT_LE(static_cast<double>(most_keys), 1.3 * 64 * 2048 / workers) << workers << " workers";
  }
}

TEST(Schedules, GiveEveryRowAnItemWhenAllAreEmpty) {
  for (const ScheduleKind kind : {ScheduleKind::kBalanced, ScheduleKind::kAiter}) {
    PlanCapacity capacity = MakeCapacity(80);
    capacity.schedule = kind;
    const Plan plan = PlanOf(Lengths::OfRows(std::vector<int32_t>(300, 0)), capacity);
    EXPECT_EQ(plan.schedule().work_items.size(), 300u);
    EXPECT_EQ(FirstInconsistency(plan), "");
  }
}

// A63: every head count, verify width and format gets a plan or a reason.
TEST(Schedules, AnswerEveryHeadCountWithAPlanOrAReason) {
  for (const ScheduleKind kind : {ScheduleKind::kBalanced, ScheduleKind::kAiter}) {
    PlanCapacity capacity = MakeCapacity(304, 128);
    capacity.schedule = kind;
    Plan plan = CreatePlan(capacity);
    for (int32_t heads = 1; heads <= 128; ++heads) {
      for (int32_t next_n = 1; next_n <= 8; ++next_n) {
        Lengths lengths;
        for (const int32_t context : {0, 7, 5000}) lengths.Add(next_n, context + next_n);
        for (const CacheFormat format : {CacheFormat::kBFloat16, CacheFormat::kFp8E4M3Fnuz}) {
          PlanParams params = MakeParams(lengths, capacity);
          params.dims.num_heads = heads;
          params.cache_format = format;
          const Result<bool> built = plan.Build(params);
          if (kind == ScheduleKind::kAiter &&
              heads % 16 != 0) {  // A13: refused, not padded silently
            EXPECT_EQ(built.status().code(), StatusCode::kUnsupported);
            EXPECT_NE(built.status().message().find("num_heads = " + std::to_string(heads)),
                      std::string::npos);
            continue;
          }
          ASSERT_TRUE(built.ok()) << built.status().message();
          ASSERT_EQ(FirstInconsistency(plan), "") << heads << " heads, " << next_n << " tokens";
        }
      }
    }
  }
}

TEST(AiterSchedule, FoldsHeadsForTheFormatsThatAreRun) {
  const auto fold = [](AiterTarget target, int32_t heads, bool fp8_q, bool fp8_cache) {
    return plan::AiterFold(target, heads, fp8_q ? DType::kFloat8E4M3 : DType::kBFloat16,
                           fp8_cache ? CacheFormat::kFp8E4M3 : CacheFormat::kBFloat16);
  };
  constexpr AiterTarget k942 = AiterTarget::kGfx942;
  constexpr AiterTarget k950 = AiterTarget::kGfx950;
  EXPECT_EQ(fold(k942, 16, false, false), 1);
  EXPECT_EQ(fold(k942, 32, false, false), 2);
  EXPECT_EQ(fold(k942, 128, false, false), 8);
  EXPECT_EQ(fold(k942, 128, true, true), 1);
  EXPECT_EQ(fold(k942, 64, true, true), 1);
  EXPECT_EQ(fold(k942, 32, true, true), 2);
  EXPECT_EQ(fold(k942, 64, false, true), 4);
  EXPECT_EQ(fold(k950, 48, false, false), 1);
  EXPECT_EQ(fold(k950, 32, true, true), 1);
  EXPECT_EQ(fold(k950, 48, true, true), 3);
  EXPECT_EQ(fold(k950, 128, false, true), 8);
  EXPECT_EQ(fold(k950, 8, false, false), 0);
}

TEST(AiterBufferSizes, AreThoseOfTheReferenceBackend) {
  AiterSizeParams params;
  params.num_compute_units = 304;
  params.max_num_tokens = 8192;
  params.num_heads = 16;
  Result<AiterBufferSizes> sizes = GetAiterBufferSizes(params);
  EXPECT_EQ(sizes->work_info_set, 8495);
  EXPECT_EQ(sizes->reduce_partial_map, 606);
  params.num_heads = 128;
  sizes = GetAiterBufferSizes(params);
  EXPECT_EQ(sizes->work_info_set, 67960);
  EXPECT_EQ(sizes->reduce_partial_map, 4848);
  EXPECT_EQ(sizes->reduce_indptr, 65537);
  params.target = AiterTarget::kGfx950;
  params.num_compute_units = 256;
  EXPECT_EQ(GetAiterBufferSizes(params)->work_info_set, 8447);
  EXPECT_EQ(GetAiterBufferSizes(params)->reduce_partial_map, 510);
  params.cache_format = CacheFormat::kFp8E4M3;
  EXPECT_EQ(GetAiterBufferSizes(params)->work_info_set, 67576);
  EXPECT_EQ(GetAiterBufferSizes(params)->reduce_partial_map, 4080);
  params.num_heads = 20;
  EXPECT_EQ(GetAiterBufferSizes(params).status().message(),
            "num_heads = 20 is not a multiple of 8 in 8..128");
}

TEST(DefaultMaxSplits, IsThePowerOfTwoOfTheReferenceBackend) {
  EXPECT_EQ(DefaultMaxSplits(16, 2048, 304), 1);
  EXPECT_EQ(DefaultMaxSplits(300, 2048, 304), 2);
  EXPECT_EQ(DefaultMaxSplits(500, 2048, 304), 4);
  EXPECT_EQ(DefaultMaxSplits(2048, 2048, 304), 16);
  EXPECT_EQ(DefaultMaxSplits(1 << 30, 2048, 304), 16);
  EXPECT_EQ(DefaultMaxSplits(1 << 30, 2048, 10), 10);
  EXPECT_EQ(DefaultMaxSplits(0, 2048, 304), 1);
  EXPECT_EQ(DefaultMaxSplits(INT32_MAX, INT32_MAX, 65536), 65536);
}

// Partial buffers follow the cap and the workers, not rows * workers (spec/planner.md 17.3, 17.4).
TEST(PartialBound, FollowsTheWorkersAndTheCap) {
  PlanCapacity capacity = MakeCapacity(304);
  EXPECT_EQ(plan::MaxPartialRows(capacity), 606);
  capacity.schedule = ScheduleKind::kAiter;
  EXPECT_EQ(plan::MaxPartialRows(capacity), 606);
  capacity.max_num_tokens = 4;
  capacity.max_splits = 2;
  EXPECT_EQ(plan::MaxPartialRows(capacity), 11);  // 8 workers, 4 rows
  capacity.schedule = ScheduleKind::kBalanced;
  EXPECT_EQ(plan::MaxPartialRows(capacity), 8);
  capacity.max_splits = 1;
  EXPECT_EQ(plan::MaxPartialRows(capacity), 0);
}

}  // namespace
}  // namespace sparsemla
