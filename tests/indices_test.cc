// The index stages of every back end: k-pool fitting, and positions to cache slots (N9).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "sparsemla/attention.h"
#include "tests/kernel_test.h"
#include "tests/matrix.h"

namespace sparsemla::test {
namespace {

constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();

BlockTable Table(const Matrix& blocks, int32_t block_size, int64_t num_blocks, int64_t stride = 0) {
  return {blocks.view(), block_size, num_blocks, stride};
}

class IndicesTest : public KernelTest {
 protected:
  // Both conversions of the whole matrix, which must agree.
  Rows Slots(const BlockTable& table, const std::vector<int32_t>& req_ids, const Matrix& topk,
             int32_t invalid_slot = -1) const {
    const int64_t width = topk.view().shape[1];
    Matrix dense(static_cast<int64_t>(req_ids.size()), width, 2, 3);
    EXPECT_EQ(ConvertIndicesDense(backend(), {.topk_indices = topk.view(),
                                              .block_table = table,
                                              .req_id_per_token = req_ids,
                                              .invalid_slot = invalid_slot,
                                              .slots = dense.view()})
                  .message(),
              "");
    EXPECT_TRUE(dense.GapsAreIntact());
    std::vector<int32_t> indptr;
    for (size_t t = 0; t <= req_ids.size(); ++t) {
      indptr.push_back(static_cast<int32_t>(static_cast<int64_t>(t) * width));
    }
    std::vector<int32_t> flat(static_cast<size_t>(indptr.back()) + 1, kGuard);
    EXPECT_EQ(ConvertIndices(backend(), {.topk_indices = topk.view(),
                                         .block_table = table,
                                         .req_id_per_token = req_ids,
                                         .kv_indptr = indptr,
                                         .invalid_slot = invalid_slot,
                                         .kv_indices = flat})
                  .message(),
              "");
    EXPECT_EQ(flat.back(), kGuard);
    Rows ragged;
    for (size_t t = 0; t < req_ids.size(); ++t) {
      ragged.emplace_back(flat.begin() + indptr[t], flat.begin() + indptr[t + 1]);
    }
    EXPECT_EQ(dense.rows(), ragged);
    return ragged;
  }

