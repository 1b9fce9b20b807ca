// Which samples of a disturbed machine count. Hosts throttle for milliseconds to seconds, so every
// sample stands between two short reference runs of known work: where those were slow, or differ,
// the sample says nothing about the kernel. Nor does it where other programs had the core
// meanwhile.
#pragma once

#include <span>
#include <vector>

namespace sparsemla::bench {

struct Sample {
  double seconds = 0.0;
  double rate_before = 0.0;  // of the reference runs, FLOP/s; 0: a thread did not get a core
  double rate_after = 0.0;
  double core_share = 1.0;  // of the thread that was interrupted longest
};

// A sample is kept if both reference rates are at least this share of the best one, ...
inline constexpr double kLeastRate = 0.7;
// ... differ by at most this share of the larger one, ...
inline constexpr double kMostDifference = 0.1;
// ... and every thread had its core for this share of the time.
inline constexpr double kLeastCoreShare = 0.95;

struct Timing {
  double median = 0.0;  // seconds
  double best = 0.0;
  double p10 = 0.0;
  double p90 = 0.0;
  double median_of_all = 0.0;  // kept or not
  int num_kept = 0;            // 0: none was quiet, the figures are those of all samples
  int num_samples = 0;
};

// The fastest reference run among the samples, and at least `best_rate`.
double BestReferenceRate(std::span<const Sample> samples, double best_rate);

// `samples` is not empty; `best_rate` is the fastest reference run seen.
Timing Summarise(std::span<const Sample> samples, double best_rate);

}  // namespace sparsemla::bench
