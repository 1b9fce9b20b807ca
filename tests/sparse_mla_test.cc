// All stages in one call, on every kernel: paged requests of several tokens, and golden cases.
#include <algorithm>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "tests/kernel_test.h"
#include "trace/case.h"
#include "trace/run_case.h"

namespace sparsemla::test {
namespace {

struct PagedSpec {
  std::vector<int32_t> query_lens = {1, 4, 0, 1, 2};
  std::vector<int32_t> seq_lens = {40, 13, 9, 1, 0};
  int32_t padding_rows = 1;
  int32_t topk_tokens = 16;
  int32_t tail_width = 0;  // k-pool columns behind the top-k
  int32_t block_size = 16;
  int64_t block_gap_rows = 0;  // rows between two blocks
  AttentionSpec attention = {};
};

// A step of several requests whose blocks are shuffled over the cache. Block 0 belongs to nobody,
// cache rows that no token selects hold NaN, and columns behind a row's length name such rows.
struct PagedCase {
  explicit PagedCase(const PagedSpec& wanted) : spec(wanted), attention(MakeAttention(wanted)) {
    std::mt19937 random(spec.attention.seed);
    MapBlocks(random);
    for (size_t r = 0; r < spec.query_lens.size(); ++r) {
      for (int32_t j = 0; j < spec.query_lens[r]; ++j) {
        SelectKeys(r, spec.seq_lens[r] - spec.query_lens[r] + j, random);
      }
    }
    topk.insert(topk.end(), static_cast<size_t>(spec.padding_rows * Width()), 0);
    FillSelectedRows(random);
  }

  static AttentionSpec MakeAttention(const PagedSpec& spec) {
    AttentionSpec attention = spec.attention;
    attention.padding_rows = spec.padding_rows;
    attention.row_lengths.assign(
        static_cast<size_t>(std::reduce(spec.query_lens.begin(), spec.query_lens.end())), 0);
    attention.num_slots = static_cast<int32_t>(NumCacheSlots(Table(spec)));
    return attention;
  }
  static BlockTable Table(const PagedSpec& spec) {
    int64_t blocks = 3;
    for (const int32_t length : spec.seq_lens) {
      blocks += (length + spec.block_size - 1) / spec.block_size;
    }
    return {
        .block_size = spec.block_size,
        .num_blocks = blocks,
        .block_stride_rows = spec.block_gap_rows == 0 ? 0 : spec.block_size + spec.block_gap_rows};
  }
  int64_t Width() const { return spec.topk_tokens + spec.tail_width; }

  void MapBlocks(std::mt19937& random) {
    table = Table(spec);
    std::vector<int32_t> free(static_cast<size_t>(table.num_blocks - 1));
    std::iota(free.begin(), free.end(), 1);
    std::shuffle(free.begin(), free.end(), random);
    max_blocks = 1;
    for (const int32_t length : spec.seq_lens) {
      max_blocks = std::max<int64_t>(max_blocks, (length + spec.block_size - 1) / spec.block_size);
    }
    blocks.assign(spec.seq_lens.size() * static_cast<size_t>(max_blocks), -1);
    for (size_t r = 0; r < spec.seq_lens.size(); ++r) {
      for (int64_t b = 0; b * spec.block_size < spec.seq_lens[r]; ++b) {
        blocks[r * static_cast<size_t>(max_blocks) + static_cast<size_t>(b)] = free.back();
        free.pop_back();
      }
    }
    table.blocks = View<const int32_t, 2>::Contiguous(
        blocks.data(), {static_cast<int64_t>(spec.seq_lens.size()), max_blocks});
  }

  // Fills one row of topk and attention.rows for the token at `position` of request `r`.
  void SelectKeys(size_t r, int32_t position, std::mt19937& random) {
    const auto width = static_cast<size_t>(Width());
    std::vector<int32_t> keys(static_cast<size_t>(std::max(position + 1, 0)));
    std::iota(keys.begin(), keys.end(), 0);
    // The newest keys are the k-pool's tail; the others are history, in no order.
    const size_t tail = std::min({static_cast<size_t>(spec.tail_width), keys.size(), size_t{3}});
    std::shuffle(keys.begin(), keys.end() - static_cast<int64_t>(tail), random);
    const auto topk_tokens = static_cast<size_t>(spec.topk_tokens);
    const size_t history = std::min(keys.size() - tail, topk_tokens);
    std::vector<int32_t> row(width, spec.tail_width == 0 ? 0 : -1);
    std::copy_n(keys.begin(), history, row.begin());
    std::copy_n(keys.end() - static_cast<int64_t>(tail), tail,
                row.begin() + static_cast<int64_t>(topk_tokens));
    topk.insert(topk.end(), row.begin(), row.end());

    std::vector<int32_t> fitted(
        keys.begin(), keys.begin() + static_cast<int64_t>(std::min(history, topk_tokens - tail)));
    fitted.insert(fitted.end(), keys.end() - static_cast<int64_t>(tail), keys.end());
    const bool dummy = spec.seq_lens[r] == 0;
    auto& slots = attention.rows[next_row++];
    slots.clear();
    for (const int32_t key : dummy ? std::vector<int32_t>() : fitted) {
      const int64_t stride = spec.block_size + spec.block_gap_rows;
      slots.push_back(static_cast<int32_t>(table.blocks(r, key / spec.block_size) * stride +
                                           key % spec.block_size));
    }
  }