  Rows Fit(const Matrix& topk, int32_t topk_tokens) const {
    Matrix fitted(topk.view().shape[0], topk_tokens, 2, 5);
    const auto result = FitKpoolIndices(
        backend(),
        {.topk_indices = topk.view(), .topk_tokens = topk_tokens, .fitted = fitted.view()});
    EXPECT_TRUE(result.ok()) << result.status().message();
    if (!result.ok()) return {};
    EXPECT_EQ(result->data, fitted.view().data);
    EXPECT_EQ(result->shape, fitted.view().shape);
    EXPECT_EQ(result->strides, fitted.view().strides);
    EXPECT_TRUE(fitted.GapsAreIntact());
    Matrix packed(topk.view().shape[0], topk_tokens);
    EXPECT_TRUE(FitKpoolIndices(backend(), {.topk_indices = topk.view(),
                                            .topk_tokens = topk_tokens,
                                            .fitted = packed.view()})
                    .ok());
    EXPECT_EQ(packed.rows(), fitted.rows());
    return fitted.rows();
  }
};
INSTANTIATE_TEST_SUITE_P(All, IndicesTest, EveryKernel(), KernelName);

// ---- FitKpoolIndices ---------------------------------------------------------------------------

TEST_P(IndicesTest, FitKeepsTheTailAndFillsUpWithHistory) {
  EXPECT_EQ(Fit(Rows{{10, 9, 8, 7, 6, 5, 100, 101},
                     {10, 9, 8, -1, -1, -1, 100, -1},
                     {-1, -1, -1, -1, -1, -1, -1, -1}},
                6),
            (Rows{{10, 9, 8, 7, 100, 101}, {10, 9, 8, 100, -1, -1}, {-1, -1, -1, -1, -1, -1}}));
}

// A40, with rows that are not adjacent
TEST_P(IndicesTest, FitOfAPoolOfFourDropsTheWorstHistory) {
  const Matrix topk(Rows{{10, 7, 3, 1, 21, 22, -1}, {10, 7, 3, 1, -1, -1, -1}}, 1, 9);
  EXPECT_EQ(Fit(topk, 4), (Rows{{10, 7, 21, 22}, {10, 7, 3, 1}}));
}

TEST_P(IndicesTest, FitKeepsTheFirstTailEntriesWhenTheyAloneExceedTheRow) {
  EXPECT_EQ(Fit(Rows{{5, 6, 1, 2, 3, 4}}, 2), (Rows{{1, 2}}));
}

TEST_P(IndicesTest, FitCopiesHolesThrough) {
  EXPECT_EQ(Fit(Rows{{10, -5, 8, 100, -1}, {1, 2, 3, -1, 9}, {-2, -3, -4, -9, -1}}, 3),
            (Rows{{10, -5, 100}, {1, 2, -1}, {-1, -1, -1}}));
}

TEST_P(IndicesTest, FitOfRowsAsWideAsTheSelectionIsTheInputItself) {
  const Matrix topk(Rows{{3, -1, 2}, {0, 7, -1}}, 2, 1);
  const auto fitted = FitKpoolIndices(backend(), {.topk_indices = topk.view(), .topk_tokens = 3});
  ASSERT_TRUE(fitted.ok()) << fitted.status().message();
  EXPECT_EQ(fitted->data, topk.view().data);
  EXPECT_EQ(fitted->shape, topk.view().shape);
  EXPECT_EQ(fitted->strides, topk.view().strides);
}

TEST_P(IndicesTest, FitRefusesRowsNarrowerThanTheSelection) {
  const Matrix topk(Rows{{3, 2}});
  Matrix fitted(1, 3);
  const auto result = FitKpoolIndices(
      backend(), {.topk_indices = topk.view(), .topk_tokens = 3, .fitted = fitted.view()});
  EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(result.status().message(),
            "topk_indices is 2 wide; the width must be at least topk_tokens, 3");
}

// A02
TEST_P(IndicesTest, FitOfNoRowsIsAnEmptyMatrix) {
  const auto fitted = FitKpoolIndices(
      backend(),
      {.topk_indices = {nullptr, {0, 8}, {8, 1}}, .topk_tokens = 6, .fitted = {nullptr, {0, 6}}});
  ASSERT_TRUE(fitted.ok()) << fitted.status().message();
  EXPECT_EQ(fitted->shape, (std::array<int64_t, 2>{0, 6}));
}

// A41: K comes from the call; any width does.
TEST_P(IndicesTest, FitOfRandomRowsAgreesWithItsDefinition) {
  std::mt19937 random(1);
  for (const int32_t k : {1, 3, 128, 2051, 2176}) {
    for (const int64_t tail : {1, 3, 128}) {
      const int64_t num_tokens = k * 16 < 4096 ? 700 : 21;  // several threads' worth
      Rows topk(static_cast<size_t>(num_tokens));
      Rows expected;
      for (auto& row : topk) {
        const auto valid_history = static_cast<int64_t>(random() % (static_cast<uint32_t>(k) + 1));
        const auto valid_tail = static_cast<int64_t>(random() % (static_cast<uint32_t>(tail) + 1));
        std::vector<int32_t> fit;
        for (int64_t c = 0; c < k; ++c) {
          row.push_back(c < valid_history ? static_cast<int32_t>(random() >> 1) : -1 - (c & 1));
          if (c < std::min(valid_history, k - std::min<int64_t>(valid_tail, k))) {
            fit.push_back(row.back());
          }
        }
        for (int64_t c = 0; c < tail; ++c) {
          row.push_back(c < valid_tail ? static_cast<int32_t>(random() >> 1) : -1);
          if (c < valid_tail) fit.push_back(row.back());
        }
        fit.resize(static_cast<size_t>(k), -1);
        expected.push_back(fit);
      }
      EXPECT_EQ(Fit(Matrix(topk, 1, 2), k), expected) << "K " << k << ", tail " << tail;
    }
  }
}

// ---- ConvertIndices, ConvertIndicesDense -------------------------------------------------------

// A06: the invalid entries of a list are -1, or anything that is not in the cache.
TEST_P(IndicesTest, PositionsOutsideTheTableNameNoRow) {
  std::vector<int32_t> identity(10);
  std::iota(identity.begin(), identity.end(), 0);
  const Matrix blocks(Rows{identity});
  EXPECT_EQ(Slots(Table(blocks, 1, 10), {0}, Rows{{3, 2147480000, -1, 10, 9, 0, -7, 5}}),
            (Rows{{3, -1, -1, -1, 9, 0, -1, 5}}));
}

// A09
TEST_P(IndicesTest, RequestsOutsideTheTableNameNoRow) {
  const Matrix blocks(Rows{{0, 1, 2, 3}, {4, 5, 6, 7}});
  EXPECT_EQ(Slots(Table(blocks, 4, 8), {0, 1, 2, -1, kMaxInt32}, Rows(5, {0, 5, 15})),
            (Rows{{0, 5, 15}, {16, 21, 31}, {-1, -1, -1}, {-1, -1, -1}, {-1, -1, -1}}));
}

// A10: neither rounding of -65 / 64 may select a block.
TEST_P(IndicesTest, NegativePositionsNameNoRow) {
  const Matrix blocks(Rows{{1, 2}, {3, 0}});
  for (const int32_t block_size : {64, 61}) {
    EXPECT_EQ(Slots(Table(blocks, block_size, 4), {1},
                    Rows{{-65, -64, -1, std::numeric_limits<int32_t>::min(), 0}}),
              (Rows{{-1, -1, -1, -1, 3 * block_size}}));
  }
}

// A38
TEST_P(IndicesTest, BlocksOutsideTheCacheNameNoRow) {
  const Matrix blocks(Rows{{2, 3, -1, kMaxInt32, std::numeric_limits<int32_t>::min(), 0}});
  EXPECT_EQ(Slots(Table(blocks, 16, 3), {0}, Rows{{15, 16, 32, 48, 64, 80}}),
            (Rows{{47, -1, -1, -1, -1, 0}}));
}

// A45: positions count from the request's own first key.
TEST_P(IndicesTest, EveryRequestReachesItsOwnSlotsOnly) {
  const Matrix blocks(Rows{{0, 1, 2, 3, 4}, {5, 6, 7, -1, -1}});
  EXPECT_EQ(
      Slots(Table(blocks, 1, 8), {0, 0, 1, 1, 1}, Rows{{0, 4}, {2, 5}, {0, 2}, {1, 3}, {4, -1}}),
      (Rows{{0, 4}, {2, -1}, {5, 7}, {6, -1}, {-1, -1}}));
}

// A36: 480000 tokens over 4 ranks are 1875 pages of 64, in rows of 1876.
TEST_P(IndicesTest, TheLogicalWidthOfTheTableCountsNotItsStride) {
  Matrix blocks(4, 1875, 1, 1);
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t c = 0; c < 1875; ++c) blocks.view()(r, c) = static_cast<int32_t>(r * 1875 + c);
  }
  EXPECT_EQ(Slots(Table(blocks, 64, 7500), {3}, Rows{{1875 * 64 - 1, 1875 * 64}}),
            (Rows{{7500 * 64 - 1, -1}}));
}

