// Scratch of the AMX kernel (attention_amx.cc): what each array is, and where it is meant to live.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/workspace.h"
#include "sparsemla/types.h"

namespace sparsemla::cpu {

struct AmxScratch {
  // Keys per block: outputs are brought up to date once a block, and a panel of the block's values
  // stays in L1. Items of one tile of heads take half as many with panels twice as wide.
  static constexpr int kBlockKeys = 512;
  static constexpr int kChunkKeys = 32;  // keys per pass over the query: two tiles of rows
  static constexpr int kChunks = kBlockKeys / kChunkKeys;
  static constexpr int kPanelBytes = 64 * kBlockKeys;

  int64_t width = 0;         // columns of a staged row: head_dim_qk, padded to 64
  int64_t head_tiles = 0;    // tiles of 16 heads: 1, or even
  int64_t item_tiles = 0;    // of which so many are one item's: all, or 1 in a group
  int64_t value_groups = 0;  // groups of 32 value columns, an even number

  const std::byte** rows = nullptr;    // [2, kBlockKeys] cache rows of this block and the next
  const std::byte** values = nullptr;  // [kBlockKeys] bf16 rows of this block
  uint16_t* zeros = nullptr;           // [width] the row that fills up a chunk
  uint16_t* ring = nullptr;            // [kChunkKeys, width] bf16 rows of one chunk; L1
  uint16_t* block = nullptr;           // [kBlockKeys, width] converted rows of other formats; L2
  float* logits = nullptr;             // [kChunkKeys, 32 heads]; L1
  uint32_t* pairs = nullptr;           // [2, 16 pairs of keys, 16 heads] weights; L1
  std::byte* panel = nullptr;          // [kPanelBytes] value columns, paired by key; L1
  uint16_t* queries = nullptr;         // [head_tiles, width / 32, 16, 32] pairs of columns; L2
  uint16_t* weights = nullptr;         // [head_tiles, kChunks, 16 heads, 32 keys]; L2
  float* out = nullptr;                // [head_tiles, 2 * value_groups, 16 heads, 16 columns]; L2
  float* reference = nullptr;          // [16 * head_tiles] what weights are relative to, log2
  float* sum = nullptr;                // [16 * head_tiles] of the weights: the lse
  float* rounded_sum = nullptr;        // [16 * head_tiles] of the weights cut to bf16: the divisor

  // For one item of dims.num_heads heads, or a group of several.
  static AmxScratch Carve(Arena& arena, const MlaDims& dims, int num_items);
  static AmxScratch At(std::byte* memory, const MlaDims& dims, int num_items);
};

}  // namespace sparsemla::cpu
