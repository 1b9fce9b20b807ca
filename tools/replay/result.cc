#include "tools/replay/result.h"

#include <algorithm>
#include <fstream>
#include <numeric>

namespace sparsemla::replay {
namespace {

double PerSecond(double amount, double seconds) {
  return seconds > 0 ? amount / seconds : 0.0;
}

double Quantile(std::vector<double>& values, double q) {
  if (values.empty()) return 0.0;
  const auto place = static_cast<size_t>(q * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(place),
                   values.end());
  return values[place];
}

}  // namespace

double StepRecord::total_seconds() const {
  return std::accumulate(stage_seconds.begin(), stage_seconds.end(), 0.0);
}

double StepRecord::gflops() const {
  return PerSecond(flop * 1e-9, seconds(Stage::kAttention) + seconds(Stage::kMerge));
}

double ReplayTotals::stage_seconds() const {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

double ReplayTotals::hit_rate() const {
  return PerSecond(static_cast<double>(hit_tokens), static_cast<double>(admitted_tokens));
}

double ReplayTotals::gflops() const {
  return PerSecond(flop * 1e-9, seconds[static_cast<size_t>(Stage::kAttention)] +
                                    seconds[static_cast<size_t>(Stage::kMerge)]);
}

double ReplayTotals::gigabytes_per_second() const {
  return PerSecond(unique_bytes * 1e-9, seconds[static_cast<size_t>(Stage::kAttention)] +
                                            seconds[static_cast<size_t>(Stage::kMerge)]);
}

ReplayTotals Summarise(const ReplayResult& result) {
  ReplayTotals totals;
  for (const StepRecord& step : result.steps) {
    totals.decode_tokens += step.decode_tokens;
    totals.prefill_tokens += step.prefill_tokens;
    totals.admitted_tokens += step.admitted_tokens;
    totals.hit_tokens += step.hit_tokens;
    totals.preempted += step.num_preempted;
    totals.plans_reused += step.plan_reused ? 1 : 0;
    totals.mean_imbalance += step.imbalance / static_cast<double>(result.steps.size());
    totals.max_imbalance = std::max(totals.max_imbalance, step.imbalance);
    totals.flop += step.flop;
    totals.unique_bytes += step.unique_bytes;
  }
  for (size_t stage = 0; stage < kNumStages; ++stage) {
    std::vector<double> seconds;
    for (const StepRecord& step : result.steps) seconds.push_back(step.stage_seconds[stage]);
    totals.seconds[stage] = std::accumulate(seconds.begin(), seconds.end(), 0.0);
    totals.median_seconds[stage] = Quantile(seconds, 0.5);
    totals.p90_seconds[stage] = Quantile(seconds, 0.9);
  }
  return totals;
}

int64_t PeakMemoryBytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    int64_t kibibytes = 0;
    if (word == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

}  // namespace sparsemla::replay
