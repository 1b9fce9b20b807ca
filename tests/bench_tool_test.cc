// What `sparsemla bench` is made of: workloads, selections, the noise filter, threads, the check.
// No test depends on speed.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "tools/bench/call.h"
#include "tools/bench/cell.h"
#include "tools/bench/noise.h"
#include "tools/bench/peak.h"
#include "tools/bench/report.h"
#include "tools/bench/slots.h"
#include "tools/bench/thread_team.h"
#include "tools/bench/workload.h"

namespace sparsemla::bench {
namespace {

Workload Parse(const std::string& text) {
  const auto workload = ParseWorkload(text);
  EXPECT_TRUE(workload.ok()) << workload.status().message();
  return workload.ok() ? workload.value() : Workload();
}

// ---- workloads ---------------------------------------------------------------------------------

TEST(WorkloadTest, GroupsJoinInOrderAndKMultipliesBy1024) {
  const Workload workload = Parse("q256s8k_3q1s2k_2q4s100");
  EXPECT_EQ(workload.query_start_loc, (std::vector<int32_t>{0, 256, 257, 258, 259, 263, 267}));
  EXPECT_EQ(workload.seq_lens, (std::vector<int32_t>{8192, 2048, 2048, 2048, 100, 100}));
  EXPECT_EQ(workload.text, "q256s8k_3q1s2k_2q4s100");
  EXPECT_EQ(Parse("64q1s8k").num_reqs(), 64);
}

TEST(WorkloadTest, WithoutASequenceTheQueryIsAllThereIs) {
  EXPECT_EQ(Parse("q2k").seq_lens, (std::vector<int32_t>{2048}));
  EXPECT_EQ(Parse("q2k").num_tokens(), 2048);
}

TEST(WorkloadTest, MalformedTextsAreErrorsWithTextAndPosition) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"", "workload \"\", position 0: expected 'q'"},
      {"8", "position 1: expected 'q'"},
      {"x1", "workload \"x1\", position 0: expected 'q'"},
      {"q", "position 1: expected the number of query tokens"},
      {"q-1", "position 1: expected the number"},
      {"q1s", "position 3: expected the number of tokens of a sequence"},
      {"q1sk", "position 3: expected the number of tokens of a sequence"},
      {"q1s8kk", "position 5: expected '_' or the end"},
      {"q1s8m", "position 4: expected '_' or the end"},
      {"q1s8k_", "position 6: expected 'q'"},
      {"q1s8k__q1", "position 6: expected 'q'"},
      {"q1 s8", "position 2: expected '_' or the end"},
      {"2kq1", "position 1: expected 'q'"},
      {"0q1s8", "position 0: the number of requests is 0"},
      {"q0", "position 1: the number of query tokens is 0"},
      {"q1s0", "position 3: the number of tokens of a sequence is 0"},
      {"q9s8", "position 3: a sequence of 8 tokens is shorter than its query of 9"}};
  for (const auto& [text, message] : bad) {
    const auto workload = ParseWorkload(text);
    ASSERT_FALSE(workload.ok()) << text;
    EXPECT_NE(workload.status().message().find(message), std::string::npos)
        << text << ": " << workload.status().message();
  }
}

TEST(WorkloadTest, NumbersBeyondTheBoundsAreErrorsAndDoNotOverflow) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"99999999999999999999999q1", "position 0: more than 1048576 requests"},
      {"q18446744073709551617", "position 1: more than 1048576 query tokens"},
      {"q1025k", "position 1: more than 1048576 query tokens"},
      {"q1s16385k", "position 3: more than 16777216 tokens of a sequence"},
      {"1048576q1048576", "position 0: 1099511627776 query tokens in all; at most 1048576"},
      {"1024q1k_q1", "position 8: 1048577 query tokens in all; at most 1048576"}};
  for (const auto& [text, message] : bad) {
    const auto workload = ParseWorkload(text);
    ASSERT_FALSE(workload.ok()) << text;
    EXPECT_NE(workload.status().message().find(message), std::string::npos)
        << text << ": " << workload.status().message();
  }
  EXPECT_EQ(Parse("1024q1k").num_tokens(), 1 << 20);
}

// ---- selections --------------------------------------------------------------------------------

