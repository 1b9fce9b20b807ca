// The nouns of the library: element types, cache formats, dimensions, and strided views of memory
// that the caller owns. Everything else includes this file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#pragma GCC visibility push(default)
namespace sparsemla {

// Element types of queries and outputs. The values are part of the C ABI.
enum class DType : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kFloat8E4M3 = 3,      // OCP e4m3fn: largest finite 448, NaN 0x7F and 0xFF
  kFloat8E4M3Fnuz = 4,  // AMD e4m3fnuz: largest finite 240, NaN 0x80, no negative zero
};

// How one row (one token) of the latent cache is stored. The values are part of the C ABI.
enum class CacheFormat : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kFp8E4M3 = 3,      // head_dim_qk codes; value = code * kv_scale
  kFp8E4M3Fnuz = 4,  // the same for AMD caches
  kFp8DsMla = 5,     // 656 bytes: 512 e4m3fn codes, 4 float32 scales (one per 128 codes), then
                     // 64 bfloat16 rope values (zeros when rope-free)
};

inline constexpr int32_t kNumCacheFormats = 6;
inline constexpr int64_t kFp8DsMlaRowBytes = 656;

// The sizes of multi-head latent attention on this rank.
struct MlaDims {
  int32_t num_heads = 0;          // query heads, 1..128
  int32_t kv_lora_rank = 512;     // latent width = width of the value and of the output
  int32_t qk_rope_head_dim = 64;  // rotary width of query and key; 0: rope-free

  constexpr int32_t head_dim_qk() const { return kv_lora_rank + qk_rope_head_dim; }
  friend constexpr bool operator==(const MlaDims&, const MlaDims&) = default;
};

inline constexpr int32_t kMaxNumHeads = 128;
inline constexpr int32_t kMaxHeadDim = 1 << 16;  // of the latent and of the rotary part

// Bytes of one element.
size_t DTypeBytes(DType dtype);
// "bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e4m3fnuz".
std::string_view DTypeName(DType dtype);

// Bytes of one packed cache row.
int64_t CacheRowBytes(CacheFormat format, const MlaDims& dims);
// "bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e4m3fnuz", "fp8_ds_mla".
std::string_view CacheFormatName(CacheFormat format);
// True for the formats that have one kv_scale for the whole cache and whose query is quantised.
constexpr bool IsPerTensorFp8(CacheFormat format) {
  return format == CacheFormat::kFp8E4M3 || format == CacheFormat::kFp8E4M3Fnuz;
}

// A strided array of a type known at compile time. Strides are in elements and may be anything that
// stays inside the caller's memory; the view owns nothing.
template <typename T, int Rank>
struct View {
  T* data = nullptr;
  std::array<int64_t, Rank> shape = {};
  std::array<int64_t, Rank> strides = {};

  static constexpr View Contiguous(T* data, std::array<int64_t, Rank> shape) {
    View view{data, shape, {}};
    int64_t stride = 1;
    for (size_t d = Rank; d-- > 0;) {
      view.strides[d] = stride;
      stride *= shape[d];
    }
    return view;
  }
  template <typename... Index>
  constexpr T& operator()(Index... index) const {
    static_assert(sizeof...(Index) == Rank);
    int64_t offset = 0;
    size_t d = 0;
    ((offset += static_cast<int64_t>(index) * strides[d++]), ...);
    return data[offset];
  }
  constexpr bool empty() const { return data == nullptr; }
};

// A strided array whose element type is known at run time. `Pointer` is `void*` or `const void*`.
// Strides are in elements.
template <typename Pointer, int Rank>
struct BasicTensor {
  Pointer data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<int64_t, Rank> shape = {};
  std::array<int64_t, Rank> strides = {};

  static constexpr BasicTensor Contiguous(Pointer data, DType dtype,
                                          std::array<int64_t, Rank> shape) {
    const auto view = View<const char, Rank>::Contiguous(nullptr, shape);
    return {data, dtype, shape, view.strides};
  }
};
template <int Rank>
using Tensor = BasicTensor<void*, Rank>;
template <int Rank>
using ConstTensor = BasicTensor<const void*, Rank>;

// The paged latent cache of one layer as a flat list of rows: slot s lies at
// data + s * row_stride_bytes. One KV head; the value of a row is its first kv_lora_rank columns.
// Caches whose blocks are not adjacent are addressed by giving ConvertIndices the distance of two
// blocks in rows (block_stride_rows); num_slots then counts rows from `data` to the last block's
// end.
struct KvCache {
  const void* data = nullptr;
  CacheFormat format = CacheFormat::kBFloat16;
  int64_t num_slots = 0;         // rows that may be addressed, at most 2^31 - 1
  int64_t row_stride_bytes = 0;  // 0: packed, CacheRowBytes(format, dims)
};

// Scratch memory lent by the caller, 64-byte aligned. Its contents never matter and are not kept.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// The queue of a device that work is put on; null: the device's default, or the calling thread.
struct Stream {
  void* handle = nullptr;
};

}  // namespace sparsemla
#pragma GCC visibility pop
