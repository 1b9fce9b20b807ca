// Context parallelism on every back end: each rank attends the slots it owns, Merge joins the
// ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "every_kernel.h"
#include "sparsemla/attention.h"

namespace sparsemla {
namespace {

constexpr MlaDims kDims = {.num_heads = 6, .kv_lora_rank = 40, .qk_rope_head_dim = 8};
constexpr int64_t kTokens = 3;
constexpr int64_t kKeys = 8;  // of every token
constexpr int64_t kSlots = 32;
constexpr int64_t kOutSize = kTokens * kDims.num_heads * kDims.kv_lora_rank;
constexpr int64_t kLseSize = kTokens * kDims.num_heads;

class RanksTest : public EveryKernelTest {
 protected:
  void SetUp() override {
    EveryKernelTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (float& x : q_) x = normal(random);
    for (float& x : cache_) x = normal(random);
    // Token 0 selects even slots only: with two ranks, one of them owns none of its keys.
    for (int32_t k = 0; k < kKeys; ++k) {
      slots_.push_back(4 * k);
    }
    for (int64_t i = kKeys; i < kTokens * kKeys; ++i) {
      slots_.push_back(static_cast<int32_t>(random() % kSlots));
    }
  }

  // Attends the slots with slot % num_ranks = rank; the others are invalid here (N3).
  void RunRank(int32_t rank, int32_t num_ranks, std::span<const float> sinks, float* out,
               float* lse) const {
    std::vector<int32_t> share = slots_;
    for (int32_t& slot : share) slot = slot % num_ranks == rank ? slot : -1;
    Result<Plan> plan = Plan::Create({.num_compute_units = 4,
                                      .max_num_tokens = kTokens,
                                      .max_num_reqs = 1,
                                      .topk_tokens = kKeys,
                                      .dims = kDims,
                                      .force_splits = 2});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const std::vector<int32_t> query_start_loc = {0, kTokens};
    const std::vector<int32_t> seq_lens = {kSlots};
    const Result<bool> built = plan->Build({.query_start_loc = query_start_loc,
                                            .seq_lens = seq_lens,
                                            .dims = kDims,
                                            .q_dtype = DType::kFloat32,
                                            .cache_format = CacheFormat::kFloat32,
                                            .topk_tokens = kKeys});
    ASSERT_TRUE(built.ok()) << built.status().message();
    ASSERT_EQ(plan->num_kv_indices(), kTokens * kKeys);
    const size_t bytes = backend().AttentionWorkspaceBytes(plan->capacity());
    std::vector<float> memory((bytes + 64) / sizeof(float), std::nanf(""));
    void* aligned = memory.data();
    size_t space = bytes + 64;
    const Workspace workspace = {std::align(64, bytes, aligned, space), bytes};

    const AttentionParams params = {
        .query = {.q = ConstTensor<3>::Contiguous(q_.data(), DType::kFloat32,
                                                  {kTokens, kDims.num_heads, kDims.head_dim_qk()})},
        .kv_cache = {cache_.data(), CacheFormat::kFloat32, kSlots},
        .kv_indices = share,
        .softmax_scale = 0.3f,
        .sinks = sinks,
        .out = Tensor<3>::Contiguous(out, DType::kFloat32,
                                     {kTokens, kDims.num_heads, kDims.kv_lora_rank}),
        .lse = View<float, 2>::Contiguous(lse, {kTokens, kDims.num_heads})};
    ASSERT_EQ(Attention(backend(), params, *plan.operator->(), workspace).message(), "");
    ASSERT_EQ(Merge(backend(), {.partials = PlanPartials(*plan.operator->(), workspace),
                                .sinks = sinks,
                                .out = params.out,
                                .lse = params.lse})
                  .message(),
              "");
  }

 private:
  std::vector<float> q_ = std::vector<float>(kTokens * kDims.num_heads * kDims.head_dim_qk());
  std::vector<float> cache_ = std::vector<float>(kSlots * kDims.head_dim_qk());
  std::vector<int32_t> slots_;
};
SPARSEMLA_INSTANTIATE_EVERY_KERNEL(RanksTest);

// A24, N6: the ranks' states, without the sink, are partials; Merge adds the sink once.
TEST_P(RanksTest, KeysSpreadOverRanksMergeToTheResultOfOneRank) {
  const std::vector<float> sinks = {0.5f,
                                    -1.0f,
                                    2.0f,
                                    -std::numeric_limits<float>::infinity(),
                                    std::numeric_limits<float>::infinity(),
                                    0.0f};
  std::vector<float> expected(kOutSize);
  std::vector<float> expected_lse(kLseSize);
  RunRank(0, 1, sinks, expected.data(), expected_lse.data());
  for (const int32_t num_ranks : {2, 4}) {
    std::vector<float> states(static_cast<size_t>(num_ranks * kOutSize));
    std::vector<float> states_lse(static_cast<size_t>(num_ranks * kLseSize));
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      RunRank(rank, num_ranks, {}, states.data() + rank * kOutSize,
              states_lse.data() + rank * kLseSize);
    }
    // Token 0 has no key on rank 1.
    ASSERT_EQ(states_lse[kLseSize], -std::numeric_limits<float>::infinity());
    ASSERT_EQ(states[kOutSize], 0.0f);

    std::vector<int32_t> reduce_indptr = {0};
    std::vector<RowRange> reduce_final_map;
    std::vector<int32_t> reduce_partial_map;
    for (int32_t t = 0; t < kTokens; ++t) {
      for (int32_t rank = 0; rank < num_ranks; ++rank) {
        reduce_partial_map.push_back(rank * static_cast<int32_t>(kTokens) + t);
      }
      reduce_indptr.push_back(static_cast<int32_t>(reduce_partial_map.size()));
      reduce_final_map.push_back({t, t + 1});
    }
    std::vector<float> out(kOutSize, std::nanf(""));
    std::vector<float> lse(kLseSize, std::nanf(""));
    const int64_t num_partials = num_ranks * kTokens;
    ASSERT_EQ(
        Merge(backend(),
              {.partials = {.out = View<const float, 3>::Contiguous(
                                states.data(), {num_partials, kDims.num_heads, kDims.kv_lora_rank}),
                            .lse = View<const float, 2>::Contiguous(
                                states_lse.data(), {num_partials, kDims.num_heads}),
                            .reduce_indptr = reduce_indptr,
                            .reduce_final_map = reduce_final_map,
                            .reduce_partial_map = reduce_partial_map},
               .sinks = sinks,
               .out = Tensor<3>::Contiguous(out.data(), DType::kFloat32,
                                            {kTokens, kDims.num_heads, kDims.kv_lora_rank}),
               .lse = View<float, 2>::Contiguous(lse.data(), {kTokens, kDims.num_heads})})
            .message(),
        "");
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected[i], 1e-5f) << i;
    for (size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(expected_lse[i])) {
        ASSERT_EQ(lse[i], expected_lse[i]) << i;
      } else {
        ASSERT_NEAR(lse[i], expected_lse[i], 1e-5f) << i;
      }
    }
  }
}

}  // namespace
}  // namespace sparsemla