// A35: whatever the page, no two positions share a slot, and all lie in the cache.
TEST_P(IndicesTest, DistinctPositionsHaveDistinctSlotsOfTheCache) {
  for (const int32_t block_size : {640, 32, 160, 2, 1}) {
    for (const int64_t gap : {0, 7}) {
      const int32_t num_blocks = 4096 / block_size + 1;
      std::vector<int32_t> order(static_cast<size_t>(num_blocks));
      std::iota(order.rbegin(), order.rend(), 0);
      std::vector<int32_t> positions(static_cast<size_t>(num_blocks * block_size));
      std::iota(positions.begin(), positions.end(), 0);
      const Matrix blocks(Rows{order});
      const BlockTable table =
          Table(blocks, block_size, num_blocks, gap == 0 ? 0 : block_size + gap);
      const std::vector<int32_t> slots = Slots(table, {0}, Rows{positions})[0];
      const std::set<int32_t> distinct(slots.begin(), slots.end());
      EXPECT_EQ(distinct.size(), positions.size());
      EXPECT_EQ(*distinct.begin(), 0);
      EXPECT_EQ(*distinct.rbegin(), NumCacheSlots(table) - 1);
    }
  }
}

TEST_P(IndicesTest, BlocksMayLieApart) {
  const Matrix blocks(Rows{{2, 0}});
  const BlockTable table = Table(blocks, 16, 3, 100);
  EXPECT_EQ(NumCacheSlots(table), 216);
  EXPECT_EQ(NumCacheSlots({.block_size = 16, .num_blocks = 0, .block_stride_rows = 100}), 0);
  EXPECT_EQ(NumCacheSlots({.block_size = 16, .num_blocks = 3}), 48);
  EXPECT_EQ(Slots(table, {0}, Rows{{0, 15, 16, 31, 32}}), (Rows{{200, 215, 0, 15, -1}}));
}

