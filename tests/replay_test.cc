// Generated contents, and the whole replay on small models: the main job of the tool.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "sparsemla/attention.h"
#include "tools/replay/content.h"
#include "tools/replay/report.h"
#include "tools/replay/runner.h"
#include "tools/replay/summary.h"
#include "tools/replay/topk_source.h"

namespace sparsemla::replay {
namespace {

// ---- selections --------------------------------------------------------------------------------

TEST(TopkSourceTest, ShortContextsSelectEverythingInOrderThenPad) {
  TopkSource source({.topk_tokens = 8, .topk_width = 8});
  std::vector<int32_t> row(8);
  source.WriteRow(0, 4, row);
  EXPECT_EQ(row, (std::vector<int32_t>{0, 1, 2, 3, 4, -1, -1, -1}));
  source.WriteRow(0, 7, row);
  EXPECT_EQ(row, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(TopkSourceTest, LongRowsAreDistinctVisibleUnsortedAndHoldFirstAndNewestTokens) {
  TopkSource source({});
  std::vector<int32_t> row(2048);
  for (int32_t position = 2040; position < 6000; ++position) {
    source.WriteRow(3, position, row);
    if (position < 2048 || position % 97 != 0) continue;
    const std::set<int32_t> selected(row.begin(), row.end());
    ASSERT_EQ(selected.size(), 2048u);
    ASSERT_GE(*selected.begin(), 0);
    ASSERT_EQ(*selected.rbegin(), position);
    for (int32_t p : {0, 1, 2, 3, position - 1, position - 63}) ASSERT_TRUE(selected.contains(p));
    ASSERT_FALSE(std::is_sorted(row.begin(), row.end()));
  }
}

TEST(TopkSourceTest, NeighbouringRowsShareWhatWasAskedFor) {
  for (const double overlap : {0.56, 0.70, 0.85}) {
    TopkSource source({.overlap = overlap});
    std::vector<int32_t> row(2048);
    std::vector<int32_t> previous;
    double shared = 0;
    for (int32_t position = 20000; position < 20200; ++position) {
      source.WriteRow(0, position, row);
      std::vector<int32_t> sorted = row;
      std::sort(sorted.begin(), sorted.end());
      if (!previous.empty()) {
        std::vector<int32_t> both;
        std::set_intersection(sorted.begin(), sorted.end(), previous.begin(), previous.end(),
                              std::back_inserter(both));
        shared += double(both.size()) / 2048 / 199;
      }
      previous = sorted;
    }
    EXPECT_NEAR(shared, overlap, 0.02);
    EXPECT_NEAR(source.mean_overlap(), shared, 0.01);
  }
}

// Rejected drafts take the sequence back: what came after may not be selected any more.
TEST(TopkSourceTest, GoingBackForgetsLaterTokens) {
  TopkSource source({.topk_tokens = 64, .topk_width = 64});
  std::vector<int32_t> row(64);
  for (const int32_t position : {200, 201, 202, 203, 201, 202, 130, 64}) {
    source.WriteRow(0, position, row);
    const std::set<int32_t> selected(row.begin(), row.end());
    EXPECT_EQ(selected.size(), 64u);
    EXPECT_GE(*selected.begin(), 0);
    EXPECT_LE(*selected.rbegin(), position);
  }
}

// spec/backend.md 3.2: whole pools, then the incomplete one, -1 up to the width.
TEST(TopkSourceTest, PooledRowsHoldWholePoolsThenTheTail) {
  TopkSource source({.topk_tokens = 64, .topk_width = 96, .kpool = 4});
  std::vector<int32_t> row(96);
  for (int32_t position = 64; position < 400; ++position) {
    source.WriteRow(0, position, row);
    for (size_t c = 0; c < 64; c += 4) {
      ASSERT_EQ(row[c] % 4, 0);
      for (int32_t i = 1; i < 4; ++i) ASSERT_EQ(row[c + size_t(i)], row[c] + i);
    }
    const int32_t tail = (position + 1) % 4;
    for (int32_t i = 0; i < 32; ++i) {
      ASSERT_EQ(row[64 + size_t(i)], i < tail ? position + 1 - tail + i : -1);
    }
    const std::set<int32_t> selected(row.begin(), row.begin() + 64 + tail);
    ASSERT_EQ(selected.size(), size_t(64 + tail));
    ASSERT_LE(*selected.rbegin(), position);
  }
}

// ---- contents ----------------------------------------------------------------------------------

TEST(ContentTest, RowsDependOnContentAndPositionOnly) {
  const MlaDims dims = {.num_heads = 2};
  ContentSource source(dims, CacheFormat::kBFloat16, 5);
  const auto row = [&](int64_t content, int32_t position) {
    std::vector<std::byte> bytes(size_t(CacheRowBytes(CacheFormat::kBFloat16, dims)));
    source.WriteCacheRow(content, position, bytes.data());
    return bytes;
  };
  const auto first = row(7, 100);
  EXPECT_NE(first, row(8, 100));
  EXPECT_NE(first, row(7, 101));
  EXPECT_EQ(first, row(7, 100));
}

// N10: codes, scales and rope part of the 656-byte row stand for the values of the bf16 row.
TEST(ContentTest, DsMlaRowsDecodeToTheValuesTheyStandFor) {
  const MlaDims dims = {.num_heads = 1};
  ContentSource plain(dims, CacheFormat::kFloat32, 5);
  ContentSource packed(dims, CacheFormat::kFp8DsMla, 5);
  std::vector<float> values(576);
  std::vector<uint8_t> row(656);
  plain.WriteCacheRow(1, 2, reinterpret_cast<std::byte*>(values.data()));
  packed.WriteCacheRow(1, 2, reinterpret_cast<std::byte*>(row.data()));
  double mean = 0;
  double variance = 0;
  for (size_t i = 0; i < 512; ++i) {
    float scale = 0;
    std::memcpy(&scale, &row[512 + i / 128 * 4], 4);
    EXPECT_NEAR(ToFloat(Float8E4M3{row[i]}) * scale, values[i], 0.07 * std::fabs(values[i]) + 0.01);
    mean += double{values[i]} / 512;
    variance += double{values[i]} * double{values[i]} / 512;
  }
  for (size_t i = 0; i < 64; ++i) {
    BFloat16 rope;
    std::memcpy(&rope, &row[528 + 2 * i], 2);
    EXPECT_NEAR(ToFloat(rope), values[512 + i], 0.004 * std::fabs(values[512 + i]));
  }
  EXPECT_NEAR(mean, 0, 0.2);  // realistic magnitude: about 1
  EXPECT_NEAR(variance, 1.08, 0.3);
}

// ---- the whole job -----------------------------------------------------------------------------

std::vector<TrafficRequest> SmallTraffic() {
  return {{0, 700, 20, {0, 1}}, {0, 90, 40, {2}}, {0, 1300, 5, {0, 1, 3}}, {900, 700, 20, {0, 1}}};
}

ReplayOptions SmallOptions(const char* model_name, int32_t tp) {
  ReplayOptions options;
  options.model = FindModel(model_name).value();
  options.dims = RankDims(options.model, tp).value();
  options.cache_format = options.model.cache_format;
  options.engine = {.block_size = 16, .num_blocks = 300, .token_budget = 256};
  options.check_rows = 7;
  return options;
}

Result<ReplayResult> Replay(const ReplayOptions& options, const Backend& backend) {
  return RunReplay(SmallTraffic(), options, backend, [](const ReplayProgress&) {});
}

void ExpectAllRight(const Result<ReplayResult>& result) {
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->mismatch, "");
  EXPECT_GT(result->checked_rows, 0);
  EXPECT_LE(result->worst_error, 1.0);
}

TEST(ReplayTest, EveryCacheFormatAgreesWithRef) {
  const auto cpu = CreateBackend("cpu").value();
  for (int32_t f = 0; f < kNumCacheFormats; ++f) {
    ReplayOptions options = SmallOptions("tiny", 1);
    options.cache_format = static_cast<CacheFormat>(f);
    if (options.cache_format == CacheFormat::kFp8DsMla) options.dims.kv_lora_rank = 512;
    if (options.cache_format == CacheFormat::kFp8DsMla) options.dims.qk_rope_head_dim = 64;
    SCOPED_TRACE(CacheFormatName(options.cache_format));
    const auto result = Replay(options, *cpu);
    ASSERT_NO_FATAL_FAILURE(ExpectAllRight(result));
    EXPECT_EQ(result->num_finished, 4);
  }
}

// Shared prefixes, chunked prefill, drafts, preemption and the aiter schedule in one.
TEST(ReplayTest, EveryEngineFeatureAgreesWithRef) {
  const auto cpu = CreateBackend("cpu").value();
  ReplayOptions options = SmallOptions("tiny", 1);
  options.dims.num_heads = 16;
  options.engine.num_blocks = 90;
  options.engine.draft_tokens = 2;
  options.schedule = ScheduleKind::kAiter;
  options.num_layers = 2;
  const auto result = Replay(options, *cpu);
  ASSERT_NO_FATAL_FAILURE(ExpectAllRight(result));
  const ReplayTotals totals = Summarise(result.value());
  EXPECT_GT(totals.hit_tokens, 0);
  EXPECT_GT(totals.preempted, 0);
  EXPECT_EQ(result->num_finished, 4);
}

// spec/users.md A40: pooled rows wider than top-k are fitted before they are converted.
TEST(ReplayTest, PooledRopeFreeModelAgreesWithRef) {
  const auto cpu = CreateBackend("cpu").value();
  ReplayOptions options = SmallOptions("glm-5.3-flash", 32);
  options.model.topk_tokens = 64;
  options.model.topk_width = 96;
  options.check_rows = 41;
  ExpectAllRight(Replay(options, *cpu));
}

TEST(ReplayTest, StopsAtTheStepLimit) {
  const auto cpu = CreateBackend("cpu").value();
  ReplayOptions options = SmallOptions("tiny", 1);
  options.max_steps = 3;
  EXPECT_EQ(Replay(options, *cpu)->steps.size(), 3u);
}

// A back end that answers one element of the third row wrongly.
class WrongBackend final : public Backend {
 public:
  explicit WrongBackend(const Backend& inner) : inner_(inner) {}
  std::string_view name() const override { return "wrong"; }
  DeviceInfo device() const override { return inner_.device(); }
  std::vector<KernelInfo> kernels() const override { return inner_.kernels(); }
  std::string_view KernelName(const Problem& p) const override { return inner_.KernelName(p); }
  std::string UnsupportedReason(const Problem& p) const override {
    return inner_.UnsupportedReason(p);
  }
  size_t AttentionWorkspaceBytes(const PlanCapacity& capacity) const override {
    return inner_.AttentionWorkspaceBytes(capacity);
  }
  Status FitKpoolIndices(const FitKpoolIndicesParams& p, Stream s) const override {
    return inner_.FitKpoolIndices(p, s);
  }
  Status ConvertIndices(const ConvertIndicesParams& p, Stream s) const override {
    return inner_.ConvertIndices(p, s);
  }
  Status ConvertIndicesDense(const ConvertIndicesDenseParams& p, Stream s) const override {
    return inner_.ConvertIndicesDense(p, s);
  }
  Status Attention(const AttentionParams& p, const Plan& plan, Workspace w,
                   Stream s) const override {
    const Status status = inner_.Attention(p, plan, w, s);
    auto* const out = static_cast<BFloat16*>(p.out.data);
    if (p.out.shape[0] > 2) out[2 * p.out.strides[0] + p.out.strides[1] + 5] = {0x4600};
    return status;
  }
  Status Merge(const MergeParams& p, Stream s) const override { return inner_.Merge(p, s); }

 private:
  const Backend& inner_;
};

TEST(ReplayTest, AWrongAnswerIsNamedByStepRequestTokenHeadAndColumn) {
  const auto cpu = CreateBackend("cpu").value();
  ReplayOptions options = SmallOptions("tiny", 1);
  options.check_rows = 1;
  const auto result = Replay(options, WrongBackend(*cpu));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->mismatch.find("step 0, request 0, token 2 (position 2), out, head 1, column 5"),
            0u)
      << result->mismatch;
  EXPECT_EQ(result->steps.size(), 1u);
  EXPECT_GT(result->worst_error, 1.0);
}

TEST(ReplayTest, ReportNeedsNothingElseAndSummariesTellTheSame) {
  const auto cpu = CreateBackend("cpu").value();
  const ReplayOptions options = SmallOptions("tiny", 1);
  const auto result = Replay(options, *cpu);
  ASSERT_TRUE(result.ok());
  const RunDescription description = Describe("a<b>&'c'.jsonl", 1, options, *cpu);
  const auto html = ReportHtml(result.value(), description, options, *cpu);
  ASSERT_TRUE(html.ok()) << html.status().message();
  for (const char* foreign : {"http:", "https:", "src=", "@import", "<link", "url("}) {
    EXPECT_EQ(html->find(foreign), std::string::npos) << foreign;
  }
  EXPECT_NE(html->find("a&lt;b&gt;&amp;&#39;c&#39;.jsonl"), std::string::npos);
  EXPECT_NE(html->find("The slowest step"), std::string::npos);
  EXPECT_EQ(html->find("nan"), std::string::npos);

  const auto json = nlohmann::json::parse(SummaryJson(result.value(), description));
  EXPECT_EQ(json["steps"], result->steps.size());
  EXPECT_EQ(json["requests_finished"], 4);
  EXPECT_EQ(json["decode_rows"].get<int64_t>() + json["prefill_rows"].get<int64_t>(),
            json["tokens"].get<int64_t>());
  EXPECT_EQ(json["mismatch"], "");
  EXPECT_NE(SummaryTable(result.value(), description).find("all right"), std::string::npos);
}

TEST(SummaryTest, TimesHaveThreeDigitsAndAFittingUnit) {
  EXPECT_EQ(SecondsText(0), "0.00 µs");
  EXPECT_EQ(SecondsText(12.34e-6), "12.3 µs");
  EXPECT_EQ(SecondsText(0.1234), "123 ms");
  EXPECT_EQ(SecondsText(61.2), "61.2 s");
}

}  // namespace
}  // namespace sparsemla::replay
