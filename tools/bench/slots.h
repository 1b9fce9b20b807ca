// Which cache rows the query tokens of a measured call select: other ones in every call, so that
// neither caches nor predictors learn them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "sparsemla/status.h"
#include "tools/bench/workload.h"
#include "tools/replay/hash.h"

namespace sparsemla::bench {

// Where the selected rows come from.
enum class Residency {
  kL2,       // 256 rows
  kL3,       // 8192 rows
  kDram,     // a pool beyond every cache
  kContext,  // each request's own tokens, in blocks scattered over the cache
};
std::string_view ResidencyName(Residency residency);  // "l2", "l3", "dram", "context"

struct SlotOptions {
  Residency residency = Residency::kContext;
  int64_t pool_slots = 0;  // kDram: rows of the pool
  std::optional<double> overlap =
      {};  // share of its keys that a query has from the query before it
  uint64_t seed = 1;
};

class SlotSource {
 public:
  // Draws for the tokens of `workload`, of which token t selects kv_indptr[t + 1] - kv_indptr[t]
  // keys, at most as many as it sees.
  SlotSource(const Workload& workload, std::span<const int32_t> kv_indptr,
             const SlotOptions& options);

  // Rows that the cache must have.
  static int64_t NumSlots(const Workload& workload, const SlotOptions& options);

  // Fills kv_indices [kv_indptr.back()] for the next call. Of its own tokens a query selects
  // distinct ones, in order if it selects all; rows of a pool may repeat.
  void Next(std::span<int32_t> kv_indices);

 private:
  static constexpr int32_t kBlockSize = 64;

  struct Row {
    int32_t num_keys = 0;
    int32_t num_visible = 0;   // positions below this
    int32_t first_block = 0;   // of the request, in blocks_
    bool follows_row = false;  // the row before is of the same request
  };

  void DrawPositions(const Row& row);
  int32_t SlotOf(const Row& row, int32_t position) const;

  SlotOptions options_;
  replay::Random random_;
  std::vector<Row> rows_;
  std::vector<int32_t> blocks_;     // kContext: cache block of every block of every request
  std::vector<int32_t> positions_;  // of the row drawn last
  std::vector<int32_t> previous_;   // of the row before it
  std::vector<uint32_t> drawn_in_;  // [positions] number of the row that drew a position last
  uint32_t num_drawn_rows_ = 0;
};

}  // namespace sparsemla::bench
