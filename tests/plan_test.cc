// One step as a plan: row lengths, reuse, errors, addresses.
#include "sparsemla/plan.h"

#include <gtest/gtest.h>

#include <functional>

#include "tests/allocation_counter.h"
#include "tests/plan_testing.h"

namespace sparsemla {
namespace {

using namespace plan_testing;  // NOLINT: the helpers of these tests

std::vector<int32_t> RowLengths(const Plan& plan) {
  std::vector<int32_t> lengths;
  for (size_t row = 0; row + 1 < plan.kv_indptr().size(); ++row) {
    lengths.push_back(plan.kv_indptr()[row + 1] - plan.kv_indptr()[row]);
  }
  return lengths;
}

using Ints = std::vector<int32_t>;

// A61, A62: the rows of a request see growing lengths, for any number of rows per request.
TEST(PlanRows, SeeTheKeysUpToThemselves) {
  for (int32_t next_n = 1; next_n <= 8; ++next_n) {
    Lengths lengths;
    lengths.Add(next_n, 100);
    lengths.Add(next_n, next_n);
    const Plan plan = PlanOf(lengths, MakeCapacity(8));
    Ints want;
    for (int32_t j = 0; j < next_n; ++j) want.push_back(100 - next_n + j + 1);
    for (int32_t j = 0; j < next_n; ++j) want.push_back(j + 1);
    EXPECT_EQ(RowLengths(plan), want);
  }
}

TEST(PlanRows, SaturateAtTopk) {
  PlanCapacity capacity = MakeCapacity(8);
  capacity.topk_tokens = 4;
  Lengths lengths;
  lengths.Add(6, 6);     // ramp that saturates
  lengths.Add(3, 5);     // starts below, ends above
  lengths.Add(2, 1000);  // saturated
  const Plan plan = PlanOf(lengths, capacity);
  EXPECT_EQ(RowLengths(plan), (Ints{1, 2, 3, 4, 4, 4, 3, 4, 4, 4, 4}));
  EXPECT_EQ(Ints(plan.req_id_per_token().begin(), plan.req_id_per_token().end()),
            (Ints{0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2}));
}

TEST(PlanRows, EqualTheFormulaForRandomSteps) {
  Random random(11);
  PlanCapacity capacity = MakeCapacity(16);
  Plan plan = CreatePlan(capacity);
  for (int32_t step = 0; step < 500; ++step) {
    const Lengths lengths = RandomLengths(random, 900, 60);
    PlanParams params = MakeParams(lengths, capacity);
    params.topk_tokens = random.OneIn(2) ? random(1, 300) : 2048;
    params.num_tokens = lengths.query_start_loc.back() + random(0, 64);
    ASSERT_TRUE(plan.Build(params).ok());
    Ints rows, ids;
    for (size_t r = 0; r < lengths.seq_lens.size(); ++r) {
      const int32_t query_len = lengths.query_start_loc[r + 1] - lengths.query_start_loc[r];
      const int32_t seq_len = lengths.seq_lens[r];
      for (int32_t j = 0; j < query_len; ++j) {
        rows.push_back(seq_len == 0 ? 0
                                    : std::min(seq_len - query_len + j + 1, params.topk_tokens));
        ids.push_back(static_cast<int32_t>(r));
      }
    }
    rows.resize(static_cast<size_t>(params.num_tokens));
    ids.resize(static_cast<size_t>(params.num_tokens));
    ASSERT_EQ(RowLengths(plan), rows);
    ASSERT_EQ(Ints(plan.req_id_per_token().begin(), plan.req_id_per_token().end()), ids);
    const auto padded = plan.kv_indptr_padded();
    ASSERT_EQ(padded.size(), 1025u);
    for (size_t i = static_cast<size_t>(params.num_tokens); i < padded.size(); ++i) {
      ASSERT_EQ(padded[i], plan.num_kv_indices());
    }
  }
}

// The longest sums that int32 offsets can hold.
TEST(PlanRows, ReachTheLastOffsetThatFits) {
  PlanCapacity capacity = MakeCapacity(4);
  capacity.max_num_tokens = 46340;
  capacity.topk_tokens = 46340;
  Lengths ramp, saturated;
  ramp.Add(46340, 46340);
  saturated.Add(46340, INT32_MAX);
  EXPECT_EQ(PlanOf(ramp, capacity).num_kv_indices(), int64_t{46340} * 46341 / 2);
  const Plan plan = PlanOf(saturated, capacity);
  EXPECT_EQ(plan.num_kv_indices(), int64_t{46340} * 46340);
  EXPECT_EQ(FirstInconsistency(plan), "");
}

// A smaller step leaves nothing of a larger one behind.
TEST(PlanRows, ShrinkClearsTheTails) {
  const PlanCapacity capacity = MakeCapacity(8);
  Plan plan = PlanOf(Lengths::OfRows(Ints(500, 100)), capacity);
  const Lengths small = Lengths::OfRows({7, 9});
  PlanParams params = MakeParams(small, capacity);
  params.num_tokens = 600;
  ASSERT_TRUE(plan.Build(params).value());
  for (size_t row = 2; row < 600; ++row) EXPECT_EQ(plan.req_id_per_token()[row], 0);
  for (size_t row = 2; row < 1025; ++row) EXPECT_EQ(plan.kv_indptr_padded()[row], 16);
}

// A02: no rows, no requests.
TEST(PlanRows, MayBeNone) {
  for (const ScheduleKind kind : {ScheduleKind::kBalanced, ScheduleKind::kAiter}) {
    PlanCapacity capacity = MakeCapacity(8);
    capacity.schedule = kind;
    const Plan plan = PlanOf(Lengths(), capacity);
    EXPECT_TRUE(plan.built());
    EXPECT_EQ(plan.num_tokens(), 0);
    EXPECT_EQ(plan.num_kv_indices(), 0);
    EXPECT_EQ(FirstInconsistency(plan), "");
  }
}

TEST(PlanBatchSplit, FollowsTheReorderThreshold) {
  struct Expected {
    Ints query_lens;
    int32_t threshold;
    int32_t padding;
    BatchSplit split;
  };
  const Expected cases[] = {
      {{}, 1, 3, {0, 0, 3, 0}},
      {{1, 1, 1}, 1, 0, {3, 0, 3, 0}},
      {{1, 1, 1}, 1, 5, {3, 0, 8, 0}},         // padding counts as decode
      {{1, 4, 2}, 4, 0, {3, 0, 7, 0}},         // speculative rows are decodes
      {{5, 1}, 4, 0, {0, 2, 0, 6}},            // all from the first long one on
      {{1, 2, 100, 1}, 2, 6, {2, 2, 3, 107}},  // short ones after it too
      {{0, 1, 3}, 1, 0, {2, 1, 1, 3}},
  };
  for (const Expected& expected : cases) {
    Lengths lengths;
    for (const int32_t query_len : expected.query_lens) lengths.Add(query_len, 50 + query_len);
    const PlanCapacity capacity = MakeCapacity(8);
    PlanParams params = MakeParams(lengths, capacity);
    params.reorder_batch_threshold = expected.threshold;
    params.num_tokens = lengths.query_start_loc.back() + expected.padding;
    Plan plan = CreatePlan(capacity);
    ASSERT_TRUE(plan.Build(params).ok());
    EXPECT_EQ(plan.batch_split(), expected.split) << expected.query_lens.size() << " requests";
  }
}

class PlanReuse : public testing::Test {
 protected:
  PlanReuse() : capacity_(MakeCapacity(32, 64)), plan_(CreatePlan(capacity_)) {
    lengths_.Add(1, 5000);
    lengths_.Add(1, 300);
    lengths_.Add(1, 0);
    params_ = MakeParams(lengths_, capacity_);
    params_.dims.num_heads = 32;
    EXPECT_TRUE(plan_.Build(params_).value());
  }

