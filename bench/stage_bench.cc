// The memory-bound stages of the CPU back end: k-pool fitting, index conversion, merge. Each row
// states its bytes a second, read and written, and its share of what a plain copy of as many bytes
// moves on the same threads, timed in turns with it.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "core/numeric.h"
#include "cpu/parallel_for.h"
#include "cpu/thread_pool.h"
#include "sparsemla/attention.h"

namespace sparsemla::bench {
namespace {

constexpr int32_t kTopk = 2048;

double Seconds(const std::function<void()>& function) {
  const auto begin = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<int64_t>(values.size() / 2));
  return values[values.size() / 2];
}

// Copies half of `bytes` to the other half, all threads at once, so that it moves `bytes` in all.
class Copier {
 public:
  Copier(int64_t bytes, int32_t num_threads)
      : half_(std::max<int64_t>(bytes / 2, kChunk)),
        source_(static_cast<size_t>(half_), std::byte{1}),
        target_(static_cast<size_t>(half_)),
        pool_(std::move(cpu::ThreadPool::Create(num_threads)).value()) {}

  void Copy() {
    const Executor executor = pool_->executor();
    const auto chunks = static_cast<int32_t>((half_ + kChunk - 1) / kChunk);
    std::ignore = cpu::ParallelFor(executor, chunks, [this](int32_t chunk) {
      const int64_t begin = chunk * kChunk;
      std::memcpy(target_.data() + begin, source_.data() + begin,
                  static_cast<size_t>(std::min(kChunk, half_ - begin)));
    });
    benchmark::ClobberMemory();
  }

 private:
  static constexpr int64_t kChunk = 64 << 10;
  int64_t half_;
  std::vector<std::byte> source_;
  std::vector<std::byte> target_;
  std::unique_ptr<cpu::ThreadPool> pool_;
};

// Times `stage` and the copy in turns of a few milliseconds, so that both see the same machine.
void TimeBesideCopy(benchmark::State& state, int64_t bytes, int32_t num_threads,
                    const std::function<void()>& stage) {
  Copier copier(bytes, num_threads);
  const int64_t repeats = std::max<int64_t>(1, (int64_t{32} << 20) / std::max<int64_t>(bytes, 1));
  const auto turn = [&](const std::function<void()>& function) {
    function();  // brings its data where it stays
    return Seconds([&] {
             for (int64_t i = 0; i < repeats; ++i) function();
           }) /
           static_cast<double>(repeats);
  };
  std::vector<double> stage_seconds;
  std::vector<double> copy_seconds;
  for (auto _ : state) {
    stage_seconds.push_back(turn(stage));
    copy_seconds.push_back(turn([&] { copier.Copy(); }));
    state.SetIterationTime(stage_seconds.back());
  }
  const double seconds = Median(stage_seconds);
  const double copy = Median(copy_seconds);
  state.counters["us"] = seconds * 1e6;
  state.counters["GB/s"] = static_cast<double>(bytes) / seconds * 1e-9;
  state.counters["copy_GB/s"] = static_cast<double>(bytes) / copy * 1e-9;
  state.counters["of_copy"] = copy / seconds;
}

std::unique_ptr<Backend> MakeBackend(benchmark::State& state, const std::string& kernel,
                                     int32_t num_threads) {
  auto backend = CreateBackend("cpu", {.kernel = kernel, .num_threads = num_threads});
  if (backend.ok()) return std::move(backend).value();
  state.SkipWithError(backend.status().message().c_str());
  return nullptr;
}

struct StageCase {
  std::string kernel;  // whose instruction sets the stages use
  int32_t num_threads = 1;
};

void BM_FitKpool(benchmark::State& state, const StageCase& where, int32_t num_tokens) {
  constexpr int64_t kWidth = 2 * kTopk;
  const auto backend = MakeBackend(state, where.kernel, where.num_threads);
  if (backend == nullptr) return;
  std::vector<int32_t> topk(static_cast<size_t>(num_tokens * kWidth), -1);
  std::vector<int32_t> fitted(static_cast<size_t>(num_tokens) * kTopk);
  std::mt19937 random(1);
  for (int64_t t = 0; t < num_tokens; ++t) {  // full history, tails of any length
    int32_t* const row = topk.data() + t * kWidth;
    std::iota(row, row + kTopk, 0);
    std::iota(row + kTopk, row + kTopk + random() % kTopk, kTopk);
  }
  const FitKpoolIndicesParams params = {
      .topk_indices = View<const int32_t, 2>::Contiguous(topk.data(), {num_tokens, kWidth}),
      .topk_tokens = kTopk,
      .fitted = View<int32_t, 2>::Contiguous(fitted.data(), {num_tokens, kTopk})};
  TimeBesideCopy(state, static_cast<int64_t>(topk.size() + fitted.size()) * 4, where.num_threads,
                 [&] {
                   const auto result = FitKpoolIndices(*backend, params);
                   if (!result.ok()) state.SkipWithError(result.status().message().c_str());
                 });
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (std::count(fitted.begin() + t * kTopk, fitted.begin() + (t + 1) * kTopk, -1) != 0) {
      return state.SkipWithError("a full row was not filled");
    }
  }
}

