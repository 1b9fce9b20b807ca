#include "cpu/amx_scratch.h"

#include <string>

#include "core/require.h"
#include "cpu/kernels.h"

namespace sparsemla::cpu {
namespace {

constexpr int32_t kLeastValueColumns = 32;

}  // namespace

AmxScratch AmxScratch::Carve(Arena& arena, const MlaDims& dims) {
  AmxScratch scratch;
  const int64_t width = (int64_t{dims.head_dim_qk()} + 63) / 64 * 64;
  const int64_t value_groups = (int64_t{dims.kv_lora_rank} + 63) / 64 * 2;
  const int64_t head_tiles = dims.num_heads <= 16 ? 1 : (int64_t{dims.num_heads} + 31) / 32 * 2;
  scratch.width = width;
  scratch.value_groups = value_groups;
  scratch.head_tiles = head_tiles;
  scratch.rows = arena.Take<const std::byte*>(2 * kBlockKeys);
  scratch.values = arena.Take<const std::byte*>(kBlockKeys);
  scratch.zeros = arena.Take<uint16_t>(width);
  scratch.ring = arena.Take<uint16_t>(kChunkKeys * width);
  scratch.block = arena.Take<uint16_t>(kBlockKeys * width);
  scratch.logits = arena.Take<float>(kChunkKeys * 32);
  scratch.pairs = arena.Take<uint32_t>(2 * 16 * 16);
  scratch.panel = arena.Take<std::byte>(kPanelBytes);
  scratch.queries = arena.Take<uint16_t>(head_tiles * width * 16);
  scratch.weights = arena.Take<uint16_t>(head_tiles * kBlockKeys * 16);
  scratch.out = arena.Take<float>(head_tiles * 16 * value_groups * 32);
  scratch.reference = arena.Take<float>(head_tiles * 16);
  scratch.sum = arena.Take<float>(head_tiles * 16);
  scratch.rounded_sum = arena.Take<float>(head_tiles * 16);
  return scratch;
}

AmxScratch AmxScratch::At(std::byte* memory, const MlaDims& dims) {
  Arena arena(Workspace{memory, 0});
  return Carve(arena, dims);
}

int64_t AmxKernels::ScratchBytes(const MlaDims& dims) {
  Arena measure;
  AmxScratch::Carve(measure, dims);
  return static_cast<int64_t>(measure.used());
}

// Products of bfloat16: the cache and the query must be exact in it.
std::string AmxKernels::UnsupportedReason(const Problem& problem) {
  const CacheFormat format = problem.cache_format;
  if (format == CacheFormat::kFloat16 || format == CacheFormat::kFloat32) {
    return StrCat("attention_amx_bf16 multiplies bf16: a cache of ", CacheFormatName(format),
                  " would be rounded");
  }
  if (!IsPerTensorFp8(format) && problem.q_dtype != DType::kBFloat16) {
    return StrCat("attention_amx_bf16 multiplies bf16: a query of ", DTypeName(problem.q_dtype),
                  " would be rounded");
  }
  if (problem.dims.kv_lora_rank < kLeastValueColumns) {
    return StrCat("attention_amx_bf16 rounds weights to bf16, which needs ", kLeastValueColumns,
                  " value columns or more to average out; kv_lora_rank is ",
                  problem.dims.kv_lora_rank);
  }
  return {};
}

}  // namespace sparsemla::cpu
