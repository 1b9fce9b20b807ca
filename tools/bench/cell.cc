#include "tools/bench/cell.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/require.h"
#include "tools/bench/call.h"
#include "tools/bench/thread_team.h"
#include "tools/replay/content.h"

namespace sparsemla::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kDistinctRows = 8192;  // contents repeat beyond; caches see addresses only
constexpr double kWarmUpMicroseconds = 60;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// One thread at a reference run.
struct ThreadState {
  std::thread::id id = {};
  double rate = 0.0;
  double wall_seconds = 0.0;
  double core_seconds = 0.0;  // that this thread has run
};

double Now(clockid_t clock) {
  timespec time = {};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// A reference run on every thread; by thread.
std::vector<ThreadState> RunReference(PeakUnit unit, ThreadTeam& team) {
  std::vector<ThreadState> states(static_cast<size_t>(team.num_threads()));
  team.OnEveryThread([&](int32_t i) {
    ThreadState& state = states[static_cast<size_t>(i)];
    state = {.id = std::this_thread::get_id(), .rate = MeasureReference(unit)};
    state.wall_seconds = Now(CLOCK_MONOTONIC);
    state.core_seconds = Now(CLOCK_THREAD_CPUTIME_ID);
  });
  std::sort(states.begin(), states.end(),
            [](const ThreadState& a, const ThreadState& b) { return a.id < b.id; });
  return states;
}

// The rate of the slowest thread; 0 where one did the run of another, which had no core.
double SlowestRate(const std::vector<ThreadState>& states) {
  double slowest = states.front().rate;
  for (size_t i = 1; i < states.size(); ++i) {
    slowest = std::min(slowest, states[i].rate);
    if (states[i].id == states[i - 1].id) return 0.0;
  }
  return slowest;
}

// Of the threads, which spin where they have no work, the least share of time on a core.
double CoreShare(const std::vector<ThreadState>& before, const std::vector<ThreadState>& after) {
  double share = 1.0;
  for (size_t i = 0; i < before.size(); ++i) {
    share = std::min(share, (after[i].core_seconds - before[i].core_seconds) /
                                (after[i].wall_seconds - before[i].wall_seconds));
  }
  return share;
}

Result<std::vector<Sample>> TakeSamples(const BenchOptions& options, PeakUnit unit,
                                        ThreadTeam& team, const Backend& backend, SlotSource& slots,
                                        Call& call) {
  std::vector<Sample> samples;
  const auto enough = [&, begin = Clock::now()] {
    const auto taken = static_cast<int32_t>(samples.size());
    if (options.num_samples > 0) return taken >= options.num_samples;
    return taken >= kLeastSamples && SecondsSince(begin) >= options.seconds;
  };
  while (!enough()) {
    slots.Next(call.kv_indices());
    call.PoisonOutputs();
    team.OnEveryThread([unit](int32_t) { WarmUp(unit, kWarmUpMicroseconds); });
    Sample sample;
    const auto before = RunReference(unit, team);
    const auto begin = Clock::now();
    const Status status = call.Run(backend);
    sample.seconds = SecondsSince(begin);
    const auto after = RunReference(unit, team);
    sample.rate_before = SlowestRate(before);
    sample.rate_after = SlowestRate(after);
    sample.core_share = CoreShare(before, after);
    if (!status.ok()) return status;
    samples.push_back(sample);
  }
  return samples;
}

}  // namespace

double CellRunner::Peak(PeakUnit unit, int32_t num_threads) {
  const auto hardware = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
  const std::pair key(unit, std::clamp(num_threads, 1, hardware));
  const auto found = peaks_.find(key);
  if (found != peaks_.end()) return found->second;
  return peaks_[key] = MeasurePeak(unit, key.second);
}

