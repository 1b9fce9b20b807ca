#include "sparsemla/types.h"

namespace sparsemla {

size_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E4M3Fnuz:
      return 1;
    case DType::kFloat32:
      break;
  }
  return 4;
}

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "fp16";
    case DType::kFloat8E4M3:
      return "fp8_e4m3";
    case DType::kFloat8E4M3Fnuz:
      return "fp8_e4m3fnuz";
  }
  return "unknown dtype";
}

int64_t CacheRowBytes(CacheFormat format, const MlaDims& dims) {
  switch (format) {
    case CacheFormat::kBFloat16:
    case CacheFormat::kFloat16:
      return 2 * int64_t{dims.head_dim_qk()};
    case CacheFormat::kFp8E4M3:
    case CacheFormat::kFp8E4M3Fnuz:
      return dims.head_dim_qk();
    case CacheFormat::kFp8DsMla:
      return kFp8DsMlaRowBytes;
    case CacheFormat::kFloat32:
      break;
  }
  return 4 * int64_t{dims.head_dim_qk()};
}

std::string_view CacheFormatName(CacheFormat format) {
  switch (format) {
    case CacheFormat::kFloat32:
      return "fp32";
    case CacheFormat::kBFloat16:
      return "bf16";
    case CacheFormat::kFloat16:
      return "fp16";
    case CacheFormat::kFp8E4M3:
      return "fp8_e4m3";
    case CacheFormat::kFp8E4M3Fnuz:
      return "fp8_e4m3fnuz";
    case CacheFormat::kFp8DsMla:
      return "fp8_ds_mla";
  }
  return "unknown cache format";
}

}  // namespace sparsemla
