#include "cpu/row_groups.h"

#include <algorithm>
#include <bit>

namespace sparsemla::cpu {
namespace {

constexpr uint16_t kFree = 0xFFFF;
static_assert(UnionScratch::kMaxSlots < kFree);

// A group of so many items pays up to a union of so many of their average lists. attention_amx_bf16
// takes 1.65 times as long for a slot with four tiles of heads as with one, so that four items
// break even at 2.4 lists; the margin is for finding the union, and for those that share little.
constexpr double kLargestUnion[AttentionGroup::kMaxItems + 1] = {0.0, 0.0, 1.5, 1.6, 2.0};

// Grows by one item's slots at a time. 3 us per token where lists of 2048 agree, 7 where a quarter
// of each is its own.
class SlotUnion {
 public:
  SlotUnion(std::span<const AttentionItem> items, int64_t num_slots, const UnionScratch& scratch)
      : items_(items), num_slots_(num_slots), scratch_(scratch) {
    // A quarter full at most: 1.6 times as fast as half full. No larger than it has to be, for L1.
    const int32_t most = std::max({1, Limit(2), Limit(static_cast<int>(items.size()))});
    const uint32_t entries = std::bit_ceil(4 * static_cast<uint32_t>(most));
    shift_ = 32 - std::countr_zero(entries);
    last_entry_ = entries - 1;
    std::fill_n(scratch.table, entries, kFree);
  }

  // Adds items up to `count` in all, and returns whether they should go together: not if one has no
  // valid slot or names one twice, or if there are too many slots. After a false it is spent.
  bool Extend(int count) {
    const int32_t limit = Limit(count);
    for (; num_items_ < count; ++num_items_) {
      if (!Add(items_[static_cast<size_t>(num_items_)], limit)) return false;
    }
    return size_ <= kLargestUnion[count] * static_cast<double>(num_named_) / count;
  }
  int32_t size() const { return size_; }

 private:
  // The most slots that `count` items may have.
  int32_t Limit(int count) const {
    double named = 0.0;
    for (const AttentionItem& item : items_.first(static_cast<size_t>(count))) {
      named += static_cast<double>(item.num_slots);
    }
    return static_cast<int32_t>(
        std::min<double>(kLargestUnion[count] * named / count, UnionScratch::kMaxSlots));
  }

  bool Add(const AttentionItem& item, int32_t limit) {
    // Copies, as a store of a byte may change any member for all the compiler knows.
    const auto [slots, masks, table] = scratch_;
    const int64_t named_before = num_named_;
    const int64_t num_slots = num_slots_;
    const int shift = shift_;
    const uint32_t last_entry = last_entry_;
    const auto bit = static_cast<uint8_t>(1u << num_items_);
    int32_t size = size_;
    for (const int32_t slot : std::span(item.slots, static_cast<size_t>(item.num_slots))) {
      if (slot < 0 || slot >= num_slots) continue;
      ++num_named_;
      uint32_t entry = (static_cast<uint32_t>(slot) * 0x9E3779B1u) >> shift;
      while (table[entry] != kFree && slots[table[entry]] != slot) entry = (entry + 1) & last_entry;
      if (table[entry] == kFree) {
        if (size >= limit) return false;
        table[entry] = static_cast<uint16_t>(size);
        slots[size] = slot;
        masks[size] = bit;
        ++size;
      } else {
        uint8_t& names = masks[table[entry]];
        if ((names & bit) != 0) return false;
        names |= bit;
      }
    }
    size_ = size;
    return num_named_ != named_before;
  }

  const std::span<const AttentionItem> items_;
  const int64_t num_slots_;
  const UnionScratch scratch_;
  int shift_ = 0;
  uint32_t last_entry_ = 0;
  int num_items_ = 0;
  int32_t size_ = 0;
  int64_t num_named_ = 0;
};

// Whether an item is a whole row with keys.
bool IsWholeRow(const WorkItem& item) {
  return item.partial_row < 0 && item.kv_begin < item.kv_end;
}

}  // namespace

UnionScratch UnionScratch::Carve(Arena& arena) {
  UnionScratch scratch;
  scratch.slots = arena.Take<int32_t>(kMaxSlots);
  scratch.masks = arena.Take<uint8_t>(kMaxSlots);
  scratch.table = arena.Take<uint16_t>(kTableSize);
  return scratch;
}

int32_t RunOfItems(const Plan& plan, int32_t first) {
  const auto items = plan.schedule().work_items.subspan(static_cast<size_t>(first));
  const WorkItem& item = items[0];
  if (!IsWholeRow(item)) return 1;
  // Rows with keys are no padding, and requests come in order.
  const int32_t fold = plan.schedule().fold;
  const auto row = static_cast<size_t>(item.row_begin / fold);
  const auto requests = plan.req_id_per_token();
  const auto before = requests.first(row + 1);
  const auto request = std::lower_bound(before.begin(), before.end(), requests[row]);
  const auto request_begin = static_cast<int32_t>(request - before.begin()) * fold;
  const int32_t place = (item.row_begin - request_begin) % AttentionGroup::kMaxItems;
  if (place > 0 && first > 0) {
    const WorkItem& previous = plan.schedule().work_items[static_cast<size_t>(first) - 1];
    if (IsWholeRow(previous) && previous.row_begin == item.row_begin - 1) return 0;
  }
  int32_t count = 1;
  for (; place + count < AttentionGroup::kMaxItems; ++count) {
    if (static_cast<size_t>(count) == items.size()) break;
    const WorkItem& next = items[static_cast<size_t>(count)];
    if (!IsWholeRow(next) || next.row_begin != item.row_begin + count) break;
    if (requests[static_cast<size_t>(next.row_begin / fold)] != requests[row]) break;
  }
  return count;
}

GroupChoice ChooseGroup(std::span<const AttentionItem> items, int64_t num_slots,
                        const UnionScratch& scratch, AttentionGroup& group) {
  const auto count = static_cast<int32_t>(items.size());
  if (count == 1) return {.num_items = 1};
  SlotUnion slots(items, num_slots, scratch);
  // Where two neighbours have little in common, more of them have no more.
  if (!slots.Extend(2)) return {.num_items = 2};
  group = {
      .num_items = 2, .slots = scratch.slots, .masks = scratch.masks, .num_slots = slots.size()};
  // If that fails, the union of the pair is still what it began with; further bits do not count.
  if (count > 2 && slots.Extend(count)) {
    group.num_items = count;
    group.num_slots = slots.size();
  }
  std::copy_n(items.begin(), group.num_items, group.items);
  return {.num_items = group.num_items, .together = true};
}

}  // namespace sparsemla::cpu
