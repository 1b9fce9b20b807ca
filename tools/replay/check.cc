#include "tools/replay/check.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "core/require.h"
#include "trace/compare.h"

namespace sparsemla::replay {
namespace {

// Widest capacity of a plan for one row.
PlanCapacity OneRow(const ReplayOptions& options) {
  return {.num_compute_units = 1,
          .max_num_tokens = 1,
          .max_num_reqs = 1,
          .topk_tokens = options.model.topk_tokens,
          .dims = options.dims};
}

// Rows [row, row + 1).
template <typename Tensor>
Tensor RowOfTensor(Tensor tensor, int32_t row) {
  tensor.data = static_cast<const std::byte*>(tensor.data) +
                row * tensor.strides[0] * static_cast<int64_t>(DTypeBytes(tensor.dtype));
  tensor.shape[0] = 1;
  return tensor;
}
template <typename T>
View<T, 2> RowOfView(View<T, 2> view, int32_t row) {
  view.data += row * view.strides[0];
  view.shape[0] = 1;
  return view;
}

int32_t RequestOf(const Step& step, int32_t row) {
  const auto& starts = step.query_start_loc;
  const auto after = std::upper_bound(starts.begin(), starts.end(), row);
  return static_cast<int32_t>(after - starts.begin()) - 1;
}

}  // namespace

Result<RowChecker> RowChecker::Create(const ReplayOptions& options, int32_t num_threads) {
  auto ref = CreateBackend("ref");
  if (!ref.ok()) return ref.status();
  RowChecker checker(options, std::move(ref).value());
  const PlanCapacity capacity = OneRow(options);
  const auto bytes = WorkspaceBytes(*checker.ref_, capacity, options.model.topk_width);
  if (!bytes.ok()) return bytes.status();
  const auto heads = static_cast<size_t>(options.dims.num_heads);
  for (int32_t i = 0; i < num_threads; ++i) {
    auto plan = Plan::Create(capacity);
    if (!plan.ok()) return plan.status();
    checker.workers_.push_back(
        {.plan = std::move(plan).value(),
         .workspace = Buffer<std::byte>(static_cast<int64_t>(bytes.value())),
         .out = std::vector<float>(heads * static_cast<size_t>(options.dims.kv_lora_rank)),
         .lse = std::vector<float>(heads)});
  }
  return checker;
}

// The row alone, as the only query of a one-request batch whose sequence ends with it.
Status RowChecker::CheckRow(const Step& step, int32_t row, const SparseMlaParams& params,
                            Worker& worker) {
  const MlaDims& dims = options_.dims;
  const int32_t req = RequestOf(step, row);
  const int32_t query_start_loc[] = {0, 1};
  const int32_t seq_lens[] = {step.position(req, row) + 1};
  const auto built = worker.plan.Build({.query_start_loc = query_start_loc,
                                        .seq_lens = seq_lens,
                                        .dims = dims,
                                        .cache_format = options_.cache_format,
                                        .topk_tokens = options_.model.topk_tokens});
  if (!built.ok()) return built.status();
  SparseMlaParams single = params;
  single.topk_indices = RowOfView(params.topk_indices, row);
  single.block_table.blocks = RowOfView(params.block_table.blocks, req);
  single.attention.query.q = RowOfTensor(params.attention.query.q, row);
  single.attention.out = Tensor<3>::Contiguous(worker.out.data(), DType::kFloat32,
                                               {1, dims.num_heads, dims.kv_lora_rank});
  single.attention.lse = View<float, 2>::Contiguous(worker.lse.data(), {1, dims.num_heads});
  SPARSEMLA_RETURN_IF_ERROR(
      SparseMla(*ref_, single, worker.plan, {worker.workspace.data(), worker.workspace.bytes()}));

  const auto tolerance = trace::ToleranceFor(options_.cache_format, params.attention.out.dtype);
  const Tensor<3>& out = params.attention.out;
  const View<float, 2>& lse = params.attention.lse;
  const trace::Comparison result = trace::CompareAnswers(
      {.out = RowOfTensor(ConstTensor<3>{out.data, out.dtype, out.shape, out.strides}, row),
       .lse = RowOfView(View<const float, 2>{lse.data, lse.shape, lse.strides}, row)},
      {.out = ConstTensor<3>::Contiguous(worker.out.data(), DType::kFloat32,
                                         single.attention.out.shape),
       .lse = View<const float, 2>::Contiguous(worker.lse.data(), single.attention.lse.shape)},
      1, tolerance);
  CheckOutcome& outcome = worker.outcome;
  outcome.worst_error = std::max(outcome.worst_error, result.worst_share);
  if (!outcome.mismatch.empty() || result.ok()) return {};
  // The comparison saw a single token; only what follows its number is of use.
  const std::string& text = result.first_mismatch;
  outcome.mismatch =
      StrCat("step ", step.index, ", request ", step.requests[static_cast<size_t>(req)], ", token ",
             row, " (position ", seq_lens[0] - 1, "), ",
             text.starts_with("lse") ? "lse, " : "out, ", text.substr(text.find("head")));
  return {};
}

Result<CheckOutcome> RowChecker::Check(const Step& step, std::span<const int32_t> rows,
                                       const SparseMlaParams& params) {
  const size_t stride = workers_.size();
  {
    std::vector<std::jthread> threads;
    for (size_t first = 0; first < std::min(stride, rows.size()); ++first) {
      threads.emplace_back([&, first] {
        Worker& worker = workers_[first];
        worker.outcome = {};
        for (size_t i = first; i < rows.size() && worker.status.ok(); i += stride) {
          worker.status = CheckRow(step, rows[i], params, worker);
        }
      });
    }
  }
  CheckOutcome outcome;
  for (const Worker& worker : std::span(workers_).first(std::min(stride, rows.size()))) {
    if (!worker.status.ok()) return worker.status;
    outcome.worst_error = std::max(outcome.worst_error, worker.outcome.worst_error);
    if (outcome.mismatch.empty()) outcome.mismatch = worker.outcome.mismatch;
  }
  return outcome;
}

}  // namespace sparsemla::replay
