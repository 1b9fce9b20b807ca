// Stands in for the model's weights: cache rows, queries and sinks of realistic magnitude,
// generated from what they belong to. Equal content ids and positions give equal rows, so shared
// prefixes hold what their sharers expect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/numeric.h"
#include "sparsemla/types.h"

namespace sparsemla::replay {

class ContentSource {
 public:
  ContentSource(const MlaDims& dims, CacheFormat format, uint64_t seed);

  // Writes one packed cache row (CacheRowBytes), quantised as engines do when they append a token.
  void WriteCacheRow(int64_t content_id, int32_t position, std::byte* row);
  // Writes the query of one token, [num_heads, head_dim_qk].
  void WriteQuery(int64_t content_id, int32_t position, BFloat16* query);
  std::vector<float> Sinks() const;  // [num_heads]

  // What per-tensor fp8 codes are to be multiplied by; 1 for the other formats.
  float q_scale() const { return q_scale_; }
  float kv_scale() const { return kv_scale_; }

 private:
  MlaDims dims_;
  CacheFormat format_;
  uint64_t seed_;
  float q_scale_ = 1.0f;
  float kv_scale_ = 1.0f;
  std::vector<float> amplitude_;  // [head_dim_qk] of the cache's columns
  std::vector<float> values_;     // [num_heads * head_dim_qk] scratch
};

}  // namespace sparsemla::replay
