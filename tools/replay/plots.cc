#include "tools/replay/plots.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace sparsemla::replay {
namespace {

// Sizes in CSS pixels at the drawing's natural scale.
constexpr double kWidth = 570;
constexpr double kHeight = 250;
constexpr double kLeft = 66;
constexpr double kRight = 12;
constexpr double kTop = 10;
constexpr double kBottom = 42;
constexpr double kPlotWidth = kWidth - kLeft - kRight;
constexpr double kPlotHeight = kHeight - kTop - kBottom;
constexpr size_t kMaxBins = 246;  // two pixels each

std::string Text(double x, double y, std::string_view anchor, std::string_view text) {
  return fmt::format("<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>",
                     x, y, anchor, EscapeHtml(text));
}

std::string GridLine(double x1, double y1, double x2, double y2) {
  return fmt::format(
      "<line class=\"grid\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>", x1, y1, x2,
      y2);
}

// "12k", "3.5M": ticks of large counts stay short.
std::string TickText(double value) {
  if (value >= 1e6) return fmt::format("{:g}M", value / 1e6);
  if (value >= 1e4) return fmt::format("{:g}k", value / 1e3);
  return fmt::format("{:g}", value);
}

// The smallest 1, 2 or 5 times a power of ten that divides [0, most] into at most `count` parts.
double TickStep(double most, int count) {
  double power = std::pow(10.0, std::floor(std::log10(most / count)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (most <= factor * power * count * (1 + 1e-9)) return factor * power;
  }
  return 10 * power;
}

// Values to vertical places.
class Scale {
 public:
  Scale(double least, double most, bool log) : log_(log) {
    low_ = log ? std::floor(std::log10(least)) : 0.0;
    high_ = log ? std::max(std::ceil(std::log10(most)), low_ + 1) : most;
  }

  double Y(double value) const {
    const double place = log_ ? std::log10(std::max(value, 1e-300)) : value;
    const double share = std::clamp((place - low_) / (high_ - low_), 0.0, 1.0);
    return kTop + kPlotHeight * (1 - share);
  }

  std::string Axis() const {
    std::string svg;
    const double step = log_ ? 1.0 : TickStep(high_, 5);
    for (double tick = low_; tick <= high_ * (1 + 1e-9); tick += step) {
      const double value = log_ ? std::pow(10.0, tick) : tick;
      svg += GridLine(kLeft, Y(value), kWidth - kRight, Y(value));
      svg += Text(kLeft - 6, Y(value) + 4, "end", TickText(value));
      if (log_ && tick >= high_ - 0.5) break;  // a high_ of 0 or below ends here
    }
    return svg;
  }

 private:
  bool log_;
  double low_ = 0;
  double high_ = 1;
};

// Means of `per_bin` neighbours.
std::vector<double> Binned(const std::vector<double>& values, size_t per_bin) {
  std::vector<double> bins;
  for (size_t begin = 0; begin < values.size(); begin += per_bin) {
    const size_t end = std::min(begin + per_bin, values.size());
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += values[i];
    bins.push_back(sum / static_cast<double>(end - begin));
  }
  return bins;
}

// A chart with its values reduced to what can be drawn.
struct Drawing {
  explicit Drawing(const Chart& c) : chart(c) {
    const size_t count = c.series.empty() ? 0 : c.series.front().values.size();
    num_values = count;
    per_bin = c.categories.empty() ? StepsPerBin(count) : 1;
    for (const Series& s : c.series) bins.push_back(Binned(s.values, per_bin));
    num_bins = bins.empty() ? 0 : bins.front().size();
    bin_width = kPlotWidth / static_cast<double>(std::max<size_t>(num_bins, 1));
  }

  double X(size_t bin) const { return kLeft + bin_width * static_cast<double>(bin); }

  const Chart& chart;
  size_t num_values = 0;
  size_t per_bin = 1;
  size_t num_bins = 0;
  double bin_width = 0;
  std::vector<std::vector<double>> bins;  // [series][num_bins]
};

Scale ScaleOf(const Drawing& drawing) {
  double least = 1e300;
  double most = 0;
  for (size_t b = 0; b < drawing.num_bins; ++b) {
    double sum = 0;
    for (const auto& values : drawing.bins) {
      if (values[b] > 0) least = std::min(least, values[b]);
      sum = drawing.chart.kind == ChartKind::kStackedBars ? sum + values[b]
                                                          : std::max(sum, values[b]);
    }
    most = std::max(most, sum);
  }
  if (most <= 0) return Scale(0.1, 1, drawing.chart.log_y);
  return Scale(least, drawing.chart.log_y ? most : most * 1.05, drawing.chart.log_y);
}

// A little wider than asked for, so that neighbours without a gap leave no seam.
std::string Rect(double x, double width, double top, double bottom, size_t series) {
  if (bottom - top < 0.05) return {};
  return fmt::format(
      "<rect class=\"s{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\"/>", series,
      x, top, width + 0.4, bottom - top);
}

std::string Bars(const Drawing& drawing, const Scale& scale) {
  std::string svg;
  const bool stacked = drawing.chart.kind == ChartKind::kStackedBars;
  const double gap = drawing.bin_width > 8 ? drawing.bin_width * 0.15 : 0.0;
  const double width =
      (drawing.bin_width - gap) / static_cast<double>(stacked ? 1 : drawing.bins.size());
  for (size_t b = 0; b < drawing.num_bins; ++b) {
    double below = 0;
    for (size_t s = 0; s < drawing.bins.size(); ++s) {
      const double value = drawing.bins[s][b];
      const double x = drawing.X(b) + gap / 2 + (stacked ? 0 : width * static_cast<double>(s));
      svg += Rect(x, width, scale.Y(below + value), scale.Y(below), s);
      if (stacked) below += value;
    }
  }
  return svg;
}

std::string Lines(const Drawing& drawing, const Scale& scale) {
  std::string svg;
  for (size_t s = 0; s < drawing.bins.size(); ++s) {
    std::string points;
    for (size_t b = 0; b < drawing.num_bins; ++b) {
      const double value = drawing.bins[s][b];
      if (drawing.chart.log_y && value <= 0) continue;
      points += fmt::format("{:.1f},{:.1f} ", drawing.X(b) + drawing.bin_width / 2, scale.Y(value));
    }
    svg += fmt::format("<polyline class=\"l{}\" points=\"{}\"/>", s, points);
  }
  return svg;
}

std::string XAxis(const Drawing& drawing) {
  std::string svg = GridLine(kLeft, kTop + kPlotHeight, kWidth - kRight, kTop + kPlotHeight);
  const double y = kTop + kPlotHeight + 16;
  if (!drawing.chart.categories.empty()) {
    for (size_t b = 0; b < drawing.num_bins; ++b) {
      svg += Text(drawing.X(b) + drawing.bin_width / 2, y, "middle", drawing.chart.categories[b]);
    }
  } else if (drawing.num_values > 0) {
    const auto count = static_cast<double>(drawing.num_values);
    const double covered = count / static_cast<double>(drawing.per_bin * drawing.num_bins);
    const double step = std::max(TickStep(count, 7), 1.0);
    for (double tick = 0; tick < count; tick += step) {
      svg += Text(kLeft + kPlotWidth * covered * tick / count, y, "middle", TickText(tick));
    }
  }
  svg += Text(kLeft + kPlotWidth / 2, kHeight - 6, "middle", drawing.chart.x_label);
  return svg;
}

// What the script shows under the pointer.
std::string HoverData(const Drawing& drawing) {
  nlohmann::ordered_json series = nlohmann::json::array();
  for (size_t s = 0; s < drawing.bins.size(); ++s) {
    nlohmann::json values = nlohmann::json::array();
    for (const double value : drawing.bins[s])
      values.push_back(std::stod(fmt::format("{:.4g}", value)));
    series.push_back({drawing.chart.series[s].name, values});
  }
  const nlohmann::ordered_json data = {{"left", kLeft},
                                       {"width", kPlotWidth},
                                       {"perBin", drawing.per_bin},
                                       {"last", drawing.num_values},
                                       {"names", drawing.chart.categories},
                                       {"x", drawing.chart.x_label},
                                       {"series", series}};
  return EscapeHtml(data.dump());
}

std::string Legend(const Chart& chart) {
  std::string html;
  for (size_t s = 0; s < chart.series.size(); ++s) {
    html += fmt::format("<span class=\"key\"><i class=\"b{}\"></i>{}</span>", s,
                        EscapeHtml(chart.series[s].name));
  }
  return html;
}

}  // namespace

std::string EscapeHtml(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

size_t StepsPerBin(size_t num_steps) {
  return std::max<size_t>((num_steps + kMaxBins - 1) / kMaxBins, 1);
}

std::string ChartFigure(const Chart& chart) {
  const Drawing drawing(chart);
  const Scale scale = ScaleOf(drawing);
  std::string html = fmt::format(
      "<figure><h3>{}</h3><p>{}</p><div class=\"legend\">{}</div>"
      "<svg viewBox=\"0 0 {:g} {:g}\" role=\"img\" aria-label=\"{}\" data-chart=\"{}\">",
      EscapeHtml(chart.title), EscapeHtml(chart.note), Legend(chart), kWidth, kHeight,
      EscapeHtml(chart.title), HoverData(drawing));
  html += scale.Axis();
  html += chart.kind == ChartKind::kLines ? Lines(drawing, scale) : Bars(drawing, scale);
  html += XAxis(drawing);
  html += fmt::format(
      "<text class=\"axis\" text-anchor=\"middle\" transform=\"translate(13 {:.1f}) "
      "rotate(-90)\">{}</text>",
      kTop + kPlotHeight / 2, EscapeHtml(chart.y_label));
  html += "<line class=\"cursor\" y1=\"10\" y2=\"208\"/></svg></figure>\n";
  return html;
}

}  // namespace sparsemla::replay
