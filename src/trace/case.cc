#include "trace/case.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>

#include "core/require.h"
#include "trace/file.h"

namespace sparsemla::trace {
namespace {

constexpr std::string_view kFormat = "sparsemla-case-1";
constexpr int64_t kAny = -1;
constexpr int32_t kMaxWidth = 1 << 16;       // of a latent or rotary part
constexpr int32_t kMaxTopkTokens = 1 << 20;  // far above any model's
constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();

constexpr std::array<std::string_view, 17> kTensorNames = {"ql_nope",
                                                           "q_pe",
                                                           "q",
                                                           "kv_cache",
                                                           "topk_indices",
                                                           "block_table",
                                                           "query_start_loc",
                                                           "seq_lens",
                                                           "sinks",
                                                           "q_scale",
                                                           "kv_scale",
                                                           "expected.out",
                                                           "expected.lse",
                                                           "expected.req_id_per_token",
                                                           "expected.paged_kv_indptr",
                                                           "expected.selected_indptr",
                                                           "expected.selected_slots"};

struct DTypeEntry {
  std::string_view metadata;
  std::string_view tensor;
  DType dtype;
};
constexpr std::array kModelTypes = {DTypeEntry{"bf16", "BF16", DType::kBFloat16},
                                    DTypeEntry{"fp16", "F16", DType::kFloat16},
                                    DTypeEntry{"fp32", "F32", DType::kFloat32}};

struct CacheEntry {
  std::string_view tensor;
  CacheFormat format;
};
constexpr std::array kCacheFormats = {CacheEntry{"BF16", CacheFormat::kBFloat16},
                                      CacheEntry{"F16", CacheFormat::kFloat16},
                                      CacheEntry{"F32", CacheFormat::kFloat32},
                                      CacheEntry{"F8_E4M3", CacheFormat::kFp8E4M3},
                                      CacheEntry{"F8_E4M3FNUZ", CacheFormat::kFp8E4M3Fnuz},
                                      CacheEntry{"U8", CacheFormat::kFp8DsMla}};

template <typename T>
const T* Data(const TensorData& tensor) {
  return reinterpret_cast<const T*>(tensor.data.data());
}

template <typename T>
std::span<const T> Elements(const TensorData& tensor) {
  return {Data<T>(tensor), tensor.data.size() / sizeof(T)};
}

// Reads one case step by step; every step checks what it reads against the steps before.
class CaseReader {
 public:
  explicit CaseReader(Safetensors file) { case_.file = std::move(file); }

  Result<Case> Read() {
    SPARSEMLA_RETURN_IF_ERROR(CheckNames());
    SPARSEMLA_RETURN_IF_ERROR(ReadMetadata());
    SPARSEMLA_RETURN_IF_ERROR(ReadQuery());
    SPARSEMLA_RETURN_IF_ERROR(ReadCache());
    SPARSEMLA_RETURN_IF_ERROR(ReadIndices());
    SPARSEMLA_RETURN_IF_ERROR(CheckPositions());
    SPARSEMLA_RETURN_IF_ERROR(ReadScales());
    SPARSEMLA_RETURN_IF_ERROR(ReadExpected());
    return std::move(case_);
  }

 private:
  // A misspelt optional tensor must not be ignored.
  Status CheckNames() const {
    for (const auto& [name, tensor] : case_.file.tensors()) {
      SPARSEMLA_REQUIRE(
          std::find(kTensorNames.begin(), kTensorNames.end(), name) != kTensorNames.end(),
          "tensor ", Quoted(name), " is not part of the format ", kFormat);
    }
    return {};
  }

  Result<std::string_view> Metadata(const std::string& key) const {
    const auto found = case_.file.metadata().find(key);
    SPARSEMLA_REQUIRE(found != case_.file.metadata().end(), "metadata \"", key, "\" is missing");
    return std::string_view(found->second);
  }

  template <typename T>
  Status Number(const std::string& key, T* value) const {
    const Result<std::string_view> text = Metadata(key);
    if (!text.ok()) return text.status();
    const char* end = text.value().data() + text.value().size();
    const auto parsed = std::from_chars(text.value().data(), end, *value);
    SPARSEMLA_REQUIRE(parsed.ec == std::errc() && parsed.ptr == end, "metadata \"", key, "\" is ",
                      Quoted(text.value()), ", not a number in range");
    return {};
  }

  Status Integer(const std::string& key, int32_t least, int32_t most, int32_t* value) const {
    SPARSEMLA_RETURN_IF_ERROR(Number(key, value));
    SPARSEMLA_REQUIRE(*value >= least && *value <= most, "metadata \"", key, "\" is ", *value,
                      ", outside [", least, ", ", most, "]");
    return {};
  }

