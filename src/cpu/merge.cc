// Merge: partials of a row -> its output and lse, the sink added once. Memory-bound; spread over
// (row, heads).
#include <algorithm>
#include <cmath>

#include "core/numeric.h"
#include "core/softmax_state.h"
#include "cpu/stages.h"
#include "cpu/thread_pool.h"

namespace sparsemla::cpu {
namespace {

// Heads per task: about 0.1 ms for 16 pieces of 512 columns.
constexpr int64_t kHeadsPerTask = 16;
// Columns summed at a time, on the stack.
constexpr int64_t kColumns = 512;

// The partials of one virtual row.
struct Group {
  const int32_t* partials = nullptr;  // [count]
  int64_t count = 0;
  int64_t row = 0;  // position inside the group's range: added to every partial's row
};

// A head over its group. Sums start from the largest lse, so that nothing overflows; weights are
// normalised by `sum` and not by the rounded lse, whose error grows with its size.
struct GroupState {
  float max = -INFINITY;
  float sum = 0.0f;  // of exp(lse - max); 0: no keys

  float lse() const { return sum == 0.0f ? -INFINITY : max + std::log(sum); }
};

GroupState SumGroup(const Partials& partials, const Group& group, int64_t head) {
  GroupState state;
  for (int64_t p = 0; p < group.count; ++p) {
    const float lse = partials.lse(group.partials[p] + group.row, head);
    if (!IsEmptyLse(lse) && lse > state.max) state.max = lse;
  }
  for (int64_t p = 0; p < group.count; ++p) {
    const float lse = partials.lse(group.partials[p] + group.row, head);
    if (!IsEmptyLse(lse)) state.sum += std::exp(lse - state.max);  // NaN stays NaN
  }
  return state;
}

void WriteColumns(const Tensor<3>& out, int64_t row, int64_t head, int64_t column, int64_t count,
                  float factor, const float* sums) {
  const int64_t offset = row * out.strides[0] + head * out.strides[1] + column;
  VisitDType(out.dtype, [&]<typename T>() {
    T* const target = static_cast<T*>(out.data) + offset;
    for (int64_t d = 0; d < count; ++d) target[d] = FromFloat<T>(sums[d] * factor);
  });
}

// Merges one head; `head` counts inside the virtual row, row and model_head in the output.
void MergeHead(const MergeParams& params, const Group& group, int64_t head, int64_t row,
               int64_t model_head) {
  const Partials& partials = params.partials;
  const GroupState state = SumGroup(partials, group, head);
  if (state.sum == 0.0f && !params.write_empty_rows) return;
  const float lse = state.lse();
  float total = lse;
  float factor = state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
  if (!params.sinks.empty()) {
    total = LogAddExp(lse, params.sinks[static_cast<size_t>(model_head)]);
    factor *= MergeWeight(lse, total);
  }
  if (!params.lse.empty()) params.lse(row, model_head) = total;
  const int64_t rank = partials.out.shape[2];
  for (int64_t column = 0; column < rank; column += kColumns) {
    const int64_t count = std::min(kColumns, rank - column);
    float sums[kColumns] = {};
    for (int64_t p = 0; p < group.count; ++p) {
      const int64_t partial = group.partials[p] + group.row;
      const float part_lse = partials.lse(partial, head);
      if (IsEmptyLse(part_lse)) continue;
      const float weight = std::exp(part_lse - state.max);
      const float* const values = &partials.out(partial, head, column);
      for (int64_t d = 0; d < count; ++d) sums[d] += weight * values[d];
    }
    WriteColumns(params.out, row, model_head, column, count, factor, sums);
  }
}

}  // namespace

void Merge(const MergeParams& params, const Executor& executor) {
  const Partials& partials = params.partials;
  const int64_t num_groups = static_cast<int64_t>(partials.reduce_indptr.size()) - 1;
  const int64_t heads = partials.lse.shape[1];
  const int64_t tasks_per_group = (heads + kHeadsPerTask - 1) / kHeadsPerTask;
  ParallelFor(executor, static_cast<int32_t>(num_groups * tasks_per_group), [&](int32_t task) {
    const auto g = static_cast<size_t>(task / tasks_per_group);
    const int32_t begin = partials.reduce_indptr[g];
    const int64_t count = int64_t{partials.reduce_indptr[g + 1]} - begin;
    if (count <= 0) return;
    const RowRange range = partials.reduce_final_map[g];
    const int64_t head_begin = task % tasks_per_group * kHeadsPerTask;
    const int64_t head_end = std::min(heads, head_begin + kHeadsPerTask);
    for (int32_t v = range.begin; v < range.end; ++v) {
      const Group group = {partials.reduce_partial_map.data() + begin, count, v - range.begin};
      for (int64_t h = head_begin; h < head_end; ++h) {
        MergeHead(params, group, h, v / partials.fold, v % partials.fold * heads + h);
      }
    }
  });
}

}  // namespace sparsemla::cpu
