// Merge over many states: every width and head count against sums in double, strided arrays, and
// what the bits may depend on (N6, N7).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "sparsemla/attention.h"
#include "tests/kernel_test.h"

namespace sparsemla::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kUntouched = -12345.0f;

// A merge in memory. Partials and output rows may lie apart; whatever is not written is kUntouched.
struct MergeCase {
  int64_t num_partials;
  int64_t num_rows;
  int64_t num_heads;
  int64_t width;    // kv_lora_rank
  int64_t gap = 0;  // floats between two heads, in the partials and in the output
  std::vector<int32_t> reduce_indptr = {};
  std::vector<RowRange> reduce_final_map = {};
  std::vector<int32_t> reduce_partial_map = {};
  std::vector<float> sinks = {};
  std::vector<float> part_out = {};  // [num_partials, num_heads, width + gap]
  std::vector<float> part_lse = {};  // [num_partials, num_heads]
  std::vector<float> out = {};       // [num_rows, num_heads, width + gap]
  std::vector<float> lse = {};       // [num_rows, num_heads]

  float& PartOut(int64_t p, int64_t h, int64_t d) {
    return part_out[static_cast<size_t>((p * num_heads + h) * (width + gap) + d)];
  }
  float& PartLse(int64_t p, int64_t h) { return part_lse[static_cast<size_t>(p * num_heads + h)]; }
  float& Out(int64_t row, int64_t h, int64_t d) {
    return out[static_cast<size_t>((row * num_heads + h) * (width + gap) + d)];
  }
  float& Lse(int64_t row, int64_t h) { return lse[static_cast<size_t>(row * num_heads + h)]; }

  // Partials of one row after the other: `counts[r]` of row r, in the order of the buffer.
  void GroupInOrder(const std::vector<int32_t>& counts) {
    reduce_indptr = {0};
    for (size_t r = 0; r < counts.size(); ++r) {
      for (int32_t i = 0; i < counts[r]; ++i) {
        reduce_partial_map.push_back(static_cast<int32_t>(reduce_partial_map.size()));
      }
      reduce_indptr.push_back(static_cast<int32_t>(reduce_partial_map.size()));
      reduce_final_map.push_back({static_cast<int32_t>(r), static_cast<int32_t>(r + 1)});
    }
  }
  void Allocate() {
    part_out.assign(static_cast<size_t>(num_partials * num_heads * (width + gap)), 0.0f);
    part_lse.assign(static_cast<size_t>(num_partials * num_heads), 0.0f);
    out.assign(static_cast<size_t>(num_rows * num_heads * (width + gap)), kUntouched);
    lse.assign(static_cast<size_t>(num_rows * num_heads), kUntouched);
  }
  MergeParams Params() {
    const int64_t step = width + gap;
    return {.partials = {.out = {part_out.data(),
                                 {num_partials, num_heads, width},
                                 {num_heads * step, step, 1}},
                         .lse = View<const float, 2>::Contiguous(part_lse.data(),
                                                                 {num_partials, num_heads}),
                         .reduce_indptr = reduce_indptr,
                         .reduce_final_map = reduce_final_map,
                         .reduce_partial_map = reduce_partial_map},
            .sinks = sinks,
            .out = {out.data(),
                    DType::kFloat32,
                    {num_rows, num_heads, width},
                    {num_heads * step, step, 1}},
            .lse = View<float, 2>::Contiguous(lse.data(), {num_rows, num_heads})};
  }
  void Run(const Backend& backend) {
    const Status status = Merge(backend, Params());
    ASSERT_TRUE(status.ok()) << status.message();
  }
};

class MergeStates : public KernelTest {};
INSTANTIATE_TEST_SUITE_P(All, MergeStates, EveryKernel(), KernelName);

// N7: the map alone decides the order of the sum.
TEST_P(MergeStates, TheOrderOfTheMapNotOfTheBufferDecidesTheBits) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  MergeCase merge{9, 1, 2, 65};
  merge.GroupInOrder({9});
  merge.Allocate();
  for (float& x : merge.part_out) x = normal(random);
  for (float& x : merge.part_lse) x = normal(random);
  MergeCase moved = merge;
  std::shuffle(moved.reduce_partial_map.begin(), moved.reduce_partial_map.end(), random);
  for (int64_t i = 0; i < 9; ++i) {
    const int32_t p = moved.reduce_partial_map[static_cast<size_t>(i)];
    for (int64_t h = 0; h < 2; ++h) {
      moved.PartLse(p, h) = merge.PartLse(i, h);
      for (int64_t d = 0; d < 65; ++d) moved.PartOut(p, h, d) = merge.PartOut(i, h, d);
    }
  }
  merge.Run(backend());
  moved.Run(backend());
  EXPECT_EQ(moved.out, merge.out);
  EXPECT_EQ(moved.lse, merge.lse);
}

