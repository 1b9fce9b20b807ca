// ConvertIndices and ConvertIndicesDense on every back end, against a translation written down
// independently; the output stands between guard words.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "tests/kernel_test.h"

namespace sparsemla::test {
namespace {

constexpr int32_t kGuard = 424242;
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

// One conversion problem with its memory.
struct Problem {
  int64_t num_tokens = 0;
  int64_t width = 0;
  std::vector<int32_t> positions;  // [num_tokens, width], at the strides of topk()
  int64_t row_stride = 0;
  int64_t column_stride = 1;
  std::vector<std::vector<int32_t>> table;  // [num_reqs][max_blocks]
  std::vector<int32_t> table_memory;        // the same with a gap behind every row
  int32_t block_size = 64;
  int64_t num_blocks = 0;
  int64_t block_stride_rows = 0;
  std::vector<int32_t> req_ids;
  std::vector<int32_t> kv_indptr;
  int32_t invalid_slot = -1;

  View<const int32_t, 2> topk() const {
    return {positions.data(), {num_tokens, width}, {row_stride, column_stride}};
  }
  BlockTable block_table() {
    const auto max_blocks = static_cast<int64_t>(table.empty() ? 0 : table[0].size());
    table_memory.clear();
    for (const auto& row : table) {
      table_memory.insert(table_memory.end(), row.begin(), row.end());
      table_memory.insert(table_memory.end(), 3, 1);  // a mapped block: reading it would show
    }
    return {.blocks = {table_memory.data(),
                       {static_cast<int64_t>(table.size()), max_blocks},
                       {max_blocks + 3, 1}},
            .block_size = block_size,
            .num_blocks = num_blocks,
            .block_stride_rows = block_stride_rows};
  }
  // What entry (token, column) must become.
  int32_t Want(int64_t token, int64_t column) const {
    if (column >= width) return invalid_slot;
    const int32_t position = topk()(token, column);
    const int32_t req = req_ids[static_cast<size_t>(token)];
    if (position < 0 || req < 0 || req >= static_cast<int32_t>(table.size())) return invalid_slot;
    const auto& blocks = table[static_cast<size_t>(req)];
    const auto logical = static_cast<size_t>(position / block_size);
    if (logical >= blocks.size()) return invalid_slot;
    const int64_t block = blocks[logical];
    if (block < 0 || block >= num_blocks) return invalid_slot;
    const int64_t stride = block_stride_rows == 0 ? block_size : block_stride_rows;
    return static_cast<int32_t>(block * stride + position % block_size);
  }
};

void ExpectConverted(const Backend& backend, Problem& problem) {
  const auto total = static_cast<size_t>(problem.kv_indptr.back());
  std::vector<int32_t> memory(total + 64, kGuard);
  const Status status = ConvertIndices(backend, {.topk_indices = problem.topk(),
                                                 .block_table = problem.block_table(),
                                                 .req_id_per_token = problem.req_ids,
                                                 .kv_indptr = problem.kv_indptr,
                                                 .invalid_slot = problem.invalid_slot,
                                                 .kv_indices = {memory.data() + 32, total + 16}});
  ASSERT_TRUE(status.ok()) << status.message();
  for (size_t t = 0; t < problem.req_ids.size(); ++t) {
    for (int32_t k = problem.kv_indptr[t]; k < problem.kv_indptr[t + 1]; ++k) {
      ASSERT_EQ(memory[32 + static_cast<size_t>(k)],
                problem.Want(static_cast<int64_t>(t), k - problem.kv_indptr[t]))
          << "token " << t << ", column " << k - problem.kv_indptr[t];
    }
  }
  EXPECT_EQ(std::count(memory.begin(), memory.begin() + 32, kGuard), 32);
  EXPECT_EQ(std::count(memory.end() - 32, memory.end(), kGuard), 32);
}

void ExpectConvertedDense(const Backend& backend, Problem& problem, bool counts) {
  const int64_t stride = problem.width + 2;
  std::vector<int32_t> memory(static_cast<size_t>(problem.num_tokens * stride) + 8, kGuard);
  std::vector<int32_t> valid(static_cast<size_t>(problem.num_tokens) + 1, kGuard);
  const View<int32_t, 2> slots = {memory.data(), {problem.num_tokens, problem.width}, {stride, 1}};
  const Status status = ConvertIndicesDense(
      backend, {.topk_indices = problem.topk(),
                .block_table = problem.block_table(),
                .req_id_per_token = problem.req_ids,
                .invalid_slot = problem.invalid_slot,
                .slots = slots,
                .valid_counts = counts ? std::span<int32_t>(valid).first(valid.size() - 1)
                                       : std::span<int32_t>()});
  ASSERT_TRUE(status.ok()) << status.message();
  Problem marked = problem;
  marked.invalid_slot = std::numeric_limits<int32_t>::min();  // no slot is that
  for (int64_t t = 0; t < problem.num_tokens; ++t) {
    int32_t want_valid = 0;
    for (int64_t c = 0; c < problem.width; ++c) {
      ASSERT_EQ(slots(t, c), problem.Want(t, c)) << "token " << t << ", column " << c;
      want_valid += marked.Want(t, c) != marked.invalid_slot;
    }
    EXPECT_EQ(valid[static_cast<size_t>(t)], counts ? want_valid : kGuard) << "token " << t;
    EXPECT_EQ(memory[static_cast<size_t>(t * stride + problem.width)], kGuard);
  }
  EXPECT_EQ(valid.back(), kGuard);
  EXPECT_EQ(std::count(memory.end() - 8, memory.end(), kGuard), 8);
}

// Random positions with every kind of invalid entry between them.
Problem RandomProblem(uint32_t seed, int32_t block_size, int64_t width, bool strided) {
  std::mt19937 random(seed);
  Problem problem;
  problem.num_tokens = 13;
  problem.width = width;
  problem.column_stride = strided ? 2 : 1;
  problem.row_stride = width * problem.column_stride + (strided ? 5 : 0);
  problem.block_size = block_size;
  problem.num_blocks = 40;
  problem.block_stride_rows = strided ? block_size + 3 : 0;
  constexpr int32_t kMaxBlocks = 7;
  for (int r = 0; r < 4; ++r) {
    auto& row = problem.table.emplace_back();
    for (int b = 0; b < kMaxBlocks; ++b) row.push_back(1 + static_cast<int32_t>(random() % 39));
  }
  problem.table[1][2] = -1;  // not mapped
  problem.table[2][0] = 40;  // beyond the cache
  problem.table[3][6] = kMax;
  const int32_t nasty[] = {
      -1, -65, -kMax - 1, kMax, kMaxBlocks * block_size, kMaxBlocks * block_size + 1};
  problem.positions.assign(static_cast<size_t>(problem.num_tokens * problem.row_stride), 1);
  for (int64_t t = 0; t < problem.num_tokens; ++t) {
    for (int64_t c = 0; c < width; ++c) {
      problem.positions[static_cast<size_t>(t * problem.row_stride + c * problem.column_stride)] =
          random() % 4 == 0
              ? nasty[random() % std::size(nasty)]
              : static_cast<int32_t>(random() % static_cast<uint32_t>(kMaxBlocks * block_size));
    }
  }
  problem.kv_indptr = {0};
  for (int64_t t = 0; t < problem.num_tokens; ++t) {
    problem.req_ids.push_back(static_cast<int32_t>(random() % 4));
    const auto length = static_cast<int32_t>(random() % static_cast<uint32_t>(width + 1));
    problem.kv_indptr.push_back(problem.kv_indptr.back() + (t == 5 ? 0 : length));
  }
  return problem;
}

using ConvertIndicesTest = KernelTest;
INSTANTIATE_TEST_SUITE_P(All, ConvertIndicesTest, EveryKernel(), KernelName);

// N9, A10, A36, A38, A45: all block sizes, packed and strided, ragged and dense.
TEST_P(ConvertIndicesTest, EveryBlockSizeAndWidthMatchesTheDefinition) {
  uint32_t seed = 0;
  for (const int32_t block_size : {1, 2, 16, 61, 64, 640}) {
    for (const int64_t width : {1, 63, 128, 2048}) {
      for (const bool strided : {false, true}) {
        Problem problem = RandomProblem(++seed, block_size, width, strided);
        ExpectConverted(backend(), problem);
        ExpectConvertedDense(backend(), problem, true);
        ExpectConvertedDense(backend(), problem, false);
        problem.invalid_slot = 7;
        ExpectConverted(backend(), problem);
        ExpectConvertedDense(backend(), problem, true);
      }
    }
  }
}

TEST_P(ConvertIndicesTest, RequestIdsOutsideTheTableNameNoRow) {  // A09
  Problem problem;
  problem.num_tokens = 4;
  problem.width = 3;
  problem.row_stride = 3;
  problem.positions = {0, 5, 9, 0, 5, 9, 0, 5, 9, 0, 5, 9};
  problem.table = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  problem.block_size = 4;
  problem.num_blocks = 9;
  problem.req_ids = {0, 1, 2, -1};
  problem.kv_indptr = {0, 3, 6, 9, 12};
  ExpectConverted(backend(), problem);
  ExpectConvertedDense(backend(), problem, true);
  std::vector<int32_t> slots(12, kGuard);
  ASSERT_TRUE(ConvertIndices(backend(), {.topk_indices = problem.topk(),
                                         .block_table = problem.block_table(),
                                         .req_id_per_token = problem.req_ids,
                                         .kv_indptr = problem.kv_indptr,
                                         .kv_indices = slots})
                  .ok());
  EXPECT_EQ(slots, (std::vector<int32_t>{4, 9, 13, 20, 25, 29, -1, -1, -1, -1, -1, -1}));
}

TEST_P(ConvertIndicesTest, ANegativePositionIsInvalidUnderAnyDivision) {  // A10
  Problem problem;
  problem.num_tokens = 1;
  problem.width = 4;
  problem.row_stride = 4;
  problem.positions = {-65, -64, -1, -63};
  problem.table = {{3, 4}};
  problem.num_blocks = 5;
  problem.req_ids = {0};
  problem.kv_indptr = {0, 4};
  ExpectConverted(backend(), problem);
  ExpectConvertedDense(backend(), problem, true);
}

// A08: rows of the lengths say more keys than the matrix has columns.
TEST_P(ConvertIndicesTest, ColumnsBeyondTheMatrixNameNoRow) {
  Problem problem = RandomProblem(99, 16, 8, true);
  for (size_t t = 1; t < problem.kv_indptr.size(); ++t) {
    problem.kv_indptr[t] = static_cast<int32_t>(t) * 11;
  }
  ExpectConverted(backend(), problem);
}

// Slots near 2^31: the product needs 64 bits on the way, and the last slot is representable.
TEST_P(ConvertIndicesTest, SlotsUpTo2To31AreExact) {
  Problem problem;
  problem.num_tokens = 1;
  problem.width = 3;
  problem.row_stride = 3;
  problem.positions = {0, 63, 127};
  problem.table = {{kMax / 64 - 1, 0}};
  problem.num_blocks = kMax / 64;
  problem.req_ids = {0};
  problem.kv_indptr = {0, 3};
  ExpectConverted(backend(), problem);
  EXPECT_EQ(problem.Want(0, 1), (kMax / 64 - 1) * 64 + 63);
}

TEST_P(ConvertIndicesTest, ACacheOfMoreThan2To31RowsIsRefused) {
  Problem problem = RandomProblem(3, 64, 8, false);
  problem.num_blocks = int64_t{1} << 26;
  std::vector<int32_t> slots(static_cast<size_t>(problem.kv_indptr.back()), kGuard);
  const Status status = ConvertIndices(backend(), {.topk_indices = problem.topk(),
                                                   .block_table = problem.block_table(),
                                                   .req_id_per_token = problem.req_ids,
                                                   .kv_indptr = problem.kv_indptr,
                                                   .kv_indices = slots});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("67108864"), std::string::npos) << status.message();
}

// A36: blocks whose starts are further apart than their tokens; the last block is reached.
TEST_P(ConvertIndicesTest, BlocksMayLieApart) {
  Problem problem;
  problem.num_tokens = 1;
  problem.width = 4;
  problem.row_stride = 4;
  problem.positions = {0, 63, 64, 127};
  problem.table = {{1875, 2}};
  problem.num_blocks = 1876;
  problem.block_stride_rows = 80;
  problem.req_ids = {0};
  problem.kv_indptr = {0, 4};
  ExpectConverted(backend(), problem);
  EXPECT_EQ(problem.Want(0, 1), 1875 * 80 + 63);
  EXPECT_EQ(NumCacheSlots(problem.block_table()), 1875 * 80 + 64);
}

TEST_P(ConvertIndicesTest, NoTokensWriteNothing) {  // A02
  Problem problem;
  problem.kv_indptr = {0};
  ExpectConverted(backend(), problem);
  ExpectConvertedDense(backend(), problem, true);
}

}  // namespace
}  // namespace sparsemla::test
