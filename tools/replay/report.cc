#include "tools/replay/report.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>

#include "tools/replay/plots.h"

namespace sparsemla::replay {
namespace {

constexpr std::string_view kHead = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sparsemla replay</title>
<style>
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--text:#1c2430;--dim:#5d6877;--line:#dfe3e8;
--c0:#2c6fd1;--c1:#e08a1e;--c2:#2a9d6f;--c3:#8b5fd0}
@media(prefers-color-scheme:dark){:root{--bg:#14181e;--card:#1d232b;--text:#e4e8ee;--dim:#98a3b1;
--line:#333c48;--c0:#6ba4f5;--c1:#f0a94a;--c2:#57c898;--c3:#b596ee}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:15px/1.45 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 20px 48px}
h1{font-size:26px;margin:0 0 2px}h2{font-size:18px;margin:30px 0 10px}h3{font-size:15px;margin:0}
p{margin:0 0 6px;color:var(--dim)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:12px;margin:18px 0}
.card,figure,table{background:var(--card);border:1px solid var(--line);border-radius:8px}
.card{padding:12px 14px}.card b{display:block;font-size:22px;font-weight:600}
.card span{color:var(--dim);font-size:13px}
.card.bad b{color:#d23b3b}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(500px,100%),1fr));gap:14px}
figure{margin:0;padding:14px 14px 8px;min-width:0}figure.wide{margin-top:14px}
figure p{font-size:13px}
.legend{font-size:13px;margin-bottom:4px}.key{margin-right:16px;white-space:nowrap}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
table{border-collapse:collapse;width:100%}
.tables{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(500px,100%),1fr));gap:14px;
align-items:start}
td,th{padding:6px 14px;text-align:left;border-top:1px solid var(--line);overflow-wrap:anywhere}
tr:first-child>*{border-top:0}
th{font-weight:500;color:var(--dim);white-space:nowrap}td.n,th.n{text-align:right}
svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,sans-serif}.axis{fill:var(--dim)}.grid{stroke:var(--line)}
rect{shape-rendering:crispEdges}
.s0,.g0{fill:var(--c0)}.s1,.g1{fill:var(--c1)}.s2{fill:var(--c2)}.s3{fill:var(--c3)}
.g2{fill:var(--c0);fill-opacity:.5}.g3{fill:var(--c1);fill-opacity:.5}
.g0,.g1,.g2,.g3{stroke:var(--card);stroke-width:.6}
.l0,.l1,.l2,.l3{fill:none;stroke-width:1.5;stroke-linejoin:round}
.l0{stroke:var(--c0)}.l1{stroke:var(--c1)}.l2{stroke:var(--c2)}.l3{stroke:var(--c3)}
.b0,.h0{background:var(--c0)}.b1,.h1{background:var(--c1)}.b2{background:var(--c2)}
.b3{background:var(--c3)}.h2{background:var(--c0);opacity:.5}.h3{background:var(--c1);opacity:.5}
.cursor{stroke:var(--dim);visibility:hidden}
#tip{position:fixed;display:none;pointer-events:none;background:var(--card);color:var(--text);
border:1px solid var(--line);border-radius:6px;padding:6px 10px;font-size:13px;white-space:pre;
box-shadow:0 2px 8px #0003}
</style></head><body><main>
)";

constexpr std::string_view kTail = R"(</main><div id="tip"></div><script>
const tip = document.getElementById('tip');
for (const svg of document.querySelectorAll('svg[data-chart]')) {
  const chart = JSON.parse(svg.dataset.chart), cursor = svg.querySelector('.cursor');
  const count = chart.series.length ? chart.series[0][1].length : 0;
  const hide = () => { tip.style.display = 'none'; cursor.style.visibility = 'hidden'; };
  svg.addEventListener('mouseleave', hide);
  svg.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const bin = Math.floor((x - chart.left) / chart.width * count);
    if (bin < 0 || bin >= count) return hide();
    const first = bin * chart.perBin, last = Math.min(first + chart.perBin, chart.last) - 1;
    const name = chart.names.length ? chart.names[bin] + ' tokens'
        : 'step ' + first + (last > first ? ' to ' + last : '');
    tip.textContent = [name, ...chart.series.map(s => s[0] + ': ' + s[1][bin])].join('\n');
    const middle = chart.left + (bin + 0.5) * chart.width / count;
    cursor.setAttribute('x1', middle); cursor.setAttribute('x2', middle);
    cursor.style.visibility = 'visible';
    tip.style.display = 'block';
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + 'px';
  });
}
</script></body></html>
)";

