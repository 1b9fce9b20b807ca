// Every code of every storage type against its definition: sign, exponent, mantissa, bias.
#include "core/numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace sparsemla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A binary floating point format as its standard writes it down.
struct Definition {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool has_infinity;   // the top exponent is infinity and NaN
  uint32_t nan = 0;    // otherwise: the one magnitude that is NaN ...
  bool fnuz = false;   // ... or the code of negative zero
  float clamp = kInf;  // where FromFloat saturates
};
constexpr Definition kBFloat16Definition = {8, 7, 127, true};
constexpr Definition kFloat16Definition = {5, 10, 15, true};
constexpr Definition kE4M3Definition = {4, 3, 7, false, 0x7F, false, 448.0f};
constexpr Definition kFnuzDefinition = {4, 3, 8, false, 0x100, true, 224.0f};

template <typename T>
constexpr Definition DefinitionOf() {
  if constexpr (std::is_same_v<T, BFloat16>) return kBFloat16Definition;
  if constexpr (std::is_same_v<T, Float16>) return kFloat16Definition;
  if constexpr (std::is_same_v<T, Float8E4M3>) return kE4M3Definition;
  return kFnuzDefinition;
}

double ValueByDefinition(const Definition& definition, uint32_t code) {
  const int magnitude_bits = definition.exponent_bits + definition.mantissa_bits;
  const bool negative = (code >> magnitude_bits) != 0;
  const uint32_t magnitude = code & ((1u << magnitude_bits) - 1);
  const int exponent = static_cast<int>(magnitude >> definition.mantissa_bits);
  const auto mantissa = static_cast<double>(magnitude & ((1u << definition.mantissa_bits) - 1));
  const double fraction = mantissa / std::ldexp(1.0, definition.mantissa_bits);
  if (definition.fnuz && negative && magnitude == 0) return kNan;
  if (magnitude == definition.nan && definition.nan != 0) return kNan;
  if (definition.has_infinity && exponent == (1 << definition.exponent_bits) - 1) {
    return mantissa == 0.0 ? (negative ? -kInf : kInf) : kNan;
  }
  const double value = exponent == 0 ? std::ldexp(fraction, 1 - definition.bias)
                                     : std::ldexp(1.0 + fraction, exponent - definition.bias);
  return negative ? -value : value;
}

template <typename T>
class NumericTest : public testing::Test {
 protected:
  static constexpr Definition kDefinition = DefinitionOf<T>();
  static constexpr int kMagnitudeBits = kDefinition.exponent_bits + kDefinition.mantissa_bits;
  static constexpr uint32_t kNumCodes = 2u << kMagnitudeBits;

  static T Make(uint32_t code) { return T{static_cast<decltype(T::bits)>(code)}; }
};
using StorageTypes = testing::Types<BFloat16, Float16, Float8E4M3, Float8E4M3Fnuz>;
TYPED_TEST_SUITE(NumericTest, StorageTypes);

// N10, A26.
TYPED_TEST(NumericTest, EveryCodeHasTheValueOfItsDefinition) {
  for (uint32_t code = 0; code < TestFixture::kNumCodes; ++code) {
    const double want = ValueByDefinition(TestFixture::kDefinition, code);
    const float got = ToFloat(TestFixture::Make(code));
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << "code " << code;
    } else {
      ASSERT_EQ(double{got}, want) << "code " << code;
      ASSERT_EQ(std::signbit(got), std::signbit(want)) << "code " << code;
    }
  }
}

TYPED_TEST(NumericTest, EveryCodeSurvivesTheWayThroughFloat) {
  for (uint32_t code = 0; code < TestFixture::kNumCodes; ++code) {
    const float value = ToFloat(TestFixture::Make(code));
    const TypeParam back = FromFloat<TypeParam>(value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(ToFloat(back))) << "code " << code;
    } else if (std::abs(value) <= TestFixture::kDefinition.clamp) {
      ASSERT_EQ(uint32_t{back.bits}, code);
    }
  }
}

// N8: between every two neighbours, on both sides of the middle and in it.
TYPED_TEST(NumericTest, RoundsToNearestAndTiesToTheEvenCode) {
  constexpr Definition kType = TestFixture::kDefinition;
  for (uint32_t code = 0; code + 1 < TestFixture::kNumCodes / 2; ++code) {
    const double low = ValueByDefinition(kType, code);
    double high = ValueByDefinition(kType, code + 1);
    if (!std::isfinite(low) || std::isnan(high) || high > double{kType.clamp}) break;
    if (std::isinf(high)) high = 2 * low - ValueByDefinition(kType, code - 1);
    const auto middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(double{middle}, (low + high) / 2) << "the middle is exact in float";
    for (const float sign : {1.0f, -1.0f}) {
      const auto round = [&](float value) {
        const uint32_t bits = FromFloat<TypeParam>(sign * value).bits;
        return bits & (TestFixture::kNumCodes / 2 - 1);
      };
      ASSERT_EQ(round(std::nextafter(middle, 0.0f)), code) << "code " << code;
      ASSERT_EQ(round(std::nextafter(middle, kInf)), code + 1) << "code " << code;
      ASSERT_EQ(round(middle), code % 2 == 0 ? code : code + 1) << "code " << code;
    }
  }
}

