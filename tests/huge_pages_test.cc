// Memory on transparent huge pages: the C++ type, its C pair, and what can be asked.
#include "sparsemla/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cpu/thread_pool.h"
#include "sparsemla/sparsemla.h"

namespace sparsemla {
namespace {

std::span<std::byte> BytesOf(const HugePageBuffer& buffer) {
  return {static_cast<std::byte*>(buffer.data()), buffer.bytes()};
}

bool SystemGrantsHugePages() {
  return HugePageSetting() == "always" || HugePageSetting() == "madvise";
}

TEST(HugePages, MemoryIsAlignedZeroAndWritableToItsLastByte) {
  for (const size_t bytes :
       {size_t{1}, size_t{4096}, kHugePageBytes - 1, kHugePageBytes, 3 * kHugePageBytes + 5}) {
    const auto buffer = HugePageBuffer::Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status().message();
    EXPECT_EQ(buffer->bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % kHugePageBytes, 0u);
    const auto all = BytesOf(buffer.value());
    EXPECT_TRUE(std::ranges::all_of(all, [](std::byte b) { return b == std::byte{0}; }));
    std::memset(all.data(), 0xA5, bytes);
    EXPECT_EQ(all.back(), std::byte{0xA5});
  }
}

TEST(HugePages, NoBytesAreNoMemory) {
  const auto buffer = HugePageBuffer::Allocate(0);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(buffer->data(), nullptr);
  EXPECT_EQ(buffer->bytes(), 0u);
}

TEST(HugePages, MemoryThatTheSystemDoesNotHaveIsAnErrorThatNamesTheSize) {
  for (const size_t bytes : {size_t{1} << 60, std::numeric_limits<size_t>::max()}) {
    const auto buffer = HugePageBuffer::Allocate(bytes);
    EXPECT_EQ(buffer.status().code(), StatusCode::kResourceExhausted);
    EXPECT_NE(buffer.status().message().find(std::to_string(bytes)), std::string::npos)
        << buffer.status().message();
  }
}

TEST(HugePages, MovingHandsTheMemoryOver) {
  auto first = HugePageBuffer::Allocate(100);
  ASSERT_TRUE(first.ok());
  void* const data = first->data();
  HugePageBuffer second = std::move(first).value();
  EXPECT_EQ(second.data(), data);
  HugePageBuffer third;
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(third.bytes(), 100u);
  BytesOf(third)[99] = std::byte{1};
}

// Pages of the range that exist.
int64_t NumResidentPages(const HugePageBuffer& buffer) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident((buffer.bytes() + page - 1) / page);
  EXPECT_EQ(::mincore(buffer.data(), buffer.bytes(), resident.data()), 0);
  return std::ranges::count_if(resident, [](unsigned char r) { return (r & 1) != 0; });
}

TEST(HugePages, FirstTouchIsLeftToTheCallerOrDoneByTheExecutor) {
  const size_t bytes = 5 * kHugePageBytes + 4096;
  const auto pages = static_cast<int64_t>(bytes) / ::sysconf(_SC_PAGESIZE);
  const auto untouched = HugePageBuffer::Allocate(bytes);
  ASSERT_TRUE(untouched.ok());
  EXPECT_EQ(NumResidentPages(untouched.value()), 0);
  const auto pool = cpu::ThreadPool::Create(3);
  ASSERT_TRUE(pool.ok());
  const auto touched = HugePageBuffer::Allocate(bytes, pool.value()->executor());
  ASSERT_TRUE(touched.ok()) << touched.status().message();
  EXPECT_EQ(NumResidentPages(touched.value()), pages);
}

TEST(HugePages, AnExecutorThatLeavesPagesOutIsAnError) {
  const Executor lazy = {.num_threads = 2,
                         .parallel_for = [](void*, int32_t, void (*)(void*, int32_t), void*) {}};
  const auto buffer = HugePageBuffer::Allocate(4 * kHugePageBytes, lazy);
  EXPECT_EQ(buffer.status().code(), StatusCode::kInternal);
  EXPECT_EQ(buffer.status().message(), "the executor ran 0 tasks; it was asked for 4");
}

TEST(HugePages, AreCountedOnceTheyAreWritten) {
  const size_t bytes = 8 * kHugePageBytes;
  const auto buffer = HugePageBuffer::Allocate(bytes);
  const auto neighbour = HugePageBuffer::Allocate(bytes);
  ASSERT_TRUE(buffer.ok() && neighbour.ok());
  const auto before = CountHugePageBytes(buffer->data(), bytes);
  if (!before.ok()) GTEST_SKIP() << before.status().message();
  EXPECT_EQ(before.value(), 0u);
  std::memset(neighbour->data(), 1, bytes);
  EXPECT_EQ(CountHugePageBytes(buffer->data(), bytes).value(), 0u) << "those of the neighbour";
  std::memset(buffer->data(), 1, bytes);
  const size_t count = CountHugePageBytes(buffer->data(), bytes).value();
  EXPECT_LE(count, bytes);
  EXPECT_EQ(count % kHugePageBytes, 0u);
  if (!SystemGrantsHugePages()) {
    EXPECT_EQ(count, 0u) << HugePageSetting();
  } else if (count == 0) {
    GTEST_SKIP() << "the system had no huge page to give";
  }
}

TEST(HugePages, NormalPagesAreNotCounted) {
  const size_t bytes = 4 * kHugePageBytes;
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(data, MAP_FAILED);
#if defined(MADV_NOHUGEPAGE)
  ::madvise(data, bytes, MADV_NOHUGEPAGE);
#endif
  std::memset(data, 1, bytes);
  const auto count = CountHugePageBytes(data, bytes);
  if (count.ok()) {
    EXPECT_EQ(count.value(), 0u);
  } else {
    EXPECT_EQ(count.status().code(), StatusCode::kUnsupported);
  }
  ::munmap(data, bytes);
}

TEST(HugePages, TheSettingIsAWordOfTheSystem) {
  const std::vector<std::string> words = {"always", "madvise", "never", "not available"};
  EXPECT_NE(std::ranges::find(words, HugePageSetting()), words.end()) << HugePageSetting();
}

TEST(HugePages, TheCPairAllocatesCountsAndFrees) {
  void* data = nullptr;
  const size_t bytes = kHugePageBytes + 1;
  ASSERT_EQ(sparsemla_huge_pages_allocate(bytes, &data), SPARSEMLA_OK) << sparsemla_last_error();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % kHugePageBytes, 0u);
  std::memset(data, 1, bytes);
  size_t count = bytes + 1;
  const sparsemla_status status = sparsemla_huge_pages_count(data, bytes, &count);
  EXPECT_TRUE(status == SPARSEMLA_UNSUPPORTED || (status == SPARSEMLA_OK && count <= bytes));
  sparsemla_huge_pages_free(data, bytes);
  EXPECT_NE(::mincore(data, 4096, std::vector<unsigned char>(1).data()), 0) << "still mapped";
  sparsemla_huge_pages_free(nullptr, 0);

  EXPECT_EQ(sparsemla_huge_pages_allocate(1, nullptr), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_STREQ(sparsemla_last_error(), "data is null");
  EXPECT_EQ(sparsemla_huge_pages_count(data, 1, nullptr), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(sparsemla_huge_pages_allocate(SIZE_MAX, &data), SPARSEMLA_RESOURCE_EXHAUSTED);
}

}  // namespace
}  // namespace sparsemla
