#include "tools/replay/content.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "tools/replay/hash.h"

namespace sparsemla::replay {
namespace {

constexpr uint64_t kCacheSalt = 1;
constexpr uint64_t kQuerySalt = 2;
constexpr uint64_t kAmplitudeSalt = 3;
constexpr int32_t kDsMlaTile = 128;  // columns that share a scale

// Values with mean 0, variance 1 and a bell shape up to 3.45: the sum of the four bytes of a hash.
// 32-bit arithmetic, so that compilers vectorise it.
void FillNormal(uint64_t key, std::span<float> values) {
  const auto low = static_cast<uint32_t>(key);
  const auto high = static_cast<uint32_t>(key >> 32);
  constexpr float kPerDeviation = 1.0f / 147.8f;  // sqrt(4 * (256^2 - 1) / 12)
  const auto count = static_cast<uint32_t>(values.size());
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t h = (i + low) * 0x9E3779B9u ^ high;
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    h ^= h >> 16;
    const uint32_t pairs = (h & 0x00FF00FFu) + ((h >> 8) & 0x00FF00FFu);
    const auto sum = static_cast<int32_t>((pairs & 0xFFFFu) + (pairs >> 16));
    values[i] = static_cast<float>(sum - 510) * kPerDeviation;
  }
}

template <typename T>
void Quantise(std::span<const float> values, float inverse_scale, std::byte* row) {
  for (size_t i = 0; i < values.size(); ++i) {
    const T code = FromFloat<T>(values[i] * inverse_scale);
    std::memcpy(row + i * sizeof(T), &code, sizeof(T));
  }
}

// 512 codes, 4 scales, 64 rope values (types.h).
void QuantiseDsMla(std::span<const float> values, int32_t kv_lora_rank, std::byte* row) {
  std::memset(row, 0, static_cast<size_t>(kFp8DsMlaRowBytes));
  const auto latent = static_cast<size_t>(kv_lora_rank);
  for (size_t tile = 0; tile * kDsMlaTile < latent; ++tile) {
    const auto part = values.subspan(tile * kDsMlaTile, kDsMlaTile);
    float largest = 0.0f;
    for (const float v : part) largest = std::max(largest, std::fabs(v));
    const float scale = std::max(largest / 448.0f, 0x1p-126f);
    Quantise<Float8E4M3>(part, 1.0f / scale, row + tile * kDsMlaTile);
    std::memcpy(row + latent + tile * sizeof(float), &scale, sizeof(float));
  }
  const size_t num_tiles = latent / kDsMlaTile;
  Quantise<BFloat16>(values.subspan(latent), 1.0f, row + latent + num_tiles * sizeof(float));
}

}  // namespace

ContentSource::ContentSource(const MlaDims& dims, CacheFormat format, uint64_t seed)
    : dims_(dims),
      format_(format),
      seed_(seed),
      amplitude_(static_cast<size_t>(dims.head_dim_qk())),
      values_(static_cast<size_t>(dims.num_heads) * amplitude_.size()) {
  if (IsPerTensorFp8(format)) {
    q_scale_ = 4.0f / 224.0f;  // queries stay below 3.5, cache values below 5.2
    kv_scale_ = 6.0f / 224.0f;
  }
  for (size_t i = 0; i < amplitude_.size(); ++i) {
    Random random(Mix(seed, kAmplitudeSalt, i));
    amplitude_[i] = static_cast<float>(0.5 + random.Unit());
  }
}

void ContentSource::WriteCacheRow(int64_t content_id, int32_t position, std::byte* row) {
  const uint64_t token = Mix(static_cast<uint64_t>(content_id), static_cast<uint64_t>(position));
  const std::span<float> values(values_.data(), amplitude_.size());
  FillNormal(Mix(seed_, kCacheSalt, token), values);
  for (size_t i = 0; i < values.size(); ++i) values[i] *= amplitude_[i];
  switch (format_) {
    case CacheFormat::kFloat32:
      return Quantise<float>(values, 1.0f, row);
    case CacheFormat::kBFloat16:
      return Quantise<BFloat16>(values, 1.0f, row);
    case CacheFormat::kFloat16:
      return Quantise<Float16>(values, 1.0f, row);
    case CacheFormat::kFp8E4M3:
      return Quantise<Float8E4M3>(values, 1.0f / kv_scale_, row);
    case CacheFormat::kFp8E4M3Fnuz:
      return Quantise<Float8E4M3Fnuz>(values, 1.0f / kv_scale_, row);
    case CacheFormat::kFp8DsMla:
      return QuantiseDsMla(values, dims_.kv_lora_rank, row);
  }
}

void ContentSource::WriteQuery(int64_t content_id, int32_t position, BFloat16* query) {
  const uint64_t token = Mix(static_cast<uint64_t>(content_id), static_cast<uint64_t>(position));
  FillNormal(Mix(seed_, kQuerySalt, token), values_);
  for (size_t i = 0; i < values_.size(); ++i) query[i] = FromFloat<BFloat16>(values_[i]);
}

std::vector<float> ContentSource::Sinks() const {
  std::vector<float> sinks(static_cast<size_t>(dims_.num_heads));
  for (size_t h = 0; h < sinks.size(); ++h) {  // from negligible to as heavy as the keys
    sinks[h] = -2.0f + 8.0f * static_cast<float>(h) / static_cast<float>(sinks.size());
  }
  return sinks;
}

}  // namespace sparsemla::replay
