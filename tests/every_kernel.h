// The parameters of tests that hold for every kernel of every back end of this build.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "sparsemla/backend.h"

namespace sparsemla {

struct KernelParam {
  std::string backend;
  std::string kernel;
  std::string unavailable_reason;  // empty: this machine can run it

  friend void PrintTo(const KernelParam& param, std::ostream* stream) { *stream << param.kernel; }
};

inline std::vector<KernelParam> AllKernelParams() {
  std::vector<KernelParam> params;
  for (const std::string_view name : BackendNames()) {
    const auto backend = CreateBackend(name);
    if (!backend.ok()) continue;
    for (const KernelInfo& kernel : backend.value()->kernels()) {
      params.push_back({std::string(name), kernel.name, kernel.unavailable_reason});
    }
  }
  return params;
}

// A test of one kernel; skips, with the reason, where the machine cannot run it.
class EveryKernelTest : public testing::TestWithParam<KernelParam> {
 protected:
  void SetUp() override {
    const KernelParam& param = GetParam();
    if (!param.unavailable_reason.empty()) GTEST_SKIP() << param.unavailable_reason;
    BackendOptions options;
    options.kernel = param.kernel;
    options.num_threads = 3;
    auto backend = CreateBackend(param.backend, options);
    ASSERT_TRUE(backend.ok()) << backend.status().message();
    backend_ = std::move(backend).value();
  }
  const Backend& backend() const { return *backend_; }

 private:
  std::unique_ptr<Backend> backend_;
};

#define SPARSEMLA_INSTANTIATE_EVERY_KERNEL(suite)                            \
  INSTANTIATE_TEST_SUITE_P(                                                  \
      EveryKernel, suite, testing::ValuesIn(::sparsemla::AllKernelParams()), \
      [](const auto& test) { return test.param.backend + "_" + test.param.kernel; })

}  // namespace sparsemla
