// Recomputes single rows of a step with the `ref` back end, from the same selections, block table
// and cache, and compares them with what the back end under replay has answered.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sparsemla/attention.h"
#include "tools/replay/buffer.h"
#include "tools/replay/engine.h"
#include "tools/replay/runner.h"

namespace sparsemla::replay {

struct CheckOutcome {
  double worst_error = 0;  // as a share of the tolerance
  std::string mismatch;    // the first wrong row's; empty: none
};

class RowChecker {
 public:
  // `num_threads` rows are recomputed at a time.
  static Result<RowChecker> Create(const ReplayOptions& options, int32_t num_threads);

  // `params` is the call that was made, its outputs filled; `topk_indices` [num_tokens, W] are the
  // rows before they were fitted.
  Result<CheckOutcome> Check(const Step& step, std::span<const int32_t> rows,
                             const SparseMlaParams& params);

 private:
  struct Worker {
    Plan plan;
    Buffer<std::byte> workspace;
    std::vector<float> out;  // [num_heads, kv_lora_rank]
    std::vector<float> lse;  // [num_heads]
    CheckOutcome outcome = {};
    Status status = {};
  };

  RowChecker(const ReplayOptions& options, std::unique_ptr<Backend> ref)
      : options_(options), ref_(std::move(ref)) {}
  Status CheckRow(const Step& step, int32_t row, const SparseMlaParams& params, Worker& worker);

  ReplayOptions options_;
  std::unique_ptr<Backend> ref_;
  std::vector<Worker> workers_;
};

}  // namespace sparsemla::replay
