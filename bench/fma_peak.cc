#include "bench/fma_peak.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "cpu/target.h"

namespace sparsemla::bench {
namespace {

constexpr int64_t kRounds = 400000;
constexpr int kAccumulators = 12;  // more than latency times issue width, fewer than registers

}  // namespace

// Defines `name`: runs kRounds of kAccumulators independent multiply-adds and returns their FLOP.
// The empty asm keeps every accumulator in a register and alive.
#define SPARSEMLA_DEFINE_PEAK(name, lanes, constraint)                 \
  namespace {                                                          \
  double name() {                                                      \
    typedef float Floats __attribute__((vector_size(4 * (lanes))));    \
    Floats sum[kAccumulators] = {};                                    \
    Floats a = Floats{} + 0.999f;                                      \
    Floats b = Floats{} + 0.001f;                                      \
    for (int64_t i = 0; i < kRounds; ++i) {                            \
      for (Floats & s : sum) {                                         \
        s = s * a + b;                                                 \
        asm volatile("" : "+" constraint(s));                          \
      }                                                                \
    }                                                                  \
    return 2.0 * (lanes)*kAccumulators * static_cast<double>(kRounds); \
  }                                                                    \
  }

#if defined(__x86_64__)
SPARSEMLA_TARGET_BEGIN("avx512f")
SPARSEMLA_DEFINE_PEAK(RunAvx512, 16, "v")
SPARSEMLA_TARGET_END
SPARSEMLA_TARGET_BEGIN("avx2,fma")
SPARSEMLA_DEFINE_PEAK(RunAvx2, 8, "x")
SPARSEMLA_TARGET_END
SPARSEMLA_DEFINE_PEAK(RunPortable, 4, "x")
#else
SPARSEMLA_DEFINE_PEAK(RunPortable, 4, "w")
#endif

double MeasureFmaPeak(std::string_view kernel) {
  double (*run)() = nullptr;
  if (kernel == "attention_portable") run = RunPortable;
#if defined(__x86_64__)
  if (kernel == "attention_avx2") run = RunAvx2;
  if (kernel == "attention_avx512") run = RunAvx512;
#endif
  if (run == nullptr) return 0.0;
  double best = 0.0;
  for (int i = 0; i < 10; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const double flop = run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::max(best, flop / seconds.count());
  }
  return best;
}

}  // namespace sparsemla::bench