  void FillSelectedRows(std::mt19937& random) {
    std::ranges::fill(attention.cache, attention.spec.cache_format == CacheFormat::kFp8E4M3Fnuz
                                           ? std::byte{0x80}
                                           : std::byte{0xFF});
    for (const auto& row : attention.rows) {
      for (const int32_t slot : row) {
        WriteCacheRow(attention.spec.cache_format, attention.spec.dims, attention.kv_scale, random,
                      attention.Slot(slot));
      }
    }
  }

  PagedSpec spec;
  AttentionCase attention;
  BlockTable table;
  std::vector<int32_t> blocks;
  std::vector<int32_t> topk;  // [tokens, Width()]
  int64_t max_blocks = 0;
  size_t next_row = 0;
};

Result<Plan> MakePagedPlan(const PagedCase& paged, const RunOptions& options) {
  const PagedSpec& spec = paged.spec;
  auto plan = Plan::Create({.schedule = options.schedule,
                            .num_compute_units = options.num_compute_units,
                            .max_num_tokens = std::max(1, paged.attention.num_tokens()),
                            .max_num_reqs = static_cast<int32_t>(spec.seq_lens.size()) + 1,
                            .topk_tokens = spec.topk_tokens,
                            .dims = spec.attention.dims,
                            .max_splits = options.max_splits,
                            .force_splits = options.force_splits});
  if (!plan.ok()) return plan;
  std::vector<int32_t> query_start_loc(1, 0);
  for (const int32_t length : spec.query_lens) {
    query_start_loc.push_back(query_start_loc.back() + length);
  }
  const auto built = plan->Build({.query_start_loc = query_start_loc,
                                  .seq_lens = spec.seq_lens,
                                  .num_tokens = paged.attention.num_tokens(),
                                  .dims = spec.attention.dims,
                                  .q_dtype = spec.attention.q_dtype,
                                  .cache_format = spec.attention.cache_format,
                                  .topk_tokens = spec.topk_tokens});
  if (!built.ok()) return built.status();
  return plan;
}

Status RunSparseMla(const Backend& backend, const PagedCase& paged, const RunOptions& options,
                    Outputs& outputs) {
  const auto plan = MakePagedPlan(paged, options);
  if (!plan.ok()) return plan.status();
  const auto bytes =
      WorkspaceBytes(backend, plan.value().capacity(), static_cast<int32_t>(paged.Width()));
  if (!bytes.ok()) return bytes.status();
  const GuardedBuffer scratch(bytes.value(), options.scratch);
  const Status status =
      SparseMla(backend,
                {.topk_indices = View<const int32_t, 2>::Contiguous(
                     paged.topk.data(), {paged.attention.num_tokens(), paged.Width()}),
                 .block_table = paged.table,
                 .attention = paged.attention.Params(outputs)},
                plan.value(), scratch.workspace());
  EXPECT_TRUE(scratch.GuardIntact());
  EXPECT_TRUE(outputs.UntouchedFrom(paged.attention.num_tokens()));
  return status;
}

// "" if the call's answers are those of attention over slots converted here.
std::string PagedMismatch(const Backend& backend, const PagedCase& paged,
                          const RunOptions& options = {}) {
  Outputs got = paged.attention.MakeOutputs();
  const Status status = RunSparseMla(backend, paged, options, got);
  if (!status.ok()) return status.message();
  const AttentionSpec& spec = paged.attention.spec;
  return trace::CompareAnswers(got.answers(), Expected(paged.attention).answers(),
                               paged.attention.num_tokens(),
                               trace::ToleranceFor(spec.cache_format, spec.out_dtype))
      .first_mismatch;
}

using SparseMlaTest = KernelTest;
INSTANTIATE_TEST_SUITE_P(All, SparseMlaTest, EveryKernel(), KernelName);
using SparseMlaFormats = KernelFormatTest;
INSTANTIATE_TEST_SUITE_P(All, SparseMlaFormats, EveryKernelAndFormat(), KernelFormatName);

// A35, A36, A40, A41, A45: block sizes, blocks that lie apart, k-pool rows; a slot of another
// request or block 0 holds NaN.
TEST_P(SparseMlaFormats, EveryBlockSizeMatchesTheReferenceWithAndWithoutKpool) {
  for (const int32_t block_size : {1, 2, 16, 61, 64}) {
    for (const int32_t tail_width : {0, 3, 128}) {
      for (const int64_t gap : {0, 5}) {
        const PagedCase paged({.tail_width = tail_width,
                               .block_size = block_size,
                               .block_gap_rows = gap,
                               .attention = ForFormat({}, format())});
        EXPECT_EQ(PagedMismatch(backend(), paged), "")
            << "block_size " << block_size << ", tail " << tail_width << ", gap " << gap;
      }
    }
  }
}

TEST_P(SparseMlaTest, EveryCutMatchesTheReference) {
  const PagedCase paged(
      {.query_lens = {7, 1, 20},
       .seq_lens = {300, 129, 20},
       .topk_tokens = 128,
       .attention = {.split_query = true, .packed = false, .sinks = SinkKind::kMixed}});
  for (const int32_t splits : {0, 1, 2, 5, 16}) {
    EXPECT_EQ(PagedMismatch(backend(), paged, {.force_splits = splits}), "") << splits << " splits";
  }
}

// A01: packed rows of requests with 2, 0 and 1 tokens; nothing behind row 2 is written.
TEST_P(SparseMlaTest, ARequestWithoutTokensTakesNoRow) {
  const PagedCase paged({.query_lens = {2, 0, 1}, .seq_lens = {5, 3, 4}, .padding_rows = 0});
  Outputs got = paged.attention.MakeOutputs();
  ASSERT_TRUE(RunSparseMla(backend(), paged, {}, got).ok());
  EXPECT_TRUE(got.UntouchedFrom(3));
  EXPECT_EQ(PagedMismatch(backend(), paged), "");
}

// A61, A62: the rows of one request see its keys up to their own position, for any number of rows.
TEST_P(SparseMlaTest, DraftRowsOfARequestSeeTheKeysUpToThemselves) {
  for (int32_t next_n = 1; next_n <= 8; ++next_n) {
    const PagedCase paged(
        {.query_lens = {next_n, next_n, next_n},
         .seq_lens = {8, 11, 30},
         .topk_tokens = 64,
         .attention = {.out_dtype = DType::kFloat32, .seed = static_cast<uint32_t>(next_n)}});
    for (int32_t j = 0; j < next_n; ++j) {
      ASSERT_EQ(paged.attention.rows[static_cast<size_t>(j)].size(),
                static_cast<size_t>(8 - next_n + j + 1));
    }
    EXPECT_EQ(PagedMismatch(backend(), paged), "") << next_n << " rows a request";
  }
}

TEST_P(SparseMlaTest, NoTokensIsASuccessThatWritesNothing) {  // A02
  const PagedCase paged({.query_lens = {0, 0}, .seq_lens = {5, 0}, .padding_rows = 0});
  Outputs got = paged.attention.MakeOutputs();
  EXPECT_TRUE(RunSparseMla(backend(), paged, {}, got).ok());
  EXPECT_TRUE(got.UntouchedFrom(0));
}

// A44: rows computed in chunks, each with its own call, have the bits of one call.
TEST_P(SparseMlaTest, AnyChunkingOfThePrefillGivesTheSameBits) {
  const PagedCase whole({.query_lens = {24}, .seq_lens = {60}, .padding_rows = 0});
  const RunOptions options = {.force_splits = 2};
  Outputs want = whole.attention.MakeOutputs();
  ASSERT_TRUE(RunSparseMla(backend(), whole, options, want).ok());
  const size_t row_bytes = want.bytes().size() / static_cast<size_t>(want.out().shape[0]);
  for (const int32_t chunk : {1, 5, 12}) {
    for (int32_t begin = 0; begin < 24; begin += chunk) {
      const int32_t rows = std::min(chunk, 24 - begin);
      PagedCase part = whole;
      part.table.blocks.data = part.blocks.data();
      part.spec.query_lens = {rows};
      part.spec.seq_lens = {60 - 24 + begin + rows};
      part.topk.erase(part.topk.begin(), part.topk.begin() + begin * part.Width());
      part.attention.rows.erase(part.attention.rows.begin(), part.attention.rows.begin() + begin);
      part.attention.rows.resize(static_cast<size_t>(rows));
      const auto query_row = static_cast<int64_t>(whole.attention.query.size()) / 24;
      part.attention.query.erase(part.attention.query.begin(),
                                 part.attention.query.begin() + begin * query_row);
      Outputs got = part.attention.MakeOutputs();
      ASSERT_TRUE(RunSparseMla(backend(), part, options, got).ok());
      const auto size = static_cast<size_t>(rows) * row_bytes;
      EXPECT_TRUE(
          std::ranges::equal(got.bytes().first(size),
                             want.bytes().subspan(static_cast<size_t>(begin) * row_bytes, size)))
          << "rows " << begin << " to " << begin + rows;
    }
  }
}

// ---- golden cases ------------------------------------------------------------------------------

std::vector<std::string> CaseFiles() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(SPARSEMLA_TEST_DATA) + "/cases")) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().stem().string());
  }
  std::ranges::sort(names);
  return names;
}

