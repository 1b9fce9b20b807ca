// `sparsemla replay`: recorded traffic through a simulated engine and the real stages.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>

#include "tools/commands.h"
#include "tools/replay/models.h"
#include "tools/replay/report.h"
#include "tools/replay/runner.h"
#include "tools/replay/summary.h"
#include "tools/replay/traffic.h"
#include "trace/file.h"

namespace sparsemla::tools {
namespace {

constexpr int32_t kDefaultCacheTokens = 262144;

struct CommandOptions {
  std::string trace;
  std::string model = "deepseek-v3.2";
  std::string backend;
  std::string cache_format;
  std::string report;
  BackendOptions backend_options = {};
  int64_t num_requests = 0;
  int64_t cache_tokens = 0;
  int32_t tp = 0;
  bool json = false;
  replay::ReplayOptions replay = {};
};

// Where nothing else is asked for, the cache holds the usual number of tokens, or the longest
// request and half as much again.
Result<int32_t> NumBlocks(const CommandOptions& options,
                          const std::vector<replay::TrafficRequest>& traffic) {
  const int64_t block_size = std::max(options.replay.engine.block_size, 1);
  int64_t tokens = options.cache_tokens;
  if (tokens == 0) {
    int64_t longest = 0;
    for (const auto& request : traffic) {
      longest = std::max<int64_t>(longest, request.input_length + request.output_length);
    }
    tokens = std::max<int64_t>(kDefaultCacheTokens, longest + longest / 2);
  }
  constexpr int64_t kMaxTokens = int64_t{1} << 30;  // slots stay in 32 bits
  if (tokens < 1 || tokens > kMaxTokens) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the cache has {} tokens; it must have 1 to {}", tokens, kMaxTokens));
  }
  return static_cast<int32_t>((tokens + block_size - 1) / block_size + 1);
}

// Checks and completes the options that the library does not.
Status Resolve(CommandOptions& options) {
  auto& replay = options.replay;
  const auto model = replay::FindModel(options.model);
  if (!model.ok()) return model.status();
  replay.model = model.value();
  if (options.tp == 0) options.tp = std::min(8, replay.model.num_heads);
  const auto dims = replay::RankDims(replay.model, options.tp);
  if (!dims.ok()) return dims.status();
  replay.dims = dims.value();
  replay.cache_format = replay.model.cache_format;
  if (!options.cache_format.empty()) {
    const auto format = FindCacheFormat(options.cache_format);
    if (!format.ok()) return format.status();
    replay.cache_format = format.value();
  }
  replay.engine.seed = replay.seed;
  return {};
}

// One line that is rewritten in place, on terminals only.
class LiveLine {
 public:
  explicit LiveLine(bool enabled) : enabled_(enabled && isatty(STDERR_FILENO) != 0) {}
  ~LiveLine() {
    if (enabled_) fmt::print(stderr, "\r\x1b[K");
  }
  void Show(const replay::ReplayProgress& progress) const {
    if (!enabled_) return;
    constexpr int kBarWidth = 30;
    const auto done = static_cast<size_t>(std::clamp(progress.fraction, 0.0, 1.0) * kBarWidth);
    const replay::StepRecord& step = *progress.step;
    fmt::print(stderr,
               "\r\x1b[K[{:<{}}] {:3.0f} %  step {}  {} decode + {} prefill tokens  {} waiting  "
               "{:.0f} GFLOP/s",
               std::string(done, '='), kBarWidth, 100 * progress.fraction, step.index,
               step.decode_tokens, step.prefill_tokens, step.num_waiting, step.gflops());
    std::fflush(stderr);
  }

