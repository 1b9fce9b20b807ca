// Batches as short texts, in the grammar of vLLM's attention benchmarks:
//
//   workload = group { "_" group }
//   group    = [ requests ] "q" tokens [ "k" ] [ "s" tokens [ "k" ] ]
//
// "64q1s8k" is 64 requests of 1 query token in a sequence of 8192; "q256s8k" one prefill of 256;
// "q256s8k_8q1s2k" both in one batch. "k" multiplies by 1024. The sequence counts all cached
// tokens, the query's included; without "s" it is the query alone.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/status.h"

namespace sparsemla::bench {

inline constexpr int64_t kMaxTokens = 1 << 20;  // query tokens of a workload, as in PlanCapacity
inline constexpr int32_t kMaxSeqLen = 1 << 24;  // tokens of one sequence

struct Workload {
  std::string text = {};
  std::vector<int32_t> query_start_loc = {0};  // [num_reqs + 1]
  std::vector<int32_t> seq_lens = {};          // [num_reqs]

  int32_t num_reqs() const { return static_cast<int32_t>(seq_lens.size()); }
  int32_t num_tokens() const { return query_start_loc.back(); }
};

// kInvalidArgument names the text, the position (from 0) and what is wrong there.
Result<Workload> ParseWorkload(std::string_view text);

}  // namespace sparsemla::bench