TEST_P(IndicesTest, SlotsReachTheLastOf32Bits) {
  const Matrix blocks(Rows{{kMaxInt32 - 1, 33554430, 35204648, 1}});
  EXPECT_EQ(Slots(Table(blocks, 1, kMaxInt32), {0}, Rows{{0, 1}}),
            (Rows{{kMaxInt32 - 1, 33554430}}));
  EXPECT_EQ(Slots(Table(blocks, 64, 33554431), {0}, Rows{{127, 64, 0}}),
            (Rows{{33554431 * 64 - 1, 33554430 * 64, -1}}));
  EXPECT_EQ(Slots(Table(blocks, 61, 35204649), {0}, Rows{{182, 122}}),
            (Rows{{2147483588, 35204648 * 61}}));
  EXPECT_EQ(Slots(Table(blocks, 1, 2, kMaxInt32 - 1), {0}, Rows{{3}}), (Rows{{kMaxInt32 - 1}}));
}

// N9
TEST_P(IndicesTest, CachesOfMoreRowsThan32BitsCanNameAreRefused) {
  const Matrix topk(Rows{{0}});
  const Matrix blocks(Rows{{0}});
  const std::vector<int32_t> req_ids = {0};
  const std::vector<int32_t> indptr = {0, 1};
  std::vector<int32_t> slots(1, kGuard);
  for (const BlockTable& table :
       {Table(blocks, 64, 33554432), Table(blocks, 1, 1LL << 31), Table(blocks, 1, 1LL << 62),
        Table(blocks, 1, 2, kMaxInt32), Table(blocks, 1, 2, 1LL << 62)}) {
    const Status status = ConvertIndices(backend(), {.topk_indices = topk.view(),
                                                     .block_table = table,
                                                     .req_id_per_token = req_ids,
                                                     .kv_indptr = indptr,
                                                     .kv_indices = slots});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("may have at most 2147483647 rows"), std::string::npos)
        << status.message();
    EXPECT_EQ(slots[0], kGuard);
  }
}

