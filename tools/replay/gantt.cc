// The plan of one step, drawn: a lane a worker, a box a work item.
#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "tools/replay/plots.h"

namespace sparsemla::replay {
namespace {

constexpr double kWidth = 1170;
constexpr double kLeft = 66;
constexpr double kRight = 12;
constexpr double kTop = 8;
constexpr double kBottom = 38;
constexpr double kLeastBox = 1.0;  // pixels; shorter neighbours of one kind are drawn as one

enum class BoxKind { kDecode, kPrefill, kDecodePiece, kPrefillPiece };

BoxKind KindOf(const WorkItem& item, const Plan& plan) {
  const int32_t row = item.row_begin / plan.schedule().fold;
  const bool decode = row < plan.batch_split().num_decode_tokens;
  if (item.partial_row < 0) return decode ? BoxKind::kDecode : BoxKind::kPrefill;
  return decode ? BoxKind::kDecodePiece : BoxKind::kPrefillPiece;
}

std::span<const WorkItem> ItemsOf(const Schedule& schedule, size_t unit) {
  const auto begin = static_cast<size_t>(schedule.work_indptr[unit]);
  const auto end = static_cast<size_t>(schedule.work_indptr[unit + 1]);
  return schedule.work_items.subspan(begin, end - begin);
}

int64_t NumKeys(std::span<const WorkItem> items) {
  int64_t keys = 0;
  for (const WorkItem& item : items) keys += item.kv_end - item.kv_begin;
  return keys;
}

std::string Box(double x, double end, double y, double height, BoxKind kind,
                const std::string& title) {
  return fmt::format(
      "<rect class=\"g{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\">"
      "<title>{}</title></rect>",
      static_cast<int>(kind), x, y, std::max(end - x, 0.3), height, title);
}

std::string Lane(const Plan& plan, size_t unit, double per_key, double y, double height) {
  std::string svg;
  double x = kLeft;      // where the next item begins
  double begin = kLeft;  // where the box that is not drawn yet begins
  int32_t items = 0;     // in that box
  const auto lane = ItemsOf(plan.schedule(), unit);
  for (size_t i = 0; i < lane.size(); ++i) {
    const WorkItem& item = lane[i];
    x += per_key * (item.kv_end - item.kv_begin);
    ++items;
    const bool last = i + 1 == lane.size() || KindOf(lane[i + 1], plan) != KindOf(item, plan);
    if (x - begin < kLeastBox && !last) continue;
    const std::string title =
        items > 1
            ? fmt::format("worker {}: {} short items up to row {}", unit, items, item.row_begin)
            : fmt::format("worker {}: row {}, {} keys{}", unit, item.row_begin,
                          item.kv_end - item.kv_begin, item.partial_row < 0 ? "" : ", a piece");
    svg += Box(begin, x, y, height, KindOf(item, plan), title);
    begin = x;
    items = 0;
  }
  return svg;
}

}  // namespace

std::string GanttFigure(const Plan& plan, std::string_view title, std::string_view note) {
  const Schedule& schedule = plan.schedule();
  std::vector<size_t> units;  // with work
  int64_t longest = 1;
  for (size_t unit = 0; unit < static_cast<size_t>(schedule.num_compute_units); ++unit) {
    const int64_t keys = NumKeys(ItemsOf(schedule, unit));
    if (keys > 0) units.push_back(unit);
    longest = std::max(longest, keys);
  }
  const double pitch = units.size() <= 40 ? 18 : units.size() <= 120 ? 9 : 5;
  const double bottom = kTop + pitch * static_cast<double>(units.size());
  const double per_key = (kWidth - kLeft - kRight) / static_cast<double>(longest);
  std::string html = fmt::format(
      "<figure class=\"wide\"><h3>{}</h3><p>{}</p><div class=\"legend\">"
      "<span class=\"key\"><i class=\"h0\"></i>decode row</span>"
      "<span class=\"key\"><i class=\"h2\"></i>piece of a decode row</span>"
      "<span class=\"key\"><i class=\"h1\"></i>prefill row</span>"
      "<span class=\"key\"><i class=\"h3\"></i>piece of a prefill row</span></div>"
      "<svg viewBox=\"0 0 {:g} {:g}\" role=\"img\" aria-label=\"{}\">",
      EscapeHtml(title), EscapeHtml(note), kWidth, bottom + kBottom, EscapeHtml(title));
  for (size_t lane = 0; lane < units.size(); ++lane) {
    const double y = kTop + pitch * static_cast<double>(lane);
    if (pitch > 9 || lane % 4 == 0) {
      html +=
          fmt::format("<text class=\"axis\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>",
                      kLeft - 6, y + std::min(pitch, 14.0) - 1, units[lane]);
    }
    html += Lane(plan, units[lane], per_key, y, pitch - 2);
  }
  for (int part = 0; part <= 4; ++part) {
    const double x = kLeft + (kWidth - kLeft - kRight) * part / 4;
    html +=
        fmt::format("<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>",
                    x, bottom + 16, part == 4 ? "end" : "middle", longest * part / 4);
  }
  html += fmt::format(
      "<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">keys</text>"
      "<text class=\"axis\" text-anchor=\"middle\" transform=\"translate(13 {:.1f}) "
      "rotate(-90)\">worker</text></svg></figure>\n",
      (kLeft + kWidth - kRight) / 2, bottom + 32, (kTop + bottom) / 2);
  return html;
}

}  // namespace sparsemla::replay
