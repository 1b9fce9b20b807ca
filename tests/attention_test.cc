// Conformance of every attention kernel: shapes, types and the edges of a row. Expectations come
// from `ref` unsplit, or from a closed form where there is one.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/numeric.h"
#include "tests/kernel_test.h"

namespace sparsemla::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The value columns of a cache row, decoded as docs/numerics.md N10 says.
std::vector<float> ValueOf(AttentionCase& attention, int32_t slot) {
  const AttentionSpec& spec = attention.spec;
  const std::byte* const row = attention.Slot(slot);
  std::vector<float> value(static_cast<size_t>(spec.dims.kv_lora_rank));
  for (size_t d = 0; d < value.size(); ++d) {
    const auto code = std::to_integer<uint8_t>(row[d]);
    if (spec.cache_format == CacheFormat::kFp8DsMla) {
      float scale = 0.0f;
      std::memcpy(&scale, row + 512 + 4 * (d / 128), sizeof(scale));
      value[d] = ToFloat(Float8E4M3{code}) * scale;
    } else if (spec.cache_format == CacheFormat::kFp8E4M3) {
      value[d] = ToFloat(Float8E4M3{code}) * attention.kv_scale;
    } else if (spec.cache_format == CacheFormat::kFp8E4M3Fnuz) {
      value[d] = ToFloat(Float8E4M3Fnuz{code}) * attention.kv_scale;
    } else if (spec.cache_format == CacheFormat::kFloat32) {
      std::memcpy(&value[d], row + 4 * d, sizeof(float));
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, row + 2 * d, sizeof(bits));
      value[d] = spec.cache_format == CacheFormat::kBFloat16 ? ToFloat(BFloat16{bits})
                                                             : ToFloat(Float16{bits});
    }
  }
  return value;
}

float OutAt(const Outputs& outputs, int64_t row, int64_t head, int64_t column) {
  const Tensor<3> out = outputs.out();
  const int64_t offset = row * out.strides[0] + head * out.strides[1] + column;
  return VisitDType(out.dtype,
                    [&]<typename T>() { return ToFloat(static_cast<const T*>(out.data)[offset]); });
}

using AttentionShapes = KernelFormatTest;
INSTANTIATE_TEST_SUITE_P(All, AttentionShapes, EveryKernelAndFormat(), KernelFormatName);

// A15, A16, A18, N1, N2: no head count needs padding by the caller.
TEST_P(AttentionShapes, EveryHeadCountMatchesTheReference) {
  for (const int32_t heads :
       {1, 2, 3, 4, 5, 7, 8, 11, 12, 16, 17, 20, 24, 31, 32, 33, 48, 64, 66, 96, 127, 128}) {
    AttentionSpec spec = ForFormat({.row_lengths = {1, 0, 17, 34}}, format());
    spec.dims.num_heads = heads;
    spec.seed = static_cast<uint32_t>(heads);
    EXPECT_EQ(Mismatch(backend(), AttentionCase(spec)), "") << heads << " heads";
  }
}

// A32, A33, lesson 10: widths are data, not constants.
TEST_P(AttentionShapes, EveryLatentAndRopeWidthMatchesTheReference) {
  for (const auto& [latent, rope] : std::vector<std::pair<int32_t, int32_t>>{{512, 64},
                                                                             {512, 0},
                                                                             {256, 64},
                                                                             {33, 0},
                                                                             {32, 8},
                                                                             {1, 0},
                                                                             {7, 3},
                                                                             {100, 64},
                                                                             {1030, 5}}) {
    AttentionSpec spec = ForFormat(
        {.dims = {.num_heads = 5, .kv_lora_rank = latent, .qk_rope_head_dim = rope}}, format());
    EXPECT_EQ(Mismatch(backend(), AttentionCase(spec)), "") << latent << " + " << rope;
  }
}

// A41, A53.
TEST_P(AttentionShapes, EveryRowLengthMatchesTheReference) {
  for (const int32_t heads : {3, 16, 24}) {
    const AttentionSpec spec =
        ForFormat({.dims = {.num_heads = heads, .kv_lora_rank = 32, .qk_rope_head_dim = 8},
                   .row_lengths = {0,  1,   2,   15,  16,  17,  31,   33,   63,   64,
                                   65, 128, 255, 257, 511, 513, 2047, 2048, 2051, 2176},
                   .num_slots = 3000},
                  format());
    EXPECT_EQ(Mismatch(backend(), AttentionCase(spec)), "");
  }
}

