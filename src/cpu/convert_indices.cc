// Index stages: k-pool fitting, and request-local positions -> cache slots. Memory-bound, so rows
// are only spread over threads when there are many entries.
#include <algorithm>
#include <bit>

#include "cpu/stages.h"
#include "cpu/thread_pool.h"

namespace sparsemla::cpu {
namespace {

// Entries per task: some 30 us of work, well above the cost of waking a thread.
constexpr int64_t kEntriesPerTask = 32 * 1024;

// function(row) for every row, in tasks of kEntriesPerTask entries.
template <typename Function>
void ForEachRow(const Executor& executor, int64_t num_rows, int64_t entries_per_row,
                const Function& function) {
  const int64_t rows_per_task =
      std::max<int64_t>(1, kEntriesPerTask / std::max<int64_t>(1, entries_per_row));
  const int64_t num_tasks = (num_rows + rows_per_task - 1) / rows_per_task;
  ParallelFor(executor, static_cast<int32_t>(num_tasks), [&](int32_t task) {
    const int64_t begin = task * rows_per_task;
    const int64_t end = std::min(num_rows, begin + rows_per_task);
    for (int64_t row = begin; row < end; ++row) function(row);
  });
}

// Splits a position by a block size that is a power of two.
struct ShiftSplit {
  int32_t shift;
  int32_t mask;
  int32_t Block(int32_t position) const { return position >> shift; }
  int32_t Offset(int32_t position) const { return position & mask; }
};

struct DivideSplit {
  int32_t block_size;
  int32_t Block(int32_t position) const { return position / block_size; }
  int32_t Offset(int32_t position) const { return position % block_size; }
};

// One request's way from positions to slots.
template <typename Split>
class RowConverter {
 public:
  RowConverter(const BlockTable& table, Split split, int32_t req_id, int32_t invalid_slot)
      : split_(split),
        num_blocks_(table.num_blocks),
        block_stride_(table.block_stride_rows == 0 ? table.block_size : table.block_stride_rows),
        invalid_slot_(invalid_slot) {
    if (req_id < 0 || req_id >= table.blocks.shape[0]) return;
    blocks_ = table.blocks.data + req_id * table.blocks.strides[0];
    blocks_stride_ = table.blocks.strides[1];
    max_blocks_ = table.blocks.shape[1];
  }

  // Converts `count` positions that are `stride` apart; returns how many name a row.
  int32_t Convert(const int32_t* positions, int64_t stride, int64_t count, int32_t* slots,
                  int64_t slots_stride) const {
    int32_t num_valid = 0;
    for (int64_t c = 0; c < count; ++c) {
      const int32_t position = positions[c * stride];
      int64_t slot = invalid_slot_;
      if (position >= 0 && split_.Block(position) < max_blocks_) {
        const int32_t block = blocks_[split_.Block(position) * blocks_stride_];
        if (block >= 0 && block < num_blocks_) {
          slot = block * block_stride_ + split_.Offset(position);
          ++num_valid;
        }
      }
      slots[c * slots_stride] = static_cast<int32_t>(slot);
    }
    return num_valid;
  }

 private:
  Split split_;
  const int32_t* blocks_ = nullptr;
  int64_t blocks_stride_ = 0;
  int64_t max_blocks_ = 0;  // 0 for requests outside the table: nothing is mapped
  int64_t num_blocks_;
  int64_t block_stride_;
  int32_t invalid_slot_;
};

// function(split) with the cheapest way to split positions.
template <typename Function>
void WithSplit(int32_t block_size, const Function& function) {
  const auto size = static_cast<uint32_t>(block_size);
  if (std::has_single_bit(size)) {
    function(ShiftSplit{std::countr_zero(size), block_size - 1});
  } else {
    function(DivideSplit{block_size});
  }
}

const int32_t* RowOf(const View<const int32_t, 2>& view, int64_t row) {
  return view.data + row * view.strides[0];
}

}  // namespace

void FitKpoolIndices(const FitKpoolIndicesParams& params, const Executor& executor) {
  const View<const int32_t, 2>& in = params.topk_indices;
  const View<int32_t, 2>& out = params.fitted;
  const int64_t topk = params.topk_tokens;
  const int64_t width = in.shape[1];
  ForEachRow(executor, in.shape[0], width, [&](int64_t row) {
    int64_t num_history = 0;
    int64_t num_tail = 0;
    for (int64_t c = 0; c < topk; ++c) num_history += in(row, c) >= 0;
    for (int64_t c = topk; c < width; ++c) num_tail += in(row, c) >= 0;
    num_tail = std::min(num_tail, topk);
    num_history = std::min(num_history, topk - num_tail);
    for (int64_t c = 0; c < num_history; ++c) out(row, c) = in(row, c);
    for (int64_t c = 0; c < num_tail; ++c) out(row, num_history + c) = in(row, topk + c);
    for (int64_t c = num_history + num_tail; c < topk; ++c) out(row, c) = -1;
  });
}

void ConvertIndices(const ConvertIndicesParams& params, const Executor& executor) {
  const View<const int32_t, 2>& topk = params.topk_indices;
  const int64_t num_tokens = static_cast<int64_t>(params.req_id_per_token.size());
  const int64_t width = topk.shape[1];
  WithSplit(params.block_table.block_size, [&](auto split) {
    ForEachRow(executor, num_tokens, width, [&](int64_t row) {
      const auto t = static_cast<size_t>(row);
      const int64_t length = int64_t{params.kv_indptr[t + 1]} - params.kv_indptr[t];
      const int64_t count = std::min(length, width);
      int32_t* const slots = params.kv_indices.data() + params.kv_indptr[t];
      const RowConverter converter(params.block_table, split, params.req_id_per_token[t],
                                   params.invalid_slot);
      converter.Convert(RowOf(topk, row), topk.strides[1], count, slots, 1);
      std::fill(slots + count, slots + length, params.invalid_slot);
    });
  });
}

void ConvertIndicesDense(const ConvertIndicesDenseParams& params, const Executor& executor) {
  const View<const int32_t, 2>& topk = params.topk_indices;
  const View<int32_t, 2>& slots = params.slots;
  const int64_t num_tokens = static_cast<int64_t>(params.req_id_per_token.size());
  WithSplit(params.block_table.block_size, [&](auto split) {
    ForEachRow(executor, num_tokens, topk.shape[1], [&](int64_t row) {
      const auto t = static_cast<size_t>(row);
      const RowConverter converter(params.block_table, split, params.req_id_per_token[t],
                                   params.invalid_slot);
      const int32_t num_valid =
          converter.Convert(RowOf(topk, row), topk.strides[1], topk.shape[1],
                            slots.data + row * slots.strides[0], slots.strides[1]);
      if (!params.valid_counts.empty()) params.valid_counts[t] = num_valid;
    });
  });
}

}  // namespace sparsemla::cpu
