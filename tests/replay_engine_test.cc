// Traffic in, batches out: the parts of the replay that are integers only.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tools/replay/block_pool.h"
#include "tools/replay/engine.h"
#include "tools/replay/models.h"
#include "tools/replay/traffic.h"

namespace sparsemla::replay {
namespace {

constexpr char kExample[] = SPARSEMLA_EXAMPLES "/mooncake_conversation.jsonl";

// ---- traffic -----------------------------------------------------------------------------------

constexpr char kGoodLine[] =
    R"({"timestamp": 5, "input_length": 513, "output_length": 2, "hash_ids": [3, 4]})"
    "\n";

std::string ErrorOf(const std::string& line) {
  return ParseTraffic(kGoodLine + line).status().message();
}

TEST(TrafficTest, ReadsTheExampleTrace) {
  const auto traffic = LoadTraffic(kExample);
  ASSERT_TRUE(traffic.ok()) << traffic.status().message();
  ASSERT_EQ(traffic->size(), 200u);
  EXPECT_EQ(traffic->front().input_length, 6758);
  EXPECT_EQ(traffic->front().output_length, 500);
  EXPECT_EQ(traffic->front().hash_ids.size(), 14u);
}

TEST(TrafficTest, NamesTheLineAndWhatIsWrongWithIt) {
  const std::pair<const char*, const char*> cases[] = {
      {"{", "line 2: not JSON: \"{\""},
      {"", "line 2: not JSON"},
      {"[1]", "line 2: not a JSON object"},
      {R"({"input_length": 1, "output_length": 1, "hash_ids": [1]})", "timestamp is missing"},
      {R"({"timestamp": 4, "input_length": 1, "output_length": 1, "hash_ids": [1]})",
       "timestamp is 4, before the 5 of the line above"},
      {R"({"timestamp": 6, "input_length": -1, "output_length": 1, "hash_ids": []})",
       "input_length is -1; it must be in [1, "},
      {R"({"timestamp": 6, "input_length": 0, "output_length": 1, "hash_ids": []})",
       "input_length is 0"},
      {R"({"timestamp": 6, "input_length": 18446744073709551615, "output_length": 1})",
       "input_length is 18446744073709551615"},
      {R"({"timestamp": 6, "input_length": 1.5, "output_length": 1, "hash_ids": [1]})",
       "input_length is \"1.5\"; it must be an integer"},
      {R"({"timestamp": 6, "input_length": 1, "output_length": null, "hash_ids": [1]})",
       "output_length is \"null\""},
      {R"({"timestamp": 6, "input_length": 513, "output_length": 1, "hash_ids": [1]})",
       "hash_ids has 1 entries; an input_length of 513 needs 2"},
      {R"({"timestamp": 6, "input_length": 1, "output_length": 1, "hash_ids": 7})",
       "hash_ids is missing or not an array"},
      {R"({"timestamp": 6, "input_length": 1, "output_length": 1, "hash_ids": [-7]})",
       "an entry of hash_ids is -7"},
  };
  for (const auto& [line, message] : cases) {
    const std::string error = ErrorOf(std::string(line) + "\n");
    EXPECT_EQ(error.find("line 2: "), 0u) << error;
    EXPECT_NE(error.find(message), std::string::npos) << error;
  }
}

TEST(TrafficTest, StopsReadingAfterTheRequestsAskedFor) {
  const auto traffic = ParseTraffic(std::string(kGoodLine) + "{broken", 1);
  ASSERT_TRUE(traffic.ok());
  EXPECT_EQ(traffic->size(), 1u);
}

TEST(TrafficTest, RefusesEmptyAndMissingFiles) {
  EXPECT_EQ(ParseTraffic("").status().message(), "there are no requests");
  EXPECT_EQ(LoadTraffic("/nonexistent/trace").status().message(),
            "/nonexistent/trace: cannot open");
  EXPECT_FALSE(LoadTraffic(SPARSEMLA_EXAMPLES).ok());  // a directory
}

// ---- models ------------------------------------------------------------------------------------

// spec/users.md E: local heads; A16: head counts that ranks do not divide are padded by engines.
TEST(ModelsTest, RankTakesItsShareOfTheHeadsOrSaysWhyNot) {
  EXPECT_EQ(RankDims(FindModel("deepseek-v3.2").value(), 16)->num_heads, 8);
  EXPECT_EQ(RankDims(FindModel("glm-5").value(), 16)->num_heads, 4);
  EXPECT_EQ(RankDims(FindModel("glm-5.3-flash").value(), 1)->head_dim_qk(), 512);
  const std::string refusal = RankDims(FindModel("glm-5").value(), 6).status().message();
  EXPECT_NE(refusal.find("pad them to 66, 11 a rank"), std::string::npos) << refusal;
  EXPECT_FALSE(RankDims(FindModel("glm-5").value(), 0).ok());
  EXPECT_FALSE(RankDims(FindModel("glm-5").value(), 128).ok());
  EXPECT_NE(FindModel("glm").status().message().find("hy4"), std::string::npos);
}

// ---- blocks ------------------------------------------------------------------------------------

TEST(BlockPoolTest, HandsOutEveryBlockButTheFirstOnceAndThenNone) {
  BlockPool pool(5);
  std::set<int32_t> blocks;
  for (int i = 0; i < 4; ++i) blocks.insert(pool.Allocate());
  EXPECT_EQ(blocks, (std::set<int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(pool.Allocate(), kNoBlock);
  pool.Release(3);
  EXPECT_EQ(pool.Allocate(), 3);
}

TEST(BlockPoolTest, SharedBlockIsFreeOnlyAfterTheLastRelease) {
  BlockPool pool(2);
  const int32_t block = pool.Allocate();
  pool.Publish(block, 7);
  EXPECT_EQ(pool.AcquireCached(7), block);
  EXPECT_EQ(pool.references(block), 2);
  pool.Release(block);
  EXPECT_EQ(pool.Allocate(), kNoBlock);
  pool.Release(block);
  EXPECT_EQ(pool.num_referenced(), 0);
  EXPECT_EQ(pool.Allocate(), block);
  EXPECT_FALSE(pool.IsCached(7));  // reused: its content is gone
  EXPECT_EQ(pool.AcquireCached(7), kNoBlock);
}

TEST(BlockPoolTest, ReusesUnknownContentFirstThenTheLeastRecentlyReleased) {
  BlockPool pool(5);
  for (int i = 0; i < 4; ++i) pool.Allocate();
  for (const int32_t block : {2, 3, 4}) pool.Publish(block, 100 + block);
  for (const int32_t block : {3, 2, 1, 4}) pool.Release(block);
  EXPECT_EQ(pool.AcquireCached(103), 3);
  pool.Release(3);  // now the most recently released
  EXPECT_EQ(pool.Allocate(), 1);
  EXPECT_EQ(pool.Allocate(), 2);
  EXPECT_EQ(pool.Allocate(), 4);
  EXPECT_EQ(pool.Allocate(), 3);
}

TEST(BlockPoolTest, FirstBlockWithAContentKeepsIt) {
  BlockPool pool(3);
  const int32_t first = pool.Allocate();
  const int32_t second = pool.Allocate();
  pool.Publish(first, 9);
  pool.Publish(second, 9);
  pool.Release(second);
  EXPECT_EQ(pool.num_cached_idle(), 0);
  EXPECT_EQ(pool.AcquireCached(9), first);
}

// ---- engine ------------------------------------------------------------------------------------

TrafficRequest MakeRequest(int64_t timestamp, int32_t input, int32_t output, int64_t first_id) {
  TrafficRequest request{timestamp, input, output,
                         std::vector<int64_t>((size_t(input) + 511) / 512)};
  std::iota(request.hash_ids.begin(), request.hash_ids.end(), first_id);
  return request;
}

// Runs an engine to its end and checks in every step what a cache and an attention call rely on.
class EngineRun {
 public:
  EngineRun(std::vector<TrafficRequest> traffic, const EngineOptions& options)
      : traffic_(std::move(traffic)),
        options_(options),
        content_of_slot_(size_t(options.num_blocks) * size_t(options.block_size)) {
    auto engine = Engine::Create(traffic_, options);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    if (!engine.ok()) return;
    Step step;
    while (engine->Schedule(step) && !testing::Test::HasFailure()) {
      steps_.push_back(step);
      CheckBatch(step);
      WriteTokens(engine.value(), step);
      ReadContexts(engine.value(), step);
      engine->Complete(step);
    }
    EXPECT_EQ(engine->num_finished(), engine->num_requests());
    EXPECT_EQ(engine->finished_tokens(), engine->total_tokens());
    EXPECT_EQ(engine->pool().num_referenced(), 0);
  }

  const std::vector<Step>& steps() const { return steps_; }
  // How often each (request, position) was computed.
  const std::map<std::pair<int32_t, int32_t>, int>& computed() const { return computed_; }
  int64_t Sum(int64_t Step::*field) const {
    int64_t sum = 0;
    for (const Step& step : steps_) sum += step.*field;
    return sum;
  }
  int64_t NumPreempted() const {
    int64_t sum = 0;
    for (const Step& step : steps_) sum += step.num_preempted;
    return sum;
  }

 private:
  void CheckBatch(const Step& step) {
    ASSERT_GE(step.num_tokens(), 1);
    ASSERT_LE(step.num_tokens(), options_.token_budget);
    ASSERT_LE(step.num_running, options_.max_num_seqs);
    ASSERT_EQ(step.slot_mapping.size(), size_t(step.num_tokens()));
    bool prefill = false;
    int32_t decode_tokens = 0;
    for (size_t r = 0; r < step.requests.size(); ++r) {
      const int32_t length = step.query_start_loc[r + 1] - step.query_start_loc[r];
      ASSERT_GE(length, 1);
      prefill = prefill || length > 1 + options_.draft_tokens;
      ASSERT_EQ(prefill, length > 1 + options_.draft_tokens);  // decodes come first
      decode_tokens += prefill ? 0 : length;
      ASSERT_LE(traffic_[size_t(step.requests[r])].timestamp_ms, step.clock_ms);
    }
    ASSERT_EQ(step.num_decode_tokens, decode_tokens);
  }

  void WriteTokens(const Engine& engine, const Step& step) {
    std::set<int32_t> slots;
    for (int32_t r = 0; r < step.num_reqs(); ++r) {
      const int32_t request = step.requests[size_t(r)];
      for (int32_t t = step.query_start_loc[size_t(r)]; t < step.query_start_loc[size_t(r) + 1];
           ++t) {
        const int32_t slot = step.slot_mapping[size_t(t)];
        const int32_t position = step.position(r, t);
        ASSERT_TRUE(slots.insert(slot).second) << "two tokens write slot " << slot;
        ASSERT_GE(slot, options_.block_size) << "block 0 belongs to no request";
        ASSERT_EQ(engine.pool().references(slot / options_.block_size), 1)
            << "a shared block is written";
        ++computed_[{request, position}];
        content_of_slot_[size_t(slot)] = {engine.ContentId(request, position), position};
      }
    }
  }

  // Every request finds its own tokens, or equal ones, at every place of its context.
  void ReadContexts(const Engine& engine, const Step& step) {
    for (size_t r = 0; r < step.requests.size(); ++r) {
      for (int32_t p = 0; p < step.seq_lens[r]; ++p) {
        const int32_t block =
            step.block_table[r * size_t(step.max_blocks) + size_t(p / options_.block_size)];
        const int32_t slot = block * options_.block_size + p % options_.block_size;
        const std::pair<int64_t, int32_t> wanted{engine.ContentId(step.requests[r], p), p};
        ASSERT_TRUE(content_of_slot_[size_t(slot)] == wanted)
            << "step " << step.index << ", request " << step.requests[r] << ", position " << p;
      }
    }
  }

  std::vector<TrafficRequest> traffic_;
  EngineOptions options_;
  std::vector<Step> steps_;
  std::map<std::pair<int32_t, int32_t>, int> computed_;
  std::vector<std::pair<int64_t, int32_t>> content_of_slot_;  // [num_slots] id and position
};

TEST(EngineTest, ComputesEveryTokenOfTheExampleOnceUnlessItIsShared) {
  const auto traffic = LoadTraffic(kExample, 12).value();
  const EngineRun run(traffic, {.num_blocks = 8192});
  int64_t total = 0;
  for (const auto& request : traffic) total += request.input_length + request.output_length - 1;
  for (const auto& [token, count] : run.computed()) ASSERT_EQ(count, 1);
  EXPECT_EQ(int64_t(run.computed().size()) + run.Sum(&Step::hit_tokens), total);
  EXPECT_GT(run.Sum(&Step::hit_tokens), 0);
  EXPECT_EQ(run.NumPreempted(), 0);
}

TEST(EngineTest, EveryBlockSizeKeepsContextsApart) {
  for (const int32_t block_size : {1, 16, 64, 512}) {
    const EngineRun run(
        {MakeRequest(0, 700, 9, 0), MakeRequest(0, 1300, 3, 0), MakeRequest(500, 90, 5, 9)},
        {.block_size = block_size, .num_blocks = 4096 / block_size + 1, .token_budget = 200});
    EXPECT_GE(run.steps().size(), 13u) << block_size;
  }
}

// A full prompt of shared blocks still computes the token that the next one is sampled from.
TEST(EngineTest, EqualPromptsShareAllFullBlocksButTheLast) {
  const EngineRun run({MakeRequest(0, 1024, 2, 0), MakeRequest(100000, 1024, 2, 0)},
                      {.num_blocks = 100});
  EXPECT_EQ(run.Sum(&Step::hit_tokens), 1024 - 64);
}

TEST(EngineTest, EqualBlocksAfterDifferentPrefixesAreNotShared) {
  const EngineRun run(
      {MakeRequest(0, 1024, 2, 0), {100000, 1024, 2, {5, 1}}},  // second id equal, first not
      {.num_blocks = 100});
  EXPECT_EQ(run.Sum(&Step::hit_tokens), 0);
}

TEST(EngineTest, RunsOutOfBlocksPreemptsTheYoungestAndStillFinishesAll) {
  std::vector<TrafficRequest> traffic;
  for (int i = 0; i < 6; ++i) traffic.push_back(MakeRequest(0, 400, 300, 10 * i));
  const EngineRun run(traffic, {.block_size = 16, .num_blocks = 100, .token_budget = 512});
  EXPECT_GT(run.NumPreempted(), 0);
  EXPECT_EQ(run.Sum(&Step::admitted_tokens), 6 * 400);  // each request counts once
  EXPECT_EQ(run.Sum(&Step::hit_tokens), 0);
}

TEST(EngineTest, SplitsLongPromptsAndServesDecodesBeside) {
  const EngineRun run({MakeRequest(0, 100, 30, 0), MakeRequest(60, 1000, 2, 50)},
                      {.num_blocks = 40, .token_budget = 128});
  const Step& mixed = run.steps()[2];
  EXPECT_EQ(mixed.num_decode_tokens, 1);
  EXPECT_EQ(mixed.num_tokens(), 128);
  EXPECT_EQ(mixed.requests, (std::vector<int32_t>{0, 1}));
}

TEST(EngineTest, WaitsForArrivalsAndSkipsIdleTime) {
  const EngineRun run({MakeRequest(0, 10, 1, 0), MakeRequest(90000, 10, 1, 1)},
                      {.num_blocks = 8, .step_ms = 10});
  ASSERT_EQ(run.steps().size(), 2u);
  EXPECT_EQ(run.steps()[1].clock_ms, 90000);
}

// spec/users.md A37: capacity includes draft tokens; spec/backend.md 6.7: every draft is a row.
TEST(EngineTest, DraftRowsAreDecodesAndRejectedOnesAreComputedAgain) {
  const EngineRun run({MakeRequest(0, 100, 200, 0)}, {.num_blocks = 6, .draft_tokens = 3});
  EXPECT_EQ(run.steps()[1].num_decode_tokens, 4);
  EXPECT_LT(run.steps().size(), 150u);  // some were accepted
  EXPECT_TRUE(std::any_of(run.computed().begin(), run.computed().end(),
                          [](const auto& entry) { return entry.second > 1; }));
  EXPECT_LE(run.computed().rbegin()->first.second, 100 + 200 - 2);
}

TEST(EngineTest, RefusesARequestThatCannotFitAndNamesIt) {
  const auto engine =
      Engine::Create({MakeRequest(0, 64, 1, 0), MakeRequest(0, 6400, 2, 1)}, {.num_blocks = 100});
  EXPECT_EQ(engine.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(engine.status().message(), "request 1 needs 101 blocks of 64 tokens; the cache has 99");
  EXPECT_FALSE(Engine::Create({}, {.block_size = 48, .num_blocks = 9}).ok());
}

}  // namespace
}  // namespace sparsemla::replay
