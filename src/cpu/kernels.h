// Attention kernels of the CPU back end: what one computes, what it is given, and which one runs.
// cpu_backend.cc calls them; each kernels.inc row is defined in the file of its name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "sparsemla/attention.h"
#include "sparsemla/backend.h"
#include "sparsemla/status.h"

namespace sparsemla::cpu {

// Instruction sets, as bits.
using ArchFlags = uint32_t;
inline constexpr ArchFlags kAnyCpu = 0;
inline constexpr ArchFlags kAvx2 = 1u << 0;    // AVX2 and FMA
inline constexpr ArchFlags kAvx512 = 1u << 1;  // AVX-512 F, BW, DQ, VL, and all of kAvx2
// AMX tiles of bfloat16, which the system lets this process use, AVX-512 VBMI and all of kAvx512.
inline constexpr ArchFlags kAmxBf16 = 1u << 2;

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

// Computes one item: writes its row of `out` and `lse` (sinks applied), or its partials. Slots
// outside the cache are skipped and touch no memory. `scratch` is aligned to Arena::kAlignment; its
// contents mean nothing. Allocates nothing.
using AttentionFunction = void (*)(const AttentionCall& call, const AttentionItem& item,
                                   std::byte* scratch);

// Whole rows whose keys are attended together: each slot is gathered once for all of them, and
// weighs nothing for the items that do not name it.
struct AttentionGroup {
  static constexpr int kMaxItems = 4;
  static constexpr int32_t kMaxHeads = 16;  // of an item: a tile of them

  AttentionItem items[kMaxItems] = {};  // without partials; those from num_items on are empty
  int num_items = 0;
  const int32_t* slots = nullptr;  // [num_slots] within the cache, none twice
  const uint8_t* masks = nullptr;  // [num_slots] bit i < num_items: item i names the slot
  int64_t num_slots = 0;
};

// Computes the items of a group as an AttentionFunction does one after the other, to rounding.
// Returns false, with nothing written, where a key that is not every item's is not finite: weight 0
// does not keep a NaN out.
using GroupFunction = bool (*)(const AttentionCall& call, const AttentionGroup& group,
                               std::byte* scratch);

// What the kernels of one family share. ScratchBytes: of one thread, for items of up to
// dims.num_heads heads and groups of them. UnsupportedReason: why a well-formed problem is not for
// them, or empty.
struct VectorKernels {
  static int64_t ScratchBytes(const MlaDims& dims);
  static std::string UnsupportedReason(const Problem& problem);
};
struct AmxKernels {
  static int64_t ScratchBytes(const MlaDims& dims);
  static std::string UnsupportedReason(const Problem& problem);
};

#define SPARSEMLA_ATTENTION_KERNEL(name, arch, family, run_group) \
  void name(const AttentionCall& call, const AttentionItem& item, std::byte* scratch);
#include "cpu/kernels.inc"
#undef SPARSEMLA_ATTENTION_KERNEL
bool attention_amx_bf16_group(const AttentionCall& call, const AttentionGroup& group,
                              std::byte* scratch);

struct AttentionKernel {
  std::string_view name;
  ArchFlags arch = kAnyCpu;
  AttentionFunction run = nullptr;
  GroupFunction run_group = nullptr;  // or null: items do not share keys
  int64_t (*scratch_bytes)(const MlaDims& dims) = nullptr;
  std::string (*unsupported_reason)(const Problem& problem) = nullptr;
};

// All rows of kernels.inc, best first.
std::span<const AttentionKernel> AttentionKernels();

// "needs avx512f; this CPU has avx2", or empty.
std::string UnavailableReason(const AttentionKernel& kernel, ArchFlags arch);

// The kernel of that name. kInvalidArgument: there is none; kUnsupported: it needs more than
// `arch`.
Result<const AttentionKernel*> FindKernel(std::string_view name, ArchFlags arch);

// The best kernel that `arch` can run and that takes the problem; the last one takes every
// well-formed problem on every machine.
const AttentionKernel& BestKernel(const Problem& problem, ArchFlags arch);

}  // namespace sparsemla::cpu
