// Large memory as engines allocate it for a cache: on huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "sparsemla/status.h"

namespace sparsemla::bench {

class HugePageMemory {
 public:
  // Zeros, aligned to 2 MB. kResourceExhausted if the system refuses.
  static Result<HugePageMemory> Create(int64_t bytes);

  HugePageMemory() = default;
  HugePageMemory(HugePageMemory&& other) noexcept { *this = std::move(other); }
  HugePageMemory& operator=(HugePageMemory&& other) noexcept;
  ~HugePageMemory();

  std::byte* data() const { return data_; }

 private:
  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
};

// kResourceExhausted, with both sizes, if this machine has less memory than `bytes`.
Status CheckFitsMemory(int64_t bytes);

}  // namespace sparsemla::bench
