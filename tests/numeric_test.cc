// Storage types: every code against the format's definition, and rounding at every tie.
#include "core/numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace sparsemla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A binary floating-point format as its standard defines it.
struct Layout {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool has_infinity;  // the top exponent holds infinities and NaNs
  uint32_t largest;   // code of the largest value that rounding may give
  uint32_t overflow;  // code of everything beyond it
  bool negative_zero_is_nan = false;
};

template <typename T>
constexpr Layout kLayout = {};
template <>
constexpr Layout kLayout<BFloat16> = {8, 7, 127, true, 0x7F7F, 0x7F80};
template <>
constexpr Layout kLayout<Float16> = {5, 10, 15, true, 0x7BFF, 0x7C00};
template <>
constexpr Layout kLayout<Float8E4M3> = {4, 3, 7, false, 0x7E, 0x7E};
template <>
constexpr Layout kLayout<Float8E4M3Fnuz> = {4, 3, 8, false, 0x7E, 0x7E, true};

template <typename T>
uint32_t SignBit() {
  return 1u << (kLayout<T>.exponent_bits + kLayout<T>.mantissa_bits);
}

// The value of a code, from the definition.
template <typename T>
double Define(uint32_t code) {
  const Layout& layout = kLayout<T>;
  const double sign = (code & SignBit<T>()) != 0 ? -1.0 : 1.0;
  const auto mantissa = static_cast<int>(code & ((1u << layout.mantissa_bits) - 1));
  const auto exponent = static_cast<int>((code & (SignBit<T>() - 1)) >> layout.mantissa_bits);
  const int top = (1 << layout.exponent_bits) - 1;
  if (layout.negative_zero_is_nan) {
    if (code == SignBit<T>()) return std::nan("");
  } else if (layout.has_infinity) {
    if (exponent == top) return mantissa == 0 ? sign * INFINITY : std::nan("");
  } else if ((code & (SignBit<T>() - 1)) == SignBit<T>() - 1) {
    return std::nan("");
  }
  const int implicit_one = exponent == 0 ? 0 : 1 << layout.mantissa_bits;
  return sign * std::ldexp(implicit_one + mantissa,
                           std::max(exponent, 1) - layout.bias - layout.mantissa_bits);
}

template <typename T>
T Code(uint32_t code) {
  return T{static_cast<decltype(T::bits)>(code)};
}

template <typename T>
uint32_t Round(float x) {
  return FromFloat<T>(x).bits;
}

// The code that stands for `magnitude` with x's sign.
template <typename T>
uint32_t Signed(uint32_t magnitude, bool negative) {
  if (magnitude == 0 && kLayout<T>.negative_zero_is_nan) return 0;
  return negative ? magnitude | SignBit<T>() : magnitude;
}

template <typename T>
class StorageType : public testing::Test {};
using StorageTypes = testing::Types<BFloat16, Float16, Float8E4M3, Float8E4M3Fnuz>;
TYPED_TEST_SUITE(StorageType, StorageTypes);

// N10: all codes are exact, subnormals and both zeros included.
TYPED_TEST(StorageType, EveryCodeHasTheValueOfItsDefinition) {
  for (uint32_t code = 0; code < 2 * SignBit<TypeParam>(); ++code) {
    const float value = ToFloat(Code<TypeParam>(code));
    const double expected = Define<TypeParam>(code);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value)) << "code " << code;
      continue;
    }
    EXPECT_EQ(double{value}, expected) << "code " << code;
    EXPECT_EQ(std::signbit(value), std::signbit(expected)) << "code " << code;
  }
}

TYPED_TEST(StorageType, EveryCodeThatRoundingMayGiveSurvivesTheRoundTrip) {
  for (uint32_t code = 0; code < 2 * SignBit<TypeParam>(); ++code) {
    const float value = ToFloat(Code<TypeParam>(code));
    const uint32_t again = Round<TypeParam>(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(ToFloat(Code<TypeParam>(again)))) << "code " << code;
    } else if ((code & (SignBit<TypeParam>() - 1)) <= kLayout<TypeParam>.largest ||
               kLayout<TypeParam>.has_infinity) {
      EXPECT_EQ(again, code);
    }
  }
}

