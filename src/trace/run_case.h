// Runs a case through the public interface: plan, then all stages of one attention call. Shared by
// the tool, the tests and a fuzz target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "sparsemla/backend.h"
#include "sparsemla/plan.h"
#include "sparsemla/status.h"
#include "trace/case.h"

namespace sparsemla::trace {

struct RunOptions {
  ScheduleKind schedule = ScheduleKind::kBalanced;
  int32_t num_compute_units = 0;  // 0: what the back end says
  // Pieces of every row: exactly so many where a row has as many keys (balanced), or at most so
  // many (aiter, whose rule decides). 0: the schedule's own rule.
  int32_t splits = 0;
};

// What a run answers; arrays are packed.
struct CaseResult {
  std::vector<std::byte> out;  // [num_tokens, num_heads, kv_lora_rank] of the case's model_dtype
  std::vector<float> lse;      // [num_tokens, num_heads]
  std::vector<int32_t> req_id_per_token;  // [num_tokens]
  std::vector<int32_t> paged_kv_indptr;   // [num_tokens + 1]
  std::vector<int32_t> selected_indptr;   // [num_tokens + 1]
  std::vector<int32_t> selected_slots;    // [selected_indptr.back()], in the rows' order
};

// The plan of a case on a machine of `num_compute_units`.
Result<Plan> PlanCase(const Case& input, const RunOptions& options, int32_t num_compute_units);

Result<CaseResult> RunCase(const Case& input, const Backend& backend, const RunOptions& options);

// Writes the answers as a safetensors file, atomically.
Status WriteCaseResult(const std::string& path, const Case& input, const CaseResult& result);

}  // namespace sparsemla::trace
