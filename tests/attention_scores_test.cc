// Conformance of every attention kernel under scores that try the running maximum, and the size of
// its error beside that of plain bf16 attention.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/numeric.h"
#include "tests/kernel_test.h"

namespace sparsemla::test {
namespace {

// Copies the query of row 0 to all rows.
void ShareQuery(AttentionCase& attention) {
  const size_t row_bytes = attention.query.size() /
                           (attention.rows.size() + static_cast<size_t>(attention.spec.spare_rows));
  for (size_t row = 1; row < attention.rows.size(); ++row) {
    std::copy_n(attention.query.begin(), row_bytes,
                attention.query.begin() + static_cast<std::ptrdiff_t>(row * row_bytes));
  }
}

// The live slots in the order of head 0's logits, and the largest magnitude of a logit of any head.
struct ScoredSlots {
  std::vector<int32_t> rising;
  double largest = 0.0;
};

ScoredSlots ScoreSlots(const AttentionSpec& spec) {
  AttentionSpec single = spec;
  single.row_lengths.assign(static_cast<size_t>(spec.num_slots) / 2, 1);
  single.out_dtype = DType::kFloat32;
  AttentionCase attention(single);
  ShareQuery(attention);
  const size_t count = std::min(attention.rows.size(), attention.live_slots.size());
  for (size_t row = 0; row < count; ++row) attention.rows[row] = {attention.live_slots[row]};
  const Outputs logits = Expected(attention);  // of a row with one key the lse is the logit
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  const auto logit = [&](size_t row, int64_t head) {
    return static_cast<double>(logits.lse()(static_cast<int64_t>(row), head));
  };
  std::ranges::sort(order, {}, [&](size_t row) { return logit(row, 0); });
  ScoredSlots scored;
  for (const size_t row : order) {
    scored.rising.push_back(attention.live_slots[row]);
    for (int64_t h = 0; h < spec.dims.num_heads; ++h) {
      scored.largest = std::max(scored.largest, std::abs(logit(row, h)));
    }
  }
  return scored;
}

// Logits of this size are told apart well enough for the format's tolerance: a float32 logit of 80
// is off by 1e-5, and one of bf16-rounded fp8_ds_mla keys by 2^-9 of itself.
std::vector<double> LogitSizes(CacheFormat format) {
  if (format == CacheFormat::kFloat32) return {4.0};
  if (format == CacheFormat::kFloat16) return {80.0};
  if (format == CacheFormat::kFp8DsMla) return {8.0};
  return {80.0, 8 * 80.0, 64 * 80.0};
}

using AttentionScores = KernelFormatTest;
INSTANTIATE_TEST_SUITE_P(All, AttentionScores, EveryKernelAndFormat(), KernelFormatName);

TEST_P(AttentionScores, RisingAndFallingScoresOfAnySizeMatchTheReference) {
  for (const int32_t heads : {3, 20}) {
    AttentionSpec spec = ForFormat(
        {.dims = {.num_heads = heads, .kv_lora_rank = 64}, .row_lengths = {600}, .num_slots = 1300},
        format());
    const ScoredSlots scored = ScoreSlots(spec);
    AttentionCase attention(spec);
    const float scale = attention.softmax_scale;
    for (const double size : LogitSizes(format())) {
      attention.softmax_scale = static_cast<float>(scale * size / scored.largest);
      attention.rows[0] = scored.rising;
      EXPECT_EQ(Mismatch(backend(), attention), "") << heads << " heads, rising to " << size;
      std::ranges::reverse(attention.rows[0]);
      EXPECT_EQ(Mismatch(backend(), attention), "") << heads << " heads, falling from " << size;
      attention.softmax_scale = -attention.softmax_scale;
      EXPECT_EQ(Mismatch(backend(), attention), "") << heads << " heads, scale below 0";
    }
  }
}

// A scale of 0 makes all keys equal, whatever their scores.
TEST_P(AttentionScores, AScaleOfZeroGivesTheMean) {
  AttentionCase attention(ForFormat({.row_lengths = {40, 1, 0}}, format()));
  attention.softmax_scale = 0.0f;
  EXPECT_EQ(Mismatch(backend(), attention), "");
}

// N8, at full width: every row length around the blocks of the kernels, all heads of a model.
TEST_P(AttentionScores, EveryRowLengthAtFullWidthMatchesTheReference) {
  for (const int32_t heads : {7, 16, 33, 128}) {
    AttentionSpec spec =
        ForFormat({.dims = {.num_heads = heads, .kv_lora_rank = 512, .qk_rope_head_dim = 64},
                   .row_lengths = {0, 1, 31, 33, 511, 513, 2047, 2176},
                   .num_slots = 3000},
                  format());
    if (heads > 16) spec.row_lengths = {17, 0, 513, 2049};
    EXPECT_EQ(Mismatch(backend(), AttentionCase(spec)), "") << heads << " heads";
  }
}

// Attention as plain bf16 code computes it: operands and weights in bf16 against the row's maximum,
// float sums, the output rounded once. The mean over rows of ||out - ref|| / ||ref||.
double ErrorOfPlainBFloat16(AttentionCase& attention, const Outputs& want) {
  const AttentionSpec& spec = attention.spec;
  const int64_t width = spec.dims.head_dim_qk();
  const int64_t rank = spec.dims.kv_lora_rank;
  const auto element = [](const std::byte* data, int64_t i) {
    BFloat16 x;
    std::memcpy(&x, data + 2 * i, sizeof(x));
    return ToFloat(x);
  };
  double total = 0.0;
  for (int64_t h = 0; h < spec.dims.num_heads; ++h) {
    std::vector<float> logits;
    for (const int32_t slot : attention.rows[0]) {
      float sum = 0.0f;
      for (int64_t d = 0; d < width; ++d) {
        sum +=
            element(attention.query.data() + 2 * h * width, d) * element(attention.Slot(slot), d);
      }
      logits.push_back(sum * attention.softmax_scale);
    }
    const float max = *std::ranges::max_element(logits);
    float sum = 0.0f;
    std::vector<float> out(static_cast<size_t>(rank));
    for (size_t k = 0; k < logits.size(); ++k) {
      const float weight = std::exp(logits[k] - max);
      sum += weight;
      const float rounded = ToFloat(FromFloat<BFloat16>(weight));
      const std::byte* const value = attention.Slot(attention.rows[0][k]);
      for (size_t d = 0; d < out.size(); ++d) {
        out[d] += rounded * element(value, static_cast<int64_t>(d));
      }
    }
    double error = 0.0;
    double norm = 0.0;
    for (size_t d = 0; d < out.size(); ++d) {
      float reference = 0.0f;
      std::memcpy(&reference, want.bytes().data() + 4 * (static_cast<size_t>(h * rank) + d),
                  sizeof(reference));
      const double rounded = ToFloat(FromFloat<BFloat16>(out[d] / sum));
      error += (rounded - reference) * (rounded - reference);
      norm += static_cast<double>(reference) * reference;
    }
    total += std::sqrt(error / norm);
  }
  return total / spec.dims.num_heads;
}

using KernelError = KernelTest;
INSTANTIATE_TEST_SUITE_P(All, KernelError, EveryKernel(), KernelName);

TEST_P(KernelError, IsAtMostHalfAsMuchAgainAsThatOfPlainBFloat16Attention) {
  for (const float sharpness : {1.0f, 8.0f}) {
    AttentionSpec spec = {.dims = {.num_heads = 16, .kv_lora_rank = 512, .qk_rope_head_dim = 64},
                          .row_lengths = {2048},
                          .num_slots = 6000};
    AttentionCase attention(spec);
    attention.softmax_scale *= sharpness;
    const Outputs want = Expected(attention);
    Outputs got = attention.MakeOutputs();
    ASSERT_TRUE(RunAttention(backend(), attention, {.force_splits = 1}, got).ok());
    double total = 0.0;
    for (int64_t h = 0; h < spec.dims.num_heads; ++h) {
      double error = 0.0;
      double norm = 0.0;
      for (int64_t d = 0; d < spec.dims.kv_lora_rank; ++d) {
        const auto i = static_cast<size_t>(h * spec.dims.kv_lora_rank + d);
        BFloat16 x;
        float reference = 0.0f;
        std::memcpy(&x, got.bytes().data() + 2 * i, sizeof(x));
        std::memcpy(&reference, want.bytes().data() + 4 * i, sizeof(reference));
        error += (ToFloat(x) - reference) * (ToFloat(x) - reference);
        norm += static_cast<double>(reference) * reference;
      }
      total += std::sqrt(error / norm);
    }
    EXPECT_LE(total / spec.dims.num_heads, 1.5 * ErrorOfPlainBFloat16(attention, want))
        << "logits times " << sharpness;
  }
}

}  // namespace
}  // namespace sparsemla::test
