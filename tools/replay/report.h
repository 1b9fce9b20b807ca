// The result of a replay as one HTML page that needs nothing else: no network, no other file.
#pragma once

#include <string>

#include "sparsemla/backend.h"
#include "tools/replay/result.h"
#include "tools/replay/runner.h"
#include "tools/replay/summary.h"

namespace sparsemla::replay {

// Fails only if the plans of the slowest steps cannot be made again.
Result<std::string> ReportHtml(const ReplayResult& result, const RunDescription& description,
                               const ReplayOptions& options, const Backend& backend);

}  // namespace sparsemla::replay