// N8: between two neighbours the nearer wins, and the even one of a tie; the first float on either
// side of the tie is no tie.
TYPED_TEST(StorageType, RoundsToNearestEvenBetweenEveryTwoNeighbours) {
  const uint32_t largest = kLayout<TypeParam>.largest;
  for (uint32_t low = 0; low < largest; ++low) {
    const uint32_t high = low + 1;
    const double middle = (Define<TypeParam>(low) + Define<TypeParam>(high)) / 2;
    const auto tie = static_cast<float>(middle);
    ASSERT_EQ(double{tie}, middle);
    for (const bool negative : {false, true}) {
      const float sign = negative ? -1.0f : 1.0f;
      const uint32_t even = low % 2 == 0 ? low : high;
      EXPECT_EQ(Round<TypeParam>(sign * tie), Signed<TypeParam>(even, negative)) << middle;
      EXPECT_EQ(Round<TypeParam>(sign * std::nextafter(tie, 0.0f)),
                Signed<TypeParam>(low, negative))
          << "below " << middle;
      EXPECT_EQ(Round<TypeParam>(sign * std::nextafter(tie, kInf)),
                Signed<TypeParam>(high, negative))
          << "above " << middle;
    }
  }
}

// N8, N11: 16-bit types overflow to infinity from half a step beyond the largest value on; fp8
// saturates (448, and 224 in fnuz although the type reaches 240).
TYPED_TEST(StorageType, ValuesBeyondTheLargestOverflowOrSaturate) {
  const Layout& layout = kLayout<TypeParam>;
  const double largest = Define<TypeParam>(layout.largest);
  const double half_step = (largest - Define<TypeParam>(layout.largest - 1)) / 2;
  const auto threshold = static_cast<float>(largest + half_step);
  for (const bool negative : {false, true}) {
    const float sign = negative ? -1.0f : 1.0f;
    EXPECT_EQ(Round<TypeParam>(sign * static_cast<float>(largest)),
              Signed<TypeParam>(layout.largest, negative));
    EXPECT_EQ(Round<TypeParam>(sign * std::nextafter(threshold, 0.0f)),
              Signed<TypeParam>(layout.largest, negative));
    for (const float x : {threshold, std::numeric_limits<float>::max(), kInf}) {
      EXPECT_EQ(Round<TypeParam>(sign * x), Signed<TypeParam>(layout.overflow, negative)) << x;
    }
  }
}

TYPED_TEST(StorageType, NanStaysNan) {
  for (const float nan : {kNan, -kNan, std::bit_cast<float>(0x7F800001u),
                          std::bit_cast<float>(0xFF800001u), std::bit_cast<float>(0x7FFFFFFFu)}) {
    EXPECT_TRUE(std::isnan(ToFloat(FromFloat<TypeParam>(nan))));
  }
}

TYPED_TEST(StorageType, ZeroKeepsItsSignWhereTheFormatHasOne) {
  EXPECT_EQ(Round<TypeParam>(0.0f), 0u);
  EXPECT_EQ(Round<TypeParam>(-0.0f), Signed<TypeParam>(0, true));
  EXPECT_EQ(Round<TypeParam>(-std::numeric_limits<float>::denorm_min()),
            Signed<TypeParam>(0, true));
}

TEST(NumericTest, TheLargestFp8ValuesAre448And224) {
  EXPECT_EQ(ToFloat(FromFloat<Float8E4M3>(1e9f)), 448.0f);
  EXPECT_EQ(ToFloat(FromFloat<Float8E4M3Fnuz>(1e9f)), 224.0f);
  EXPECT_EQ(ToFloat(FromFloat<Float8E4M3Fnuz>(-240.0f)), -224.0f);
}

TEST(NumericTest, ConversionsAreConstantExpressions) {
  static_assert(FromFloat<BFloat16>(1.0f).bits == 0x3F80);
  static_assert(FromFloat<Float16>(-2.0f).bits == 0xC000);
  static_assert(ToFloat(FromFloat<Float8E4M3>(0.75f)) == 0.75f);
  static_assert(ToFloat(FromFloat<Float8E4M3Fnuz>(0.75f)) == 0.75f);
}

