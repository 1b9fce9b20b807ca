// Merge: partials of a row -> its output and lse, the sink added once. Memory-bound; spread over
// (row, heads).
#include <algorithm>
#include <cmath>

#include "core/softmax_state.h"
#include "cpu/parallel_for.h"
#include "cpu/stages.h"

namespace sparsemla::cpu {
namespace {

// The work is counted in (partial, head) pairs. A task has as many as are some microseconds of
// work, fewer where threads would be left without any.
constexpr int64_t kBytesPerTask = 128 << 10;
constexpr int64_t kLeastBytesPerTask = 16 << 10;
constexpr int64_t kTasksPerThread = 4;
// Columns, and pieces, summed at a time, on the stack.
constexpr int64_t kColumns = 512;
constexpr int64_t kPieces = 64;
// Weights of a head that are kept; those of further pieces are computed once more.
constexpr int64_t kWeights = 256;

// The partials of one virtual row.
struct Group {
  const int32_t* partials = nullptr;  // [count]
  int64_t count = 0;
  int64_t row = 0;  // position inside the group's range: added to every partial's row
};

// A head over its group. Sums start from the largest lse, so that nothing overflows; weights are
// normalised by `sum` and not by the rounded lse, whose error grows with its size.
class HeadState {
 public:
  HeadState(const Partials& partials, const Group& group, int64_t head)
      : partials_(partials), group_(group), head_(head) {
    for (int64_t p = 0; p < group.count; ++p) {
      const float lse = Lse(p);
      if (!IsEmptyLse(lse) && lse > max_) max_ = lse;
    }
    for (int64_t p = 0; p < group.count; ++p) {
      const float weight = ComputeWeight(p);
      sum_ += weight;  // NaN stays NaN
      if (p < kWeights) weights_[p] = weight;
    }
  }

  bool has_keys() const { return sum_ != 0.0f; }
  float sum() const { return sum_; }
  float lse() const { return has_keys() ? max_ + std::log(sum_) : -INFINITY; }

  // Points at `columns` of the pieces [begin, end) that have keys; returns how many have.
  int64_t Gather(int64_t begin, int64_t end, int64_t column, const float** values,
                 float* weights) const {
    int64_t count = 0;
    for (int64_t p = begin; p < end; ++p) {
      if (IsEmptyLse(Lse(p))) continue;
      values[count] = &partials_.out(group_.partials[p] + group_.row, head_, column);
      weights[count] = p < kWeights ? weights_[p] : ComputeWeight(p);
      ++count;
    }
    return count;
  }

 private:
  float Lse(int64_t p) const { return partials_.lse(group_.partials[p] + group_.row, head_); }
  float ComputeWeight(int64_t p) const {
    const float lse = Lse(p);
    return IsEmptyLse(lse) ? 0.0f : std::exp(lse - max_);
  }

