// One attention call as a file (format sparsemla-case-1): inputs and, where known, right answers.
// Read by the tool, the tests and a fuzz target.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "sparsemla/attention.h"
#include "sparsemla/status.h"
#include "sparsemla/types.h"
#include "trace/safetensors.h"

namespace sparsemla::trace {

// The answers that a case may carry; empty where the file has none.
struct ExpectedAnswers {
  View<const float, 3> out = {};                   // [num_tokens, num_heads, kv_lora_rank]
  View<const float, 2> lse = {};                   // [num_tokens, num_heads]
  std::span<const int32_t> req_id_per_token = {};  // [num_tokens]
  std::span<const int32_t> paged_kv_indptr = {};   // [num_tokens + 1]
  std::span<const int32_t> selected_indptr = {};   // [num_tokens + 1]
  std::span<const int32_t> selected_slots = {};    // [selected_indptr.back()]

  bool any() const {
    return !out.empty() || !lse.empty() || !req_id_per_token.empty() || !paged_kv_indptr.empty() ||
           !selected_indptr.empty();
  }
};

// Every view points into `file`. Movable, not copyable.
struct Case {
  Safetensors file;
  std::string name;
  MlaDims dims = {};
  DType model_dtype = DType::kBFloat16;  // of the output
  int32_t num_tokens = 0;
  int32_t num_reqs = 0;
  int32_t topk_tokens = 0;
  float softmax_scale = 0.0f;
  float q_scale = 1.0f;
  float kv_scale = 1.0f;

  Query query = {};
  KvCache kv_cache = {};
  View<const int32_t, 2> topk_indices = {};  // [num_tokens, W]
  BlockTable block_table = {};
  std::span<const int32_t> query_start_loc = {};  // [num_reqs + 1]
  std::span<const int32_t> seq_lens = {};         // [num_reqs]
  std::span<const float> sinks = {};              // [num_heads] or empty
  ExpectedAnswers expected = {};

  DType q_dtype() const { return query.q.data ? query.q.dtype : query.ql_nope.dtype; }
};

// Loads and checks a case; errors name the file, the tensor, the value and its bound. Whether
// query_start_loc and seq_lens make sense together is left to Plan::Build.
Result<Case> LoadCase(const std::string& path);
// The same for a container that is already in memory.
Result<Case> MakeCase(Safetensors file);

}  // namespace sparsemla::trace
