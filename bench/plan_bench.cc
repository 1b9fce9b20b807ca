// How long a step takes to plan when its lengths are new, and how well the plan is balanced.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "sparsemla/plan.h"

namespace sparsemla {
namespace {

struct Step {
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> seq_lens;

  void Add(int32_t query_len, int32_t context) {
    query_start_loc.push_back(query_start_loc.back() + query_len);
    seq_lens.push_back(context + query_len);
  }
};

// Contexts of conversations: from one turn to 32k tokens, most of them above the top-k.
Step DecodeStep(int32_t num_reqs, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> bits(7, 14);
  Step step;
  for (int32_t r = 0; r < num_reqs; ++r) {
    const int32_t base = 1 << bits(random);
    step.Add(1, base + static_cast<int32_t>(random() % static_cast<uint32_t>(base)));
  }
  return step;
}

Step PrefillStep(int32_t num_reqs, int32_t query_len, int32_t context, int32_t seed) {
  Step step;
  for (int32_t r = 0; r < num_reqs; ++r) step.Add(query_len, context + seed);
  return step;
}

// Plans two steps in turn, so that no plan is ever reused.
void PlanInTurn(benchmark::State& state, const PlanCapacity& limits, const Step (&steps)[2]) {
  PlanCapacity capacity = limits;
  capacity.max_num_tokens = 8192;
  capacity.max_num_reqs = 1024;
  capacity.dims.num_heads = 16;
  Result<Plan> plan = Plan::Create(capacity);
  if (!plan.ok()) return state.SkipWithError(plan.status().message().c_str());
  size_t turn = 0;
  for (auto _ : state) {
    const Step& step = steps[turn];
    turn ^= 1;
    PlanParams params;
    params.query_start_loc = step.query_start_loc;
    params.seq_lens = step.seq_lens;
    params.dims = capacity.dims;
    const Result<bool> changed = plan->Build(params);
    if (!changed.ok() || !changed.value()) return state.SkipWithError("the step was not planned");
    benchmark::DoNotOptimize(plan->schedule().work_items.data());
    benchmark::ClobberMemory();
  }
  state.counters["imbalance"] = ComputePlanCosts(plan.value()).imbalance();
  state.counters["partials"] = plan->schedule().num_partials;
  state.counters["items"] = static_cast<double>(plan->schedule().work_items.size());
}

void Register() {
  struct Shape {
    std::string name;
    Step steps[2];
  };
  const Shape shapes[] = {
      {"reqs=256", {DecodeStep(256, 1), DecodeStep(256, 2)}},
      {"prefill=4096/context=0", {PrefillStep(1, 4096, 0, 0), PrefillStep(1, 4096, 0, 1)}},
      {"prefill=4096/context=30000",
       {PrefillStep(1, 4096, 30000, 0), PrefillStep(1, 4095, 30000, 0)}},
      {"prefill=8x512", {PrefillStep(8, 512, 0, 0), PrefillStep(8, 512, 0, 1)}},
  };
  struct Rule {
    std::string name;
    ScheduleKind kind;
    bool batch_invariant;
  };
  const Rule rules[] = {{"balanced", ScheduleKind::kBalanced, false},
                        {"invariant", ScheduleKind::kBalanced, true},
                        {"aiter", ScheduleKind::kAiter, false}};
  for (const Rule& rule : rules) {
    for (const Shape& shape : shapes) {
      for (const int32_t compute_units : {32, 132, 304}) {
        PlanCapacity capacity;
        capacity.schedule = rule.kind;
        capacity.batch_invariant = rule.batch_invariant;
        capacity.num_compute_units = compute_units;
        const std::string name =
            "plan/" + rule.name + "/" + shape.name + "/cus=" + std::to_string(compute_units);
        benchmark::RegisterBenchmark(name.c_str(), [capacity, shape](benchmark::State& state) {
          PlanInTurn(state, capacity, shape.steps);
        })->Unit(benchmark::kMicrosecond);
      }
    }
  }
}

const bool registered = [] {
  Register();
  return true;
}();

}  // namespace
}  // namespace sparsemla
