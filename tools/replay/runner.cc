#include "tools/replay/runner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>

#include "core/numeric.h"
#include "core/require.h"
#include "sparsemla/attention.h"
#include "sparsemla/huge_pages.h"
#include "tools/replay/buffer.h"
#include "tools/replay/check.h"
#include "tools/replay/content.h"
#include "tools/replay/topk_source.h"

namespace sparsemla::replay {
namespace {

// Adds the time since its creation to a sum.
class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds) {}
  ~Timer() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  Clock::time_point begin_ = Clock::now();
};

size_t ContextBin(int32_t context) {
  return std::min(static_cast<size_t>(std::bit_width(static_cast<uint32_t>(context))) - 1,
                  kContextBins - 1);
}

// All memory of a replay, sized once for the largest step.
struct Memory {
  Memory(const ReplayOptions& o, HugePageBuffer cache_pool, size_t workspace_bytes)
      : cache(std::move(cache_pool)),
        workspace(static_cast<int64_t>(workspace_bytes)),
        topk_indices(int64_t{o.engine.token_budget} * o.model.topk_width),
        fitted(o.model.topk_width > o.model.topk_tokens
                   ? int64_t{o.engine.token_budget} * o.model.topk_tokens
                   : 0),
        kv_indices(int64_t{o.engine.token_budget} * o.model.topk_tokens),
        q(int64_t{o.engine.token_budget} * o.dims.num_heads * o.dims.head_dim_qk()),
        out(int64_t{o.engine.token_budget} * o.dims.num_heads * o.dims.kv_lora_rank),
        lse(int64_t{o.engine.token_budget} * o.dims.num_heads),
        last_use(static_cast<size_t>(o.engine.num_blocks) *
                 static_cast<size_t>(o.engine.block_size)) {
    // NaN in every format: a row that nobody wrote cannot pass for a result.
    std::memset(cache.data(), 0xFF, cache.bytes());
  }

  std::byte* CacheRow(int64_t slot, int64_t row_bytes) const {
    return static_cast<std::byte*>(cache.data()) + slot * row_bytes;
  }

  HugePageBuffer cache;
  Buffer<std::byte> workspace;
  Buffer<int32_t> topk_indices;
  Buffer<int32_t> fitted;
  Buffer<int32_t> kv_indices;
  Buffer<BFloat16> q;
  Buffer<BFloat16> out;
  Buffer<float> lse;
  std::vector<int64_t> last_use;  // [num_slots] step, from 1, that last selected the slot
};

class Runner {
 public:
  Runner(const ReplayOptions& options, const Backend& backend, Engine engine, Plan plan,
         HugePageBuffer cache_pool, size_t workspace_bytes, std::optional<RowChecker> checker)
      : options_(options),
        backend_(backend),
        engine_(std::move(engine)),
        plan_(std::move(plan)),
        memory_(options, std::move(cache_pool), workspace_bytes),
        content_(options.dims, options.cache_format, options.seed),
        topk_({.topk_tokens = options.model.topk_tokens,
               .topk_width = options.model.topk_width,
               .kpool = options.model.kpool,
               .overlap = options.overlap,
               .seed = options.seed}),
        checker_(std::move(checker)) {
    if (options.model.sinks) sinks_ = content_.Sinks();
    result_.cache_bytes = static_cast<int64_t>(memory_.cache.bytes());
  }

  Status Run(const std::function<void(const ReplayProgress&)>& progress);
  ReplayResult TakeResult() { return std::move(result_); }

 private:
  void GenerateInputs(const Step& step);
  SparseMlaParams Params(const Step& step) const;
  Status RunStages(const Step& step, StepRecord& record);
  Status CheckRows(const Step& step);
  void Record(const Step& step, StepRecord& record);
  double CountUniqueBytes(const Step& step);

  const ReplayOptions& options_;
  const Backend& backend_;
  Engine engine_;
  Plan plan_;
  Memory memory_;
  ContentSource content_;
  TopkSource topk_;
  std::vector<float> sinks_;
  std::optional<RowChecker> checker_;
  int64_t rows_seen_ = 0;
  ReplayResult result_;
};

