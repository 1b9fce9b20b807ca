// Our schedule: rows in order, workers filled one after the other up to a common payload, a row cut
// only where a worker's room ends, and the smallest payload that lets all rows fit. Rule, bound and
// figures: docs/schedules.md.
#include <algorithm>
#include <cstdint>

#include "plan/cost_model.h"
#include "plan/schedule.h"

namespace sparsemla::plan {
namespace {

// A worker stops, rather than cut a row, when less than 1/16 of its payload is left.
constexpr int32_t kMinGainFraction = 16;

struct Rows {
  const int32_t* kv_indptr;  // [num_rows + 1]
  const int32_t* cost_sums;  // [num_rows + 1], prefix sums of what each row costs when not cut
  int32_t num_rows;
  int32_t num_workers;
  int32_t max_splits;  // < 0: no limit

  int32_t keys(int32_t row) const { return kv_indptr[row + 1] - kv_indptr[row]; }
  int32_t blocks(int32_t row) const { return Blocks(keys(row)); }
};

// The end of the longest run of whole rows from `begin` on that costs at most `room`. Searches
// around begin + *guess, the length of the previous run.
int32_t EndOfFit(const Rows& rows, int32_t begin, int32_t room, int32_t* guess) {
  const int32_t* const sums = rows.cost_sums;
  const int32_t limit = sums[begin] + room;
  int32_t fits = begin;                 // sums[fits] <= limit
  int32_t exceeds = rows.num_rows + 1;  // sums[exceeds] > limit, were there such a row
  int32_t probe = std::min(begin + std::max(*guess, 1), rows.num_rows);
  for (int32_t step = 1; fits < probe && probe < exceeds; step *= 2) {
    if (sums[probe] <= limit) {
      fits = probe;
      probe = std::min(probe + step, rows.num_rows);
    } else {
      exceeds = probe;
      probe = std::max(probe - step, begin);
    }
  }
  while (exceeds - fits > 1) {
    const int32_t middle = fits + (exceeds - fits) / 2;
    (sums[middle] <= limit ? fits : exceeds) = middle;
  }
  *guess = fits - begin;
  return fits;
}

// How many blocks of a row with `left` unplanned blocks to put into the last `room` of a worker; 0:
// none, the worker stops here. `pieces_left` is what the split cap still allows.
int32_t BlocksToCut(int32_t left, int32_t room, int32_t payload, int32_t pieces_left) {
  const bool fresh = room == payload;
  if (!fresh && room * int64_t{kMinGainFraction} < payload) return 0;
  const int32_t fit = room - kItemOverhead;
  if (fit < kMinPieceBlocks) return 0;
  // The rest goes to workers of its own, in pieces that are neither too long nor too short: enough
  // is left for that, as the cap allows no more pieces than a row has least pieces.
  const int32_t rest_pieces = CeilDiv(left - fit, payload - kItemOverhead);
  if (rest_pieces + 1 > pieces_left) return 0;
  return std::min(fit, left - rest_pieces * kMinPieceBlocks);
}

// Fills the workers up to `payload` and tells `sink` what each one gets. Returns the cost of what
// remains, 0 if everything fits.
// Starting a row on a fresh worker always works, since the payload is at least the longest
// unsplittable piece.
template <typename Sink>
int32_t FillWorkers(const Rows& rows, int32_t payload, Sink&& sink) {
  int32_t row = 0;
  int32_t done = 0;    // blocks of `row` that are planned
  int32_t pieces = 0;  // in so many pieces
  int32_t guess = 1;
  for (int32_t worker = 0; worker < rows.num_workers; ++worker) {
    int32_t room = payload;
    while (row < rows.num_rows) {
      if (done == 0) {
        const int32_t end = EndOfFit(rows, row, room, &guess);
        sink.WholeRows(row, end);
        room -= rows.cost_sums[end] - rows.cost_sums[row];
        row = end;
        if (row == rows.num_rows) break;
      }
      const int32_t blocks = rows.blocks(row);
      const int32_t left = blocks - done;
      if (done > 0 && ItemCost(left) <= room) {
        sink.Piece(row, done, blocks);
        room -= ItemCost(left);
        ++row;
        done = 0;
        pieces = 0;
        continue;
      }
      const int32_t pieces_left = MaxPieces(blocks, rows.max_splits, rows.num_workers) - pieces;
      const int32_t take = BlocksToCut(left, room, payload, pieces_left);
      if (take > 0) {
        sink.Piece(row, done, done + take);
        done += take;
        ++pieces;
      }
      break;
    }
    sink.EndWorker(worker);
  }
  return rows.cost_sums[rows.num_rows] - rows.cost_sums[row] - done;
}

// The same for rows whose pieces are fixed beforehand (batch-invariant mode).
template <typename Sink>
int32_t FillWorkersInvariant(const Rows& rows, int32_t payload, Sink&& sink) {
  int32_t row = 0;
  int32_t piece = 0;
  int32_t guess = 1;
  for (int32_t worker = 0; worker < rows.num_workers; ++worker) {
    int32_t room = payload;
    while (row < rows.num_rows) {
      if (piece == 0) {
        const int32_t end = EndOfFit(rows, row, room, &guess);
        sink.WholeRows(row, end);
        room -= rows.cost_sums[end] - rows.cost_sums[row];
        row = end;
        if (row == rows.num_rows) break;
      }
      const int32_t blocks = rows.blocks(row);
      const int32_t num_pieces = InvariantPieces(rows.keys(row), rows.max_splits);
      const int32_t begin = PieceBegin(blocks, num_pieces, piece);
      const int32_t end = PieceBegin(blocks, num_pieces, piece + 1);
      if (ItemCost(end - begin) > room) break;
      sink.Piece(row, begin, end);
      room -= ItemCost(end - begin);
      if (++piece == num_pieces) {
        ++row;
        piece = 0;
      }
    }
    sink.EndWorker(worker);
  }
  // What is planned of `row` is not subtracted: the result serves as a hint only.
  return rows.cost_sums[rows.num_rows] - rows.cost_sums[row];
}

struct NoSink {
  void WholeRows(int32_t, int32_t) {}
  void Piece(int32_t, int32_t, int32_t) {}
  void EndWorker(int32_t) {}
};

// Writes the plan. Partial rows are numbered in walk order, so a row's are consecutive and in key
// order.
class Writer {
 public:
  Writer(const Rows& rows, bool invariant, ScheduleBuffers& buffers)
      : rows_(rows), invariant_(invariant), buffers_(buffers), item_(buffers.work_items.data()) {
    buffers.work_indptr[0] = 0;
    buffers.reduce_indptr[0] = 0;
  }

