// The command-line tool as its users see it: exit codes, messages, files.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "sparsemla/huge_pages.h"
#include "trace/safetensors.h"

namespace sparsemla {
namespace {

const std::string kData = SPARSEMLA_TEST_DATA;

std::string CaseFile(const std::string& name) {
  return kData + "/cases/" + name + ".safetensors";
}

std::string ReadAll(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

struct ToolRun {
  int exit_code = -1;
  std::string out;
  std::string err;
};

class ToolTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              (std::string("sparsemla_tool_") +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

  ToolRun Run(const std::string& arguments, const std::string& stdout_path = "") const {
    const std::string out = stdout_path.empty() ? Path("stdout") : stdout_path;
    const std::string command =
        SPARSEMLA_TOOL " " + arguments + " >" + out + " 2>" + Path("stderr");
    const int status = std::system(command.c_str());
    ToolRun run{WIFEXITED(status) ? WEXITSTATUS(status) : -1, "", ReadAll(Path("stderr"))};
    if (stdout_path.empty()) run.out = ReadAll(out);
    return run;
  }

  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(Path(name), std::ios::binary) << bytes;
    return Path(name);
  }

  // A copy of a case in which the first element of `tensor` is another float or int32.
  template <typename T>
  std::string WithFirstElement(const std::string& name, const std::string& tensor, T value) const {
    const auto file = trace::Safetensors::ReadFile(CaseFile(name));
    EXPECT_TRUE(file.ok()) << file.status().message();
    auto tensors = file.value().tensors();
    std::vector<std::byte> changed(tensors.at(tensor).data.begin(), tensors.at(tensor).data.end());
    std::memcpy(changed.data(), &value, sizeof(value));
    tensors.at(tensor).data = changed;
    EXPECT_TRUE(trace::WriteSafetensors(Path("changed"), file.value().metadata(), tensors).ok());
    return Path("changed");
  }

  void ExpectBadInput(const std::string& arguments, const std::string& message) const {
    const ToolRun run = Run(arguments);
    EXPECT_EQ(run.exit_code, 2) << arguments << "\n" << run.err;
    EXPECT_NE(run.err.find(message), std::string::npos) << arguments << "\n" << run.err;
    EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << arguments << "\n" << run.err;
  }

  std::filesystem::path folder_;
};

// ---- run ---------------------------------------------------------------------------------------

TEST_F(ToolTest, RightAnswersExitWithZeroAndShowErrorBesideTolerance) {
  for (const auto& entry : std::filesystem::directory_iterator(kData + "/cases")) {
    for (const std::string backend : {"ref", "cpu"}) {
      const ToolRun run = Run("run --check --backend " + backend + " " + entry.path().string());
      EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
      EXPECT_NE(run.out.find("tolerance"), std::string::npos) << run.out;
    }
  }
}

TEST_F(ToolTest, AWrongOutputExitsWithOneAndNamesTokenHeadAndColumn) {
  const ToolRun run =
      Run("run --check " + WithFirstElement("fp32_small_h4", "expected.out", 100.0f));
  EXPECT_EQ(run.exit_code, 1) << run.err;
  EXPECT_NE(run.out.find("MISMATCH at token 0, head 0, column 0"), std::string::npos) << run.out;
}

TEST_F(ToolTest, AWrongLseIsFoundWhereTheOutputIsRight) {
  const ToolRun run =
      Run("run --check " + WithFirstElement("fp32_small_h4", "expected.lse", 100.0f));
  EXPECT_EQ(run.exit_code, 1) << run.err;
  EXPECT_NE(run.out.find("MISMATCH at lse, token 0, head 0"), std::string::npos) << run.out;
}

TEST_F(ToolTest, IndexAnswersAreComparedExactly) {
  for (const std::string name : {"req_id_per_token", "paged_kv_indptr", "selected_slots"}) {
    const ToolRun run =
        Run("run --check " + WithFirstElement("fp32_small_h4", "expected." + name, 77));
    EXPECT_EQ(run.exit_code, 1) << name << run.err;
    EXPECT_NE(run.out.find("MISMATCH at entry 0"), std::string::npos) << run.out;
    EXPECT_NE(run.out.find("want 77"), std::string::npos) << run.out;
  }
}

// N7: the same bits for any number of threads, however rows are cut.
TEST_F(ToolTest, AnswersAreTheSameBitsForAnyNumberOfThreads) {
  for (const std::string splits : {"auto", "1", "2", "5", "16"}) {
    std::string first;
    for (const std::string threads : {"1", "2", "7"}) {
      const ToolRun run = Run("run --check --backend cpu --threads " + threads + " --splits " +
                              splits + " --output " + Path("out") + " " + CaseFile("ds_mla_h16"));
      ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
      const std::string answers = ReadAll(Path("out"));
      if (first.empty()) first = answers;
      EXPECT_TRUE(answers == first) << threads << " threads, splits " << splits;
    }
  }
}

TEST_F(ToolTest, OutputHasTheAnswersInTheirTypes) {
  ASSERT_EQ(Run("run --output " + Path("out") + " " + CaseFile("ds_mla_h16")).exit_code, 0);
  const auto file = trace::Safetensors::ReadFile(Path("out"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file.value().tensors().size(), 6u);
  EXPECT_EQ(file.value().Find("out")->dtype, "BF16");
  EXPECT_EQ(file.value().Find("out")->shape, (std::vector<int64_t>{2, 16, 512}));
  EXPECT_EQ(file.value().Find("lse")->dtype, "F32");
  for (const std::string name :
       {"req_id_per_token", "paged_kv_indptr", "selected_indptr", "selected_slots"}) {
    EXPECT_EQ(file.value().Find(name)->dtype, "I32") << name;
  }
}

TEST_F(ToolTest, AllFilesAreRunAndTheWorstOneDecides) {
  const std::string right = CaseFile("fp32_small_h4");
  const std::string wrong = WithFirstElement("fp32_small_h4", "expected.out", 100.0f);
  EXPECT_EQ(Run("run --check " + wrong + " " + right).exit_code, 1);
  const ToolRun run = Run("run --check " + Path("absent") + " " + wrong + " " + right);
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_NE(run.out.find("3 files: 1 right, 1 wrong, 1 not run"), std::string::npos) << run.out;
}

TEST_F(ToolTest, BadCaseFilesAreOneLineOnStderrAndLeaveNoOutput) {
  const std::string whole = ReadAll(CaseFile("fp32_small_h4"));
  const std::vector<std::pair<std::string, std::string>> bad = {
      {Path("absent"), "absent: no such file"},
      {folder_.string(), "not a regular file"},
      {Write("empty", ""), "truncated: 0 bytes"},
      {Write("short", whole.substr(0, 5000)), "reach beyond the file's"},
      {Write("text", "this is not a case file at all"), "header length"},
      {Write("long", whole + "x"), "the file has data of"},
      {WithFirstElement("fp32_small_h4", "topk_indices", 1 << 30),
       "index out of range: topk_indices[0, 0] is 1073741824"}};
  for (const auto& [path, message] : bad) {
    ExpectBadInput("run --check --output " + Path("out") + " " + path, message);
  }
  ExpectBadInput("run --check " + WithFirstElement("fp8_h16_scales", "kv_scale", std::nanf("")),
                 "\"kv_scale\" is nan, must be finite and positive");
  ExpectBadInput("run " + WithFirstElement("fp32_small_h4", "query_start_loc", 1),
                 "query_start_loc");
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    EXPECT_NE(entry.path().filename().string().substr(0, 3), "out") << entry.path();
  }
}

TEST_F(ToolTest, AnOutputThatCannotBeWrittenIsBadInput) {
  ExpectBadInput("run --output " + Path("no/such/out") + " " + CaseFile("fp32_small_h4"),
                 "cannot create");
  ExpectBadInput("run --output " + Path("out") + " " + CaseFile("fp32_small_h4") + " " +
                     CaseFile("ds_mla_h16"),
                 "--output takes the answers of one case, 2 are given");
  EXPECT_EQ(Run("info", "/dev/full").exit_code, 2);
}

TEST_F(ToolTest, UsageErrorsNameTheValueAndWhatThereIs) {
  const std::string file = " " + CaseFile("fp32_small_h4");
  ExpectBadInput("", "subcommand");
  ExpectBadInput("frobnicate", "frobnicate");
  ExpectBadInput("run", "CASE");
  ExpectBadInput("run --frobnicate" + file, "--frobnicate");
  ExpectBadInput("run --backend abacus" + file, "'abacus'");
  ExpectBadInput("run --backend abacus" + file, "cpu, ref");
  ExpectBadInput("run --backend cpu --kernel abacus" + file, "attention_portable");
  ExpectBadInput("run --backend ref --kernel abacus" + file, "attention_ref");
  ExpectBadInput("run --splits 0" + file, "'0' is neither auto nor a positive");
  ExpectBadInput("run --splits 2x" + file, "'2x'");
  ExpectBadInput("run --threads -1" + file, "-1; it must be in [0, 4096]");
  ExpectBadInput("run --compute-units -1" + file, "-1");
  ExpectBadInput("run --schedule fair" + file, "balanced");
  ExpectBadInput("run --compute-units 99999999999" + file, "99999999999");
  ExpectBadInput("plan", "--kv-lens or --golden");
  ExpectBadInput("plan --kv-lens 1,,2 --compute-units 4", "'1,,2'");
  ExpectBadInput("plan --kv-lens '' --compute-units 4", "''");
  ExpectBadInput("plan --kv-lens 5,-1 --compute-units 4", "-1");
  ExpectBadInput("plan --kv-lens 5 --num-heads 129 --compute-units 4", "129");
  ExpectBadInput("plan --kv-lens 5 --compute-units -4", "-4");
  ExpectBadInput("plan --golden " + Path("absent"), "absent");
}

// ---- bench -------------------------------------------------------------------------------------

TEST_F(ToolTest, BenchWritesOneCellForEveryCombinationWithPositiveFigures) {
  const ToolRun run =
      Run("bench 3q1s1k q8s100 --backend cpu --threads 1,2 --heads 1,16 --topk 64 "
          "--format bf16,fp8_ds_mla --residency l2,dram,context --pool-mb 8 --seconds 0.01 "
          "--overlap 70 --json " +
          Path("bench.json"));
  ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
  const auto report = nlohmann::json::parse(ReadAll(Path("bench.json")));
  EXPECT_NE(report.at("command_line").get<std::string>().find("bench 3q1s1k q8s100"),
            std::string::npos);
  EXPECT_EQ(report.at("options").at("overlap"), 0.7);
  EXPECT_GE(report.at("peaks").size(), 2u);
  ASSERT_EQ(report.at("cells").size(), 48u);
  EXPECT_EQ(std::count(run.out.begin(), run.out.end(), '\n'), 2 + 48) << run.out;
  for (const auto& cell : report.at("cells")) {
    EXPECT_EQ(cell.at("mismatch"), "") << cell;
    EXPECT_EQ(cell.at("checked_rows"), 3) << cell;
    EXPECT_EQ(cell.at("num_keys"), cell.at("workload") == "q8s100" ? 8 * 64 : 3 * 64) << cell;
    EXPECT_GE(cell.at("samples"), 5) << cell;
    EXPECT_GT(cell.at("us_per_call").at("best"), 0) << cell;
    EXPECT_GE(cell.at("us_per_call").at("median"), cell.at("us_per_call").at("best")) << cell;
    for (const char* figure : {"gflops", "cache_gb_per_s", "peak_gflops", "share_of_peak"}) {
      EXPECT_GT(cell.at(figure), 0) << figure << cell;
    }
  }
}

TEST_F(ToolTest, BenchTakesRaggedRowsForcedSplitsAndAFixedNumberOfSamples) {
  const ToolRun run =
      Run("bench q40s40 --heads 4 --topk 32 --ragged --splits 3 --samples 7 --no-check --json " +
          Path("bench.json"));
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto report = nlohmann::json::parse(ReadAll(Path("bench.json")));
  const auto& cell = report.at("cells").at(0);
  EXPECT_EQ(cell.at("samples"), 7);
  EXPECT_EQ(cell.at("checked_rows"), 0);
  EXPECT_GT(cell.at("num_partials"), 40);
  EXPECT_LT(cell.at("num_keys"), 40 * 32 - 31 * 32 / 2);  // what rows that see 1..40 would have
}

TEST_F(ToolTest, BenchRefusesBadWorkloadsListsAndSizes) {
  ExpectBadInput("bench", "WORKLOAD");
  ExpectBadInput("bench q1s8x", "workload \"q1s8x\", position 4");
  ExpectBadInput("bench q1s8k 4q", "workload \"4q\", position 2");
  ExpectBadInput("bench q1 --heads 16,129", "\"129\" is not 1..128");
  ExpectBadInput("bench q1 --heads 16,", "\"\" is not 1..128");
  ExpectBadInput("bench q1 --threads 0", "\"0\" is not 1..4096");
  ExpectBadInput("bench q1 --topk 5x", "\"5x\"");
  ExpectBadInput("bench q1 --format bf16,int4", "\"int4\" is not bf16, fp16");
  ExpectBadInput("bench q1 --residency l1", "\"l1\" is not l2, l3");
  ExpectBadInput("bench q1 --overlap 101", "101");
  ExpectBadInput("bench q1 --pool-mb 7", "7");
  ExpectBadInput("bench q1 --splits 0", "'0' is neither auto nor a positive");
  ExpectBadInput("bench q1 --backend abacus", "'abacus'");
  ExpectBadInput("bench q1 --kernel abacus", "'abacus'");
  ExpectBadInput("bench q1s64k --pool-mb 8", "q1s64k has 72 MB of cache rows; --pool-mb allows 8");
  ExpectBadInput("bench q1 --seconds 0 --json " + Path("no/such/file"), "cannot create");
}

// ---- plan and info
// -------------------------------------------------------------------------------

TEST_F(ToolTest, PlanShowsTimelineImbalanceAndSplits) {
  const ToolRun run = Run("plan --kv-lens 2048,100,17 --num-heads 16 --compute-units 304 --svg " +
                          Path("plan.svg"));
  EXPECT_EQ(run.exit_code, 0) << run.err;
  for (const std::string part : {"imbalance", "2 rows of 1 piece", "row 1 (100 keys)"}) {
    EXPECT_NE(run.out.find(part), std::string::npos) << part << "\n" << run.out;
  }
  const std::string svg = ReadAll(Path("plan.svg"));
  EXPECT_TRUE(svg.starts_with("<svg")) << svg.substr(0, 40);
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
}

TEST_F(ToolTest, JsonOfEveryCommandParses) {
  const auto plan = nlohmann::json::parse(Run("plan --kv-lens 40,7 --compute-units 2 --json").out);
  EXPECT_EQ(plan.at("kv_indptr"), (std::vector<int>{0, 40, 47}));
  EXPECT_EQ(plan.at("work_indptr").size(), 3u);
  const auto info = nlohmann::json::parse(Run("info --json").out);
  EXPECT_EQ(info.at("backends").size(), 2u);
  EXPECT_EQ(info.at("huge_pages").at("setting"), HugePageSetting());
  EXPECT_EQ(info.at("backends").at(1).at("kernel_of_format").at("bf16"), "attention_ref");
  const auto run =
      nlohmann::json::parse(Run("run --check --json " + CaseFile("fp32_small_h4")).out);
  EXPECT_EQ(run.at(0).at("ok"), true);
  EXPECT_EQ(run.at(0).at("answers").size(), 6u);
}

TEST_F(ToolTest, GoldenPlansAreEqualAndAChangedOneIsNoticed) {
  const std::string golden = kData + "/golden/mla_metadata_topk_arg.json";
  EXPECT_EQ(Run("plan --golden " + golden).exit_code, 0);
  std::string text = ReadAll(golden);
  const size_t number = text.find_first_of("123456789", text.rfind("\"work_indptr\""));
  text[number] = text[number] == '9' ? '8' : '9';
  const ToolRun run = Run("plan --golden " + Write("changed.json", text));
  EXPECT_EQ(run.exit_code, 1) << run.out << run.err;
  EXPECT_NE(run.out.find("work_indptr"), std::string::npos) << run.out;
}

TEST_F(ToolTest, InfoListsBackEndsKernelsAndTheForcedOnes) {
  const ToolRun run = Run("info");
  EXPECT_EQ(run.exit_code, 0) << run.err;
  for (const std::string& part :
       std::vector<std::string>{"back end cpu", "back end ref", "attention_portable", "fp8_ds_mla",
                                "huge pages", HugePageSetting(), "SPARSEMLA_CPU_KERNEL"}) {
    EXPECT_NE(run.out.find(part), std::string::npos) << part << "\n" << run.out;
  }
}

}  // namespace
}  // namespace sparsemla
