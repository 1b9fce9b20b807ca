// What a back end can solve is known beforehand, with a reason, and a plan is only used for what it
// was made for.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "core/require.h"
#include "tests/kernel_test.h"

namespace sparsemla::test {
namespace {

constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                DType::kFloat8E4M3, DType::kFloat8E4M3Fnuz};

using CapabilityTest = KernelTest;
INSTANTIATE_TEST_SUITE_P(All, CapabilityTest, EveryKernel(), KernelName);

// A63, A17, lesson 4: every combination gives an answer; where the answer is yes the call works,
// where it is no the call's error has the same words.
TEST_P(CapabilityTest, EveryCombinationOfTypesIsSolvedOrRefusedWithItsReason) {
  for (const CacheFormat format : kAllCacheFormats) {
    for (const DType q_dtype : kAllDTypes) {
      for (const DType out_dtype : kAllDTypes) {
        for (const MlaDims dims :
             {MlaDims{3, 512, 64}, MlaDims{3, 512, 0}, MlaDims{3, 32, 8}, MlaDims{3, 512, 32}}) {
          const std::string what =
              StrCat(CacheFormatName(format), ", q ", DTypeName(q_dtype), ", out ",
                     DTypeName(out_dtype), ", ", dims.kv_lora_rank, " + ", dims.qk_rope_head_dim);
          const std::string reason = backend().UnsupportedReason(
              {.dims = dims, .q_dtype = q_dtype, .cache_format = format, .out_dtype = out_dtype});
          AttentionSpec spec = {.dims = dims, .row_lengths = {3, 20}, .num_slots = 32};
          spec.cache_format = format;
          spec.q_dtype = q_dtype;
          spec.out_dtype = out_dtype;
          if (format == CacheFormat::kFp8DsMla && dims.kv_lora_rank != 512) {
            EXPECT_NE(reason, "") << what;
            continue;  // such rows cannot be made
          }
          const AttentionCase attention(spec);
          Outputs got = attention.MakeOutputs();
          const Status status = RunAttention(backend(), attention, {}, got);
          if (reason.empty()) {
            EXPECT_TRUE(status.ok()) << what << ": " << status.message();
            continue;
          }
          EXPECT_FALSE(status.ok()) << what << ": " << reason;
          EXPECT_TRUE(got.UntouchedFrom(0)) << what;
          if (status.code() != StatusCode::kUnsupported) continue;  // an error of its own
          EXPECT_NE(status.message().find(reason), std::string::npos)
              << what << ": " << status.message() << " / " << reason;
        }
      }
    }
  }
}

TEST_P(CapabilityTest, EveryHeadCountIsAnsweredAndSolved) {  // A63, lesson 9
  for (int32_t heads = -1; heads <= 130; ++heads) {
    for (const CacheFormat format : kAllCacheFormats) {
      AttentionSpec spec =
          ForFormat({.dims = {.num_heads = heads, .kv_lora_rank = 16, .qk_rope_head_dim = 4},
                     .row_lengths = {2},
                     .num_slots = 8},
                    format);
      const std::string reason = backend().UnsupportedReason(
          {.dims = spec.dims, .q_dtype = spec.q_dtype, .cache_format = format});
      if (heads < 1 || heads > kMaxNumHeads) {
        EXPECT_NE(reason.find(StrCat("num_heads is ", heads)), std::string::npos) << reason;
        continue;
      }
      const AttentionCase attention(spec);
      if (reason.starts_with(GetParam().kernel)) {  // it says that this is not for it, and refuses
        EXPECT_EQ(Mismatch(backend(), attention), "");
        continue;
      }
      ASSERT_EQ(reason, "");
      Outputs got = attention.MakeOutputs();
      ASSERT_TRUE(RunAttention(backend(), attention, {}, got).ok()) << heads << " heads";
    }
  }
}

TEST_P(CapabilityTest, ReasonsNameTheValueAndItsBound) {
  const auto reason = [&](const Problem& problem) { return backend().UnsupportedReason(problem); };
  EXPECT_NE(reason({.dims = {.num_heads = 129}}).find("129"), std::string::npos);
  EXPECT_NE(reason({.dims = {.num_heads = 129}}).find("128"), std::string::npos);
  EXPECT_NE(reason({.dims = {16, 0, 64}}).find("kv_lora_rank is 0"), std::string::npos);
  EXPECT_NE(reason({.dims = {16, 512, -1}}).find("qk_rope_head_dim is -1"), std::string::npos);
  EXPECT_NE(reason({.dims = {16, 256, 64}, .cache_format = CacheFormat::kFp8DsMla}).find("256"),
            std::string::npos);
  EXPECT_NE(reason({.dims = {16, 512, 64},
                    .q_dtype = DType::kFloat8E4M3,
                    .cache_format = CacheFormat::kFp8E4M3Fnuz}),  // A26
            "");
}

// ---- plans -------------------------------------------------------------------------------------

// A39, A66, lesson 5: a plan carries what it was made for.
TEST_P(CapabilityTest, APlanMadeForOtherSizesOrTypesIsRefused) {
  const AttentionSpec planned = {.row_lengths = {5, 9}};
  const AttentionCase original(planned);
  const auto plan = MakePlan(original, {});
  ASSERT_TRUE(plan.ok());
  const GuardedBuffer scratch(backend().AttentionWorkspaceBytes(plan.value().capacity()));
  const std::vector<std::pair<std::string, std::function<void(AttentionSpec&)>>> changes = {
      {"heads", [](AttentionSpec& spec) { spec.dims.num_heads = 5; }},
      {"latent width", [](AttentionSpec& spec) { spec.dims.kv_lora_rank = 16; }},
      {"rope width", [](AttentionSpec& spec) { spec.dims.qk_rope_head_dim = 0; }},
      {"query type", [](AttentionSpec& spec) { spec.q_dtype = DType::kFloat16; }},
      {"cache format", [](AttentionSpec& spec) { spec.cache_format = CacheFormat::kFloat16; }},
      {"rows", [](AttentionSpec& spec) { spec.row_lengths = {5}; }},
  };
  for (const bool split : {false, true}) {
    for (const auto& [what, change] : changes) {
      AttentionSpec spec = planned;
      spec.split_query = split;
      change(spec);
      const AttentionCase other(spec);
      const Outputs got = other.MakeOutputs();
      AttentionParams params = other.Params(got);
      const std::vector<int32_t> indices = original.KvIndices();
      params.kv_indices = indices;
      const Status status = Attention(backend(), params, plan.value(), scratch.workspace());
      EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << what << ": " << status.message();
      EXPECT_TRUE(got.UntouchedFrom(0)) << what;
    }
  }
}

TEST_P(CapabilityTest, APlanThatWasNeverBuiltIsRefused) {
  const AttentionCase attention({.row_lengths = {5}});
  const auto plan = Plan::Create({.num_compute_units = 4,
                                  .max_num_tokens = 4,
                                  .max_num_reqs = 4,
                                  .topk_tokens = 16,
                                  .dims = attention.spec.dims});
  ASSERT_TRUE(plan.ok());
  const GuardedBuffer scratch(backend().AttentionWorkspaceBytes(plan.value().capacity()));
  const Outputs got = attention.MakeOutputs();
  const AttentionParams params = attention.Params(got);
  EXPECT_EQ(Attention(backend(), params, plan.value(), scratch.workspace()).code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(SparseMla(backend(), {.attention = params}, plan.value(), scratch.workspace()).code(),
            StatusCode::kFailedPrecondition);
}

// A39, lesson 4: also the indices of a step with fewer keys than the plan's.
TEST_P(CapabilityTest, ArgumentsOutOfBoundsAreNamedAndNothingIsWritten) {
  AttentionCase attention({.row_lengths = {5, 9}, .sinks = SinkKind::kFinite});
  const auto plan = MakePlan(attention, {});
  ASSERT_TRUE(plan.ok());
  const GuardedBuffer scratch(backend().AttentionWorkspaceBytes(plan.value().capacity()));
  const Outputs got = attention.MakeOutputs();
  const std::vector<std::pair<std::string, std::function<void(AttentionParams&)>>> mistakes = {
      {"kv_indices has 13", [](AttentionParams& p) { p.kv_indices = p.kv_indices.first(13); }},
      {"sinks has 3", [](AttentionParams& p) { p.sinks = p.sinks.first(3); }},
      {"softmax_scale is nan", [](AttentionParams& p) { p.softmax_scale = NAN; }},
      {"kv_scale is 2", [](AttentionParams& p) { p.kv_scale = 2.0f; }},
      {"q_scale is 0", [](AttentionParams& p) { p.q_scale = 0.0f; }},
      {"num_slots is -1", [](AttentionParams& p) { p.kv_cache.num_slots = -1; }},
      {"row_stride_bytes is 79", [](AttentionParams& p) { p.kv_cache.row_stride_bytes = 79; }},
      {"kv_cache is null", [](AttentionParams& p) { p.kv_cache.data = nullptr; }},
      {"q has innermost stride 2", [](AttentionParams& p) { p.query.q.strides[2] = 2; }},
      {"out has shape", [](AttentionParams& p) { p.out.shape[0] = 1; }},
      {"out has stride 3", [](AttentionParams& p) { p.out.strides[1] = 3; }},
      {"out is fp8_e4m3", [](AttentionParams& p) { p.out.dtype = DType::kFloat8E4M3; }},
      {"lse has shape", [](AttentionParams& p) { p.lse.shape[1] = 2; }},
      {"both q and ql_nope", [](AttentionParams& p) { p.query.ql_nope = p.query.q; }},
  };
  for (const auto& [message, make] : mistakes) {
    AttentionParams params = attention.Params(got);
    make(params);
    const Status status = Attention(backend(), params, plan.value(), scratch.workspace());
    EXPECT_FALSE(status.ok()) << message;
    EXPECT_NE(status.message().find(message), std::string::npos)
        << "'" << status.message() << "' should say '" << message << "'";
    EXPECT_TRUE(got.UntouchedFrom(0)) << message;
  }
}

// A08: rows of the three row counts that an engine hands over.
TEST_P(CapabilityTest, RowCountsThatDisagreeAreNamed) {
  const std::vector<int32_t> topk(5 * 4, 0);
  const std::vector<int32_t> req_ids(5, 0);
  const std::vector<int32_t> kv_indptr = {0, 1, 2, 3, 4, 5};
  const int32_t block = 1;
  std::vector<int32_t> slots(5, 99);
  const auto convert = [&](int64_t topk_rows, size_t tokens, size_t indptr_size) {
    return ConvertIndices(
        backend(),
        {.topk_indices = View<const int32_t, 2>::Contiguous(topk.data(), {topk_rows, 4}),
         .block_table = {.blocks = {&block, {1, 1}, {1, 1}}, .block_size = 16, .num_blocks = 2},
         .req_id_per_token = std::span(req_ids).first(tokens),
         .kv_indptr = std::span(kv_indptr).first(indptr_size),
         .kv_indices = slots});
  };
  EXPECT_TRUE(convert(5, 5, 6).ok());
  slots.assign(5, 99);
  EXPECT_EQ(convert(4, 5, 6).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(convert(5, 5, 5).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(convert(5, 4, 6).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(slots, std::vector<int32_t>(5, 99));
}

// ---- back ends ---------------------------------------------------------------------------------

TEST(CreateBackend, NamesWhatThereIsWhenAskedForWhatThereIsNot) {
  const auto backend = CreateBackend("abacus");
  EXPECT_EQ(backend.status().code(), StatusCode::kInvalidArgument);
  for (const std::string_view name : BackendNames()) {
    EXPECT_NE(backend.status().message().find(name), std::string::npos);
    const auto kernel = CreateBackend(name, {.kernel = "attention_abacus"});
    EXPECT_EQ(kernel.status().code(), StatusCode::kInvalidArgument) << name;
    EXPECT_NE(kernel.status().message().find("attention_abacus"), std::string::npos);
  }
}

TEST(CreateBackend, AForcedKernelIsTheSelectedOne) {
  for (const KernelUnderTest& wanted : AllKernels()) {
    const auto backend = CreateBackend(wanted.backend, {.kernel = wanted.kernel});
    EXPECT_EQ(backend.ok(), wanted.unavailable_reason.empty()) << wanted.name();
    if (!backend.ok()) {
      EXPECT_EQ(backend.status().code(), StatusCode::kUnsupported);
      continue;
    }
    for (const KernelInfo& kernel : backend.value()->kernels()) {
      EXPECT_EQ(kernel.selected, kernel.name == wanted.kernel) << kernel.name;
    }
  }
}

}  // namespace
}  // namespace sparsemla::test
