// A plan as a drawing: one lane a worker, one box a work item, a colour a row, and which partials
// make which row.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "sparsemla/plan.h"

namespace sparsemla::tools {

// The work items of one compute unit.
inline std::span<const WorkItem> WorkOf(const Schedule& schedule, int32_t unit) {
  const auto u = static_cast<size_t>(unit);
  const auto begin = static_cast<size_t>(schedule.work_indptr[u]);
  return schedule.work_items.subspan(begin,
                                     static_cast<size_t>(schedule.work_indptr[u + 1]) - begin);
}

// Length of a work item on the drawings: started blocks of 16 keys, at least one.
inline int64_t Blocks(const WorkItem& item) {
  const int64_t keys = int64_t{item.kv_end} - item.kv_begin;
  return keys <= 16 ? 1 : (keys + 15) / 16;
}

// "3", or "3#1" where rows are folded: virtual row 1 of row 3.
std::string RowText(const Schedule& schedule, int32_t virtual_row);
// "row 3 keys 128..256 of 2048", or "row 3 (17 keys)" for a whole row.
std::string ItemText(const Plan& plan, const WorkItem& item);

// A self-contained SVG document.
std::string PlanSvg(const Plan& plan);

}  // namespace sparsemla::tools
