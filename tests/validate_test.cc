// The doors of the stages: every error says which value is out of which bound.
#include "core/validate.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace sparsemla {
namespace {

constexpr int64_t kNegative = -1;

// Pointers that are never followed: the doors do not look at contents.
alignas(64) int32_t words[1024];
alignas(64) float floats[1024];
int32_t* const kOddWords = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(words) + 1);
void* const kOddPointer = kOddWords;

template <typename Params>
struct Flaw {
  std::function<void(Params&)> add;
  std::string message;
  StatusCode code = StatusCode::kInvalidArgument;
};

template <typename Params, typename Check>
void ExpectErrors(const Params& valid, const Check& check, const std::vector<Flaw<Params>>& flaws) {
  ASSERT_EQ(check(valid).message(), "");
  for (const Flaw<Params>& flaw : flaws) {
    Params params = valid;
    flaw.add(params);
    const Status status = check(params);
    EXPECT_EQ(status.message(), flaw.message);
    EXPECT_EQ(status.code(), flaw.code) << flaw.message;
  }
}

template <typename Params>
void ExpectErrors(const Params& valid, const std::vector<Flaw<Params>>& flaws) {
  ExpectErrors(
      valid, [](const Params& params) { return Validate(params); }, flaws);
}

TEST(ValidateTest, FitKpoolIndices) {
  using P = FitKpoolIndicesParams;
  const P valid = {.topk_indices = View<const int32_t, 2>::Contiguous(words, {4, 8}),
                   .topk_tokens = 6,
                   .fitted = View<int32_t, 2>::Contiguous(words, {4, 6})};
  ExpectErrors<P>(
      valid,
      {{[](P& p) { p.topk_indices.shape[0] = kNegative; },
        "topk_indices has shape [-1, 8]; sizes may not be negative"},
       {[](P& p) { p.topk_indices.data = nullptr; }, "topk_indices is null; its shape is [4, 8]"},
       {[](P& p) { p.topk_indices.data = kOddWords; },
        "topk_indices is not aligned to its elements of 4 bytes"},
       {[](P& p) { p.topk_tokens = 0; }, "topk_tokens is 0; it must be at least 1"},
       {[](P& p) { p.topk_tokens = 9; },
        "topk_indices is 8 wide; the width must be at least topk_tokens, 9"},
       {[](P& p) { p.fitted.data = nullptr; }, "fitted is null; its shape is [4, 6]"},
       {[](P& p) { p.fitted.data = kOddWords; },
        "fitted is not aligned to its elements of 4 bytes"},
       {[](P& p) { p.fitted.shape[0] = 3; }, "fitted has shape [3, 6]; it must be [>= 4, 6]"},
       {[](P& p) { p.fitted.shape[1] = 8; }, "fitted has shape [4, 8]; it must be [>= 4, 6]"},
       {[](P& p) { p.fitted.strides[0] = 0; },
        "fitted has stride 0 in dimension 0; rows would overlap: it must be at least 1"}});
}

template <typename P>
std::vector<Flaw<P>> BlockTableFlaws() {
  const std::string bound = "; slots are 32-bit, so it may have at most 2147483647 rows";
  return {
      {[](P& p) { p.topk_indices.data = nullptr; }, "topk_indices is null; its shape is [4, 8]"},
      {[](P& p) { p.topk_indices.shape[0] = 3; }, "topk_indices has 3 rows; there are 4 tokens"},
      {[](P& p) { p.block_table.blocks.data = nullptr; },
       "block_table is null; its shape is [2, 3]"},
      {[](P& p) { p.block_table.blocks.shape[1] = kNegative; },
       "block_table has shape [2, -1]; sizes may not be negative"},
      {[](P& p) { p.block_table.block_size = 0; }, "block_size is 0; it must be at least 1"},
      {[](P& p) { p.block_table.num_blocks = -2; }, "num_blocks is -2; it may not be negative"},
      {[](P& p) { p.block_table.block_stride_rows = 15; },
       "block_stride_rows is 15; it must be 0 or at least the block_size 16"},
      {[](P& p) { p.block_table.block_stride_rows = -16; },
       "block_stride_rows is -16; it must be 0 or at least the block_size 16"},
      {[](P& p) { p.block_table.num_blocks = 1 << 27; },
       "the cache has 134217728 blocks of 16 rows" + bound},
      {[](P& p) { p.block_table.block_stride_rows = 1LL << 62; },
       "the cache has 5 blocks of 16 rows" + bound},
  };
}

