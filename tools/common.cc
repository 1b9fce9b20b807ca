#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "tools/commands.h"

namespace sparsemla::tools {
namespace {

const std::map<std::string, ScheduleKind> kSchedules = {{"balanced", ScheduleKind::kBalanced},
                                                        {"aiter", ScheduleKind::kAiter}};

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
