#include "trace/golden.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "core/require.h"
#include "sparsemla/plan.h"

namespace sparsemla::trace {
namespace {

using nlohmann::json;

struct Case {
  std::string name;
  json inputs;
  json derived;
  json allocated;
  json outputs;
};

// Collects what differs in one case.
class Differences {
 public:
  Differences(const std::string& name, GoldenReport& report) : name_(name), report_(report) {}

  void Add(const std::string& what) { report_.mismatches.push_back("case " + name_ + ": " + what); }

  void Compare(const std::string& what, int64_t got, const json& want) {
    if (!want.is_null() && got != want.get<int64_t>()) {
      Add(StrCat(what, ": got ", got, ", want ", want.get<int64_t>()));
    }
  }

  // Reports the first entry that differs. `got(i)` is null for an entry that is not compared.
  template <typename Get>
  void CompareArray(const std::string& what, size_t size, const json& want, Get&& got) {
    if (size != want.size()) {
      return Add(StrCat(what, ": got ", size, " entries, want ", want.size()));
    }
    for (size_t i = 0; i < size; ++i) {
      const json entry = got(i);
      if (!want[i].is_null() && entry != want[i]) {
        return Add(StrCat(what, "[", i, "]: got ", entry.dump(), ", want ", want[i].dump()));
      }
    }
  }

