#include <algorithm>
#include <atomic>
#include <thread>

#include "core/require.h"
#include "tools/bench/call.h"
#include "trace/compare.h"

namespace sparsemla::bench {
namespace {

constexpr int32_t kHeadsPerPart = 16;  // `ref` takes its time, so the heads go to several threads

// Heads [head_begin, head_begin + plan heads) of one row, recomputed with `ref`.
struct Part {
  int32_t row = 0;
  int32_t head_begin = 0;
  CheckOutcome outcome = {};
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

Status CheckPart(const Call& call, const Backend& ref, Part& part) {
  const Plan& plan = call.plan();
  const AttentionParams& params = call.params();
  MlaDims dims = plan.dims();
  dims.num_heads = std::min(kHeadsPerPart, dims.num_heads - part.head_begin);
  const auto row = static_cast<size_t>(part.row);
  const int32_t kv_begin = plan.kv_indptr()[row];
  const int32_t num_keys = plan.kv_indptr()[row + 1] - kv_begin;
  const auto single = OneRowPlan(plan, dims, num_keys);
  if (!single.ok()) return single.status();

  const auto heads = static_cast<size_t>(dims.num_heads);
  std::vector<float> out(heads * static_cast<size_t>(dims.kv_lora_rank));
  std::vector<float> lse(heads);
  const replay::Buffer<std::byte> workspace(
      static_cast<int64_t>(ref.AttentionWorkspaceBytes(single.value().capacity())));
  AttentionParams wanted = params;
  wanted.query.q = Slice(params.query.q, part.row, part.head_begin, dims.num_heads);
  wanted.kv_indices =
      params.kv_indices.subspan(static_cast<size_t>(kv_begin), static_cast<size_t>(num_keys));
  wanted.out =
      Tensor<3>::Contiguous(out.data(), DType::kFloat32, {1, dims.num_heads, dims.kv_lora_rank});
  wanted.lse = View<float, 2>::Contiguous(lse.data(), {1, dims.num_heads});
  SPARSEMLA_RETURN_IF_ERROR(
      Attention(ref, wanted, single.value(), {workspace.data(), workspace.bytes()}));

  const auto tolerance = trace::ToleranceFor(plan.cache_format(), params.out.dtype);
  const Tensor<3>& got = params.out;
  const trace::Comparison comparison = trace::CompareAnswers(
      {.out = Slice({got.data, got.dtype, got.shape, got.strides}, part.row, part.head_begin,
                    dims.num_heads),
       .lse = View<const float, 2>::Contiguous(&params.lse(part.row, part.head_begin),
                                               {1, dims.num_heads})},
      {.out = ConstTensor<3>::Contiguous(out.data(), DType::kFloat32, wanted.out.shape),
       .lse = View<const float, 2>::Contiguous(lse.data(), wanted.lse.shape)},
      1, tolerance);
  part.outcome.worst_error = std::max(comparison.worst_out / tolerance.out_relative,
                                      comparison.worst_lse / tolerance.lse_absolute);
  if (!comparison.ok()) {
    part.outcome.mismatch = StrCat("token ", part.row, ", heads from ", part.head_begin, ": ",
                                   comparison.first_mismatch);
  }
  return {};
}

}  // namespace

Result<CheckOutcome> CheckAgainstRef(const Call& call) {
  const auto ref = CreateBackend("ref");
  if (!ref.ok()) return ref.status();
  const int32_t last_row = call.plan().num_tokens() - 1;
  std::vector<int32_t> rows = {0, last_row / 2, last_row};
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  std::vector<Part> parts;
  for (const int32_t row : rows) {
    for (int32_t head = 0; head < call.plan().dims().num_heads; head += kHeadsPerPart) {
      parts.push_back({.row = row, .head_begin = head});
    }
  }
  std::atomic<size_t> next = 0;
  {
    std::vector<std::jthread> threads;
    const size_t num_threads = std::max(1u, std::thread::hardware_concurrency());
    for (size_t i = 0; i < std::min(num_threads, parts.size()); ++i) {
      threads.emplace_back([&] {
        for (size_t p = next++; p < parts.size(); p = next++) {
          parts[p].status = CheckPart(call, *ref.value(), parts[p]);
        }
      });
    }
  }
  CheckOutcome outcome = {.num_rows = static_cast<int32_t>(rows.size())};
  for (const Part& part : parts) {
    if (!part.status.ok()) return part.status;
    outcome.worst_error = std::max(outcome.worst_error, part.outcome.worst_error);
    if (outcome.mismatch.empty()) outcome.mismatch = part.outcome.mismatch;
  }
  return outcome;
}

}  // namespace sparsemla::bench
