#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "tools/commands.h"
#include "trace/file.h"

namespace sparsemla::tools {
namespace {

const std::map<std::string, ScheduleKind> kSchedules = {{"balanced", ScheduleKind::kBalanced},
                                                        {"aiter", ScheduleKind::kAiter}};

std::string ParseSplits(const std::string& text, int32_t& splits) {
  splits = 0;
  if (text == "auto") return "";
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), splits);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && splits >= 1 ? "" : "'" + text + "' is neither auto nor a positive whole number";
}

}  // namespace

int BadInput(std::string_view message) {
  std::string line(message);
  std::replace(line.begin(), line.end(), '\n', ' ');
  fmt::print(stderr, "sparsemla: {}\n", line);
  return kExitBadInput;
}

int TerminalWidth() {
  winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 100;
  return std::max<int>(size.ws_col, 40);
}

Result<CacheFormat> FindCacheFormat(std::string_view name) {
  std::string known;
  for (int32_t f = 0; f < kNumCacheFormats; ++f) {
    const auto format = static_cast<CacheFormat>(f);
    if (CacheFormatName(format) == name) return format;
    known += (known.empty() ? "" : ", ") + std::string(CacheFormatName(format));
  }
  return Status(StatusCode::kInvalidArgument,
                "cache format " + trace::Quoted(name) + " is unknown; there are " + known);
}

void AddSplitsOption(CLI::App& command, int32_t& splits, const std::string& help) {
  command
      .add_option_function<std::string>(
          "--splits",
          [&splits](const std::string& text) {
            const std::string error = ParseSplits(text, splits);
            if (!error.empty()) throw CLI::ValidationError("--splits", error);
          },
          help)
      ->type_name("N|auto");
}

void AddScheduleOption(CLI::App& command, ScheduleKind& schedule) {
  command
      .add_option_function<std::string>(
          "--schedule", [&schedule](const std::string& name) { schedule = kSchedules.at(name); },
          "Rule that cuts rows into work items: balanced (default) or aiter")
      ->check(CLI::IsMember({"balanced", "aiter"}));
}

std::string_view ScheduleName(ScheduleKind schedule) {
  return schedule == ScheduleKind::kAiter ? "aiter" : "balanced";
}

}  // namespace sparsemla::tools
