// Attention shapes of published sparse-MLA models, as one tensor-parallel rank sees them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "sparsemla/status.h"
#include "sparsemla/types.h"

namespace sparsemla::replay {

struct Model {
  std::string_view name;
  int32_t num_heads = 0;   // of the whole model
  int32_t num_layers = 0;  // with sparse attention
  int32_t kv_lora_rank = 512;
  int32_t qk_rope_head_dim = 64;
  int32_t qk_head_dim = 192;  // before absorption; softmax_scale = qk_head_dim^-1/2
  int32_t topk_tokens = 2048;
  int32_t topk_width = 2048;  // columns of the indexer's rows
  int32_t kpool = 1;          // consecutive tokens that the indexer selects as one
  bool sinks = false;
  CacheFormat cache_format = CacheFormat::kFp8DsMla;  // what engines use by default
};

std::span<const Model> Models();

// kInvalidArgument lists the known names.
Result<Model> FindModel(std::string_view name);

// Sizes on one of `tp` ranks. kInvalidArgument if the heads cannot be divided evenly.
Result<MlaDims> RankDims(const Model& model, int32_t tp);

}  // namespace sparsemla::replay