 private:
  const std::string& name_;
  GoldenReport& report_;
};

bool IsFp8(const json& name) {
  return name.get<std::string>() == "fp8";
}

DType QueryType(const json& name, AiterTarget target) {
  if (!IsFp8(name)) return DType::kBFloat16;
  return target == AiterTarget::kGfx942 ? DType::kFloat8E4M3Fnuz : DType::kFloat8E4M3;
}

CacheFormat CacheType(const json& name, AiterTarget target) {
  if (!IsFp8(name)) return CacheFormat::kBFloat16;
  return target == AiterTarget::kGfx942 ? CacheFormat::kFp8E4M3Fnuz : CacheFormat::kFp8E4M3;
}

// Reads an integer without letting it wrap into int32_t.
int32_t Int(const json& object, const char* key) {
  const int64_t value = object.at(key).get<int64_t>();
  return static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
}

// A row of the file is a request of one query token, whose row then has seq_len keys.
Result<Plan> PlanCase(const json& inputs, AiterTarget target, int32_t topk_arg) {
  std::vector<int32_t> seq_lens = inputs.at("kv_lens").get<std::vector<int32_t>>();
  const int32_t num_rows = static_cast<int32_t>(seq_lens.size());
  std::vector<int32_t> query_start_loc;
  for (int32_t row = 0; row <= num_rows; ++row) query_start_loc.push_back(row);
  const int32_t longest =
      seq_lens.empty() ? 0 : *std::max_element(seq_lens.begin(), seq_lens.end());

  PlanCapacity capacity;
  capacity.schedule = ScheduleKind::kAiter;
  capacity.num_compute_units = Int(inputs, "num_cu");
  capacity.max_num_tokens = Int(inputs, "max_tokens_for_info");
  capacity.max_num_reqs = std::max(1, num_rows);
  capacity.topk_tokens = topk_arg >= 0 ? topk_arg : std::max(1, longest);
  capacity.dims.num_heads = Int(inputs, "num_heads");
  capacity.max_splits = Int(inputs, "max_split_per_batch");
  capacity.aiter_target = target;
  SPARSEMLA_REQUIRE(capacity.max_splits != 0, "max_split_per_batch = 0 means nothing to AITER");
  Result<Plan> plan = Plan::Create(capacity);
  if (!plan.ok()) return plan;

  PlanParams params;
  params.query_start_loc = query_start_loc;
  params.seq_lens = seq_lens;
  params.dims = capacity.dims;
  params.q_dtype = QueryType(inputs.at("dtype_q_arg"), target);
  params.cache_format = CacheType(inputs.at("dtype_kv_arg"), target);
  params.topk_tokens = capacity.topk_tokens;
  const Result<bool> built = plan->Build(params);
  if (!built.ok()) return built.status();
  return plan;
}

// AITER's item for ours. With its topk argument AITER reads a padded [rows, topk] matrix and says
// the real row where it otherwise says the virtual one.
json ItemRow(const Plan& plan, const WorkItem& item, int32_t topk_arg) {
  int32_t batch_idx = item.batch_idx;
  int32_t shift = 0;
  if (topk_arg >= 0) {
    batch_idx /= plan.schedule().fold;
    shift = batch_idx * topk_arg - plan.kv_indptr()[static_cast<size_t>(batch_idx)];
  }
  return {
      batch_idx,           item.partial_row, item.row_begin, item.row_end, item.kv_begin + shift,
      item.kv_end + shift, item.kv_offset,   item.pad};
}

void ComparePlan(const Plan& plan, const Case& golden, int32_t topk_arg, Differences& diff) {
  const Schedule& schedule = plan.schedule();
  const json& outputs = golden.outputs;
  diff.CompareArray("work_indptr", schedule.work_indptr.size(), outputs.at("work_indptr"),
                    [&](size_t i) { return json(schedule.work_indptr[i]); });
  diff.CompareArray("work_info_rows", schedule.work_items.size(), outputs.at("work_info_rows"),
                    [&](size_t i) { return ItemRow(plan, schedule.work_items[i], topk_arg); });
  // AITER's arrays are sized for the capacity: past the step the total is repeated, and no row is
  // written.
  const size_t num_rows = schedule.reduce_final_map.size();
  diff.CompareArray("reduce_indptr", std::max(num_rows + 1, outputs.at("reduce_indptr").size()),
                    outputs.at("reduce_indptr"),
                    [&](size_t i) { return json(schedule.reduce_indptr[std::min(i, num_rows)]); });
  diff.CompareArray("reduce_final_map", std::max(num_rows, outputs.at("reduce_final_map").size()),
                    outputs.at("reduce_final_map"), [&](size_t i) -> json {
                      if (i >= num_rows) return nullptr;
                      const RowRange& range = schedule.reduce_final_map[i];
                      return {range.begin, range.end};
                    });
  diff.CompareArray("reduce_partial_map", schedule.reduce_partial_map.size(),
                    outputs.at("reduce_partial_map"),
                    [&](size_t i) { return json(schedule.reduce_partial_map[i]); });
  const json& derived = golden.derived;
  diff.Compare("fold", schedule.fold, derived.value("fold", json()));
  diff.Compare("virtual_rows", static_cast<int64_t>(num_rows),
               derived.value("virtual_rows", json()));
  diff.Compare("num_works", static_cast<int64_t>(schedule.work_items.size()),
               derived.value("num_works", json()));
  diff.Compare("num_partials", schedule.num_partials, derived.value("num_partials", json()));
}

void CompareSizes(const json& inputs, const json& allocated, AiterTarget target,
                  Differences& diff) {
  AiterSizeParams params;
  params.target = target;
  params.num_compute_units = Int(inputs, "num_cu");
  params.max_num_tokens = Int(inputs, "max_tokens_for_info");
  params.num_heads = Int(inputs, "num_heads");
  params.q_dtype = QueryType(inputs.value("info_dtype_q", inputs.at("dtype_q_arg")), target);
  params.cache_format = CacheType(inputs.value("info_dtype_kv", inputs.at("dtype_kv_arg")), target);
  const Result<AiterBufferSizes> sizes = GetAiterBufferSizes(params);
  if (!sizes.ok()) return diff.Add(sizes.status().message());
  diff.Compare("allocated.work_meta_data", sizes->work_meta_data, allocated.at("work_meta_data"));
  diff.Compare("allocated.work_indptr", sizes->work_indptr, allocated.at("work_indptr"));
  diff.Compare("allocated.work_info_set", sizes->work_info_set,
               allocated.at("work_info_set").at(0));
  diff.Compare("allocated.reduce_indptr", sizes->reduce_indptr, allocated.at("reduce_indptr"));
  diff.Compare("allocated.reduce_final_map", sizes->reduce_final_map,
               allocated.at("reduce_final_map").at(0));
  diff.Compare("allocated.reduce_partial_map", sizes->reduce_partial_map,
               allocated.at("reduce_partial_map"));
}

void CheckCase(const Case& golden, GoldenReport& report) {
  Differences diff(golden.name, report);
  const AiterTarget target = golden.inputs.at("gfx").get<std::string>() == "gfx950"
                                 ? AiterTarget::kGfx950
                                 : AiterTarget::kGfx942;
  const int32_t topk_arg = Int(golden.inputs, "topk_arg");
  CompareSizes(golden.inputs, golden.allocated, target, diff);
  const Result<Plan> plan = PlanCase(golden.inputs, target, topk_arg);
  if (!plan.ok()) return diff.Add(plan.status().message());
  ComparePlan(plan.value(), golden, topk_arg, diff);
}

// Replaces the outputs of "x_parallel" by those of "x_serial" where the file has both.
void PreferSerial(std::vector<Case>& cases) {
  constexpr std::string_view kParallel = "_parallel";
  for (Case& golden : cases) {
    if (!golden.name.ends_with(kParallel)) continue;
    const std::string serial =
        golden.name.substr(0, golden.name.size() - kParallel.size()) + "_serial";
    const auto sibling = std::find_if(cases.begin(), cases.end(),
                                      [&](const Case& other) { return other.name == serial; });
    if (sibling == cases.end()) continue;
    golden.outputs = sibling->outputs;
    golden.derived = sibling->derived;
  }
}

}  // namespace

Result<GoldenReport> CheckGoldenFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  SPARSEMLA_REQUIRE(file.is_open(), path, ": cannot be opened");
  try {
    const json document = json::parse(file);
    std::vector<Case> cases;
    for (const json& entry : document.at("cases")) {
      cases.push_back({entry.at("name").get<std::string>(), entry.at("inputs"), entry.at("derived"),
                       entry.at("allocated"), entry.at("outputs")});
    }
    PreferSerial(cases);
    GoldenReport report;
    for (const Case& golden : cases) CheckCase(golden, report);
    report.num_cases = static_cast<int32_t>(cases.size());
    return report;
  } catch (const json::exception& error) {
    return Status(StatusCode::kInvalidArgument,
                  StrCat(path, ": not a planner golden file: ", error.what()));
  }
}

}  // namespace sparsemla::trace
