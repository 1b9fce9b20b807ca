// Stands in for the indexer: which earlier tokens every query selects. What matters to attention is
// kept as in real models: rows are unsorted, neighbouring queries share most of their selection,
// the first tokens, the newest ones and some heavy hitters are always in it, and a row with fewer
// visible tokens than columns ends in -1.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "tools/replay/hash.h"

namespace sparsemla::replay {

struct TopkOptions {
  int32_t topk_tokens = 2048;
  int32_t topk_width = 2048;  // columns of a row
  int32_t kpool = 1;          // tokens selected as one; above 1 rows are history, then tail
  double overlap = 0.70;      // shared part of the selections of neighbouring queries
  uint64_t seed = 0;
};

// The selection of one request, moving on from query to query. A unit is `kpool` tokens.
class Selection {
 public:
  Selection(int32_t num_units, double overlap, uint64_t seed);

  // Selects for a query that sees units [0, count), count >= num_units. Counts may also go back.
  void Advance(int32_t count);
  std::span<const int32_t> units() const { return units_; }
  // Shared part of this and the previous selection; negative if there was none.
  double MeasuredOverlap() const;

 private:
  void Initialise(int32_t count);
  void FollowCount(int32_t count);
  void Churn();
  void Put(size_t place, int32_t unit);
  int32_t PickFree();
  bool IsMember(int32_t unit) const {
    return ((member_[static_cast<size_t>(unit) / 64] >> (unit % 64)) & 1u) != 0;
  }

  double overlap_;
  Random random_;
  std::vector<int32_t> units_;             // places: first, newest, heavy hitters, the rest
  std::vector<uint64_t> member_;           // one bit a unit
  std::vector<uint64_t> previous_member_;  // before the last Advance
  int32_t num_first_;
  int32_t num_newest_;
  int32_t num_heavy_;
  int32_t count_ = 0;
};

class TopkSource {
 public:
  explicit TopkSource(const TopkOptions& options) : options_(options) {}

  // Writes the row of the query at `position`. Queries of a request come in order.
  void WriteRow(int32_t request, int32_t position, std::span<int32_t> row);
  // Forgets all requests but these.
  void Retain(std::span<const int32_t> requests);

  double mean_overlap() const;  // measured; 0 before any two long neighbouring rows

 private:
  TopkOptions options_;
  std::unordered_map<int32_t, Selection> selections_;
  double overlap_sum_ = 0;
  int64_t overlap_count_ = 0;
  int64_t num_rows_ = 0;
};

}  // namespace sparsemla::replay
