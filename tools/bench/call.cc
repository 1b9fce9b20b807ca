#include "tools/bench/call.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/numeric.h"
#include "core/require.h"
#include "tools/replay/content.h"
#include "tools/replay/hash.h"

namespace sparsemla::bench {
namespace {

constexpr int kPoison = 0xCD;

// Lengths of one step. Ragged rows are requests of their own, since the rows of one request are as
// long as their positions say.
struct Step {
  std::vector<int32_t> query_start_loc;
  std::vector<int32_t> seq_lens;
};

Step MakeStep(const CellSpec& spec, bool ragged) {
  const Workload& workload = spec.workload;
  if (!ragged) return {workload.query_start_loc, workload.seq_lens};
  Step step;
  step.query_start_loc.resize(static_cast<size_t>(workload.num_tokens()) + 1);
  std::iota(step.query_start_loc.begin(), step.query_start_loc.end(), 0);
  replay::Random random(2);
  for (size_t req = 0; req < workload.seq_lens.size(); ++req) {
    const int32_t query_len = workload.query_start_loc[req + 1] - workload.query_start_loc[req];
    for (int32_t j = 0; j < query_len; ++j) {
      const int32_t visible = workload.seq_lens[req] - (query_len - 1 - j);
      step.seq_lens.push_back(1 + random.Below(std::min(visible, spec.topk_tokens)));
    }
  }
  return step;
}

Result<Plan> MakePlan(const CellSpec& spec, const BenchOptions& options, const Backend& backend) {
  const MlaDims dims = {.num_heads = spec.num_heads};
  const Step step = MakeStep(spec, options.ragged);
  auto plan = Plan::Create({.num_compute_units = backend.device().num_compute_units,
                            .max_num_tokens = spec.workload.num_tokens(),
                            .max_num_reqs = static_cast<int32_t>(step.seq_lens.size()),
                            .topk_tokens = spec.topk_tokens,
                            .dims = dims,
                            .force_splits = options.splits,
                            .batch_invariant = options.batch_invariant});
  if (!plan.ok()) return plan;
  const auto built = plan->Build({.query_start_loc = step.query_start_loc,
                                  .seq_lens = step.seq_lens,
                                  .dims = dims,
                                  .q_dtype = ModelDType(spec.cache_format),
                                  .cache_format = spec.cache_format,
                                  .topk_tokens = spec.topk_tokens});
  if (!built.ok()) return built.status();
  return plan;
}

// Queries of realistic size, [num_tokens, num_heads, head_dim_qk] in `dtype`.
void FillQueries(replay::ContentSource& content, const MlaDims& dims, int32_t num_tokens,
                 DType dtype, std::byte* query) {
  std::vector<BFloat16> values(static_cast<size_t>(dims.num_heads * dims.head_dim_qk()));
  VisitDType(dtype, [&]<typename T>() {
    for (int32_t token = 0; token < num_tokens; ++token) {
      content.WriteQuery(0, token, values.data());
      for (const BFloat16 value : values) {
        const T element = FromFloat<T>(ToFloat(value));
        std::memcpy(query, &element, sizeof(T));
        query += sizeof(T);
      }
    }
  });
}

}  // namespace

DType ModelDType(CacheFormat format) {
  if (format == CacheFormat::kFloat32) return DType::kFloat32;
  return format == CacheFormat::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
}

Status CheckFitsMemory(int64_t bytes) {
  const int64_t memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  SPARSEMLA_CHECK(bytes <= memory, StatusCode::kResourceExhausted, "needs ", bytes >> 20,
                  " MB of memory; this machine has ", memory >> 20);
  return {};
}

Result<Call> Call::Create(const CellSpec& spec, const BenchOptions& options, const Backend& backend,
                          const KvCache& cache) {
  auto plan = MakePlan(spec, options, backend);
  if (!plan.ok()) return plan.status();
  Call call(std::move(plan).value());
  const MlaDims& dims = call.plan_.dims();
  const int64_t tokens = call.plan_.num_tokens();
  const int64_t heads = dims.num_heads;
  const DType dtype = ModelDType(spec.cache_format);
  const auto element_bytes = static_cast<int64_t>(DTypeBytes(dtype));
  const int64_t query_bytes = tokens * heads * dims.head_dim_qk() * element_bytes;
  const int64_t out_bytes = tokens * heads * dims.kv_lora_rank * element_bytes;
  const size_t workspace_bytes = backend.AttentionWorkspaceBytes(call.plan_.capacity());
  SPARSEMLA_RETURN_IF_ERROR(CheckFitsMemory(
      cache.num_slots * CacheRowBytes(cache.format, dims) + query_bytes + out_bytes +
      static_cast<int64_t>(workspace_bytes) + 4 * call.plan_.num_kv_indices()));

  call.query_ = replay::Buffer<std::byte>(query_bytes);
  call.out_ = replay::Buffer<std::byte>(out_bytes);
  call.lse_ = replay::Buffer<float>(tokens * heads);
  call.workspace_ = replay::Buffer<std::byte>(static_cast<int64_t>(workspace_bytes));
  call.kv_indices_.resize(static_cast<size_t>(call.plan_.num_kv_indices()));
  replay::ContentSource content(dims, spec.cache_format, 1);
  FillQueries(content, dims, call.plan_.num_tokens(), dtype, call.query_.data());
  call.params_ = {
      .query = {.q = ConstTensor<3>::Contiguous(call.query_.data(), dtype,
                                                {tokens, heads, dims.head_dim_qk()})},
      .kv_cache = cache,
      .kv_indices = call.kv_indices_,
      .softmax_scale = 1.0f / std::sqrt(static_cast<float>(dims.head_dim_qk())),
      .q_scale = content.q_scale(),
      .kv_scale = content.kv_scale(),
      .out = Tensor<3>::Contiguous(call.out_.data(), dtype, {tokens, heads, dims.kv_lora_rank}),
      .lse = View<float, 2>::Contiguous(call.lse_.data(), {tokens, heads})};
  return call;
}

void Call::PoisonOutputs() {
  std::memset(out_.data(), kPoison, out_.bytes());
  std::memset(lse_.data(), kPoison, lse_.bytes());
}

Status Call::Run(const Backend& backend) const {
  const Workspace workspace = {workspace_.data(), workspace_.bytes()};
  SPARSEMLA_RETURN_IF_ERROR(Attention(backend, params_, plan_, workspace));
  return Merge(
      backend,
      {.partials = PlanPartials(plan_, workspace), .out = params_.out, .lse = params_.lse});
}

}  // namespace sparsemla::bench
