// Merge on every back end: states of split rows and of several ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/numeric.h"
#include "tests/kernel_test.h"

namespace sparsemla::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Partial states of one head each (unless said otherwise) and the rows that they make.
struct MergeCase {
  int64_t heads = 1;  // of a partial
  int64_t width = 3;
  int32_t fold = 1;
  std::vector<float> lse;             // [num_partials, heads]
  std::vector<float> out;             // [num_partials, heads, width]
  std::vector<int32_t> indptr = {0};  // [groups + 1]
  std::vector<RowRange> final_map;
  std::vector<int32_t> partial_map;
  std::vector<float> sinks;

  // Adds a one-head partial whose values are value, 2 * value, 3 * value, ...
  void AddPartial(float partial_lse, float value) {
    partial_map.push_back(static_cast<int32_t>(lse.size()));
    lse.push_back(partial_lse);
    for (int64_t d = 0; d < width; ++d) out.push_back(value * static_cast<float>(d + 1));
  }
  void EndGroup(int32_t row) {
    indptr.push_back(static_cast<int32_t>(partial_map.size()));
    final_map.push_back({row, row + 1});
  }
  Partials partials() const {
    const int64_t count = static_cast<int64_t>(lse.size()) / heads;
    return {.out = View<const float, 3>::Contiguous(out.data(), {count, heads, width}),
            .lse = View<const float, 2>::Contiguous(lse.data(), {count, heads}),
            .reduce_indptr = indptr,
            .reduce_final_map = final_map,
            .reduce_partial_map = partial_map,
            .fold = fold};
  }
};

Outputs MergeInto(const Backend& backend, const MergeCase& input, int64_t num_rows) {
  Outputs outputs(num_rows,
                  {.num_heads = static_cast<int32_t>(input.heads * input.fold),
                   .kv_lora_rank = static_cast<int32_t>(input.width)},
                  DType::kFloat32, false);
  const Status status = Merge(backend, {.partials = input.partials(),
                                        .sinks = input.sinks,
                                        .out = outputs.out(),
                                        .lse = outputs.lse()});
  EXPECT_TRUE(status.ok()) << status.message();
  return outputs;
}

float OutAt(const Outputs& outputs, int64_t row, int64_t head, int64_t column) {
  const Tensor<3> out = outputs.out();
  return static_cast<const float*>(out.data)[row * out.strides[0] + head * out.strides[1] + column];
}

using MergeTest = KernelTest;
INSTANTIATE_TEST_SUITE_P(All, MergeTest, EveryKernel(), KernelName);

// A04, N4: graph-padding rows.
TEST_P(MergeTest, EmptyPartialsMakeAnEmptyRow) {
  MergeCase input;
  for (int p = 0; p < 4; ++p) input.AddPartial(-kInf, kNan);
  input.EndGroup(0);
  const Outputs got = MergeInto(backend(), input, 1);
  EXPECT_EQ(got.lse()(0, 0), -kInf);
  for (int64_t d = 0; d < 3; ++d) EXPECT_EQ(OutAt(got, 0, 0, d), 0.0f);
}

// A04, A24: an empty partial's values do not matter, whether its mark is ours or FlashMLA's (A23).
TEST_P(MergeTest, OneLivePartialAmongEmptyOnesIsReturnedExactly) {
  for (const float mark : {-kInf, kInf}) {
    for (const float dead_value : {0.0f, kNan, kInf, 1e38f}) {
      for (const size_t live : {size_t{0}, size_t{1}, size_t{3}}) {
        MergeCase input;
        for (size_t p = 0; p < 4; ++p) {
          input.AddPartial(p == live ? 0.0f : mark, p == live ? 0.7f : dead_value);
        }
        input.EndGroup(0);
        const Outputs got = MergeInto(backend(), input, 1);
        EXPECT_EQ(got.lse()(0, 0), 0.0f);
        for (int64_t d = 0; d < 3; ++d) {
          EXPECT_EQ(OutAt(got, 0, 0, d), 0.7f * static_cast<float>(d + 1));
        }
      }
    }
  }
}

TEST_P(MergeTest, SumsOf2And8WithValues0And10Give8) {  // A21, A22, N2
  MergeCase input;
  input.AddPartial(std::log(2.0f), 0.0f);
  input.AddPartial(std::log(8.0f), 10.0f);
  input.EndGroup(0);
  const Outputs got = MergeInto(backend(), input, 1);
  EXPECT_NEAR(OutAt(got, 0, 0, 0), 8.0f, 1e-5f);
  EXPECT_NEAR(got.lse()(0, 0), std::log(10.0f), 1e-6f);
}

TEST_P(MergeTest, TheSinkIsAddedOnceHoweverManyPartialsThereAre) {  // A19, N5, N6
  for (const int count : {1, 2, 5}) {
    MergeCase input;
    for (int p = 0; p < count; ++p) {
      input.AddPartial(std::log(4.0f / static_cast<float>(count)), 1.0f);
    }
    input.EndGroup(0);
    input.sinks = {0.0f};
    const Outputs got = MergeInto(backend(), input, 1);
    EXPECT_NEAR(OutAt(got, 0, 0, 0), 0.8f, 1e-6f) << count << " partials";
    EXPECT_NEAR(got.lse()(0, 0), std::log(5.0f), 1e-6f) << count << " partials";
  }
}