  void WholeRows(int32_t begin, int32_t end) {
    int32_t* const reduce_indptr = buffers_.reduce_indptr.data();
    for (int32_t row = begin; row < end; ++row) {
      const int32_t pieces = invariant_ ? InvariantPieces(rows_.keys(row), rows_.max_splits) : 1;
      if (pieces > 1) {
        const int32_t blocks = rows_.blocks(row);
        for (int32_t p = 0; p < pieces; ++p) {
          Piece(row, PieceBegin(blocks, pieces, p), PieceBegin(blocks, pieces, p + 1));
        }
        continue;
      }
      *item_++ = {row, -1, row, row + 1, rows_.kv_indptr[row], rows_.kv_indptr[row + 1], 0, 0};
      reduce_indptr[row + 1] = num_partials_;
    }
  }

  void Piece(int32_t row, int32_t begin_block, int32_t end_block) {
    const int32_t row_begin = rows_.kv_indptr[row];
    const int32_t row_end = rows_.kv_indptr[row + 1];
    const int32_t end = std::min(row_begin + end_block * kKeysPerBlock, row_end);
    *item_++ = {row, num_partials_++, row, row + 1, row_begin + begin_block * kKeysPerBlock,
                end, row_end - end,   0};
    buffers_.reduce_indptr[static_cast<size_t>(row) + 1] = num_partials_;
  }

  void EndWorker(int32_t worker) {
    buffers_.work_indptr[static_cast<size_t>(worker) + 1] =
        static_cast<int32_t>(item_ - buffers_.work_items.data());
  }