  PlanCapacity capacity_;
  Plan plan_;
  Lengths lengths_;
  PlanParams params_;
};

TEST_F(PlanReuse, ChangesNothingForTheSameStep) {
  const PlanArrays before(plan_);
  const uint64_t fingerprint = plan_.fingerprint();
  EXPECT_FALSE(plan_.Build(params_).value());
  EXPECT_EQ(PlanArrays(plan_), before);
  EXPECT_EQ(plan_.fingerprint(), fingerprint);
  EXPECT_EQ(plan_.generation(), 1u);
}

// Longer contexts whose rows are all at the top-k differ in nothing but max_seq_len.
TEST_F(PlanReuse, CoversDecodesThatAreSaturated) {
  lengths_.seq_lens[0] = 5001;
  EXPECT_FALSE(plan_.Build(params_).value());
  EXPECT_EQ(plan_.max_seq_len(), 5001);
  lengths_.seq_lens[0] = 2048;
  EXPECT_FALSE(plan_.Build(params_).value());
  lengths_.seq_lens[0] = 2047;
  EXPECT_TRUE(plan_.Build(params_).value());
}

// A39, A66 and spec/planner.md 17.5-17.9: each of these alone demands a new plan.
TEST_F(PlanReuse, EndsWithAnyChangeThatMatters) {
  const std::pair<const char*, std::function<void()>> changes[] = {
      {"a length", [&] { lengths_.seq_lens[1] = 301; }},
      {"a dummy request", [&] { lengths_.seq_lens[1] = 0; }},
      {"a dummy request of the same row length", [&] { lengths_.seq_lens[2] = 1; }},
      {"query lengths",
       [&] {
         lengths_.query_start_loc = {0, 1, 1, 3};
       }},
      {"padding", [&] { params_.num_tokens = 4; }},
      {"the number of requests",
       [&] {
         params_.query_start_loc = params_.query_start_loc.first(3);
         params_.seq_lens = params_.seq_lens.first(2);
         params_.num_tokens = 3;
       }},
      {"the head count", [&] { params_.dims.num_heads = 16; }},
      {"the query type", [&] { params_.q_dtype = DType::kFloat16; }},
      {"the cache format", [&] { params_.cache_format = CacheFormat::kFp8DsMla; }},
      {"the top-k", [&] { params_.topk_tokens = 2047; }},
      {"the cap", [&] { params_.max_splits = 3; }},
      {"the threshold", [&] { params_.reorder_batch_threshold = 2; }},
  };
  const Lengths lengths = lengths_;
  const PlanParams params = params_;
  for (const auto& [what, change] : changes) {
    lengths_ = lengths;
    params_ = params;
    params_.query_start_loc = lengths_.query_start_loc;
    params_.seq_lens = lengths_.seq_lens;
    ASSERT_TRUE(plan_.Build(params_).ok());
    const uint64_t generation = plan_.generation();
    const uint64_t fingerprint = plan_.fingerprint();
    change();
    if (params_.seq_lens.size() == 3) {
      params_.query_start_loc = lengths_.query_start_loc;
      params_.seq_lens = lengths_.seq_lens;
    }
    const Result<bool> changed = plan_.Build(params_);
    ASSERT_TRUE(changed.ok()) << what << ": " << changed.status().message();
    EXPECT_TRUE(changed.value()) << what;
    EXPECT_EQ(plan_.generation(), generation + 1) << what;
    EXPECT_NE(plan_.fingerprint(), fingerprint) << what;
  }
}

TEST(PlanFingerprint, IsEqualForEqualStepsAndLimitsOnly) {
  const Lengths lengths = Lengths::OfRows({100, 2000, 5});
  PlanCapacity capacity = MakeCapacity(32);
  const uint64_t fingerprint = PlanOf(lengths, capacity).fingerprint();
  EXPECT_EQ(PlanOf(lengths, capacity).fingerprint(), fingerprint);
  // The same on every machine: a stored value.
  EXPECT_EQ(fingerprint, 9571313613679989550u);
  PlanCapacity other = capacity;
  other.num_compute_units = 33;
  EXPECT_NE(PlanOf(lengths, other).fingerprint(), fingerprint);
  other = capacity;
  other.schedule = ScheduleKind::kAiter;
  EXPECT_NE(PlanOf(lengths, other).fingerprint(), fingerprint);
  other = capacity;
  other.batch_invariant = true;
  EXPECT_NE(PlanOf(lengths, other).fingerprint(), fingerprint);
}

TEST(Plan, IsTheSameHoweverOftenAndWhateverWasPlannedBefore) {
  Random random(12);
  for (const ScheduleKind kind : {ScheduleKind::kBalanced, ScheduleKind::kAiter}) {
    PlanCapacity capacity = MakeCapacity(132);
    capacity.schedule = kind;
    Plan used = CreatePlan(capacity);
    for (int32_t step = 0; step < 50; ++step) {
      const Lengths lengths = RandomLengths(random, 900, 100);
      ASSERT_TRUE(used.Build(MakeParams(lengths, capacity)).ok());
      ASSERT_EQ(PlanArrays(used), PlanArrays(PlanOf(lengths, capacity)));
    }
  }
}

// A58: the caller's arrays are copied.
TEST(Plan, KeepsItsOwnCopyOfTheLengths) {
  const PlanCapacity capacity = MakeCapacity(8);
  Lengths lengths = Lengths::OfRows({100, 2000, 5});
  const Lengths same = lengths;
  Plan plan = PlanOf(lengths, capacity);
  const PlanArrays before(plan);
  std::fill(lengths.seq_lens.begin(), lengths.seq_lens.end(), -7);
  std::fill(lengths.query_start_loc.begin(), lengths.query_start_loc.end(), -7);
  EXPECT_EQ(PlanArrays(plan), before);
  EXPECT_FALSE(plan.Build(MakeParams(same, capacity)).value());
}

// A55: a graph holds the addresses.
TEST(Plan, KeepsItsAddresses) {
  Random random(13);
  const PlanCapacity capacity = MakeCapacity(132);
  Plan plan = PlanOf(Lengths::OfRows({1}), capacity);
  const auto addresses = [&] {
    const Schedule& schedule = plan.schedule();
    return std::vector<const void*>{
        plan.req_id_per_token().data(),   plan.kv_indptr().data(),
        plan.kv_indptr_padded().data(),   schedule.work_indptr.data(),
        schedule.work_items.data(),       schedule.reduce_indptr.data(),
        schedule.reduce_final_map.data(), schedule.reduce_partial_map.data()};
  };
  const auto before = addresses();
  for (int32_t step = 0; step < 100; ++step) {
    const Lengths lengths = RandomLengths(random, 900, 500);
    ASSERT_TRUE(plan.Build(MakeParams(lengths, capacity)).ok());
    ASSERT_EQ(addresses(), before);
  }
  Plan moved = std::move(plan);
  EXPECT_EQ(moved.kv_indptr().data(), before[1]);
  // What is left behind refuses to work, and is no plan that a stage would take.
  EXPECT_FALSE(plan.built());
  EXPECT_EQ(plan.Build({}).status().message(), "the plan has been moved from");
}

// A55: Build allocates nothing, from the first call on and up to the limits.
TEST(Plan, BuildAllocatesNothing) {
  for (const ScheduleKind kind : {ScheduleKind::kBalanced, ScheduleKind::kAiter}) {
    for (const bool invariant : {false, true}) {
      PlanCapacity capacity = MakeCapacity(132);
      capacity.schedule = kind;
      capacity.batch_invariant = invariant && kind == ScheduleKind::kBalanced;
      Plan plan = CreatePlan(capacity);
      for (const int32_t rows : {3, 512, 100}) {
        const Lengths lengths = Lengths::OfRows(Ints(static_cast<size_t>(rows), 1999 + rows));
        const PlanParams params = MakeParams(lengths, capacity);
        const int64_t before = NumAllocations();
        const bool ok = plan.Build(params).ok();
        const int64_t after = NumAllocations();
        EXPECT_TRUE(ok);
        EXPECT_EQ(after, before);
      }
    }
  }
}

// A56: host upper bounds of the lengths give a plan of the same form that covers the exact one.
TEST(Plan, OfUpperBoundsCoversTheExactLengths) {
  const PlanCapacity capacity = MakeCapacity(32);
  const Plan exact = PlanOf(Lengths::OfRows({100, 1990, 5000}), capacity);
  const Plan bound = PlanOf(Lengths::OfRows({104, 1994, 5004}), capacity);
  EXPECT_EQ(exact.num_tokens(), bound.num_tokens());
  for (size_t row = 0; row < 3; ++row) {
    EXPECT_GE(RowLengths(bound)[row], RowLengths(exact)[row]);
  }
  EXPECT_EQ(FirstInconsistency(bound), "");
}

class PlanErrors : public testing::Test {
 protected:
  PlanErrors() : capacity_(MakeCapacity(32)), plan_(CreatePlan(capacity_)) {
    EXPECT_TRUE(plan_.Build(MakeParams(good_, capacity_)).ok());
  }

