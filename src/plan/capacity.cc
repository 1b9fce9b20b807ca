// The limits of a plan: their bounds, and the sizes of everything that is allocated for them.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "core/require.h"
#include "plan/cost_model.h"
#include "plan/schedule.h"

namespace sparsemla {

int32_t DefaultMaxSplits(int32_t max_seq_len, int32_t topk_tokens, int32_t num_compute_units) {
  const uint32_t pieces =
      static_cast<uint32_t>(std::max(1, std::min(max_seq_len, topk_tokens) / 128));
  return static_cast<int32_t>(
      std::min(std::bit_ceil(pieces), static_cast<uint32_t>(std::max(1, num_compute_units))));
}

namespace plan {
namespace {

constexpr int32_t kMaxComputeUnits = 65536;
constexpr int32_t kMaxRows = 1 << 20;       // tokens or requests of a step
constexpr int32_t kInvariantMaxSplits = 4;  // where no cap is given

// Calls `visit(fold, heads)` for every folding that a step within the capacity may have.
template <typename Visit>
void ForEachFold(const PlanCapacity& capacity, Visit&& visit) {
  if (capacity.schedule != ScheduleKind::kAiter) return visit(1, capacity.dims.num_heads);
  for (int32_t heads = 1; heads <= capacity.dims.num_heads; ++heads) {
    for (const DType q : {DType::kBFloat16, DType::kFloat8E4M3}) {
      for (const CacheFormat cache : {CacheFormat::kBFloat16, CacheFormat::kFp8E4M3}) {
        const int32_t fold = AiterFold(capacity.aiter_target, heads, q, cache);
        if (fold > 0) visit(fold, heads);
      }
    }
  }
}

// Pieces of a row at most, in a plan with force_splits.
int64_t ForcedPieceBound(const PlanCapacity& capacity) {
  return std::min(capacity.force_splits, capacity.topk_tokens);
}

int64_t InvariantPieceBound(const PlanCapacity& capacity) {
  return InvariantPieces(capacity.topk_tokens, MaxSplitsOf(capacity));
}

// Every worker leaves at most one row unfinished, so w workers make at most w - 1 cuts, and a cut
// row has one piece more than cuts.
int64_t PartialRowBound(const PlanCapacity& capacity, int32_t fold) {
  if (capacity.force_splits > 0) {
    const int64_t pieces = ForcedPieceBound(capacity);
    return pieces == 1 ? 0 : capacity.max_num_tokens * pieces;
  }
  if (capacity.batch_invariant) {
    const int64_t pieces = InvariantPieceBound(capacity);
    return pieces == 1 ? 0 : capacity.max_num_tokens * pieces;
  }
  const int64_t rows = int64_t{capacity.max_num_tokens} * fold;
  const int64_t max_splits = MaxSplitsOf(capacity);
  int64_t workers = capacity.num_compute_units;
  if (capacity.schedule == ScheduleKind::kAiter) {
    if (max_splits >= 0) workers = std::min(workers, max_splits * rows);
    return std::min(2 * (workers - 1), rows + workers - 1);
  }
  if (max_splits == 1) return 0;
  const int64_t bound = std::min(2 * (workers - 1), rows + workers - 1);
  return max_splits < 0 ? bound : std::min(bound, max_splits * rows);
}

}  // namespace

Status CheckCapacity(const PlanCapacity& capacity) {
  const auto check = [](const char* name, int64_t value, int64_t low, int64_t high) {
    return value >= low && value <= high
               ? Status()
               : Status(StatusCode::kInvalidArgument,
                        StrCat(name, " = ", value, " is not in ", low, "..", high));
  };
  SPARSEMLA_REQUIRE(
      capacity.schedule == ScheduleKind::kBalanced || capacity.schedule == ScheduleKind::kAiter,
      "schedule = ", static_cast<int32_t>(capacity.schedule), " is unknown");
  SPARSEMLA_REQUIRE(capacity.aiter_target == AiterTarget::kGfx942 ||
                        capacity.aiter_target == AiterTarget::kGfx950,
                    "aiter_target = ", static_cast<int32_t>(capacity.aiter_target), " is unknown");
  SPARSEMLA_RETURN_IF_ERROR(
      check("num_compute_units", capacity.num_compute_units, 1, kMaxComputeUnits));
  SPARSEMLA_RETURN_IF_ERROR(check("max_num_tokens", capacity.max_num_tokens, 1, kMaxRows));
  SPARSEMLA_RETURN_IF_ERROR(check("max_num_reqs", capacity.max_num_reqs, 1, kMaxRows));
  SPARSEMLA_RETURN_IF_ERROR(
      check("topk_tokens", capacity.topk_tokens, 1, std::numeric_limits<int32_t>::max()));
  SPARSEMLA_RETURN_IF_ERROR(check("num_heads", capacity.dims.num_heads, 1, kMaxNumHeads));
  SPARSEMLA_RETURN_IF_ERROR(check("kv_lora_rank", capacity.dims.kv_lora_rank, 1, kMaxHeadDim));
  SPARSEMLA_RETURN_IF_ERROR(
      check("qk_rope_head_dim", capacity.dims.qk_rope_head_dim, 0, kMaxHeadDim));
  SPARSEMLA_RETURN_IF_ERROR(check("max_splits", capacity.max_splits, -1, kMaxComputeUnits));
  SPARSEMLA_RETURN_IF_ERROR(check("force_splits", capacity.force_splits, 0, kMaxComputeUnits));
  SPARSEMLA_REQUIRE(capacity.force_splits == 0 || capacity.schedule == ScheduleKind::kBalanced,
                    "force_splits is a mode of the balanced schedule, not of aiter");
  const int64_t num_kv_indices = int64_t{capacity.max_num_tokens} * capacity.topk_tokens;
  SPARSEMLA_REQUIRE(num_kv_indices <= std::numeric_limits<int32_t>::max(),
                    "max_num_tokens = ", capacity.max_num_tokens,
                    " times topk_tokens = ", capacity.topk_tokens, " is ", num_kv_indices,
                    ", above the 2147483647 that kv_indptr can hold");
  SPARSEMLA_REQUIRE(!capacity.batch_invariant || capacity.schedule == ScheduleKind::kBalanced,
                    "batch_invariant is a mode of the balanced schedule, not of aiter");
  return Status();
}

int32_t MaxSplitsOf(const PlanCapacity& capacity) {
  if (capacity.max_splits != 0) return capacity.max_splits;
  if (capacity.batch_invariant) return kInvariantMaxSplits;
  return DefaultMaxSplits(capacity.topk_tokens, capacity.topk_tokens, capacity.num_compute_units);
}

int64_t MaxVirtualRows(const PlanCapacity& capacity) {
  int64_t max_fold = 1;
  ForEachFold(capacity,
              [&](int32_t fold, int32_t) { max_fold = std::max<int64_t>(max_fold, fold); });
  return capacity.max_num_tokens * max_fold;
}

int64_t MaxWorkItems(const PlanCapacity& capacity) {
  if (capacity.force_splits > 0) return capacity.max_num_tokens * ForcedPieceBound(capacity);
  if (capacity.batch_invariant) return capacity.max_num_tokens * InvariantPieceBound(capacity);
  return MaxVirtualRows(capacity) + capacity.num_compute_units - 1;
}

int64_t MaxPartialHeads(const PlanCapacity& capacity) {
  int64_t bound = 0;
  ForEachFold(capacity, [&](int32_t fold, int32_t heads) {
    bound = std::max(bound, PartialRowBound(capacity, fold) * (heads / fold));
  });
  return bound;
}

int64_t MaxPartialRows(const PlanCapacity& capacity) {
  int64_t bound = 0;
  ForEachFold(capacity, [&](int32_t fold, int32_t) {
    bound = std::max(bound, PartialRowBound(capacity, fold));
  });
  return bound;
}

}  // namespace plan
}  // namespace sparsemla