  Status ReadMetadata() {
    const Result<std::string_view> format = Metadata("format");
    if (!format.ok()) return format.status();
    SPARSEMLA_REQUIRE(format.value() == kFormat, "metadata \"format\" is ", Quoted(format.value()),
                      ", expected \"", kFormat, "\"");
    const Result<std::string_view> name = Metadata("name");
    if (!name.ok()) return name.status();
    case_.name = name.value();
    SPARSEMLA_RETURN_IF_ERROR(Number("softmax_scale", &case_.softmax_scale));
    SPARSEMLA_REQUIRE(std::isfinite(case_.softmax_scale), "metadata \"softmax_scale\" is ",
                      case_.softmax_scale, ", must be finite");
    SPARSEMLA_RETURN_IF_ERROR(Integer("kv_lora_rank", 1, kMaxWidth, &case_.dims.kv_lora_rank));
    SPARSEMLA_RETURN_IF_ERROR(
        Integer("qk_rope_head_dim", 0, kMaxWidth, &case_.dims.qk_rope_head_dim));
    SPARSEMLA_RETURN_IF_ERROR(Integer("topk_tokens", 1, kMaxTopkTokens, &case_.topk_tokens));
    SPARSEMLA_RETURN_IF_ERROR(Integer("block_size", 1, kMaxInt32, &case_.block_table.block_size));
    return ReadTypes();
  }

  Status ReadTypes() {
    const Result<std::string_view> model = Metadata("model_dtype");
    if (!model.ok()) return model.status();
    const auto* type = std::find_if(kModelTypes.begin(), kModelTypes.end(),
                                    [&](const auto& t) { return t.metadata == model.value(); });
    SPARSEMLA_REQUIRE(type != kModelTypes.end(), "metadata \"model_dtype\" is ",
                      Quoted(model.value()), ", expected bf16, fp16 or fp32");
    case_.model_dtype = type->dtype;

    const Result<std::string_view> cache = Metadata("kv_cache_dtype");
    if (!cache.ok()) return cache.status();
    const auto* format =
        std::find_if(kCacheFormats.begin(), kCacheFormats.end(),
                     [&](const auto& f) { return CacheFormatName(f.format) == cache.value(); });
    SPARSEMLA_REQUIRE(format != kCacheFormats.end(), "metadata \"kv_cache_dtype\" is ",
                      Quoted(cache.value()),
                      ", expected bf16, fp16, fp32, fp8_e4m3, fp8_e4m3fnuz or fp8_ds_mla");
    case_.kv_cache.format = format->format;
    cache_dtype_ = format->tensor;
    return {};
  }

  Status CheckTensor(const std::string& name, const TensorData& tensor, std::string_view dtype,
                     std::initializer_list<int64_t> shape) const {
    SPARSEMLA_REQUIRE(tensor.dtype == dtype, "tensor \"", name, "\" is of ", tensor.dtype,
                      ", expected ", dtype);
    const bool same = std::equal(
        tensor.shape.begin(), tensor.shape.end(), shape.begin(), shape.end(),
        [](int64_t got, int64_t want) { return want == kAny ? got <= kMaxInt32 : got == want; });
    if (same) return {};
    std::string expected;
    for (const int64_t size : shape) {
      expected += StrCat(expected.empty() ? "" : ", ", size == kAny ? "any" : StrCat(size));
    }
    return {StatusCode::kInvalidArgument,
            StrCat("tensor \"", name, "\" has shape ", ShapeText(tensor.shape), ", expected [",
                   expected, "]")};
  }

  // The tensor of that name, checked; an optional one that is not there gives null.
  Result<const TensorData*> Optional(const std::string& name, std::string_view dtype,
                                     std::initializer_list<int64_t> shape) const {
    const TensorData* tensor = case_.file.Find(name);
    if (tensor != nullptr) SPARSEMLA_RETURN_IF_ERROR(CheckTensor(name, *tensor, dtype, shape));
    return tensor;
  }

  Result<const TensorData*> Required(const std::string& name, std::string_view dtype,
                                     std::initializer_list<int64_t> shape) const {
    const TensorData* tensor = case_.file.Find(name);
    SPARSEMLA_REQUIRE(tensor != nullptr, "tensor \"", name, "\" is missing");
    SPARSEMLA_RETURN_IF_ERROR(CheckTensor(name, *tensor, dtype, shape));
    return tensor;
  }