// N9: also where it is a slot of the cache; the count tells the rows that are really named.
TEST_P(IndicesTest, TheCallerChoosesTheMarkOfInvalidEntries) {
  const Matrix blocks(Rows{{1, -1}});
  const Matrix topk(Rows{{0, 1, 2, -1}, {3, -1, -1, 9}, {0, 1, 0, 1}});
  const std::vector<int32_t> req_ids = {0, 0, 0};
  for (const int32_t mark : {-1, -7, 0, 3, kMaxInt32}) {
    EXPECT_EQ(Slots(Table(blocks, 2, 2), req_ids, topk, mark),
              (Rows{{2, 3, mark, mark}, {mark, mark, mark, mark}, {2, 3, 2, 3}}));
    Matrix slots(3, 4);
    std::vector<int32_t> counts(4, kGuard);
    ASSERT_TRUE(ConvertIndicesDense(backend(), {.topk_indices = topk.view(),
                                                .block_table = Table(blocks, 2, 2),
                                                .req_id_per_token = req_ids,
                                                .invalid_slot = mark,
                                                .slots = slots.view(),
                                                .valid_counts = counts})
                    .ok());
    EXPECT_EQ(counts, (std::vector<int32_t>{2, 0, 4, kGuard}));
  }
}

// A08: rows are as long as kv_indptr says, whatever the matrix's width.
TEST_P(IndicesTest, RaggedRowsAreWrittenToTheirLengthAndNotBeyond) {
  const Matrix blocks(Rows{{1, 0}});
  const Matrix topk(Rows{{0, 1, 2}, {3, 2, 1}, {0, 0, 0}, {1, 2, 3}}, 2, 1);
  const std::vector<int32_t> indptr = {0, 2, 2, 7, 8};
  std::vector<int32_t> slots(12, kGuard);
  EXPECT_EQ(ConvertIndices(backend(), {.topk_indices = topk.view(),
                                       .block_table = Table(blocks, 2, 2),
                                       .req_id_per_token = std::vector<int32_t>(4, 0),
                                       .kv_indptr = indptr,
                                       .invalid_slot = -3,
                                       .kv_indices = slots})
                .message(),
            "");
  EXPECT_EQ(slots,
            (std::vector<int32_t>{2, 3, 2, 2, 2, -3, -3, 3, kGuard, kGuard, kGuard, kGuard}));
}

// A08: row counts that disagree are an error, not a read past the metadata.
TEST_P(IndicesTest, FewerIndexRowsThanTokensAreRefused) {
  const Matrix topk(Rows(4, {0, 0, 0}));
  const Matrix blocks(Rows{{0}});
  std::vector<int32_t> slots(4 * 3 + 2, kGuard);
  const Status status =
      ConvertIndices(backend(), {.topk_indices = topk.view(),
                                 .block_table = Table(blocks, 4, 1),
                                 .req_id_per_token = std::vector<int32_t>(5, 0),
                                 .kv_indptr = std::vector<int32_t>{0, 3, 6, 9, 12, 15},
                                 .kv_indices = {slots.data(), 12}});
  EXPECT_EQ(status.message(), "topk_indices has 4 rows; there are 5 tokens");
  EXPECT_EQ(slots, std::vector<int32_t>(14, kGuard));
}

// A02
TEST_P(IndicesTest, NoTokensAreNoWork) {
  EXPECT_EQ(ConvertIndices(backend(),
                           {.block_table = {.block_size = 1}, .kv_indptr = std::vector<int32_t>{0}})
                .message(),
            "");
  EXPECT_EQ(ConvertIndicesDense(backend(), {.block_table = {.block_size = 1}}).message(), "");
}