std::string Card(std::string_view value, std::string_view name, bool bad = false) {
  return fmt::format("<div class=\"card{}\"><b>{}</b><span>{}</span></div>\n", bad ? " bad" : "",
                     EscapeHtml(value), EscapeHtml(name));
}

std::string Cards(const ReplayResult& result, const ReplayTotals& totals) {
  const auto percent = [](double share) { return fmt::format("{:.1f} %", 100 * share); };
  std::string html = "<div class=\"cards\">\n";
  html +=
      Card(fmt::format("{} of {}", result.num_finished, result.num_requests), "requests finished");
  html += Card(fmt::format("{}", totals.tokens()),
               fmt::format("rows computed: {} decode, {} prefill", totals.decode_tokens,
                           totals.prefill_tokens));
  html += Card(fmt::format("{:.0f} GFLOP/s", totals.gflops()), "attention and merge");
  html += Card(fmt::format("{:.2f} GB/s", totals.gigabytes_per_second()),
               "unique bytes of attention and merge");
  html += Card(percent(totals.hit_rate()), "prompt tokens found in the cache");
  html += Card(percent(totals.mean_imbalance),
               fmt::format("mean imbalance of plans, at most {}", percent(totals.max_imbalance)));
  const double num_steps = std::max(static_cast<double>(result.steps.size()), 1.0);
  html += Card(percent(static_cast<double>(totals.plans_reused) / num_steps),
               fmt::format("plans reused in {} steps", result.steps.size()));
  html += Card(percent(result.mean_overlap), "overlap of neighbouring selections");
  html += Card(fmt::format("{:.0f} MiB", static_cast<double>(result.peak_memory_bytes) / 0x1p20),
               "peak memory");
  if (result.checked_rows > 0) {
    const bool right = result.mismatch.empty();
    html += Card(right ? fmt::format("{} right", result.checked_rows) : "wrong answer",
                 right ? fmt::format("rows checked against ref; worst error {:.0f} % of tolerance",
                                     100 * result.worst_error)
                       : result.mismatch,
                 !right);
  }
  return html + "</div>\n";
}

std::string Tables(const ReplayResult& result, const ReplayTotals& totals,
                   const RunDescription& description) {
  std::string html = "<div class=\"tables\"><table>";
  for (const auto& [name, value] : description) {
    html += fmt::format("<tr><th>{}</th><td>{}</td></tr>", EscapeHtml(name), EscapeHtml(value));
  }
  html +=
      "</table><table><tr><th>stage</th><th class=\"n\">total</th><th class=\"n\">median step"
      "</th><th class=\"n\">p90 step</th><th class=\"n\">share</th></tr>";
  const auto row = [](std::string_view name, double total, std::string_view rest) {
    return fmt::format("<tr><td>{}</td><td class=\"n\">{}</td>{}</tr>", name, SecondsText(total),
                       rest);
  };
  for (size_t stage = 0; stage < kNumStages; ++stage) {
    const double whole = std::max(totals.stage_seconds(), 1e-12);
    html += row(
        kStageNames[stage], totals.seconds[stage],
        fmt::format("<td class=\"n\">{}</td><td class=\"n\">{}</td>"
                    "<td class=\"n\">{:.1f} %</td>",
                    SecondsText(totals.median_seconds[stage]),
                    SecondsText(totals.p90_seconds[stage]), 100 * totals.seconds[stage] / whole));
  }
  constexpr std::string_view kOutside = "<td colspan=\"3\">not part of the stages</td>";
  html += row("simulated model", result.generation_seconds, kOutside);
  if (result.checked_rows > 0) html += row("checks", result.check_seconds, kOutside);
  html += row("wall clock", result.wall_seconds, "<td colspan=\"3\"></td>");
  return html + "</table></div>\n";
}

