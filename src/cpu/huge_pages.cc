#include "sparsemla/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/require.h"
#include "cpu/parallel_for.h"

namespace sparsemla {
namespace {

size_t PageBytes() {
  return static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::byte* RoundUp(std::byte* address, size_t multiple) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  return address + (RoundUp(value, multiple) - value);
}

void Unmap(std::byte* begin, std::byte* end) {
  if (begin < end) ::munmap(begin, static_cast<size_t>(end - begin));
}

// Memory of `size` bytes, a multiple of kHugePageBytes, between two pages that nobody may touch.
// They keep the system from joining it with a neighbour, so that its huge pages can be counted.
Result<std::byte*> MapBetweenGuards(size_t size) {
  const size_t page = PageBytes();
  const size_t reserved = size + kHugePageBytes + page;
  void* const mapped =
      ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  const auto failed = [size] {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("cannot map ", size, " bytes: ", std::system_category().message(errno)));
  };
  if (mapped == MAP_FAILED) return failed();
  auto* const begin = static_cast<std::byte*>(mapped);
  std::byte* const data = RoundUp(begin + page, kHugePageBytes);
  if (::mprotect(data, size, PROT_READ | PROT_WRITE) != 0) {
    const Status status = failed();
    ::munmap(mapped, reserved);
    return status;
  }
  Unmap(begin, data - page);
  Unmap(data + size + page, begin + reserved);
#if defined(MADV_HUGEPAGE)
  ::madvise(data, size, MADV_HUGEPAGE);  // a wish: where it fails there are normal pages
#endif
  return data;
}

// Writes a zero to every page, a huge page a task.
Status TouchPages(const Executor& executor, std::byte* data, size_t bytes) {
  const size_t page = PageBytes();
  const size_t num_tasks = (bytes + kHugePageBytes - 1) / kHugePageBytes;
  SPARSEMLA_CHECK(num_tasks <= std::numeric_limits<int32_t>::max(), StatusCode::kResourceExhausted,
                  bytes, " bytes are too many to touch");
  return cpu::ParallelFor(executor, static_cast<int32_t>(num_tasks), [&](int32_t task) {
    const size_t begin = static_cast<size_t>(task) * kHugePageBytes;
    const size_t end = std::min(bytes, begin + kHugePageBytes);
    for (size_t i = begin; i < end; i += page) *static_cast<volatile std::byte*>(data + i) = {};
  });
}

std::optional<uint64_t> ParseNumber(std::string_view text, int base) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc()) return {};
  return value;
}

// The address range of a line of smaps that begins a mapping: "7f0c00000000-7f0c00200000 rw-p ...".
std::optional<std::pair<uint64_t, uint64_t>> ParseMapping(std::string_view line) {
  const size_t dash = line.find('-');
  const size_t space = line.find(' ');
  if (dash == std::string_view::npos || space == std::string_view::npos || dash > space) return {};
  const auto begin = ParseNumber(line.substr(0, dash), 16);
  const auto end = ParseNumber(line.substr(dash + 1, space - dash - 1), 16);
  if (!begin || !end) return {};
  return std::pair(*begin, *end);
}

}  // namespace

HugePageBuffer::~HugePageBuffer() {
  if (data_ == nullptr) return;
  const size_t page = PageBytes();
  ::munmap(static_cast<std::byte*>(data_) - page, RoundUp(bytes_, kHugePageBytes) + 2 * page);
}

HugePageBuffer::HugePageBuffer(HugePageBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

HugePageBuffer& HugePageBuffer::operator=(HugePageBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Result<HugePageBuffer> HugePageBuffer::Allocate(size_t bytes, const Executor& first_touch) {
  if (bytes == 0) return HugePageBuffer();
  constexpr size_t kMost = std::numeric_limits<size_t>::max() / 2;
  SPARSEMLA_CHECK(bytes <= kMost, StatusCode::kResourceExhausted, "cannot map ", bytes,
                  " bytes; the most is ", kMost);
  const auto data = MapBetweenGuards(RoundUp(bytes, kHugePageBytes));
  if (!data.ok()) return data.status();
  HugePageBuffer buffer(data.value(), bytes);
  if (first_touch.parallel_for != nullptr) {
    SPARSEMLA_RETURN_IF_ERROR(TouchPages(first_touch, data.value(), bytes));
  }
  return buffer;
}

void* HugePageBuffer::Release() {
  bytes_ = 0;
  return std::exchange(data_, nullptr);
}

Result<size_t> CountHugePageBytes(const void* data, size_t bytes) {
  std::ifstream smaps("/proc/self/smaps");
  SPARSEMLA_CHECK(smaps.is_open(), StatusCode::kUnsupported,
                  "not available: there is no /proc/self/smaps");
  const auto begin = reinterpret_cast<uint64_t>(data);
  const uint64_t end = begin + bytes;
  constexpr std::string_view kField = "AnonHugePages:";
  uint64_t overlap = 0;  // of the range and the mapping whose lines are being read
  uint64_t total = 0;
  for (std::string line; std::getline(smaps, line);) {
    if (line.starts_with(kField)) {
      const size_t digits = line.find_first_of("0123456789");
      if (digits == std::string::npos) continue;
      const uint64_t kilobytes = ParseNumber(std::string_view(line).substr(digits), 10).value_or(0);
      total += std::min(overlap, kilobytes * 1024);
    } else if (const auto mapping = ParseMapping(line)) {
      const uint64_t first = std::max(begin, mapping->first);
      const uint64_t last = std::min(end, mapping->second);
      overlap = first < last ? last - first : 0;
    }
  }
  return static_cast<size_t>(total);
}

std::string HugePageSetting() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;  // "always [madvise] never"
  std::getline(file, line);
  const size_t open = line.find('[');
  const size_t close = line.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) {
    return "not available";
  }
  return line.substr(open + 1, close - open - 1);
}

}  // namespace sparsemla
