// Recorded outputs of AITER's planner, as JSON files, compared with the aiter schedule. Used by the
// tests and by `sparsemla plan --golden`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sparsemla/status.h"

namespace sparsemla::trace {

struct GoldenReport {
  int32_t num_cases = 0;
  std::vector<std::string> mismatches;  // "case NAME: work_indptr[5]: got 3, want 4"
};

// Plans every case of the file and compares work items, reduce maps, folding and buffer sizes; null
// in the file is not compared. Where AITER's parallel planner ran on empty rows, which it drops,
// the case named ..._serial beside it is what counts. kInvalidArgument if the file cannot be read
// or has another form.
Result<GoldenReport> CheckGoldenFile(const std::string& path);

}  // namespace sparsemla::trace
