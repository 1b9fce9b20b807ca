// What kernels may touch: guard pages behind every array, addresses beyond 32 bits, the workspace's
// bound, and no allocation in a run.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/allocation_counter.h"
#include "tests/kernel_test.h"

namespace sparsemla::test {
namespace {

// Anonymous memory whose pages exist once written. Zero until then.
class Mapping {
 public:
  explicit Mapping(size_t bytes)
      : data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
        bytes_(bytes) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (ok()) ::munmap(data_, bytes_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_;
  size_t bytes_;
};

// A copy of some bytes that ends where a page begins that may not be touched.
class BeforeGuardPage {
 public:
  explicit BeforeGuardPage(std::span<const std::byte> bytes)
      : page_(static_cast<size_t>(::sysconf(_SC_PAGESIZE))),
        pages_((bytes.size() + page_ - 1) / page_),
        mapping_((pages_ + 1) * page_),
        data_(mapping_.data() + pages_ * page_ - bytes.size()) {
    std::ranges::copy(bytes, data_);
    EXPECT_EQ(::mprotect(mapping_.data() + pages_ * page_, page_, PROT_NONE), 0);
  }
  std::byte* data() const { return data_; }

 private:
  size_t page_;
  size_t pages_;
  Mapping mapping_;
  std::byte* data_;
};

template <typename T>
std::span<const std::byte> BytesOf(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

using MemoryTest = KernelFormatTest;
INSTANTIATE_TEST_SUITE_P(All, MemoryTest, EveryKernelAndFormat(), KernelFormatName);

// A32, A33, A05, lesson 2: not a byte is read behind the last slot, the query or the indices, and
// none is written behind the outputs.
TEST_P(MemoryTest, NothingIsTouchedBehindTheLastByteOfAnyArray) {
  for (const auto& [latent, rope] :
       std::vector<std::pair<int32_t, int32_t>>{{512, 64}, {512, 0}, {33, 0}, {34, 9}, {9, 4}}) {
    for (const int32_t heads : {1, 5, 16}) {
      for (const bool split : {false, true}) {
        AttentionSpec spec = ForFormat(
            {.dims = {.num_heads = heads, .kv_lora_rank = latent, .qk_rope_head_dim = rope},
             .row_lengths = {1, 19, 3},
             .spare_rows = 0,
             .num_slots = 40,
             .split_query = split},
            format());
        if (!backend().UnsupportedReason(ProblemOf(spec)).empty()) continue;
        AttentionCase attention(spec);
        const int32_t last = spec.num_slots - 1;
        std::memcpy(attention.Slot(last), attention.Slot(attention.live_slots[0]),
                    static_cast<size_t>(attention.row_stride_bytes));
        for (auto& row : attention.rows) row.back() = last;
        const Outputs outputs = attention.MakeOutputs();
        const auto plan = MakePlan(attention, {.force_splits = 2});
        ASSERT_TRUE(plan.ok());
        const BeforeGuardPage cache(BytesOf(attention.cache));
        const BeforeGuardPage query(BytesOf(attention.query));
        const BeforeGuardPage query_rope(BytesOf(attention.query_rope));
        const BeforeGuardPage indices(BytesOf(attention.KvIndices()));
        const BeforeGuardPage out(outputs.bytes());
        const BeforeGuardPage lse(outputs.lse_bytes());
        const GuardedBuffer scratch(backend().AttentionWorkspaceBytes(plan.value().capacity()));
        AttentionParams params = attention.Params(outputs);
        params.kv_cache.data = cache.data();
        (split ? params.query.ql_nope : params.query.q).data = query.data();
        if (split) params.query.q_pe.data = query_rope.data();
        params.kv_indices = {reinterpret_cast<const int32_t*>(indices.data()),
                             params.kv_indices.size()};
        params.out.data = out.data();
        params.lse.data = reinterpret_cast<float*>(lse.data());
        ASSERT_TRUE(Attention(backend(), params, plan.value(), scratch.workspace()).ok());
        ASSERT_TRUE(Merge(backend(), {.partials = PlanPartials(plan.value(), scratch.workspace()),
                                      .out = params.out,
                                      .lse = params.lse})
                        .ok());
        const trace::Answers got = {
            {params.out.data, params.out.dtype, params.out.shape, params.out.strides},
            {params.lse.data, params.lse.shape, params.lse.strides}};
        EXPECT_EQ(trace::CompareAnswers(got, Expected(attention).answers(), attention.num_tokens(),
                                        trace::ToleranceFor(format(), spec.out_dtype))
                      .first_mismatch,
                  "")
            << latent << " + " << rope << ", " << heads << " heads";
      }
    }
  }
}

// Lesson 3: rows of a cache at `stride` bytes, the last ones far behind 2^31 elements and 4 GiB,
// have the bits of the same rows in a small cache.
void ExpectFarRowsLikeNearOnes(const Backend& backend, CacheFormat format, int64_t stride,
                               int32_t num_slots) {
  AttentionSpec spec = ForFormat({.row_lengths = {1, 40, 7}, .num_slots = 64}, format);
  const AttentionCase near(spec);
  Outputs want = near.MakeOutputs();
  ASSERT_TRUE(RunAttention(backend, near, {.force_splits = 2}, want).ok());

  const Mapping mapping(static_cast<size_t>(num_slots) * static_cast<size_t>(stride));
  if (!mapping.ok()) GTEST_SKIP() << "the address space is limited";
  AttentionCase far = near;
  const auto moved = [&](int32_t slot) { return num_slots - 1 - slot * 5; };
  for (const int32_t slot : near.live_slots) {
    std::memcpy(mapping.data() + moved(slot) * stride, far.Slot(slot),
                static_cast<size_t>(near.row_stride_bytes));
  }
  for (auto& row : far.rows) std::ranges::transform(row, row.begin(), moved);
  Outputs got = far.MakeOutputs();
  const auto plan = MakePlan(far, {.force_splits = 2});
  ASSERT_TRUE(plan.ok());
  const GuardedBuffer scratch(backend.AttentionWorkspaceBytes(plan.value().capacity()));
  AttentionParams params = far.Params(got);
  params.kv_cache.data = mapping.data();
  params.kv_cache.num_slots = num_slots;
  params.kv_cache.row_stride_bytes = stride;
  ASSERT_TRUE(Attention(backend, params, plan.value(), scratch.workspace()).ok());
  ASSERT_TRUE(Merge(backend, {.partials = PlanPartials(plan.value(), scratch.workspace()),
                              .out = params.out,
                              .lse = params.lse})
                  .ok());
  EXPECT_TRUE(SameBits(got, want)) << "stride " << stride << ", " << num_slots << " slots";
}

TEST_P(MemoryTest, CacheRowsBeyond2To31ElementsAnd4GiBAreFound) {
  AttentionSpec spec = ForFormat({}, format());
  const int64_t packed = CacheRowBytes(format(), spec.dims);
  // Packed rows, more than 2^31 elements and 8 GiB in all; then few rows that lie far apart.
  const auto slots = static_cast<int32_t>((int64_t{9} << 30) / packed);
  ExpectFarRowsLikeNearOnes(backend(), format(), packed, slots);
  ExpectFarRowsLikeNearOnes(backend(), format(), int64_t{1} << 24, 700);
}

using AddressTest = KernelTest;
INSTANTIATE_TEST_SUITE_P(All, AddressTest, EveryKernel(), KernelName);

// Lesson 3: rows of the query and of the outputs 2^31 and more elements apart.
TEST_P(AddressTest, QueriesAndOutputsFarApartAreFound) {
  const AttentionCase attention({.row_lengths = {9, 20, 3}, .spare_rows = 0});
  Outputs want = attention.MakeOutputs();
  ASSERT_TRUE(RunAttention(backend(), attention, {.force_splits = 2}, want).ok());
  constexpr int64_t kStride = (int64_t{1} << 31) + 64;  // elements
  const Mapping query(2 * 3 * kStride);
  const Mapping out(2 * 3 * kStride);
  const Mapping lse(4 * 3 * kStride);
  if (!query.ok() || !out.ok() || !lse.ok()) GTEST_SKIP() << "the address space is limited";
  const size_t row_bytes = attention.query.size() / 3;
  for (int64_t row = 0; row < 3; ++row) {
    std::memcpy(query.data() + 2 * row * kStride,
                attention.query.data() + static_cast<size_t>(row) * row_bytes, row_bytes);
  }
  AttentionParams params = attention.Params(want);
  params.query.q.data = query.data();
  params.query.q.strides[0] = kStride;
  params.out.data = out.data();
  params.out.strides[0] = kStride;
  params.lse = {reinterpret_cast<float*>(lse.data()), params.lse.shape, {kStride, 1}};
  const auto plan = MakePlan(attention, {.force_splits = 2});
  ASSERT_TRUE(plan.ok());
  const GuardedBuffer scratch(backend().AttentionWorkspaceBytes(plan.value().capacity()));
  ASSERT_TRUE(Attention(backend(), params, plan.value(), scratch.workspace()).ok());
  ASSERT_TRUE(Merge(backend(), {.partials = PlanPartials(plan.value(), scratch.workspace()),
                                .out = params.out,
                                .lse = params.lse})
                  .ok());
  const trace::Answers got = {
      {params.out.data, params.out.dtype, params.out.shape, params.out.strides},
      {params.lse.data, params.lse.shape, params.lse.strides}};
  EXPECT_EQ(trace::CompareAnswers(got, want.answers(), 3, {0.0, 0.0, 0.0, 0.0}).first_mismatch, "");
}

TEST_P(AddressTest, TopkRowsFarApartAreFound) {
  constexpr int64_t kStride = (int64_t{1} << 31) + 16;  // elements
  const Mapping topk(4 * 2 * kStride);
  if (!topk.ok()) GTEST_SKIP() << "the address space is limited";
  auto* const positions = reinterpret_cast<int32_t*>(topk.data());
  positions[0] = 3;
  positions[kStride] = 4;
  positions[kStride + 1] = 5;
  const int32_t block = 2;
  const int32_t req_ids[] = {0, 0};
  const int32_t kv_indptr[] = {0, 1, 3};
  int32_t slots[3] = {};
  ASSERT_TRUE(ConvertIndices(backend(), {.topk_indices = {positions, {2, 2}, {kStride, 1}},
                                         .block_table = {.blocks = {&block, {1, 1}, {1, 1}},
                                                         .block_size = 8,
                                                         .num_blocks = 3},
                                         .req_id_per_token = req_ids,
                                         .kv_indptr = kv_indptr,
                                         .kv_indices = slots})
                  .ok());
  EXPECT_EQ(slots[0], 19);
  EXPECT_EQ(slots[1], 20);
  EXPECT_EQ(slots[2], 21);
}

// A59: the size asked for once is enough for every smaller step.
TEST_P(AddressTest, TheWorkspaceOfACapacityIsEnoughForEverySmallerStep) {
  const PlanCapacity capacity = {
      .num_compute_units = 32,
      .max_num_tokens = 12,
      .max_num_reqs = 12,
      .topk_tokens = 600,
      .dims = {.num_heads = 6, .kv_lora_rank = 32, .qk_rope_head_dim = 8}};
  for (const int32_t max_splits : {0, -1, 3}) {
    PlanCapacity limits = capacity;
    limits.max_splits = max_splits;
    auto plan = Plan::Create(limits);
    ASSERT_TRUE(plan.ok());
    const GuardedBuffer scratch(backend().AttentionWorkspaceBytes(limits));
    for (uint32_t seed = 1; seed <= 12; ++seed) {
      std::mt19937 random(seed);
      AttentionSpec spec = {.dims = {.num_heads = 1 + static_cast<int32_t>(random() % 6),
                                     .kv_lora_rank = 32,
                                     .qk_rope_head_dim = 8},
                            .row_lengths = {}};
      for (uint32_t r = 0; r <= seed % 12; ++r) {
        spec.row_lengths.push_back(static_cast<int32_t>(random() % 601));
      }
      const AttentionCase attention(spec);
      std::vector<int32_t> query_start_loc(1, 0);
      for (size_t r = 0; r < attention.rows.size(); ++r) {
        query_start_loc.push_back(static_cast<int32_t>(r) + 1);
      }
      ASSERT_TRUE(plan->Build({.query_start_loc = query_start_loc,
                               .seq_lens = spec.row_lengths,
                               .dims = spec.dims,
                               .topk_tokens = 600})
                      .ok());
      Outputs got = attention.MakeOutputs();
      const AttentionParams params = attention.Params(got);
      ASSERT_TRUE(Attention(backend(), params, plan.value(), scratch.workspace()).ok());
      ASSERT_TRUE(Merge(backend(), {.partials = PlanPartials(plan.value(), scratch.workspace()),
                                    .out = params.out,
                                    .lse = params.lse})
                      .ok());
      ASSERT_TRUE(scratch.GuardIntact()) << "seed " << seed;
      EXPECT_EQ(trace::CompareAnswers(got.answers(), Expected(attention).answers(),
                                      attention.num_tokens(),
                                      trace::ToleranceFor(spec.cache_format, spec.out_dtype))
                    .first_mismatch,
                "")
          << "seed " << seed;
    }
  }
}

TEST_P(AddressTest, AWorkspaceTooSmallOrNotAlignedIsAnErrorAndNothingIsWritten) {
  const AttentionCase attention({.row_lengths = {300, 20}});
  const auto plan = MakePlan(attention, {.force_splits = 4});
  ASSERT_TRUE(plan.ok());
  const size_t needed = backend().AttentionWorkspaceBytes(plan.value().capacity());
  const GuardedBuffer scratch(needed + 64);
  const Outputs got = attention.MakeOutputs();
  const AttentionParams params = attention.Params(got);
  const Status small = Attention(backend(), params, plan.value(), {scratch.data(), needed - 1});
  EXPECT_EQ(small.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(small.message().find(std::to_string(needed)), std::string::npos) << small.message();
  const Status shifted = Attention(backend(), params, plan.value(), {scratch.data() + 4, needed});
  EXPECT_EQ(shifted.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(got.UntouchedFrom(0));
}

// A55: after the first call no stage allocates, on any of its threads.
TEST_P(AddressTest, ARunAllocatesNothing) {
  const AttentionCase attention({.row_lengths = {300, 20, 0, 64}, .sinks = SinkKind::kFinite});
  const auto plan = MakePlan(attention, {.force_splits = 3});
  ASSERT_TRUE(plan.ok());
  const auto bytes = WorkspaceBytes(backend(), plan.value().capacity(), 310);
  ASSERT_TRUE(bytes.ok());
  const GuardedBuffer scratch(bytes.value());
  const Outputs got = attention.MakeOutputs();
  const std::vector<int32_t> topk(4 * 310, 5);
  const std::vector<int32_t> blocks(4 * 20, 1);
  const SparseMlaParams params = {
      .topk_indices = View<const int32_t, 2>::Contiguous(topk.data(), {4, 310}),
      .block_table = {.blocks = View<const int32_t, 2>::Contiguous(blocks.data(), {4, 20}),
                      .block_size = 16,
                      .num_blocks = 12},
      .attention = attention.Params(got)};
  ASSERT_TRUE(SparseMla(backend(), params, plan.value(), scratch.workspace()).ok());
  const int64_t before = NumAllocations();
  bool ok = true;
  for (int repeat = 0; repeat < 20; ++repeat) {
    ok = ok && SparseMla(backend(), params, plan.value(), scratch.workspace()).ok();
  }
  EXPECT_EQ(NumAllocations() - before, 0);
  EXPECT_TRUE(ok);
}

}  // namespace
}  // namespace sparsemla::test