// More pieces than are summed, or whose weights are kept, at a time.
TEST_P(MergeStates, HundredsOfPiecesMakeOneRow) {
  for (const int32_t count : {63, 64, 65, 256, 257, 700}) {
    MergeCase merge{count, 1, 2, 515};
    merge.GroupInOrder({count});
    merge.Allocate();
    double sum = 0.0;
    double value = 0.0;
    for (int32_t p = 0; p < count; ++p) {
      const float lse = p % 3 == 0 ? -kInf : 0.01f * static_cast<float>(p);
      const double weight = std::exp(double{lse});
      sum += weight;
      value += weight * p;
      for (int64_t h = 0; h < 2; ++h) {
        merge.PartLse(p, h) = lse;
        for (int64_t d = 0; d < 515; ++d) {
          merge.PartOut(p, h, d) = lse == -kInf ? kInf : static_cast<float>(p + d);
        }
      }
    }
    merge.Run(backend());
    for (int64_t h = 0; h < 2; ++h) {
      EXPECT_NEAR(merge.Lse(0, h), std::log(sum), 1e-5) << count << " pieces";
      for (const int64_t d : {0, 1, 511, 512, 514}) {
        EXPECT_NEAR(merge.Out(0, h, d), value / sum + static_cast<double>(d), 1e-3)
            << count << " pieces, column " << d;
      }
    }
  }
}

// However few of many rows are split, and wherever they are: those are merged, the others left.
TEST_P(MergeStates, FewSplitRowsAmongManyAreFoundOnAnyNumberOfThreads) {
  for (const int32_t threads : {1, 3, 8}) {
    const auto pool = MakeBackend(GetParam(), threads);
    ASSERT_NE(pool, nullptr);
    for (const std::vector<int64_t>& split :
         {std::vector<int64_t>{0}, {4999}, {0, 1, 17, 2500, 4998, 4999}, {}}) {
      std::vector<int32_t> counts(5000, 0);
      for (const int64_t row : split) counts[static_cast<size_t>(row)] = 3;
      MergeCase merge{static_cast<int64_t>(split.size()) * 3 + 1, 5000, 40, 8};
      merge.GroupInOrder(counts);
      merge.Allocate();
      for (float& x : merge.part_out) x = 7.0f;
      merge.Run(*pool);
      for (int64_t row = 0; row < 5000; ++row) {
        const bool is_split = counts[static_cast<size_t>(row)] > 0;
        for (int64_t h = 0; h < 40; ++h) {
          ASSERT_NEAR(merge.Lse(row, h), is_split ? std::log(3.0f) : kUntouched, 1e-6) << row;
          ASSERT_NEAR(merge.Out(row, h, 7), is_split ? 7.0f : kUntouched, 1e-5) << row;
        }
      }
    }
  }
}

// Every width and head count, rows that lie apart, dead partials among live ones: the sums in
// double.
TEST_P(MergeStates, RandomStatesAgreeWithTheDefinition) {
  const auto alone = MakeBackend(GetParam(), 1);
  ASSERT_NE(alone, nullptr);
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (const int64_t width : {1, 33, 512, 1025}) {
    for (const int64_t heads : {1, 17, 128}) {
      const std::vector<int32_t> counts = {1, 5, 0, 2, 16};
      MergeCase merge{24, 5, heads, width, width % 7};
      merge.GroupInOrder(counts);
      merge.Allocate();
      for (float& x : merge.part_out) x = normal(random);
      for (float& x : merge.part_lse) x = random() % 4 == 0 ? -kInf : 3.0f * normal(random);
      for (int64_t h = 0; h < heads; ++h) merge.sinks.push_back(normal(random));
      MergeCase again = merge;
      merge.Run(backend());
      again.Run(*alone);
      EXPECT_EQ(again.out, merge.out) << "N7: the number of threads";
      for (int64_t row = 0, first = 0; row < 5; first += counts[static_cast<size_t>(row++)]) {
        const int64_t last = first + counts[static_cast<size_t>(row)];
        for (int64_t h = 0; h < heads && first < last; ++h) {
          double sum = std::exp(double{merge.sinks[static_cast<size_t>(h)]});
          for (int64_t p = first; p < last; ++p) sum += std::exp(double{merge.PartLse(p, h)});
          ASSERT_NEAR(merge.Lse(row, h), std::log(sum), 1e-5);
          for (int64_t d = 0; d < width; ++d) {
            double value = 0.0;
            for (int64_t p = first; p < last; ++p) {
              value += std::exp(double{merge.PartLse(p, h)}) / sum * double{merge.PartOut(p, h, d)};
            }
            ASSERT_NEAR(merge.Out(row, h, d), value, 1e-5) << row << ", " << h << ", " << d;
          }
          for (int64_t d = width; d < width + merge.gap; ++d) {
            ASSERT_EQ(merge.Out(row, h, d), kUntouched) << "in the gap";
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace sparsemla::test
