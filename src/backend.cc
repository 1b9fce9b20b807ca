// The one file that names every back end: their order, their names, and the environment variables
// that stand in for options not given.
#include "sparsemla/backend.h"

#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/require.h"
#include "cpu/cpu_backend.h"
#include "ref/ref_backend.h"

namespace sparsemla {
namespace {

constexpr int32_t kMaxThreads = 4096;

std::string_view Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

Result<int32_t> ThreadsFromEnvironment() {
  const std::string_view text = Environment("SPARSEMLA_NUM_THREADS");
  int32_t threads = 0;
  if (text.empty()) return threads;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
  SPARSEMLA_REQUIRE(error == std::errc() && end == text.data() + text.size() && threads >= 1,
                    "SPARSEMLA_NUM_THREADS is '", text, "'; it must be a positive whole number");
  return threads;
}

Result<std::unique_ptr<Backend>> CreateCpu(BackendOptions options) {
  if (options.kernel.empty()) options.kernel = Environment("SPARSEMLA_CPU_KERNEL");
  if (options.num_threads == 0 && options.executor.parallel_for == nullptr) {
    Result<int32_t> threads = ThreadsFromEnvironment();
    if (!threads.ok()) return threads.status();
    options.num_threads = threads.value();
  }
  SPARSEMLA_REQUIRE(options.num_threads >= 0 && options.num_threads <= kMaxThreads,
                    "num_threads is ", options.num_threads, "; it must be in [0, ", kMaxThreads,
                    "]");
  return MakeCpuBackend(options);
}

Result<std::unique_ptr<Backend>> CreateRef(const BackendOptions& options) {
  auto backend = MakeRefBackend();
  const std::string only_kernel = backend->kernels().front().name;
  SPARSEMLA_REQUIRE(options.kernel.empty() || options.kernel == only_kernel, "ref has no kernel '",
                    options.kernel, "'; it has ", only_kernel);
  return Result<std::unique_ptr<Backend>>(std::move(backend));
}

}  // namespace

std::vector<std::string_view> BackendNames() {
  return {"cpu", "ref"};
}

Result<std::unique_ptr<Backend>> CreateBackend(std::string_view name,
                                               const BackendOptions& options) {
  const std::string_view origin = name.empty() ? "SPARSEMLA_BACKEND" : "the argument";
  if (name.empty()) name = Environment("SPARSEMLA_BACKEND");
  if (name.empty() || name == "cpu") return CreateCpu(options);
  if (name == "ref") return CreateRef(options);
  return Status(StatusCode::kInvalidArgument, StrCat("there is no back end '", name, "' (from ",
                                                     origin, "); there are cpu, ref"));
}

std::string_view Version() {
  return SPARSEMLA_VERSION;
}

}  // namespace sparsemla