TEST(ValidateTest, ConvertIndices) {
  using P = ConvertIndicesParams;
  const P valid = {.topk_indices = View<const int32_t, 2>::Contiguous(words, {4, 8}),
                   .block_table = {View<const int32_t, 2>::Contiguous(words, {2, 3}), 16, 5, 0},
                   .req_id_per_token = {words, 4},
                   .kv_indptr = {words, 5},
                   .kv_indices = {words, 32}};
  std::vector<Flaw<P>> flaws = BlockTableFlaws<P>();
  flaws.push_back({[](P& p) {
                     p.kv_indptr = {words, 4};
                   },
                   "kv_indptr has 4 entries; req_id_per_token has 4, so it must have 5"});
  ExpectErrors<P>(valid, flaws);
}

TEST(ValidateTest, ConvertIndicesDense) {
  using P = ConvertIndicesDenseParams;
  const P valid = {.topk_indices = View<const int32_t, 2>::Contiguous(words, {4, 8}),
                   .block_table = {View<const int32_t, 2>::Contiguous(words, {2, 3}), 16, 5, 0},
                   .req_id_per_token = {words, 4},
                   .slots = View<int32_t, 2>::Contiguous(words, {4, 8}),
                   .valid_counts = {words, 4}};
  std::vector<Flaw<P>> flaws = BlockTableFlaws<P>();
  flaws.insert(
      flaws.end(),
      {{[](P& p) { p.slots.data = nullptr; }, "slots is null; its shape is [4, 8]"},
       {[](P& p) { p.slots.shape[0] = 3; }, "slots has shape [3, 8]; it must be [>= 4, 8]"},
       {[](P& p) { p.slots.shape[1] = 7; }, "slots has shape [4, 7]; it must be [>= 4, 8]"},
       {[](P& p) { p.slots.strides[1] = 0; },
        "slots has stride 0 in dimension 1; rows would overlap: it must be at least 1"},
       {[](P& p) {
          p.valid_counts = {words, 3};
        },
        "valid_counts has 3 entries; there are 4 tokens"}});
  ExpectErrors<P>(valid, flaws);
}

// ---- Attention ---------------------------------------------------------------------------------

Result<Plan> MakePlan(int32_t rope, CacheFormat format = CacheFormat::kBFloat16) {
  const MlaDims dims = {.num_heads = 2, .kv_lora_rank = 8, .qk_rope_head_dim = rope};
  auto plan = Plan::Create({.num_compute_units = 2,
                            .max_num_tokens = 3,
                            .max_num_reqs = 1,
                            .topk_tokens = 4,
                            .dims = dims});
  if (!plan.ok()) return plan;
  const std::vector<int32_t> query_start_loc = {0, 3};
  const std::vector<int32_t> seq_lens = {10};
  const auto built = plan->Build({.query_start_loc = query_start_loc,
                                  .seq_lens = seq_lens,
                                  .dims = dims,
                                  .q_dtype = DType::kBFloat16,
                                  .cache_format = format,
                                  .topk_tokens = 4});
  if (!built.ok()) return built.status();
  return plan;
}

ConstTensor<3> QueryPart(int64_t width) {
  return ConstTensor<3>::Contiguous(floats, DType::kBFloat16, {3, 2, width});
}

AttentionParams ValidAttention(CacheFormat format = CacheFormat::kBFloat16) {
  return {.query = {.q = QueryPart(12)},
          .kv_cache = {floats, format, 20},
          .kv_indices = {words, 12},
          .softmax_scale = 0.5f,
          .sinks = {floats, 2},
          .out = Tensor<3>::Contiguous(floats, DType::kBFloat16, {3, 2, 8}),
          .lse = View<float, 2>::Contiguous(floats, {3, 2})};
}

constexpr StatusCode kOtherPlan = StatusCode::kFailedPrecondition;

