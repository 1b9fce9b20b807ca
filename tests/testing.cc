#include "tests/testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/numeric.h"
#include "core/require.h"

namespace sparsemla::test {
namespace {

constexpr size_t kGuardBytes = 256;
constexpr std::byte kGuard{0x5A};

float Gaussian(std::mt19937& random) {
  return std::normal_distribution<float>()(random);
}

void StoreElement(DType dtype, float value, std::byte* target) {
  VisitDType(dtype, [&]<typename T>() {
    const T stored = FromFloat<T>(value);
    std::memcpy(target, &stored, sizeof(T));
  });
}

// A NaN of every format but fnuz, whose only NaN is 0x80.
std::byte NanByte(CacheFormat format) {
  return format == CacheFormat::kFp8E4M3Fnuz ? std::byte{0x80} : std::byte{0xFF};
}

DType CacheElement(CacheFormat format) {
  switch (format) {
    case CacheFormat::kFloat32:
      return DType::kFloat32;
    case CacheFormat::kBFloat16:
      return DType::kBFloat16;
    case CacheFormat::kFloat16:
      return DType::kFloat16;
    case CacheFormat::kFp8E4M3Fnuz:
      return DType::kFloat8E4M3Fnuz;
    case CacheFormat::kFp8E4M3:
    case CacheFormat::kFp8DsMla:
      break;
  }
  return DType::kFloat8E4M3;
}

template <typename T>
bool AllEqual(std::span<const T> values, T wanted) {
  return std::all_of(values.begin(), values.end(), [&](T value) { return value == wanted; });
}

}  // namespace

// ---- what is tested ----------------------------------------------------------------------------

std::vector<KernelUnderTest> AllKernels() {
  std::vector<KernelUnderTest> kernels;
  for (const std::string_view name : BackendNames()) {
    const auto backend = CreateBackend(name);
    if (!backend.ok()) {
      kernels.push_back({std::string(name), "any", backend.status().message()});
      continue;
    }
    for (const KernelInfo& kernel : backend.value()->kernels()) {
      kernels.push_back({std::string(name), kernel.name, kernel.unavailable_reason});
    }
  }
  return kernels;
}

std::unique_ptr<Backend> MakeBackend(const KernelUnderTest& kernel, int32_t num_threads) {
  auto backend =
      CreateBackend(kernel.backend, {.kernel = kernel.kernel, .num_threads = num_threads});
  return backend.ok() ? std::move(backend).value() : nullptr;
}

DType ModelDType(CacheFormat format) {
  return format == CacheFormat::kFloat32   ? DType::kFloat32
         : format == CacheFormat::kFloat16 ? DType::kFloat16
                                           : DType::kBFloat16;
}

// ---- memory ------------------------------------------------------------------------------------

GuardedBuffer::GuardedBuffer(size_t bytes, std::byte fill)
    : storage_(bytes + kGuardBytes + 64, kGuard), bytes_(bytes) {
  const auto address = reinterpret_cast<uintptr_t>(storage_.data());
  data_ = storage_.data() + (64 - address % 64) % 64;
  std::fill_n(data_, bytes, fill);
}

bool GuardedBuffer::GuardIntact() const {
  return AllEqual(std::span<const std::byte>(data_ + bytes_, kGuardBytes), kGuard);
}

Outputs::Outputs(int64_t num_rows, const MlaDims& dims, DType dtype, bool packed)
    : dims_(dims),
      dtype_(dtype),
      num_rows_(num_rows),
      head_stride_(dims.kv_lora_rank + (packed ? 0 : 5)),
      row_stride_(dims.num_heads * head_stride_ + (packed ? 0 : 7)),
      lse_stride_(dims.num_heads + (packed ? 0 : 3)),
      out_(static_cast<size_t>(num_rows * row_stride_) * DTypeBytes(dtype)),
      lse_(static_cast<size_t>(num_rows * lse_stride_) * sizeof(float)) {}

Tensor<3> Outputs::out() const {
  return {out_.data(),
          dtype_,
          {num_rows_, dims_.num_heads, dims_.kv_lora_rank},
          {row_stride_, head_stride_, 1}};
}

View<float, 2> Outputs::lse() const {
  return {reinterpret_cast<float*>(lse_.data()), {num_rows_, dims_.num_heads}, {lse_stride_, 1}};
}

trace::Answers Outputs::answers() const {
  const Tensor<3> o = out();
  const View<float, 2> l = lse();
  return {.out = {o.data, o.dtype, o.shape, o.strides}, .lse = {l.data, l.shape, l.strides}};
}

bool Outputs::RowUntouched(int64_t row) const {
  const auto out_row = static_cast<size_t>(row_stride_) * DTypeBytes(dtype_);
  const auto lse_row = static_cast<size_t>(lse_stride_) * sizeof(float);
  return AllEqual(bytes().subspan(static_cast<size_t>(row) * out_row, out_row), kPoison) &&
         AllEqual(lse_bytes().subspan(static_cast<size_t>(row) * lse_row, lse_row), kPoison);
}

bool Outputs::UntouchedFrom(int64_t first_row) const {
  const auto element = static_cast<int64_t>(DTypeBytes(dtype_));
  bool intact = out_.GuardIntact() && lse_.GuardIntact();
  for (int64_t row = first_row; row < num_rows_; ++row) intact = intact && RowUntouched(row);
  for (int64_t row = 0; row < first_row; ++row) {
    const auto gap = [&](int64_t begin, int64_t end) {
      return AllEqual(bytes().subspan(static_cast<size_t>((row * row_stride_ + begin) * element),
                                      static_cast<size_t>((end - begin) * element)),
                      kPoison);
    };
    for (int64_t head = 0; head < dims_.num_heads; ++head) {
      intact = intact && gap(head * head_stride_ + dims_.kv_lora_rank, (head + 1) * head_stride_);
    }
    intact = intact && gap(dims_.num_heads * head_stride_, row_stride_);
    intact = intact &&
             AllEqual(lse_bytes().subspan(
                          static_cast<size_t>(row * lse_stride_ + dims_.num_heads) * sizeof(float),
                          static_cast<size_t>(lse_stride_ - dims_.num_heads) * sizeof(float)),
                      kPoison);
  }
  return intact;
}

bool SameBits(const Outputs& a, const Outputs& b) {
  return std::ranges::equal(a.bytes(), b.bytes()) &&
         std::ranges::equal(a.lse_bytes(), b.lse_bytes());
}

// ---- calls -------------------------------------------------------------------------------------

Problem ProblemOf(const AttentionSpec& spec) {
  return {.dims = spec.dims,
          .q_dtype = spec.q_dtype,
          .cache_format = spec.cache_format,
          .out_dtype = spec.out_dtype};
}

AttentionSpec ForFormat(AttentionSpec spec, CacheFormat format) {
  spec.cache_format = format;
  spec.q_dtype = ModelDType(format);
  spec.out_dtype = ModelDType(format);
  if (format == CacheFormat::kFp8DsMla) {
    spec.dims.kv_lora_rank = 512;
    spec.dims.qk_rope_head_dim = spec.dims.qk_rope_head_dim == 0 ? 0 : 64;
  }
  return spec;
}

void WriteCacheRow(CacheFormat format, const MlaDims& dims, float kv_scale, std::mt19937& random,
                   std::byte* row) {
  if (format == CacheFormat::kFp8DsMla) {
    // Tile scales that differ by powers of two, so that a wrong tile shows (A29); values within
    // e4m3's range beneath them.
    constexpr float kScales[] = {0x1p-6f, 1.0f, 0x1p-3f, 0x1p-8f};
    for (int64_t d = 0; d < 512; ++d) {
      const float value = Gaussian(random) / (d / 128 == 1 ? 4.0f : 1.0f) * 0.5f;
      StoreElement(DType::kFloat8E4M3, value / kScales[d / 128], row + d);
    }
    std::memcpy(row + 512, kScales, sizeof(kScales));
    for (int64_t d = 0; d < dims.qk_rope_head_dim; ++d) {
      StoreElement(DType::kBFloat16, Gaussian(random), row + 528 + 2 * d);
    }
    return;
  }
  const DType element = CacheElement(format);
  const auto bytes = static_cast<int64_t>(DTypeBytes(element));
  const float scale = IsPerTensorFp8(format) ? kv_scale : 1.0f;
  for (int64_t d = 0; d < dims.head_dim_qk(); ++d) {
    StoreElement(element, Gaussian(random) / scale, row + d * bytes);
  }
}

AttentionCase::AttentionCase(const AttentionSpec& wanted) : spec(wanted) {
  std::mt19937 random(spec.seed);
  softmax_scale = 1.5f / std::sqrt(static_cast<float>(spec.dims.head_dim_qk()));
  if (IsPerTensorFp8(spec.cache_format)) {
    q_scale = 0.0371f;
    kv_scale = 0.0213f;
  }
  FillCache(random);
  FillQuery(random);
  for (const int32_t length : spec.row_lengths) {
    std::vector<int32_t>& row = rows.emplace_back();
    for (int32_t k = 0; k < length; ++k) row.push_back(live_slots[random() % live_slots.size()]);
  }
  if (spec.sinks == SinkKind::kNone) return;
  for (int32_t h = 0; h < spec.dims.num_heads; ++h) {
    const float finite = -2.0f + 8.0f * static_cast<float>(h) / 64.0f;
    const bool infinite = spec.sinks == SinkKind::kMixed && h % 3 != 0;
    sinks.push_back(!infinite ? finite : h % 3 == 1 ? -INFINITY : INFINITY);
  }
}

void AttentionCase::FillCache(std::mt19937& random) {
  const int64_t row_bytes = CacheRowBytes(spec.cache_format, spec.dims);
  row_stride_bytes = spec.packed ? row_bytes : row_bytes + 16;
  cache.assign(static_cast<size_t>(spec.num_slots * row_stride_bytes), NanByte(spec.cache_format));
  std::vector<int32_t> slots(static_cast<size_t>(spec.num_slots));
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  std::shuffle(slots.begin(), slots.end(), random);
  slots.resize((slots.size() + 1) / 2);
  live_slots = slots;
  for (const int32_t slot : live_slots) {
    WriteCacheRow(spec.cache_format, spec.dims, kv_scale, random, Slot(slot));
  }
}

void AttentionCase::FillQuery(std::mt19937& random) {
  const int64_t num_rows = static_cast<int64_t>(spec.row_lengths.size()) + spec.padding_rows;
  const auto bytes = static_cast<int64_t>(DTypeBytes(spec.q_dtype));
  const bool is_code = bytes == 1;
  // The first heads attend sharply, the others softly.
  const auto fill = [&](std::vector<std::byte>& target, int64_t width) {
    const int64_t stride = width + QueryGap();
    target.assign(static_cast<size_t>(num_rows * spec.dims.num_heads * stride * bytes),
                  NanByte(spec.cache_format));
    for (int64_t head = 0; head < num_rows * spec.dims.num_heads; ++head) {
      const float sharpness = head % spec.dims.num_heads % 4 == 0 ? 2.0f : 0.7f;
      for (int64_t d = 0; d < width; ++d) {
        const float value = sharpness * Gaussian(random);
        StoreElement(spec.q_dtype, is_code ? value / q_scale : value,
                     target.data() + (head * stride + d) * bytes);
      }
    }
  };
  fill(query, spec.split_query ? spec.dims.kv_lora_rank : spec.dims.head_dim_qk());
  fill(query_rope, spec.split_query ? spec.dims.qk_rope_head_dim : 0);
}

int32_t AttentionCase::longest_row() const {
  size_t longest = 1;
  for (const auto& row : rows) longest = std::max(longest, row.size());
  return static_cast<int32_t>(longest);
}

std::vector<int32_t> AttentionCase::KvIndices() const {
  std::vector<int32_t> indices;
  for (const auto& row : rows) indices.insert(indices.end(), row.begin(), row.end());
  return indices;
}

Outputs AttentionCase::MakeOutputs() const {
  return Outputs(num_tokens() + spec.spare_rows, spec.dims, spec.out_dtype, spec.packed);
}

AttentionParams AttentionCase::Params(const Outputs& outputs) const {
  const auto tensor = [&](const std::vector<std::byte>& data, int64_t width) {
    const int64_t stride = width + QueryGap();
    return ConstTensor<3>{data.data(),
                          spec.q_dtype,
                          {num_tokens(), spec.dims.num_heads, width},
                          {spec.dims.num_heads * stride, stride, 1}};
  };
  kv_indices_ = KvIndices();
  AttentionParams params;
  if (spec.split_query) {
    params.query.ql_nope = tensor(query, spec.dims.kv_lora_rank);
    params.query.q_pe = tensor(query_rope, spec.dims.qk_rope_head_dim);
  } else {
    params.query.q = tensor(query, spec.dims.head_dim_qk());
  }
  params.kv_cache = {.data = cache.data(),
                     .format = spec.cache_format,
                     .num_slots = spec.num_slots,
                     .row_stride_bytes = spec.packed ? 0 : row_stride_bytes};
  params.kv_indices = kv_indices_;
  params.softmax_scale = softmax_scale;
  params.q_scale = q_scale;
  params.kv_scale = kv_scale;
  params.sinks = sinks;
  params.out = outputs.out();
  params.lse = outputs.lse();
  return params;
}

Result<Plan> MakePlan(const AttentionCase& attention, const RunOptions& options) {
  std::vector<int32_t> query_lens = attention.spec.query_lens;
  if (query_lens.empty()) query_lens.assign(attention.rows.size(), 1);
  auto plan = Plan::Create({.schedule = options.schedule,
                            .num_compute_units = options.num_compute_units,
                            .max_num_tokens = std::max(1, attention.num_tokens()),
                            .max_num_reqs = std::max(1, static_cast<int32_t>(query_lens.size())),
                            .topk_tokens = attention.longest_row(),
                            .dims = attention.spec.dims,
                            .max_splits = options.max_splits,
                            .force_splits = options.force_splits,
                            .batch_invariant = options.batch_invariant});
  if (!plan.ok()) return plan;
  std::vector<int32_t> query_start_loc(1, 0);
  std::vector<int32_t> seq_lens;
  for (const int32_t query_len : query_lens) {
    const auto& first_row = attention.rows[static_cast<size_t>(query_start_loc.back())];
    seq_lens.push_back(static_cast<int32_t>(first_row.size()) + query_len - 1);
    query_start_loc.push_back(query_start_loc.back() + query_len);
  }
  const auto built = plan->Build({.query_start_loc = query_start_loc,
                                  .seq_lens = seq_lens,
                                  .num_tokens = attention.num_tokens(),
                                  .dims = attention.spec.dims,
                                  .q_dtype = attention.spec.q_dtype,
                                  .cache_format = attention.spec.cache_format,
                                  .topk_tokens = attention.longest_row()});
  if (!built.ok()) return built.status();
  return plan;
}

Status RunAttention(const Backend& backend, const AttentionCase& attention,
                    const RunOptions& options, Outputs& outputs) {
  const auto made = MakePlan(attention, options);
  if (!made.ok()) return made.status();
  const Plan& plan = made.value();
  const GuardedBuffer scratch(backend.AttentionWorkspaceBytes(plan.capacity()), options.scratch);
  AttentionParams params = attention.Params(outputs);
  params.write_empty_rows = options.write_empty_rows;
  SPARSEMLA_RETURN_IF_ERROR(Attention(backend, params, plan, scratch.workspace()));
  SPARSEMLA_RETURN_IF_ERROR(Merge(backend, {.partials = PlanPartials(plan, scratch.workspace()),
                                            .sinks = params.sinks,
                                            .out = params.out,
                                            .lse = params.lse,
                                            .write_empty_rows = params.write_empty_rows}));
  SPARSEMLA_CHECK(scratch.GuardIntact(), StatusCode::kInternal, "written behind the workspace");
  SPARSEMLA_CHECK(outputs.UntouchedFrom(attention.num_tokens()), StatusCode::kInternal,
                  "written outside the rows of the outputs");
  return {};
}

Outputs Expected(const AttentionCase& attention) {
  const auto ref = CreateBackend("ref");
  Outputs outputs(attention.num_tokens(), attention.spec.dims, DType::kFloat32);
  const Status status = RunAttention(*ref.value(), attention, {.force_splits = 1}, outputs);
  EXPECT_TRUE(status.ok()) << "ref: " << status.message();
  return outputs;
}

std::string Mismatch(const Backend& backend, const AttentionCase& attention,
                     const RunOptions& options) {
  Outputs got = attention.MakeOutputs();
  const Status status = RunAttention(backend, attention, options, got);
  const std::string reason = backend.UnsupportedReason(ProblemOf(attention.spec));
  if (!reason.empty()) {
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_NE(status.message().find(reason), std::string::npos) << status.message();
    EXPECT_TRUE(got.UntouchedFrom(0));
    return "";
  }
  if (!status.ok()) return status.message();
  const Outputs want = Expected(attention);
  return trace::CompareAnswers(
             got.answers(), want.answers(), attention.num_tokens(),
             trace::ToleranceFor(attention.spec.cache_format, attention.spec.out_dtype))
      .first_mismatch;
}

}  // namespace sparsemla::test