class GoldenCases : public testing::TestWithParam<std::tuple<KernelUnderTest, std::string>> {};
INSTANTIATE_TEST_SUITE_P(All, GoldenCases,
                         testing::Combine(EveryKernel(), testing::ValuesIn(CaseFiles())),
                         [](const auto& parameters) {
                           return std::get<0>(parameters.param).name() + "_" +
                                  std::get<1>(parameters.param);
                         });

// The answers in the files were made in float64 by another program: this is what holds `ref`.
TEST_P(GoldenCases, AreAnsweredWithinToleranceWithTheSameBitsOnAnyThreads) {
  const auto& [kernel, name] = GetParam();
  if (!kernel.unavailable_reason.empty()) GTEST_SKIP() << kernel.unavailable_reason;
  const auto loaded =
      trace::LoadCase(std::string(SPARSEMLA_TEST_DATA) + "/cases/" + name + ".safetensors");
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  const trace::Case& input = loaded.value();
  const trace::ExpectedAnswers& expected = input.expected;
  ASSERT_FALSE(expected.out.empty());
  const std::string refusal =
      MakeBackend(kernel)->UnsupportedReason({.dims = input.dims,
                                              .q_dtype = input.q_dtype(),
                                              .cache_format = input.kv_cache.format,
                                              .out_dtype = input.model_dtype});
  if (!refusal.empty()) GTEST_SKIP() << refusal;
  const bool is_ref = kernel.backend == "ref";
  const auto splits_to_try =
      is_ref ? std::vector<int32_t>{1, 5} : std::vector<int32_t>{1, 2, 5, 16};
  for (const int32_t splits : splits_to_try) {
    std::vector<std::byte> first_out;
    for (const int32_t threads : is_ref ? std::vector<int32_t>{1} : std::vector<int32_t>{1, 2, 7}) {
      const auto result = trace::RunCase(input, *MakeBackend(kernel, threads), {.splits = splits});
      ASSERT_TRUE(result.ok()) << result.status().message();
      const trace::CaseResult& got = result.value();
      const auto out =
          ConstTensor<3>::Contiguous(got.out.data(), input.model_dtype, expected.out.shape);
      const auto lse = View<const float, 2>::Contiguous(got.lse.data(), expected.lse.shape);
      EXPECT_EQ(trace::CompareAnswers(
                    {out, lse},
                    {{expected.out.data, DType::kFloat32, expected.out.shape, expected.out.strides},
                     expected.lse},
                    input.num_tokens, trace::ToleranceFor(input.kv_cache.format, input.model_dtype))
                    .first_mismatch,
                "")
          << splits << " splits, " << threads << " threads";
      EXPECT_TRUE(std::ranges::equal(got.req_id_per_token, expected.req_id_per_token));
      EXPECT_TRUE(std::ranges::equal(got.paged_kv_indptr, expected.paged_kv_indptr));
      EXPECT_TRUE(std::ranges::equal(got.selected_indptr, expected.selected_indptr));
      EXPECT_TRUE(std::ranges::equal(got.selected_slots, expected.selected_slots));
      if (first_out.empty()) first_out = got.out;
      EXPECT_EQ(got.out, first_out) << splits << " splits, " << threads << " threads";
    }
  }
}

TEST(GoldenCaseFiles, AreThere) {
  EXPECT_GE(CaseFiles().size(), 13u);
}

}  // namespace
}  // namespace sparsemla::test
