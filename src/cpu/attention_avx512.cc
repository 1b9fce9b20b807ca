#if defined(__x86_64__)

#include "cpu/attention_vector_deps.h"

SPARSEMLA_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
namespace sparsemla::cpu {
namespace {

// 32 registers: 24 accumulators, their operands and a broadcast.
constexpr int kLanes = 16;
constexpr int kQkKeys = 12;
constexpr int kQkVectors = 2;
constexpr int kQkKeysOfOne = 16;
constexpr int kPvHeads = 6;
constexpr int kPvVectors = 4;
#include "cpu/attention_vector.h"

}  // namespace

void attention_avx512(const AttentionCall& call, const AttentionItem& item, std::byte* scratch) {
  RunItem(call, item, VectorScratch::At(scratch, call.dims));
}

}  // namespace sparsemla::cpu
SPARSEMLA_TARGET_END

#endif
