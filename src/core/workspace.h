// Scratch memory: measured and carved by the same code. An arena without a base only counts, so the
// size told to the caller and the layout used by a kernel cannot disagree.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparsemla/types.h"

namespace sparsemla {

class Arena {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line; AMX and AVX-512 loads like it

  Arena() = default;  // counts
  explicit Arena(Workspace workspace) : base_(static_cast<std::byte*>(workspace.data)) {}

  // Room for `count` objects of T, aligned to kAlignment; null while counting.
  template <typename T>
  T* Take(int64_t count) {
    const size_t begin = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + begin);
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_ = nullptr;
  size_t used_ = 0;
};

// Where Attention leaves the pieces of split rows: always first in the workspace.
struct PartialBuffers {
  float* out = nullptr;  // [num_partials, heads, kv_lora_rank], normalised
  float* lse = nullptr;  // [num_partials, heads], natural log, without sinks

  static PartialBuffers Carve(Arena& arena, int64_t num_partials, int64_t heads,
                              int64_t kv_lora_rank) {
    PartialBuffers buffers;
    buffers.out = arena.Take<float>(num_partials * heads * kv_lora_rank);
    buffers.lse = arena.Take<float>(num_partials * heads);
    return buffers;
  }
};

}  // namespace sparsemla