TEST_P(MergeTest, InfiniteSinksAndEmptyRowsFollowTheTable) {  // A19, N4, N5
  for (const float sink : {-kInf, -1.5f, kInf}) {
    MergeCase input;
    input.AddPartial(2.0f, 3.0f);
    input.AddPartial(-kInf, kNan);
    input.EndGroup(0);
    input.AddPartial(-kInf, kNan);
    input.AddPartial(kInf, kNan);
    input.EndGroup(1);
    input.sinks = {sink};
    const Outputs got = MergeInto(backend(), input, 2);
    EXPECT_EQ(got.lse()(1, 0), sink);
    EXPECT_EQ(OutAt(got, 1, 0, 1), 0.0f);
    if (std::isinf(sink)) {
      EXPECT_EQ(OutAt(got, 0, 0, 0), sink > 0 ? 0.0f : 3.0f);
      EXPECT_EQ(got.lse()(0, 0), sink > 0 ? kInf : 2.0f);
    } else {
      EXPECT_NEAR(got.lse()(0, 0), std::log(std::exp(2.0f) + std::exp(sink)), 1e-6f);
    }
  }
}

TEST_P(MergeTest, NanIsNotHidden) {  // N12, N6
  for (const float sink : {-kInf, 0.0f}) {
    MergeCase input;
    input.AddPartial(1.0f, 1.0f);
    input.AddPartial(kNan, 2.0f);
    input.AddPartial(-kInf, 2.0f);
    input.EndGroup(0);
    input.AddPartial(1.0f, kNan);  // a live state whose values are NaN
    input.AddPartial(1.0f, 1.0f);
    input.EndGroup(1);
    input.sinks = {sink};
    const Outputs got = MergeInto(backend(), input, 2);
    EXPECT_TRUE(std::isnan(got.lse()(0, 0)));
    EXPECT_TRUE(std::isnan(OutAt(got, 0, 0, 0)));
    EXPECT_FALSE(std::isnan(got.lse()(1, 0)));
    EXPECT_TRUE(std::isnan(OutAt(got, 1, 0, 0)));
  }
}

TEST_P(MergeTest, LogSumsOfAnySizeNeitherOverflowNorVanish) {
  for (const float size : {-2000.0f, -90.0f, 90.0f, 2000.0f}) {
    MergeCase input;
    input.AddPartial(size, 1.0f);
    input.AddPartial(size, 3.0f);
    input.AddPartial(size - 500.0f, 7.0f);
    input.EndGroup(0);
    const Outputs got = MergeInto(backend(), input, 1);
    EXPECT_NEAR(OutAt(got, 0, 0, 0), 2.0f, 1e-6f) << size;
    EXPECT_NEAR(got.lse()(0, 0), size + std::log(2.0f), 3e-7f * std::abs(size) + 1e-6f);
  }
}

// Only rows with partials are written, and a group may stand for any row.
TEST_P(MergeTest, RowsOfGroupsWithoutPartialsAreNotTouched) {
  MergeCase input;
  input.EndGroup(0);
  input.AddPartial(0.0f, 1.0f);
  input.AddPartial(0.0f, 3.0f);
  input.EndGroup(2);
  input.EndGroup(1);
  const Outputs got = MergeInto(backend(), input, 4);
  for (const int64_t row : {0, 1, 3}) EXPECT_TRUE(got.RowUntouched(row)) << "row " << row;
  EXPECT_NEAR(OutAt(got, 2, 0, 0), 2.0f, 1e-6f);
  EXPECT_NEAR(got.lse()(2, 0), std::log(2.0f), 1e-6f);
  EXPECT_FALSE(got.UntouchedFrom(2));
}

// The map decides which partials make a row, in which order; unnamed partials do not count (N7).
TEST_P(MergeTest, TheMapChoosesThePartials) {
  MergeCase input;
  for (const float value : {100.0f, 1.0f, 200.0f, 3.0f}) input.AddPartial(0.0f, value);
  input.partial_map = {3, 1};
  input.EndGroup(0);
  const Outputs got = MergeInto(backend(), input, 1);
  EXPECT_NEAR(OutAt(got, 0, 0, 0), 2.0f, 1e-6f);
}

// A group may cover several rows: partial p + i belongs to the range's i-th row.
TEST_P(MergeTest, AGroupOfSeveralRowsMergesRowByRow) {
  MergeCase input;
  input.AddPartial(0.0f, 1.0f);
  input.AddPartial(800.0f, 10.0f);
  input.AddPartial(std::log(3.0f), 3.0f);
  input.AddPartial(800.0f, 30.0f);
  input.partial_map = {0, 2};
  input.indptr = {0, 2};
  input.final_map = {{1, 3}};
  const Outputs got = MergeInto(backend(), input, 3);
  EXPECT_TRUE(got.RowUntouched(0));
  EXPECT_NEAR(OutAt(got, 1, 0, 0), 2.5f, 1e-6f);
  EXPECT_NEAR(OutAt(got, 2, 0, 0), 20.0f, 1e-5f);
  EXPECT_NEAR(got.lse()(1, 0), std::log(4.0f), 1e-6f);
  EXPECT_NEAR(got.lse()(2, 0), 800.0f + std::log(2.0f), 1e-4f);
}

