#include "tools/replay/summary.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace sparsemla::replay {
namespace {

using Json = nlohmann::ordered_json;

std::string Line(std::string_view name, std::string_view value) {
  return fmt::format("{:<15} {}\n", name, value);
}

std::string PiecesText(const ReplayResult& result) {
  std::string text;
  for (const auto& [pieces, rows] : result.rows_by_pieces) {
    text += fmt::format("{}{} rows in {}", text.empty() ? "" : ", ", rows, pieces);
  }
  return text;
}

double Share(double part, double whole) {
  return whole > 0 ? part / whole : 0.0;
}

}  // namespace

std::string SecondsText(double seconds) {
  const double magnitude = std::max(seconds, 0.0);
  const auto text = [](double value, const char* unit) {
    return fmt::format("{:.{}f} {}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, unit);
  };
  if (magnitude < 1e-3) return text(seconds * 1e6, "µs");
  if (magnitude < 1) return text(seconds * 1e3, "ms");
  return text(seconds, "s");
}

RunDescription Describe(const std::string& trace, int32_t tp, const ReplayOptions& options,
                        const Backend& backend) {
  const EngineOptions& engine = options.engine;
  const MlaDims& dims = options.dims;
  return {
      {"trace", trace},
      {"model", fmt::format("{}, rank of {}: {} of {} heads, {} + {} wide, top-k {}{}",
                            options.model.name, tp, dims.num_heads, options.model.num_heads,
                            dims.kv_lora_rank, dims.qk_rope_head_dim, options.model.topk_tokens,
                            options.model.sinks ? ", sinks" : "")},
      {"cache", fmt::format("{}, {} blocks of {} tokens", CacheFormatName(options.cache_format),
                            engine.num_blocks - 1, engine.block_size)},
      {"engine",
       fmt::format("{} tokens a step, {} requests at a time, {} drafts, {} ms a step",
                   engine.token_budget, engine.max_num_seqs, engine.draft_tokens, engine.step_ms)},
      {"back end",
       fmt::format("{}, {}: {}", backend.name(),
                   backend.KernelName({.dims = options.dims, .cache_format = options.cache_format}),
                   backend.device().name)},
      {"plan", fmt::format("{} schedule for {} workers, used by {} of {} layers",
                           options.schedule == ScheduleKind::kAiter ? "aiter" : "balanced",
                           backend.device().num_compute_units, options.num_layers,
                           options.model.num_layers)},
  };
}

std::string SummaryTable(const ReplayResult& result, const RunDescription& description) {
  const ReplayTotals totals = Summarise(result);
  const auto num_steps = static_cast<double>(result.steps.size());
  std::string text;
  for (const auto& [name, value] : description) text += Line(name, value);
  text += Line("", "");
  text += Line("requests", fmt::format("{} of {} finished, {} preemptions", result.num_finished,
                                       result.num_requests, totals.preempted));
  text += Line("steps", fmt::format("{}", result.steps.size()));
  text += Line("tokens", fmt::format("{} computed: {} decode, {} prefill", totals.tokens(),
                                     totals.decode_tokens, totals.prefill_tokens));
  text += Line("prefix hits", fmt::format("{:.1f} % of {} admitted prompt tokens",
                                          100 * totals.hit_rate(), totals.admitted_tokens));
  text += Line("plan reuse",
               fmt::format("{:.1f} % of the steps",
                           100 * Share(static_cast<double>(totals.plans_reused), num_steps)));
  text += Line("imbalance", fmt::format("mean {:.1f} %, max {:.1f} % over the lower bound",
                                        100 * totals.mean_imbalance, 100 * totals.max_imbalance));
  text += Line("pieces", PiecesText(result));
  text += fmt::format("\n{:<15} {:>12} {:>12} {:>12} {:>8}\n", "stage", "total", "median step",
                      "p90 step", "share");
  for (size_t stage = 0; stage < kNumStages; ++stage) {
    text +=
        fmt::format("{:<15} {:>12} {:>12} {:>12} {:>6.1f} %\n", kStageNames[stage],
                    SecondsText(totals.seconds[stage]), SecondsText(totals.median_seconds[stage]),
                    SecondsText(totals.p90_seconds[stage]),
                    100 * Share(totals.seconds[stage], totals.stage_seconds()));
  }
  text += Line("", "");
  text += Line("attention", fmt::format("{:.1f} GFLOP/s, {:.2f} GB/s of unique bytes",
                                        totals.gflops(), totals.gigabytes_per_second()));
  text +=
      Line("wall clock",
           fmt::format("{}: stages {}, simulated model {}, checks {}",
                       SecondsText(result.wall_seconds), SecondsText(totals.stage_seconds()),
                       SecondsText(result.generation_seconds), SecondsText(result.check_seconds)));
  text += Line("overlap",
               fmt::format("{:.1f} % between neighbouring selections", 100 * result.mean_overlap));
  text += Line("peak memory", fmt::format("{:.0f} MiB, of which cache {:.0f} MiB",
                                          static_cast<double>(result.peak_memory_bytes) / 0x1p20,
                                          static_cast<double>(result.cache_bytes) / 0x1p20));
  if (result.checked_rows > 0) {
    text += Line("checked rows",
                 fmt::format("{}, {} (worst error {:.0f} % of the tolerance)", result.checked_rows,
                             result.mismatch.empty() ? "all right" : "one is WRONG",
                             100 * result.worst_error));
  }
  return text;
}

std::string SummaryJson(const ReplayResult& result, const RunDescription& description) {
  const ReplayTotals totals = Summarise(result);
  Json configuration = Json::object();
  for (const auto& [name, value] : description) configuration[name] = value;
  Json stages = Json::object();
  for (size_t stage = 0; stage < kNumStages; ++stage) {
    stages[std::string(kStageNames[stage])] = {{"total", totals.seconds[stage]},
                                               {"median", totals.median_seconds[stage]},
                                               {"p90", totals.p90_seconds[stage]}};
  }
  Json pieces = Json::object();
  for (const auto& [count, rows] : result.rows_by_pieces) pieces[std::to_string(count)] = rows;
  const Json json = {{"configuration", configuration},
                     {"requests", result.num_requests},
                     {"requests_finished", result.num_finished},
                     {"preemptions", totals.preempted},
                     {"steps", result.steps.size()},
                     {"tokens", totals.tokens()},
                     {"decode_rows", totals.decode_tokens},
                     {"prefill_rows", totals.prefill_tokens},
                     {"prefix_hit_rate", totals.hit_rate()},
                     {"plans_reused", totals.plans_reused},
                     {"imbalance_mean", totals.mean_imbalance},
                     {"imbalance_max", totals.max_imbalance},
                     {"rows_by_pieces", pieces},
                     {"stage_seconds", stages},
                     {"gflops", totals.gflops()},
                     {"unique_gigabytes_per_second", totals.gigabytes_per_second()},
                     {"wall_seconds", result.wall_seconds},
                     {"generation_seconds", result.generation_seconds},
                     {"check_seconds", result.check_seconds},
                     {"selection_overlap", result.mean_overlap},
                     {"peak_memory_bytes", result.peak_memory_bytes},
                     {"cache_bytes", result.cache_bytes},
                     {"checked_rows", result.checked_rows},
                     {"worst_error", result.worst_error},
                     {"mismatch", result.mismatch}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace sparsemla::replay
