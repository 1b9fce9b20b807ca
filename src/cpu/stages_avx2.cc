#if defined(__x86_64__)

#include "cpu/stages_vector_deps.h"

SPARSEMLA_TARGET_BEGIN("avx2,fma")
namespace sparsemla::cpu {
namespace {

constexpr int kLanes = 8;
#include "cpu/stages_vector.h"

}  // namespace

int64_t convert_avx2(const SlotRule& rule, const int32_t* positions, int64_t count,
                     int32_t* slots) {
  return ConvertPositions(rule, positions, count, slots);
}

int64_t count_avx2(const int32_t* entries, int64_t count) {
  return CountValid(entries, count);
}

void sum_avx2(const WeightedSum& sum) {
  SumPieces(sum);
}

}  // namespace sparsemla::cpu
SPARSEMLA_TARGET_END

#endif
