#include "cpu/amx_scratch.h"

#include <algorithm>
#include <string>

#include "core/require.h"
#include "cpu/kernels.h"

namespace sparsemla::cpu {
namespace {

constexpr int32_t kLeastValueColumns = 32;

}  // namespace

AmxScratch AmxScratch::Carve(Arena& arena, const MlaDims& dims, int num_items) {
  AmxScratch scratch;
  const int64_t width = (int64_t{dims.head_dim_qk()} + 63) / 64 * 64;
  const int64_t value_groups = (int64_t{dims.kv_lora_rank} + 63) / 64 * 2;
  const int64_t tiles = num_items > 1 ? num_items : (int64_t{dims.num_heads} + 15) / 16;
  const int64_t head_tiles = tiles == 1 ? 1 : (tiles + 1) / 2 * 2;
  scratch.width = width;
  scratch.value_groups = value_groups;
  scratch.head_tiles = head_tiles;
  scratch.item_tiles = num_items > 1 ? 1 : head_tiles;
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

AmxScratch AmxScratch::At(std::byte* memory, const MlaDims& dims, int num_items) {
  Arena arena(Workspace{memory, 0});
  return Carve(arena, dims, num_items);
}

int64_t AmxKernels::ScratchBytes(const MlaDims& dims) {
  Arena item;
  AmxScratch::Carve(item, dims, 1);
  Arena group;
  AmxScratch::Carve(group, dims, AttentionGroup::kMaxItems);
  return static_cast<int64_t>(std::max(item.used(), group.used()));
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
