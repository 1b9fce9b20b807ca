#include "tools/bench/noise.h"

#include <algorithm>
#include <cmath>

namespace sparsemla::bench {
namespace {

bool IsQuiet(const Sample& sample, double best_rate) {
  const auto [slower, faster] = std::minmax(sample.rate_before, sample.rate_after);
  return slower >= kLeastRate * best_rate && faster - slower <= kMostDifference * faster &&
         sample.core_share >= kLeastCoreShare;
}

// The sample below which a share of them lies; `sorted` is not empty.
double Quantile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<size_t>(std::lround(share * static_cast<double>(sorted.size() - 1)))];
}

}  // namespace

double BestReferenceRate(std::span<const Sample> samples, double best_rate) {
  for (const Sample& sample : samples) {
    best_rate = std::max({best_rate, sample.rate_before, sample.rate_after});
  }
  return best_rate;
}

Timing Summarise(std::span<const Sample> samples, double best_rate) {
  std::vector<double> all;
  std::vector<double> kept;
  for (const Sample& sample : samples) {
    all.push_back(sample.seconds);
    if (IsQuiet(sample, best_rate)) kept.push_back(sample.seconds);
  }
  std::sort(all.begin(), all.end());
  std::sort(kept.begin(), kept.end());
  const std::vector<double>& counted = kept.empty() ? all : kept;
  return {.median = Quantile(counted, 0.5),
          .best = counted.front(),
          .p10 = Quantile(counted, 0.1),
          .p90 = Quantile(counted, 0.9),
          .median_of_all = Quantile(all, 0.5),
          .num_kept = static_cast<int>(kept.size()),
          .num_samples = static_cast<int>(all.size())};
}

}  // namespace sparsemla::bench
