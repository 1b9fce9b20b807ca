// Index stages: k-pool fitting, and request-local positions -> cache slots. Memory-bound, so rows
// are only spread over threads when there are many entries.
#include <algorithm>
#include <bit>
#include <limits>
#include <optional>

#include "cpu/parallel_for.h"
#include "cpu/stages.h"

namespace sparsemla::cpu {
namespace {

// Entries per task: some 30 us of work, well above the cost of waking a thread.
constexpr int64_t kEntriesPerTask = 32 * 1024;

// function(row) for every row, in tasks of kEntriesPerTask entries.
template <typename Function>
Status ForEachRow(const Executor& executor, int64_t num_rows, int64_t entries_per_row,
                  const Function& function) {
  const int64_t rows_per_task =
      std::max<int64_t>(1, kEntriesPerTask / std::max<int64_t>(1, entries_per_row));
  const int64_t num_tasks = (num_rows + rows_per_task - 1) / rows_per_task;
  return ParallelFor(executor, static_cast<int32_t>(num_tasks), [&](int32_t task) {
    const int64_t begin = task * rows_per_task;
    const int64_t end = std::min(num_rows, begin + rows_per_task);
    for (int64_t row = begin; row < end; ++row) function(row);
  });
}

// Rows of positions -> rows of slots.
class RowConverter {
 public:
  RowConverter(const BlockTable& table, int32_t invalid_slot, const StageKernels& kernels)
      : blocks_(table.blocks), kernels_(kernels) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    const auto size = static_cast<uint32_t>(table.block_size);
    rule_.max_blocks = static_cast<uint32_t>(std::min(blocks_.shape[1], kMost));
    rule_.num_blocks = static_cast<uint32_t>(std::min(table.num_blocks, kMost));
    // A stride beyond 32 bits comes with one block at most, and is multiplied by 0.
    rule_.block_stride =
        static_cast<uint32_t>(table.block_stride_rows == 0 ? size : table.block_stride_rows);
    rule_.block_size = size;
    rule_.shift = std::has_single_bit(size) ? std::countr_zero(size) : -1;
    rule_.invalid_slot = invalid_slot;
  }

  // Converts `count` positions that are `stride` apart; returns how many name a row.
  int64_t Convert(int32_t req_id, const int32_t* positions, int64_t stride, int64_t count,
                  int32_t* slots, int64_t slots_stride) const {
    SlotRule rule = rule_;
    if (req_id < 0 || req_id >= blocks_.shape[0]) rule.max_blocks = 0;  // nothing is mapped
    if (rule.max_blocks > 0) rule.blocks = blocks_.data + req_id * blocks_.strides[0];
    const bool adjacent = (stride == 1 && slots_stride == 1) || count <= 1;
    if (rule.max_blocks > 0 && adjacent && (blocks_.strides[1] == 1 || rule.max_blocks == 1)) {
      return kernels_.convert(rule, positions, count, slots);
    }
    int64_t num_valid = 0;
    for (int64_t c = 0; c < count; ++c) {
      const auto slot = SlotOf(rule, positions[c * stride]);
      slots[c * slots_stride] = slot.value_or(rule.invalid_slot);
      num_valid += slot.has_value();
    }
    return num_valid;
  }

 private:
  std::optional<int32_t> SlotOf(const SlotRule& rule, int32_t position) const {
    if (position < 0) return {};
    const uint32_t column = static_cast<uint32_t>(position) / rule.block_size;
    if (column >= rule.max_blocks) return {};
    const auto block = static_cast<uint32_t>(rule.blocks[column * blocks_.strides[1]]);
    if (block >= rule.num_blocks) return {};
    const uint32_t offset = static_cast<uint32_t>(position) % rule.block_size;
    return static_cast<int32_t>(block * rule.block_stride + offset);
  }