TEST_P(AttentionShapes, EveryQueryAndOutputTypeMatchesTheReferenceWholeAndSplit) {
  std::vector<DType> q_dtypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  if (format() == CacheFormat::kFp8E4M3) q_dtypes.push_back(DType::kFloat8E4M3);
  if (format() == CacheFormat::kFp8E4M3Fnuz) q_dtypes.push_back(DType::kFloat8E4M3Fnuz);
  for (const DType q_dtype : q_dtypes) {
    for (const DType out_dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const bool split : {false, true}) {
        if (split && DTypeBytes(q_dtype) == 1) continue;  // an fp8 query is given whole
        AttentionSpec spec = ForFormat({.split_query = split}, format());
        spec.q_dtype = q_dtype;
        spec.out_dtype = out_dtype;
        EXPECT_EQ(Mismatch(backend(), AttentionCase(spec)), "")
            << DTypeName(q_dtype) << " -> " << DTypeName(out_dtype) << (split ? ", split" : "");
      }
    }
  }
}

TEST_P(AttentionShapes, StridedArraysGiveTheBitsOfPackedOnes) {
  for (const bool split : {false, true}) {
    AttentionSpec spec = ForFormat({.split_query = split, .sinks = SinkKind::kFinite}, format());
    const AttentionCase packed(spec);
    spec.packed = false;
    const AttentionCase strided(spec);
    EXPECT_EQ(Mismatch(backend(), strided), "");
    Outputs got = strided.MakeOutputs();
    Outputs want = packed.MakeOutputs();
    ASSERT_TRUE(RunAttention(backend(), strided, {}, got).ok());
    ASSERT_TRUE(RunAttention(backend(), packed, {}, want).ok());
    EXPECT_EQ(trace::CompareAnswers(got.answers(), want.answers(), packed.num_tokens(),
                                    {0.0, 0.0, 0.0, 0.0})
                  .first_mismatch,
              "");
  }
}

// A19, A20, N5.
TEST_P(AttentionShapes, SinksMatchTheReferenceWhetherFiniteOrNot) {
  for (const SinkKind sinks : {SinkKind::kFinite, SinkKind::kMixed}) {
    for (const int32_t splits : {1, 3}) {
      AttentionSpec spec = ForFormat({.sinks = sinks}, format());
      spec.dims.num_heads = 7;
      EXPECT_EQ(Mismatch(backend(), AttentionCase(spec), {.force_splits = splits}), "")
          << splits << " splits";
    }
  }
}

// The one weight is 1, so the output is the row itself: independent of `ref`. A29: a scale of a
// wrong tile shows here.
TEST_P(AttentionShapes, ARowOfOneKeyReturnsItsValue) {
  AttentionSpec spec = ForFormat({.row_lengths = {1, 1, 1}}, format());
  spec.out_dtype = DType::kFloat32;
  AttentionCase attention(spec);
  Outputs got = attention.MakeOutputs();
  ASSERT_TRUE(RunAttention(backend(), attention, {}, got).ok());
  for (int64_t row = 0; row < 3; ++row) {
    const std::vector<float> want = ValueOf(attention, attention.rows[static_cast<size_t>(row)][0]);
    for (int64_t h = 0; h < spec.dims.num_heads; ++h) {
      for (size_t d = 0; d < want.size(); ++d) {
        ASSERT_NEAR(OutAt(got, row, h, static_cast<int64_t>(d)), want[d], 1e-5f * std::abs(want[d]))
            << "row " << row << ", head " << h << ", column " << d;
      }
    }
  }
}

// Equal logits of 0 give the mean, and lse = ln n: independent of `ref`. N3: a slot named twice
// counts twice.
TEST_P(AttentionShapes, AZeroQueryReturnsTheMeanAndTheLogOfTheCount) {
  AttentionSpec spec = ForFormat({.row_lengths = {0}}, format());
  spec.out_dtype = DType::kFloat32;
  AttentionCase attention(spec);
  std::ranges::fill(attention.query, std::byte{0});
  attention.rows = {{attention.live_slots[0], attention.live_slots[1], attention.live_slots[0]}};
  Outputs got = attention.MakeOutputs();
  ASSERT_TRUE(RunAttention(backend(), attention, {}, got).ok());
  const std::vector<float> twice = ValueOf(attention, attention.live_slots[0]);
  const std::vector<float> once = ValueOf(attention, attention.live_slots[1]);
  for (size_t d = 0; d < once.size(); ++d) {
    ASSERT_NEAR(OutAt(got, 0, 1, static_cast<int64_t>(d)), (2.0f * twice[d] + once[d]) / 3.0f,
                1e-5f * (std::abs(twice[d]) + std::abs(once[d])))
        << "column " << d;
  }
  EXPECT_NEAR(got.lse()(0, 1), std::log(3.0f), 1e-6f);
}

