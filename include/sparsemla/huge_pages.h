// Memory for cache pools on transparent huge pages. The selected rows of a token lie anywhere in
// the pool: on pages of 4 KB nearly each of them costs a page walk besides its bytes. Host memory
// only; a back end takes any other memory just as well.
#pragma once

#include <cstddef>
#include <string>

#include "sparsemla/backend.h"
#include "sparsemla/status.h"

#pragma GCC visibility push(default)
namespace sparsemla {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Zeroed memory of its own pages, aligned to kHugePageBytes, freed with the object. The system is
// asked for huge pages (madvise); what it does not grant are normal pages.
class HugePageBuffer {
 public:
  HugePageBuffer() = default;  // no memory
  ~HugePageBuffer();
  HugePageBuffer(HugePageBuffer&& other) noexcept;
  HugePageBuffer& operator=(HugePageBuffer&& other) noexcept;

  // Maps `bytes` of memory, 0 for none. Pages exist once they are written, on the NUMA node of the
  // thread that does so: the caller's, later, or, with `first_touch`, the executor's now, all
  // threads at once. kResourceExhausted: the system has no such memory; errors of the executor as
  // in every stage.
  static Result<HugePageBuffer> Allocate(size_t bytes, const Executor& first_touch = {});

  // Gives the memory up, and takes it back: for owners in other languages. Adopt only what Release
  // gave, with its bytes.
  void* Release();
  static HugePageBuffer Adopt(void* data, size_t bytes) { return {data, bytes}; }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  HugePageBuffer(void* data, size_t bytes) : data_(data), bytes_(bytes) {}

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// How many of `bytes` bytes from `data` on lie on huge pages at this moment. Exact for a whole
// HugePageBuffer. The system counts by mapping: where the range is only a part of one, the answer
// is what it could be at most. Reads /proc/self/smaps, which takes milliseconds; kUnsupported where
// that does not exist.
Result<size_t> CountHugePageBytes(const void* data, size_t bytes);

// The system's setting: "always", "madvise" (for those who ask, like HugePageBuffer), "never", or
// "not available".
std::string HugePageSetting();

}  // namespace sparsemla
#pragma GCC visibility pop
