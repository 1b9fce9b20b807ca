// Recorded serving traffic: when requests arrive, how long they are and which prefixes they share.
// The format is the one of the Mooncake traces (FAST '25): one JSON object a line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/status.h"

namespace sparsemla::replay {

// Prompt tokens that one entry of hash_ids stands for.
inline constexpr int32_t kTraceBlockTokens = 512;

struct TrafficRequest {
  int64_t timestamp_ms = 0;       // arrival, since the trace began; non-decreasing
  int32_t input_length = 0;       // prompt tokens, >= 1
  int32_t output_length = 0;      // generated tokens, >= 1
  std::vector<int64_t> hash_ids;  // one a block of 512 prompt tokens; equal ids at the same place
                                  // mean an equal prefix
};

// The first `max_requests` lines (0: all). kInvalidArgument names the line and what is wrong.
Result<std::vector<TrafficRequest>> ParseTraffic(std::string_view text, int64_t max_requests = 0);

// The same from a file. Messages start with the path.
Result<std::vector<TrafficRequest>> LoadTraffic(const std::string& path, int64_t max_requests = 0);

}  // namespace sparsemla::replay