// Stands for the layers around attention: appends the step's rows to the cache, makes its queries
// and selections.
void Runner::GenerateInputs(const Step& step) {
  const Timer timer(result_.generation_seconds);
  const int64_t row_bytes = CacheRowBytes(options_.cache_format, options_.dims);
  const int64_t query_width = int64_t{options_.dims.num_heads} * options_.dims.head_dim_qk();
  const int32_t width = options_.model.topk_width;
  topk_.Retain(step.requests);
  for (int32_t r = 0; r < step.num_reqs(); ++r) {
    const auto req = static_cast<size_t>(r);
    const int32_t request = step.requests[req];
    for (int32_t t = step.query_start_loc[req]; t < step.query_start_loc[req + 1]; ++t) {
      const int32_t position = step.position(r, t);
      const int64_t content = engine_.ContentId(request, position);
      const int64_t slot = step.slot_mapping[static_cast<size_t>(t)];
      content_.WriteCacheRow(content, position, memory_.CacheRow(slot, row_bytes));
      content_.WriteQuery(content, position, memory_.q.row(t, query_width));
      topk_.WriteRow(request, position,
                     {memory_.topk_indices.row(t, width), static_cast<size_t>(width)});
    }
  }
}

SparseMlaParams Runner::Params(const Step& step) const {
  const EngineOptions& engine = options_.engine;
  const int64_t num_tokens = step.num_tokens();
  const int64_t heads = options_.dims.num_heads;
  SparseMlaParams params;
  params.topk_indices = View<const int32_t, 2>::Contiguous(memory_.topk_indices.data(),
                                                           {num_tokens, options_.model.topk_width});
  params.block_table = {.blocks = View<const int32_t, 2>::Contiguous(
                            step.block_table.data(), {step.num_reqs(), step.max_blocks}),
                        .block_size = engine.block_size,
                        .num_blocks = engine.num_blocks};
  params.attention = {
      .query = {.q = ConstTensor<3>::Contiguous(memory_.q.data(), DType::kBFloat16,
                                                {num_tokens, heads, options_.dims.head_dim_qk()})},
      .kv_cache = {.data = memory_.cache.data(),
                   .format = options_.cache_format,
                   .num_slots = NumCacheSlots(params.block_table)},
      .kv_indices = memory_.kv_indices.first(plan_.num_kv_indices()),
      .softmax_scale = 1.0f / std::sqrt(static_cast<float>(options_.model.qk_head_dim)),
      .q_scale = content_.q_scale(),
      .kv_scale = content_.kv_scale(),
      .sinks = sinks_,
      .out = Tensor<3>::Contiguous(memory_.out.data(), DType::kBFloat16,
                                   {num_tokens, heads, options_.dims.kv_lora_rank}),
      .lse = View<float, 2>::Contiguous(memory_.lse.data(), {num_tokens, heads})};
  return params;
}

Status Runner::RunStages(const Step& step, StepRecord& record) {
  const auto seconds = [&](Stage stage) -> double& {
    return record.stage_seconds[static_cast<size_t>(stage)];
  };
  {
    const Timer timer(seconds(Stage::kPlan));
    const auto changed = plan_.Build(PlanParamsOf(options_, step.query_start_loc, step.seq_lens));
    if (!changed.ok()) return changed.status();
    record.plan_reused = !changed.value();
  }
  const SparseMlaParams params = Params(step);
  const Workspace workspace = {memory_.workspace.data(), memory_.workspace.bytes()};
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    {
      const Timer timer(seconds(Stage::kConvert));
      const auto fitted = FitKpoolIndices(
          backend_, {.topk_indices = params.topk_indices,
                     .topk_tokens = options_.model.topk_tokens,
                     .fitted = View<int32_t, 2>::Contiguous(
                         memory_.fitted.data(), {step.num_tokens(), options_.model.topk_tokens})});
      if (!fitted.ok()) return fitted.status();
      SPARSEMLA_RETURN_IF_ERROR(ConvertIndices(
          backend_, {.topk_indices = fitted.value(),
                     .block_table = params.block_table,
                     .req_id_per_token = plan_.req_id_per_token(),
                     .kv_indptr = plan_.kv_indptr(),
                     .kv_indices = memory_.kv_indices.first(plan_.num_kv_indices())}));
    }
    {
      const Timer timer(seconds(Stage::kAttention));
      SPARSEMLA_RETURN_IF_ERROR(Attention(backend_, params.attention, plan_, workspace));
    }
    const Timer timer(seconds(Stage::kMerge));
    SPARSEMLA_RETURN_IF_ERROR(Merge(backend_, {.partials = PlanPartials(plan_, workspace),
                                               .sinks = params.attention.sinks,
                                               .out = params.attention.out,
                                               .lse = params.attention.lse}));
  }
  return {};
}

