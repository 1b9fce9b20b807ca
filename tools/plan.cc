// `sparsemla plan`: makes a plan from row lengths and shows it, or checks golden plans.
#include "sparsemla/plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/backend.h"
#include "tools/commands.h"
#include "tools/plan_svg.h"
#include "trace/file.h"
#include "trace/golden.h"

namespace sparsemla::tools {
namespace {

using Json = nlohmann::ordered_json;

struct PlanOptions {
  std::vector<int32_t> kv_lens;
  int32_t num_heads = 16;
  int32_t num_compute_units = 0;
  int32_t max_splits = 0;
  ScheduleKind schedule = ScheduleKind::kBalanced;
  bool batch_invariant = false;
  bool json = false;
  std::string svg;
  std::vector<std::string> golden;
};

// One decode row a length, nothing cut by top-k.
Result<Plan> MakePlan(const PlanOptions& options) {
  int32_t units = options.num_compute_units;
  if (units == 0) {
    const auto backend = CreateBackend("");
    if (!backend.ok()) return backend.status();
    units = backend.value()->device().num_compute_units;
  }
  const auto num_rows = static_cast<int32_t>(options.kv_lens.size());
  const int32_t longest = *std::max_element(options.kv_lens.begin(), options.kv_lens.end());
  const MlaDims dims = {.num_heads = options.num_heads};
  auto plan = Plan::Create({.schedule = options.schedule,
                            .num_compute_units = units,
                            .max_num_tokens = num_rows,
                            .max_num_reqs = num_rows,
                            .topk_tokens = std::max(longest, 1),
                            .dims = dims,
                            .max_splits = options.max_splits,
                            .batch_invariant = options.batch_invariant});
  if (!plan.ok()) return plan;
  std::vector<int32_t> query_start_loc(options.kv_lens.size() + 1);
  std::iota(query_start_loc.begin(), query_start_loc.end(), 0);
  const auto built = plan->Build({.query_start_loc = query_start_loc,
                                  .seq_lens = options.kv_lens,
                                  .dims = dims,
                                  .topk_tokens = std::max(longest, 1)});
  if (!built.ok()) return built.status();
  return plan;
}

// Rows by number of pieces.
std::map<int32_t, int32_t> SplitHistogram(const Schedule& schedule) {
  std::map<int32_t, int32_t> pieces_of_row;
  for (const WorkItem& item : schedule.work_items) ++pieces_of_row[item.batch_idx];
  std::map<int32_t, int32_t> histogram;
  for (const auto& [row, pieces] : pieces_of_row) ++histogram[pieces];
  return histogram;
}

int32_t NumMergeGroups(const Schedule& schedule) {
  int32_t groups = 0;
  for (size_t g = 0; g + 1 < schedule.reduce_indptr.size(); ++g) {
    groups += schedule.reduce_indptr[g + 1] > schedule.reduce_indptr[g] ? 1 : 0;
  }
  return groups;
}

// "1 partial", "2 partials".
std::string Count(int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

// One line a worker: a bar of letters, one letter a row, to scale, then its first items.
void PrintTimeline(const Plan& plan, int width) {
  const Schedule& schedule = plan.schedule();
  constexpr int32_t kMaxLines = 40;
  constexpr int kItemsShown = 2;
  int64_t longest = 1;
  std::vector<int32_t> used;
  for (int32_t unit = 0; unit < schedule.num_compute_units; ++unit) {
    int64_t blocks = 0;
    for (const WorkItem& item : WorkOf(schedule, unit)) blocks += Blocks(item);
    longest = std::max(longest, blocks);
    if (!WorkOf(schedule, unit).empty()) used.push_back(unit);
  }
  const int bar_width = std::clamp(width - 60, 16, 100);
  fmt::print("\nworker   {:<{}}   ({} blocks of 16 keys wide; a letter a row)\n", "timeline",
             bar_width, longest);
  const auto shown = std::min<size_t>(used.size(), kMaxLines);
  for (const int32_t unit : std::span(used).first(shown)) {
    std::string bar;
    std::string items;
    int64_t blocks = 0;
    int count = 0;
    for (const WorkItem& item : WorkOf(schedule, unit)) {
      blocks += Blocks(item);
      const auto end = static_cast<size_t>((blocks * bar_width + longest - 1) / longest);
      bar.resize(end, static_cast<char>('a' + item.batch_idx % 26));
      if (++count <= kItemsShown) items += (items.empty() ? "" : ", ") + ItemText(plan, item);
    }
    if (count > kItemsShown) items += fmt::format(", {} more", count - kItemsShown);
    fmt::print("{:6}   {:<{}}   {}\n", unit, bar, bar_width, items);
  }
  if (shown < used.size()) fmt::print("   ...   {} more workers\n", used.size() - shown);
}

void PrintText(const Plan& plan) {
  const Schedule& schedule = plan.schedule();
  const PlanCosts costs = ComputePlanCosts(plan);
  int32_t busy = 0;
  for (int32_t unit = 0; unit < schedule.num_compute_units; ++unit) {
    busy += WorkOf(schedule, unit).empty() ? 0 : 1;
  }
  fmt::print("schedule    {}, {} compute units, {}\n", ScheduleName(plan.capacity().schedule),
             schedule.num_compute_units,
             plan.max_splits() < 0 ? "no limit of pieces"
                                   : "at most " + Count(plan.max_splits(), "piece") + " a row");
  fmt::print("rows        {} of {} keys in all, {} heads\n", plan.num_tokens(),
             plan.num_kv_indices(), plan.dims().num_heads);
  if (schedule.fold > 1) {
    fmt::print("folded      {} virtual rows of {} heads a row\n", schedule.fold,
               schedule.heads_per_item);
  }
  fmt::print("work items  {} on {}\n", schedule.work_items.size(), Count(busy, "worker"));
  fmt::print("partials    {} in {}\n", schedule.num_partials,
             Count(NumMergeGroups(schedule), "merge group"));
  fmt::print("imbalance   {:.1f} % (busiest worker {}, lower bound {}, in blocks of 16 keys)\n",
             100 * costs.imbalance(), costs.max, costs.lower_bound);
  fmt::print("splits      ");
  for (const auto& [pieces, rows] : SplitHistogram(schedule)) {
    fmt::print("{} of {}   ", Count(rows, "row"), Count(pieces, "piece"));
  }
  fmt::print("\n");
  PrintTimeline(plan, TerminalWidth());
}

void PrintJson(const Plan& plan) {
  const Schedule& schedule = plan.schedule();
  const PlanCosts costs = ComputePlanCosts(plan);
  Json items = Json::array();
  for (const WorkItem& item : schedule.work_items) {
    items.push_back({item.batch_idx, item.partial_row, item.row_begin, item.row_end, item.kv_begin,
                     item.kv_end, item.kv_offset, item.pad});
  }
  Json final_map = Json::array();
  for (const RowRange& range : schedule.reduce_final_map) {
    final_map.push_back({range.begin, range.end});
  }
  Json histogram = Json::object();
  for (const auto& [pieces, rows] : SplitHistogram(schedule)) {
    histogram[std::to_string(pieces)] = rows;
  }
  const Json json = {{"schedule", ScheduleName(plan.capacity().schedule)},
                     {"num_compute_units", schedule.num_compute_units},
                     {"num_heads", plan.dims().num_heads},
                     {"max_splits", plan.max_splits()},
                     {"num_rows", plan.num_tokens()},
                     {"fold", schedule.fold},
                     {"heads_per_item", schedule.heads_per_item},
                     {"num_partials", schedule.num_partials},
                     {"num_merge_groups", NumMergeGroups(schedule)},
                     {"cost_max", costs.max},
                     {"cost_lower_bound", costs.lower_bound},
                     {"imbalance", costs.imbalance()},
                     {"rows_by_pieces", histogram},
                     {"kv_indptr", plan.kv_indptr()},
                     {"work_indptr", schedule.work_indptr},
                     {"work_items", items},
                     {"reduce_indptr", schedule.reduce_indptr},
                     {"reduce_final_map", final_map},
                     {"reduce_partial_map", schedule.reduce_partial_map}};
  fmt::print("{}\n", json.dump());
}

int ShowPlan(const PlanOptions& options) {
  if (options.kv_lens.empty()) return BadInput("plan: --kv-lens or --golden is required");
  const Result<Plan> plan = MakePlan(options);
  if (!plan.ok()) return BadInput(plan.status());
  if (!options.svg.empty()) {
    const std::string svg = PlanSvg(plan.value());
    const std::string_view parts[] = {svg};
    const Status written = trace::WriteFileAtomically(options.svg, parts);
    if (!written.ok()) return BadInput(written);
  }
  if (options.json) {
    PrintJson(plan.value());
  } else {
    PrintText(plan.value());
  }
  return kExitOk;
}

// Whole numbers separated by commas; false if `text` is anything else.
bool ParseList(std::string_view text, std::vector<int32_t>& numbers) {
  numbers.clear();
  const char* const end = text.data() + text.size();
  for (const char* begin = text.data();; ++begin) {
    int32_t number = 0;
    const auto [stop, error] = std::from_chars(begin, end, number);
    if (error != std::errc()) return false;
    numbers.push_back(number);
    if (stop == end) return true;
    if (*stop != ',') return false;
    begin = stop;
  }
}

int CheckGolden(const PlanOptions& options) {
  int exit_code = kExitOk;
  Json json = Json::array();
  for (const std::string& path : options.golden) {
    const Result<trace::GoldenReport> report = trace::CheckGoldenFile(path);
    if (!report.ok()) {
      exit_code = BadInput(report.status());
      continue;
    }
    const std::vector<std::string>& mismatches = report.value().mismatches;
    if (!mismatches.empty()) exit_code = std::max(exit_code, kExitMismatch);
    json.push_back(
        {{"file", path}, {"num_cases", report.value().num_cases}, {"mismatches", mismatches}});
    if (options.json) continue;
    fmt::print("{}: {} cases, {}\n", path, report.value().num_cases,
               mismatches.empty() ? "all equal" : fmt::format("{} differences", mismatches.size()));
    for (const std::string& mismatch : mismatches) fmt::print("  {}\n", mismatch);
  }
  if (options.json) {
    fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
  }
  return exit_code;
}

}  // namespace

void RegisterPlan(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command =
      app.add_subcommand("plan", "Show how rows become work items, or check golden plans");
  command
      ->add_option_function<std::string>(
          "--kv-lens",
          [options](const std::string& text) {
            if (!ParseList(text, options->kv_lens)) {
              throw CLI::ValidationError("--kv-lens",
                                         fmt::format("'{}' is not a list like 2048,100,17", text));
            }
          },
          "Keys of every row, such as 2048,100,17")
      ->type_name("INT,...");
  command->add_option("--num-heads", options->num_heads, "Query heads")->capture_default_str();
  command->add_option("--compute-units", options->num_compute_units,
                      "Workers to plan for; 0: those of the default back end");
  command->add_option("--max-splits", options->max_splits,
                      "Most pieces of a row; 0: the default rule, -1: no limit");
  AddScheduleOption(*command, options->schedule);
  command->add_flag("--batch-invariant", options->batch_invariant,
                    "Cut each row by its own length only (balanced)");
  command->add_flag("--json", options->json, "Print JSON");
  command->add_option("--svg", options->svg, "Also draw the timeline to this file");
  command->add_option("--golden", options->golden,
                      "Compare the aiter schedule with every case of these files");
  command->callback([options, &exit_code] {
    exit_code = options->golden.empty() ? ShowPlan(*options) : CheckGolden(*options);
  });
}

}  // namespace sparsemla::tools