// Row lengths min(visible, topk), as the planner has them.
std::vector<int32_t> KvIndptr(const Workload& workload, int32_t topk) {
  std::vector<int32_t> kv_indptr = {0};
  for (size_t req = 0; req < workload.seq_lens.size(); ++req) {
    const int32_t query_len = workload.query_start_loc[req + 1] - workload.query_start_loc[req];
    for (int32_t j = 1; j <= query_len; ++j) {
      kv_indptr.push_back(kv_indptr.back() +
                          std::min(workload.seq_lens[req] - query_len + j, topk));
    }
  }
  return kv_indptr;
}

std::set<int32_t> RowSet(const std::vector<int32_t>& slots, const std::vector<int32_t>& kv_indptr,
                         size_t row) {
  return {slots.begin() + kv_indptr[row], slots.begin() + kv_indptr[row + 1]};
}

TEST(SlotSourceTest, ContextRowsAreDistinctAndRequestsShareNoSlot) {
  const Workload workload = Parse("2q1s300_q40s500");
  const auto kv_indptr = KvIndptr(workload, 128);
  const SlotOptions options = {.residency = Residency::kContext};
  SlotSource source(workload, kv_indptr, options);
  std::vector<int32_t> slots(static_cast<size_t>(kv_indptr.back()));
  std::set<int32_t> of_request[3];
  for (int call = 0; call < 20; ++call) {
    source.Next(slots);
    for (size_t row = 0; row + 1 < kv_indptr.size(); ++row) {
      const std::set<int32_t> selected = RowSet(slots, kv_indptr, row);
      ASSERT_EQ(selected.size(), 128u) << "row " << row;
      ASSERT_GE(*selected.begin(), 0);
      ASSERT_LT(*selected.rbegin(), SlotSource::NumSlots(workload, options));
      of_request[std::min<size_t>(row, 2)].insert(selected.begin(), selected.end());
    }
  }
  EXPECT_EQ(of_request[0].size(), 300u);  // 20 calls of 128 leave no token out
  EXPECT_EQ(of_request[2].size(), 500u);
  std::set<int32_t> all;
  for (const auto& slots_of : of_request) all.insert(slots_of.begin(), slots_of.end());
  EXPECT_EQ(all.size(), 1100u);
}

TEST(SlotSourceTest, RowsThatSeeNoMoreThanTheySelectTakeEverythingInOrder) {
  const Workload workload = Parse("q3s130");
  const auto kv_indptr = KvIndptr(workload, 2048);
  SlotSource source(workload, kv_indptr, {});
  std::vector<int32_t> slots(static_cast<size_t>(kv_indptr.back()));
  source.Next(slots);
  for (const int32_t begin : {kv_indptr[0], kv_indptr[1], kv_indptr[2]}) {
    for (int32_t i = 1; i < 128; ++i) {
      if (i % 64 == 0) continue;  // another block
      ASSERT_EQ(slots[static_cast<size_t>(begin + i)],
                slots[static_cast<size_t>(begin + i - 1)] + 1);
    }
  }
  EXPECT_EQ(RowSet(slots, kv_indptr, 2).size(), 130u);
}

TEST(SlotSourceTest, PoolsHaveTheirSizesAndEveryCallDrawsOthers) {
  const Workload workload = Parse("4q1s8k");
  const auto kv_indptr = KvIndptr(workload, 2048);
  const std::pair<Residency, int64_t> pools[] = {
      {Residency::kL2, 256}, {Residency::kL3, 8192}, {Residency::kDram, 100000}};
  for (const auto& [residency, num_slots] : pools) {
    const SlotOptions options = {.residency = residency, .pool_slots = 100000};
    EXPECT_EQ(SlotSource::NumSlots(workload, options), num_slots);
    SlotSource source(workload, kv_indptr, options);
    std::vector<int32_t> first(static_cast<size_t>(kv_indptr.back()));
    std::vector<int32_t> second(first.size());
    source.Next(first);
    source.Next(second);
    EXPECT_NE(first, second);
    for (const int32_t slot : first) {
      ASSERT_GE(slot, 0);
      ASSERT_LT(slot, num_slots);
    }
    const std::set<int32_t> distinct(first.begin(), first.end());
    EXPECT_GT(static_cast<int64_t>(distinct.size()), std::min<int64_t>(num_slots, 8192) / 2);
  }
}

