// What the conformance tests share: the list of kernels, a generator of attention calls with fixed
// seeds, outputs and scratch memory whose every byte is watched, and the one way to run a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "sparsemla/attention.h"
#include "sparsemla/backend.h"
#include "sparsemla/plan.h"
#include "trace/compare.h"

namespace sparsemla::test {

// ---- what is tested ----------------------------------------------------------------------------

// One attention kernel of one back end of this build.
struct KernelUnderTest {
  std::string backend;
  std::string kernel;
  std::string unavailable_reason;  // empty: this machine runs it

  std::string name() const { return backend + "_" + kernel; }
  friend void PrintTo(const KernelUnderTest& tested, std::ostream* stream) {
    *stream << tested.name();
  }
};
std::vector<KernelUnderTest> AllKernels();
std::unique_ptr<Backend> MakeBackend(const KernelUnderTest& kernel, int32_t num_threads = 2);

inline constexpr CacheFormat kAllCacheFormats[] = {
    CacheFormat::kFloat32, CacheFormat::kBFloat16,    CacheFormat::kFloat16,
    CacheFormat::kFp8E4M3, CacheFormat::kFp8E4M3Fnuz, CacheFormat::kFp8DsMla};
// The type that a model with this cache computes in.
DType ModelDType(CacheFormat format);

// ---- memory ------------------------------------------------------------------------------------

// No right answer has this byte pattern: an element that nobody writes shows.
inline constexpr std::byte kPoison{0xCD};

// Zero-filled or patterned memory at 64 bytes, followed by a guard that must stay as it is.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(size_t bytes, std::byte fill = kPoison);
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Workspace workspace() const { return {data_, bytes_}; }
  bool GuardIntact() const;

 private:
  std::vector<std::byte> storage_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// `out` and `lse` with room around every row, all poisoned.
class Outputs {
 public:
  Outputs(int64_t num_rows, const MlaDims& dims, DType dtype, bool packed = true);
  Tensor<3> out() const;
  View<float, 2> lse() const;
  trace::Answers answers() const;
  // Rows from `first_row` on, and everything between rows, still hold the poison.
  bool UntouchedFrom(int64_t first_row) const;
  bool RowUntouched(int64_t row) const;
  std::span<const std::byte> bytes() const { return {out_.data(), out_.bytes()}; }
  std::span<const std::byte> lse_bytes() const { return {lse_.data(), lse_.bytes()}; }
  friend bool SameBits(const Outputs& a, const Outputs& b);

 private:
  MlaDims dims_;
  DType dtype_;
  int64_t num_rows_;
  int64_t head_stride_;
  int64_t row_stride_;
  int64_t lse_stride_;
  GuardedBuffer out_;
  GuardedBuffer lse_;
};
bool SameBits(const Outputs& a, const Outputs& b);

// ---- calls -------------------------------------------------------------------------------------

enum class SinkKind { kNone, kFinite, kMixed };  // kMixed: finite, -inf and +inf by turns

struct AttentionSpec {
  MlaDims dims = {.num_heads = 4, .kv_lora_rank = 32, .qk_rope_head_dim = 8};
  CacheFormat cache_format = CacheFormat::kBFloat16;
  DType q_dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;
  std::vector<int32_t> row_lengths = {1, 0, 17, 64, 5};
  // Query tokens of each request; empty: one each. The rows of a request grow by one key each up to
  // the longest row of all.
  std::vector<int32_t> query_lens = {};
  int32_t padding_rows = 0;  // rows of the plan beyond row_lengths
  int32_t spare_rows = 2;    // rows of the arrays beyond the plan: never touched
  int32_t num_slots = 200;
  bool split_query = false;
  bool packed = true;  // false: strides with gaps in the query, the cache and the outputs
  SinkKind sinks = SinkKind::kNone;
  uint32_t seed = 1;
};

// Adapts types and sizes to a cache format (fp8_ds_mla has only 512 + 64 or 0 columns).
AttentionSpec ForFormat(AttentionSpec spec, CacheFormat format);
Problem ProblemOf(const AttentionSpec& spec);

// The memory of one call. Half of the cache's slots, chosen at random, hold rows; the others, and
// the gaps between strided rows, hold NaN. Rows select slots with repetition. The public members
// may be edited before a run.
class AttentionCase {
 public:
  explicit AttentionCase(const AttentionSpec& spec);

  AttentionParams Params(const Outputs& outputs) const;
  Outputs MakeOutputs() const;
  int32_t num_tokens() const { return static_cast<int32_t>(rows.size()) + spec.padding_rows; }
  int32_t longest_row() const;
  // Slots of all rows, in order: what ConvertIndices would have written.
  std::vector<int32_t> KvIndices() const;
  // The first byte of a slot.
  std::byte* Slot(int32_t slot) { return cache.data() + slot * row_stride_bytes; }

  AttentionSpec spec;
  std::vector<std::vector<int32_t>> rows;  // slots of each query token
  std::vector<int32_t> live_slots;         // that hold no NaN
  std::vector<std::byte> query;            // whole, or latent part; strided
  std::vector<std::byte> query_rope;
  std::vector<std::byte> cache;
  int64_t row_stride_bytes = 0;
  std::vector<float> sinks;
  float softmax_scale = 0.0f;
  float q_scale = 1.0f;
  float kv_scale = 1.0f;

 private:
  void FillQuery(std::mt19937& random);
  void FillCache(std::mt19937& random);
  int64_t QueryGap() const { return spec.packed ? 0 : 3; }  // elements behind every head

  mutable std::vector<int32_t> kv_indices_;
};

// Writes one cache row of random, realistic values.
void WriteCacheRow(CacheFormat format, const MlaDims& dims, float kv_scale, std::mt19937& random,
                   std::byte* row);

struct RunOptions {
  ScheduleKind schedule = ScheduleKind::kBalanced;
  int32_t num_compute_units = 32;
  int32_t max_splits = 0;
  int32_t force_splits = 0;
  bool batch_invariant = false;
  bool write_empty_rows = true;
  std::byte scratch{0xFF};  // what the workspace holds before
};

// The plan of a case.
Result<Plan> MakePlan(const AttentionCase& attention, const RunOptions& options);

// Attention and Merge into `outputs`; scratch memory has exactly the size asked for, and nothing
// outside it and the outputs is written.
Status RunAttention(const Backend& backend, const AttentionCase& attention,
                    const RunOptions& options, Outputs& outputs);

// The answer of `ref`, unsplit, in float32.
Outputs Expected(const AttentionCase& attention);

// Runs and compares with `Expected`; "" if all is well. A forced kernel that says it does not take
// the problem must refuse the call with that reason.
std::string Mismatch(const Backend& backend, const AttentionCase& attention,
                     const RunOptions& options = {});

}  // namespace sparsemla::test
