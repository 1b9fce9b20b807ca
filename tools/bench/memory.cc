#include "tools/bench/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "core/require.h"

namespace sparsemla::bench {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Result<HugePageMemory> HugePageMemory::Create(int64_t bytes) {
  HugePageMemory memory;
  memory.mapped_bytes_ = static_cast<size_t>(bytes) + 2 * kHugePage;
  void* const mapping = mmap(nullptr, memory.mapped_bytes_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  SPARSEMLA_CHECK(mapping != MAP_FAILED, StatusCode::kResourceExhausted, "no memory for ", bytes,
                  " bytes of cache rows: ", std::strerror(errno));
  memory.mapping_ = mapping;
  const auto address = reinterpret_cast<uintptr_t>(mapping);
  memory.data_ = static_cast<std::byte*>(mapping) + (kHugePage - address % kHugePage) % kHugePage;
#if defined(MADV_HUGEPAGE)
  // Advice only: where it is refused the pages stay small, which the machine's description tells.
  (void)madvise(mapping, memory.mapped_bytes_, MADV_HUGEPAGE);
#endif
  return memory;
}

HugePageMemory& HugePageMemory::operator=(HugePageMemory&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(data_, other.data_);
  return *this;
}

HugePageMemory::~HugePageMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
}

Status CheckFitsMemory(int64_t bytes) {
  const int64_t memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  SPARSEMLA_CHECK(bytes <= memory, StatusCode::kResourceExhausted, "needs ", bytes >> 20,
                  " MB of memory; this machine has ", memory >> 20);
  return {};
}

}  // namespace sparsemla::bench