TEST(SlotSourceTest, NeighbouringQueriesShareThePercentageAskedFor) {
  const Workload workload = Parse("q20s100k");
  const auto kv_indptr = KvIndptr(workload, 1000);
  for (const double overlap : {0.0, 0.5, 0.7, 1.0}) {
    SlotSource source(workload, kv_indptr, {.overlap = overlap});
    std::vector<int32_t> slots(static_cast<size_t>(kv_indptr.back()));
    source.Next(slots);
    for (size_t row = 1; row < 20; ++row) {
      const auto before = RowSet(slots, kv_indptr, row - 1);
      const auto after = RowSet(slots, kv_indptr, row);
      ASSERT_EQ(after.size(), 1000u);
      const auto shared = std::count_if(after.begin(), after.end(),
                                        [&](int32_t slot) { return before.contains(slot); });
      ASSERT_NEAR(static_cast<double>(shared), 1000 * overlap, 30) << "overlap " << overlap;
    }
  }
}

// ---- the noise filter --------------------------------------------------------------------------

TEST(NoiseTest, InterruptedSamplesAndThoseBesideSlowOrDifferingReferenceRunsAreDropped) {
  const std::vector<Sample> samples = {
      {.seconds = 3, .rate_before = 100, .rate_after = 95},
      {.seconds = 1, .rate_before = 71, .rate_after = 72},
      {.seconds = 2, .rate_before = 90, .rate_after = 99},
      {.seconds = 9, .rate_before = 69, .rate_after = 69},
      {.seconds = 8, .rate_before = 100, .rate_after = 89},
      {.seconds = 7, .rate_before = 80, .rate_after = 100},
      {.seconds = 6, .rate_before = 0, .rate_after = 0},
      {.seconds = 5, .rate_before = 99, .rate_after = 99, .core_share = 0.9}};
  const double best = BestReferenceRate(samples, 50);
  EXPECT_EQ(best, 100);
  const Timing timing = Summarise(samples, best);
  EXPECT_EQ(timing.num_samples, 8);
  EXPECT_EQ(timing.num_kept, 3);
  EXPECT_EQ(timing.best, 1);
  EXPECT_EQ(timing.median, 2);
  EXPECT_EQ(timing.p90, 3);
  EXPECT_EQ(timing.median_of_all, 6);
}

TEST(NoiseTest, AFasterRunElsewhereRaisesTheBar) {
  const std::vector<Sample> samples = {{.seconds = 1, .rate_before = 60, .rate_after = 60},
                                       {.seconds = 2, .rate_before = 80, .rate_after = 80}};
  EXPECT_EQ(Summarise(samples, BestReferenceRate(samples, 0)).num_kept, 2);
  EXPECT_EQ(Summarise(samples, BestReferenceRate(samples, 100)).num_kept, 1);
}

TEST(NoiseTest, WithoutAQuietSampleTheFiguresAreThoseOfAllAndNoneIsKept) {
  const std::vector<Sample> samples = {{.seconds = 5}, {.seconds = 4}, {.seconds = 6}};
  const Timing timing = Summarise(samples, 100);
  EXPECT_EQ(timing.num_kept, 0);
  EXPECT_EQ(timing.median, 5);
  EXPECT_EQ(timing.best, 4);
  EXPECT_EQ(timing.median_of_all, 5);
}

// ---- machine -----------------------------------------------------------------------------------

TEST(PeakTest, EveryUnitOfThisMachineRunsAndKernelsAreMeasuredAgainstTheirs) {
  const std::vector<PeakUnit> units = AvailablePeakUnits();
  for (const PeakUnit unit : units) {
    for (const double rate : {MeasureReference(unit), MeasurePeak(unit, 2)}) {
      EXPECT_TRUE(std::isfinite(rate) && rate > 0) << PeakUnitName(unit) << ": " << rate;
    }
  }
  EXPECT_EQ(PeakUnitOf("attention_portable"), PeakUnit::kFma128);
  EXPECT_EQ(PeakUnitOf("attention_ref"), PeakUnit::kFma128);
  const std::pair<std::string, PeakUnit> kernels[] = {{"attention_amx_bf16", PeakUnit::kAmxBf16},
                                                      {"attention_avx512", PeakUnit::kFma512},
                                                      {"attention_avx2", PeakUnit::kFma256}};
  for (const auto& [kernel, unit] : kernels) {
    const bool available = std::find(units.begin(), units.end(), unit) != units.end();
    EXPECT_EQ(PeakUnitOf(kernel), available ? unit : units.front()) << kernel;
  }
}

