#include "tools/plan_svg.h"

#include <fmt/core.h>

#include <algorithm>
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
constexpr size_t kMaxLegend = 24;
constexpr size_t kMaxMerges = 40;

// Neighbouring rows get distant hues: 137.5 degrees is the golden angle.
std::string RowColour(int32_t row) {
  return fmt::format(
      "hsl({:.0f},62%,{}%)",
      static_cast<double>(row % 720) * 137.508 - 360.0 * static_cast<double>(row * 137 / 360),
      row % 2 == 0 ? 58 : 68);
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

std::string DrawLane(const Schedule& schedule, int32_t unit, const Lanes& lanes, int y,
                     int height) {
  std::string svg;
  int64_t blocks = 0;
  for (const WorkItem& item : WorkOf(schedule, unit)) {
    const double x = static_cast<double>(blocks * kChartWidth) / static_cast<double>(lanes.longest);
    blocks += Blocks(item);
    const double end =
        static_cast<double>(blocks * kChartWidth) / static_cast<double>(lanes.longest);
    svg += fmt::format(
        "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\">"
        "<title>worker {}, row {}, keys {} to {}{}</title></rect>\n",
        kLeft + x, y, end - x, height, RowColour(item.batch_idx), unit, item.batch_idx,
        item.kv_begin, item.kv_end,
        item.partial_row < 0 ? "" : fmt::format(", partial {}", item.partial_row));
  }
  return svg;
}

std::string DrawLegend(const Schedule& schedule) {
  const int x = kLeft + kChartWidth + 24;
  std::string svg = Text(x, kTop - 8, "rows", "class=\"dim\"");
  std::vector<int32_t> rows;
  for (const WorkItem& item : schedule.work_items) rows.push_back(item.batch_idx);
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  const size_t shown = std::min(rows.size(), kMaxLegend);
  for (size_t i = 0; i < shown; ++i) {
    const int y = kTop + static_cast<int>(i) * kLine;
    svg += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{}\"/>\n", x, y,
                       RowColour(rows[i]));
    svg += Text(x + 18, y + 10, fmt::format("row {}", rows[i]));
  }
  if (shown < rows.size()) {
    svg += Text(x, kTop + static_cast<int>(shown) * kLine + 10,
                fmt::format("and {} more", rows.size() - shown), "class=\"dim\"");
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
    std::string line =
        fmt::format("row {} \xE2\x86\x90 partials", schedule.reduce_final_map[group].begin);
    for (int32_t p = begin; p < std::min(end, begin + 16); ++p) {
      line += fmt::format("{} {}", p == begin ? "" : ",",
                          schedule.reduce_partial_map[static_cast<size_t>(p)]);
    }
    lines.push_back(end - begin > 16 ? line + ", ..." : line);
  }
  return lines;
}

}  // namespace

std::string PlanSvg(const Plan& plan) {
  const Schedule& schedule = plan.schedule();
  const PlanCosts costs = ComputePlanCosts(plan);
  const Lanes lanes = UsedLanes(schedule);
  const std::vector<std::string> merges = MergeLines(schedule);

  const auto num_lanes = static_cast<int>(lanes.units.size());
  const int lane_height = num_lanes <= 40 ? 16 : num_lanes <= 120 ? 9 : 5;
  const int label_every = lane_height >= 12 ? 1 : lane_height >= 9 ? 2 : 4;
  const int bottom =
      std::max(kTop + num_lanes * lane_height, kTop + static_cast<int>(kMaxLegend + 1) * kLine);
  const size_t merges_shown = std::min(merges.size(), kMaxMerges);
  const int height = bottom + (merges.empty() ? 20 : 60 + static_cast<int>(merges_shown) * kLine);

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
                          schedule.num_compute_units, 100 * costs.imbalance()),
              "class=\"title\"");
  svg += DrawAxis(lanes, kTop + num_lanes * lane_height);
  for (int lane = 0; lane < num_lanes; ++lane) {
    const int32_t unit = lanes.units[static_cast<size_t>(lane)];
    const int y = kTop + lane * lane_height;
    if (lane % label_every == 0) {
      svg += Text(kLeft - 8, y + std::min(lane_height, 12), std::to_string(unit),
                  "text-anchor=\"end\" class=\"dim\"");
    }
    svg += DrawLane(schedule, unit, lanes, y, lane_height - 1);
  }
  svg += DrawLegend(schedule);
  if (!merges.empty()) svg += Text(kLeft, bottom + 28, "merges", "class=\"dim\"");
  for (size_t i = 0; i < merges_shown; ++i) {
    svg += Text(kLeft, bottom + 46 + static_cast<int>(i) * kLine, merges[i]);
  }
  if (merges_shown < merges.size()) {
    svg += Text(kLeft + 60, bottom + 28,
                fmt::format("(the first {} of {})", merges_shown, merges.size()), "class=\"dim\"");
  }
  return svg + "</svg>\n";
}

}  // namespace sparsemla::tools