using StepValue = std::function<double(const StepRecord&)>;

Series SeriesOf(const ReplayResult& result, std::string name, const StepValue& value) {
  Series series{.name = std::move(name), .values = {}};
  for (const StepRecord& step : result.steps) series.values.push_back(value(step));
  return series;
}

Chart BatchChart(const ReplayResult& r) {
  return {
      .title = "Batch composition",
      .note = "Query tokens that each step computed; a decoding request adds one, and its drafts.",
      .kind = ChartKind::kStackedBars,
      .x_label = "step",
      .y_label = "tokens",
      .series = {SeriesOf(r, "decode", [](auto& s) { return double(s.decode_tokens); }),
                 SeriesOf(r, "prefill", [](auto& s) { return double(s.prefill_tokens); })},
      .categories = {}};
}

Chart TimeChart(const ReplayResult& r) {
  Chart chart{.title = "Time per stage",
              .note = "Measured in each step, all layers together; logarithmic.",
              .kind = ChartKind::kLines,
              .x_label = "step",
              .y_label = "milliseconds",
              .log_y = true,
              .series = {},
              .categories = {}};
  for (size_t stage = 0; stage < kNumStages; ++stage) {
    chart.series.push_back(
        SeriesOf(r, std::string(kStageNames[stage]),
                 [stage](const StepRecord& s) { return 1e3 * s.stage_seconds[stage]; }));
  }
  return chart;
}

std::string BinName(size_t bin) {
  const auto tokens = int64_t{1} << bin;
  return tokens >= 1024 ? fmt::format("{}k", tokens / 1024) : std::to_string(tokens);
}

Chart ContextChart(const ReplayResult& r) {
  Chart chart{.title = "Context lengths",
              .note = "Cached tokens that rows could select from; each bar starts at its name.",
              .kind = ChartKind::kGroupedBars,
              .x_label = "context, tokens",
              .y_label = "% of rows of the kind",
              .series = {},
              .categories = {}};
  size_t first = kContextBins;
  size_t end = 0;
  for (size_t b = 0; b < kContextBins; ++b) {
    if (r.decode_contexts[b] + r.prefill_contexts[b] == 0) continue;
    first = std::min(first, b);
    end = b + 1;
  }
  const auto add = [&](const char* name, const std::array<int64_t, kContextBins>& counts) {
    int64_t total = 0;
    for (const int64_t count : counts) total += count;
    Series series{.name = name, .values = {}};
    for (size_t b = first; b < end; ++b) {
      series.values.push_back(100.0 * static_cast<double>(counts[b]) /
                              static_cast<double>(std::max<int64_t>(total, 1)));
    }
    chart.series.push_back(std::move(series));
  };
  add("decode", r.decode_contexts);
  add("prefill", r.prefill_contexts);
  for (size_t b = first; b < end; ++b) chart.categories.push_back(BinName(b));
  return chart;
}

Chart ImbalanceChart(const ReplayResult& r) {
  return {.title = "Plan imbalance",
          .note = "Cost of the busiest worker over the least that any plan could reach.",
          .kind = ChartKind::kLines,
          .x_label = "step",
          .y_label = "%",
          .series = {SeriesOf(r, "imbalance", [](auto& s) { return 100 * s.imbalance; })},
          .categories = {}};
}

Chart SpeedChart(const ReplayResult& r) {
  return {.title = "Speed",
          .note = "Attention and merge.",
          .kind = ChartKind::kLines,
          .x_label = "step",
          .y_label = "GFLOP/s",
          .series = {SeriesOf(r, "speed", [](auto& s) { return s.gflops(); })},
          .categories = {}};
}

