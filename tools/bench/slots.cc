#include "tools/bench/slots.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sparsemla::bench {
namespace {

constexpr int32_t kL2Slots = 256;
constexpr int32_t kL3Slots = 8192;

}  // namespace

std::string_view ResidencyName(Residency residency) {
  constexpr std::string_view kNames[] = {"l2", "l3", "dram", "context"};
  return kNames[static_cast<size_t>(residency)];
}

int64_t SlotSource::NumSlots(const Workload& workload, const SlotOptions& options) {
  switch (options.residency) {
    case Residency::kL2:
      return kL2Slots;
    case Residency::kL3:
      return kL3Slots;
    case Residency::kDram:
      return options.pool_slots;
    case Residency::kContext:
      break;
  }
  int64_t slots = 0;
  for (const int32_t seq_len : workload.seq_lens) {
    slots += (seq_len + kBlockSize - 1) / kBlockSize * kBlockSize;
  }
  return slots;
}

SlotSource::SlotSource(const Workload& workload, std::span<const int32_t> kv_indptr,
                       const SlotOptions& options)
    : options_(options), random_(options.seed) {
  const bool own_context = options.residency == Residency::kContext;
  const auto num_slots = static_cast<int32_t>(NumSlots(workload, options));
  int32_t first_block = 0;
  for (size_t req = 0; req < workload.seq_lens.size(); ++req) {
    const int32_t begin = workload.query_start_loc[req];
    const int32_t end = workload.query_start_loc[req + 1];
    for (int32_t t = begin; t < end; ++t) {
      const auto token = static_cast<size_t>(t);
      rows_.push_back(
          {.num_keys = kv_indptr[token + 1] - kv_indptr[token],
           .num_visible = own_context ? workload.seq_lens[req] - (end - 1 - t) : num_slots,
           .first_block = first_block,
           .follows_row = t > begin});
    }
    first_block += (workload.seq_lens[req] + kBlockSize - 1) / kBlockSize;
  }
  if (!own_context) return;
  blocks_.resize(static_cast<size_t>(first_block));
  std::iota(blocks_.begin(), blocks_.end(), 0);
  for (size_t i = blocks_.size(); i > 1; --i) {
    std::swap(blocks_[i - 1], blocks_[static_cast<size_t>(random_.Below(static_cast<int32_t>(i)))]);
  }
  const auto longest = std::max_element(workload.seq_lens.begin(), workload.seq_lens.end());
  drawn_in_.resize(static_cast<size_t>(*longest));
}

int32_t SlotSource::SlotOf(const Row& row, int32_t position) const {
  if (blocks_.empty()) return position;
  const auto block = static_cast<size_t>(row.first_block + position / kBlockSize);
  return blocks_[block] * kBlockSize + position % kBlockSize;
}

void SlotSource::DrawPositions(const Row& row) {
  std::swap(positions_, previous_);
  positions_.resize(static_cast<size_t>(row.num_keys));
  const bool distinct = !drawn_in_.empty();
  if (distinct && row.num_keys == row.num_visible) {
    std::iota(positions_.begin(), positions_.end(), 0);
    return;
  }
  if (++num_drawn_rows_ == 0) {  // the counter has wrapped: forget the rows that share its values
    std::fill(drawn_in_.begin(), drawn_in_.end(), 0);
    num_drawn_rows_ = 1;
  }
  size_t kept = 0;
  if (options_.overlap && row.follows_row && !previous_.empty()) {
    const size_t most = std::min(previous_.size(), positions_.size());
    kept = static_cast<size_t>(std::lround(*options_.overlap * static_cast<double>(most)));
    // Selections are in random order, so any run of one is a random part of it.
    auto from = static_cast<size_t>(random_.Below(static_cast<int32_t>(previous_.size())));
    for (size_t i = 0; i < kept; ++i, ++from) {
      positions_[i] = previous_[from < previous_.size() ? from : from - previous_.size()];
      if (distinct) drawn_in_[static_cast<size_t>(positions_[i])] = num_drawn_rows_;
    }
  }
  for (size_t i = kept; i < positions_.size();) {
    const int32_t position = random_.Below(row.num_visible);
    if (distinct) {
      uint32_t& drawn_in = drawn_in_[static_cast<size_t>(position)];
      if (drawn_in == num_drawn_rows_) continue;
      drawn_in = num_drawn_rows_;
    }
    positions_[i++] = position;
  }
}

void SlotSource::Next(std::span<int32_t> kv_indices) {
  size_t next = 0;
  for (const Row& row : rows_) {
    DrawPositions(row);
    for (const int32_t position : positions_) kv_indices[next++] = SlotOf(row, position);
  }
}

}  // namespace sparsemla::bench
