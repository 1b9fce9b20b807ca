// The subcommands of the tool. Each Register function adds one to the application; when it is
// chosen, its callback runs it and stores the exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>

#include "sparsemla/plan.h"
#include "sparsemla/status.h"
#include "sparsemla/types.h"

namespace sparsemla::tools {

inline constexpr int kExitOk = 0;
inline constexpr int kExitMismatch = 1;  // everything ran, an answer is wrong
inline constexpr int kExitBadInput = 2;  // usage, files, unsupported problems

// `command_line` goes into the report.
void RegisterBench(CLI::App& app, int& exit_code, const std::string& command_line);
void RegisterInfo(CLI::App& app, int& exit_code);
void RegisterPlan(CLI::App& app, int& exit_code);
void RegisterReplay(CLI::App& app, int& exit_code);
void RegisterRun(CLI::App& app, int& exit_code);

// Prints "sparsemla: MESSAGE" as one line on stderr and returns kExitBadInput.
int BadInput(std::string_view message);
inline int BadInput(const Status& status) {
  return BadInput(status.message());
}

// Columns of the terminal on stdout; 100 if there is none.
int TerminalWidth();

// The format of that name; the message lists the names that there are.
Result<CacheFormat> FindCacheFormat(std::string_view name);

// Adds --splits N|auto; auto, the schedule's own rule, is 0.
void AddSplitsOption(CLI::App& command, int32_t& splits, const std::string& help);

// Adds --schedule balanced|aiter.
void AddScheduleOption(CLI::App& command, ScheduleKind& schedule);
std::string_view ScheduleName(ScheduleKind schedule);

}  // namespace sparsemla::tools
