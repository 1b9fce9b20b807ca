#include "tools/replay/models.h"

#include <string>

#include "core/require.h"
#include "trace/file.h"

namespace sparsemla::replay {
namespace {

constexpr Model kModels[] = {
    {.name = "deepseek-v3.2", .num_heads = 128, .num_layers = 61},
    {.name = "glm-5", .num_heads = 64, .num_layers = 78, .qk_head_dim = 256},
    // Rope-free; the indexer selects pools of 4 tokens and adds the incomplete pool: at most 2051
    // entries in rows of 2176. 34 more layers are linear attention.
    {.name = "glm-5.3-flash",
     .num_heads = 64,
     .num_layers = 11,
     .qk_rope_head_dim = 0,
     .qk_head_dim = 256,
     .topk_width = 2176,
     .kpool = 4,
     .cache_format = CacheFormat::kBFloat16},
    {.name = "hy4", .num_heads = 64, .num_layers = 78, .qk_head_dim = 256, .sinks = true},
    // No published model: small enough to check every row.
    {.name = "tiny",
     .num_heads = 4,
     .num_layers = 2,
     .kv_lora_rank = 32,
     .qk_rope_head_dim = 16,
     .qk_head_dim = 24,
     .topk_tokens = 128,
     .topk_width = 128,
     .sinks = true,
     .cache_format = CacheFormat::kBFloat16},
};

}  // namespace

std::span<const Model> Models() {
  return kModels;
}

Result<Model> FindModel(std::string_view name) {
  std::string known;
  for (const Model& model : kModels) {
    if (model.name == name) return model;
    known += (known.empty() ? "" : ", ") + std::string(model.name);
  }
  SPARSEMLA_REQUIRE(false, "model ", trace::Quoted(name), " is unknown; there are ", known);
  return Model{};
}

Result<MlaDims> RankDims(const Model& model, int32_t tp) {
  SPARSEMLA_REQUIRE(tp >= 1 && tp <= model.num_heads, "tp is ", tp, "; ", model.name, " has ",
                    model.num_heads, " heads for 1 to ", model.num_heads, " ranks");
  const int32_t per_rank = (model.num_heads + tp - 1) / tp;
  SPARSEMLA_REQUIRE(model.num_heads % tp == 0, "tp is ", tp, "; it does not divide the ",
                    model.num_heads, " heads of ", model.name, " (engines would pad them to ",
                    per_rank * tp, ", ", per_rank, " a rank)");
  return MlaDims{.num_heads = per_rank,
                 .kv_lora_rank = model.kv_lora_rank,
                 .qk_rope_head_dim = model.qk_rope_head_dim};
}

}  // namespace sparsemla::replay
