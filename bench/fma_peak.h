// What the benchmarks are measured against: fused multiply-adds on registers only, one thread.
#pragma once

#include <string_view>

namespace sparsemla::bench {

// FLOP/s that the instruction set of an attention kernel reaches on this machine now, best of
// several runs of some milliseconds. 0 for an unknown kernel.
double MeasureFmaPeak(std::string_view kernel);

}  // namespace sparsemla::bench