 private:
  bool enabled_;
};

int RunCommand(CommandOptions options) {
  const Status resolved = Resolve(options);
  if (!resolved.ok()) return BadInput(resolved);
  const auto traffic = replay::LoadTraffic(options.trace, options.num_requests);
  if (!traffic.ok()) return BadInput(traffic.status());
  const auto num_blocks = NumBlocks(options, traffic.value());
  if (!num_blocks.ok()) return BadInput(num_blocks.status());
  options.replay.engine.num_blocks = num_blocks.value();
  const auto backend = CreateBackend(options.backend, options.backend_options);
  if (!backend.ok()) return BadInput(backend.status());

  Result<replay::ReplayResult> result = Status();
  {
    const LiveLine live(!options.json);
    result = replay::RunReplay(traffic.value(), options.replay, *backend.value(),
                               [&](const replay::ReplayProgress& p) { live.Show(p); });
  }
  if (!result.ok()) return BadInput(result.status());
  const replay::RunDescription description =
      replay::Describe(options.trace, options.tp, options.replay, *backend.value());
  fmt::print("{}", options.json ? replay::SummaryJson(result.value(), description)
                                : replay::SummaryTable(result.value(), description));
  if (!options.report.empty()) {
    const auto html =
        replay::ReportHtml(result.value(), description, options.replay, *backend.value());
    if (!html.ok()) return BadInput(html.status());
    const std::string_view parts[] = {html.value()};
    const Status written = trace::WriteFileAtomically(options.report, parts);
    if (!written.ok()) return BadInput(written);
    if (!options.json) fmt::print("report          {}\n", options.report);
  }
  if (result->mismatch.empty()) return kExitOk;
  fmt::print(stderr, "sparsemla: wrong answer: {}\n", result->mismatch);
  return kExitMismatch;
}

void AddOptions(CLI::App& command, CommandOptions& options) {
  auto& replay = options.replay;
  auto& engine = replay.engine;
  const auto positive = CLI::PositiveNumber;
  const auto not_negative = CLI::NonNegativeNumber;
  command.add_option("trace", options.trace, "Traffic, one JSON object a line (Mooncake format)")
      ->required();
  command.add_option("--requests", options.num_requests, "Replay the first so many requests")
      ->check(positive);
  command.add_option("--steps", replay.max_steps, "Stop after so many steps")->check(positive);
  std::string names;
  for (const auto& model : replay::Models()) names += " " + std::string(model.name);
  command.add_option("--model", options.model, "Attention shape:" + names)->capture_default_str();
  command
      .add_option("--tp", options.tp,
                  "Tensor-parallel ranks that share the heads; default: 8, less for few heads")
      ->check(positive);
  command.add_option("--backend", options.backend, "Back end; default: the best that works here");
  command.add_option("--kernel", options.backend_options.kernel, "Attention kernel to force");
  command
      .add_option("--threads", options.backend_options.num_threads, "Threads; default: all cores")
      ->check(positive);
  command.add_option(
      "--cache-format", options.cache_format,
      "bf16, fp16, fp32, fp8_e4m3, fp8_e4m3fnuz or fp8_ds_mla; default: the model's");
  command.add_option("--block-size", engine.block_size, "Tokens of a cache block; divides 512")
      ->capture_default_str();
  command
      .add_option("--cache-tokens", options.cache_tokens,
                  "Tokens that the cache holds; default: 262144, more for longer requests")
      ->check(positive);
  command.add_option("--token-budget", engine.token_budget, "Most query tokens of a step")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  command.add_option("--max-seqs", engine.max_num_seqs, "Most requests running at a time")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  command.add_option("--draft-tokens", engine.draft_tokens, "Speculative tokens a decode verifies")
      ->capture_default_str();
  command.add_option("--step-ms", engine.step_ms, "What a step adds to the simulated clock")
      ->capture_default_str();
  command.add_option("--layers", replay.num_layers, "Attention calls a step, all with one plan")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  AddScheduleOption(command, replay.schedule);
  command.add_option("--overlap", replay.overlap, "Shared part of neighbouring selections")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command.add_option("--seed", replay.seed, "Seed of all generated contents")
      ->check(not_negative)
      ->capture_default_str();
  command.add_option("--check-rows", replay.check_rows, "Check every so many rows against ref")
      ->check(positive);
  command.add_option("--report", options.report, "Write an HTML report to this file");
  command.add_flag("--json", options.json, "Print JSON");
}

}  // namespace

void RegisterReplay(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* command = app.add_subcommand(
      "replay", "Replay recorded serving traffic through plan, convert, attention and merge");
  AddOptions(*command, *options);
  command->callback([options, &exit_code] { exit_code = RunCommand(*options); });
}

}  // namespace sparsemla::tools
