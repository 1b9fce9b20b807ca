// Attention, index conversion and merge of the CPU back end. Every row is checked against `ref`
// before it is timed, and states its share of the multiply-add rate measured right before it.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/fma_peak.h"
#include "core/numeric.h"
#include "cpu/kernels.h"
#include "sparsemla/attention.h"

namespace sparsemla::bench {
namespace {

constexpr int32_t kTopk = 2048;
constexpr int64_t kColdCacheBytes = int64_t{256} << 20;  // well beyond any L3 of interest
constexpr float kCheckTolerance = 6e-3f;                 // bf16 outputs

struct AttentionCase {
  std::string kernel;
  int32_t num_tokens = 1;
  int32_t num_heads = 128;
  CacheFormat format = CacheFormat::kBFloat16;
  bool cold = false;
  int32_t num_threads = 1;
  // All tokens are one request, whose rows have so much of their slots in common, and no slot
  // twice; -1: every token is a request, with slots at random.
  int32_t percent_in_common = -1;

  std::string Name() const {
    return "attention/" + kernel + "/T=" + std::to_string(num_tokens) +
           "/H=" + std::to_string(num_heads) + "/topk=" + std::to_string(kTopk) + "/" +
           std::string(CacheFormatName(format)) + (cold ? "/cold" : "/hot") +
           (percent_in_common < 0 ? "" : "/common=" + std::to_string(percent_in_common) + "%") +
           "/threads=" + std::to_string(num_threads);
  }
};

// 64-byte aligned bytes.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : memory_(bytes + 64) {}
  template <typename T = std::byte>
  T* data() {
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
  }

 private:
  std::vector<std::byte> memory_;
};

DType ElementType(CacheFormat format) {
  switch (format) {
    case CacheFormat::kFloat32:
      return DType::kFloat32;
    case CacheFormat::kFloat16:
      return DType::kFloat16;
    case CacheFormat::kFp8E4M3:
      return DType::kFloat8E4M3;
    case CacheFormat::kFp8E4M3Fnuz:
      return DType::kFloat8E4M3Fnuz;
    default:
      return DType::kBFloat16;
  }
}

void FillRandom(DType dtype, std::byte* data, int64_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  VisitDType(dtype, [&]<typename T>() {
    for (int64_t i = 0; i < count; ++i) {
      const T element = FromFloat<T>(uniform(random));
      std::memcpy(data + i * static_cast<int64_t>(sizeof(T)), &element, sizeof(T));
    }
  });
}

// One random row, in any format.
void FillRow(CacheFormat format, const MlaDims& dims, std::byte* row, std::mt19937& random) {
  if (format != CacheFormat::kFp8DsMla) {
    return FillRandom(ElementType(format), row, dims.head_dim_qk(), random);
  }
  FillRandom(DType::kFloat8E4M3, row, 512, random);
  const float scales[4] = {0.5f, 1.0f, 1.5f, 2.0f};
  std::memcpy(row + 512, scales, sizeof(scales));
  FillRandom(DType::kBFloat16, row + 528, 64, random);
}

// Inputs and outputs of one attention call.
class AttentionFixture {
 public:
  explicit AttentionFixture(const AttentionCase& parameters)
      : parameters_(parameters),
        dims_{.num_heads = parameters.num_heads},
        row_bytes_(CacheRowBytes(parameters.format, dims_)),
        num_slots_(parameters.cold ? kColdCacheBytes / row_bytes_ : kTopk),
        num_index_rows_(parameters.cold ? 64 : parameters.num_tokens),
        cache_(static_cast<size_t>(num_slots_ * row_bytes_)),
        query_(QueryElements() * 2),
        out_(OutElements() * 2),
        lse_(static_cast<size_t>(parameters.num_tokens * parameters.num_heads)) {
    std::mt19937 random(1);
    const int64_t distinct = std::min<int64_t>(num_slots_, kTopk);
    for (int64_t slot = 0; slot < distinct; ++slot) {
      FillRow(parameters.format, dims_, cache_.data() + slot * row_bytes_, random);
    }
    for (int64_t slot = distinct; slot < num_slots_; ++slot) {
      std::memcpy(cache_.data() + slot * row_bytes_, cache_.data() + slot % distinct * row_bytes_,
                  static_cast<size_t>(row_bytes_));
    }
    FillRandom(DType::kBFloat16, query_.data(), static_cast<int64_t>(QueryElements()), random);
    FillIndices(random);
  }

  PlanCapacity Capacity() const {
    // One worker leaves every row whole.
    return {.num_compute_units = parameters_.percent_in_common < 0 ? 32 : 1,
            .max_num_tokens = parameters_.num_tokens,
            .max_num_reqs = parameters_.num_tokens,
            .topk_tokens = kTopk,
            .dims = dims_};
  }

