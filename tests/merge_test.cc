// Merge of every back end: states of split rows and of ranks (N4 to N8, N12).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "every_kernel.h"
#include "sparsemla/attention.h"

namespace sparsemla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kUntouched = -12345.0f;

// A merge in memory. Partials and output rows may lie apart; whatever is not written is kUntouched.
struct MergeCase {
  int64_t num_partials;
  int64_t num_rows;
  int64_t num_heads;
  int64_t width;  // kv_lora_rank
  int32_t fold = 1;
  int64_t gap = 0;  // floats between two heads, in the partials and in the output
  std::vector<int32_t> reduce_indptr = {};
  std::vector<RowRange> reduce_final_map = {};
  std::vector<int32_t> reduce_partial_map = {};
  std::vector<float> sinks = {};
  std::vector<float> part_out = {};  // [num_partials, num_heads / fold, width + gap]
  std::vector<float> part_lse = {};  // [num_partials, num_heads / fold]
  std::vector<float> out = {};       // [num_rows, num_heads, width + gap]
  std::vector<float> lse = {};       // [num_rows, num_heads]

  int64_t item_heads() const { return num_heads / fold; }
  float& PartOut(int64_t p, int64_t h, int64_t d) {
    return part_out[static_cast<size_t>((p * item_heads() + h) * (width + gap) + d)];
  }
  float& PartLse(int64_t p, int64_t h) {
    return part_lse[static_cast<size_t>(p * item_heads() + h)];
  }
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
    part_out.assign(static_cast<size_t>(num_partials * item_heads() * (width + gap)), 0.0f);
    part_lse.assign(static_cast<size_t>(num_partials * item_heads()), 0.0f);
    out.assign(static_cast<size_t>(num_rows * num_heads * (width + gap)), kUntouched);
    lse.assign(static_cast<size_t>(num_rows * num_heads), kUntouched);
  }
  void SetPartial(int64_t p, float state_lse, float value) {
    for (int64_t h = 0; h < item_heads(); ++h) {
      PartLse(p, h) = state_lse;
      for (int64_t d = 0; d < width; ++d) PartOut(p, h, d) = value;
    }
  }

  MergeParams Params() {
    const int64_t step = width + gap;
    return {.partials = {.out = {part_out.data(),
                                 {num_partials, item_heads(), width},
                                 {item_heads() * step, step, 1}},
                         .lse = View<const float, 2>::Contiguous(part_lse.data(),
                                                                 {num_partials, item_heads()}),
                         .reduce_indptr = reduce_indptr,
                         .reduce_final_map = reduce_final_map,
                         .reduce_partial_map = reduce_partial_map,
                         .fold = fold},
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

// One row of one head: a partial for every (lse, value).
MergeCase OneRow(const std::vector<std::pair<float, float>>& states, int64_t width = 3) {
  MergeCase merge{static_cast<int64_t>(states.size()), 1, 1, width};
  merge.GroupInOrder({static_cast<int32_t>(states.size())});
  merge.Allocate();
  for (size_t p = 0; p < states.size(); ++p) {
    merge.SetPartial(static_cast<int64_t>(p), states[p].first, states[p].second);
  }
  return merge;
}

class MergeTest : public EveryKernelTest {
 protected:
  void ExpectRow(MergeCase merge, float value, float lse, float tolerance = 0.0f) const {
    merge.Run(backend());
    for (int64_t d = 0; d < merge.width; ++d) {
      if (std::isinf(value) || tolerance == 0.0f) {
        EXPECT_EQ(merge.Out(0, 0, d), value);
      } else {
        EXPECT_NEAR(merge.Out(0, 0, d), value, tolerance);
      }
    }
    if (std::isinf(lse)) {
      EXPECT_EQ(merge.Lse(0, 0), lse);
    } else {
      EXPECT_NEAR(merge.Lse(0, 0), lse, tolerance);
    }
  }
};
SPARSEMLA_INSTANTIATE_EVERY_KERNEL(MergeTest);

// A04: no (-inf) - (-inf) for rows of padding.
TEST_P(MergeTest, StatesWithoutKeysMergeToZeroAndMinusInfinity) {
  ExpectRow(OneRow({{-kInf, 1}, {-kInf, 2}, {-kInf, 3}, {-kInf, 4}}), 0.0f, -kInf);
}

// A04
TEST_P(MergeTest, TheOnlyStateWithKeysComesThroughExactly) {
  ExpectRow(OneRow({{-kInf, kNan}, {0.0f, 0.7f}, {-kInf, 3}, {-kInf, 4}}), 0.7f, 0.0f);
  ExpectRow(OneRow({{3.7f, -0.3f}}), -0.3f, 3.7f);
}

// A21: natural logarithms.
TEST_P(MergeTest, PartitionSumsTwoAndEightWeighOneToFour) {
  ExpectRow(OneRow({{std::log(2.0f), 0.0f}, {std::log(8.0f), 10.0f}}), 8.0f, std::log(10.0f),
            1e-5f);
}

TEST_P(MergeTest, LargeLogitsNeitherOverflowNorVanish) {
  ExpectRow(OneRow({{1e4f, 1.0f}, {1e4f, 3.0f}}), 2.0f, 1e4f + std::log(2.0f), 1e-3f);
  ExpectRow(OneRow({{-1e4f, 1.0f}, {-1e4f, 3.0f}}), 2.0f, -1e4f + std::log(2.0f), 1e-3f);
  ExpectRow(OneRow({{3e38f, 1.0f}, {-3e38f, 3.0f}}), 1.0f, 3e38f);
}

// A23, N6: FlashMLA marks a state without keys with +inf.
TEST_P(MergeTest, BothMarksOfAStateWithoutKeysMeanTheSame) {
  MergeCase ours = OneRow({{1.5f, 2.0f}, {-kInf, 0.0f}, {0.5f, 1.0f}, {-kInf, 0.0f}});
  MergeCase theirs = ours;
  for (float& lse : theirs.part_lse) lse = lse == -kInf ? kInf : lse;
  ours.Run(backend());
  theirs.Run(backend());
  EXPECT_EQ(ours.out, theirs.out);
  EXPECT_EQ(ours.lse, theirs.lse);
  ExpectRow(OneRow({{kInf, 1}, {-kInf, 2}}), 0.0f, -kInf);
}

// A23: FlashMLA's lse leaves the sink out; merging its states and adding the sink once is our
// result, and merging that result again under its mark changes nothing.
TEST_P(MergeTest, StatesOfTheOtherConventionRoundTrip) {
  MergeCase merge = OneRow({{std::log(4.0f), 1.0f}, {kInf, 0.0f}});
  merge.Run(backend());
  MergeCase again = OneRow({{kInf, 0.0f}, {merge.Lse(0, 0), merge.Out(0, 0, 0)}});
  again.Run(backend());
  EXPECT_EQ(again.out, merge.out);
  EXPECT_EQ(again.lse, merge.lse);
  again.sinks = {0.0f};  // A19: ln 4 and 0
  ExpectRow(again, 0.8f, 1.609438f, 2e-6f);
}

// N6: a state without keys is selected out, whatever lies in its buffer.
TEST_P(MergeTest, ValuesOfStatesWithoutKeysAreNotRead) {
  for (const float mark : {-kInf, kInf}) {
    for (const float poison : {kNan, kInf, -kInf}) {
      ExpectRow(OneRow({{mark, poison}, {0.25f, 5.0f}, {mark, poison}}), 5.0f, 0.25f);
      ExpectRow(OneRow({{mark, poison}, {mark, poison}}), 0.0f, -kInf);
    }
  }
}

// N12
TEST_P(MergeTest, NanIsNeverHidden) {
  MergeCase merge{3, 1, 2, 4};
  merge.GroupInOrder({3});
  merge.Allocate();
  for (int64_t p = 0; p < 3; ++p) merge.SetPartial(p, 0.0f, 1.0f);
  merge.PartLse(1, 0) = kNan;     // all of head 0
  merge.PartOut(2, 1, 3) = kNan;  // one column of head 1
  merge.Run(backend());
  EXPECT_TRUE(std::isnan(merge.Lse(0, 0)));
  for (int64_t d = 0; d < 4; ++d) EXPECT_TRUE(std::isnan(merge.Out(0, 0, d)));
  EXPECT_NEAR(merge.Lse(0, 1), std::log(3.0f), 1e-6f);
  for (int64_t d = 0; d < 3; ++d) EXPECT_NEAR(merge.Out(0, 1, d), 1.0f, 1e-6f);
  EXPECT_TRUE(std::isnan(merge.Out(0, 1, 3)));
}

TEST_P(MergeTest, NanIsNotHiddenByDeadNeighboursOrASink) {
  for (const float sink : {-kInf, 0.0f}) {
    MergeCase merge = OneRow({{-kInf, 0.0f}, {kNan, 1.0f}, {kInf, 0.0f}});
    merge.sinks = {sink};
    merge.Run(backend());
    EXPECT_TRUE(std::isnan(merge.Lse(0, 0)));
    for (int64_t d = 0; d < merge.width; ++d) EXPECT_TRUE(std::isnan(merge.Out(0, 0, d)));
  }
}

// N5: once, not once a partial.
TEST_P(MergeTest, TheSinkIsAddedOnce) {
  MergeCase merge = OneRow({{0.0f, 1.0f}, {0.0f, 1.0f}, {std::log(2.0f), 1.0f}});
  merge.sinks = {0.0f};
  ExpectRow(merge, 0.8f, std::log(5.0f), 1e-6f);
  merge.sinks = {-kInf};
  ExpectRow(merge, 1.0f, std::log(4.0f), 1e-6f);
  merge.sinks = {kInf};
  ExpectRow(merge, 0.0f, kInf);
}

// N4, N5, A19
TEST_P(MergeTest, RowsWithoutKeysTakeTheSinkAsTheirLse) {
  for (const float sink : {-kInf, -2.5f, 0.0f, 6.0f, kInf}) {
    MergeCase merge = OneRow({{-kInf, kNan}, {kInf, 1.0f}});
    merge.sinks = {sink};
    ExpectRow(merge, 0.0f, sink);
  }
}

TEST_P(MergeTest, RowsWithoutPartialsAreNotTouched) {
  MergeCase merge{2, 4, 2, 3};
  merge.GroupInOrder({0, 2, 0});
  merge.sinks = {1.0f, kInf};
  merge.Allocate();
  merge.SetPartial(0, 0.0f, 1.0f);
  merge.SetPartial(1, 0.0f, 1.0f);
  merge.Run(backend());
  for (const int64_t row : {0, 2, 3}) {
    for (int64_t h = 0; h < 2; ++h) {
      EXPECT_EQ(merge.Lse(row, h), kUntouched);
      for (int64_t d = 0; d < 3; ++d) EXPECT_EQ(merge.Out(row, h, d), kUntouched);
    }
  }
  EXPECT_NEAR(merge.Lse(1, 0), std::log(2.0f + std::exp(1.0f)), 1e-6f);
  EXPECT_EQ(merge.Lse(1, 1), kInf);
}

// A02
TEST_P(MergeTest, NoPartialsAreNoWork) {
  MergeCase merge{0, 2, 1, 3};
  merge.GroupInOrder({0, 0});
  merge.Allocate();
  merge.Run(backend());
  EXPECT_EQ(merge.out, std::vector<float>(6, kUntouched));
  EXPECT_EQ(merge.lse, std::vector<float>(2, kUntouched));
  const int32_t zero = 0;
  EXPECT_EQ(Merge(backend(), {.partials = {.reduce_indptr = {&zero, 1}}}).message(), "");
}

// N7: the map alone decides the order of the sum.
TEST_P(MergeTest, TheOrderOfTheMapNotOfTheBufferDecidesTheBits) {
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

// A group of two virtual rows: partial p of the map stands for rows p and p + 1 of the buffer.
TEST_P(MergeTest, FoldedRowsGoToTheirShareOfTheHeads) {
  MergeCase merge{4, 2, 4, 2, 2};
  merge.reduce_indptr = {0, 2};
  merge.reduce_final_map = {{2, 4}};
  merge.reduce_partial_map = {2, 0};
  merge.sinks = {-kInf, -kInf, kInf, 0.0f};
  merge.Allocate();
  for (int64_t p = 0; p < 4; ++p) merge.SetPartial(p, 0.0f, static_cast<float>(1 << p));
  merge.Run(backend());
  const std::vector<float> values = {2.5f, 2.5f, 0.0f, 5.0f * 2 / 3};
  const std::vector<float> lse = {std::log(2.0f), std::log(2.0f), kInf, std::log(3.0f)};
  for (int64_t h = 0; h < 4; ++h) {
    EXPECT_EQ(merge.Out(0, h, 0), kUntouched);
    EXPECT_EQ(merge.Lse(0, h), kUntouched);
    EXPECT_NEAR(merge.Out(1, h, 1), values[static_cast<size_t>(h)], 1e-6f);
    if (h == 2) {
      EXPECT_EQ(merge.Lse(1, h), kInf);
    } else {
      EXPECT_NEAR(merge.Lse(1, h), lse[static_cast<size_t>(h)], 1e-6f);
    }
  }
}

TEST_P(MergeTest, TheLseIsOptional) {
  MergeCase merge = OneRow({{0.0f, 1.0f}, {0.0f, 3.0f}});
  MergeParams params = merge.Params();
  params.lse = {};
  EXPECT_EQ(Merge(backend(), params).message(), "");
  EXPECT_NEAR(merge.Out(0, 0, 0), 2.0f, 1e-6f);
  EXPECT_EQ(merge.Lse(0, 0), kUntouched);
}

// N8
TEST_P(MergeTest, SixteenBitOutputsRoundToNearestEven) {
  const float value = 1.0f + 0x1p-8f + 0x1p-12f;
  MergeCase merge = OneRow({{0.0f, value}}, 2);
  uint16_t out[2] = {};
  MergeParams params = merge.Params();
  params.out = Tensor<3>::Contiguous(out, DType::kBFloat16, {1, 1, 2});
  EXPECT_EQ(Merge(backend(), params).message(), "");
  EXPECT_EQ(out[1], 0x3F81);
  params.out.dtype = DType::kFloat16;
  EXPECT_EQ(Merge(backend(), params).message(), "");
  EXPECT_EQ(out[1], 0x3C04);
  merge.SetPartial(0, 0.0f, 1.0f + 0x1p-11f);  // a tie
  EXPECT_EQ(Merge(backend(), params).message(), "");
  EXPECT_EQ(out[1], 0x3C00);
}

// Every width and head count, rows that lie apart, dead partials among live ones: the sums in
// double.
TEST_P(MergeTest, RandomStatesAgreeWithTheDefinition) {
  BackendOptions one_thread;
  one_thread.num_threads = 1;
  const auto alone = CreateBackend(GetParam().backend, one_thread);
  ASSERT_TRUE(alone.ok());
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (const int64_t width : {1, 33, 512, 1025}) {
    for (const int64_t heads : {1, 17, 128}) {
      const std::vector<int32_t> counts = {1, 5, 0, 2, 16};
      MergeCase merge{24, 5, heads, width, 1, width % 7};
      merge.GroupInOrder(counts);
      merge.Allocate();
      for (float& x : merge.part_out) x = normal(random);
      for (float& x : merge.part_lse) x = random() % 4 == 0 ? -kInf : 3.0f * normal(random);
      for (int64_t h = 0; h < heads; ++h) merge.sinks.push_back(normal(random));
      MergeCase again = merge;
      merge.Run(backend());
      again.Run(*alone.value());
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
}  // namespace sparsemla
