#include "tools/plan_svg.h"

#include <fmt/core.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "tools/commands.h"

namespace sparsemla::tools {
namespace {

constexpr int kLeft = 70;  // worker numbers
constexpr int kTop = 64;   // title and axis
constexpr int kChartWidth = 900;
constexpr int kLegendWidth = 210;
constexpr int kLine = 16;  // height of a line of text
constexpr int32_t kMaxLegend = 24;
constexpr size_t kMaxMerges = 40;

// Neighbouring rows get distant hues: steps of about the golden angle, 137.5 degrees.
std::string RowColour(int32_t row) {
  return fmt::format("hsl({},62%,{}%)", int64_t{row} * 1375 / 10 % 360, row % 2 == 0 ? 58 : 68);
}

std::string Text(int x, int y, std::string_view text, std::string_view attributes = "") {
  return fmt::format("<text x=\"{}\" y=\"{}\" {}>{}</text>\n", x, y, attributes, text);
}

// The smallest 1, 2 or 5 times a power of ten that gives at most ten ticks.
int64_t TickStep(int64_t longest) {
  for (int64_t power = 1;; power *= 10) {
    for (const int64_t step : {power, 2 * power, 5 * power}) {
      if (longest <= 10 * step) return step;
    }
  }
}

struct Lanes {
  std::vector<int32_t> units;  // workers with work
  int64_t longest = 1;         // blocks of the busiest
};

Lanes UsedLanes(const Schedule& schedule) {
  Lanes lanes;
  for (int32_t unit = 0; unit < schedule.num_compute_units; ++unit) {
    int64_t blocks = 0;
    for (const WorkItem& item : WorkOf(schedule, unit)) blocks += Blocks(item);
    if (blocks > 0) lanes.units.push_back(unit);
    lanes.longest = std::max(lanes.longest, blocks);
  }
  return lanes;
}

std::string DrawAxis(const Lanes& lanes, int bottom) {
  std::string svg = Text(kLeft, kTop - 22, "blocks of 16 keys", "class=\"dim\"");
  const int64_t step = TickStep(lanes.longest);
  for (int64_t tick = 0; tick <= lanes.longest; tick += step) {
    const int x = kLeft + static_cast<int>(tick * kChartWidth / lanes.longest);
    svg += fmt::format("<line x1=\"{0}\" y1=\"{1}\" x2=\"{0}\" y2=\"{2}\" class=\"grid\"/>\n", x,
                       kTop - 4, bottom);
    svg += Text(x, kTop - 8, std::to_string(tick), "text-anchor=\"middle\" class=\"dim\"");
  }
  return svg;
}

std::string DrawLane(const Plan& plan, int32_t unit, const Lanes& lanes, int y, int height) {
  const auto place = [&](int64_t blocks) {
    return kLeft + static_cast<double>(blocks * kChartWidth) / static_cast<double>(lanes.longest);
  };
  std::string svg;
  int64_t blocks = 0;
  for (const WorkItem& item : WorkOf(plan.schedule(), unit)) {
    const double begin = place(blocks);
    blocks += Blocks(item);
    svg += fmt::format(
        "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\">"
        "<title>worker {}: {}{}</title></rect>\n",
        begin, y, place(blocks) - begin, height, RowColour(item.batch_idx), unit,
        ItemText(plan, item),
        item.partial_row < 0 ? "" : fmt::format(", partial {}", item.partial_row));
  }
  return svg;
}

std::string DrawLegend(const Schedule& schedule, int32_t num_rows) {
  const int x = kLeft + kChartWidth + 24;
  std::string svg = Text(x, kTop - 8, "rows", "class=\"dim\"");
  const int32_t shown = std::min(num_rows, kMaxLegend);
  for (int32_t row = 0; row < shown; ++row) {
    const int y = kTop + row * kLine;
    svg += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{}\"/>\n", x, y,
                       RowColour(row));
    svg += Text(x + 18, y + 10, "row " + RowText(schedule, row));
  }
  if (shown < num_rows) {
    svg += Text(x, kTop + shown * kLine + 10, fmt::format("and {} more", num_rows - shown),
                "class=\"dim\"");
  }
  return svg;
}

// "row 3 <- partials 4, 5, 6"; a long list of partials ends in "...".
std::vector<std::string> MergeLines(const Schedule& schedule) {
  std::vector<std::string> lines;
  for (size_t group = 0; group + 1 < schedule.reduce_indptr.size(); ++group) {
    const int32_t begin = schedule.reduce_indptr[group];
    const int32_t end = schedule.reduce_indptr[group + 1];
    if (begin == end) continue;
    std::string line = fmt::format("row {} \xE2\x86\x90 partials",
                                   RowText(schedule, schedule.reduce_final_map[group].begin));
    for (int32_t p = begin; p < std::min(end, begin + 16); ++p) {
      line += fmt::format("{} {}", p == begin ? "" : ",",
                          schedule.reduce_partial_map[static_cast<size_t>(p)]);
    }
    lines.push_back(end - begin > 16 ? line + ", ..." : line);
  }
  return lines;
}

std::string DrawLanes(const Plan& plan, const Lanes& lanes, int lane_height) {
  const int label_every = lane_height >= 12 ? 1 : lane_height >= 9 ? 2 : 4;
  std::string svg;
  int y = kTop;
  for (size_t lane = 0; lane < lanes.units.size(); ++lane, y += lane_height) {
    if (lane % static_cast<size_t>(label_every) == 0) {
      svg += Text(kLeft - 8, y + std::min(lane_height, 12), std::to_string(lanes.units[lane]),
                  "text-anchor=\"end\" class=\"dim\"");
    }
    svg += DrawLane(plan, lanes.units[lane], lanes, y, lane_height - 1);
  }
  return svg;
}

std::string DrawMerges(std::span<const std::string> merges, size_t shown, int top) {
  std::string svg = Text(kLeft, top, "merges", "class=\"dim\"");
  if (shown < merges.size()) {
    svg += Text(kLeft + 60, top, fmt::format("(the first {} of {})", shown, merges.size()),
                "class=\"dim\"");
  }
  for (size_t i = 0; i < shown; ++i) {
    svg += Text(kLeft, top + static_cast<int>(i + 1) * kLine, merges[i]);
  }
  return svg;
}

}  // namespace

