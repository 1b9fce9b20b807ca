#include "tools/replay/traffic.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "core/require.h"
#include "trace/file.h"

namespace sparsemla::replay {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxTimestampMs = int64_t{1} << 53;
constexpr int64_t kMaxTokens = int64_t{1} << 24;  // sums of prompt and output stay in 32 bits
constexpr int64_t kMaxHashId = int64_t{1} << 53;

Result<int64_t> GetInteger(const Json& value, std::string_view name, int64_t least, int64_t most) {
  SPARSEMLA_REQUIRE(value.is_number_integer(), name, " is ", trace::Quoted(value.dump()),
                    "; it must be an integer");
  const bool too_large = value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(most);
  SPARSEMLA_REQUIRE(!too_large && value.get<int64_t>() >= least && value.get<int64_t>() <= most,
                    name, " is ", value.dump(), "; it must be in [", least, ", ", most, "]");
  return value.get<int64_t>();
}

Result<int64_t> GetField(const Json& object, const char* name, int64_t least, int64_t most) {
  const auto field = object.find(name);
  SPARSEMLA_REQUIRE(field != object.end(), name, " is missing");
  return GetInteger(*field, name, least, most);
}

Result<std::vector<int64_t>> GetHashIds(const Json& object, int64_t input_length) {
  const auto field = object.find("hash_ids");
  SPARSEMLA_REQUIRE(field != object.end() && field->is_array(),
                    "hash_ids is missing or not an array");
  const int64_t expected = (input_length + kTraceBlockTokens - 1) / kTraceBlockTokens;
  SPARSEMLA_REQUIRE(static_cast<int64_t>(field->size()) == expected, "hash_ids has ", field->size(),
                    " entries; an input_length of ", input_length, " needs ", expected);
  std::vector<int64_t> hash_ids;
  hash_ids.reserve(field->size());
  for (const Json& entry : *field) {
    const auto id = GetInteger(entry, "an entry of hash_ids", 0, kMaxHashId);
    if (!id.ok()) return id.status();
    hash_ids.push_back(id.value());
  }
  return hash_ids;
}

Result<TrafficRequest> ParseLine(std::string_view line, int64_t previous_timestamp) {
  const Json object = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  SPARSEMLA_REQUIRE(!object.is_discarded(), "not JSON: ", trace::Quoted(line));
  SPARSEMLA_REQUIRE(object.is_object(), "not a JSON object: ", trace::Quoted(line));
  const auto timestamp = GetField(object, "timestamp", 0, kMaxTimestampMs);
  if (!timestamp.ok()) return timestamp.status();
  SPARSEMLA_REQUIRE(timestamp.value() >= previous_timestamp, "timestamp is ", timestamp.value(),
                    ", before the ", previous_timestamp, " of the line above");
  const auto input_length = GetField(object, "input_length", 1, kMaxTokens);
  if (!input_length.ok()) return input_length.status();
  const auto output_length = GetField(object, "output_length", 1, kMaxTokens);
  if (!output_length.ok()) return output_length.status();
  auto hash_ids = GetHashIds(object, input_length.value());
  if (!hash_ids.ok()) return hash_ids.status();
  return TrafficRequest{.timestamp_ms = timestamp.value(),
                        .input_length = static_cast<int32_t>(input_length.value()),
                        .output_length = static_cast<int32_t>(output_length.value()),
                        .hash_ids = std::move(hash_ids).value()};
}

}  // namespace

Result<std::vector<TrafficRequest>> ParseTraffic(std::string_view text, int64_t max_requests) {
  std::vector<TrafficRequest> requests;
  int64_t line_number = 0;
  while (!text.empty() &&
         (max_requests == 0 || static_cast<int64_t>(requests.size()) < max_requests)) {
    ++line_number;
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    auto request = ParseLine(line, requests.empty() ? 0 : requests.back().timestamp_ms);
    SPARSEMLA_REQUIRE(request.ok(), "line ", line_number, ": ", request.status().message());
    requests.push_back(std::move(request).value());
  }
  SPARSEMLA_REQUIRE(!requests.empty(), "there are no requests");
  return requests;
}

Result<std::vector<TrafficRequest>> LoadTraffic(const std::string& path, int64_t max_requests) {
  std::ifstream file(path, std::ios::binary);
  SPARSEMLA_REQUIRE(file.is_open(), path, ": cannot open");
  std::string text;
  std::vector<char> part(size_t{1} << 16);
  while (file.read(part.data(), static_cast<std::streamsize>(part.size())) || file.gcount() > 0) {
    text.append(part.data(), static_cast<size_t>(file.gcount()));
  }
  SPARSEMLA_REQUIRE(!file.bad(), path, ": cannot read");
  auto requests = ParseTraffic(text, max_requests);
  if (!requests.ok()) return trace::AtPath(path, requests.status());
  return requests;
}

}  // namespace sparsemla::replay