// A26: the two 8-bit formats are not one another.
TEST(NumericTest, FnuzCodesAreHalfOfFnCodesButForTheSpecialOnes) {
  const std::vector<std::pair<uint32_t, float>> fn = {
      {0x38, 1.0f}, {0x40, 2.0f}, {0x7E, 448.0f}, {0x01, 0x1p-9f}, {0x08, 0x1p-6f}};
  for (const auto& [code, value] : fn) {
    EXPECT_EQ(ToFloat(Code<Float8E4M3>(code)), value);
    EXPECT_EQ(ToFloat(Code<Float8E4M3Fnuz>(code)), value / 2);
  }
  EXPECT_TRUE(std::isnan(ToFloat(Code<Float8E4M3>(0x7F))));
  EXPECT_TRUE(std::isnan(ToFloat(Code<Float8E4M3>(0xFF))));
  EXPECT_EQ(ToFloat(Code<Float8E4M3Fnuz>(0x7F)), 240.0f);
  EXPECT_EQ(ToFloat(Code<Float8E4M3Fnuz>(0xFF)), -240.0f);
  EXPECT_EQ(ToFloat(Code<Float8E4M3>(0x80)), 0.0f);
  EXPECT_TRUE(std::signbit(ToFloat(Code<Float8E4M3>(0x80))));
  EXPECT_TRUE(std::isnan(ToFloat(Code<Float8E4M3Fnuz>(0x80))));
}

// A26, N11: 0x80 is NaN in fnuz.
TEST(NumericTest, NegativeUnderflowNeverGivesTheNanCodeOfFnuz) {
  const float tie = 0x1p-11f;  // half of the least subnormal: rounds to the even code, zero
  for (float x = -0.0f; x > -tie; x = std::nextafter(x * 1.01f, -kInf)) {
    ASSERT_EQ(Round<Float8E4M3Fnuz>(x), 0u) << x;
  }
  EXPECT_EQ(Round<Float8E4M3Fnuz>(-tie), 0u);
  EXPECT_EQ(Round<Float8E4M3Fnuz>(std::nextafter(-tie, -1.0f)), 0x81u);
}

// A27: reading fn codes as fnuz quarters a dot product.
TEST(NumericTest, DotOfFnCodesReadAsFnuzIsAQuarter) {
  double fn = 0.0;
  double fnuz = 0.0;
  for (uint32_t i = 0; i < 256; ++i) {
    const uint32_t a = i;
    const uint32_t b = (i * 77 + 5) & 0xFF;
    const auto special = [](uint32_t code) { return (code & 0x7F) == 0x7F || code == 0x80; };
    if (special(a) || special(b)) continue;
    fn += double{ToFloat(Code<Float8E4M3>(a))} * double{ToFloat(Code<Float8E4M3>(b))};
    fnuz += double{ToFloat(Code<Float8E4M3Fnuz>(a))} * double{ToFloat(Code<Float8E4M3Fnuz>(b))};
  }
  EXPECT_NE(fn, 0.0);
  EXPECT_EQ(4.0 * fnuz, fn);
}

// A28: a scale taken from the latent part alone clips the rotary part.
TEST(NumericTest, ScaleOfTheLatentPartAloneClipsTheRotaryPart) {
  const auto through_fp8 = [](float x, float scale) {
    return ToFloat(FromFloat<Float8E4M3>(x / scale)) * scale;
  };
  EXPECT_NEAR(through_fp8(1.0f, 0.1f / 448.0f), 0.1f, 1e-6f);
  EXPECT_NEAR(through_fp8(1.0f, 1.1f / 448.0f), 1.0f, 0.04f);
}

TEST(NumericTest, VisitDTypeCallsWithTheStorageTypeOfTheSameSize) {
  const auto is = [](DType dtype, auto expected) {
    return VisitDType(dtype, [&]<typename T>() {
      return std::is_same_v<T, decltype(expected)> && sizeof(T) == DTypeBytes(dtype);
    });
  };
  EXPECT_TRUE(is(DType::kFloat32, float{}));
  EXPECT_TRUE(is(DType::kBFloat16, BFloat16{}));
  EXPECT_TRUE(is(DType::kFloat16, Float16{}));
  EXPECT_TRUE(is(DType::kFloat8E4M3, Float8E4M3{}));
  EXPECT_TRUE(is(DType::kFloat8E4M3Fnuz, Float8E4M3Fnuz{}));
}

}  // namespace
}  // namespace sparsemla
