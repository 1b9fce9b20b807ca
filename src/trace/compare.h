// The one rule by which an answer is judged (docs/numerics.md, N8): used by the tests, by
// `sparsemla run --check` and by `sparsemla replay --check-rows`.
#pragma once

#include <cstdint>
#include <string>

#include "sparsemla/types.h"

namespace sparsemla::trace {

// Each (token, head) row: |out - want| <= out_relative * |want| + out_absolute in the Euclidean
// norm, and |lse - want| <= lse_absolute + lse_relative * |want|.
struct Tolerance {
  double out_relative = 0.0;
  double out_absolute = 1e-5;
  double lse_absolute = 2e-3;
  double lse_relative = 3e-6;
};

// The row of the table for a cache and the type that outputs are rounded to.
Tolerance ToleranceFor(CacheFormat format, DType out_dtype);

// Outputs and lse of some tokens; lse may be empty and is then not compared.
struct Answers {
  ConstTensor<3> out = {};        // [num_tokens, num_heads, kv_lora_rank] bf16, fp16 or fp32
  View<const float, 2> lse = {};  // [num_tokens, num_heads]
};

struct Comparison {
  double worst_out = 0.0;    // largest |out - want| / |want| of a row (absolute where |want| = 0)
  double worst_lse = 0.0;    // largest |lse - want|
  double worst_share = 0.0;  // largest error of out or lse as a share of what is allowed
  // "" if all is within tolerance, else the first difference:
  // "token 3, head 5, column 17: got 0.25, want nan".
  std::string first_mismatch;

  bool ok() const { return first_mismatch.empty(); }
};

// Compares `num_tokens` tokens. Non-finite values must stand in the same places.
Comparison CompareAnswers(const Answers& got, const Answers& want, int64_t num_tokens,
                          const Tolerance& tolerance);

}  // namespace sparsemla::trace
