// One decode step: a request with three cached tokens attends to all of them. The query is zero, so
// the answer is the mean of the three values. README.md shows the marked part.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "sparsemla/attention.h"
#include "sparsemla/backend.h"
#include "sparsemla/plan.h"

using namespace sparsemla;

namespace {

int Fail(const Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return EXIT_FAILURE;
}

}  // namespace

int main() {
  constexpr int32_t kBlockSize = 64;
  constexpr int32_t kNumBlocks = 2;
  const MlaDims dims = {.num_heads = 16, .kv_lora_rank = 512, .qk_rope_head_dim = 64};
  std::vector<float> q(16 * 576, 0.0f);
  std::vector<float> kv_cache(kNumBlocks * kBlockSize * 576, 0.0f);
  for (size_t slot = 64; slot < 67; ++slot) kv_cache[slot * 576] = static_cast<float>(slot - 63);
  std::vector<float> out(16 * 512), lse(16);
  const std::array<int32_t, 2> query_start_loc = {0, 1};
  const std::array<int32_t, 1> seq_lens = {3};
  const std::array<int32_t, 3> topk = {2, 0, 1};   // positions in the request, any order
  const std::array<int32_t, 1> block_table = {1};  // its tokens lie in block 1: slots 64, 65, 66

  // [README]
  // Once: a back end, the limits of a step, scratch memory.
  const auto backend = CreateBackend("");
  if (!backend.ok()) return Fail(backend.status());
  const Backend& device = *backend.value();
  const PlanCapacity capacity = {.num_compute_units = device.device().num_compute_units,
                                 .max_num_tokens = 256,
                                 .max_num_reqs = 256,
                                 .topk_tokens = 2048,
                                 .dims = dims};
  auto plan = Plan::Create(capacity);
  const auto bytes = WorkspaceBytes(device, capacity);
  if (!plan.ok() || !bytes.ok()) return Fail(plan.ok() ? bytes.status() : plan.status());
  const std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, bytes.value()),
                                                       std::free);

  // Every step: plan from host lengths.
  const auto changed = plan->Build({.query_start_loc = query_start_loc,
                                    .seq_lens = seq_lens,
                                    .dims = dims,
                                    .q_dtype = DType::kFloat32,
                                    .cache_format = CacheFormat::kFloat32});
  if (!changed.ok()) return Fail(changed.status());

  // Every layer: selected positions -> slots -> attention -> out, lse.
  const Status status = SparseMla(
      device,
      {.topk_indices = View<const int32_t, 2>::Contiguous(topk.data(), {1, 3}),
       .block_table = {.blocks = View<const int32_t, 2>::Contiguous(block_table.data(), {1, 1}),
                       .block_size = kBlockSize,
                       .num_blocks = kNumBlocks},
       .attention = {.query = {.q = ConstTensor<3>::Contiguous(q.data(), DType::kFloat32,
                                                               {1, 16, 576})},
                     .kv_cache = {.data = kv_cache.data(),
                                  .format = CacheFormat::kFloat32,
                                  .num_slots = kNumBlocks * kBlockSize},
                     .softmax_scale = 1.0f / 24.0f,
                     .out = Tensor<3>::Contiguous(out.data(), DType::kFloat32, {1, 16, 512}),
                     .lse = View<float, 2>::Contiguous(lse.data(), {1, 16})}},
      plan.value(), {scratch.get(), bytes.value()});
  // [README]
  if (!status.ok()) return Fail(status);

  std::printf("out[0] = %.4f (mean of 1, 2, 3), lse = %.4f (ln 3)\n", static_cast<double>(out[0]),
              static_cast<double>(lse[0]));
  const bool right = std::fabs(out[0] - 2.0f) < 1e-5f && std::fabs(lse[0] - 1.0986123f) < 1e-5f;
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}