TEST(ThreadTeamTest, EveryIndexOfManyLoopsRunsOnceOnOneOfTheThreads) {
  for (const int32_t num_threads : {1, 2, 5}) {
    ThreadTeam team(num_threads);
    const Executor executor = team.executor();
    EXPECT_EQ(executor.num_threads, num_threads);
    for (const int32_t count : {0, 1, 2, 100, 3}) {
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
        executor.parallel_for(
            executor.context, count,
            [](void* argument, int32_t i) {
              ++(*static_cast<std::vector<std::atomic<int>>*>(argument))[static_cast<size_t>(i)];
            },
            &runs);
        for (const auto& n : runs) ASSERT_EQ(n.load(), 1);
      }
    }
  }
}

// ---- the check and the report ------------------------------------------------------------------

TEST(CheckTest, OneWrongValueOfACheckedRowIsFoundAndNamed) {
  const auto backend = CreateBackend("cpu");
  ASSERT_TRUE(backend.ok());
  const CellSpec spec = {.workload = Parse("q3s40"), .num_heads = 20, .topk_tokens = 32};
  const MlaDims dims = {.num_heads = 20};
  std::vector<std::byte> cache(static_cast<size_t>(64 * CacheRowBytes(spec.cache_format, dims)));
  for (size_t i = 0; i < cache.size(); i += 2) {
    // No rows that cancel when averaged: a small output shows the rounding of its weights.
    const BFloat16 value = FromFloat<BFloat16>(std::sin(static_cast<float>(i * i % 9973)));
    std::memcpy(&cache[i], &value, 2);
  }
  auto call = Call::Create(spec, {}, *backend.value(), {.data = cache.data(), .num_slots = 64});
  ASSERT_TRUE(call.ok()) << call.status().message();
  SlotSource slots(spec.workload, call->plan().kv_indptr(), {});
  slots.Next(call->kv_indices());
  call->PoisonOutputs();
  ASSERT_TRUE(call->Run(*backend.value()).ok());
  const auto right = CheckAgainstRef(call.value());
  ASSERT_TRUE(right.ok()) << right.status().message();
  EXPECT_EQ(right.value().mismatch, "");
  EXPECT_EQ(right.value().num_rows, 3);

  auto* const out = static_cast<BFloat16*>(call->params().out.data);
  out[(2 * 20 + 18) * 512 + 7] = FromFloat<BFloat16>(9.0f);
  const auto wrong = CheckAgainstRef(call.value());
  ASSERT_TRUE(wrong.ok());
  EXPECT_EQ(wrong.value().mismatch.find("token 2, head 18"), 0u) << wrong.value().mismatch;
}

TEST(ReportTest, SpeedupIsOverTheSameCellOnOneThreadIfBothWereQuiet) {
  const auto cell = [](int32_t heads, int32_t threads, double seconds, int kept) {
    Cell made;
    made.spec = {.workload = {.text = "q1s8k", .query_start_loc = {0, 1}, .seq_lens = {8192}},
                 .num_heads = heads};
    made.result.num_threads = threads;
    made.result.timing = {.median = seconds, .num_kept = kept, .num_samples = 9};
    return made;
  };
  std::vector<Cell> cells;
  const auto speedup_of = [&cells](const Cell& next) {
    cells.push_back(next);
    SetSpeedup(cells);
    return cells.back().speedup;
  };
  EXPECT_FALSE(speedup_of(cell(16, 1, 6, 5)).has_value());
  EXPECT_FALSE(speedup_of(cell(32, 2, 4, 5)).has_value());
  EXPECT_EQ(speedup_of(cell(16, 2, 4, 5)), 1.5);
  EXPECT_FALSE(speedup_of(cell(16, 4, 4, 0)).has_value());
}

}  // namespace
}  // namespace sparsemla::bench