TEST(ValidateTest, AttentionNeedsABuiltPlan) {
  const auto plan = Plan::Create(
      {.num_compute_units = 1, .max_num_tokens = 1, .max_num_reqs = 1, .dims = {.num_heads = 1}});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const Status status = Validate(ValidAttention(), plan.value());
  EXPECT_EQ(status.code(), kOtherPlan);
  EXPECT_EQ(status.message(), "the plan is empty: Build has not succeeded yet");
}

// A66: a plan carries its sizes and types, and the call is held to them.
TEST(ValidateTest, AttentionQueries) {
  using P = AttentionParams;
  const auto plan = MakePlan(4);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const auto check = [&](const P& params) { return Validate(params, plan.value()); };
  ExpectErrors<P>(
      ValidAttention(), check,
      {{[](P& p) { p.query.q_pe = QueryPart(4); },
        "q_pe is given without ql_nope; give `q` alone or both parts"},
       {[](P& p) { p.query.ql_nope = QueryPart(8); },
        "both q and ql_nope are given; give one form"},
       {[](P& p) { p.query.q.data = nullptr; }, "q is null; its shape is [3, 2, 12]"},
       {[](P& p) { p.query.q.data = kOddPointer; }, "q is not aligned to its elements of 2 bytes"},
       {[](P& p) { p.query.q.strides[2] = 2; }, "q has innermost stride 2; it must be 1"},
       {[](P& p) { p.query.q.shape[0] = 2; },
        "q has shape [2, 2, 12]; the plan was made for [>= 3, 2, 12]", kOtherPlan},
       {[](P& p) { p.query.q.shape[1] = 1; },
        "q has shape [3, 1, 12]; the plan was made for [>= 3, 2, 12]", kOtherPlan},
       {[](P& p) { p.query.q.shape[2] = 8; },
        "q has shape [3, 2, 8]; the plan was made for [>= 3, 2, 12]", kOtherPlan},
       {[](P& p) { p.query.q.dtype = DType::kFloat16; }, "q is fp16; the plan was made for bf16",
        kOtherPlan}});
  P parts = ValidAttention();
  parts.query = {.ql_nope = QueryPart(8), .q_pe = QueryPart(4)};
  ExpectErrors<P>(
      parts, check,
      {{[](P& p) { p.query.ql_nope.shape[2] = 7; },
        "ql_nope has shape [3, 2, 7]; the plan was made for [>= 3, 2, 8]", kOtherPlan},
       {[](P& p) { p.query.ql_nope.dtype = DType::kFloat32; },
        "ql_nope is fp32; the plan was made for bf16", kOtherPlan},
       {[](P& p) { p.query.q_pe.data = nullptr; }, "q_pe is null; its shape is [3, 2, 4]"},
       {[](P& p) { p.query.q_pe.strides[2] = 0; }, "q_pe has innermost stride 0; it must be 1"},
       {[](P& p) { p.query.q_pe.shape[2] = 0; },
        "q_pe has shape [3, 2, 0]; the plan was made for [>= 3, 2, 4]", kOtherPlan},
       {[](P& p) { p.query.q_pe.shape[0] = 2; },
        "q_pe has shape [2, 2, 4]; the plan was made for [>= 3, 2, 4]", kOtherPlan},
       {[](P& p) { p.query.q_pe.dtype = DType::kFloat16; },
        "q_pe is fp16 and ql_nope bf16; they must be the same"}});
  const auto rope_free = MakePlan(0);
  ASSERT_TRUE(rope_free.ok()) << rope_free.status().message();
  parts.query.q_pe = {};
  ExpectErrors<P>(parts, [&](const P& params) { return Validate(params, rope_free.value()); },
                  {{[](P& p) { p.query.q_pe = QueryPart(4); },
                    "q_pe is 4 wide; the plan is rope-free", kOtherPlan}});
}

