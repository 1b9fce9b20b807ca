// Vectors of four floats: SSE2 on any x86-64, NEON on any 64-bit Arm, scalar code elsewhere.
#include "cpu/attention_vector_deps.h"

namespace sparsemla::cpu {
namespace {

constexpr int kLanes = 4;
constexpr int kQkVectors = 2;
constexpr int kQkKeysOfOne = 12;
#if defined(__aarch64__)  // 32 registers
constexpr int kQkKeys = 12;
constexpr int kPvHeads = 6;
constexpr int kPvVectors = 4;
#else  // 16 registers, and a product needs one before it is added
constexpr int kQkKeys = 6;
constexpr int kPvHeads = 6;
constexpr int kPvVectors = 2;
#endif
#include "cpu/attention_vector.h"

}  // namespace

void attention_portable(const AttentionCall& call, const AttentionItem& item, std::byte* scratch) {
  RunItem(call, item, VectorScratch::At(scratch, call.dims));
}

}  // namespace sparsemla::cpu
