#include "tools/replay/engine.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/require.h"
#include "tools/replay/hash.h"

namespace sparsemla::replay {
namespace {

constexpr double kDraftAcceptance = 0.7;  // of each draft token, given that those before it were

int32_t CeilDivide(int32_t a, int32_t b) {
  return (a + b - 1) / b;
}

Status CheckOptions(const EngineOptions& options) {
  SPARSEMLA_REQUIRE(options.block_size >= 1 && kTraceBlockTokens % options.block_size == 0,
                    "block size is ", options.block_size, "; it must divide ", kTraceBlockTokens);
  SPARSEMLA_REQUIRE(options.num_blocks >= 2, "the cache has ", options.num_blocks,
                    " blocks; it needs at least 2");
  SPARSEMLA_REQUIRE(options.token_budget >= 1, "token budget is ", options.token_budget,
                    "; it must be at least 1");
  SPARSEMLA_REQUIRE(options.max_num_seqs >= 1, "max seqs is ", options.max_num_seqs,
                    "; it must be at least 1");
  SPARSEMLA_REQUIRE(options.draft_tokens >= 0 && options.draft_tokens <= 16, "draft tokens is ",
                    options.draft_tokens, "; it must be in [0, 16]");
  SPARSEMLA_REQUIRE(options.step_ms > 0 && options.step_ms <= 1e9, "step time is ", options.step_ms,
                    " ms; it must be in (0, 1e9]");
  return {};
}

}  // namespace

Result<Engine> Engine::Create(const std::vector<TrafficRequest>& traffic,
                              const EngineOptions& options) {
  SPARSEMLA_RETURN_IF_ERROR(CheckOptions(options));
  Engine engine(options);
  // An id for every distinct sequence of hash_ids: equal ids, equal prefixes, with no collisions.
  std::map<std::pair<int64_t, int64_t>, int64_t> id_of_extension;
  for (const TrafficRequest& source : traffic) {
    Request request{.arrival_ms = static_cast<double>(source.timestamp_ms),
                    .input_length = source.input_length,
                    .output_length = source.output_length,
                    .num_known = source.input_length};
    // The last sampled token is never fed back, so it has no cache row.
    const int32_t num_rows = request.input_length + request.output_length - 1;
    const int32_t num_blocks = CeilDivide(num_rows, options.block_size);
    SPARSEMLA_CHECK(num_blocks < options.num_blocks, StatusCode::kResourceExhausted, "request ",
                    engine.requests_.size(), " needs ", num_blocks, " blocks of ",
                    options.block_size, " tokens; the cache has ", options.num_blocks - 1);
    int64_t prefix = -1;
    for (const int64_t hash_id : source.hash_ids) {
      const auto next_id = static_cast<int64_t>(id_of_extension.size());
      prefix = id_of_extension.emplace(std::pair(prefix, hash_id), next_id).first->second;
      request.prefix_ids.push_back(prefix);
    }
    engine.total_tokens_ += num_rows;
    engine.requests_.push_back(std::move(request));
  }
  return engine;
}

int64_t Engine::ContentId(int32_t request, int32_t position) const {
  const Request& r = At(request);
  if (position >= r.input_length) return -1 - int64_t{request};
  return r.prefix_ids[static_cast<size_t>(position / kTraceBlockTokens)];
}

int64_t Engine::BlockKey(const Request& request, int32_t block) const {
  const int32_t per_id = kTraceBlockTokens / options_.block_size;
  return request.prefix_ids[static_cast<size_t>(block / per_id)] * per_id + block % per_id;
}

// A prompt goes in chunks; a request that only lacks its newest token adds drafts to it, never more
// than it has output left.
int32_t Engine::QueryLength(const Request& request, int32_t budget) const {
  int32_t length = request.num_known - request.num_computed;
  if (length == 1) {
    const int32_t last = request.input_length + request.output_length - 1;
    length = std::min(1 + options_.draft_tokens, last - request.num_computed);
  }
  return std::min(length, budget);
}

// Maps blocks for `num_tokens` tokens; all or nothing.
bool Engine::Grow(Request& request, int32_t num_tokens) {
  const int32_t missing =
      CeilDivide(num_tokens, options_.block_size) - static_cast<int32_t>(request.blocks.size());
  if (missing > pool_.num_available()) return false;
  for (int32_t i = 0; i < missing; ++i) request.blocks.push_back(pool_.Allocate());
  return true;
}

// Last block first: of an idle prefix the tail is reused before the head.
void Engine::ReleaseBlocks(Request& request) {
  while (!request.blocks.empty()) {
    pool_.Release(request.blocks.back());
    request.blocks.pop_back();
  }
  request.num_published = 0;
}

void Engine::TakeArrivals() {
  const auto count = static_cast<int32_t>(requests_.size());
  while (next_arrival_ < count && At(next_arrival_).arrival_ms <= clock_ms_) {
    waiting_.push_back(next_arrival_++);
  }
}

bool Engine::Schedule(Step& step) {
  step = Step{};
  TakeArrivals();
  if (running_.empty() && waiting_.empty()) {
    if (next_arrival_ == static_cast<int32_t>(requests_.size())) return false;
    clock_ms_ = At(next_arrival_).arrival_ms;
    TakeArrivals();
  }
  step.index = next_step_++;
  step.clock_ms = clock_ms_;
  const int32_t budget = ScheduleRunning(step);
  if (step.num_preempted == 0) Admit(step, budget);
  FillTables(step);
  return true;
}

// Gives every running request its tokens, the oldest first, and returns what is left of the budget.
// When blocks run out, the youngest request loses its blocks and will be computed again.
int32_t Engine::ScheduleRunning(Step& step) {
  int32_t budget = options_.token_budget;
  for (size_t i = 0; i < running_.size() && budget > 0; ++i) {
    const int32_t id = running_[i];
    const int32_t query_len = QueryLength(At(id), budget);
    bool fits = Grow(At(id), At(id).num_computed + query_len);
    while (!fits) {
      const int32_t victim = running_.back();
      running_.pop_back();
      ReleaseBlocks(At(victim));
      finished_tokens_ -= At(victim).num_computed;
      At(victim).num_computed = 0;
      At(victim).preempted = true;
      waiting_.push_front(victim);
      ++step.num_preempted;
      if (victim == id) break;
      fits = Grow(At(id), At(id).num_computed + query_len);
    }
    if (!fits) break;
    AddToStep(step, id, query_len);
    budget -= query_len;
  }
  return budget;
}

void Engine::Admit(Step& step, int32_t budget) {
  while (budget > 0 && !waiting_.empty() &&
         static_cast<int32_t>(running_.size()) < options_.max_num_seqs) {
    const int32_t id = waiting_.front();
    Request& request = At(id);
    const int32_t hit_tokens = AcquirePrefix(request);
    request.num_computed = hit_tokens;
    const int32_t query_len = QueryLength(request, budget);
    if (!Grow(request, hit_tokens + query_len)) {
      ReleaseBlocks(request);
      request.num_computed = 0;
      break;
    }
    waiting_.pop_front();
    running_.push_back(id);
    finished_tokens_ += hit_tokens;
    if (!request.preempted) {  // finding one's own blocks again is no shared prefix
      step.admitted_tokens += request.input_length;
      step.hit_tokens += hit_tokens;
    }
    AddToStep(step, id, query_len);
    budget -= query_len;
  }
}

// Takes the longest cached prefix of full blocks that leaves at least one token to compute: the
// next token is sampled from its output.
int32_t Engine::AcquirePrefix(Request& request) {
  const int32_t most = std::min(request.num_known - 1, request.input_length) / options_.block_size;
  for (int32_t i = 0; i < most; ++i) {
    const int32_t block = pool_.AcquireCached(BlockKey(request, i));
    if (block == kNoBlock) break;
    request.blocks.push_back(block);
  }
  request.num_published = static_cast<int32_t>(request.blocks.size());
  return request.num_published * options_.block_size;
}

void Engine::AddToStep(Step& step, int32_t request, int32_t query_len) {
  step.requests.push_back(request);
  step.seq_lens.push_back(At(request).num_computed + query_len);
}

// Orders the batch and writes the arrays that follow from the order.
void Engine::FillTables(Step& step) const {
  struct Entry {
    int32_t request, seq_len, query_len;
  };
  std::vector<Entry> entries;
  for (size_t i = 0; i < step.requests.size(); ++i) {
    const int32_t id = step.requests[i];
    entries.push_back({id, step.seq_lens[i], step.seq_lens[i] - At(id).num_computed});
    step.max_blocks = std::max(step.max_blocks, static_cast<int32_t>(At(id).blocks.size()));
  }
  const int32_t threshold = 1 + options_.draft_tokens;
  std::stable_partition(entries.begin(), entries.end(),
                        [&](const Entry& e) { return e.query_len <= threshold; });
  step.requests.clear();
  step.seq_lens.clear();
  step.query_start_loc.assign(1, 0);
  for (const Entry& entry : entries) {
    const std::vector<int32_t>& blocks = At(entry.request).blocks;
    step.requests.push_back(entry.request);
    step.seq_lens.push_back(entry.seq_len);
    step.query_start_loc.push_back(step.query_start_loc.back() + entry.query_len);
    step.block_table.insert(step.block_table.end(), blocks.begin(), blocks.end());
    step.block_table.resize(step.requests.size() * static_cast<size_t>(step.max_blocks), kNoBlock);
    for (int32_t p = entry.seq_len - entry.query_len; p < entry.seq_len; ++p) {
      const int32_t block = blocks[static_cast<size_t>(p / options_.block_size)];
      step.slot_mapping.push_back(block * options_.block_size + p % options_.block_size);
    }
    if (entry.query_len <= threshold) step.num_decode_tokens += entry.query_len;
  }
  step.num_running = static_cast<int32_t>(running_.size());
  step.num_waiting = static_cast<int32_t>(waiting_.size());
  step.blocks_referenced = pool_.num_referenced();
  step.blocks_idle = pool_.num_cached_idle();
}

int32_t Engine::NumAccepted(int32_t request, int32_t num_drafts) const {
  const auto place = static_cast<uint64_t>(request) << 32 |  //
                     static_cast<uint64_t>(At(request).num_known);
  Random random(Mix(options_.seed, place));
  int32_t accepted = 0;
  while (accepted < num_drafts && random.Unit() < kDraftAcceptance) ++accepted;
  return accepted;
}

void Engine::Complete(const Step& step) {
  for (size_t i = 0; i < step.requests.size(); ++i) {
    const int32_t id = step.requests[i];
    Request& request = At(id);
    const int32_t before = request.num_computed;
    const int32_t num_drafts = step.seq_lens[i] - request.num_known;
    if (num_drafts < 0) {
      request.num_computed = step.seq_lens[i];
    } else {
      const int32_t accepted = NumAccepted(id, num_drafts);
      request.num_computed = request.num_known + accepted;
      request.num_known += 1 + accepted;
    }
    finished_tokens_ += request.num_computed - before;
    const int32_t full = std::min(request.num_computed, request.input_length) / options_.block_size;
    for (int32_t& b = request.num_published; b < full; ++b) {
      pool_.Publish(request.blocks[static_cast<size_t>(b)], BlockKey(request, b));
    }
    if (request.num_known == request.input_length + request.output_length) {
      ReleaseBlocks(request);
      std::erase(running_, id);
      ++num_finished_;
    }
  }
  clock_ms_ += options_.step_ms;
}

}  // namespace sparsemla::replay
