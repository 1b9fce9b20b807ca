// Judges a finished plan by the cost model; for reports, tests and the tool.
#include <algorithm>

#include "plan/cost_model.h"
#include "sparsemla/plan.h"

namespace sparsemla {
namespace {

using plan::Blocks;
using plan::CeilDiv;
using plan::InvariantPieces;
using plan::ItemCost;
using plan::kItemOverhead;
using plan::MaxPieces;

// Cost of a row of `blocks` when no piece may cost more than `payload`.
int64_t CutCost(int32_t blocks, int64_t payload) {
  const int64_t fit = payload - kItemOverhead;
  if (blocks == 0 || blocks <= fit) return ItemCost(blocks);
  return blocks + (blocks + fit - 1) / fit * kItemOverhead;
}

}  // namespace

PlanCosts ComputePlanCosts(const Plan& plan) {
  const Schedule& schedule = plan.schedule();
  const PlanCapacity& capacity = plan.capacity();
  const int32_t workers = capacity.num_compute_units;
  const int64_t fold = schedule.fold;
  PlanCosts costs;
  costs.worker_cost.resize(static_cast<size_t>(workers));
  if (!plan.built()) return costs;
  for (size_t w = 0; w < costs.worker_cost.size(); ++w) {
    for (int32_t i = schedule.work_indptr[w]; i < schedule.work_indptr[w + 1]; ++i) {
      const WorkItem& item = schedule.work_items[static_cast<size_t>(i)];
      costs.worker_cost[w] += ItemCost(Blocks(item.kv_end - item.kv_begin));
    }
    costs.total += costs.worker_cost[w];
    costs.max = std::max(costs.max, costs.worker_cost[w]);
  }

  const std::span<const int32_t> kv_indptr = plan.kv_indptr();
  int64_t fixed_total = 0;  // batch-invariant: of the pieces that the lengths prescribe
  for (size_t row = 0; row + 1 < kv_indptr.size(); ++row) {
    const int32_t keys = kv_indptr[row + 1] - kv_indptr[row];
    const int32_t blocks = Blocks(keys);
    // AITER's cap limits workers, not pieces, and its pieces go down to one block.
    const int32_t pieces = capacity.batch_invariant ? InvariantPieces(keys, plan.max_splits())
                           : capacity.schedule == ScheduleKind::kAiter
                               ? std::clamp(blocks, 1, workers)
                               : MaxPieces(blocks, plan.max_splits(), workers);
    costs.unsplit_total += fold * ItemCost(blocks);
    fixed_total += ItemCost(blocks) + (pieces - 1) * kItemOverhead;
    costs.longest_unsplittable =
        std::max<int64_t>(costs.longest_unsplittable, ItemCost(CeilDiv(blocks, pieces)));
  }

  // A payload can do only if all rows, cut as far as it demands, fit into all workers.
  const auto can_do = [&](int64_t payload) {
    if (capacity.batch_invariant) return fixed_total <= payload * workers;
    int64_t total = 0;
    for (size_t row = 0; row + 1 < kv_indptr.size(); ++row) {
      total += fold * CutCost(Blocks(kv_indptr[row + 1] - kv_indptr[row]), payload);
    }
    return total <= payload * workers;
  };
  int64_t low = std::max(costs.longest_unsplittable, (costs.unsplit_total + workers - 1) / workers);
  int64_t high = low;
  while (!can_do(high)) high *= 2;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (can_do(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  costs.lower_bound = low;
  return costs;
}

}  // namespace sparsemla