  PlanParams Step() {
    if (parameters_.percent_in_common >= 0) {
      starts_ = {0, parameters_.num_tokens};
    } else {
      starts_.resize(static_cast<size_t>(parameters_.num_tokens) + 1);
      std::iota(starts_.begin(), starts_.end(), 0);
    }
    seq_lens_.assign(starts_.size() - 1, 4 * kTopk);
    return {.query_start_loc = starts_,
            .seq_lens = seq_lens_,
            .dims = dims_,
            .cache_format = parameters_.format,
            .topk_tokens = kTopk};
  }

  // The next call's parameters: cold calls take other rows than the ones before.
  AttentionParams Next() {
    const auto size = static_cast<size_t>(parameters_.num_tokens) * kTopk;
    if (next_ + size > indices_.size()) next_ = 0;
    const std::span<const int32_t> indices(indices_.data() + next_, size);
    next_ += size;
    const int64_t tokens = parameters_.num_tokens;
    const int64_t heads = parameters_.num_heads;
    return {
        .query = {.q = ConstTensor<3>::Contiguous(query_.data(), DType::kBFloat16,
                                                  {tokens, heads, dims_.head_dim_qk()})},
        .kv_cache = {.data = cache_.data(), .format = parameters_.format, .num_slots = num_slots_},
        .kv_indices = indices,
        .softmax_scale = 0.05f,
        .q_scale = IsPerTensorFp8(parameters_.format) ? 0.01f : 1.0f,
        .out = Tensor<3>::Contiguous(out_.data(), DType::kBFloat16,
                                     {tokens, heads, dims_.kv_lora_rank}),
        .lse = View<float, 2>::Contiguous(lse_.data(), {tokens, heads})};
  }

  const BFloat16* out() { return out_.data<BFloat16>(); }
  size_t OutElements() const {
    return static_cast<size_t>(parameters_.num_tokens) *
           static_cast<size_t>(parameters_.num_heads * dims_.kv_lora_rank);
  }
  double Flop() const {
    return 2.0 * parameters_.num_tokens * parameters_.num_heads * kTopk *
           (2.0 * dims_.kv_lora_rank + dims_.qk_rope_head_dim);
  }
  double CacheBytes() const {
    return static_cast<double>(parameters_.num_tokens) * kTopk * static_cast<double>(row_bytes_);
  }

 private:
  size_t QueryElements() const {
    return static_cast<size_t>(parameters_.num_tokens) *
           static_cast<size_t>(parameters_.num_heads * dims_.head_dim_qk());
  }
  void FillIndices(std::mt19937& random) {
    indices_.resize(static_cast<size_t>(num_index_rows_) * kTopk);
    if (parameters_.percent_in_common >= 0) return FillIndicesInCommon(random);
    std::uniform_int_distribution<int32_t> slot(0, static_cast<int32_t>(num_slots_) - 1);
    for (int32_t& index : indices_) index = slot(random);
  }

  void FillIndicesInCommon(std::mt19937& random) {
    std::vector<int32_t> slots(static_cast<size_t>(num_slots_));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    const int64_t in_common = int64_t{kTopk} * parameters_.percent_in_common / 100;
    auto own = slots.begin() + in_common;
    for (auto row = indices_.begin(); row != indices_.end(); row += kTopk) {
      std::copy(slots.begin(), slots.begin() + in_common, row);
      std::copy_n(own, kTopk - in_common, row + in_common);
      std::shuffle(row, row + kTopk, random);
      own += kTopk - in_common;
    }
  }

  AttentionCase parameters_;
  MlaDims dims_;
  int64_t row_bytes_;
  int64_t num_slots_;
  int64_t num_index_rows_;
  Buffer cache_;
  Buffer query_;
  Buffer out_;
  std::vector<float> lse_;
  std::vector<int32_t> indices_;
  size_t next_ = 0;
  std::vector<int32_t> starts_;
  std::vector<int32_t> seq_lens_;
};

Status RunAttention(const Backend& backend, const AttentionParams& params, const Plan& plan,
                    Workspace workspace) {
  const Status status = Attention(backend, params, plan, workspace);
  if (!status.ok()) return status;
  return Merge(backend,
               {.partials = PlanPartials(plan, workspace), .out = params.out, .lse = params.lse});
}

// Empty if a call of the fixture gives what `ref` gives.
std::string CheckAgainstRef(const Backend& backend, AttentionFixture& fixture, const Plan& plan,
                            Workspace workspace) {
  auto ref = CreateBackend("ref");
  if (!ref.ok()) return ref.status().message();
  Buffer ref_memory(ref.value()->AttentionWorkspaceBytes(plan.capacity()));
  const AttentionParams params = fixture.Next();
  Status status = RunAttention(backend, params, plan, workspace);
  if (!status.ok()) return status.message();
  const std::vector<BFloat16> ours(fixture.out(), fixture.out() + fixture.OutElements());
  status = RunAttention(*ref.value(), params, plan,
                        {ref_memory.data(), ref.value()->AttentionWorkspaceBytes(plan.capacity())});
  if (!status.ok()) return status.message();
  double error = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < ours.size(); ++i) {
    const double expected = ToFloat(fixture.out()[i]);
    error += std::pow(ToFloat(ours[i]) - expected, 2);
    norm += expected * expected;
  }
  return std::sqrt(error) <= kCheckTolerance * std::sqrt(norm) ? "" : "differs from ref";
}

