#include "tools/bench/peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sparsemla::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kAccumulators = 12;  // more than latency times issue width, fewer than registers
constexpr int64_t kReferenceRounds = 3000;  // about 5 us
constexpr int kReferencePieces = 5;
constexpr int64_t kPeakRounds = 600000;  // about 1 ms
constexpr int kPeakRuns = 10;

// Defines `name`: runs so many rounds of kAccumulators independent multiply-adds and returns their
// FLOP. The empty asm keeps every accumulator alive; inlined beside calls, which preserve no vector
// register, the accumulators would live in memory.
#define SPARSEMLA_DEFINE_FMA(name, attributes, lanes, constraint)     \
  __attribute__((noinline)) attributes double name(int64_t rounds) {  \
    typedef float Floats __attribute__((vector_size(4 * (lanes))));   \
    Floats sum[kAccumulators] = {};                                   \
    Floats a = Floats{} + 0.999f;                                     \
    Floats b = Floats{} + 0.001f;                                     \
    for (int64_t i = 0; i < rounds; ++i) {                            \
      for (Floats & s : sum) {                                        \
        s = s * a + b;                                                \
        asm volatile("" : "+" constraint(s));                         \
      }                                                               \
    }                                                                 \
    return 2.0 * (lanes)*kAccumulators * static_cast<double>(rounds); \
  }

#if defined(__x86_64__)
SPARSEMLA_DEFINE_FMA(RunFma512, __attribute__((target("avx512f"))), 16, "v")
SPARSEMLA_DEFINE_FMA(RunFma256, __attribute__((target("avx2,fma"))), 8, "x")
SPARSEMLA_DEFINE_FMA(RunFma128, , 4, "x")
#else
SPARSEMLA_DEFINE_FMA(RunFma128, , 4, "w")
#endif

#if defined(__x86_64__) && defined(__linux__)

// What LDTILECFG reads: all eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

bool HasAmxBf16() {
  constexpr unsigned kAmxBits = 1u << 22 | 1u << 24;  // CPUID.7.0:EDX, AMX-BF16 and AMX-TILE
  constexpr long kRequestPermission = 0x1023;         // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;                      // XFEATURE_XTILEDATA
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return (edx & kAmxBits) == kAmxBits &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Four independent products a round. Assembly, because the compilers have no tiles without flags
// for the whole file. The operands are ones, since zeros may cost less power than real data.
double RunAmx(int64_t rounds) {
  static constexpr TileConfig kConfig;
  alignas(64) uint16_t ones[16 * 32];
  alignas(64) float sink[16 * 16];
  std::fill(std::begin(ones), std::end(ones), uint16_t{0x3F80});
  int64_t left = std::max<int64_t>(rounds / 12, 1);  // a round takes as long as 12 of the others
  const double flop = 4.0 * 2 * 16 * 16 * 32 * static_cast<double>(left);
  asm volatile(
      "ldtilecfg (%[config])\n\t"
      "tilezero %%tmm0\n\t"
      "tilezero %%tmm1\n\t"
      "tilezero %%tmm2\n\t"
      "tilezero %%tmm3\n\t"
      "tileloadd (%[ones],%[stride],1), %%tmm4\n\t"
      "tileloadd (%[ones],%[stride],1), %%tmm5\n\t"
      "tileloadd (%[ones],%[stride],1), %%tmm6\n\t"
      "1:\n\t"
      "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
      "tdpbf16ps %%tmm6, %%tmm4, %%tmm1\n\t"
      "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t"
      "tdpbf16ps %%tmm6, %%tmm5, %%tmm3\n\t"
      "dec %[left]\n\t"
      "jnz 1b\n\t"
      "tilestored %%tmm0, (%[sink],%[stride],1)\n\t"  // waits for the products
      "tilestored %%tmm1, (%[sink],%[stride],1)\n\t"
      "tilestored %%tmm2, (%[sink],%[stride],1)\n\t"
      "tilestored %%tmm3, (%[sink],%[stride],1)\n\t"
      "tilerelease"
      : [left] "+r"(left)
      : [config] "r"(&kConfig), [ones] "r"(ones), [sink] "r"(sink), [stride] "r"(int64_t{64})
      : "memory", "cc");
  return flop;
}

#endif

double RunUnit(PeakUnit unit, int64_t rounds) {
#if defined(__x86_64__)
#if defined(__linux__)
  if (unit == PeakUnit::kAmxBf16) return RunAmx(rounds);
#endif
  if (unit == PeakUnit::kFma512) return RunFma512(rounds);
  if (unit == PeakUnit::kFma256) return RunFma256(rounds);
#endif
  return RunFma128(rounds);
}

double BestRate(PeakUnit unit, int64_t rounds, int runs) {
  double best = 0.0;
  for (int i = 0; i < runs; ++i) {
    const auto begin = Clock::now();
    const double flop = RunUnit(unit, rounds);
    const std::chrono::duration<double> seconds = Clock::now() - begin;
    best = std::max(best, flop / seconds.count());
  }
  return best;
}

std::vector<PeakUnit> DetectUnits() {
  std::vector<PeakUnit> units;
#if defined(__x86_64__)
#if defined(__linux__)
  if (HasAmxBf16()) units.push_back(PeakUnit::kAmxBf16);
#endif
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) units.push_back(PeakUnit::kFma512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    units.push_back(PeakUnit::kFma256);
  }
#endif
  units.push_back(PeakUnit::kFma128);
  return units;
}

}  // namespace

std::string_view PeakUnitName(PeakUnit unit) {
  constexpr std::string_view kNames[] = {"amx_bf16", "fma512", "fma256", "fma128"};
  return kNames[static_cast<size_t>(unit)];
}

std::vector<PeakUnit> AvailablePeakUnits() {
  static const std::vector<PeakUnit> kUnits = DetectUnits();
  return kUnits;
}

PeakUnit PeakUnitOf(std::string_view kernel) {
  PeakUnit wanted = PeakUnit::kFma128;
  if (kernel.find("amx") != kernel.npos) {
    wanted = PeakUnit::kAmxBf16;
  } else if (kernel.find("avx512") != kernel.npos) {
    wanted = PeakUnit::kFma512;
  } else if (kernel.find("avx2") != kernel.npos) {
    wanted = PeakUnit::kFma256;
  }
  const std::vector<PeakUnit> units = AvailablePeakUnits();
  return std::find(units.begin(), units.end(), wanted) != units.end() ? wanted : units.front();
}

double MeasurePeak(PeakUnit unit, int32_t num_threads) {
  std::vector<double> rates(static_cast<size_t>(num_threads));
  std::atomic<int32_t> waiting = num_threads;
  {
    std::vector<std::jthread> threads;
    for (double& rate : rates) {
      threads.emplace_back([&] {
        for (--waiting; waiting.load() > 0;) std::this_thread::yield();
        rate = BestRate(unit, kPeakRounds, kPeakRuns);
      });
    }
  }
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

double MeasureReference(PeakUnit unit) {
  return BestRate(unit, kReferenceRounds, kReferencePieces);
}

void WarmUp(PeakUnit unit, double microseconds) {
  const auto end = Clock::now() + std::chrono::duration<double, std::micro>(microseconds);
  while (Clock::now() < end) RunUnit(unit, kReferenceRounds);
}

}  // namespace sparsemla::bench
