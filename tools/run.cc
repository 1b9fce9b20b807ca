// `sparsemla run`: runs cases on a back end and judges the answers.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "sparsemla/backend.h"
#include "tools/commands.h"
#include "trace/case.h"
#include "trace/compare.h"
#include "trace/run_case.h"

namespace sparsemla::tools {
namespace {

using Json = nlohmann::ordered_json;

struct RunCommand {
  std::vector<std::string> cases;
  std::string backend;
  BackendOptions backend_options;
  trace::RunOptions run;
  bool check = false;
  bool json = false;
  std::string output;
};

// One answer against what the case expects.
struct AnswerCheck {
  std::string_view name;
  double error = 0;
  double tolerance = 0;  // 0: exact
  std::string mismatch;  // empty: right
};

std::string FirstDifference(std::span<const int32_t> got, std::span<const int32_t> want) {
  const auto [g, w] = std::mismatch(got.begin(), got.end(), want.begin(), want.end());
  if (g != got.end() && w != want.end()) {
    return fmt::format("entry {}: got {}, want {}", g - got.begin(), *g, *w);
  }
  if (got.size() == want.size()) return "";
  return fmt::format("{} entries, want {}", got.size(), want.size());
}

AnswerCheck CheckOut(const trace::Case& input, const trace::CaseResult& result) {
  const auto tolerance = trace::ToleranceFor(input.kv_cache.format, input.model_dtype);
  const auto& expected = input.expected.out;
  const trace::Comparison comparison = trace::CompareAnswers(
      {.out = ConstTensor<3>::Contiguous(result.out.data(), input.model_dtype, expected.shape)},
      {.out = ConstTensor<3>::Contiguous(expected.data, DType::kFloat32, expected.shape)},
      input.num_tokens, tolerance);
  return {"out", comparison.worst_out, tolerance.out_relative, comparison.first_mismatch};
}

AnswerCheck CheckLse(const trace::Case& input, const trace::CaseResult& result) {
  const auto tolerance = trace::ToleranceFor(input.kv_cache.format, input.model_dtype);
  const auto& expected = input.expected.lse;
  // Outputs without columns: only the lse is compared.
  const auto no_out = ConstTensor<3>::Contiguous(nullptr, DType::kFloat32,
                                                 {expected.shape[0], expected.shape[1], 0});
  const trace::Comparison comparison = trace::CompareAnswers(
      {.out = no_out, .lse = View<const float, 2>::Contiguous(result.lse.data(), expected.shape)},
      {.out = no_out, .lse = expected}, input.num_tokens, tolerance);
  return {"lse", comparison.worst_lse, tolerance.lse_absolute, comparison.first_mismatch};
}

std::vector<AnswerCheck> CheckAnswers(const trace::Case& input, const trace::CaseResult& result) {
  const trace::ExpectedAnswers& expected = input.expected;
  std::vector<AnswerCheck> checks;
  if (!expected.out.empty()) checks.push_back(CheckOut(input, result));
  if (!expected.lse.empty()) checks.push_back(CheckLse(input, result));
  const auto check_ints = [&](std::string_view name, const std::vector<int32_t>& got,
                              std::span<const int32_t> want, bool given) {
    if (given) checks.push_back({name, 0, 0, FirstDifference(got, want)});
  };
  check_ints("req_id_per_token", result.req_id_per_token, expected.req_id_per_token,
             !expected.req_id_per_token.empty());
  check_ints("paged_kv_indptr", result.paged_kv_indptr, expected.paged_kv_indptr,
             !expected.paged_kv_indptr.empty());
  check_ints("selected_indptr", result.selected_indptr, expected.selected_indptr,
             !expected.selected_indptr.empty());
  check_ints("selected_slots", result.selected_slots, expected.selected_slots,
             !expected.selected_indptr.empty());
  return checks;
}

bool AllRight(const std::vector<AnswerCheck>& checks) {
  for (const AnswerCheck& check : checks) {
    if (!check.mismatch.empty()) return false;
  }
  return true;
}

std::string_view KernelName(const trace::Case& input, const Backend& backend) {
  return backend.KernelName(
      {.dims = input.dims, .q_dtype = input.q_dtype(), .cache_format = input.kv_cache.format});
}

void PrintCase(const std::string& path, const trace::Case& input, const Backend& backend,
               const std::vector<AnswerCheck>& checks, bool check) {
  fmt::print("{}\n  {} tokens, {} heads, {} keys a row, {} cache, on {} ({})\n", path,
             input.num_tokens, input.dims.num_heads, input.topk_tokens,
             CacheFormatName(input.kv_cache.format), backend.name(), KernelName(input, backend));
  if (!check) return;
  fmt::print("  {:18} {:>10} {:>10}\n", "answer", "error", "tolerance");
  for (const AnswerCheck& answer : checks) {
    const std::string error = answer.tolerance > 0 ? fmt::format("{:.2e}", answer.error) : "-";
    const std::string tolerance =
        answer.tolerance > 0 ? fmt::format("{:.0e}", answer.tolerance) : "exact";
    fmt::print("  {:18} {:>10} {:>10}   {}\n", answer.name, error, tolerance,
               answer.mismatch.empty() ? "ok" : "MISMATCH at " + answer.mismatch);
  }
}

Json DescribeCase(const std::string& path, const trace::Case& input, const Backend& backend,
                  const std::vector<AnswerCheck>& checks, bool check) {
  Json entry = {{"file", path},
                {"name", input.name},
                {"backend", backend.name()},
                {"kernel", KernelName(input, backend)},
                {"num_tokens", input.num_tokens},
                {"num_heads", input.dims.num_heads},
                {"topk_tokens", input.topk_tokens},
                {"kv_cache_dtype", CacheFormatName(input.kv_cache.format)}};
  if (!check) return entry;
  Json answers = Json::array();
  for (const AnswerCheck& answer : checks) {
    answers.push_back({{"name", answer.name},
                       {"ok", answer.mismatch.empty()},
                       {"error", answer.error},
                       {"tolerance", answer.tolerance},
                       {"mismatch", answer.mismatch}});
  }
  entry["ok"] = AllRight(checks);
  entry["answers"] = answers;
  return entry;
}

// Runs one file; `json` gets its entry if JSON was asked for.
int RunFile(const RunCommand& command, const std::string& path, const Backend& backend,
            Json& json) {
  const Result<trace::Case> input = trace::LoadCase(path);
  if (!input.ok()) return BadInput(input.status());
  if (command.check && !input.value().expected.any()) {
    return BadInput(path + ": nothing to check: the file has no expected.* tensor");
  }
  const Result<trace::CaseResult> result = trace::RunCase(input.value(), backend, command.run);
  if (!result.ok()) return BadInput(path + ": " + result.status().message());
  if (!command.output.empty()) {
    const Status written = trace::WriteCaseResult(command.output, input.value(), result.value());
    if (!written.ok()) return BadInput(written);
  }
  std::vector<AnswerCheck> checks;
  if (command.check) checks = CheckAnswers(input.value(), result.value());
  if (command.json) {
    json.push_back(DescribeCase(path, input.value(), backend, checks, command.check));
  } else {
    PrintCase(path, input.value(), backend, checks, command.check);
  }
  return AllRight(checks) ? kExitOk : kExitMismatch;
}

// Every file is run, whatever became of those before it; the worst outcome is the exit code.
int Run(const RunCommand& command) {
  if (!command.output.empty() && command.cases.size() > 1) {
    return BadInput(fmt::format("run: --output takes the answers of one case, {} are given",
                                command.cases.size()));
  }
  const auto backend = CreateBackend(command.backend, command.backend_options);
  if (!backend.ok()) return BadInput(backend.status());
  int exit_code = kExitOk;
  std::array<int, 3> files_by_code = {};
  Json json = Json::array();
  for (const std::string& path : command.cases) {
    const int code = RunFile(command, path, *backend.value(), json);
    ++files_by_code[static_cast<size_t>(code)];
    exit_code = std::max(exit_code, code);
  }
  if (command.json) {
    fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
  } else if (command.check && command.cases.size() > 1) {
    fmt::print("{} files: {} right, {} wrong, {} not run\n", command.cases.size(),
               files_by_code[kExitOk], files_by_code[kExitMismatch], files_by_code[kExitBadInput]);
  }
  return exit_code;
}

}  // namespace

void RegisterRun(CLI::App& app, int& exit_code) {
  auto run = std::make_shared<RunCommand>();
  CLI::App* command = app.add_subcommand("run", "Run case files and check their answers");
  command->add_option("CASE", run->cases, "Case files (sparsemla-case-1)")->required();
  command->add_option("--backend", run->backend,
                      "Back end; default: SPARSEMLA_BACKEND, then the best that works here");
  command->add_option("--kernel", run->backend_options.kernel, "Attention kernel to force");
  command->add_option("--threads", run->backend_options.num_threads,
                      "Threads of the cpu back end; 0: SPARSEMLA_NUM_THREADS, then all cores");
  AddSplitsOption(*command, run->run.splits,
                  "Pieces of every row: N (balanced: exactly, if the row has N keys; aiter: at "
                  "most) or auto");
  AddScheduleOption(*command, run->run.schedule);
  command->add_option("--compute-units", run->run.num_compute_units,
                      "Workers to plan for; 0: what the back end says");
  command->add_flag("--check", run->check,
                    "Compare with the expected answers; exit 1 if one is wrong");
  command->add_option("--output", run->output, "Write the answers to this safetensors file");
  command->add_flag("--json", run->json, "Print JSON");
  command->callback([run, &exit_code] { exit_code = Run(*run); });
}

}  // namespace sparsemla::tools
