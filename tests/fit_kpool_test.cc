// FitKpoolIndices on every back end: spec examples, holes, strides, bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/kernel_test.h"

namespace sparsemla::test {
namespace {

using Rows = std::vector<std::vector<int32_t>>;

// Fits packed rows, or rows of a wider matrix, and checks that nothing else was written.
Rows Fit(const Backend& backend, const Rows& input, int32_t topk_tokens, int64_t gap = 0) {
  const auto num_rows = static_cast<int64_t>(input.size());
  const auto width = static_cast<int64_t>(input[0].size());
  const int64_t column_stride = gap == 0 ? 1 : 2;
  const int64_t in_stride = width * column_stride + gap;
  const int64_t out_stride = topk_tokens + gap;
  std::vector<int32_t> in(static_cast<size_t>(num_rows * in_stride), 777777);
  std::vector<int32_t> out(static_cast<size_t>(num_rows * out_stride) + 8, 888888);
  const View<int32_t, 2> in_view = {in.data(), {num_rows, width}, {in_stride, column_stride}};
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      in_view(r, c) = input[static_cast<size_t>(r)][static_cast<size_t>(c)];
    }
  }
  const auto fitted =
      FitKpoolIndices(backend, {.topk_indices = {in.data(), in_view.shape, in_view.strides},
                                .topk_tokens = topk_tokens,
                                .fitted = {out.data(), {num_rows, topk_tokens}, {out_stride, 1}}});
  EXPECT_TRUE(fitted.ok()) << fitted.status().message();
  if (!fitted.ok()) return {};
  EXPECT_EQ(fitted.value().data, out.data());
  Rows rows;
  for (int64_t r = 0; r < num_rows; ++r) {
    const auto begin = out.begin() + r * out_stride;
    rows.emplace_back(begin, begin + topk_tokens);
    EXPECT_TRUE(std::all_of(begin + topk_tokens, begin + out_stride,
                            [](int32_t v) { return v == 888888; }));
  }
  EXPECT_TRUE(std::all_of(out.end() - 8, out.end(), [](int32_t v) { return v == 888888; }));
  return rows;
}

using FitKpoolTest = KernelTest;
INSTANTIATE_TEST_SUITE_P(All, FitKpoolTest, EveryKernel(), KernelName);

TEST_P(FitKpoolTest, TheTailStaysAndHistoryFillsTheRest) {
  const Rows input = {{10, 9, 8, 7, 6, 5, 100, 101},
                      {10, 9, 8, -1, -1, -1, 100, -1},
                      {-1, -1, -1, -1, -1, -1, -1, -1}};
  const Rows want = {{10, 9, 8, 7, 100, 101}, {10, 9, 8, 100, -1, -1}, {-1, -1, -1, -1, -1, -1}};
  EXPECT_EQ(Fit(backend(), input, 6), want);
}

TEST_P(FitKpoolTest, StridedRowsAndColumnsGiveTheSame) {  // A40
  const Rows input = {{10, 7, 3, 1, 21, 22, -1}, {10, 7, 3, 1, -1, -1, -1}};
  const Rows want = {{10, 7, 21, 22}, {10, 7, 3, 1}};
  EXPECT_EQ(Fit(backend(), input, 4), want);
  EXPECT_EQ(Fit(backend(), input, 4, 5), want);
}

TEST_P(FitKpoolTest, ATailLongerThanTheRowIsCutBehind) {
  EXPECT_EQ(Fit(backend(), {{1, 2, 10, 11, 12, 13}, {-1, -1, 10, 11, 12, 13}}, 2),
            (Rows{{10, 11}, {10, 11}}));
}

// Four valid history entries: the first four columns stay, the 8 behind the hole is lost.
TEST_P(FitKpoolTest, AnyNegativeValueIsInvalidAndAHoleIsCopiedThrough) {
  EXPECT_EQ(Fit(backend(), {{5, -9, 6, 7, -2147483647, 8, 9, -3}}, 6),
            (Rows{{5, -9, 6, 7, 9, -1}}));
}

// A41: the widths of real buffers, and the smallest.
TEST_P(FitKpoolTest, WidthsOfRealBuffersKeepEveryTailEntry) {
  for (const auto& [topk, width] : std::vector<std::pair<int32_t, int32_t>>{
           {2048, 2051}, {2048, 2176}, {1, 2}, {3, 4}, {1, 130}, {2051, 2176}}) {
    std::vector<int32_t> row(static_cast<size_t>(width), -1);
    for (int32_t c = 0; c < topk; ++c) row[static_cast<size_t>(c)] = 100000 - c;
    const int32_t tail = std::min(width - topk, 3);
    for (int32_t c = 0; c < tail; ++c) row[static_cast<size_t>(topk + c)] = 200000 + c;
    const int32_t kept_tail = std::min(tail, topk);
    std::vector<int32_t> want;
    for (int32_t c = 0; c < topk - kept_tail; ++c) want.push_back(100000 - c);
    for (int32_t c = 0; c < kept_tail; ++c) want.push_back(200000 + c);
    EXPECT_EQ(Fit(backend(), {row, row}, topk), (Rows{want, want})) << topk << " of " << width;
  }
}

TEST_P(FitKpoolTest, RowsOfTheRightWidthAreReturnedThemselves) {
  const std::vector<int32_t> indices = {1, 2, -1, 4};
  const auto view = View<const int32_t, 2>::Contiguous(indices.data(), {2, 2});
  const auto fitted = FitKpoolIndices(backend(), {.topk_indices = view, .topk_tokens = 2});
  ASSERT_TRUE(fitted.ok());
  EXPECT_EQ(fitted.value().data, indices.data());
}

TEST_P(FitKpoolTest, NarrowRowsAreAnErrorThatNamesBothWidths) {
  const std::vector<int32_t> indices = {1, 2, 3};
  const auto view = View<const int32_t, 2>::Contiguous(indices.data(), {1, 3});
  const auto fitted = FitKpoolIndices(backend(), {.topk_indices = view, .topk_tokens = 4});
  EXPECT_EQ(fitted.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(fitted.status().message().find("3 wide"), std::string::npos);
  EXPECT_NE(fitted.status().message().find("topk_tokens, 4"), std::string::npos);
}

TEST_P(FitKpoolTest, NoRowsGiveNoRows) {  // A02
  const int32_t unused = 0;
  int32_t out = 5;
  const auto fitted =
      FitKpoolIndices(backend(), {.topk_indices = {&unused, {0, 8}, {8, 1}},
                                  .topk_tokens = 6,
                                  .fitted = View<int32_t, 2>::Contiguous(&out, {0, 6})});
  ASSERT_TRUE(fitted.ok()) << fitted.status().message();
  EXPECT_EQ(fitted.value().shape[0], 0);
  EXPECT_EQ(out, 5);
}

}  // namespace
}  // namespace sparsemla::test