void BM_ConvertIndices(benchmark::State& state, const StageCase& where, int32_t num_tokens,
                       int32_t block_size) {
  constexpr int32_t kBlocks = 4096;
  constexpr int32_t kReqs = 16;
  const auto backend = MakeBackend(state, where.kernel, where.num_threads);
  if (backend == nullptr) return;
  std::mt19937 random(1);
  std::vector<int32_t> blocks(size_t{kReqs} * kBlocks);
  for (int32_t& block : blocks) block = static_cast<int32_t>(random() % kBlocks);
  std::vector<int32_t> topk(static_cast<size_t>(num_tokens) * kTopk);
  std::uniform_int_distribution<int32_t> position(0, 32767);
  for (int32_t& p : topk) p = position(random);
  std::vector<int32_t> req_ids(static_cast<size_t>(num_tokens));
  for (int32_t& req : req_ids) req = static_cast<int32_t>(random() % kReqs);
  std::vector<int32_t> kv_indptr(static_cast<size_t>(num_tokens) + 1);
  for (size_t t = 0; t < kv_indptr.size(); ++t) kv_indptr[t] = static_cast<int32_t>(t) * kTopk;
  std::vector<int32_t> slots(topk.size());
  const ConvertIndicesParams params = {
      .topk_indices = View<const int32_t, 2>::Contiguous(topk.data(), {num_tokens, kTopk}),
      .block_table = {.blocks = View<const int32_t, 2>::Contiguous(blocks.data(), {kReqs, kBlocks}),
                      .block_size = block_size,
                      .num_blocks = kBlocks},
      .req_id_per_token = req_ids,
      .kv_indptr = kv_indptr,
      .kv_indices = slots};
  TimeBesideCopy(state, static_cast<int64_t>(topk.size()) * 8, where.num_threads, [&] {
    const Status status = ConvertIndices(*backend, params);
    if (!status.ok()) state.SkipWithError(status.message().c_str());
  });
  for (size_t i = 0; i < topk.size(); ++i) {
    const auto row = static_cast<size_t>(req_ids[i / kTopk]) * kBlocks;
    const int32_t block = blocks[row + static_cast<size_t>(topk[i] / block_size)];
    if (slots[i] != block * block_size + topk[i] % block_size) {
      return state.SkipWithError("wrong slot");
    }
  }
}

struct MergeShape {
  int32_t num_rows = 1;    // rows that are split
  int32_t whole_rows = 0;  // behind every split row
  int32_t pieces = 4;
  int32_t num_heads = 128;
  DType out = DType::kBFloat16;

  std::string Name() const {
    return "merge/rows=" + std::to_string(num_rows) + "/whole=" + std::to_string(whole_rows) +
           "/pieces=" + std::to_string(pieces) + "/H=" + std::to_string(num_heads) + "/" +
           std::string(DTypeName(out));
  }
};

