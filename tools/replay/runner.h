// The replay itself: asks the engine for batches, brings cache, queries and selections up to date,
// and runs plan -> convert -> attention -> merge of each step on a back end, timed stage by stage.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "sparsemla/backend.h"
#include "sparsemla/plan.h"
#include "sparsemla/status.h"
#include "tools/replay/engine.h"
#include "tools/replay/models.h"
#include "tools/replay/result.h"
#include "tools/replay/traffic.h"

namespace sparsemla::replay {

struct ReplayOptions {
  Model model = {};
  MlaDims dims = {};  // of one rank
  CacheFormat cache_format = CacheFormat::kBFloat16;
  ScheduleKind schedule = ScheduleKind::kBalanced;
  EngineOptions engine = {};
  int32_t num_layers = 1;  // attention calls a step, all with its one plan
  int64_t max_steps = 0;   // 0: until all requests are finished
  int64_t check_rows = 0;  // every so many rows one is checked against `ref`; 0: none
  double overlap = 0.70;   // of neighbouring selections
  uint64_t seed = 1;
};

struct ReplayProgress {
  double fraction = 0;  // of all tokens
  const StepRecord* step = nullptr;
};

// The capacity of the replay's plan, and what one of its steps is planned with.
PlanCapacity CapacityOf(const ReplayOptions& options, const Backend& backend);
PlanParams PlanParamsOf(const ReplayOptions& options, const std::vector<int32_t>& query_start_loc,
                        const std::vector<int32_t>& seq_lens);

// Runs the traffic and calls `progress` after every step. A wrong row ends the run and is reported
// in ReplayResult::mismatch; an error means that the replay could not be run.
Result<ReplayResult> RunReplay(const std::vector<TrafficRequest>& traffic,
                               const ReplayOptions& options, const Backend& backend,
                               const std::function<void(const ReplayProgress&)>& progress);

}  // namespace sparsemla::replay
