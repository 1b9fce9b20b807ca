// What `sparsemla bench` prints: one table for people, one JSON document for programs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/bench/cell.h"

namespace sparsemla::bench {

struct Cell {
  CellSpec spec = {};
  CellResult result = {};
  std::optional<double> speedup = {};  // over the same cell on one thread, if both were quiet
};

// Sets `speedup` of the last cell from the cells before it.
void SetSpeedup(std::vector<Cell>& cells);

// Lines of the table, to be printed as they come; `workload_width` is that of the longest text.
std::string TableHeader(size_t workload_width);
std::string TableRow(const Cell& cell, size_t workload_width);

// Everything: version, command line, machine, options, measured peaks and one object per cell.
std::string ReportJson(const std::string& command_line, const BenchOptions& options,
                       const CellRunner& runner, const std::vector<Cell>& cells);

}  // namespace sparsemla::bench