Status Runner::CheckRows(const Step& step) {
  const int64_t first = rows_seen_;
  rows_seen_ += step.num_tokens();
  if (!checker_.has_value()) return {};
  const Timer timer(result_.check_seconds);
  std::vector<int32_t> rows;
  const int64_t every = options_.check_rows;
  for (int64_t row = (first + every - 1) / every * every; row < rows_seen_; row += every) {
    rows.push_back(static_cast<int32_t>(row - first));
  }
  const auto outcome = checker_->Check(step, rows, Params(step));
  if (!outcome.ok()) return outcome.status();
  result_.checked_rows += static_cast<int64_t>(rows.size());
  result_.worst_error = std::max(result_.worst_error, outcome->worst_error);
  result_.mismatch = outcome->mismatch;
  return {};
}

// Bytes that a step must move at least once: each selected cache row, the queries, the outputs.
double Runner::CountUniqueBytes(const Step& step) {
  int64_t unique = 0;
  for (const int32_t slot : memory_.kv_indices.first(plan_.num_kv_indices())) {
    if (slot < 0) continue;
    int64_t& last_use = memory_.last_use[static_cast<size_t>(slot)];
    unique += last_use == step.index + 1 ? 0 : 1;
    last_use = step.index + 1;
  }
  const int64_t head_bytes = 2 * (options_.dims.head_dim_qk() + options_.dims.kv_lora_rank) + 4;
  return static_cast<double>(unique * CacheRowBytes(options_.cache_format, options_.dims) +
                             step.num_tokens() * options_.dims.num_heads * head_bytes);
}

void Runner::Record(const Step& step, StepRecord& record) {
  const Timer timer(result_.generation_seconds);
  record.index = step.index;
  record.clock_ms = step.clock_ms;
  record.num_reqs = step.num_reqs();
  record.decode_tokens = step.num_decode_tokens;
  record.prefill_tokens = step.num_tokens() - step.num_decode_tokens;
  record.num_waiting = step.num_waiting;
  record.num_preempted = step.num_preempted;
  record.admitted_tokens = step.admitted_tokens;
  record.hit_tokens = step.hit_tokens;
  record.blocks_referenced = step.blocks_referenced;
  record.blocks_idle = step.blocks_idle;
  record.imbalance = ComputePlanCosts(plan_).imbalance();
  const MlaDims& dims = options_.dims;
  record.flop = 2.0 * static_cast<double>(plan_.num_kv_indices()) * dims.num_heads *
                (dims.head_dim_qk() + dims.kv_lora_rank) * options_.num_layers;
  record.unique_bytes = CountUniqueBytes(step) * options_.num_layers;

  for (int32_t r = 0; r < step.num_reqs(); ++r) {
    const auto req = static_cast<size_t>(r);
    for (int32_t t = step.query_start_loc[req]; t < step.query_start_loc[req + 1]; ++t) {
      auto& contexts = t < step.num_decode_tokens ? result_.decode_contexts  //
                                                  : result_.prefill_contexts;
      ++contexts[ContextBin(step.position(r, t) + 1)];
    }
  }
  const Schedule& schedule = plan_.schedule();
  std::vector<int32_t> pieces(static_cast<size_t>(step.num_tokens() * schedule.fold));
  for (const WorkItem& item : schedule.work_items) ++pieces[static_cast<size_t>(item.row_begin)];
  for (const int32_t count : pieces) {
    if (count > 0) ++result_.rows_by_pieces[count];
  }
  for (StepShape* slowest : {&result_.slowest, &result_.slowest_decode}) {
    const bool fits = slowest == &result_.slowest || record.prefill_tokens == 0;
    if (!fits || record.total_seconds() <= slowest->seconds) continue;
    *slowest = {step.index, record.total_seconds(), step.query_start_loc, step.seq_lens};
  }
  result_.steps.push_back(record);
}

