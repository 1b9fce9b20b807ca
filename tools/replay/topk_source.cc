#include "tools/replay/topk_source.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace sparsemla::replay {
namespace {

constexpr int64_t kMeasureEvery = 8;  // rows
constexpr double kHeavyChange = 0.1;  // chance that a query changes one heavy hitter
constexpr int kPickAttempts = 3;      // before the next free unit is taken

}  // namespace

Selection::Selection(int32_t num_units, double overlap, uint64_t seed)
    : overlap_(overlap),
      random_(seed),
      units_(static_cast<size_t>(num_units), -1),
      num_first_(std::min(4, num_units / 8)),
      num_newest_(std::min(64, num_units / 4)),
      num_heavy_(num_units / 8) {}

// Replaces what stands at `place`.
void Selection::Put(size_t place, int32_t unit) {
  const int32_t old = units_[place];
  if (old >= 0) member_[static_cast<size_t>(old) / 64] &= ~(uint64_t{1} << (old % 64));
  member_[static_cast<size_t>(unit) / 64] |= uint64_t{1} << (unit % 64);
  units_[place] = unit;
}

// A unit below count_ that is not selected: half uniform, half with a preference for recent ones.
// At least one such unit exists.
int32_t Selection::PickFree() {
  int32_t unit = 0;
  for (int attempt = 0; attempt < kPickAttempts; ++attempt) {
    const uint64_t bits = random_.Next();
    double x = static_cast<double>(bits >> 33) * 0x1p-31;
    if ((bits & 1u) != 0) x = 1.0 - x * x * x;
    unit = std::min(static_cast<int32_t>(x * count_), count_ - 1);
    if (!IsMember(unit)) return unit;
  }
  while (IsMember(unit)) {
    const auto word = static_cast<size_t>(unit) / 64;
    const uint64_t later_free = ~member_[word] & (~uint64_t{0} << (unit % 64));
    unit = static_cast<int32_t>(word) * 64 + std::countr_zero(later_free);
    if (unit >= count_) unit = 0;
  }
  return unit;
}

void Selection::Initialise(int32_t count) {
  count_ = count;
  member_.assign(static_cast<size_t>(count) / 64 + 1, 0);
  const auto first = static_cast<size_t>(num_first_);
  const auto newest = static_cast<size_t>(num_newest_);
  for (size_t i = 0; i < first; ++i) Put(i, static_cast<int32_t>(i));
  for (int32_t unit = count - num_newest_; unit < count; ++unit) {
    Put(first + static_cast<size_t>(unit % num_newest_), unit);
  }
  for (size_t i = first + newest; i < units_.size(); ++i) Put(i, PickFree());
}

// Drops units that are no longer visible and takes in the newest ones.
void Selection::FollowCount(int32_t count) {
  const int32_t old_count = count_;
  count_ = count;
  member_.resize(static_cast<size_t>(count) / 64 + 1, 0);
  if (count < old_count) {
    for (int32_t& unit : units_) {
      if (unit < count) continue;
      const auto word = static_cast<size_t>(unit) / 64;
      if (word < member_.size()) member_[word] &= ~(uint64_t{1} << (unit % 64));
      unit = -1;
    }
    for (size_t i = 0; i < units_.size(); ++i) {
      if (units_[i] < 0) Put(i, PickFree());
    }
  }
  for (int32_t unit = std::max(old_count, count - num_newest_); unit < count; ++unit) {
    if (!IsMember(unit)) Put(static_cast<size_t>(num_first_ + unit % num_newest_), unit);
  }
}

// Replaces so many of the changing places that the wanted overlap is left, each place as likely.
void Selection::Churn() {
  const auto num_units = static_cast<double>(units_.size());
  const auto begin = static_cast<size_t>(num_first_ + num_newest_);
  const size_t heavy_end = begin + static_cast<size_t>(num_heavy_);
  const double places = num_units - static_cast<double>(heavy_end);
  const double free_units = static_cast<double>(count_) - num_units;
  if (free_units < 1) return;
  if (num_heavy_ > 0 && random_.Unit() < kHeavyChange) {
    Put(begin + static_cast<size_t>(random_.Below(num_heavy_)), PickFree());
  }
  // One replacement is the newest unit's.
  const double wanted = std::min((1.0 - overlap_) * num_units - 1.0, free_units);
  if (wanted <= 0) return;
  const double stride = std::max(places / wanted, 1.0);
  const double spread = 2.0 * (stride - 1.0);
  for (double at = random_.Unit() * stride; at < places; at += 1.0 + spread * random_.Unit()) {
    Put(heavy_end + static_cast<size_t>(at), PickFree());
  }
}

void Selection::Advance(int32_t count) {
  previous_member_ = member_;
  if (count_ == 0) return Initialise(count);
  FollowCount(count);
  Churn();
}

double Selection::MeasuredOverlap() const {
  if (previous_member_.empty()) return -1.0;
  int64_t shared = 0;
  for (size_t w = 0; w < std::min(member_.size(), previous_member_.size()); ++w) {
    shared += std::popcount(member_[w] & previous_member_[w]);
  }
  return static_cast<double>(shared) / static_cast<double>(units_.size());
}

void TopkSource::WriteRow(int32_t request, int32_t position, std::span<int32_t> row) {
  const int32_t num_visible = position + 1;
  if (num_visible <= options_.topk_tokens) {
    const auto visible = static_cast<size_t>(num_visible);
    std::iota(row.begin(), row.begin() + num_visible, 0);
    std::fill(row.begin() + static_cast<std::ptrdiff_t>(visible), row.end(), -1);
    return;
  }
  const int32_t kpool = options_.kpool;
  auto [found, is_new] = selections_.try_emplace(
      request, options_.topk_tokens / kpool, options_.overlap,
      Mix(options_.seed, static_cast<uint64_t>(request), static_cast<uint64_t>(position)));
  Selection& selection = found->second;
  selection.Advance(num_visible / kpool);
  if (!is_new && num_rows_++ % kMeasureEvery == 0) {
    overlap_sum_ += selection.MeasuredOverlap();
    ++overlap_count_;
  }
  auto column = row.begin();
  for (const int32_t unit : selection.units()) {
    for (int32_t i = 0; i < kpool; ++i) *column++ = unit * kpool + i;
  }
  // The tokens of the incomplete pool always belong to the selection.
  for (int32_t p = num_visible / kpool * kpool; p < num_visible; ++p) *column++ = p;
  std::fill(column, row.end(), -1);
}

void TopkSource::Retain(std::span<const int32_t> requests) {
  std::erase_if(selections_, [&](const auto& entry) {
    return std::find(requests.begin(), requests.end(), entry.first) == requests.end();
  });
}

double TopkSource::mean_overlap() const {
  return overlap_count_ == 0 ? 0.0 : overlap_sum_ / static_cast<double>(overlap_count_);
}

}  // namespace sparsemla::replay
