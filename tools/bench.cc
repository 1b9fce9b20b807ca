// `sparsemla bench`: how long attention takes, for whoever writes or chooses kernels.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/bench/cell.h"
#include "tools/bench/report.h"
#include "tools/bench/workload.h"
#include "tools/commands.h"
#include "trace/file.h"

namespace sparsemla::tools {
namespace {

struct BenchCommand {
  std::vector<std::string> workloads;
  std::vector<int32_t> threads = {0};
  std::vector<int32_t> heads = {128};
  std::vector<int32_t> topk = {2048};
  std::vector<CacheFormat> formats = {CacheFormat::kBFloat16};
  std::vector<bench::Residency> residencies = {bench::Residency::kContext};
  bench::BenchOptions options = {};
  std::string json;
  std::string command_line;
};

// Adds an option whose value is items separated by commas; `parse` gives nothing for a bad one.
template <typename T>
void AddListOption(CLI::App& command, const std::string& name, std::vector<T>& values,
                   std::function<std::optional<T>(std::string_view)> parse,
                   const std::string& allowed, const std::string& help) {
  command
      .add_option_function<std::string>(
          name,
          [name, &values, parse, allowed](const std::string& text) {
            values.clear();
            for (size_t begin = 0; begin <= text.size();) {
              const size_t end = std::min(text.find(',', begin), text.size());
              const std::string_view item = std::string_view(text).substr(begin, end - begin);
              const std::optional<T> value = parse(item);
              if (!value) {
                throw CLI::ValidationError(
                    name, fmt::format("{} is not {}", trace::Quoted(item), allowed));
              }
              values.push_back(*value);
              begin = end + 1;
            }
          },
          help + ", separated by commas: " + allowed)
      ->type_name("LIST");
}

void AddNumbersOption(CLI::App& command, const std::string& name, std::vector<int32_t>& values,
                      int32_t min, int32_t max, const std::string& help) {
  const auto parse = [min, max](std::string_view item) -> std::optional<int32_t> {
    int32_t number = 0;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), number);
    const bool whole = error == std::errc() && end == item.data() + item.size();
    return whole && number >= min && number <= max ? std::optional(number) : std::nullopt;
  };
  AddListOption<int32_t>(command, name, values, parse, fmt::format("{}..{}", min, max), help);
}

std::optional<CacheFormat> FindFormat(std::string_view name) {
  const Result<CacheFormat> format = FindCacheFormat(name);
  return format.ok() ? std::optional(format.value()) : std::nullopt;
}

std::optional<bench::Residency> FindResidency(std::string_view name) {
  using enum bench::Residency;
  for (const bench::Residency residency : {kL2, kL3, kDram, kContext}) {
    if (bench::ResidencyName(residency) == name) return residency;
  }
  return std::nullopt;
}

// Cells that share a cache follow each other, since filling one takes time.
std::vector<bench::CellSpec> MakeSpecs(const BenchCommand& command,
                                       const std::vector<bench::Workload>& workloads,
                                       const std::vector<int32_t>& threads) {
  std::vector<bench::CellSpec> specs;
  for (const CacheFormat format : command.formats) {
    for (const bench::Residency residency : command.residencies) {
      for (const bench::Workload& workload : workloads) {
        for (const int32_t topk : command.topk) {
          for (const int32_t heads : command.heads) {
            for (const int32_t num_threads : threads) {
              specs.push_back({.workload = workload,
                               .num_heads = heads,
                               .cache_format = format,
                               .topk_tokens = topk,
                               .residency = residency,
                               .num_threads = num_threads});
            }
          }
        }
      }
    }
  }
  return specs;
}

// The peaks of every unit, so that the report has those that no cell is compared with.
void PrintPeaks(bench::CellRunner& runner, const std::vector<int32_t>& threads) {
  fmt::print("peak, register-only, GFLOP/s:");
  for (const int32_t num_threads : threads) {
    for (const bench::PeakUnit unit : bench::AvailablePeakUnits()) {
      fmt::print(" {}x{} {:.0f}", bench::PeakUnitName(unit), num_threads,
                 runner.Peak(unit, num_threads) * 1e-9);
    }
  }
  fmt::print("\n");
}

int WriteReport(const BenchCommand& command, const bench::CellRunner& runner,
                const std::vector<bench::Cell>& cells) {
  if (command.json.empty()) return kExitOk;
  const std::string report =
      bench::ReportJson(command.command_line, command.options, runner, cells);
  const std::string_view parts[] = {report};
  const Status written = trace::WriteFileAtomically(command.json, parts);
  return written.ok() ? kExitOk : BadInput(written);
}