  void Finish() {
    std::fill(buffers_.reduce_indptr.begin() + rows_.num_rows + 1, buffers_.reduce_indptr.end(),
              num_partials_);
    buffers_.num_work_items = static_cast<int32_t>(item_ - buffers_.work_items.data());
    buffers_.num_partials = num_partials_;
  }

 private:
  const Rows& rows_;
  const bool invariant_;
  ScheduleBuffers& buffers_;
  WorkItem* item_;
  int32_t num_partials_ = 0;
};

// What row costs sum up to and which payloads come into question.
struct Bounds {
  int32_t lowest = 0;   // no smaller payload can do
  int32_t highest = 0;  // this one always does
};

Bounds SumCosts(const ScheduleParams& params, std::span<int32_t> cost_sums) {
  int32_t sum = 0;
  int32_t longest = 0;  // unsplittable piece
  int32_t highest = 0;  // cost of a row
  int32_t seen = -1;    // rows of one length often follow each other
  int32_t cost = 0;
  cost_sums[0] = 0;
  for (int32_t row = 0; row < params.num_rows; ++row) {
    const size_t r = static_cast<size_t>(row);
    const int32_t keys = params.kv_indptr[r + 1] - params.kv_indptr[r];
    if (keys != seen) {
      seen = keys;
      const int32_t blocks = Blocks(keys);
      const int32_t pieces = params.batch_invariant
                                 ? InvariantPieces(keys, params.max_splits)
                                 : MaxPieces(blocks, params.max_splits, params.num_compute_units);
      longest = std::max(longest, ItemCost(CeilDiv(blocks, pieces)));
      cost =
          params.batch_invariant && pieces > 1 ? blocks + pieces * kItemOverhead : ItemCost(blocks);
      highest = std::max(highest, cost);
    }
    sum += cost;
    cost_sums[r + 1] = sum;
  }
  const int32_t average = CeilDiv(sum, params.num_compute_units);
  return {std::max(average, longest), average + highest + kItemOverhead};
}

// The smallest payload that works, to 1/64. `remaining(payload)` is the cost that does not fit: the
// next payload must take at least a worker's share of it more, which usually does after one or two
// tries from the lower bound; what is skipped beyond that is bisected. The highest payload is never
// tried: every worker but the last then has more than the average, whatever it cannot use at its
// end.
template <typename Remaining>
int32_t SmallestPayload(const Bounds& bounds, int32_t num_workers, Remaining&& remaining) {
  const int32_t resolution = std::max(1, bounds.lowest / 64);
  int32_t fails = bounds.lowest - 1;
  int32_t works = bounds.highest;
  int32_t least_step = resolution;
  for (int32_t probe = bounds.lowest; probe < works; least_step *= 2) {
    const int32_t rest = remaining(probe);
    if (rest == 0) {
      works = probe;
      break;
    }
    const int32_t share = CeilDiv(rest, num_workers);
    fails = probe + share - 1;
    probe += std::max(share, least_step);
  }
  while (works - fails > resolution) {
    const int32_t middle = fails + (works - fails) / 2;
    (remaining(middle) == 0 ? works : fails) = middle;
  }
  return works;
}

}  // namespace

void ScheduleBalanced(const ScheduleParams& params, ScheduleBuffers& buffers) {
  const Bounds bounds = SumCosts(params, buffers.cost_sums);
  const Rows rows{params.kv_indptr.data(), buffers.cost_sums.data(), params.num_rows,
                  params.num_compute_units, params.max_splits};
  Writer writer(rows, params.batch_invariant, buffers);
  const auto smallest = [&](auto&& remaining) {
    return SmallestPayload(bounds, params.num_compute_units, remaining);
  };
  if (params.batch_invariant) {
    FillWorkersInvariant(rows, smallest([&](int32_t payload) {
                           return FillWorkersInvariant(rows, payload, NoSink());
                         }),
                         writer);
  } else {
    FillWorkers(rows,
                smallest([&](int32_t payload) { return FillWorkers(rows, payload, NoSink()); }),
                writer);
  }
  writer.Finish();
}

}  // namespace sparsemla::plan
