// What the C ABI does to its structs: versioned ones are copied in over their defaults and copied
// out as far as they fit; tensors, enums and counted arrays become the C++ types. Used by capi.cc.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include "core/require.h"
#include "sparsemla/attention.h"
#include "sparsemla/plan.h"
#include "sparsemla/sparsemla.h"
#include "sparsemla/status.h"
#include "sparsemla/types.h"

namespace sparsemla::capi {

// No struct of any version is larger; a bound for the bytes read where struct_size is garbage.
inline constexpr uint32_t kMaxStructBytes = 4096;

template <typename T>
Status CheckStructSize(std::string_view name, const T* given) {
  SPARSEMLA_REQUIRE(given != nullptr, name, " is null");
  SPARSEMLA_REQUIRE(given->struct_size >= sizeof(uint32_t) && given->struct_size <= kMaxStructBytes,
                    name, ".struct_size is ", given->struct_size, "; it must be sizeof(", name,
                    "), ", sizeof(T), " in this version");
  return {};
}

// Copies a struct of any version over `value`, which holds the defaults.
template <typename T>
Status ReadStruct(std::string_view name, const T* given, T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  SPARSEMLA_RETURN_IF_ERROR(CheckStructSize(name, given));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(T); i < given->struct_size; ++i) {
    SPARSEMLA_REQUIRE(bytes[i] == 0, name, " is newer than this library: it has ",
                      given->struct_size, " bytes, ", sizeof(T), " are known and byte ", i,
                      " is not zero");
  }
  std::memcpy(&value, given, std::min<size_t>(given->struct_size, sizeof(T)));
  return {};
}

// Copies what fits of `value` into a struct of any version; what this version lacks becomes zero.
template <typename T>
Status WriteStruct(std::string_view name, T value, T* out) {
  static_assert(std::is_trivially_copyable_v<T>);
  SPARSEMLA_RETURN_IF_ERROR(CheckStructSize(name, out));
  value.struct_size = out->struct_size;
  auto* bytes = reinterpret_cast<unsigned char*>(out);
  const size_t known = std::min<size_t>(value.struct_size, sizeof(T));
  std::memcpy(bytes, &value, known);
  std::memset(bytes + known, 0, value.struct_size - known);
  return {};
}

// Enum values outside the type's range never reach the library.
template <typename Enum>
Status ReadEnum(std::string_view name, int32_t value, Enum last, Enum& out) {
  SPARSEMLA_REQUIRE(value >= 0 && value <= static_cast<int32_t>(last), name, " is ", value,
                    "; it must be in 0..", static_cast<int32_t>(last));
  out = static_cast<Enum>(value);
  return {};
}

inline Status ReadDType(std::string_view name, int32_t value, DType& out) {
  return ReadEnum(name, value, DType::kFloat8E4M3Fnuz, out);
}

inline Status ReadCacheFormat(int32_t value, CacheFormat& out) {
  return ReadEnum("cache_format", value, CacheFormat::kFp8DsMla, out);
}

template <typename T>
Status ReadArray(std::string_view name, T* data, int64_t count, std::span<T>& out) {
  SPARSEMLA_REQUIRE(count >= 0, name, " has ", count, " entries; it may not be negative");
  SPARSEMLA_REQUIRE(count == 0 || data != nullptr, name, " is null; it must have ", count,
                    " entries");
  out = {data, static_cast<size_t>(count)};
  return {};
}

// Shape and strides of a tensor that must have `Rank` dimensions, or none if it is not given.
template <size_t Rank>
Status ReadLayout(std::string_view name, const sparsemla_tensor& tensor,
                  std::array<int64_t, Rank>& shape, std::array<int64_t, Rank>& strides) {
  static_assert(Rank <= std::extent_v<decltype(sparsemla_tensor::shape)>);
  if (tensor.ndim == 0) return {};
  SPARSEMLA_REQUIRE(tensor.ndim == Rank, name, " has ndim ", tensor.ndim, "; it must be ", Rank);
  std::copy_n(tensor.shape, Rank, shape.begin());
  std::copy_n(tensor.strides, Rank, strides.begin());
  if (std::any_of(strides.begin(), strides.end(), [](int64_t s) { return s != 0; })) return {};
  int64_t stride = 1;
  for (size_t d = Rank; d-- > 0;) {
    strides[d] = stride;
    SPARSEMLA_REQUIRE(!__builtin_mul_overflow(stride, shape[d], &stride), name, ".shape[", d,
                      "] is ", shape[d], "; the array is larger than 2^63 elements");
  }
  return {};
}

// A tensor whose element type the call fixes: int32_t or float.
template <typename T, int Rank>
Status ReadTensor(std::string_view name, const sparsemla_tensor& tensor, View<T, Rank>& out) {
  constexpr bool kIsFloat = std::is_same_v<std::remove_const_t<T>, float>;
  constexpr sparsemla_dtype kDType = kIsFloat ? SPARSEMLA_FLOAT32 : SPARSEMLA_INT32;
  SPARSEMLA_REQUIRE(tensor.ndim == 0 || tensor.dtype == kDType, name, ".dtype is ", tensor.dtype,
                    "; it must be ", kDType, kIsFloat ? ", float32" : ", int32");
  SPARSEMLA_RETURN_IF_ERROR(ReadLayout(name, tensor, out.shape, out.strides));
  out.data = tensor.ndim == 0 ? nullptr : static_cast<T*>(tensor.data);
  return {};
}

template <typename Pointer, int Rank>
Status ReadTensor(std::string_view name, const sparsemla_tensor& tensor,
                  BasicTensor<Pointer, Rank>& out) {
  SPARSEMLA_RETURN_IF_ERROR(ReadDType(name, tensor.dtype, out.dtype));
  SPARSEMLA_RETURN_IF_ERROR(ReadLayout(name, tensor, out.shape, out.strides));
  out.data = tensor.ndim == 0 ? nullptr : tensor.data;
  return {};
}

template <typename T, int Rank>
sparsemla_tensor WriteTensor(const View<const T, Rank>& view) {
  sparsemla_tensor tensor = {};
  tensor.data = const_cast<T*>(view.data);
  tensor.dtype = std::is_same_v<T, float> ? SPARSEMLA_FLOAT32 : SPARSEMLA_INT32;
  tensor.ndim = Rank;
  std::copy_n(view.shape.begin(), Rank, tensor.shape);
  std::copy_n(view.strides.begin(), Rank, tensor.strides);
  return tensor;
}

// Any struct with block_table, block_size, num_blocks and block_stride_rows.
template <typename Params>
Status ReadBlockTable(const Params& in, BlockTable& table) {
  SPARSEMLA_RETURN_IF_ERROR(ReadTensor("block_table", in.block_table, table.blocks));
  table.block_size = in.block_size;
  table.num_blocks = in.num_blocks;
  table.block_stride_rows = in.block_stride_rows;
  return {};
}

MlaDims ToDims(const sparsemla_dims& dims);
Status ReadCapacity(const sparsemla_plan_capacity* given, PlanCapacity& capacity);
Status ReadPlanParams(const sparsemla_plan_params* given, PlanParams& params);
// Null sinks are none.
Status ReadSinks(const float* sinks, int64_t num_heads, std::span<const float>& out);
Status ReadAttention(std::string_view name, const sparsemla_attention_params* given,
                     const Plan& plan, AttentionParams& params);
Status ReadPartials(const sparsemla_partials* given, Partials& partials);

sparsemla_plan_info PlanInfo(const Plan& plan);
sparsemla_schedule ScheduleInfo(const Plan& plan);

}  // namespace sparsemla::capi