// All cells are measured, whatever became of those before; the worst outcome is the exit code.
int Bench(const BenchCommand& command) {
  std::vector<bench::Workload> workloads;
  size_t width = 8;
  for (const std::string& text : command.workloads) {
    auto workload = bench::ParseWorkload(text);
    if (!workload.ok()) return BadInput(workload.status());
    width = std::max(width, text.size());
    workloads.push_back(std::move(workload).value());
  }
  std::vector<int32_t> threads;
  for (const int32_t num_threads : command.threads) {
    const auto backend = CreateBackend(
        command.options.backend, {.kernel = command.options.kernel, .num_threads = num_threads});
    if (!backend.ok()) return BadInput(backend.status());
    threads.push_back(std::max(1, backend.value()->device().num_threads));
  }
  bench::CellRunner runner(command.options);
  PrintPeaks(runner, threads);
  fmt::print("{}", bench::TableHeader(width));
  std::vector<bench::Cell> cells;
  int exit_code = kExitOk;
  for (bench::CellSpec& spec : MakeSpecs(command, workloads, threads)) {
    std::fflush(stdout);
    auto result = runner.Run(spec);
    if (!result.ok()) {
      exit_code = BadInput(result.status());
      continue;
    }
    if (!result->mismatch.empty()) exit_code = std::max(exit_code, kExitMismatch);
    if (!result->unsupported_reason.empty()) exit_code = kExitBadInput;
    cells.push_back({.spec = std::move(spec), .result = std::move(result).value()});
    bench::SetSpeedup(cells);
    fmt::print("{}", bench::TableRow(cells.back(), width));
  }
  return std::max(exit_code, WriteReport(command, runner, cells));
}

void AddCaseOptions(CLI::App& command, BenchCommand& bench) {
  command
      .add_option("WORKLOAD", bench.workloads,
                  "Batches: 64q1s8k is 64 requests of 1 query token in 8192 cached ones; _ joins")
      ->required();
  command.add_option("--backend", bench.options.backend,
                     "Back end; default: the best that works here");
  command.add_option("--kernel", bench.options.kernel, "Attention kernel to force");
  AddNumbersOption(command, "--threads", bench.threads, 1, 4096,
                   "Threads; default: the back end's");
  AddNumbersOption(command, "--heads", bench.heads, 1, kMaxNumHeads, "Query heads; default: 128");
  AddNumbersOption(command, "--topk", bench.topk, 1, 1 << 20,
                   "Most keys of a query token; default: 2048");
  AddListOption<CacheFormat>(command, "--format", bench.formats, FindFormat,
                             "bf16, fp16, fp32, fp8_e4m3, fp8_e4m3fnuz or fp8_ds_mla",
                             "Cache formats; default: bf16");
  AddListOption<bench::Residency>(
      command, "--residency", bench.residencies, FindResidency, "l2, l3, dram or context",
      "Where keys come from: 256 rows, 8192 rows, a pool, or each request's own tokens (default)");
}

void AddRunOptions(CLI::App& command, BenchCommand& bench) {
  auto& options = bench.options;
  command.add_option("--pool-mb", options.pool_mb, "MB of the dram pool; most that context takes")
      ->check(CLI::Range(int64_t{8}, int64_t{1} << 20))
      ->capture_default_str();
  command.add_flag("--ragged", options.ragged, "Row lengths uniform in 1..topk");
  command
      .add_option_function<double>(
          "--overlap", [&options](double percent) { options.overlap = percent / 100; },
          "Percent of its keys that a query shares with the one before it; default: chance")
      ->check(CLI::Range(0.0, 100.0));
  command.add_flag("--batch-invariant", options.batch_invariant,
                   "Cut each row by its own length only");
  AddSplitsOption(command, options.splits, "Pieces of every row: exactly N, or auto");
  command.add_option("--seconds", options.seconds, "Sampling time of a cell, at least 5 samples")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command.add_option("--samples", options.num_samples, "Samples of a cell, instead of --seconds")
      ->check(CLI::Range(1, 1000000));
  command.add_flag("--check,!--no-check", options.check,
                   "Compare three rows with ref before timing, exit 1 if one is wrong; default");
  command.add_option("--json", bench.json, "Write everything to this file");
}

}  // namespace

void RegisterBench(CLI::App& app, int& exit_code, const std::string& command_line) {
  auto bench = std::make_shared<BenchCommand>();
  bench->command_line = command_line;
  CLI::App* command = app.add_subcommand("bench", "Measure attention and merge of a back end");
  AddCaseOptions(*command, *bench);
  AddRunOptions(*command, *bench);
  command->callback([bench, &exit_code] { exit_code = Bench(*bench); });
}

}  // namespace sparsemla::tools