Status CellRunner::PrepareCache(const CellSpec& spec, int64_t num_slots) {
  if (num_slots == num_slots_ && spec.cache_format == cache_format_) return {};
  const MlaDims dims = {.num_heads = 1};
  const int64_t row_bytes = CacheRowBytes(spec.cache_format, dims);
  SPARSEMLA_RETURN_IF_ERROR(CheckFitsMemory(num_slots * row_bytes));
  num_slots_ = 0;
  cache_ = {};  // before the next is there
  auto memory = HugePageBuffer::Allocate(static_cast<size_t>(num_slots * row_bytes));
  if (!memory.ok()) return memory.status();
  cache_ = std::move(memory).value();
  auto* const rows = static_cast<std::byte*>(cache_.data());
  replay::ContentSource content(dims, spec.cache_format, 1);
  const int64_t distinct = std::min(num_slots, kDistinctRows);
  for (int64_t slot = 0; slot < distinct; ++slot) {
    content.WriteCacheRow(0, static_cast<int32_t>(slot), rows + slot * row_bytes);
  }
  for (int64_t slot = distinct; slot < num_slots; slot += distinct) {
    std::memcpy(rows + slot * row_bytes, rows,
                static_cast<size_t>(std::min(distinct, num_slots - slot) * row_bytes));
  }
  cache_format_ = spec.cache_format;
  num_slots_ = num_slots;
  return {};
}

Result<CellResult> CellRunner::Run(const CellSpec& spec) {
  ThreadTeam team(spec.num_threads);
  const auto created =
      CreateBackend(options_.backend, {.kernel = options_.kernel, .executor = team.executor()});
  if (!created.ok()) return created.status();
  const Backend& backend = *created.value();
  const DType dtype = ModelDType(spec.cache_format);
  const Problem problem = {.dims = {.num_heads = spec.num_heads},
                           .q_dtype = dtype,
                           .cache_format = spec.cache_format,
                           .out_dtype = dtype};
  CellResult result = {.backend = std::string(backend.name()),
                       .kernel = options_.kernel,
                       .num_threads = spec.num_threads,
                       .unsupported_reason = backend.UnsupportedReason(problem)};
  if (!result.unsupported_reason.empty()) return result;
  result.kernel = std::string(backend.KernelName(problem));
  result.row_bytes = CacheRowBytes(spec.cache_format, problem.dims);

  const SlotOptions slot_options = {.residency = spec.residency,
                                    .pool_slots = (options_.pool_mb << 20) / result.row_bytes,
                                    .overlap = options_.overlap};
  const int64_t num_slots = SlotSource::NumSlots(spec.workload, slot_options);
  SPARSEMLA_REQUIRE(spec.residency != Residency::kContext || num_slots <= slot_options.pool_slots,
                    "workload ", spec.workload.text, " has ", num_slots * result.row_bytes >> 20,
                    " MB of cache rows; --pool-mb allows ", options_.pool_mb);
  SPARSEMLA_RETURN_IF_ERROR(PrepareCache(spec, num_slots));
  auto call =
      Call::Create(spec, options_, backend,
                   {.data = cache_.data(), .format = spec.cache_format, .num_slots = num_slots});
  if (!call.ok()) return call.status();
  const Plan& plan = call.value().plan();
  result.num_keys = plan.num_kv_indices();
  result.num_work_items = static_cast<int64_t>(plan.schedule().work_items.size());
  result.num_partials = plan.schedule().num_partials;
  result.flop = 2.0 * spec.num_heads * static_cast<double>(result.num_keys) *
                (2.0 * plan.dims().kv_lora_rank + plan.dims().qk_rope_head_dim);

  SlotSource slots(spec.workload, plan.kv_indptr(), slot_options);
  slots.Next(call->kv_indices());
  call->PoisonOutputs();
  SPARSEMLA_RETURN_IF_ERROR(call->Run(backend));
  if (options_.check) {
    const auto outcome = CheckAgainstRef(call.value());
    if (!outcome.ok()) return outcome.status();
    result.num_checked_rows = outcome.value().num_rows;
    result.worst_error = outcome.value().worst_error;
    result.mismatch = outcome.value().mismatch;
    if (!result.mismatch.empty()) return result;
  }

  result.peak_unit = PeakUnitOf(result.kernel);
  result.peak = Peak(result.peak_unit, result.num_threads);
  const auto samples = TakeSamples(options_, result.peak_unit, team, backend, slots, call.value());
  if (!samples.ok()) return samples.status();
  double& best_reference = best_reference_[{result.peak_unit, spec.num_threads}];
  best_reference = BestReferenceRate(samples.value(), best_reference);
  result.timing = Summarise(samples.value(), best_reference);
  return result;
}

}  // namespace sparsemla::bench
