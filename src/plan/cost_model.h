// What an item costs, and how finely a row may be cut: shared by the balanced schedule and by
// ComputePlanCosts. The unit is one block of 16 keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/schedule.h"

namespace sparsemla::plan {

// Reading the query, writing a partial and reading it again in the merge: about the memory traffic
// of 4 blocks of 16 keys with 16 heads (a float partial of 16 x 512 is 32 KiB, written and read; a
// block of bf16 keys is 18 KiB).
inline constexpr int32_t kItemOverhead = 4;
// An empty row is only written: zeros and an lse.
inline constexpr int32_t kEmptyRowCost = 1;
// No piece of a cut row is shorter (128 keys): below, the overhead outweighs the gain.
inline constexpr int32_t kMinPieceBlocks = 8;
// Batch-invariant mode: a row is cut into pieces of about so many keys.
inline constexpr int32_t kInvariantPieceKeys = 512;

constexpr int32_t CeilDiv(int32_t a, int32_t b) {
  return (a + b - 1) / b;
}
constexpr int32_t Blocks(int32_t num_keys) {
  return CeilDiv(num_keys, kKeysPerBlock);
}
constexpr int32_t ItemCost(int32_t num_blocks) {
  return num_blocks == 0 ? kEmptyRowCost : num_blocks + kItemOverhead;
}

// Most pieces that a row of `num_blocks` may be cut into; a negative `max_splits` is no limit.
constexpr int32_t MaxPieces(int32_t num_blocks, int32_t max_splits, int32_t num_compute_units) {
  const int32_t cap = max_splits < 0 ? num_compute_units : std::min(max_splits, num_compute_units);
  return std::clamp(num_blocks / kMinPieceBlocks, 1, cap);
}

// The number of pieces of a row in batch-invariant mode: of its own length and the cap only.
constexpr int32_t InvariantPieces(int32_t num_keys, int32_t max_splits) {
  const int32_t pieces = std::max(1, CeilDiv(num_keys, kInvariantPieceKeys));
  return max_splits < 0 ? pieces : std::min(pieces, max_splits);
}

// First block of piece `piece` of `num_pieces` nearly equal ones.
constexpr int32_t PieceBegin(int32_t num_blocks, int32_t num_pieces, int32_t piece) {
  return static_cast<int32_t>(int64_t{num_blocks} * piece / num_pieces);
}

}  // namespace sparsemla::plan