void BM_Attention(benchmark::State& state, const AttentionCase& parameters) {
  auto backend =
      CreateBackend("cpu", {.kernel = parameters.kernel, .num_threads = parameters.num_threads});
  if (!backend.ok()) return state.SkipWithError(backend.status().message().c_str());
  AttentionFixture fixture(parameters);
  auto plan = Plan::Create(fixture.Capacity());
  if (!plan.ok()) return state.SkipWithError(plan.status().message().c_str());
  const auto built = plan->Build(fixture.Step());
  if (!built.ok()) return state.SkipWithError(built.status().message().c_str());
  const size_t bytes = backend.value()->AttentionWorkspaceBytes(plan->capacity());
  Buffer memory(bytes);
  const Workspace workspace = {memory.data(), bytes};
  const std::string mismatch = CheckAgainstRef(*backend.value(), fixture, plan.value(), workspace);
  if (!mismatch.empty()) return state.SkipWithError(mismatch.c_str());

  const double peak = MeasureFmaPeak(parameters.kernel) * parameters.num_threads;
  for (auto _ : state) {
    const Status status = RunAttention(*backend.value(), fixture.Next(), plan.value(), workspace);
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
  }
  using benchmark::Counter;
  state.counters["FLOP/s"] = Counter(fixture.Flop(), Counter::kIsIterationInvariantRate);
  state.counters["bytes/s"] = Counter(fixture.CacheBytes(), Counter::kIsIterationInvariantRate);
  state.counters["of_fma_peak"] =
      Counter(fixture.Flop() / peak, Counter::kIsIterationInvariantRate);
}

void BM_FmaPeak(benchmark::State& state, const std::string& kernel) {
  double peak = 0.0;
  for (auto _ : state) peak = std::max(peak, MeasureFmaPeak(kernel));
  state.counters["FLOP/s"] = peak;
}

void BM_ConvertIndices(benchmark::State& state, int32_t num_tokens, int32_t block_size) {
  constexpr int32_t kBlocks = 4096;
  auto backend = CreateBackend("cpu", {.kernel = "", .num_threads = 1});
  if (!backend.ok()) return state.SkipWithError(backend.status().message().c_str());
  std::mt19937 random(1);
  std::vector<int32_t> blocks(kBlocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random);
  std::vector<int32_t> topk(static_cast<size_t>(num_tokens) * kTopk);
  std::uniform_int_distribution<int32_t> position(0, 8191);
  for (int32_t& p : topk) p = position(random);
  std::vector<int32_t> req_ids(static_cast<size_t>(num_tokens), 0);
  std::vector<int32_t> kv_indptr(static_cast<size_t>(num_tokens) + 1);
  for (size_t t = 0; t < kv_indptr.size(); ++t) kv_indptr[t] = static_cast<int32_t>(t) * kTopk;
  std::vector<int32_t> slots(topk.size());
  const ConvertIndicesParams params = {
      .topk_indices = View<const int32_t, 2>::Contiguous(topk.data(), {num_tokens, kTopk}),
      .block_table = {.blocks = View<const int32_t, 2>::Contiguous(blocks.data(), {1, kBlocks}),
                      .block_size = block_size,
                      .num_blocks = kBlocks},
      .req_id_per_token = req_ids,
      .kv_indptr = kv_indptr,
      .kv_indices = slots};
  for (auto _ : state) {
    const Status status = ConvertIndices(*backend.value(), params);
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
  }
  for (size_t i = 0; i < topk.size(); ++i) {
    const int32_t block = blocks[static_cast<size_t>(topk[i] / block_size)];
    if (slots[i] != block * block_size + topk[i] % block_size) {
      return state.SkipWithError("wrong slot");
    }
  }
  const auto entries = static_cast<int64_t>(topk.size());
  state.SetItemsProcessed(state.iterations() * entries);
  state.SetBytesProcessed(state.iterations() * entries * 8);
}