  // The message; checks that the plan did not change and that the good step is still reused.
  std::string Error(const PlanParams& params) {
    const PlanArrays before(plan_);
    const int32_t max_seq_len = plan_.max_seq_len();
    const Result<bool> built = plan_.Build(params);
    EXPECT_EQ(built.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(PlanArrays(plan_), before);
    EXPECT_EQ(plan_.max_seq_len(), max_seq_len);
    EXPECT_EQ(plan_.generation(), 1u);
    EXPECT_FALSE(plan_.Build(MakeParams(good_, capacity_)).value());
    return built.status().message();
  }
  std::string Error(const Ints& query_start_loc, const Ints& seq_lens) {
    PlanParams params = MakeParams(good_, capacity_);
    params.query_start_loc = query_start_loc;
    params.seq_lens = seq_lens;
    return Error(params);
  }
  template <typename Change>
  std::string ErrorOf(Change&& change) {
    PlanParams params = MakeParams(good_, capacity_);
    change(params);
    return Error(params);
  }

  PlanCapacity capacity_;
  Plan plan_;
  Lengths good_ = Lengths::OfRows({100, 2000, 5});
};

TEST_F(PlanErrors, NameTheRequestAndBothValues) {
  EXPECT_EQ(Error({0, 1, 8}, {4, 5}), "request 1: seq_len 5 is less than its query_len 7");
  EXPECT_EQ(Error({0, 9, 4}, {20, 20}), "request 1: query_start_loc decreases from 9 to 4");
  EXPECT_EQ(Error({0, 1, 2}, {4, -3}), "request 1: seq_len -3 is negative");
  EXPECT_EQ(Error({1, 2}, {4}), "query_start_loc starts with 1, expected 0");
  EXPECT_EQ(Error({0, INT32_MIN}, {4}),
            "request 0: query_start_loc decreases from 0 to -2147483648");
}

TEST_F(PlanErrors, NameTheLimitThatIsExceeded) {
  EXPECT_EQ(Error({}, {}), "query_start_loc has 0 entries, expected one more than the 0 seq_lens");
  EXPECT_EQ(Error({0, 1, 2}, {4}),
            "query_start_loc has 3 entries, expected one more than the 1 seq_lens");
  EXPECT_EQ(Error(Ints(1026, 0), Ints(1025, 0)),
            "1025 requests exceed the capacity max_num_reqs = 1024");
  EXPECT_EQ(Error({0, 1025}, {2000}),
            "1025 query tokens exceed the capacity max_num_tokens = 1024");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.num_tokens = 1025; }),
            "num_tokens = 1025 exceeds the capacity max_num_tokens = 1024");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.num_tokens = 2; }),
            "num_tokens = 2 is less than the 3 query tokens of query_start_loc (-1 means no "
            "padding)");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.num_tokens = -2; }),
            "num_tokens = -2 is less than the 3 query tokens of query_start_loc (-1 means no "
            "padding)");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.topk_tokens = 2049; }),
            "topk_tokens = 2049 is not in 1..2048, the plan's capacity");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.topk_tokens = 0; }),
            "topk_tokens = 0 is not in 1..2048, the plan's capacity");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.dims.num_heads = 17; }),
            "num_heads = 17 is not in 1..16, the plan's capacity");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.dims.num_heads = 0; }),
            "num_heads = 0 is not in 1..16, the plan's capacity");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.dims.qk_rope_head_dim = 0; }),
            "kv_lora_rank + qk_rope_head_dim = 512 + 0 differ from the plan's 512 + 64");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.max_splits = 17; }),
            "max_splits = 17 is not in 0..16, the plan's capacity");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.max_splits = -1; }),
            "max_splits = -1 is not in 0..16, the plan's capacity");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.q_dtype = static_cast<DType>(9); }),
            "q_dtype = 9 is unknown");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.cache_format = static_cast<CacheFormat>(-1); }),
            "cache_format = -1 is unknown");
  EXPECT_EQ(ErrorOf([](PlanParams& p) { p.reorder_batch_threshold = -1; }),
            "reorder_batch_threshold = -1 is negative");
}

