// Scratch of the vector kernels (attention_vector.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/workspace.h"
#include "sparsemla/types.h"

namespace sparsemla::cpu {

// Memory of one thread. Strides are in floats and multiples of a cache line, so that vectors of any
// instruction set may run over the last head or column.
struct VectorScratch {
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

  static VectorScratch Carve(Arena& arena, const MlaDims& dims);
  static VectorScratch At(std::byte* memory, const MlaDims& dims);
};

}  // namespace sparsemla::cpu
