// The result of a replay for people (a table) and for machines (JSON), and the words that say what
// was replayed, which the report shares.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sparsemla/backend.h"
#include "tools/replay/result.h"
#include "tools/replay/runner.h"

namespace sparsemla::replay {

// What was replayed, as (name, value) in the order to show them.
using RunDescription = std::vector<std::pair<std::string, std::string>>;

RunDescription Describe(const std::string& trace, int32_t tp, const ReplayOptions& options,
                        const Backend& backend);

std::string SummaryTable(const ReplayResult& result, const RunDescription& description);
// One line. Times are in seconds, rates per second of attention and merge.
std::string SummaryJson(const ReplayResult& result, const RunDescription& description);

// "12.3 ms": three digits and a unit that fits.
std::string SecondsText(double seconds);

}  // namespace sparsemla::replay
