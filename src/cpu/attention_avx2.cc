#if defined(__x86_64__)

#include "cpu/attention_vector_deps.h"

SPARSEMLA_TARGET_BEGIN("avx2,fma")
namespace sparsemla::cpu {
namespace {

// 16 registers: 12 accumulators, two operands and a broadcast.
constexpr int kLanes = 8;
constexpr int kQkKeys = 6;
constexpr int kQkVectors = 2;
constexpr int kQkKeysOfOne = 12;
constexpr int kPvHeads = 6;
constexpr int kPvVectors = 2;
#include "cpu/attention_vector.h"

}  // namespace

void attention_avx2(const AttentionCall& call, const AttentionItem& item, std::byte* scratch) {
  RunItem(call, item, VectorScratch::At(scratch, call.dims));
}

}  // namespace sparsemla::cpu
SPARSEMLA_TARGET_END

#endif