  const Partials& partials_;
  const Group& group_;
  int64_t head_;
  float max_ = -INFINITY;
  float sum_ = 0.0f;  // of exp(lse - max)
  float weights_[kWeights];
};

// Writes `count` columns of a head from `column` on; `sums` holds what goes from one block of
// pieces to the next.
void SumColumns(const StageKernels& kernels, const HeadState& state, int64_t num_pieces,
                int64_t column, int64_t count, const WeightedSum& result) {
  const float* values[kPieces];
  float weights[kPieces];
  alignas(64) float sums[kColumns];
  WeightedSum sum = {.values = values, .weights = weights, .num_columns = count};
  for (int64_t begin = 0; begin < num_pieces; begin += kPieces) {
    const int64_t end = std::min(num_pieces, begin + kPieces);
    sum.num_pieces = state.Gather(begin, end, column, values, weights);
    sum.out = sums;
    if (end == num_pieces) {
      sum.factor = result.factor;
      sum.out_dtype = result.out_dtype;
      sum.out = result.out;
    }
    kernels.sum(sum);
    sum.carry = sums;
  }
}

// Merges one head; `head` counts inside the virtual row, row and model_head in the output.
void MergeHead(const MergeParams& params, const StageKernels& kernels, const Group& group,
               int64_t head, int64_t row, int64_t model_head) {
  const HeadState state(params.partials, group, head);
  if (!state.has_keys() && !params.write_empty_rows) return;
  const float lse = state.lse();
  float total = lse;
  float factor = state.has_keys() ? 1.0f / state.sum() : 0.0f;
  if (!params.sinks.empty()) {
    total = LogAddExp(lse, params.sinks[static_cast<size_t>(model_head)]);
    factor *= MergeWeight(lse, total);
  }
  if (!params.lse.empty()) params.lse(row, model_head) = total;
  const int64_t rank = params.partials.out.shape[2];
  const auto element_bytes = static_cast<int64_t>(DTypeBytes(params.out.dtype));
  std::byte* const out =
      static_cast<std::byte*>(params.out.data) +
      (row * params.out.strides[0] + model_head * params.out.strides[1]) * element_bytes;
  for (int64_t column = 0; column < rank; column += kColumns) {
    SumColumns(
        kernels, state, group.count, column, std::min(kColumns, rank - column),
        {.factor = factor, .out_dtype = params.out.dtype, .out = out + column * element_bytes});
  }
}

// Where the pairs of each group of partials lie, all groups in a row: the pairs of group g begin at
// (partials before it) * heads, those of its head h at h * (its partials) behind that.
class MergeWork {
 public:
  MergeWork(const MergeParams& params, const StageKernels& kernels)
      : params_(params), kernels_(kernels), indptr_(params.partials.reduce_indptr) {}

  int64_t num_pairs() const { return (int64_t{indptr_.back()} - indptr_.front()) * heads(); }

  // Merges the heads whose pairs begin in [begin, end). Groups without partials are not even
  // looked at.
  void Run(int64_t begin, int64_t end) const {
    int64_t first_partial = indptr_.front() + begin / heads();
    while (first_partial < indptr_.back()) {
      const auto next = std::upper_bound(indptr_.begin(), indptr_.end(), first_partial);
      const auto g = static_cast<size_t>(next - indptr_.begin()) - 1;
      const int64_t count = *next - indptr_[g];
      const int64_t group_begin = (int64_t{indptr_[g]} - indptr_.front()) * heads();
      if (group_begin >= end) return;
      const int64_t head_begin = begin > group_begin ? CeilDiv(begin - group_begin, count) : 0;
      const int64_t head_end = std::min(heads(), CeilDiv(end - group_begin, count));
      MergeHeads(g, head_begin, head_end);
      first_partial = *next;
    }
  }

 private:
  static int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
  int64_t heads() const { return params_.partials.lse.shape[1]; }

  void MergeHeads(size_t g, int64_t head_begin, int64_t head_end) const {
    const Partials& partials = params_.partials;
    const RowRange range = partials.reduce_final_map[g];
    for (int32_t v = range.begin; v < range.end; ++v) {
      const Group group = {partials.reduce_partial_map.data() + indptr_[g],
                           int64_t{indptr_[g + 1]} - indptr_[g], v - range.begin};
      for (int64_t h = head_begin; h < head_end; ++h) {
        MergeHead(params_, kernels_, group, h, v / partials.fold, v % partials.fold * heads() + h);
      }
    }
  }

  const MergeParams& params_;
  const StageKernels& kernels_;
  std::span<const int32_t> indptr_;
};

}  // namespace

Status Merge(const MergeParams& params, const StageKernels& kernels, const Executor& executor) {
  const MergeWork work(params, kernels);
  const int64_t pair_bytes =
      std::max<int64_t>(1, params.partials.out.shape[2]) * static_cast<int64_t>(sizeof(float));
  const int64_t num_pairs = work.num_pairs();
  const int64_t least = kLeastBytesPerTask / pair_bytes + 1;
  const int64_t pairs_per_task = std::clamp(num_pairs / (kTasksPerThread * executor.num_threads),
                                            least, std::max(least, kBytesPerTask / pair_bytes));
  const int64_t num_tasks = (num_pairs + pairs_per_task - 1) / pairs_per_task;
  return ParallelFor(executor, static_cast<int32_t>(num_tasks), [&](int32_t task) {
    work.Run(task * pairs_per_task, std::min(num_pairs, (task + 1) * pairs_per_task));
  });
}

}  // namespace sparsemla::cpu
