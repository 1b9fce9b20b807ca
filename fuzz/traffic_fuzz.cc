// Foreign traffic files: any bytes give requests within the stated bounds or one clear error, and
// what was accepted can be scheduled.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tools/replay/engine.h"
#include "tools/replay/traffic.h"

namespace sparsemla::replay {
namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

void ScheduleSome(const std::vector<TrafficRequest>& traffic) {
  auto engine = Engine::Create(traffic, {.num_blocks = 64, .token_budget = 256, .max_num_seqs = 4});
  if (!engine.ok()) return;
  Step step;
  for (int i = 0; i < 50 && engine->Schedule(step); ++i) {
    Require(step.num_tokens() >= 1 && step.num_tokens() <= 256);
    engine->Complete(step);
  }
}

}  // namespace
}  // namespace sparsemla::replay

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sparsemla::replay;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto traffic = ParseTraffic(text);
  if (!traffic.ok()) {
    Require(!traffic.status().message().empty());
    return 0;
  }
  for (const TrafficRequest& request : traffic.value()) {
    Require(request.timestamp_ms >= 0 && request.input_length >= 1 && request.output_length >= 1);
    Require(request.hash_ids.size() == (static_cast<size_t>(request.input_length) + 511) / 512);
  }
  ScheduleSome(traffic.value());
  return 0;
}
