// Which items are attended together. Neighbouring query tokens of one request select largely the
// same slots, and a matrix unit takes several tokens' heads for little more than the cost of
// gathering a slot. cpu_backend.cc asks here and hands the groups to kernels that take them. What
// is grouped depends on the plan and the slots alone.
#pragma once

#include <cstdint>
#include <span>

#include "core/workspace.h"
#include "cpu/kernels.h"
#include "sparsemla/plan.h"

namespace sparsemla::cpu {

// The union of the slots of some items, in the memory of one thread.
struct UnionScratch {
  static constexpr int32_t kMaxSlots = 8192;  // longer lists are attended alone
  static constexpr int32_t kTableSize = 4 * kMaxSlots;

  int32_t* slots = nullptr;   // [kMaxSlots]
  uint8_t* masks = nullptr;   // [kMaxSlots] bit i: item i names the slot
  uint16_t* table = nullptr;  // [kTableSize] positions in `slots`, by hash

  static UnionScratch Carve(Arena& arena);
};

// The items of the schedule from `first` on that one thread takes at once: neighbouring whole rows
// of one request, which starts a new run every AttentionGroup::kMaxItems virtual rows. 1: the item
// has no such neighbours. 0: it is in a run that starts before it.
int32_t RunOfItems(const Plan& plan, int32_t first);

// What to do with the first items of a run.
struct GroupChoice {
  int32_t num_items = 0;  // so many come next
  bool together = false;  // as the group; otherwise one after the other
};

// Decides about the first of `items`, a run of at most AttentionGroup::kMaxItems whole rows; where
// they go together, `group` holds them and points into `scratch`.
GroupChoice ChooseGroup(std::span<const AttentionItem> items, int64_t num_slots,
                        const UnionScratch& scratch, AttentionGroup& group);

}  // namespace sparsemla::cpu