TYPED_TEST(NumericTest, NanStaysNan) {
  for (const uint32_t bits : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFF800001u, 0x7FFFFFFFu}) {
    EXPECT_TRUE(std::isnan(ToFloat(FromFloat<TypeParam>(std::bit_cast<float>(bits)))));
  }
}

// A26, N11: fp8 saturates, at 448 and at 224, infinities too; the 16-bit types overflow to
// infinity.
TYPED_TEST(NumericTest, BeyondTheRangeFp8SaturatesAndOthersOverflow) {
  const float limit = TestFixture::kDefinition.clamp;
  for (const float value : {500.0f, 1e6f, 3.4e38f, kInf}) {
    if (std::isinf(limit)) {
      EXPECT_EQ(ToFloat(FromFloat<TypeParam>(kInf)), kInf);
      EXPECT_EQ(ToFloat(FromFloat<TypeParam>(-kInf)), -kInf);
    } else {
      EXPECT_EQ(ToFloat(FromFloat<TypeParam>(value)), limit) << value;
      EXPECT_EQ(ToFloat(FromFloat<TypeParam>(-value)), -limit) << value;
    }
  }
}

TEST(NumericFp8, CodesOfTheReportHaveTheirKnownValues) {  // A26
  const std::pair<int, float> known[] = {
      {0x38, 1.0f}, {0x40, 2.0f}, {0x7E, 448.0f}, {0x01, 0x1p-9f}, {0x08, 0x1p-6f}};
  for (const auto& [code, value] : known) {
    EXPECT_EQ(ToFloat(Float8E4M3{static_cast<uint8_t>(code)}), value);
    EXPECT_EQ(ToFloat(Float8E4M3Fnuz{static_cast<uint8_t>(code)}), value / 2);
  }
  EXPECT_TRUE(std::isnan(ToFloat(Float8E4M3{0x7F})));
  EXPECT_TRUE(std::isnan(ToFloat(Float8E4M3{0xFF})));
  EXPECT_EQ(ToFloat(Float8E4M3Fnuz{0x7F}), 240.0f);
  EXPECT_TRUE(std::isnan(ToFloat(Float8E4M3Fnuz{0x80})));
  EXPECT_TRUE(std::signbit(ToFloat(Float8E4M3{0x80})));
}

TEST(NumericFp8, FnuzNeverWritesItsNanForANegativeUnderflow) {  // A26
  for (float value = -1e-2f; value < 0.0f; value *= 0.75f) {
    EXPECT_NE(FromFloat<Float8E4M3Fnuz>(value).bits, 0x80);
    if (value > -1e-30f) break;
  }
  EXPECT_EQ(FromFloat<Float8E4M3Fnuz>(-0x1p-12f).bits, 0x00);
  EXPECT_EQ(FromFloat<Float8E4M3Fnuz>(-0.0f).bits, 0x00);
}

TEST(NumericFp8, ADotOfCodesReadInTheOtherKindIsAQuarter) {  // A27
  std::mt19937 random(7);
  double dot = 0.0;
  double dot_misread = 0.0;
  for (int i = 0; i < 512; ++i) {
    uint8_t codes[2];
    for (uint8_t& code : codes) {
      do code = static_cast<uint8_t>(random());
      while (code == 0x80 || (code & 0x7F) == 0x7F);
    }
    dot += double{ToFloat(Float8E4M3{codes[0]})} * double{ToFloat(Float8E4M3{codes[1]})};
    dot_misread +=
        double{ToFloat(Float8E4M3Fnuz{codes[0]})} * double{ToFloat(Float8E4M3Fnuz{codes[1]})};
  }
  EXPECT_EQ(dot_misread * 4, dot);
}

TEST(NumericConstexpr, ConversionsAreCompileTimeConstants) {
  static_assert(ToFloat(FromFloat<BFloat16>(1.5f)) == 1.5f);
  static_assert(ToFloat(FromFloat<Float16>(-65504.0f)) == -65504.0f);
  static_assert(FromFloat<Float8E4M3>(1.0f).bits == 0x38);
  static_assert(FromFloat<Float8E4M3Fnuz>(1.0f).bits == 0x40);
}

}  // namespace
}  // namespace sparsemla
