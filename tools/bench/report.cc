#include "tools/bench/report.h"

#include <fmt/core.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

namespace sparsemla::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMicro = 1e6;
constexpr double kGiga = 1e-9;

double GBytes(const CellResult& result) {
  return static_cast<double>(result.num_keys * result.row_bytes) * kGiga;
}

std::string_view ShortKernel(std::string_view kernel) {
  constexpr std::string_view kPrefix = "attention_";
  return kernel.starts_with(kPrefix) ? kernel.substr(kPrefix.size()) : kernel;
}

// The first "KEY : value" of a file such as /proc/cpuinfo; empty if there is none.
std::string ProcValue(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == line.npos) continue;
    const size_t value = line.find_first_not_of(' ', colon + 1);
    return value == line.npos ? "" : line.substr(value);
  }
  return "";
}

Json DescribeMachine(const BenchOptions& options) {
  Json machine = {{"cpu", ProcValue("/proc/cpuinfo", "model name")},
                  {"hardware_threads", std::thread::hardware_concurrency()},
                  {"transparent_huge_pages", HugePageSetting()}};
#if defined(_SC_LEVEL2_CACHE_SIZE)
  machine["l2_bytes"] = sysconf(_SC_LEVEL2_CACHE_SIZE);
  machine["l3_bytes"] = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  machine["memory_bytes"] = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const auto backend = CreateBackend(options.backend, {.kernel = options.kernel, .num_threads = 1});
  if (backend.ok()) machine["features"] = backend.value()->device().features;
  return machine;
}

Json DescribeTimes(const Timing& timing, double divisor) {
  const auto us = [divisor](double seconds) { return seconds * kMicro / divisor; };
  return {{"median", us(timing.median)},
          {"best", us(timing.best)},
          {"p10", us(timing.p10)},
          {"p90", us(timing.p90)},
          {"median_of_all_samples", us(timing.median_of_all)}};
}

void DescribeTiming(const Cell& cell, Json& entry) {
  const CellResult& result = cell.result;
  const Timing& timing = result.timing;
  entry["us_per_call"] = DescribeTimes(timing, 1);
  entry["us_per_token"] = DescribeTimes(timing, cell.spec.workload.num_tokens());
  entry["samples_kept"] = timing.num_kept;
  entry["samples"] = timing.num_samples;
  entry["gflops"] = result.flop / timing.median * kGiga;
  entry["cache_gb_per_s"] = GBytes(result) / timing.median;
  entry["peak_unit"] = PeakUnitName(result.peak_unit);
  entry["peak_gflops"] = result.peak * kGiga;
  entry["share_of_peak"] = result.flop / timing.median / result.peak;
  entry["speedup_over_one_thread"] = cell.speedup ? Json(*cell.speedup) : Json();
}

Json DescribeCell(const Cell& cell) {
  const auto& [spec, result, speedup] = cell;
  Json entry = {{"workload", spec.workload.text},
                {"num_reqs", spec.workload.num_reqs()},
                {"num_tokens", spec.workload.num_tokens()},
                {"num_heads", spec.num_heads},
                {"cache_format", CacheFormatName(spec.cache_format)},
                {"topk_tokens", spec.topk_tokens},
                {"residency", ResidencyName(spec.residency)},
                {"backend", result.backend},
                {"kernel", result.kernel},
                {"threads", result.num_threads},
                {"unsupported_reason", result.unsupported_reason}};
  if (!result.unsupported_reason.empty()) return entry;
  entry["num_keys"] = result.num_keys;
  entry["row_bytes"] = result.row_bytes;
  entry["flop"] = result.flop;
  entry["num_work_items"] = result.num_work_items;
  entry["num_partials"] = result.num_partials;
  entry["checked_rows"] = result.num_checked_rows;
  entry["worst_error_of_tolerance"] = result.worst_error;
  entry["mismatch"] = result.mismatch;
  if (result.timed()) DescribeTiming(cell, entry);
  return entry;
}

