// The algebra of softmax states (core/softmax_state.h) by numbers that users reported.
#include "core/softmax_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace sparsemla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct SinkCase {
  float lse, sink, factor, total;
};

// A19, N5.
TEST(SoftmaxState, SinksScaleTheOutputByTheReportedFactors) {
  const SinkCase cases[] = {{0.0f, 0.0f, 0.5f, 0.693147f},
                            {std::log(4.0f), 0.0f, 0.8f, 1.609438f},
                            {2.0f, -1.0f, 0.952574f, 2.048587f},
                            {-5.0f, 3.0f, 0.000335350f, 3.000335f}};
  for (const SinkCase& c : cases) {
    const float total = LogAddExp(c.lse, c.sink);
    EXPECT_NEAR(total, c.total, 1e-6f);
    EXPECT_NEAR(MergeWeight(c.lse, total), c.factor, 1e-6f * c.factor + 1e-9f);
  }
}

// A19: the two infinite rows of the table, and the empty row.
TEST(SoftmaxState, AnInfiniteSinkChangesNothingOrTakesEverything) {
  for (const float lse : {-80.0f, 0.0f, 3.5f, 700.0f}) {
    EXPECT_EQ(LogAddExp(lse, -kInf), lse);
    EXPECT_EQ(LogAddExp(-kInf, lse), lse);
    EXPECT_EQ(MergeWeight(lse, lse), 1.0f);
    EXPECT_EQ(LogAddExp(lse, kInf), kInf);
    EXPECT_EQ(MergeWeight(lse, kInf), 0.0f);
    EXPECT_EQ(MergeWeight(-kInf, lse), 0.0f);
  }
}

// A04: (-inf) - (-inf) must not appear.
TEST(SoftmaxState, EmptyStatesMergeToAnEmptyState) {
  EXPECT_EQ(LogAddExp(-kInf, -kInf), -kInf);
  EXPECT_EQ(MergeWeight(-kInf, -kInf), 0.0f);
  EXPECT_EQ(LogAddExp(kInf, -kInf), kInf);
  EXPECT_EQ(LogAddExp(kInf, kInf), kInf);
  EXPECT_EQ(MergeWeight(-kInf, kInf), 0.0f);
}

// A21, A22, N2: sums 2 and 8 with values 0 and 10 give 8; a base mixed up gives something else.
TEST(SoftmaxState, TheBaseIsE) {
  const auto merged = [](float a, float b) {
    const float total = LogAddExp(a, b);
    return MergeWeight(a, total) * 0.0f + MergeWeight(b, total) * 10.0f;
  };
  EXPECT_NEAR(merged(std::log(2.0f), std::log(8.0f)), 8.0f, 1e-5f);
  EXPECT_NEAR(merged(std::log2(2.0f), std::log2(8.0f)), 8.8079708f, 1e-5f);
}

// N12.
TEST(SoftmaxState, NanIsNotHidden) {
  EXPECT_TRUE(std::isnan(LogAddExp(kNan, 0.0f)));
  EXPECT_TRUE(std::isnan(LogAddExp(0.0f, kNan)));
  EXPECT_TRUE(std::isnan(MergeWeight(kNan, 0.0f)));
  EXPECT_TRUE(std::isnan(MergeWeight(0.0f, kNan)));
  EXPECT_FALSE(IsEmptyLse(kNan));
}

// A23: both marks of a state without keys.
TEST(SoftmaxState, BothInfinitiesMarkAnEmptyState) {
  EXPECT_TRUE(IsEmptyLse(-kInf));
  EXPECT_TRUE(IsEmptyLse(kInf));
  for (const float lse : {-1e30f, 0.0f, 1e30f}) EXPECT_FALSE(IsEmptyLse(lse));
}

TEST(SoftmaxState, LargeDifferencesNeitherOverflowNorVanish) {
  EXPECT_EQ(LogAddExp(1e30f, -1e30f), 1e30f);
  EXPECT_EQ(LogAddExp(-1e30f, 1e30f), 1e30f);
  EXPECT_NEAR(LogAddExp(1000.0f, 1000.0f), 1000.693147f, 1e-4f);
  EXPECT_NEAR(LogAddExp(-1000.0f, -1000.0f), -999.306853f, 1e-4f);
}

}  // namespace
}  // namespace sparsemla