// A06, A38, lesson 2: the invalid slots may stand anywhere and be any value; half of the cache is
// NaN, so reading a wrong row shows.
TEST_P(AttentionShapes, InvalidSlotsCountForNothingWhereverTheyStand) {
  const AttentionSpec spec = ForFormat({.row_lengths = {40, 40, 3, 20}}, format());
  const AttentionCase clean(spec);
  AttentionCase holed(spec);
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  const int32_t nasty[] = {-1, 2147480000, spec.num_slots, -7, kMax, -kMax - 1, spec.num_slots + 1};
  for (size_t r = 0; r < holed.rows.size(); ++r) {
    std::vector<int32_t> row;
    size_t next = r;
    for (const int32_t slot : holed.rows[r]) {
      for (size_t i = 0; i < (row.size() * 7 + r) % 3; ++i) row.push_back(nasty[next++ % 7]);
      row.push_back(slot);
    }
    row.insert(row.end(), 20, -1);
    holed.rows[r] = row;
  }
  for (const int32_t splits : {1, 4}) {
    Outputs got = holed.MakeOutputs();
    ASSERT_TRUE(RunAttention(backend(), holed, {.force_splits = splits}, got).ok());
    EXPECT_EQ(trace::CompareAnswers(got.answers(), Expected(clean).answers(), clean.num_tokens(),
                                    trace::ToleranceFor(format(), spec.out_dtype))
                  .first_mismatch,
              "");
  }
}

// N3.
TEST_P(AttentionShapes, TheOrderOfARowsSlotsDoesNotMatter) {
  const AttentionSpec spec = ForFormat({.row_lengths = {100, 30}}, format());
  const AttentionCase forward(spec);
  AttentionCase backward(spec);
  for (auto& row : backward.rows) std::ranges::reverse(row);
  Outputs got = backward.MakeOutputs();
  ASSERT_TRUE(RunAttention(backend(), backward, {}, got).ok());
  EXPECT_EQ(trace::CompareAnswers(got.answers(), Expected(forward).answers(), 2,
                                  trace::ToleranceFor(format(), spec.out_dtype))
                .first_mismatch,
            "");
}

// A03, A19, A70, N4: no keys, none valid, a request without tokens, padding: all the same.
TEST_P(AttentionShapes, RowsWithoutKeysReturnZeroAndTheSink) {
  for (const SinkKind sinks : {SinkKind::kNone, SinkKind::kMixed}) {
    AttentionSpec spec =
        ForFormat({.row_lengths = {3, 0, 40, 2}, .padding_rows = 2, .sinks = sinks}, format());
    AttentionCase attention(spec);
    std::ranges::fill(attention.rows[2], -1);
    std::ranges::fill(attention.query, std::byte{0});
    for (const int32_t splits : {1, 3}) {
      Outputs got = attention.MakeOutputs();
      ASSERT_TRUE(RunAttention(backend(), attention, {.force_splits = splits}, got).ok());
      for (const int64_t row : {1, 2, 4, 5}) {
        for (int64_t h = 0; h < spec.dims.num_heads; ++h) {
          const float sink =
              attention.sinks.empty() ? -INFINITY : attention.sinks[static_cast<size_t>(h)];
          EXPECT_EQ(got.lse()(row, h), sink) << "row " << row << ", head " << h;
          for (int64_t d = 0; d < spec.dims.kv_lora_rank; ++d) {
            ASSERT_EQ(OutAt(got, row, h, d), 0.0f) << "row " << row << ", head " << h;
          }
        }
      }
    }
  }
}

