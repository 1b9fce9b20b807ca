// The aiter schedule against recorded outputs of AITER's own planner.
#include "trace/golden.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace sparsemla {
namespace {

std::string GoldenPath(const std::string& name) {
  return std::string(SPARSEMLA_TEST_DATA) + "/golden/mla_metadata_" + name + ".json";
}

class PlannerGolden : public testing::TestWithParam<std::pair<const char*, int32_t>> {};

// A57: the recorded cases come from AITER's parallel and serial planners.
TEST_P(PlannerGolden, IsReproducedBitForBit) {
  const auto [name, num_cases] = GetParam();
  const Result<trace::GoldenReport> report = trace::CheckGoldenFile(GoldenPath(name));
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->num_cases, num_cases);
  for (const std::string& mismatch : report->mismatches) ADD_FAILURE() << mismatch;
}

INSTANTIATE_TEST_SUITE_P(Files, PlannerGolden,
                         testing::Values(std::pair("seed_unfolded", 16),
                                         std::pair("folded_heads", 7), std::pair("empty_rows", 8),
                                         std::pair("topk_arg", 3)),
                         [](const auto& file) { return std::string(file.param.first); });

TEST(PlannerGoldenFile, ReportsWhatDiffers) {
  std::ifstream original(GoldenPath("seed_unfolded"));
  std::string text((std::istreambuf_iterator<char>(original)), std::istreambuf_iterator<char>());
  const std::string right = "\"num_works\": 15";
  ASSERT_NE(text.find(right), std::string::npos);
  text.replace(text.find(right), right.size(), "\"num_works\": 16");
  const std::string path = testing::TempDir() + "/golden_edited.json";
  std::ofstream(path) << text;
  const Result<trace::GoldenReport> report = trace::CheckGoldenFile(path);
  ASSERT_TRUE(report.ok()) << report.status().message();
  ASSERT_EQ(report->mismatches.size(), 1u);
  EXPECT_EQ(report->mismatches[0], "case one_row_2048_cap16_mi308: num_works: got 15, want 16");
}

TEST(PlannerGoldenFile, RefusesWhatIsNoGoldenFile) {
  EXPECT_EQ(trace::CheckGoldenFile("/nonexistent/golden.json").status().code(),
            StatusCode::kInvalidArgument);
  for (const char* text : {"", "[1", "{\"cases\": 7}", "{\"cases\": [{\"name\": \"x\"}]}"}) {
    const std::string path = testing::TempDir() + "/golden_broken.json";
    std::ofstream(path) << text;
    EXPECT_EQ(trace::CheckGoldenFile(path).status().code(), StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace sparsemla
