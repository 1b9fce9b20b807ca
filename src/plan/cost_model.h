// What an item costs, and how finely a row may be cut: shared by the balanced schedule and by
// ComputePlanCosts. The unit is one block of 16 keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/schedule.h"

namespace sparsemla::plan {

// What an item costs besides its keys: reading the query, writing a result and, for a piece,
// reading it again in the merge. 1.6 to 3.1 blocks for a whole row, measured with the AVX-512
// kernel on bf16 rows of 16 keys (docs/schedules.md).
inline constexpr int32_t kItemOverhead = 2;
// An empty row is only written: zeros and an lse.
inline constexpr int32_t kEmptyRowCost = 1;
// No piece of a cut row is shorter (64 keys, the tile of most GPU kernels): below, the overhead
// outweighs the gain.
inline constexpr int32_t kMinPieceBlocks = 4;
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

// First block of piece `piece` of `num_pieces` nearly equal ones, the longer ones first.
constexpr int32_t PieceBegin(int32_t num_blocks, int32_t num_pieces, int32_t piece) {
  return piece * (num_blocks / num_pieces) + std::min(piece, num_blocks % num_pieces);
}

}  // namespace sparsemla::plan