std::string RowText(const Schedule& schedule, int32_t virtual_row) {
  if (schedule.fold == 1) return std::to_string(virtual_row);
  return fmt::format("{}#{}", virtual_row / schedule.fold, virtual_row % schedule.fold);
}

std::string ItemText(const Plan& plan, const WorkItem& item) {
  const Schedule& schedule = plan.schedule();
  const std::string row = RowText(schedule, item.batch_idx);
  const int32_t begin = plan.kv_indptr()[static_cast<size_t>(item.batch_idx / schedule.fold)];
  if (item.partial_row < 0) return fmt::format("row {} ({} keys)", row, item.kv_end - begin);
  return fmt::format("row {} keys {}..{} of {}", row, item.kv_begin - begin, item.kv_end - begin,
                     item.kv_end + item.kv_offset - begin);
}

std::string PlanSvg(const Plan& plan) {
  const Schedule& schedule = plan.schedule();
  const Lanes lanes = UsedLanes(schedule);
  const std::vector<std::string> merges = MergeLines(schedule);
  const auto num_lanes = static_cast<int>(lanes.units.size());
  const int32_t num_rows = plan.num_tokens() * schedule.fold;

  const int lane_height = num_lanes <= 40 ? 16 : num_lanes <= 120 ? 9 : 5;
  const int lanes_end = kTop + num_lanes * lane_height;
  const int merges_top =
      28 + std::max(lanes_end, kTop + std::min(num_rows, kMaxLegend + 1) * kLine);
  const size_t merges_shown = std::min(merges.size(), kMaxMerges);
  const int height = merges_top + static_cast<int>(merges_shown + 1) * kLine;

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" "
      "viewBox=\"0 0 {0} {1}\">\n<style>text{{font:12px sans-serif;fill:#222}}"
      ".dim{{fill:#777}}.grid{{stroke:#ddd}}.title{{font-size:15px;font-weight:600}}</style>\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      kLeft + kChartWidth + kLegendWidth, height);
  svg += Text(kLeft, 22,
              fmt::format("{} schedule: {} rows, {} keys, {} work items on {} of {} workers, "
                          "imbalance {:.1f} %",
                          ScheduleName(plan.capacity().schedule), plan.num_tokens(),
                          plan.num_kv_indices(), schedule.work_items.size(), num_lanes,
                          schedule.num_compute_units, 100 * ComputePlanCosts(plan).imbalance()),
              "class=\"title\"");
  svg += DrawAxis(lanes, lanes_end);
  svg += DrawLanes(plan, lanes, lane_height);
  svg += DrawLegend(schedule, num_rows);
  if (!merges.empty()) svg += DrawMerges(merges, merges_shown, merges_top);
  return svg + "</svg>\n";
}

}  // namespace sparsemla::tools
