#include <algorithm>
#include <atomic>
#include <thread>

#include "core/require.h"
#include "tools/bench/call.h"
#include "trace/compare.h"

namespace sparsemla::bench {
namespace {

constexpr int32_t kHeadsPerPart = 16;  // `ref` takes its time, so the heads go to several threads

// What `ref` answers for one row.
struct Expected {
  int32_t row = 0;
  std::vector<float> out;  // [num_heads, kv_lora_rank]
  std::vector<float> lse;  // [num_heads]
};

// Heads [head_begin, + kHeadsPerPart) of a row.
struct Part {
  Expected* expected = nullptr;
  int32_t head_begin = 0;
  Status status = {};
};

ConstTensor<3> Slice(const ConstTensor<3>& tensor, int64_t row, int64_t head, int64_t num_heads) {
  ConstTensor<3> slice = tensor;
  slice.data = static_cast<const std::byte*>(tensor.data) +
               (row * tensor.strides[0] + head * tensor.strides[1]) *
                   static_cast<int64_t>(DTypeBytes(tensor.dtype));
  slice.shape = {1, num_heads, tensor.shape[2]};
  return slice;
}

// A plan for one row of `num_keys` keys.
Result<Plan> OneRowPlan(const Plan& plan, const MlaDims& dims, int32_t num_keys) {
  auto single = Plan::Create({.num_compute_units = 1,
                              .max_num_tokens = 1,
                              .max_num_reqs = 1,
                              .topk_tokens = num_keys,
                              .dims = dims});
  if (!single.ok()) return single;
  const int32_t query_start_loc[] = {0, 1};
  const int32_t seq_lens[] = {num_keys};
  const auto built = single->Build({.query_start_loc = query_start_loc,
                                    .seq_lens = seq_lens,
                                    .dims = dims,
                                    .q_dtype = plan.q_dtype(),
                                    .cache_format = plan.cache_format(),
                                    .topk_tokens = num_keys});
  if (!built.ok()) return built.status();
  return single;
}

Status RunPart(const Call& call, const Backend& ref, const Part& part) {
  const Plan& plan = call.plan();
  const AttentionParams& params = call.params();
  Expected& expected = *part.expected;
  MlaDims dims = plan.dims();
  dims.num_heads = std::min(kHeadsPerPart, dims.num_heads - part.head_begin);
  const auto row = static_cast<size_t>(expected.row);
  const int32_t kv_begin = plan.kv_indptr()[row];
  const int32_t num_keys = plan.kv_indptr()[row + 1] - kv_begin;
  const auto single = OneRowPlan(plan, dims, num_keys);
  if (!single.ok()) return single.status();
  const replay::Buffer<std::byte> workspace(
      static_cast<int64_t>(ref.AttentionWorkspaceBytes(single.value().capacity())));
  AttentionParams wanted = params;
  wanted.query.q = Slice(params.query.q, expected.row, part.head_begin, dims.num_heads);
  wanted.kv_indices =
      params.kv_indices.subspan(static_cast<size_t>(kv_begin), static_cast<size_t>(num_keys));
  wanted.out =
      Tensor<3>::Contiguous(expected.out.data() + int64_t{part.head_begin} * dims.kv_lora_rank,
                            DType::kFloat32, {1, dims.num_heads, dims.kv_lora_rank});
  wanted.lse =
      View<float, 2>::Contiguous(expected.lse.data() + part.head_begin, {1, dims.num_heads});
  return Attention(ref, wanted, single.value(), {workspace.data(), workspace.bytes()});
}

// Recomputes the rows on all cores.
Status RunRef(const Call& call, std::vector<Expected>& rows) {
  const auto ref = CreateBackend("ref");
  if (!ref.ok()) return ref.status();
  std::vector<Part> parts;
  for (Expected& expected : rows) {
    for (int32_t head = 0; head < call.plan().dims().num_heads; head += kHeadsPerPart) {
      parts.push_back({.expected = &expected, .head_begin = head});
    }
  }
  std::atomic<size_t> next = 0;
  {
    std::vector<std::jthread> threads;
    const size_t num_threads = std::max(1u, std::thread::hardware_concurrency());
    for (size_t i = 0; i < std::min(num_threads, parts.size()); ++i) {
      threads.emplace_back([&] {
        for (size_t p = next++; p < parts.size(); p = next++) {
          parts[p].status = RunPart(call, *ref.value(), parts[p]);
        }
      });
    }
  }
  for (const Part& part : parts) SPARSEMLA_RETURN_IF_ERROR(part.status);
  return {};
}

void Compare(const Call& call, const Expected& expected, CheckOutcome& outcome) {
  const Tensor<3>& out = call.params().out;
  const int64_t heads = out.shape[1];
  const auto tolerance = trace::ToleranceFor(call.plan().cache_format(), out.dtype);
  const trace::Comparison comparison = trace::CompareAnswers(
      {.out = Slice({out.data, out.dtype, out.shape, out.strides}, expected.row, 0, heads),
       .lse = View<const float, 2>::Contiguous(&call.params().lse(expected.row, 0), {1, heads})},
      {.out = ConstTensor<3>::Contiguous(expected.out.data(), DType::kFloat32,
                                         {1, heads, out.shape[2]}),
       .lse = View<const float, 2>::Contiguous(expected.lse.data(), {1, heads})},
      1, tolerance);
  outcome.worst_error =
      std::max({outcome.worst_error, comparison.worst_out / tolerance.out_relative,
                comparison.worst_lse / tolerance.lse_absolute});
  if (comparison.ok() || !outcome.mismatch.empty()) return;
  // The comparison saw a single token; only what follows its number is of use.
  const std::string& text = comparison.first_mismatch;
  outcome.mismatch = StrCat("token ", expected.row, text.starts_with("lse") ? ", lse, " : ", ",
                            text.substr(text.find("head")));
}

}  // namespace

Result<CheckOutcome> CheckAgainstRef(const Call& call) {
  const Tensor<3>& out = call.params().out;
  const auto heads = static_cast<size_t>(out.shape[1]);
  const int32_t last_row = call.plan().num_tokens() - 1;
  std::vector<Expected> rows;
  for (const int32_t row : {0, last_row / 2, last_row}) {
    if (!rows.empty() && rows.back().row == row) continue;
    rows.push_back({.row = row,
                    .out = std::vector<float>(heads * static_cast<size_t>(out.shape[2])),
                    .lse = std::vector<float>(heads)});
  }
  SPARSEMLA_RETURN_IF_ERROR(RunRef(call, rows));
  CheckOutcome outcome = {.num_rows = static_cast<int32_t>(rows.size())};
  for (const Expected& expected : rows) Compare(call, expected, outcome);
  return outcome;
}

}  // namespace sparsemla::bench
