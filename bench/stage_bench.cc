// Index conversion and merge of the CPU back end, each checked after it was timed. Attention itself
// is measured by `sparsemla bench`.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "sparsemla/attention.h"

namespace sparsemla::bench {
namespace {

constexpr int32_t kTopk = 2048;

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

const bool kRegistered = [] {
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
