// The algebra of softmax states, in one place for every kernel. A state is (lse, out): the natural
// log of the sum of exp(logit), and the normalised output. -inf is the identity; an infinite sink
// wins. Merging is associative and commutative up to rounding. (The `ref` back end does not use
// this file: a plain two-pass softmax in double judges it.)
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace sparsemla {

// log(exp(a) + exp(b)); NaN if either is.
SPARSEMLA_HD inline float LogAddExp(float a, float b) {
  if (a != a || b != b) return a + b;
  const float hi = a > b ? a : b;
  const float lo = a > b ? b : a;
  if (hi == -INFINITY || hi == INFINITY) return hi;  // both empty, or an infinite sink
  return hi + log1pf(expf(lo - hi));
}

// The factor of a part with `part_lse` in a whole with `total_lse`. An infinite total takes all.
SPARSEMLA_HD inline float MergeWeight(float part_lse, float total_lse) {
  return part_lse == -INFINITY || total_lse == INFINITY ? 0.0f : expf(part_lse - total_lse);
}

// The marks of a state without keys: -inf (ours) and +inf (FlashMLA's). NaN is not one: a bad value
// in the cache must stay visible.
SPARSEMLA_HD inline bool IsEmptyLse(float lse) {
  return lse == -INFINITY || lse == INFINITY;
}

}  // namespace sparsemla
