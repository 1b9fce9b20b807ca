// Conformance of every attention kernel under every cut of the rows: schedules, splits, compute
// units, threads, scratch contents, batch mates.
#include <algorithm>
#include <cmath>

#include "tests/kernel_test.h"

namespace sparsemla::test {
namespace {

AttentionSpec MixedRows() {
  return {.dims = {.num_heads = 5, .kv_lora_rank = 40, .qk_rope_head_dim = 8},
          .row_lengths = {1, 0, 700, 17, 64, 5, 33, 2, 300, 16},
          .padding_rows = 3,
          .num_slots = 1000,
          .sinks = SinkKind::kMixed};
}

void ExpectSameBits(const Backend& backend, const AttentionCase& attention,
                    const RunOptions& options, const Outputs& want, const std::string& what) {
  Outputs got = attention.MakeOutputs();
  const Status status = RunAttention(backend, attention, options, got);
  ASSERT_TRUE(status.ok()) << what << ": " << status.message();
  EXPECT_TRUE(SameBits(got, want)) << what;
}

using AttentionSchedules = KernelFormatTest;
INSTANTIATE_TEST_SUITE_P(All, AttentionSchedules, EveryKernelAndFormat(), KernelFormatName);

TEST_P(AttentionSchedules, EveryCutOfTheRowsMatchesTheReference) {
  const AttentionCase attention(ForFormat(MixedRows(), format()));
  for (const int32_t units : {1, 8, 304}) {
    for (const int32_t splits : {1, 2, 5, 16}) {
      EXPECT_EQ(
          Mismatch(backend(), attention, {.num_compute_units = units, .force_splits = splits}), "")
          << units << " units, every row in " << splits;
      EXPECT_EQ(Mismatch(backend(), attention, {.num_compute_units = units, .max_splits = splits}),
                "")
          << units << " units, at most " << splits << " splits";
    }
  }
}

// Head folding gives virtual rows of fewer heads (64 and 128 heads fold by 16).
TEST_P(AttentionSchedules, TheAiterScheduleMatchesTheReferenceFoldedOrNot) {
  for (const int32_t heads : {16, 32, 64, 128}) {
    AttentionSpec spec = MixedRows();
    spec.dims.num_heads = heads;
    spec.row_lengths = {1, 0, 130, 17};
    const AttentionCase attention(ForFormat(spec, format()));
    for (const int32_t units : {1, 8, 304}) {
      for (const int32_t splits : {1, 5, 16}) {
        EXPECT_EQ(Mismatch(backend(), attention,
                           {.schedule = ScheduleKind::kAiter,
                            .num_compute_units = units,
                            .max_splits = splits}),
                  "")
            << heads << " heads, " << units << " units, " << splits << " splits";
      }
    }
  }
}

// N7, A44, A48: a fixed plan gives fixed bits.
TEST_P(AttentionSchedules, ThreadsScratchContentsAndRepetitionDoNotChangeABit) {
  const AttentionCase attention(ForFormat(MixedRows(), format()));
  for (const RunOptions& base : {RunOptions{.force_splits = 3}, RunOptions{},
                                 RunOptions{.num_compute_units = 304, .max_splits = 16}}) {
    Outputs want = attention.MakeOutputs();
    ASSERT_TRUE(RunAttention(*MakeBackend(kernel(), 1), attention, base, want).ok());
    const int32_t most_threads = kernel().backend == "ref" ? 1 : 8;
    for (int32_t threads = 1; threads <= most_threads; ++threads) {
      const auto pool = MakeBackend(kernel(), threads);
      for (const std::byte scratch : {std::byte{0}, std::byte{0xFF}, std::byte{0x7F}}) {
        RunOptions options = base;
        options.scratch = scratch;
        for (int repeat = 0; repeat < 2; ++repeat) {
          ExpectSameBits(*pool, attention, options, want, std::to_string(threads) + " threads");
        }
      }
    }
  }
}

// A64: all-NaN output in some calls at one split count.
TEST_P(AttentionSchedules, EverySplitCountRepeatsItsBitsAndAgreesWithTheOthers) {
  AttentionSpec spec = ForFormat({.row_lengths = {700}, .num_slots = 500}, format());
  spec.dims.num_heads = 16;
  const AttentionCase attention(spec);
  for (int32_t splits = 1; splits <= 64; ++splits) {
    const RunOptions options = {.force_splits = splits};
    EXPECT_EQ(Mismatch(backend(), attention, options), "") << splits << " splits";
    Outputs want = attention.MakeOutputs();
    ASSERT_TRUE(RunAttention(backend(), attention, options, want).ok());
    for (int repeat = 0; repeat < 3; ++repeat) {
      ExpectSameBits(backend(), attention, options, want, std::to_string(splits) + " splits");
    }
  }
}

// A65, A44: in batch-invariant mode a row alone has the bits that it has among others.
TEST_P(AttentionSchedules, ABatchInvariantRowIsTheSameAloneAndAmongOthers) {
  const AttentionCase batch(ForFormat(MixedRows(), format()));
  const RunOptions options = {.max_splits = 4, .batch_invariant = true};
  Outputs together = batch.MakeOutputs();
  ASSERT_TRUE(RunAttention(backend(), batch, options, together).ok());
  EXPECT_EQ(Mismatch(backend(), batch, options), "");
  for (const size_t row : {size_t{2}, size_t{4}, size_t{8}}) {
    AttentionCase alone = batch;
    for (size_t r = 0; r < alone.rows.size(); ++r) {
      if (r != row) alone.rows[r].clear();
    }
    // The longest row sets topk_tokens, which the caps depend on: keep it the same.
    alone.rows[2].resize(batch.rows[2].size(), -1);
    Outputs got = alone.MakeOutputs();
    ASSERT_TRUE(RunAttention(backend(), alone, options, got).ok());
    const auto row_bytes = together.bytes().size() / static_cast<size_t>(together.out().shape[0]);
    EXPECT_TRUE(std::ranges::equal(got.bytes().subspan(row * row_bytes, row_bytes),
                                   together.bytes().subspan(row * row_bytes, row_bytes)))
        << "row " << row;
    for (int64_t h = 0; h < batch.spec.dims.num_heads; ++h) {
      EXPECT_EQ(got.lse()(row, h), together.lse()(row, h));
    }
  }
}

using AttentionBatches = KernelTest;
INSTANTIATE_TEST_SUITE_P(All, AttentionBatches, EveryKernel(), KernelName);

// A12: a launch dimension of 16 bits.
TEST_P(AttentionBatches, MoreThan65536RowsMatchTheReference) {
  for (const size_t num_rows : {size_t{65536}, size_t{65537}}) {
    AttentionSpec spec = {.dims = {.num_heads = 1, .kv_lora_rank = 4, .qk_rope_head_dim = 2}};
    spec.row_lengths.assign(num_rows, 1);
    spec.row_lengths.back() = 3;
    EXPECT_EQ(Mismatch(backend(), AttentionCase(spec)), "") << num_rows << " rows";
  }
}

// A02, on every stage that takes a plan.
TEST_P(AttentionBatches, NoTokensIsASuccessThatWritesNothing) {
  const AttentionCase attention({.row_lengths = {}});
  Outputs got = attention.MakeOutputs();
  ASSERT_TRUE(RunAttention(backend(), attention, {}, got).ok());
  EXPECT_TRUE(got.UntouchedFrom(0));
}

TEST_P(AttentionBatches, AnEmptyCacheGivesEmptyRows) {
  AttentionCase attention({.row_lengths = {3, 20}});
  for (auto& row : attention.rows) std::ranges::fill(row, 0);
  attention.spec.num_slots = 0;
  Outputs got = attention.MakeOutputs();
  ASSERT_TRUE(RunAttention(backend(), attention, {}, got).ok());
  for (int64_t h = 0; h < attention.spec.dims.num_heads; ++h) {
    EXPECT_EQ(got.lse()(0, h), -INFINITY);
    EXPECT_EQ(got.lse()(1, h), -INFINITY);
  }
}

}  // namespace
}  // namespace sparsemla::test