  Status ReadQuery() {
    const bool whole = case_.file.Find("q") != nullptr;
    SPARSEMLA_REQUIRE(!whole || (!case_.file.Find("ql_nope") && !case_.file.Find("q_pe")),
                      "tensors \"q\" and \"ql_nope\"/\"q_pe\" are both given, expected one form");
    const std::string name = whole ? "q" : "ql_nope";
    const TensorData* first = case_.file.Find(name);
    SPARSEMLA_REQUIRE(first != nullptr, "tensor \"", name, "\" is missing");
    const auto* type = std::find_if(kModelTypes.begin(), kModelTypes.end(),
                                    [&](const auto& t) { return t.tensor == first->dtype; });
    SPARSEMLA_REQUIRE(type != kModelTypes.end(), "tensor \"", name, "\" is of ", first->dtype,
                      ", expected BF16, F16 or F32");
    const int64_t width = whole ? case_.dims.head_dim_qk() : case_.dims.kv_lora_rank;
    SPARSEMLA_RETURN_IF_ERROR(CheckTensor(name, *first, type->tensor, {kAny, kAny, width}));
    SPARSEMLA_REQUIRE(first->shape[1] >= 1 && first->shape[1] <= kMaxNumHeads, "tensor \"", name,
                      "\" has ", first->shape[1], " heads, outside [1, ", kMaxNumHeads, "]");
    case_.num_tokens = static_cast<int32_t>(first->shape[0]);
    case_.dims.num_heads = static_cast<int32_t>(first->shape[1]);
    const auto tensor = [&](const TensorData& data) {
      return ConstTensor<3>::Contiguous(data.data.data(), type->dtype,
                                        {data.shape[0], data.shape[1], data.shape[2]});
    };
    if (whole) {
      case_.query.q = tensor(*first);
      return {};
    }
    const auto rope = Required("q_pe", type->tensor,
                               {first->shape[0], first->shape[1], case_.dims.qk_rope_head_dim});
    if (!rope.ok()) return rope.status();
    case_.query.ql_nope = tensor(*first);
    case_.query.q_pe = tensor(*rope.value());
    return {};
  }

  Status ReadCache() {
    const bool rows = case_.kv_cache.format == CacheFormat::kFp8DsMla;
    SPARSEMLA_REQUIRE(
        !rows || (case_.dims.kv_lora_rank == 512 && (case_.dims.qk_rope_head_dim | 64) == 64),
        "fp8_ds_mla rows hold 512 latent and 64 rotary values; kv_lora_rank is ",
        case_.dims.kv_lora_rank, ", qk_rope_head_dim ", case_.dims.qk_rope_head_dim);
    const int64_t width = rows ? kFp8DsMlaRowBytes : case_.dims.head_dim_qk();
    const auto cache =
        Required("kv_cache", cache_dtype_, {kAny, case_.block_table.block_size, width});
    if (!cache.ok()) return cache.status();
    case_.block_table.num_blocks = cache.value()->shape[0];
    case_.kv_cache.data = cache.value()->data.data();
    case_.kv_cache.num_slots = NumCacheSlots(case_.block_table);
    SPARSEMLA_REQUIRE(case_.kv_cache.num_slots <= kMaxInt32, "tensor \"kv_cache\" has ",
                      case_.kv_cache.num_slots, " slots, the most is ", kMaxInt32);
    return {};
  }

  Status ReadIndices() {
    const auto start = Required("query_start_loc", "I32", {kAny});
    if (!start.ok()) return start.status();
    SPARSEMLA_REQUIRE(start.value()->shape[0] >= 1,
                      "tensor \"query_start_loc\" is empty, expected [num_reqs + 1]");
    case_.query_start_loc = Elements<int32_t>(*start.value());
    case_.num_reqs = static_cast<int32_t>(start.value()->shape[0] - 1);

    const auto lens = Required("seq_lens", "I32", {case_.num_reqs});
    if (!lens.ok()) return lens.status();
    case_.seq_lens = Elements<int32_t>(*lens.value());

    const auto table = Required("block_table", "I32", {case_.num_reqs, kAny});
    if (!table.ok()) return table.status();
    case_.block_table.blocks = View<const int32_t, 2>::Contiguous(
        Data<int32_t>(*table.value()), {case_.num_reqs, table.value()->shape[1]});

    const auto topk = Required("topk_indices", "I32", {case_.num_tokens, kAny});
    if (!topk.ok()) return topk.status();
    const int64_t width = topk.value()->shape[1];
    SPARSEMLA_REQUIRE(width >= case_.topk_tokens, "tensor \"topk_indices\" is ", width,
                      " wide, topk_tokens is ", case_.topk_tokens);
    case_.topk_indices =
        View<const int32_t, 2>::Contiguous(Data<int32_t>(*topk.value()), {case_.num_tokens, width});
    return {};
  }