void BM_Merge(benchmark::State& state, int32_t num_rows, int32_t pieces, int32_t num_heads) {
  constexpr int32_t kRank = 512;
  auto backend = CreateBackend("cpu", {.kernel = "", .num_threads = 1});
  if (!backend.ok()) return state.SkipWithError(backend.status().message().c_str());
  const int64_t partials = int64_t{num_rows} * pieces;
  const std::vector<float> out(static_cast<size_t>(partials * num_heads * kRank), 0.5f);
  const std::vector<float> lse(static_cast<size_t>(partials * num_heads), 3.0f);
  std::vector<int32_t> indptr;
  std::vector<RowRange> rows;
  std::vector<int32_t> map(static_cast<size_t>(partials));
  std::iota(map.begin(), map.end(), 0);
  for (int32_t row = 0; row <= num_rows; ++row) indptr.push_back(row * pieces);
  for (int32_t row = 0; row < num_rows; ++row) rows.push_back({row, row + 1});
  std::vector<BFloat16> merged(static_cast<size_t>(num_rows) *
                               static_cast<size_t>(num_heads * kRank));
  const MergeParams params = {
      .partials = {.out =
                       View<const float, 3>::Contiguous(out.data(), {partials, num_heads, kRank}),
                   .lse = View<const float, 2>::Contiguous(lse.data(), {partials, num_heads}),
                   .reduce_indptr = indptr,
                   .reduce_final_map = rows,
                   .reduce_partial_map = map},
      .out = Tensor<3>::Contiguous(merged.data(), DType::kBFloat16, {num_rows, num_heads, kRank})};
  for (auto _ : state) {
    const Status status = Merge(*backend.value(), params);
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
  }
  for (const BFloat16 x : merged) {
    if (ToFloat(x) != 0.5f) return state.SkipWithError("equal partials must merge to themselves");
  }
  state.SetBytesProcessed(state.iterations() *
                          static_cast<int64_t>(out.size() * 4 + merged.size() * 2));
}

// One thread is timed by its own clock, so that a busy machine disturbs it less.
void RegisterAttention(const AttentionCase& parameters) {
  auto* const row = benchmark::RegisterBenchmark(
      parameters.Name().c_str(),
      [parameters](benchmark::State& state) { BM_Attention(state, parameters); });
  row->Unit(benchmark::kMicrosecond);
  if (parameters.num_threads > 1) row->UseRealTime();
}

const bool kRegistered = [] {
  for (const cpu::AttentionKernel& kernel : cpu::AttentionKernels()) {
    const std::string name(kernel.name);
    if (!cpu::UnavailableReason(kernel, cpu::DetectArch()).empty()) continue;
    benchmark::RegisterBenchmark(("fma_peak/" + name).c_str(),
                                 [name](benchmark::State& state) { BM_FmaPeak(state, name); });
    for (const int32_t heads : {128, 64, 32, 16, 8}) {
      RegisterAttention({.kernel = name, .num_heads = heads});
    }
    for (int32_t format = 0; format < kNumCacheFormats; ++format) {
      const auto cache_format = static_cast<CacheFormat>(format);
      for (const int32_t heads : {128, 16}) {
        RegisterAttention({.kernel = name,
                           .num_tokens = 4,
                           .num_heads = heads,
                           .format = cache_format,
                           .cold = true});
      }
      if (cache_format == CacheFormat::kBFloat16) continue;
      RegisterAttention({.kernel = name, .num_heads = 16, .format = cache_format});
    }
    for (const int32_t heads : {128, 16}) {
      RegisterAttention({.kernel = name, .num_heads = heads, .num_threads = 2});
    }
    if (kernel.run_group == nullptr) continue;
    for (const int32_t tokens : {2, 3, 64}) {
      for (const int32_t percent : {0, 25, 50, 60, 75, 90, 100}) {
        RegisterAttention({.kernel = name,
                           .num_tokens = tokens,
                           .num_heads = 16,
                           .cold = true,
                           .percent_in_common = percent});
      }
    }
  }
  for (const int32_t block_size : {64, 61}) {
    benchmark::RegisterBenchmark(
        ("convert_indices/T=256/topk=2048/block_size=" + std::to_string(block_size)).c_str(),
        [block_size](benchmark::State& state) { BM_ConvertIndices(state, 256, block_size); })
        ->Unit(benchmark::kMicrosecond);
  }
  for (const int32_t heads : {16, 128}) {
    benchmark::RegisterBenchmark(
        ("merge/rows=4/pieces=16/H=" + std::to_string(heads)).c_str(),
        [heads](benchmark::State& state) { BM_Merge(state, 4, 16, heads); })
        ->Unit(benchmark::kMicrosecond);
  }
  return true;
}();

}  // namespace
}  // namespace sparsemla::bench
