// Attention kernels of the CPU back end: what one computes, what it is given, and which one runs.
// cpu_backend.cc calls them; each kernels.inc row is defined in the file of its name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/workspace.h"
#include "sparsemla/attention.h"
#include "sparsemla/status.h"

namespace sparsemla::cpu {

// Instruction sets, as bits.
using ArchFlags = uint32_t;
inline constexpr ArchFlags kAnyCpu = 0;
inline constexpr ArchFlags kAvx2 = 1u << 0;    // AVX2 and FMA
inline constexpr ArchFlags kAvx512 = 1u << 1;  // AVX-512 F, BW, DQ, VL, and all of kAvx2

// What this processor and its operating system offer.
ArchFlags DetectArch();
// "avx2 avx512f", or "baseline".
std::string ArchNames(ArchFlags arch);

// One part of the query: its latent or its rope columns.
struct QueryPart {
  const std::byte* data = nullptr;
  int64_t row_stride_bytes = 0;
  int64_t head_stride_bytes = 0;
  DType dtype = DType::kFloat32;
};

// One call of Attention, resolved to plain data: kernels instantiate no std templates.
struct AttentionCall {
  MlaDims dims = {};
  QueryPart latent = {};
  QueryPart rope = {};
  const std::byte* cache = nullptr;
  CacheFormat cache_format = CacheFormat::kBFloat16;
  int64_t num_slots = 0;
  int64_t cache_row_bytes = 0;         // what a row holds
  int64_t cache_row_stride_bytes = 0;  // distance of two rows
  float scale_log2 = 0.0f;             // logit * log2(e) = scale_log2 * (q . k), q as loaded
  float value_scale = 1.0f;            // multiplies the values
  float quantise_scale = 0.0f;         // multiplies the query before it is quantised; 0: it is not
  const float* sinks = nullptr;        // [num_heads] or null
  void* out = nullptr;
  DType out_dtype = DType::kFloat32;
  int64_t out_strides[2] = {};  // row, head; in elements, columns are adjacent
  float* lse = nullptr;         // or null
  int64_t lse_strides[2] = {};
  bool write_empty_rows = true;
};

// One work item: some keys of one row, for some of its heads.
struct AttentionItem {
  int64_t row = 0;
  int64_t head_begin = 0;
  int64_t num_heads = 0;
  const int32_t* slots = nullptr;  // [num_slots]
  int64_t num_slots = 0;
  float* partial_out = nullptr;  // [num_heads, kv_lora_rank], or null: write the row's output
  float* partial_lse = nullptr;  // [num_heads]
};

// Memory of one thread. Strides are in floats and multiples of a cache line, so that vectors of any
// instruction set may run over the last head or column.
struct AttentionScratch {
  // Keys widened at a time. 48: a multiple of every kernel's tile, and the panel of the block that
  // one group of output columns needs stays in L1 beside the weights of 128 heads.
  static constexpr int32_t kKeyBlock = 48;
  // Columns that lie together. A constant distance of two keys spares the logits' tile, which reads
  // up to 24 keys at once, an address register for each.
  static constexpr int32_t kPanelColumns = 64;
  static constexpr int64_t kPanelFloats = int64_t{kKeyBlock} * kPanelColumns;

  int64_t head_stride = 0;   // num_heads, padded
  int64_t value_stride = 0;  // kv_lora_rank, padded

  const std::byte** rows = nullptr;  // [2, kKeyBlock] cache rows of this block and the next
  float* keys = nullptr;             // [panels of head_dim_qk, kKeyBlock, kPanelColumns]
  float* queries = nullptr;          // [head_dim_qk, head_stride]
  float* scores = nullptr;           // [kKeyBlock, head_stride] logits, then weights
  float* out = nullptr;              // [num_heads, value_stride] not yet normalised
  float* max_log2 = nullptr;         // [head_stride] running maximum
  float* sum = nullptr;              // [head_stride] sum of the weights
  float* rescale = nullptr;          // [head_stride] what the maximum's rise makes of older weights

  static AttentionScratch Carve(Arena& arena, const MlaDims& dims);
};

// Computes one item: writes its row of `out` and `lse` (sinks applied), or its partials. Slots
// outside the cache are skipped and touch no memory. Allocates nothing.
using AttentionFunction = void (*)(const AttentionCall& call, const AttentionItem& item,
                                   const AttentionScratch& scratch);

#define SPARSEMLA_ATTENTION_KERNEL(name, arch) \
  void name(const AttentionCall& call, const AttentionItem& item, const AttentionScratch& scratch);
#include "cpu/kernels.inc"
#undef SPARSEMLA_ATTENTION_KERNEL

struct AttentionKernel {
  std::string_view name;
  ArchFlags arch = kAnyCpu;
  AttentionFunction run = nullptr;
};

// All rows of kernels.inc, best first.
std::span<const AttentionKernel> AttentionKernels();

// "needs avx512f; this CPU has avx2", or empty.
std::string UnavailableReason(const AttentionKernel& kernel, ArchFlags arch);

// The kernel of that name, or the best one if the name is empty. kInvalidArgument: there is no such
// kernel; kUnsupported: it needs more than `arch`.
Result<const AttentionKernel*> SelectKernel(std::string_view name, ArchFlags arch);

}  // namespace sparsemla::cpu
