#include "tools/replay/check.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "core/require.h"

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

// Rows [row, row + 1) of a view or tensor.
template <typename Array>
Array RowOf(Array array, int32_t row) {
  array.data += row * array.strides[0];
  array.shape[0] = 1;
  return array;
}
ConstTensor<3> RowOfQuery(ConstTensor<3> q, int32_t row) {
  q.data = static_cast<const std::byte*>(q.data) +
           row * q.strides[0] * static_cast<int64_t>(DTypeBytes(q.dtype));
  q.shape[0] = 1;
  return q;
}

int32_t RequestOf(const Step& step, int32_t row) {
  const auto& starts = step.query_start_loc;
  return static_cast<int32_t>(std::upper_bound(starts.begin(), starts.end(), row) -
                              starts.begin()) - 1;
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
         .out = std::vector<BFloat16>(heads * static_cast<size_t>(options.dims.kv_lora_rank)),
         .lse = std::vector<float>(heads)});
  }
  return checker;
}