// A03: some callers do not want the store.
TEST_P(AttentionShapes, RowsWithoutKeysAreLeftAloneIfTheCallerSaysSo) {
  const AttentionSpec spec = ForFormat(
      {.row_lengths = {3, 0, 7, 2}, .padding_rows = 2, .packed = false, .sinks = SinkKind::kFinite},
      format());
  AttentionCase attention(spec);
  std::ranges::fill(attention.rows[2], -1);
  for (const int32_t splits : {1, 2}) {
    Outputs got = attention.MakeOutputs();
    ASSERT_TRUE(
        RunAttention(backend(), attention, {.force_splits = splits, .write_empty_rows = false}, got)
            .ok());
    for (const int64_t row : {1, 2, 4, 5}) EXPECT_TRUE(got.RowUntouched(row)) << "row " << row;
    for (const int64_t row : {0, 3}) EXPECT_FALSE(got.RowUntouched(row)) << "row " << row;
  }
}

// N12, A05: NaN in a selected row reaches that row's answers only; unselected NaN rows are in every
// case of this suite.
TEST_P(AttentionShapes, ANanInASelectedRowIsSeenInThatTokenAlone) {
  AttentionSpec spec = ForFormat({.row_lengths = {5, 40, 5}}, format());
  AttentionCase attention(spec);
  std::vector<bool> live(static_cast<size_t>(spec.num_slots));
  for (const int32_t slot : attention.live_slots) live[static_cast<size_t>(slot)] = true;
  const auto dead = std::ranges::find(live, false) - live.begin();
  attention.rows[1][33] = static_cast<int32_t>(dead);
  for (const int32_t splits : {1, 2, 5}) {
    Outputs got = attention.MakeOutputs();
    ASSERT_TRUE(RunAttention(backend(), attention, {.force_splits = splits}, got).ok());
    for (int64_t h = 0; h < spec.dims.num_heads; ++h) {
      EXPECT_TRUE(std::isnan(got.lse()(1, h)));
      EXPECT_TRUE(std::isnan(OutAt(got, 1, h, 0)));
      EXPECT_TRUE(std::isfinite(got.lse()(0, h)) && std::isfinite(got.lse()(2, h)));
      EXPECT_TRUE(std::isfinite(OutAt(got, 2, h, 0)));
    }
  }
  EXPECT_EQ(Mismatch(backend(), attention), "");
}

// N12: a logit of -inf weighs nothing, but 0 * inf is NaN in the value's column; one of +inf makes
// the whole head NaN.
TEST_P(AttentionShapes, AnInfinityInASelectedRowBehavesAsArithmeticSays) {
  const bool has_infinity = format() == CacheFormat::kFloat32 ||
                            format() == CacheFormat::kBFloat16 || format() == CacheFormat::kFloat16;
  if (!has_infinity) return;  // e4m3 has none
  AttentionSpec spec = ForFormat({.row_lengths = {5, 40, 5}}, format());
  AttentionCase attention(spec);
  const int32_t slot = attention.live_slots[0];
  for (auto& row : attention.rows) {
    std::ranges::replace(row, slot, attention.live_slots[1]);
  }
  attention.rows[1][20] = slot;
  const size_t element = format() == CacheFormat::kFloat32 ? 4 : 2;
  std::byte* const column = attention.Slot(slot) + 3 * element;
  if (format() == CacheFormat::kFloat32) {
    const float infinity = INFINITY;
    std::memcpy(column, &infinity, sizeof(infinity));
  } else {
    const uint16_t infinity = format() == CacheFormat::kBFloat16 ? 0x7F80 : 0x7C00;
    std::memcpy(column, &infinity, sizeof(infinity));
  }
  EXPECT_EQ(Mismatch(backend(), attention), "");
}

// N11, N12.
TEST_P(AttentionShapes, ANanInAQueryHeadIsSeenInThatHeadAlone) {
  AttentionSpec spec = ForFormat({.row_lengths = {9, 20}}, format());
  spec.q_dtype = DType::kFloat32;
  AttentionCase attention(spec);
  const size_t head_bytes = 4 * static_cast<size_t>(spec.dims.head_dim_qk());
  std::memcpy(attention.query.data() + 2 * head_bytes + 12, &kNan, sizeof(kNan));
  EXPECT_EQ(Mismatch(backend(), attention), "");
  if (!backend().UnsupportedReason(ProblemOf(spec)).empty()) return;
  Outputs got = attention.MakeOutputs();
  ASSERT_TRUE(RunAttention(backend(), attention, {}, got).ok());
  for (int64_t h = 0; h < spec.dims.num_heads; ++h) {
    EXPECT_EQ(std::isnan(got.lse()(0, h)), h == 2) << "head " << h;
    EXPECT_FALSE(std::isnan(got.lse()(1, h))) << "head " << h;
  }
}

