#include "cpu/stages_vector_deps.h"

namespace sparsemla::cpu {
namespace {

constexpr int kLanes = 4;
#include "cpu/stages_vector.h"

}  // namespace

int64_t convert_portable(const SlotRule& rule, const int32_t* positions, int64_t count,
                         int32_t* slots) {
  return ConvertPositions(rule, positions, count, slots);
}

int64_t count_portable(const int32_t* entries, int64_t count) {
  return CountValid(entries, count);
}

void sum_portable(const WeightedSum& sum) {
  SumPieces(sum);
}

}  // namespace sparsemla::cpu