// A37: rows of draft tokens count against the capacity like all others.
TEST_F(PlanErrors, CountDraftTokens) {
  Lengths lengths;
  for (int32_t r = 0; r < 512; ++r) lengths.Add(3, 100);
  EXPECT_EQ(Error(MakeParams(lengths, capacity_)),
            "1536 query tokens exceed the capacity max_num_tokens = 1024");
}

TEST(PlanCapacityErrors, NameTheLimitBeforeAnythingIsAllocated) {
  const auto error = [](const std::function<void(PlanCapacity&)>& change) {
    PlanCapacity capacity = MakeCapacity(32);
    change(capacity);
    const Result<Plan> plan = Plan::Create(capacity);
    EXPECT_EQ(plan.status().code(), StatusCode::kInvalidArgument);
    return plan.status().message();
  };
  EXPECT_EQ(error([](auto& c) { c.num_compute_units = 0; }),
            "num_compute_units = 0 is not in 1..65536");
  EXPECT_EQ(error([](auto& c) { c.max_num_tokens = INT32_MAX; }),
            "max_num_tokens = 2147483647 is not in 1..1048576");
  EXPECT_EQ(error([](auto& c) { c.max_num_reqs = -1; }), "max_num_reqs = -1 is not in 1..1048576");
  EXPECT_EQ(error([](auto& c) { c.topk_tokens = 0; }), "topk_tokens = 0 is not in 1..2147483647");
  EXPECT_EQ(error([](auto& c) { c.topk_tokens = 1 << 21; }),
            "max_num_tokens = 1024 times topk_tokens = 2097152 is 2147483648, above the 2147483647 "
            "that kv_indptr can hold");
  EXPECT_EQ(error([](auto& c) { c.dims.num_heads = 129; }), "num_heads = 129 is not in 1..128");
  EXPECT_EQ(error([](auto& c) { c.dims.kv_lora_rank = 0; }), "kv_lora_rank = 0 is not in 1..65536");
  EXPECT_EQ(error([](auto& c) { c.dims.qk_rope_head_dim = -1; }),
            "qk_rope_head_dim = -1 is not in 0..65536");
  EXPECT_EQ(error([](auto& c) { c.max_splits = -2; }), "max_splits = -2 is not in -1..65536");
  EXPECT_EQ(error([](auto& c) { c.schedule = static_cast<ScheduleKind>(2); }),
            "schedule = 2 is unknown");
  EXPECT_EQ(error([](auto& c) { c.aiter_target = static_cast<AiterTarget>(2); }),
            "aiter_target = 2 is unknown");
  EXPECT_EQ(error([](auto& c) {
              c.schedule = ScheduleKind::kAiter;
              c.batch_invariant = true;
            }),
            "batch_invariant is a mode of the balanced schedule, not of aiter");
}

}  // namespace
}  // namespace sparsemla