  // A position beyond its request's keys is a defect of the writer, not a hole (which is -1).
  Status CheckPositions() const {
    int64_t req = 0;
    for (int64_t token = 0; token < case_.num_tokens; ++token) {
      while (req < case_.num_reqs && case_.query_start_loc[static_cast<size_t>(req) + 1] <= token) {
        ++req;
      }
      if (req == case_.num_reqs) break;  // padding rows: their entries are never read
      const int32_t bound = case_.seq_lens[static_cast<size_t>(req)];
      for (int64_t column = 0; column < case_.topk_indices.shape[1]; ++column) {
        const int32_t position = case_.topk_indices(token, column);
        SPARSEMLA_REQUIRE(position == -1 || (position >= 0 && position < bound),
                          "index out of range: topk_indices[", token, ", ", column, "] is ",
                          position, ", request ", req, " has positions [0, ", bound,
                          ") and -1 stands for none");
      }
    }
    return {};
  }

  Status ReadScale(const std::string& name, float* scale) const {
    const TensorData* tensor = case_.file.Find(name);
    if (!IsPerTensorFp8(case_.kv_cache.format)) {
      SPARSEMLA_REQUIRE(tensor == nullptr, "tensor \"", name,
                        "\" belongs to per-tensor fp8 caches; kv_cache_dtype is ",
                        CacheFormatName(case_.kv_cache.format));
      return {};
    }
    const auto checked = Required(name, "F32", {1});
    if (!checked.ok()) return checked.status();
    *scale = *Data<float>(*checked.value());
    SPARSEMLA_REQUIRE(std::isfinite(*scale) && *scale > 0.0f, "tensor \"", name, "\" is ", *scale,
                      ", must be finite and positive");
    return {};
  }

  Status ReadScales() {
    SPARSEMLA_RETURN_IF_ERROR(ReadScale("q_scale", &case_.q_scale));
    SPARSEMLA_RETURN_IF_ERROR(ReadScale("kv_scale", &case_.kv_scale));
    const auto sinks = Optional("sinks", "F32", {case_.dims.num_heads});
    if (!sinks.ok()) return sinks.status();
    if (sinks.value() != nullptr) case_.sinks = Elements<float>(*sinks.value());
    return {};
  }

  Status ReadExpectedInts(const std::string& name, int64_t size, std::span<const int32_t>* ints) {
    const auto tensor = Optional("expected." + name, "I32", {size});
    if (!tensor.ok()) return tensor.status();
    if (tensor.value() != nullptr) *ints = Elements<int32_t>(*tensor.value());
    return {};
  }

  Status ReadExpected() {
    const int64_t tokens = case_.num_tokens;
    const int64_t heads = case_.dims.num_heads;
    const int64_t rank = case_.dims.kv_lora_rank;
    ExpectedAnswers& expected = case_.expected;
    const auto out = Optional("expected.out", "F32", {tokens, heads, rank});
    if (!out.ok()) return out.status();
    if (out.value() != nullptr) {
      expected.out =
          View<const float, 3>::Contiguous(Data<float>(*out.value()), {tokens, heads, rank});
    }
    const auto lse = Optional("expected.lse", "F32", {tokens, heads});
    if (!lse.ok()) return lse.status();
    if (lse.value() != nullptr) {
      expected.lse = View<const float, 2>::Contiguous(Data<float>(*lse.value()), {tokens, heads});
    }
    SPARSEMLA_RETURN_IF_ERROR(
        ReadExpectedInts("req_id_per_token", tokens, &expected.req_id_per_token));
    SPARSEMLA_RETURN_IF_ERROR(
        ReadExpectedInts("paged_kv_indptr", tokens + 1, &expected.paged_kv_indptr));
    SPARSEMLA_RETURN_IF_ERROR(
        ReadExpectedInts("selected_indptr", tokens + 1, &expected.selected_indptr));
    SPARSEMLA_RETURN_IF_ERROR(ReadExpectedInts("selected_slots", kAny, &expected.selected_slots));
    const int64_t listed = expected.selected_indptr.empty() ? 0 : expected.selected_indptr.back();
    SPARSEMLA_REQUIRE(listed == static_cast<int64_t>(expected.selected_slots.size()),
                      "tensor \"expected.selected_slots\" has ", expected.selected_slots.size(),
                      " entries, expected.selected_indptr ends with ", listed);
    return {};
  }

  Case case_;
  std::string_view cache_dtype_;  // of the tensor "kv_cache"
};

}  // namespace

Result<Case> LoadCase(const std::string& path) {
  Result<Safetensors> file = Safetensors::ReadFile(path);
  if (!file.ok()) return file.status();
  Result<Case> loaded = MakeCase(std::move(file).value());
  if (!loaded.ok()) return AtPath(path, loaded.status());
  return loaded;
}

Result<Case> MakeCase(Safetensors file) {
  return CaseReader(std::move(file)).Read();
}

}  // namespace sparsemla::trace