  View<const int32_t, 2> blocks_;
  const StageKernels& kernels_;
  SlotRule rule_;
};

const int32_t* RowOf(const View<const int32_t, 2>& view, int64_t row) {
  return view.data + row * view.strides[0];
}

// How many of `count` entries that are `stride` apart are valid.
int64_t CountValid(const StageKernels& kernels, const int32_t* entries, int64_t stride,
                   int64_t count) {
  if (stride == 1) return kernels.count(entries, count);
  int64_t num_valid = 0;
  for (int64_t c = 0; c < count; ++c) num_valid += entries[c * stride] >= 0;
  return num_valid;
}

void CopyEntries(const int32_t* from, int64_t from_stride, int64_t count, int32_t* to,
                 int64_t to_stride) {
  if (from_stride == 1 && to_stride == 1) {
    std::copy_n(from, count, to);
  } else {
    for (int64_t c = 0; c < count; ++c) to[c * to_stride] = from[c * from_stride];
  }
}

}  // namespace

Status FitKpoolIndices(const FitKpoolIndicesParams& params, const StageKernels& kernels,
                       const Executor& executor) {
  const View<const int32_t, 2>& in = params.topk_indices;
  const View<int32_t, 2>& out = params.fitted;
  const int64_t topk = params.topk_tokens;
  const int64_t width = in.shape[1];
  const int64_t stride = in.strides[1];
  const int64_t out_stride = out.strides[1];
  return ForEachRow(executor, in.shape[0], width, [&](int64_t row) {
    const int32_t* const history = RowOf(in, row);
    const int32_t* const tail = history + topk * stride;
    int32_t* const fitted = out.data + row * out.strides[0];
    const int64_t num_history_valid = CountValid(kernels, history, stride, topk);
    const int64_t num_tail = std::min(CountValid(kernels, tail, stride, width - topk), topk);
    const int64_t num_history = std::min(num_history_valid, topk - num_tail);
    CopyEntries(history, stride, num_history, fitted, out_stride);
    CopyEntries(tail, stride, num_tail, fitted + num_history * out_stride, out_stride);
    for (int64_t c = num_history + num_tail; c < topk; ++c) fitted[c * out_stride] = -1;
  });
}

Status ConvertIndices(const ConvertIndicesParams& params, const StageKernels& kernels,
                      const Executor& executor) {
  const View<const int32_t, 2>& topk = params.topk_indices;
  const int64_t num_tokens = static_cast<int64_t>(params.req_id_per_token.size());
  const int64_t width = topk.shape[1];
  const RowConverter converter(params.block_table, params.invalid_slot, kernels);
  return ForEachRow(executor, num_tokens, width, [&](int64_t row) {
    const auto t = static_cast<size_t>(row);
    const int64_t length = int64_t{params.kv_indptr[t + 1]} - params.kv_indptr[t];
    const int64_t count = std::min(length, width);
    int32_t* const slots = params.kv_indices.data() + params.kv_indptr[t];
    converter.Convert(params.req_id_per_token[t], RowOf(topk, row), topk.strides[1], count, slots,
                      1);
    std::fill(slots + count, slots + length, params.invalid_slot);
  });
}

Status ConvertIndicesDense(const ConvertIndicesDenseParams& params, const StageKernels& kernels,
                           const Executor& executor) {
  const View<const int32_t, 2>& topk = params.topk_indices;
  const View<int32_t, 2>& slots = params.slots;
  const int64_t num_tokens = static_cast<int64_t>(params.req_id_per_token.size());
  const RowConverter converter(params.block_table, params.invalid_slot, kernels);
  return ForEachRow(executor, num_tokens, topk.shape[1], [&](int64_t row) {
    const auto t = static_cast<size_t>(row);
    const int64_t num_valid =
        converter.Convert(params.req_id_per_token[t], RowOf(topk, row), topk.strides[1],
                          topk.shape[1], slots.data + row * slots.strides[0], slots.strides[1]);
    if (!params.valid_counts.empty()) params.valid_counts[t] = static_cast<int32_t>(num_valid);
  });
}

}  // namespace sparsemla::cpu
