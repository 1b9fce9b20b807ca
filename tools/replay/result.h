// What a replay has measured: one record a step, and what belongs to the whole run. Filled by the
// runner, read by the table, the JSON and the HTML report.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/status.h"

namespace sparsemla::replay {

enum class Stage : size_t { kPlan = 0, kConvert = 1, kAttention = 2, kMerge = 3 };
inline constexpr size_t kNumStages = 4;
inline constexpr std::array<std::string_view, kNumStages> kStageNames = {"plan", "convert",
                                                                         "attention", "merge"};

struct StepRecord {
  int64_t index = 0;
  double clock_ms = 0;  // simulated
  int32_t num_reqs = 0;
  int32_t decode_tokens = 0;
  int32_t prefill_tokens = 0;
  int32_t num_waiting = 0;
  int32_t num_preempted = 0;
  int64_t admitted_tokens = 0;
  int64_t hit_tokens = 0;
  int32_t blocks_referenced = 0;
  int32_t blocks_idle = 0;
  bool plan_reused = false;
  double imbalance = 0;                               // PlanCosts::imbalance
  std::array<double, kNumStages> stage_seconds = {};  // all layers together
  double flop = 0;                                    // of all layers
  double unique_bytes = 0;                            // of all layers; see CountUniqueBytes

  double seconds(Stage stage) const { return stage_seconds[static_cast<size_t>(stage)]; }
  double total_seconds() const;
  double gflops() const;  // over attention and merge
};

// The lengths of one step: enough to make its plan again.
struct StepShape {
  int64_t index = -1;  // -1: there is none
  double seconds = 0;
  std::vector<int32_t> query_start_loc;
  std::vector<int32_t> seq_lens;
};

inline constexpr size_t kContextBins = 24;  // bin b: contexts in [2^b, 2^(b+1))

struct ReplayResult {
  std::vector<StepRecord> steps;
  int32_t num_requests = 0;
  int32_t num_finished = 0;
  std::array<int64_t, kContextBins> decode_contexts = {};  // rows by context length
  std::array<int64_t, kContextBins> prefill_contexts = {};
  std::map<int32_t, int64_t> rows_by_pieces;  // work items per row
  double mean_overlap = 0;                    // of neighbouring selections, measured
  double generation_seconds = 0;              // cache rows, queries and selections: no stage
  double check_seconds = 0;
  double wall_seconds = 0;
  int64_t checked_rows = 0;
  double worst_error = 0;  // largest error of a checked value, as a share of its tolerance
  std::string mismatch;    // the first one; empty: none
  StepShape slowest;
  StepShape slowest_decode;  // among steps without prefill
  int64_t cache_bytes = 0;
  int64_t peak_memory_bytes = 0;  // of the process
};

// Sums and quantiles over the steps.
struct ReplayTotals {
  int64_t decode_tokens = 0;
  int64_t prefill_tokens = 0;
  int64_t admitted_tokens = 0;
  int64_t hit_tokens = 0;
  int64_t preempted = 0;
  int64_t plans_reused = 0;
  double mean_imbalance = 0;
  double max_imbalance = 0;
  std::array<double, kNumStages> seconds = {};
  std::array<double, kNumStages> median_seconds = {};
  std::array<double, kNumStages> p90_seconds = {};
  double flop = 0;
  double unique_bytes = 0;

  int64_t tokens() const { return decode_tokens + prefill_tokens; }
  double stage_seconds() const;  // all stages
  double hit_rate() const;       // of the admitted prompt tokens
  double gflops() const;         // over attention and merge
  double gigabytes_per_second() const;
};
ReplayTotals Summarise(const ReplayResult& result);

// Largest resident size of this process so far; 0 where the system does not say.
int64_t PeakMemoryBytes();

}  // namespace sparsemla::replay
