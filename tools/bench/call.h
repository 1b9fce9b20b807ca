// The memory of one attention call and its plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sparsemla/attention.h"
#include "sparsemla/backend.h"
#include "tools/bench/cell.h"
#include "tools/replay/buffer.h"

namespace sparsemla::bench {

// The type that a model with this cache computes in.
DType ModelDType(CacheFormat format);

// kResourceExhausted, with both sizes, if this machine has less memory than `bytes`.
Status CheckFitsMemory(int64_t bytes);

// Query and outputs of a cell, filled and poisoned; the cache and its slots come from outside.
class Call {
 public:
  // `cache` outlives the call.
  static Result<Call> Create(const CellSpec& spec, const BenchOptions& options,
                             const Backend& backend, const KvCache& cache);

  const Plan& plan() const { return plan_; }
  const AttentionParams& params() const { return params_; }
  std::span<int32_t> kv_indices() { return kv_indices_; }

  // No right answer has the pattern that the outputs are filled with.
  void PoisonOutputs();
  // Attention and Merge.
  Status Run(const Backend& backend) const;

 private:
  explicit Call(Plan plan) : plan_(std::move(plan)) {}

  Plan plan_;
  AttentionParams params_ = {};
  replay::Buffer<std::byte> query_;
  replay::Buffer<std::byte> out_;
  replay::Buffer<float> lse_;
  replay::Buffer<std::byte> workspace_;
  std::vector<int32_t> kv_indices_;
};

struct CheckOutcome {
  int32_t num_rows = 0;
  double worst_error = 0.0;   // as a share of the tolerance
  std::string mismatch = {};  // the first wrong row's; empty: none
};

// Recomputes the first, the middle and the last row with `ref` and compares them with the outputs
// that the call has left.
Result<CheckOutcome> CheckAgainstRef(const Call& call);

}  // namespace sparsemla::bench
