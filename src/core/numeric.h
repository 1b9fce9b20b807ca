// Storage types and their exact conversions, for host and device. All conversions to a narrower
// type round to nearest even. Formulas: IEEE 754 binary16; bfloat16 = upper half of binary32; OCP
// 8-bit floating point specification (e4m3fn); e4m3fnuz as published for AMD CDNA3 (bias 8, no -0,
// one NaN).
#pragma once

#include <bit>
#include <cstdint>

#include "core/host_device.h"
#include "sparsemla/types.h"

namespace sparsemla {

struct BFloat16 {
  uint16_t bits = 0;
};
struct Float16 {
  uint16_t bits = 0;
};
struct Float8E4M3 {
  uint8_t bits = 0;
};
struct Float8E4M3Fnuz {
  uint8_t bits = 0;
};

SPARSEMLA_HD constexpr float ToFloat(float x) {
  return x;
}

SPARSEMLA_HD constexpr float ToFloat(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

SPARSEMLA_HD constexpr float ToFloat(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // inf, NaN
    return std::bit_cast<float>(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  }
  if (magnitude < 0x400u) {  // zero, subnormal: magnitude * 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
}

SPARSEMLA_HD constexpr float ToFloat(Float8E4M3 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
  const uint32_t magnitude = x.bits & 0x7Fu;
  if (magnitude == 0x7Fu) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (magnitude < 8u) {  // subnormal: magnitude * 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

SPARSEMLA_HD constexpr float ToFloat(Float8E4M3Fnuz x) {
  if (x.bits == 0x80u) return std::bit_cast<float>(0x7FC00000u);
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
  const uint32_t magnitude = x.bits & 0x7Fu;
  if (magnitude < 8u) {  // subnormal: magnitude * 2^-10
    const float value = static_cast<float>(magnitude) * 0x1p-10f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (119u << 23)));
}

// Converts a float to a storage type: FromFloat<BFloat16>(x).
template <typename T>
SPARSEMLA_HD constexpr T FromFloat(float x);

template <>
SPARSEMLA_HD constexpr float FromFloat<float>(float x) {
  return x;
}

template <>
SPARSEMLA_HD constexpr BFloat16 FromFloat<BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {  // keep NaN a NaN
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
SPARSEMLA_HD constexpr Float16 FromFloat<Float16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<uint16_t>(sign | 0x7E00u)};
  if (magnitude >= 0x477FF000u) return {static_cast<uint16_t>(sign | 0x7C00u)};  // >= 65520
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves x * 2^24 rounded in the low bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u))};
  }
  const uint32_t rebiased = magnitude - (112u << 23);
  return {static_cast<uint16_t>(sign | ((rebiased + 0xFFFu + ((rebiased >> 13) & 1u)) >> 13))};
}

namespace internal {

// Rounds |x| to a 4-bit exponent and 3-bit mantissa with the given exponent bias (7: e4m3fn, 8:
// fnuz); |x| is finite and at most the format's largest value.
SPARSEMLA_HD constexpr uint32_t RoundToE4M3(uint32_t magnitude, uint32_t bias) {
  const uint32_t least_normal = (128u - bias) << 23;  // 2^(1 - bias)
  if (magnitude < least_normal) {
    // Adding 2^(21 - bias) aligns the subnormal step 2^(-2 - bias) with the last mantissa bit.
    const uint32_t aligner = (148u - bias) << 23;
    const float shifted = std::bit_cast<float>(magnitude) + std::bit_cast<float>(aligner);
    return std::bit_cast<uint32_t>(shifted) - aligner;
  }
  const uint32_t rebiased = magnitude - ((127u - bias) << 23);
  return (rebiased + 0x7FFFFu + ((rebiased >> 20) & 1u)) >> 20;
}

}  // namespace internal

// Saturates to +-448 (infinities too); NaN stays NaN.
template <>
SPARSEMLA_HD constexpr Float8E4M3 FromFloat<Float8E4M3>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<uint8_t>(sign | 0x7Fu)};
  if (magnitude >= 0x43E00000u) return {static_cast<uint8_t>(sign | 0x7Eu)};  // >= 448
  return {static_cast<uint8_t>(sign | internal::RoundToE4M3(magnitude, 7))};
}

// Saturates to +-224, as the reference backend does (the type itself reaches 240); NaN is 0x80;
// negative values that round to zero give 0x00, never 0x80.
template <>
SPARSEMLA_HD constexpr Float8E4M3Fnuz FromFloat<Float8E4M3Fnuz>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {0x80u};
  const uint32_t clamped = magnitude > 0x43600000u ? 0x43600000u : magnitude;  // 224
  const uint32_t code = internal::RoundToE4M3(clamped, 8);
  return {static_cast<uint8_t>(code == 0 ? 0u : sign | code)};
}

// Calls `function.template operator()<T>()` with the storage type of `dtype`.
template <typename Function>
constexpr decltype(auto) VisitDType(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kBFloat16:
      return function.template operator()<BFloat16>();
    case DType::kFloat16:
      return function.template operator()<Float16>();
    case DType::kFloat8E4M3:
      return function.template operator()<Float8E4M3>();
    case DType::kFloat8E4M3Fnuz:
      return function.template operator()<Float8E4M3Fnuz>();
    case DType::kFloat32:
      break;
  }
  return function.template operator()<float>();
}

}  // namespace sparsemla