void BM_Merge(benchmark::State& state, const StageCase& where, const MergeShape& shape) {
  constexpr int32_t kRank = 512;
  const auto backend = MakeBackend(state, where.kernel, where.num_threads);
  if (backend == nullptr) return;
  const int64_t partials = int64_t{shape.num_rows} * shape.pieces;
  const int32_t total_rows = shape.num_rows * (1 + shape.whole_rows);
  const std::vector<float> out(static_cast<size_t>(partials * shape.num_heads * kRank), 0.5f);
  const std::vector<float> lse(static_cast<size_t>(partials * shape.num_heads), 3.0f);
  std::vector<int32_t> indptr = {0};
  std::vector<RowRange> rows;
  std::vector<int32_t> map(static_cast<size_t>(partials));
  std::iota(map.begin(), map.end(), 0);
  for (int32_t row = 0; row < total_rows; ++row) {
    indptr.push_back(indptr.back() + (row % (1 + shape.whole_rows) == 0 ? shape.pieces : 0));
    rows.push_back({row, row + 1});
  }
  const auto elements = static_cast<size_t>(total_rows) *  //
                        static_cast<size_t>(shape.num_heads * kRank);
  std::vector<std::byte> merged(elements * DTypeBytes(shape.out));
  const MergeParams params = {
      .partials = {.out = View<const float, 3>::Contiguous(out.data(),
                                                           {partials, shape.num_heads, kRank}),
                   .lse = View<const float, 2>::Contiguous(lse.data(), {partials, shape.num_heads}),
                   .reduce_indptr = indptr,
                   .reduce_final_map = rows,
                   .reduce_partial_map = map},
      .out = Tensor<3>::Contiguous(merged.data(), shape.out, {total_rows, shape.num_heads, kRank})};
  const auto written = static_cast<int64_t>(shape.num_rows) * shape.num_heads * kRank *
                       static_cast<int64_t>(DTypeBytes(shape.out));
  TimeBesideCopy(state, static_cast<int64_t>(out.size()) * 4 + written, where.num_threads, [&] {
    const Status status = Merge(*backend, params);
    if (!status.ok()) state.SkipWithError(status.message().c_str());
  });
  VisitDType(shape.out, [&]<typename T>() {
    const T* const got = reinterpret_cast<const T*>(merged.data());
    const int64_t row_elements = int64_t{shape.num_heads} * kRank;
    for (int64_t i = 0; i < row_elements; ++i) {  // the first row is always a split one
      if (ToFloat(got[i]) != 0.5f) {
        return state.SkipWithError("equal partials must merge to themselves");
      }
    }
  });
}

template <typename Function>
void Register(const std::string& name, const StageCase& where, const Function& function) {
  const std::string full_name =
      name + "/" + where.kernel + "/threads=" + std::to_string(where.num_threads);
  benchmark::RegisterBenchmark(full_name.c_str(),
                               [=](benchmark::State& state) { function(state, where); })
      ->Unit(benchmark::kMicrosecond)
      ->UseManualTime()
      ->Iterations(15);
}

const bool kRegistered = [] {
  for (const std::string kernel : {"", "attention_portable"}) {
    for (const int32_t num_threads : {1, 2}) {
      const StageCase where = {kernel, num_threads};
      for (const int32_t tokens : {1, 256, 8192}) {
        Register("fit_kpool/T=" + std::to_string(tokens), where,
                 [tokens](benchmark::State& state, const StageCase& c) {
                   BM_FitKpool(state, c, tokens);
                 });
        for (const int32_t block_size : {64, 61}) {
          Register("convert_indices/T=" + std::to_string(tokens) +
                       "/block_size=" + std::to_string(block_size),
                   where, [=](benchmark::State& state, const StageCase& c) {
                     BM_ConvertIndices(state, c, tokens, block_size);
                   });
        }
      }
      for (const MergeShape& shape :
           {MergeShape{.num_rows = 1, .pieces = 2}, MergeShape{.num_rows = 1, .pieces = 4},
            MergeShape{.num_rows = 1, .pieces = 8}, MergeShape{.num_rows = 1, .pieces = 16},
            MergeShape{.num_rows = 64, .pieces = 16, .num_heads = 16},
            MergeShape{.num_rows = 32, .pieces = 8}, MergeShape{.num_rows = 128, .pieces = 2},
            MergeShape{.num_rows = 32, .pieces = 8, .out = DType::kFloat16},
            MergeShape{.num_rows = 32, .pieces = 8, .out = DType::kFloat32},
            MergeShape{.num_rows = 1, .whole_rows = 8191, .pieces = 2, .num_heads = 8}}) {
        Register(shape.Name(), where, [shape](benchmark::State& state, const StageCase& c) {
          BM_Merge(state, c, shape);
        });
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace sparsemla::bench