Json DescribeOptions(const BenchOptions& options) {
  return {{"ragged", options.ragged},
          {"overlap", options.overlap ? Json(*options.overlap) : Json()},
          {"batch_invariant", options.batch_invariant},
          {"splits", options.splits},
          {"seconds", options.seconds},
          {"samples", options.num_samples},
          {"pool_mb", options.pool_mb},
          {"check", options.check}};
}

// Whether two cells differ in nothing but threads.
bool SameButThreads(const Cell& a, const Cell& b) {
  return a.spec.workload.text == b.spec.workload.text && a.spec.num_heads == b.spec.num_heads &&
         a.spec.cache_format == b.spec.cache_format && a.spec.topk_tokens == b.spec.topk_tokens &&
         a.spec.residency == b.spec.residency;
}

}  // namespace

void SetSpeedup(std::vector<Cell>& cells) {
  Cell& last = cells.back();
  const auto quiet = [](const Cell& cell) { return cell.result.timing.num_kept > 0; };
  if (!quiet(last) || last.result.num_threads == 1) return;
  for (const Cell& cell : cells) {
    if (quiet(cell) && cell.result.num_threads == 1 && SameButThreads(cell, last)) {
      last.speedup = cell.result.timing.median / last.result.timing.median;
    }
  }
}

std::string TableHeader(size_t workload_width) {
  return fmt::format(
      "{:<{}} {:>5} {:12} {:>5} {:8} {:9} {:>3} {:>10} {:>9} {:>9} {:>9} {:>9} {:>8} {:>5} {:>6} "
      "{:>9} {:>9} {:>5}\n",
      "workload", workload_width, "heads", "format", "topk", "rows", "kernel", "thr", "us/call",
      "us/token", "best", "p10", "p90", "GFLOP/s", "peak", "GB/s", "kept", "all med", "x1");
}

std::string TableRow(const Cell& cell, size_t workload_width) {
  const auto& [spec, result, speedup] = cell;
  std::string row =
      fmt::format("{:<{}} {:>5} {:12} {:>5} {:8} {:9} {:>3} ", spec.workload.text, workload_width,
                  spec.num_heads, CacheFormatName(spec.cache_format), spec.topk_tokens,
                  ResidencyName(spec.residency), ShortKernel(result.kernel), result.num_threads);
  if (!result.unsupported_reason.empty()) {
    return row + "not supported: " + result.unsupported_reason + "\n";
  }
  if (!result.mismatch.empty()) return row + "WRONG: " + result.mismatch + "\n";
  const Timing& timing = result.timing;
  const double per_token = kMicro / spec.workload.num_tokens();
  row += fmt::format(
      "{:10.1f} {:9.2f} {:9.2f} {:9.2f} {:9.2f} {:8.1f} {:4.0f}% {:6.1f} {:>9} {:9.2f} {:>5}",
      timing.median * kMicro, timing.median * per_token, timing.best * per_token,
      timing.p10 * per_token, timing.p90 * per_token, result.flop / timing.median * kGiga,
      100 * result.flop / timing.median / result.peak, GBytes(result) / timing.median,
      fmt::format("{}/{}", timing.num_kept, timing.num_samples), timing.median_of_all * per_token,
      speedup ? fmt::format("{:.2f}", *speedup) : "");
  return row + "\n";
}

std::string ReportJson(const std::string& command_line, const BenchOptions& options,
                       const CellRunner& runner, const std::vector<Cell>& cells) {
  Json peaks = Json::array();
  for (const auto& [key, flops] : runner.peaks()) {
    peaks.push_back(
        {{"unit", PeakUnitName(key.first)}, {"threads", key.second}, {"gflops", flops * kGiga}});
  }
  Json entries = Json::array();
  for (const Cell& cell : cells) entries.push_back(DescribeCell(cell));
  const Json report = {{"version", Version()},
                       {"command_line", command_line},
                       {"machine", DescribeMachine(options)},
                       {"options", DescribeOptions(options)},
                       {"peaks", peaks},
                       {"cells", entries}};
  // The command line may hold any bytes.
  return report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace sparsemla::bench
