// What a machine can do at most: multiply-adds on registers only. They are the ceiling that
// kernels are compared with, and the short reference runs that tell a throttled moment.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace sparsemla::bench {

enum class PeakUnit {
  kAmxBf16,  // TDPBF16PS on tiles
  kFma512,   // float32 multiply-add, 512, 256 or 128 bits
  kFma256,
  kFma128,  // every machine; on x86-64 a multiplication and an addition
};

// "amx_bf16", "fma512", "fma256", "fma128".
std::string_view PeakUnitName(PeakUnit unit);

// What this machine has, fastest first. Asks the system for the use of AMX tiles.
std::vector<PeakUnit> AvailablePeakUnits();

// The unit that a kernel of this name is measured against: tiles for "amx", else float32
// multiply-adds of its vector width; if the machine lacks it, the machine's best.
PeakUnit PeakUnitOf(std::string_view kernel);

// FLOP/s of `num_threads` threads that run at the same time, of each the best of several runs of
// about a millisecond. The unit is available.
double MeasurePeak(PeakUnit unit, int32_t num_threads);

// FLOP/s of the calling thread over some ten microseconds: the best of a few pieces, so that
// neither an interrupt nor the first microseconds of a unit that was idle count.
double MeasureReference(PeakUnit unit);

// Runs the unit for at least `microseconds`.
void WarmUp(PeakUnit unit, double microseconds);

}  // namespace sparsemla::bench
