// Choosing a back end, its kernel and its threads: options, environment variables, and what cannot
// be had.
#include "sparsemla/backend.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "sparsemla/attention.h"

namespace sparsemla {
namespace {

// Sets a variable of the environment, or clears it, for the life of the object.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const before = std::getenv(name)) before_ = before;
    Set(value);
  }
  ~Variable() { Set(before_ ? before_->c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void Set(const char* value) const {
    if (value == nullptr) {
      unsetenv(name_);
    } else {
      setenv(name_, value, 1);
    }
  }
  const char* name_;
  std::optional<std::string> before_;
};

// Every test starts without the variables.
class BackendTest : public testing::Test {
 private:
  Variable backend_{"SPARSEMLA_BACKEND", nullptr};
  Variable kernel_{"SPARSEMLA_CPU_KERNEL", nullptr};
  Variable threads_{"SPARSEMLA_NUM_THREADS", nullptr};
};

void ExpectError(std::string_view name, const BackendOptions& options, StatusCode code,
                 const std::string& message) {
  const auto backend = CreateBackend(name, options);
  EXPECT_EQ(backend.status().code(), code);
  EXPECT_EQ(backend.status().message(), message);
}

// The names of the kernels marked as selected.
std::vector<std::string> SelectedKernels(const Backend& backend) {
  std::vector<std::string> names;
  for (const KernelInfo& kernel : backend.kernels()) {
    if (kernel.selected) names.push_back(kernel.name);
  }
  return names;
}

std::string CreatedName(std::string_view name) {
  const auto backend = CreateBackend(name);
  return backend.ok() ? std::string(backend.value()->name()) : backend.status().message();
}

TEST_F(BackendTest, EveryNameCreatesTheBackEndOfThatName) {
  EXPECT_EQ(BackendNames(), (std::vector<std::string_view>{"cpu", "ref"}));
  for (const std::string_view name : BackendNames()) EXPECT_EQ(CreatedName(name), name);
}

TEST_F(BackendTest, TheEnvironmentNamesTheBackEndWhereTheCallerDoesNot) {
  EXPECT_EQ(CreatedName(""), "cpu");
  const Variable variable("SPARSEMLA_BACKEND", "ref");
  EXPECT_EQ(CreatedName(""), "ref");
  EXPECT_EQ(CreatedName("cpu"), "cpu");
  const Variable empty("SPARSEMLA_BACKEND", "");
  EXPECT_EQ(CreatedName(""), "cpu");
}

// A52: the report says which source the value came from.
TEST_F(BackendTest, AnUnknownBackEndIsNamedWithItsSource) {
  ExpectError("gpu", {}, StatusCode::kInvalidArgument,
              "there is no back end 'gpu' (from the argument); there are cpu, ref");
  const Variable variable("SPARSEMLA_BACKEND", "CPU");
  ExpectError("", {}, StatusCode::kInvalidArgument,
              "there is no back end 'CPU' (from SPARSEMLA_BACKEND); there are cpu, ref");
}

// The one test whose only job is to prove that the forced kernel is the one that runs.
TEST_F(BackendTest, AForcedKernelIsTheSelectedOneAndNoOther) {
  for (const cpu::AttentionKernel& kernel : cpu::AttentionKernels()) {
    const std::string name(kernel.name);
    const std::string reason = cpu::UnavailableReason(kernel, cpu::DetectArch());
    if (!reason.empty()) {
      ExpectError("cpu", {.kernel = name}, StatusCode::kUnsupported, name + " " + reason);
      continue;
    }
    const auto by_option = CreateBackend("cpu", {.kernel = name});
    ASSERT_TRUE(by_option.ok()) << by_option.status().message();
    EXPECT_EQ(SelectedKernels(*by_option.value()), std::vector<std::string>{name});
    const Variable variable("SPARSEMLA_CPU_KERNEL", name.c_str());
    const auto by_environment = CreateBackend("cpu");
    ASSERT_TRUE(by_environment.ok()) << by_environment.status().message();
    EXPECT_EQ(SelectedKernels(*by_environment.value()), std::vector<std::string>{name});
  }
}

TEST_F(BackendTest, TheBestAvailableKernelRunsIfNoneIsForced) {
  const auto backend = CreateBackend("cpu");
  ASSERT_TRUE(backend.ok()) << backend.status().message();
  for (const KernelInfo& kernel : backend.value()->kernels()) {
    if (!kernel.unavailable_reason.empty()) continue;
    EXPECT_EQ(SelectedKernels(*backend.value()), std::vector<std::string>{kernel.name});
    break;
  }
}

TEST_F(BackendTest, TheKernelOfTheOptionsWinsOverTheEnvironment) {
  const Variable variable("SPARSEMLA_CPU_KERNEL", "no_such_kernel");
  const auto backend = CreateBackend("cpu", {.kernel = "attention_portable"});
  ASSERT_TRUE(backend.ok()) << backend.status().message();
  EXPECT_EQ(SelectedKernels(*backend.value()), std::vector<std::string>{"attention_portable"});
}

TEST_F(BackendTest, AnUnknownKernelIsNamedWithThoseThatExist) {
  std::string names;
  for (const cpu::AttentionKernel& kernel : cpu::AttentionKernels()) {
    names += (names.empty() ? "" : ", ") + std::string(kernel.name);
  }
  ExpectError("cpu", {.kernel = "attention_abacus"}, StatusCode::kInvalidArgument,
              "no attention kernel is called 'attention_abacus'; there are " + names);
  ExpectError("ref", {.kernel = "attention_portable"}, StatusCode::kInvalidArgument,
              "ref has no kernel 'attention_portable'; it has attention_ref");
  const Variable variable("SPARSEMLA_CPU_KERNEL", "attention_abacus");
  ExpectError("", {}, StatusCode::kInvalidArgument,
              "no attention kernel is called 'attention_abacus'; there are " + names);
  EXPECT_EQ(CreatedName("ref"), "ref") << "the variable is for the CPU back end only";
}

#if defined(__x86_64__)
TEST_F(BackendTest, AKernelThatTheCpuCannotRunSaysWhatIsMissing) {
  const auto forced = cpu::FindKernel("attention_avx512", cpu::kAnyCpu);
  EXPECT_EQ(forced.status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(forced.status().message(), "attention_avx512 needs avx512f; this CPU has baseline");
  const auto best = [](cpu::ArchFlags arch) { return cpu::BestKernel({}, arch).name; };
  EXPECT_EQ(best(cpu::kAnyCpu), "attention_portable");
  EXPECT_EQ(best(cpu::kAvx2), "attention_avx2");
  EXPECT_EQ(best(cpu::kAvx2 | cpu::kAvx512), "attention_avx512");
  EXPECT_EQ(best(cpu::kAvx2 | cpu::kAvx512 | cpu::kAmxBf16), "attention_amx_bf16");
}
#endif

int32_t NumThreads(const BackendOptions& options) {
  const auto backend = CreateBackend("cpu", options);
  EXPECT_TRUE(backend.ok()) << backend.status().message();
  return backend.ok() ? backend.value()->device().num_threads : 0;
}

TEST_F(BackendTest, ThreadsComeFromTheOptionsThenTheEnvironmentThenTheMachine) {
  EXPECT_GE(NumThreads({}), 1);
  EXPECT_EQ(NumThreads({.num_threads = 2}), 2);
  const Variable variable("SPARSEMLA_NUM_THREADS", "5");
  EXPECT_EQ(NumThreads({}), 5);
  EXPECT_EQ(NumThreads({.num_threads = 2}), 2);
  const Variable bad("SPARSEMLA_NUM_THREADS", "many");
  EXPECT_EQ(NumThreads({.num_threads = 2}), 2) << "not read where the option is given";
}

TEST_F(BackendTest, AThreadCountThatIsNoPositiveNumberIsAnError) {
  for (const char* const text : {"0", "-1", "many", "3x", " 3", "1.5", "99999999999"}) {
    const Variable variable("SPARSEMLA_NUM_THREADS", text);
    ExpectError(
        "cpu", {}, StatusCode::kInvalidArgument,
        "SPARSEMLA_NUM_THREADS is '" + std::string(text) + "'; it must be a positive whole number");
  }
  ExpectError("cpu", {.num_threads = -1}, StatusCode::kInvalidArgument,
              "num_threads is -1; it must be in [0, 4096]");
}

TEST_F(BackendTest, AnExecutorOfTheCallerRunsTheWorkAndReplacesThePool) {
  const Variable variable("SPARSEMLA_NUM_THREADS", "many");  // not read
  int32_t num_tasks = 0;
  Executor executor = {.context = &num_tasks,
                       .num_threads = 7,
                       .parallel_for = [](void* context, int32_t count,
                                          void (*task)(void*, int32_t), void* argument) {
                         *static_cast<int32_t*>(context) += count;
                         for (int32_t i = count; i-- > 0;) task(argument, i);
                       }};
  const auto backend = CreateBackend("cpu", {.executor = executor});
  ASSERT_TRUE(backend.ok()) << backend.status().message();
  EXPECT_EQ(backend.value()->device().num_threads, 7);

  const std::vector<int32_t> topk(1 << 17, 1);
  std::vector<int32_t> fitted(1 << 16, 0);
  const auto result = FitKpoolIndices(
      *backend.value(),
      {.topk_indices = View<const int32_t, 2>::Contiguous(topk.data(), {1 << 16, 2}),
       .topk_tokens = 1,
       .fitted = View<int32_t, 2>::Contiguous(fitted.data(), {1 << 16, 1})});
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_GE(num_tasks, 2);
  EXPECT_EQ(fitted, std::vector<int32_t>(1 << 16, 1));

  executor.num_threads = 0;
  ExpectError("cpu", {.executor = executor}, StatusCode::kInvalidArgument,
              "executor.num_threads is 0; it must be at least 1");
}

// A17, A63: a shape that cannot be solved has a reason, before anything runs.
TEST_F(BackendTest, ProblemsThatCannotBeSolvedHaveAReason) {
  const Problem valid = {.dims = {.num_heads = 128}};
  struct Unsolvable {
    Problem problem;
    std::string reason;
  };
  const auto with_dims = [&](MlaDims dims, CacheFormat format = CacheFormat::kBFloat16) {
    Problem problem = valid;
    problem.dims = dims;
    problem.cache_format = format;
    return problem;
  };
  const auto with_types = [&](DType q, CacheFormat format, DType out) {
    return Problem{valid.dims, q, format, out};
  };
  const std::string ds_rule =
      "fp8_ds_mla rows hold 512 latent and 64 rope columns; kv_lora_rank is ";
  const std::vector<Unsolvable> cases = {
      {with_dims({.num_heads = 0}), "num_heads is 0; it must be in [1, 128]"},
      {with_dims({.num_heads = 129}), "num_heads is 129; it must be in [1, 128]"},
      {with_dims({.num_heads = 1, .kv_lora_rank = 0}),
       "kv_lora_rank is 0; it must be in [1, 65536]"},
      {with_dims({.num_heads = 1, .kv_lora_rank = 65537}),
       "kv_lora_rank is 65537; it must be in [1, 65536]"},
      {with_dims({.num_heads = 1, .qk_rope_head_dim = -1}),
       "qk_rope_head_dim is -1; it must be in [0, 65536]"},
      {with_dims({.num_heads = 1, .qk_rope_head_dim = 65537}),
       "qk_rope_head_dim is 65537; it must be in [0, 65536]"},
      {with_dims({.num_heads = 1, .kv_lora_rank = 256}, CacheFormat::kFp8DsMla),
       ds_rule + "256 and qk_rope_head_dim 64 (it may be 64 or 0)"},
      {with_dims({.num_heads = 1, .qk_rope_head_dim = 32}, CacheFormat::kFp8DsMla),
       ds_rule + "512 and qk_rope_head_dim 32 (it may be 64 or 0)"},
      {with_types(DType::kFloat8E4M3, CacheFormat::kFp8E4M3Fnuz, DType::kBFloat16),
       "a fp8_e4m3 query needs a cache of the same type; it is fp8_e4m3fnuz"},
      {with_types(DType::kFloat8E4M3Fnuz, CacheFormat::kBFloat16, DType::kBFloat16),
       "a fp8_e4m3fnuz query needs a cache of the same type; it is bf16"},
      {with_types(DType::kFloat8E4M3, CacheFormat::kFp8DsMla, DType::kBFloat16),
       "a fp8_e4m3 query needs a cache of the same type; it is fp8_ds_mla"},
      {with_types(DType::kBFloat16, CacheFormat::kBFloat16, DType::kFloat8E4M3),
       "the output type is fp8_e4m3; it must be bf16, fp16 or fp32"},
  };
  for (const std::string_view name : BackendNames()) {
    const auto backend = CreateBackend(name);
    ASSERT_TRUE(backend.ok()) << backend.status().message();
    EXPECT_EQ(backend.value()->UnsupportedReason(valid), "");
    for (const auto& [problem, reason] : cases) {
      EXPECT_EQ(backend.value()->UnsupportedReason(problem), reason);
    }
  }
}

TEST_F(BackendTest, EveryStatusCodeHasItsName) {
  EXPECT_EQ(StatusCodeName(StatusCode::kOk), "ok");
  EXPECT_EQ(StatusCodeName(StatusCode::kInvalidArgument), "invalid argument");
  EXPECT_EQ(StatusCodeName(StatusCode::kUnsupported), "unsupported");
  EXPECT_EQ(StatusCodeName(StatusCode::kFailedPrecondition), "failed precondition");
  EXPECT_EQ(StatusCodeName(StatusCode::kResourceExhausted), "resource exhausted");
  EXPECT_EQ(StatusCodeName(StatusCode::kDeviceError), "device error");
  EXPECT_EQ(StatusCodeName(StatusCode::kInternal), "internal error");
}

}  // namespace
}  // namespace sparsemla