// Logits far from 0 neither overflow nor vanish.
TEST_P(AttentionShapes, LogitsOfALargeSizeStayExact) {
  AttentionSpec spec = ForFormat({.row_lengths = {1, 1, 1}}, format());
  AttentionCase attention(spec);
  for (const float factor : {-300.0f, 300.0f}) {
    attention.softmax_scale = factor;
    EXPECT_EQ(Mismatch(backend(), attention), "") << "softmax_scale " << factor;
  }
  attention.rows[0].insert(attention.rows[0].end(), 64, attention.rows[0][0]);
  EXPECT_EQ(Mismatch(backend(), attention), "");
}

// A19 by number: one key with logit ln 4, so out scales by 0.8 and lse is ln 5.
TEST_P(AttentionShapes, ASinkOfZeroTakesAFifthFromALogitOfLn4) {
  AttentionSpec spec = ForFormat({.row_lengths = {1, 4}}, format());
  spec.out_dtype = DType::kFloat32;
  AttentionCase attention(spec);
  std::ranges::fill(attention.query, std::byte{0});
  std::ranges::fill(attention.rows[1], attention.live_slots[0]);  // four logits of 0
  attention.rows[0] = {attention.live_slots[0]};
  attention.sinks.assign(static_cast<size_t>(spec.dims.num_heads), 0.0f);
  const std::vector<float> value = ValueOf(attention, attention.live_slots[0]);
  for (const int32_t splits : {1, 2, 4}) {
    Outputs got = attention.MakeOutputs();
    ASSERT_TRUE(RunAttention(backend(), attention, {.force_splits = splits}, got).ok());
    EXPECT_NEAR(got.lse()(0, 1), 0.693147f, 1e-6f);
    EXPECT_NEAR(got.lse()(1, 1), 1.609438f, 1e-6f);
    EXPECT_NEAR(OutAt(got, 0, 1, 3), 0.5f * value[3], 1e-6f * std::abs(value[3]));
    EXPECT_NEAR(OutAt(got, 1, 1, 3), 0.8f * value[3], 1e-6f * std::abs(value[3]));
  }
}

TEST_P(AttentionShapes, WithoutAnLseArrayTheOutputIsTheSame) {
  const AttentionCase attention(ForFormat({.sinks = SinkKind::kFinite}, format()));
  Outputs got = attention.MakeOutputs();
  Outputs want = attention.MakeOutputs();
  ASSERT_TRUE(RunAttention(backend(), attention, {.force_splits = 1}, want).ok());
  const auto plan = MakePlan(attention, {.force_splits = 1});
  ASSERT_TRUE(plan.ok());
  const GuardedBuffer scratch(backend().AttentionWorkspaceBytes(plan.value().capacity()));
  AttentionParams params = attention.Params(got);
  params.lse = {};
  ASSERT_TRUE(Attention(backend(), params, plan.value(), scratch.workspace()).ok());
  EXPECT_TRUE(std::ranges::equal(got.bytes(), want.bytes()));
  EXPECT_TRUE(std::ranges::all_of(got.lse_bytes(), [](std::byte b) { return b == kPoison; }));
}

using AttentionQuantised = KernelFormatTest;
INSTANTIATE_TEST_SUITE_P(All, AttentionQuantised,
                         testing::Combine(EveryKernel(),
                                          testing::Values(CacheFormat::kFp8E4M3,
                                                          CacheFormat::kFp8E4M3Fnuz)),
                         KernelFormatName);

// N11: also far beyond the type's range, where the query saturates.
TEST_P(AttentionQuantised, AQueryBeyondTheRangeOfFp8Saturates) {
  AttentionSpec spec = ForFormat({.row_lengths = {9, 20}}, format());
  AttentionCase attention(spec);
  attention.q_scale = 0.002f;  // |q| / q_scale reaches 1000
  attention.softmax_scale *= 2.0f;
  EXPECT_EQ(Mismatch(backend(), attention), "");
}

}  // namespace
}  // namespace sparsemla::test
