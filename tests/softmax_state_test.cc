// The algebra of softmax states: identity, order, infinities, and the sink as a state (N5, N6).
#include "core/softmax_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace sparsemla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
const std::vector<float> kSamples = {-kInf, -3e38f, -1e4f, -104.0f, -5.0f, -1e-6f, 0.0f,
                                     1e-6f, 1.0f,   17.5f, 88.9f,   1e4f,  3e38f,  kInf};

struct SinkCase {
  float lse;
  float sink;
  float factor;
  float new_lse;
};

// A19, N5: out' = out * e^(lse - lse'), lse' = ln(e^lse + e^sink).
TEST(SoftmaxStateTest, SinkScalesTheOutputAndEntersTheLse) {
  const std::vector<SinkCase> cases = {{0.0f, 0.0f, 0.5f, 0.693147f},
                                       {std::log(4.0f), 0.0f, 0.8f, 1.609438f},
                                       {2.0f, -1.0f, 0.952574f, 2.048587f},
                                       {-5.0f, 3.0f, 0.000335350f, 3.000335f}};
  for (const SinkCase& c : cases) {
    const float lse = LogAddExp(c.lse, c.sink);
    EXPECT_NEAR(lse, c.new_lse, 1e-6f);
    EXPECT_NEAR(MergeWeight(c.lse, lse), c.factor, c.factor * 2e-6f);
  }
}

// A19, N5
TEST(SoftmaxStateTest, SinkOfMinusInfinityIsNoSinkAndOfPlusInfinityTakesEverything) {
  for (const float lse : {-1e4f, -5.0f, 0.0f, 2.0f, 1e4f}) {
    EXPECT_EQ(LogAddExp(lse, -kInf), lse);
    EXPECT_EQ(MergeWeight(lse, LogAddExp(lse, -kInf)), 1.0f);
    EXPECT_EQ(LogAddExp(lse, kInf), kInf);
    EXPECT_EQ(MergeWeight(lse, kInf), 0.0f);
  }
}

// A19, N4: an empty row takes the sink as its lse and keeps a zero output, never NaN.
TEST(SoftmaxStateTest, EmptyStateWithASinkIsTheSink) {
  for (const float sink : kSamples) {
    EXPECT_EQ(LogAddExp(-kInf, sink), sink);
    EXPECT_EQ(MergeWeight(-kInf, sink), 0.0f);
  }
}

// A21: the lse is a natural logarithm. Read in base 2 the same two states merge to 7.2330317;
// base-2 values read as natural ones to 8.8079708.
TEST(SoftmaxStateTest, MergesPartitionsOfSumTwoAndEightInNaturalLogarithms) {
  const auto merge = [](float lse_a, float lse_b) {
    const float lse = LogAddExp(lse_a, lse_b);
    return MergeWeight(lse_a, lse) * 0.0f + MergeWeight(lse_b, lse) * 10.0f;
  };
  EXPECT_NEAR(merge(std::log(2.0f), std::log(8.0f)), 8.0f, 1e-5f);
  EXPECT_NEAR(LogAddExp(std::log(2.0f), std::log(8.0f)), std::log(10.0f), 1e-6f);
  EXPECT_NEAR(merge(std::log2(2.0f), std::log2(8.0f)), 8.8079708f, 1e-5f);
}

TEST(SoftmaxStateTest, MinusInfinityIsTheIdentity) {
  for (const float x : kSamples) {
    EXPECT_EQ(LogAddExp(x, -kInf), x);
    EXPECT_EQ(LogAddExp(-kInf, x), x);
  }
}

TEST(SoftmaxStateTest, LogAddExpCommutesToTheLastBit) {
  for (const float a : kSamples) {
    for (const float b : kSamples) EXPECT_EQ(LogAddExp(a, b), LogAddExp(b, a)) << a << ", " << b;
  }
}

TEST(SoftmaxStateTest, LogAddExpIsAssociativeUpToRounding) {
  for (const float a : kSamples) {
    for (const float b : kSamples) {
      for (const float c : kSamples) {
        const float left = LogAddExp(LogAddExp(a, b), c);
        const float right = LogAddExp(a, LogAddExp(b, c));
        if (std::isinf(left)) {
          EXPECT_EQ(left, right);
        } else {
          EXPECT_NEAR(left, right, 1e-6f * std::max(1.0f, std::fabs(left)))
              << a << ", " << b << ", " << c;
        }
      }
    }
  }
}

TEST(SoftmaxStateTest, LogAddExpAgreesWithTheDefinitionInDouble) {
  for (float a = -20.0f; a <= 20.0f; a += 0.37f) {
    for (float b = -20.0f; b <= 20.0f; b += 0.41f) {
      const double expected = std::log(std::exp(double{a}) + std::exp(double{b}));
      EXPECT_NEAR(LogAddExp(a, b), expected, 2e-7 * std::max(1.0, std::fabs(expected)));
    }
  }
}

// N12: NaN is never hidden, not even by an infinity.
TEST(SoftmaxStateTest, NanWinsOverEverything) {
  for (const float x : kSamples) {
    EXPECT_TRUE(std::isnan(LogAddExp(kNan, x))) << x;
    EXPECT_TRUE(std::isnan(LogAddExp(x, kNan))) << x;
  }
  EXPECT_TRUE(std::isnan(LogAddExp(kNan, kNan)));
  EXPECT_TRUE(std::isnan(MergeWeight(kNan, 1.0f)));
  EXPECT_TRUE(std::isnan(MergeWeight(kNan, kNan)));
  EXPECT_TRUE(std::isnan(MergeWeight(1.0f, kNan)));
}

TEST(SoftmaxStateTest, WeightsOfTheTwoPartsOfASumAddUpToOne) {
  for (const float a : {-kInf, -50.0f, -5.0f, 0.0f, 1.0f, 17.5f, 88.9f}) {
    for (const float b : {-104.0f, -5.0f, 0.0f, 1e-6f, 1.0f, 88.9f}) {
      const float total = LogAddExp(a, b);
      EXPECT_NEAR(MergeWeight(a, total) + MergeWeight(b, total), 1.0f, 1e-5f) << a << ", " << b;
    }
  }
}

// A23, N6
TEST(SoftmaxStateTest, BothInfinitiesMarkAStateWithoutKeysAndNanDoesNot) {
  EXPECT_TRUE(IsEmptyLse(-kInf));
  EXPECT_TRUE(IsEmptyLse(kInf));
  EXPECT_FALSE(IsEmptyLse(kNan));
  for (const float x : kSamples) EXPECT_EQ(IsEmptyLse(x), std::isinf(x));
}

}  // namespace
}  // namespace sparsemla