TEST(ValidateTest, AttentionCachesAndScales) {
  using P = AttentionParams;
  const auto plan = MakePlan(4);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  ExpectErrors<P>(ValidAttention(), [&](const P& params) { return Validate(params, plan.value()); },
                  {{[](P& p) { p.kv_cache.format = CacheFormat::kFp8DsMla; },
                    "kv_cache is fp8_ds_mla; the plan was made for bf16", kOtherPlan},
                   {[](P& p) { p.kv_cache.num_slots = kNegative; },
                    "num_slots is -1; it must be in [0, 2147483647]"},
                   {[](P& p) { p.kv_cache.num_slots = 1LL << 31; },
                    "num_slots is 2147483648; it must be in [0, 2147483647]"},
                   {[](P& p) { p.kv_cache.data = nullptr; }, "kv_cache is null; num_slots is 20"},
                   {[](P& p) { p.kv_cache.row_stride_bytes = 22; },
                    "row_stride_bytes is 22; a bf16 row has 24 bytes"},
                   {[](P& p) { p.kv_cache.row_stride_bytes = 25; },
                    "kv_cache rows of bf16 must be aligned to 2 bytes; row_stride_bytes is 25"},
                   {[](P& p) { p.kv_cache.data = kOddPointer; },
                    "kv_cache rows of bf16 must be aligned to 2 bytes; row_stride_bytes is 0"},
                   {[](P& p) {
                      p.kv_indices = {words, 11};
                    },
                    "kv_indices has 11 entries; the plan's rows have 12"},
                   {[](P& p) { p.softmax_scale = std::numeric_limits<float>::infinity(); },
                    "softmax_scale is inf; it must be finite"},
                   {[](P& p) { p.softmax_scale = std::numeric_limits<float>::quiet_NaN(); },
                    "softmax_scale is nan; it must be finite"},
                   {[](P& p) { p.q_scale = 0.5f; },
                    "q_scale is 0.5; a bf16 cache has no scale per tensor, so it must be 1"},
                   {[](P& p) { p.kv_scale = 2.0f; },
                    "kv_scale is 2; a bf16 cache has no scale per tensor, so it must be 1"}});
  const auto fp8 = MakePlan(4, CacheFormat::kFp8E4M3);
  ASSERT_TRUE(fp8.ok()) << fp8.status().message();
  P scaled = ValidAttention(CacheFormat::kFp8E4M3);
  scaled.q_scale = 0.5f;
  scaled.kv_scale = 0.25f;
  scaled.kv_cache.row_stride_bytes = 13;
  scaled.kv_cache.data = kOddPointer;
  ExpectErrors<P>(
      scaled, [&](const P& params) { return Validate(params, fp8.value()); },
      {{[](P& p) { p.q_scale = 0.0f; }, "q_scale is 0; it must be finite and positive"},
       {[](P& p) { p.q_scale = -1.0f; }, "q_scale is -1; it must be finite and positive"},
       {[](P& p) { p.kv_scale = std::numeric_limits<float>::infinity(); },
        "kv_scale is inf; it must be finite and positive"},
       {[](P& p) { p.kv_scale = std::numeric_limits<float>::quiet_NaN(); },
        "kv_scale is nan; it must be finite and positive"}});
}

// ---- outputs -----------------------------------------------------------------------------------

// Flaws of out [3, 2, 8], lse [3, 2] and sinks [2], which Attention and Merge check alike.
template <typename P>
std::vector<Flaw<P>> OutputFlaws() {
  return {
      {[](P& p) { p.out.data = nullptr; }, "out is null; its shape is [3, 2, 8]"},
      {[](P& p) { p.out.data = kOddPointer; }, "out is not aligned to its elements of 2 bytes"},
      {[](P& p) { p.out.strides[2] = 2; }, "out has innermost stride 2; it must be 1"},
      {[](P& p) { p.out.strides[0] = 7; },
       "out has stride 7 in dimension 0; rows would overlap: it must be at least 8"},
      {[](P& p) { p.out.strides[1] = 0; },
       "out has stride 0 in dimension 1; rows would overlap: it must be at least 8"},
      {[](P& p) { p.out.strides[0] = 8; },
       "out has stride 8 in dimension 0; rows would overlap: it must be at least 16"},
      {[](P& p) { p.out.strides[1] = int64_t{1} << 62; },
       "out has stride 4611686018427387904 in dimension 1 of 2; it may span at most "
       "1152921504606846976 elements"},
      {[](P& p) { p.out.dtype = DType::kFloat8E4M3; },
       "out is fp8_e4m3; it must be bf16, fp16 or fp32"},
      {[](P& p) { p.lse.shape[0] = 2; }, "lse has shape [2, 2]; it must be [>= 3, 2]"},
      {[](P& p) { p.lse.shape[1] = 3; }, "lse has shape [3, 3]; it must be [>= 3, 2]"},
      {[](P& p) { p.lse.strides[0] = 0; },
       "lse has stride 0 in dimension 0; rows would overlap: it must be at least 1"},
      {[](P& p) {
         p.sinks = {floats, 3};
       },
       "sinks has 3 entries; num_heads is 2"},
  };
}

