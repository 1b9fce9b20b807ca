// One cell of a benchmark: a workload with one choice of everything else, checked and timed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sparsemla/attention.h"
#include "sparsemla/backend.h"
#include "sparsemla/huge_pages.h"
#include "tools/bench/noise.h"
#include "tools/bench/peak.h"
#include "tools/bench/slots.h"
#include "tools/bench/workload.h"

namespace sparsemla::bench {

struct CellSpec {
  Workload workload = {};
  int32_t num_heads = 128;
  CacheFormat cache_format = CacheFormat::kBFloat16;
  int32_t topk_tokens = 2048;
  Residency residency = Residency::kContext;
  int32_t num_threads = 1;
};

// What all cells of a run share.
struct BenchOptions {
  std::string backend;
  std::string kernel;
  bool ragged = false;            // row lengths uniform in [1, topk_tokens]
  std::optional<double> overlap;  // SlotOptions::overlap
  bool batch_invariant = false;
  int32_t splits = 0;       // PlanCapacity::force_splits
  double seconds = 0.5;     // of sampling, at least kLeastSamples
  int32_t num_samples = 0;  // instead of `seconds`; 0: as many as fit
  int64_t pool_mb = 2048;   // kDram: size of the pool; kContext: largest cache
  bool check = true;
};

inline constexpr int32_t kLeastSamples = 5;

struct CellResult {
  std::string backend = {};
  std::string kernel = {};
  int32_t num_threads = 1;
  std::string unsupported_reason = {};  // not empty: neither checked nor timed
  int32_t num_checked_rows = 0;
  double worst_error = 0.0;   // of the checked rows, as a share of the tolerance
  std::string mismatch = {};  // not empty: the first wrong row; the cell was not timed
  int64_t num_keys = 0;       // of all rows
  int64_t row_bytes = 0;      // of the cache
  int64_t num_work_items = 0;
  int64_t num_partials = 0;
  double flop = 0.0;  // of a call
  PeakUnit peak_unit = PeakUnit::kFma128;
  double peak = 0.0;  // FLOP/s of the unit on as many threads
  Timing timing = {};

  bool timed() const { return timing.num_samples > 0; }
};

class CellRunner {
 public:
  explicit CellRunner(const BenchOptions& options) : options_(options) {}

  // Plans, checks some rows against `ref`, then times Attention and Merge. The errors are those of
  // options or sizes; what a back end cannot do and wrong answers are results.
  Result<CellResult> Run(const CellSpec& spec);

  // Best rates of (unit, threads), measured on first use.
  double Peak(PeakUnit unit, int32_t num_threads);
  const std::map<std::pair<PeakUnit, int32_t>, double>& peaks() const { return peaks_; }

 private:
  Status PrepareCache(const CellSpec& spec, int64_t num_slots);

  BenchOptions options_;
  std::map<std::pair<PeakUnit, int32_t>, double> peaks_;
  // FLOP/s of the fastest reference run of (unit, threads) so far.
  std::map<std::pair<PeakUnit, int32_t>, double> best_reference_;
  // The cache of the cell before, which the next one often shares.
  HugePageBuffer cache_;
  CacheFormat cache_format_ = CacheFormat::kBFloat16;
  int64_t num_slots_ = 0;
};

}  // namespace sparsemla::bench
