#include "cpu/vector_scratch.h"

#include "cpu/kernels.h"

namespace sparsemla::cpu {
namespace {

constexpr int64_t kLineFloats = Arena::kAlignment / sizeof(float);

constexpr int64_t PadToLine(int64_t floats) {
  return (floats + kLineFloats - 1) / kLineFloats * kLineFloats;
}

}  // namespace

VectorScratch VectorScratch::Carve(Arena& arena, const MlaDims& dims) {
  VectorScratch scratch;
  const int64_t num_panels = (dims.head_dim_qk() + kPanelColumns - 1) / kPanelColumns;
  scratch.head_stride = PadToLine(dims.num_heads);
  scratch.value_stride = PadToLine(dims.kv_lora_rank);
  scratch.rows = arena.Take<const std::byte*>(2 * kKeyBlock);
  scratch.keys = arena.Take<float>(num_panels * kPanelFloats);
  scratch.queries = arena.Take<float>(dims.head_dim_qk() * scratch.head_stride);
  scratch.scores = arena.Take<float>(kKeyBlock * scratch.head_stride);
  scratch.out = arena.Take<float>(dims.num_heads * scratch.value_stride);
  scratch.max_log2 = arena.Take<float>(scratch.head_stride);
  scratch.sum = arena.Take<float>(scratch.head_stride);
  scratch.rescale = arena.Take<float>(scratch.head_stride);
  return scratch;
}

VectorScratch VectorScratch::At(std::byte* memory, const MlaDims& dims) {
  Arena arena(Workspace{memory, 0});
  return Carve(arena, dims);
}

int64_t VectorKernels::ScratchBytes(const MlaDims& dims) {
  Arena measure;
  VectorScratch::Carve(measure, dims);
  return static_cast<int64_t>(measure.used());
}

std::string VectorKernels::UnsupportedReason(const Problem&) {
  return {};
}

}  // namespace sparsemla::cpu
