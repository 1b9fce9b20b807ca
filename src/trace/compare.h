// When an answer counts as right: the one table and the one rule of docs/numerics.md, N8. Used by
// the tests, `run --check` and `replay --check-rows`.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "sparsemla/types.h"

namespace sparsemla::trace {

// A row of `out` may be off by out_relative * ||expected|| + out_absolute in the 2-norm, an lse by
// lse_absolute + lse_relative * |expected|.
struct Tolerance {
  double out_relative = 0;
  double out_absolute = 1e-5;
  double lse_absolute = 2e-3;
  double lse_relative = 3e-6;
};

Tolerance ToleranceFor(CacheFormat cache_format, DType model_dtype);

struct Comparison {
  // The largest error, scaled so that it is to be compared with out_relative or lse_absolute: the
  // other term of the rule is divided out. 0 for integers.
  double error = 0;
  // The first (token, head) that is wrong, with its worst column and both values; empty: all right.
  std::string mismatch;

  bool ok() const { return mismatch.empty(); }
};

// NaN and infinities must stand in the same places. `out` is bf16, fp16 or fp32.
Comparison CompareOut(const ConstTensor<3>& out, const View<const float, 3>& expected,
                      const Tolerance& tolerance);
Comparison CompareLse(const View<const float, 2>& lse, const View<const float, 2>& expected,
                      const Tolerance& tolerance);
// Exactly, sizes included.
Comparison CompareInts(std::span<const int32_t> got, std::span<const int32_t> expected);

}  // namespace sparsemla::trace
