// Steps of random lengths, and what must hold for every plan.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/require.h"
#include "plan/cost_model.h"
#include "plan/schedule.h"
#include "sparsemla/plan.h"

namespace sparsemla::plan_testing {

// The lengths of one step.
struct Lengths {
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> seq_lens;

  void Add(int32_t query_len, int32_t seq_len) {
    query_start_loc.push_back(query_start_loc.back() + query_len);
    seq_lens.push_back(seq_len);
  }
  // Rows of any lengths: requests of one query token each.
  static Lengths OfRows(const std::vector<int32_t>& num_keys) {
    Lengths lengths;
    for (const int32_t keys : num_keys) lengths.Add(1, keys);
    return lengths;
  }
};

inline PlanCapacity MakeCapacity(int32_t num_compute_units, int32_t num_heads = 16) {
  PlanCapacity capacity;
  capacity.num_compute_units = num_compute_units;
  capacity.max_num_tokens = 1024;
  capacity.max_num_reqs = 1024;
  capacity.topk_tokens = 2048;
  capacity.dims.num_heads = num_heads;
  return capacity;
}

// Refers to `lengths`.
inline PlanParams MakeParams(const Lengths& lengths, const PlanCapacity& capacity) {
  PlanParams params;
  params.query_start_loc = lengths.query_start_loc;
  params.seq_lens = lengths.seq_lens;
  params.dims = capacity.dims;
  params.topk_tokens = capacity.topk_tokens;
  return params;
}

inline Plan CreatePlan(const PlanCapacity& capacity) {
  Result<Plan> plan = Plan::Create(capacity);
  if (!plan.ok()) {
    ADD_FAILURE() << plan.status().message();
    return Plan::Create(MakeCapacity(1)).value();
  }
  return std::move(plan).value();
}

inline Plan PlanOf(const Lengths& lengths, const PlanCapacity& capacity) {
  Plan plan = CreatePlan(capacity);
  const Result<bool> built = plan.Build(MakeParams(lengths, capacity));
  EXPECT_TRUE(built.ok()) << built.status().message();
  return plan;
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int32_t operator()(int32_t low, int32_t high) {  // both included
    return std::uniform_int_distribution<int32_t>(low, high)(engine_);
  }
  bool OneIn(int32_t n) { return (*this)(1, n) == 1; }

 private:
  std::mt19937 engine_;
};

// Decodes, verify steps, chunks, dummy requests, requests without tokens: anything legal.
inline Lengths RandomLengths(Random& random, int32_t max_tokens, int32_t max_reqs) {
  Lengths lengths;
  const int32_t num_reqs = random(0, max_reqs);
  const int32_t longest_query = random.OneIn(3) ? random(1, 400) : random(1, 4);
  const int32_t longest_context = random.OneIn(4) ? 200 : 4000;
  int32_t tokens = 0;
  for (int32_t r = 0; r < num_reqs; ++r) {
    const int32_t query_len = std::min(random(0, longest_query), max_tokens - tokens);
    tokens += query_len;
    lengths.Add(query_len, random.OneIn(10) ? 0 : query_len + random(0, longest_context));
  }
  return lengths;
}

// The first thing about the plan's schedule that is wrong; empty if everything holds.
inline std::string FirstInconsistency(const Plan& plan) {
  const Schedule& schedule = plan.schedule();
  const PlanCapacity& capacity = plan.capacity();
  const size_t num_rows = static_cast<size_t>(plan.num_tokens() * schedule.fold);
  const auto fail = [](const auto&... parts) { return StrCat(parts...); };

  if (schedule.heads_per_item * schedule.fold != plan.dims().num_heads) return "heads_per_item";
  if (schedule.work_indptr.size() != static_cast<size_t>(capacity.num_compute_units) + 1 ||
      schedule.work_indptr.front() != 0 ||
      schedule.work_indptr.back() != static_cast<int32_t>(schedule.work_items.size()) ||
      !std::is_sorted(schedule.work_indptr.begin(), schedule.work_indptr.end())) {
    return "work_indptr";
  }
  if (static_cast<int64_t>(schedule.work_items.size()) > plan::MaxWorkItems(capacity) ||
      schedule.num_partials > plan::MaxPartialRows(capacity) ||
      int64_t{schedule.num_partials} * schedule.heads_per_item > plan::MaxPartialHeads(capacity)) {
    return "a bound of the buffers";
  }
  if (schedule.reduce_indptr.size() != num_rows + 1 || schedule.reduce_indptr[0] != 0 ||
      schedule.reduce_final_map.size() != num_rows ||
      schedule.reduce_partial_map.size() != static_cast<size_t>(schedule.num_partials) ||
      schedule.reduce_indptr[num_rows] != schedule.num_partials) {
    return "sizes of the reduce maps";
  }

  std::vector<std::vector<WorkItem>> items_of(num_rows);
  for (const WorkItem& item : schedule.work_items) {
    if (item.row_begin < 0 || item.row_begin >= static_cast<int32_t>(num_rows) ||
        item.row_end != item.row_begin + 1 || item.batch_idx != item.row_begin || item.pad != 0) {
      return fail("the rows of an item of row ", item.row_begin);
    }
    items_of[static_cast<size_t>(item.row_begin)].push_back(item);
  }
  std::vector<int32_t> uses(static_cast<size_t>(schedule.num_partials));
  for (size_t v = 0; v < num_rows; ++v) {
    const size_t row = v / static_cast<size_t>(schedule.fold);
    const auto& items = items_of[v];
    int32_t next = plan.kv_indptr()[row];
    const int32_t row_end = plan.kv_indptr()[row + 1];
    if (items.empty()) return fail("row ", v, " has no item");
    const int32_t num_partials = items.size() == 1 ? 0 : static_cast<int32_t>(items.size());
    if (schedule.reduce_indptr[v + 1] - schedule.reduce_indptr[v] != num_partials) {
      return fail("reduce_indptr of row ", v);
    }
    if (num_partials > 0 && schedule.reduce_final_map[v] !=
                                RowRange{static_cast<int32_t>(v), static_cast<int32_t>(v) + 1}) {
      return fail("reduce_final_map of row ", v);
    }
    for (size_t p = 0; p < items.size(); ++p) {
      const WorkItem& item = items[p];
      const bool empty_row = plan.kv_indptr()[row] == row_end;
      if (item.kv_begin != next || (item.kv_end <= item.kv_begin && !empty_row) ||
          item.kv_offset != row_end - item.kv_end) {
        return fail("the keys of piece ", p, " of row ", v);
      }
      next = item.kv_end;
      if (num_partials == 0) {
        if (item.partial_row != -1) return fail("row ", v, " is whole but has a partial");
        continue;
      }
      const size_t at = static_cast<size_t>(schedule.reduce_indptr[v]) + p;
      if (item.partial_row < 0 || item.partial_row >= schedule.num_partials ||
          schedule.reduce_partial_map[at] != item.partial_row) {
        return fail("the partial of piece ", p, " of row ", v);
      }
      ++uses[static_cast<size_t>(item.partial_row)];
    }
    if (next != row_end) return fail("row ", v, " is covered to ", next, " of ", row_end);
  }
  for (size_t p = 0; p < uses.size(); ++p) {
    if (uses[p] != 1) return fail("partial row ", p, " is written ", uses[p], " times");
  }
  return "";
}

// A copy of everything in a plan that a kernel reads.
struct PlanArrays {
  std::vector<int32_t> req_id_per_token, kv_indptr, work_indptr, reduce_indptr, partial_map;
  std::vector<WorkItem> work_items;
  std::vector<RowRange> final_map;

  explicit PlanArrays(const Plan& plan)
      : req_id_per_token(Copy(plan.req_id_per_token())),
        kv_indptr(Copy(plan.kv_indptr_padded())),
        work_indptr(Copy(plan.schedule().work_indptr)),
        reduce_indptr(Copy(plan.schedule().reduce_indptr)),
        partial_map(Copy(plan.schedule().reduce_partial_map)),
        work_items(Copy(plan.schedule().work_items)),
        final_map(Copy(plan.schedule().reduce_final_map)) {}
  friend bool operator==(const PlanArrays&, const PlanArrays&) = default;

 private:
  template <typename T>
  static std::vector<T> Copy(std::span<const T> span) {
    return {span.begin(), span.end()};
  }
};

}  // namespace sparsemla::plan_testing