// N9: no rounding of a quotient, and no sum of 32 bits, lets a position near the ends of int32 or
// of a block slip into another block.
TEST_P(IndicesTest, PositionsAtTheEndsOfBlocksAndOfInt32AreSplitExactly) {
  for (const int32_t block_size : {1, 3, 7, 61, 64, 1000003, 1 << 30, kMaxInt32}) {
    const int64_t num_columns = std::min<int64_t>(kMaxInt32 / int64_t{block_size} + 1, 3000);
    Matrix blocks(1, num_columns);
    const int64_t num_blocks = std::min<int64_t>(kMaxInt32 / block_size, num_columns);
    for (int64_t c = 0; c < num_columns; ++c) {
      blocks.view()(0, c) = static_cast<int32_t>(num_columns - 1 - c);
    }
    std::vector<int32_t> positions = {kMaxInt32, kMaxInt32 - 1, -1, -2, -kMaxInt32 - 1};
    for (const int64_t column : {int64_t{0}, int64_t{1}, num_columns / 2, num_columns - 1}) {
      for (int64_t offset = -2; offset <= 2; ++offset) {
        const int64_t position = column * block_size + offset;
        if (position <= kMaxInt32) positions.push_back(static_cast<int32_t>(position));
      }
    }
    std::vector<int32_t> expected;
    for (const int32_t position : positions) {
      const int64_t column = position < 0 ? num_columns : position / block_size;
      const int64_t block = num_columns - 1 - column;
      const bool is_named = column < num_columns && block < num_blocks;
      expected.push_back(is_named ? static_cast<int32_t>(block * block_size + position % block_size)
                                  : -1);
    }
    EXPECT_EQ(Slots(Table(blocks, block_size, num_blocks), {0}, Rows{positions}), Rows{expected})
        << "blocks of " << block_size;
  }
}

// A09, A38, A41: a table of every position, filled by counting instead of dividing, is the judge.
TEST_P(IndicesTest, RandomPositionsAgreeWithCountingThem) {
  std::mt19937 random(2);
  const auto below = [&](int64_t bound) {
    return static_cast<int32_t>(random() % static_cast<uint64_t>(bound));
  };
  for (const int32_t block_size : {1, 2, 16, 61, 64, 100}) {
    for (const auto& [num_tokens, width] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {3, 3}, {17, 64}, {5, 2051}, {40, 2176}, {30000, 3}}) {
      const int64_t num_blocks = 1 + below(40);
      const int64_t stride = below(2) == 0 ? 0 : block_size + below(9);
      Matrix blocks(1 + below(5), 1 + below(12), 1 + below(2), below(3));
      Rows slot_of(static_cast<size_t>(blocks.view().shape[0]));
      for (int64_t r = 0; r < blocks.view().shape[0]; ++r) {
        for (int64_t c = 0; c < blocks.view().shape[1]; ++c) {
          const int32_t block = below(num_blocks + 2) - 1;
          blocks.view()(r, c) = block;
          for (int32_t i = 0; i < block_size; ++i) {
            const int64_t slot = block * (stride == 0 ? block_size : stride) + i;
            const bool is_mapped = block >= 0 && block < num_blocks;
            slot_of[static_cast<size_t>(r)].push_back(is_mapped ? static_cast<int32_t>(slot) : -1);
          }
        }
      }
      Matrix topk(num_tokens, width, 1 + below(2), below(4));
      std::vector<int32_t> req_ids;
      Rows expected(static_cast<size_t>(num_tokens));
      for (int64_t t = 0; t < num_tokens; ++t) {
        req_ids.push_back(below(blocks.view().shape[0] + 2) - 1);
        for (int64_t c = 0; c < width; ++c) {
          const int32_t position = below(blocks.view().shape[1] * block_size + 3) - 1;
          topk.view()(t, c) = position;
          const bool is_named = req_ids.back() >= 0 && position >= 0 &&
                                req_ids.back() < static_cast<int32_t>(slot_of.size()) &&
                                position < static_cast<int32_t>(slot_of[0].size());
          expected[static_cast<size_t>(t)].push_back(
              is_named ? slot_of[static_cast<size_t>(req_ids.back())][static_cast<size_t>(position)]
                       : -1);
        }
      }
      EXPECT_EQ(Slots(Table(blocks, block_size, num_blocks, stride), req_ids, topk), expected);
    }
  }
}

}  // namespace
}  // namespace sparsemla::test
