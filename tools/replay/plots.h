// Charts of the report as inline SVG. Colours and text styles come from the page's style sheet
// (classes s0..s3, axis, grid), so that they follow its light or dark theme; the page's script
// shows the values under the pointer from the data attribute of each chart.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/plan.h"

namespace sparsemla::replay {

struct Series {
  std::string name;
  std::vector<double> values;
};

enum class ChartKind { kStackedBars, kGroupedBars, kLines };

struct Chart {
  std::string title;
  std::string note;  // one sentence below the title
  ChartKind kind = ChartKind::kLines;
  std::string x_label;
  std::string y_label;  // with its unit
  bool log_y = false;
  std::vector<Series> series;           // of equal lengths, at most 4
  std::vector<std::string> categories;  // names of the x positions; empty: they are steps
};

// Neighbouring steps that charts show as one mean, so that each has its pixels.
size_t StepsPerBin(size_t num_steps);

// A <figure> with title, legend, note and drawing.
std::string ChartFigure(const Chart& chart);

// The work items of every worker from left to right, to scale in keys. `note` says what it is.
std::string GanttFigure(const Plan& plan, std::string_view title, std::string_view note);

// Text made safe for HTML content and quoted attributes.
std::string EscapeHtml(std::string_view text);

}  // namespace sparsemla::replay