Chart CacheChart(const ReplayResult& r) {
  return {.title = "Cache blocks",
          .note = "In use by running requests, and kept in case a prefix comes back.",
          .kind = ChartKind::kStackedBars,
          .x_label = "step",
          .y_label = "blocks",
          .series = {SeriesOf(r, "in use", [](auto& s) { return double(s.blocks_referenced); }),
                     SeriesOf(r, "kept", [](auto& s) { return double(s.blocks_idle); })},
          .categories = {}};
}

Chart PrefixChart(const ReplayResult& r) {
  return {.title = "Prefix hits",
          .note = "Prompt tokens of all requests admitted so far.",
          .kind = ChartKind::kStackedBars,
          .x_label = "step",
          .y_label = "tokens",
          .series = {SeriesOf(r, "found in the cache",
                              [sum = 0.0](auto& s) mutable { return sum += double(s.hit_tokens); }),
                     SeriesOf(r, "to compute",
                              [sum = 0.0](auto& s) mutable {
                                return sum += double(s.admitted_tokens - s.hit_tokens);
                              })},
          .categories = {}};
}

Chart QueueChart(const ReplayResult& r) {
  return {.title = "Requests",
          .note = "In the batch, and arrived but not admitted yet.",
          .kind = ChartKind::kStackedBars,
          .x_label = "step",
          .y_label = "requests",
          .series = {SeriesOf(r, "in the batch", [](auto& s) { return double(s.num_reqs); }),
                     SeriesOf(r, "waiting", [](auto& s) { return double(s.num_waiting); })},
          .categories = {}};
}

Result<std::string> SlowestFigure(const StepShape& shape, std::string_view title,
                                  const ReplayOptions& options, const Backend& backend) {
  if (shape.index < 0) return std::string();
  auto plan = Plan::Create(CapacityOf(options, backend));
  if (!plan.ok()) return plan.status();
  const auto built = plan->Build(PlanParamsOf(options, shape.query_start_loc, shape.seq_lens));
  if (!built.ok()) return built.status();
  return GanttFigure(
      plan.value(), title,
      fmt::format("Step {}: {} requests, {} rows, {} keys, {} work items, {}; imbalance {:.1f} %.",
                  shape.index, plan->num_reqs(), plan->num_tokens(), plan->num_kv_indices(),
                  plan->schedule().work_items.size(), SecondsText(shape.seconds),
                  100 * ComputePlanCosts(plan.value()).imbalance()));
}

}  // namespace

Result<std::string> ReportHtml(const ReplayResult& result, const RunDescription& description,
                               const ReplayOptions& options, const Backend& backend) {
  const ReplayTotals totals = Summarise(result);
  std::string html(kHead);
  html +=
      "<h1>Replay of serving traffic</h1><p>sparsemla " + std::string(Version()) +
      ": recorded requests on a simulated clock; every step is planned, converted, attended and "
      "merged. Cache contents, queries and selections are generated.</p>\n";
  html += Cards(result, totals);
  html += Tables(result, totals, description);
  const size_t per_bin = StepsPerBin(result.steps.size());
  html += fmt::format(
      "<h2>Step by step</h2>{}<div class=\"grid2\">\n",
      per_bin > 1 ? fmt::format("<p>Each mark is the mean of {} steps.</p>", per_bin) : "");
  for (const auto& chart :
       {BatchChart(result), TimeChart(result), SpeedChart(result), ImbalanceChart(result),
        ContextChart(result), QueueChart(result), CacheChart(result), PrefixChart(result)}) {
    html += ChartFigure(chart);
  }
  html += "</div>\n<h2>Plans</h2>\n";
  const auto slowest = SlowestFigure(result.slowest, "The slowest step", options, backend);
  if (!slowest.ok()) return slowest;
  const auto decode =
      SlowestFigure(result.slowest_decode, "The slowest step without prefill", options, backend);
  if (!decode.ok()) return decode;
  return html + slowest.value() + decode.value() + std::string(kTail);
}

}  // namespace sparsemla::replay
