#include "core/problem.h"

#include "core/require.h"

namespace sparsemla {

std::string UnsupportedReason(const Problem& problem) {
  const MlaDims& dims = problem.dims;
  if (dims.num_heads < 1 || dims.num_heads > kMaxNumHeads) {
    return StrCat("num_heads is ", dims.num_heads, "; it must be in [1, ", kMaxNumHeads, "]");
  }
  if (dims.kv_lora_rank < 1 || dims.kv_lora_rank > kMaxHeadDim) {
    return StrCat("kv_lora_rank is ", dims.kv_lora_rank, "; it must be in [1, ", kMaxHeadDim, "]");
  }
  if (dims.qk_rope_head_dim < 0 || dims.qk_rope_head_dim > kMaxHeadDim) {
    return StrCat("qk_rope_head_dim is ", dims.qk_rope_head_dim, "; it must be in [0, ",
                  kMaxHeadDim, "]");
  }
  if (problem.cache_format == CacheFormat::kFp8DsMla &&
      (dims.kv_lora_rank != 512 || (dims.qk_rope_head_dim != 0 && dims.qk_rope_head_dim != 64))) {
    return StrCat("fp8_ds_mla rows hold 512 latent and 64 rope columns; kv_lora_rank is ",
                  dims.kv_lora_rank, " and qk_rope_head_dim ", dims.qk_rope_head_dim,
                  " (it may be 64 or 0)");
  }
  const bool q_is_fp8 =
      problem.q_dtype == DType::kFloat8E4M3 || problem.q_dtype == DType::kFloat8E4M3Fnuz;
  const bool same_fp8 =
      (problem.q_dtype == DType::kFloat8E4M3 && problem.cache_format == CacheFormat::kFp8E4M3) ||
      (problem.q_dtype == DType::kFloat8E4M3Fnuz &&
       problem.cache_format == CacheFormat::kFp8E4M3Fnuz);
  if (q_is_fp8 && !same_fp8) {
    return StrCat("a ", DTypeName(problem.q_dtype), " query needs a cache of the same type; it is ",
                  CacheFormatName(problem.cache_format));
  }
  if (problem.out_dtype != DType::kBFloat16 && problem.out_dtype != DType::kFloat16 &&
      problem.out_dtype != DType::kFloat32) {
    return StrCat("the output type is ", DTypeName(problem.out_dtype),
                  "; it must be bf16, fp16 or fp32");
  }
  return {};
}

}  // namespace sparsemla