Status Runner::Run(const std::function<void(const ReplayProgress&)>& progress) {
  Step step;
  const auto more_steps = [&] {
    return options_.max_steps == 0 ||
           static_cast<int64_t>(result_.steps.size()) < options_.max_steps;
  };
  while (result_.mismatch.empty() && more_steps() && engine_.Schedule(step)) {
    GenerateInputs(step);
    StepRecord record;
    SPARSEMLA_RETURN_IF_ERROR(RunStages(step, record));
    Record(step, record);
    SPARSEMLA_RETURN_IF_ERROR(CheckRows(step));
    engine_.Complete(step);
    double fraction = static_cast<double>(engine_.finished_tokens()) /
                      static_cast<double>(engine_.total_tokens());
    if (options_.max_steps > 0) {
      fraction = std::max(fraction, static_cast<double>(result_.steps.size()) /
                                        static_cast<double>(options_.max_steps));
    }
    progress({.fraction = fraction, .step = &result_.steps.back()});
  }
  result_.num_requests = engine_.num_requests();
  result_.num_finished = engine_.num_finished();
  result_.mean_overlap = topk_.mean_overlap();
  result_.peak_memory_bytes = PeakMemoryBytes();
  return {};
}

}  // namespace

PlanCapacity CapacityOf(const ReplayOptions& options, const Backend& backend) {
  return {.schedule = options.schedule,
          .num_compute_units = backend.device().num_compute_units,
          .max_num_tokens = options.engine.token_budget,
          .max_num_reqs = options.engine.max_num_seqs,
          .topk_tokens = options.model.topk_tokens,
          .dims = options.dims};
}

PlanParams PlanParamsOf(const ReplayOptions& options, const std::vector<int32_t>& query_start_loc,
                        const std::vector<int32_t>& seq_lens) {
  return {.query_start_loc = query_start_loc,
          .seq_lens = seq_lens,
          .dims = options.dims,
          .q_dtype = DType::kBFloat16,
          .cache_format = options.cache_format,
          .topk_tokens = options.model.topk_tokens,
          .reorder_batch_threshold = 1 + options.engine.draft_tokens};
}

Result<ReplayResult> RunReplay(const std::vector<TrafficRequest>& traffic,
                               const ReplayOptions& options, const Backend& backend,
                               const std::function<void(const ReplayProgress&)>& progress) {
  const std::string reason =
      backend.UnsupportedReason({.dims = options.dims, .cache_format = options.cache_format});
  SPARSEMLA_CHECK(reason.empty(), StatusCode::kUnsupported, backend.name(), ": ", reason);
  auto engine = Engine::Create(traffic, options.engine);
  if (!engine.ok()) return engine.status();
  const PlanCapacity capacity = CapacityOf(options, backend);
  auto plan = Plan::Create(capacity);
  if (!plan.ok()) return plan.status();
  std::optional<RowChecker> checker;
  if (options.check_rows > 0) {
    auto created = RowChecker::Create(options, std::max(backend.device().num_threads, 1));
    if (!created.ok()) return created.status();
    checker = std::move(created).value();
  }
  auto cache_pool = HugePageBuffer::Allocate(
      static_cast<size_t>(int64_t{options.engine.num_blocks} * options.engine.block_size *
                          CacheRowBytes(options.cache_format, options.dims)));
  if (!cache_pool.ok()) return cache_pool.status();
  Runner runner(options, backend, std::move(engine).value(), std::move(plan).value(),
                std::move(cache_pool).value(), backend.AttentionWorkspaceBytes(capacity),
                std::move(checker));
  double wall_seconds = 0;
  Status status;
  {
    const Timer timer(wall_seconds);
    status = runner.Run(progress);
  }
  if (!status.ok()) return status;
  ReplayResult result = runner.TakeResult();
  result.wall_seconds = wall_seconds;
  return result;
}

}  // namespace sparsemla::replay
