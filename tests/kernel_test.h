// Fixtures of the conformance suite: every kernel of every back end, alone or with every cache
// format. A kernel that this machine cannot run is skipped with its reason.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>

#include "tests/testing.h"

namespace sparsemla::test {

class KernelTest : public testing::TestWithParam<KernelUnderTest> {
 protected:
  void SetUp() override {
    if (!GetParam().unavailable_reason.empty()) GTEST_SKIP() << GetParam().unavailable_reason;
    backend_ = MakeBackend(GetParam());
    ASSERT_NE(backend_, nullptr);
  }
  const Backend& backend() const { return *backend_; }

 private:
  std::unique_ptr<Backend> backend_;
};

class KernelFormatTest : public testing::TestWithParam<std::tuple<KernelUnderTest, CacheFormat>> {
 protected:
  void SetUp() override {
    const std::string& reason = std::get<0>(GetParam()).unavailable_reason;
    if (!reason.empty()) GTEST_SKIP() << reason;
    backend_ = MakeBackend(std::get<0>(GetParam()));
    ASSERT_NE(backend_, nullptr);
    const std::string refusal = backend_->UnsupportedReason(ProblemOf(ForFormat({}, format())));
    if (!refusal.empty()) GTEST_SKIP() << refusal;
  }
  const Backend& backend() const { return *backend_; }
  const KernelUnderTest& kernel() const { return std::get<0>(GetParam()); }
  CacheFormat format() const { return std::get<1>(GetParam()); }

 private:
  std::unique_ptr<Backend> backend_;
};

inline auto EveryKernel() {
  return testing::ValuesIn(AllKernels());
}
inline auto EveryKernelAndFormat() {
  return testing::Combine(EveryKernel(), testing::ValuesIn(kAllCacheFormats));
}
inline std::string KernelName(const testing::TestParamInfo<KernelUnderTest>& info) {
  return info.param.name();
}
inline std::string KernelFormatName(
    const testing::TestParamInfo<std::tuple<KernelUnderTest, CacheFormat>>& info) {
  return std::get<0>(info.param).name() + "_" +
         std::string(CacheFormatName(std::get<1>(info.param)));
}

}  // namespace sparsemla::test