TEST(ValidateTest, AttentionOutputs) {
  using P = AttentionParams;
  const auto plan = MakePlan(4);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<Flaw<P>> flaws = OutputFlaws<P>();
  flaws.insert(
      flaws.end(),
      {{[](P& p) { p.out.shape[0] = 2; }, "out has shape [2, 2, 8]; it must be [>= 3, 2, 8]"},
       {[](P& p) { p.out.shape[1] = 1; }, "out has shape [3, 1, 8]; it must be [>= 3, 2, 8]"},
       {[](P& p) { p.out.shape[2] = 7; }, "out has shape [3, 2, 7]; it must be [>= 3, 2, 8]"}});
  ExpectErrors<P>(
      ValidAttention(), [&](const P& params) { return Validate(params, plan.value()); }, flaws);
}

TEST(ValidateTest, Merge) {
  using P = MergeParams;
  static const RowRange final_map[2] = {{0, 1}, {1, 2}};
  const P valid = {.partials = {.out = View<const float, 3>::Contiguous(floats, {4, 1, 8}),
                                .lse = View<const float, 2>::Contiguous(floats, {4, 1}),
                                .reduce_indptr = {words, 3},
                                .reduce_final_map = final_map,
                                .reduce_partial_map = {words, 4},
                                .fold = 2},
                   .sinks = {floats, 2},
                   .out = Tensor<3>::Contiguous(floats, DType::kBFloat16, {3, 2, 8}),
                   .lse = View<float, 2>::Contiguous(floats, {3, 2})};
  std::vector<Flaw<P>> flaws = OutputFlaws<P>();
  flaws.insert(
      flaws.end(),
      {{[](P& p) { p.partials.fold = 0; }, "fold is 0; it must be at least 1"},
       {[](P& p) { p.partials.out.data = nullptr; },
        "partials.out is null; its shape is [4, 1, 8]"},
       {[](P& p) { p.partials.lse.data = nullptr; }, "partials.lse is null; its shape is [4, 1]"},
       {[](P& p) { p.partials.lse.shape[0] = 3; },
        "partials.out has shape [4, 1, 8] and partials.lse [3, 1]; the first two sizes must agree"},
       {[](P& p) { p.partials.reduce_indptr = {}; },
        "reduce_indptr is empty; it has one entry more than there are groups"},
       {[](P& p) {
          p.partials.reduce_final_map = {final_map, 1};
        },
        "reduce_final_map has 1 entries; reduce_indptr names 2 groups"},
       {[](P& p) { p.partials.fold = 1; },
        "partials.out has shape [4, 1, 8] and fold 1; out has 2 heads of 8"},
       {[](P& p) { p.out.shape[2] = 7; },
        "partials.out has shape [4, 1, 8] and fold 2; out has 2 heads of 7"},
       {[](P& p) { p.partials.out.strides[2] = 2; },
        "partials.out has innermost stride 2; it must be 1"}});
  ExpectErrors<P>(valid, flaws);
}

TEST(ValidateTest, Workspaces) {
  EXPECT_EQ(ValidateWorkspace({}, 0).message(), "");
  EXPECT_EQ(ValidateWorkspace({words, 128}, 128).message(), "");
  const Status odd = ValidateWorkspace({words + 1, 512}, 128);
  EXPECT_EQ(odd.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(odd.message(), "the workspace is not aligned to 64 bytes");
  const Status small = ValidateWorkspace({words, 64}, 128);
  EXPECT_EQ(small.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(small.message(), "the workspace has 64 bytes; the plan's capacity needs 128");
  EXPECT_EQ(ValidateWorkspace({nullptr, 128}, 128).message(),
            "the workspace has 0 bytes; the plan's capacity needs 128");
}

}  // namespace
}  // namespace sparsemla