// Virtual rows of 2 heads: virtual row v is row v / fold, heads v % fold * 2 and the next.
TEST_P(MergeTest, VirtualRowsAreHeadsOfTheirRow) {
  MergeCase input;
  input.heads = 2;
  input.fold = 3;
  input.sinks = {-kInf, -kInf, -kInf, 0.0f, -kInf, kInf};
  for (int v = 0; v < 6; ++v) {
    for (int h = 0; h < 2; ++h) {
      input.lse.push_back(0.0f);
      for (int d = 0; d < 3; ++d) input.out.push_back(static_cast<float>(v * 2 + h));
    }
    input.partial_map.push_back(v);
    input.EndGroup(v);
  }
  const Outputs got = MergeInto(backend(), input, 2);
  for (int64_t row = 0; row < 2; ++row) {
    for (int64_t head = 0; head < 6; ++head) {
      const float value = static_cast<float>(row * 6 + head);
      const float factor = head == 3 ? 0.5f : head == 5 ? 0.0f : 1.0f;
      EXPECT_NEAR(OutAt(got, row, head, 2), factor * value, 1e-6f * value) << row << " " << head;
    }
  }
}

// A24: the keys of a row dealt to 2 and 4 ranks by the parity of their slots, each rank's state
// without sinks, merged once with them. One rank may own no key.
TEST_P(MergeTest, StatesOfSeveralRanksMakeTheWholeRow) {
  AttentionSpec spec = ForFormat({.dims = {.num_heads = 6, .kv_lora_rank = 24},
                                  .row_lengths = {8, 30, 1},
                                  .sinks = SinkKind::kFinite},
                                 CacheFormat::kFloat32);
  const std::string refusal = backend().UnsupportedReason(ProblemOf(spec));
  if (!refusal.empty()) GTEST_SKIP() << refusal;
  const AttentionCase whole(spec);
  for (const int32_t ranks : {2, 4}) {
    MergeCase merge;
    merge.heads = spec.dims.num_heads;
    merge.width = spec.dims.kv_lora_rank;
    merge.sinks = whole.sinks;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      AttentionCase part = whole;
      part.sinks.clear();
      for (auto& row : part.rows) {
        for (int32_t& slot : row) slot = slot % ranks == rank ? slot : -1;
      }
      Outputs state(3, spec.dims, DType::kFloat32);
      ASSERT_TRUE(RunAttention(backend(), part, {}, state).ok());
      const auto* const values = reinterpret_cast<const float*>(state.bytes().data());
      merge.out.insert(merge.out.end(), values, values + state.bytes().size() / sizeof(float));
      merge.lse.insert(merge.lse.end(), state.lse().data,
                       state.lse().data + state.lse_bytes().size() / sizeof(float));
    }
    for (int32_t row = 0; row < 3; ++row) {
      for (int32_t rank = 0; rank < ranks; ++rank) merge.partial_map.push_back(rank * 3 + row);
      merge.EndGroup(row);
    }
    const Outputs got = MergeInto(backend(), merge, 3);
    EXPECT_EQ(trace::CompareAnswers(got.answers(), Expected(whole).answers(), 3,
                                    {.out_relative = 1e-5, .lse_absolute = 1e-5})
                  .first_mismatch,
              "")
        << ranks << " ranks";
  }
}

// N8: into every output type, and lse may be left out.
TEST_P(MergeTest, OutputsRoundToNearestEvenInTheirType) {
  MergeCase input;
  input.AddPartial(0.0f, 1.00390625f);  // 1 + 2^-8: a tie in bf16
  input.EndGroup(0);
  Outputs bf16(1, {.num_heads = 1, .kv_lora_rank = 3}, DType::kBFloat16);
  ASSERT_TRUE(Merge(backend(), {.partials = input.partials(), .out = bf16.out()}).ok());
  EXPECT_EQ(static_cast<const BFloat16*>(bf16.out().data)[0].bits, FromFloat<BFloat16>(1.0f).bits);
  EXPECT_TRUE(std::ranges::all_of(bf16.lse_bytes(), [](std::byte b) { return b == kPoison; }));
  Outputs fp16(1, {.num_heads = 1, .kv_lora_rank = 3}, DType::kFloat16);
  ASSERT_TRUE(Merge(backend(), {.partials = input.partials(), .out = fp16.out()}).ok());
  EXPECT_EQ(ToFloat(static_cast<const Float16*>(fp16.out().data)[1]), 2.0078125f);
}

TEST_P(MergeTest, NoPartialsWriteNothing) {  // A02
  MergeCase input;
  const Outputs got = MergeInto(backend(), input, 2);
  EXPECT_TRUE(got.UntouchedFrom(0));
}

}  // namespace
}  // namespace sparsemla::test
