// The scheduler of an inference engine, driven by recorded traffic: continuous batching with
// chunked prefill, shared prefixes, preemption and optional draft tokens. It yields, step by step,
// exactly what an attention call needs to know. Nothing here computes or holds cache contents.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "sparsemla/status.h"
#include "tools/replay/block_pool.h"
#include "tools/replay/traffic.h"

namespace sparsemla::replay {

struct EngineOptions {
  int32_t block_size = 64;      // tokens of a cache block; divides kTraceBlockTokens
  int32_t num_blocks = 0;       // of the cache, block 0 included
  int32_t token_budget = 2048;  // query tokens of a step
  int32_t max_num_seqs = 64;    // requests that hold blocks at a time
  int32_t draft_tokens = 0;     // speculative tokens that a decode verifies beside its own
  double step_ms = 50;          // what a step adds to the simulated clock
  uint64_t seed = 0;            // decides which drafts are accepted
};

// One batch. Requests are ordered decodes (at most 1 + draft_tokens query tokens) first.
struct Step {
  int64_t index = 0;
  double clock_ms = 0;                   // when it starts
  std::vector<int32_t> requests;         // [num_reqs] places in the traffic
  std::vector<int32_t> query_start_loc;  // [num_reqs + 1]
  std::vector<int32_t> seq_lens;         // [num_reqs], this step's tokens included
  std::vector<int32_t> block_table;      // [num_reqs, max_blocks], -1: not mapped
  int32_t max_blocks = 0;
  std::vector<int32_t> slot_mapping;  // [num_tokens] slot that each token's cache row goes to

  int32_t num_decode_tokens = 0;
  int32_t num_running = 0;
  int32_t num_waiting = 0;  // arrived, not running
  int32_t num_preempted = 0;
  int64_t admitted_tokens = 0;  // prompt tokens of the requests admitted for the first time
  int64_t hit_tokens = 0;       // of these, found in the cache
  int32_t blocks_referenced = 0;
  int32_t blocks_idle = 0;  // unreferenced, kept for prefix hits

  int32_t num_reqs() const { return static_cast<int32_t>(requests.size()); }
  int32_t num_tokens() const { return query_start_loc.empty() ? 0 : query_start_loc.back(); }
  // Place of a token in its request's sequence.
  int32_t position(int32_t req, int32_t token) const {
    const auto r = static_cast<size_t>(req);
    return seq_lens[r] - query_start_loc[r + 1] + token;
  }
};

class Engine {
 public:
  // kInvalidArgument: an option is out of bounds. kResourceExhausted: a request, which the message
  // names, does not fit the cache even alone.
  static Result<Engine> Create(const std::vector<TrafficRequest>& traffic,
                               const EngineOptions& options);

  // Fills `step` with the next batch; false if all requests are finished. Every batch must be
  // completed before the next is scheduled.
  bool Schedule(Step& step);
  // The batch has been computed: tokens are sampled, full prompt blocks become shareable, finished
  // requests give their blocks back.
  void Complete(const Step& step);

  // What the token's cache row depends on: equal ids and positions mean equal rows.
  int64_t ContentId(int32_t request, int32_t position) const;

  int64_t total_tokens() const { return total_tokens_; }        // to compute if nothing is shared
  int64_t finished_tokens() const { return finished_tokens_; }  // of these, done or found
  int32_t num_requests() const { return static_cast<int32_t>(requests_.size()); }
  int32_t num_finished() const { return num_finished_; }
  const BlockPool& pool() const { return pool_; }

 private:
  struct Request {
    double arrival_ms = 0;
    int32_t input_length = 0;
    int32_t output_length = 0;
    std::vector<int64_t> prefix_ids = {};  // [ceil(input_length / 512)] one id a distinct prefix
    std::vector<int32_t> blocks = {};
    int32_t num_computed = 0;   // tokens with a valid cache row
    int32_t num_known = 0;      // prompt and sampled tokens
    int32_t num_published = 0;  // blocks
    bool preempted = false;     // at least once
  };

  explicit Engine(const EngineOptions& options) : options_(options), pool_(options.num_blocks) {}
  Request& At(int32_t request) { return requests_[static_cast<size_t>(request)]; }
  const Request& At(int32_t request) const { return requests_[static_cast<size_t>(request)]; }

  int64_t BlockKey(const Request& request, int32_t block) const;
  int32_t QueryLength(const Request& request, int32_t budget) const;
  bool Grow(Request& request, int32_t num_tokens);
  void ReleaseBlocks(Request& request);
  void TakeArrivals();
  int32_t ScheduleRunning(Step& step);
  void Admit(Step& step, int32_t budget);
  int32_t AcquirePrefix(Request& request);
  void AddToStep(Step& step, int32_t request, int32_t query_len);
  void FillTables(Step& step) const;
  int32_t NumAccepted(int32_t request, int32_t num_drafts) const;

  EngineOptions options_;
  BlockPool pool_;
  std::vector<Request> requests_;
  std::deque<int32_t> waiting_;   // arrived; preempted ones in front
  std::vector<int32_t> running_;  // in the order of admission
  int32_t next_arrival_ = 0;
  double clock_ms_ = 0;
  int64_t next_step_ = 0;
  int64_t total_tokens_ = 0;
  int64_t finished_tokens_ = 0;
  int32_t num_finished_ = 0;
};

}  // namespace sparsemla::replay
