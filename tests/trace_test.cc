// The case file: what is written can be read, and no claim of a file is believed unchecked.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "trace/case.h"
#include "trace/file.h"
#include "trace/safetensors.h"

namespace sparsemla::trace {
namespace {

// ---- the container -----------------------------------------------------------------------------

std::string LengthField(uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>((length >> (8 * i)) & 0xFF);
  return bytes;
}

std::string Container(const std::string& header, size_t data_bytes) {
  return LengthField(header.size()) + header + std::string(data_bytes, '\1');
}

Result<Safetensors> Read(const std::string& bytes) {
  std::istringstream stream(bytes);
  return Safetensors::Read(stream, bytes.size());
}

std::string ErrorOf(const std::string& bytes) {
  return Read(bytes).status().message();
}

TEST(SafetensorsTest, ReadsMetadataShapesAndData) {
  const auto file = Read(Container(
      R"({"__metadata__":{"a":"b"},"x":{"dtype":"I32","shape":[2,1],"data_offsets":[0,8]}})", 8));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file.value().metadata().at("a"), "b");
  const TensorData* x = file.value().Find("x");
  ASSERT_NE(x, nullptr);
  EXPECT_EQ(x->dtype, "I32");
  EXPECT_EQ(x->shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(x->data.size(), 8u);
  EXPECT_EQ(file.value().Find("y"), nullptr);
}

TEST(SafetensorsTest, AcceptsEmptyTensorsAndPaddedHeaders) {
  EXPECT_EQ(ErrorOf(Container(R"({"x":{"dtype":"F32","shape":[3,0],"data_offsets":[0,0]}}   )", 0)),
            "");
  EXPECT_EQ(ErrorOf(Container("{}", 0)), "");
}

struct Lie {
  std::string header;
  size_t data_bytes;
  std::string message;  // part of what the error says
};

std::string Tensor(const std::string& fields) {
  return "{\"x\":{" + fields + "}}";
}

TEST(SafetensorsTest, EveryLieOfTheHeaderIsNamedWithTensorValueAndBound) {
  const std::vector<Lie> lies = {
      {"{", 0, "not valid UTF-8 JSON"},
      {"[]", 0, "does not begin with '{'"},
      {"", 0, "does not begin with '{'"},
      {"{\"\xFF\":1}", 0, "not valid UTF-8 JSON"},
      {"{} x", 0, "not valid UTF-8 JSON"},
      {"{\"x\":" + std::string(200000, '['), 0, "\"x\" holds an array"},
      {"{\"x\":{\"dtype\":" + std::string(200000, '{'), 0, "\"dtype\" holds an object"},
      {"{\"x\":null}", 0, "\"x\" holds null"},
      {"{\"__metadata__\":{\"a\":1}}", 0, "metadata \"a\" holds a number"},
      {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "metadata \"a\" appears twice"},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "\"__metadata__\" appears twice"},
      {Tensor(R"("dtype":"F31","shape":[],"data_offsets":[0,4])"), 4, "unknown dtype \"F31\""},
      {Tensor(R"("dtype":"F32","shape":[])"), 4, "needs dtype, shape, data_offsets"},
      {Tensor(R"("dtype":"F32","dtype":"F32")"), 4, "\"dtype\" appears twice"},
      {Tensor(R"("dtype":"F32","strides":[])"), 4, "\"strides\" is not a field"},
      {Tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), 4, "\"-1\", not a whole"},
      {Tensor(R"("dtype":"F32","shape":[1.5],"data_offsets":[0,4])"), 4, "\"1.5\", not a whole"},
      {Tensor(R"("dtype":"F32","shape":[1e30],"data_offsets":[0,4])"), 4, "\"1e30\", not a whole"},
      {Tensor(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])"), 4,
       "\"shape\" holds a string"},
      {Tensor(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])"), 4,
       "18446744073709551615 in shape overflows 63 bits"},
      {Tensor(R"("dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,4])"), 4,
       "shape [1099511627776, 1099511627776] overflows 64 bits"},
      {Tensor(R"("dtype":"F32","shape":[1099511627776],"data_offsets":[0,4])"), 4,
       "needs 4398046511104 bytes, data_offsets [0, 4] hold 4"},
      {Tensor(R"("dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4])"), 4,
       "more than 8 dimensions"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), 4, "end before they begin"},
      {Tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 4,
       "[0, 8] reach beyond the file's 4 bytes"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0])"), 4, "has 1 numbers, expected 2"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,4])"), 4, "has 3 numbers"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 5,
       "hold 4 bytes, the file has data of 5"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), 8, "leave a hole after byte 0"},
      {R"({"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
       R"("y":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}})",
       5, "\"y\": data_offsets [2, 5] overlap the tensor before it, which ends at 3"},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, "\"x\" appears twice"},
      {R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("y":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
       6, "data offset 2 is not aligned to the 4 bytes of F32"},
  };
  for (const Lie& lie : lies) {
    const std::string error = ErrorOf(Container(lie.header, lie.data_bytes));
    EXPECT_NE(error.find(lie.message), std::string::npos)
        << "header " << lie.header.substr(0, 120) << "\nsays \"" << error << "\"\nnot \""
        << lie.message << "\"";
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
}

TEST(SafetensorsTest, EveryTruncationIsAnError) {
  const std::string whole =
      Container(R"({"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})", 8);
  ASSERT_EQ(ErrorOf(whole), "");
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(ErrorOf(whole.substr(0, size)), "") << size << " bytes";
  }
}

TEST(SafetensorsTest, HeaderLengthIsBoundedByTheFormatAndByTheFile) {
  EXPECT_NE(ErrorOf(LengthField(100'000'001) + "{}").find("limit of 100000000"), std::string::npos);
  EXPECT_NE(ErrorOf(LengthField(~uint64_t{0}) + "{}").find("18446744073709551615"),
            std::string::npos);
  EXPECT_NE(ErrorOf(LengthField(3) + "{}").find("header length 3, only 2 bytes follow"),
            std::string::npos);
}

TEST(SafetensorsTest, MessagesStayOneLineWhateverATensorIsCalled) {
  const std::string error = ErrorOf(Container(
      R"({"a\n\u001b[31m)" + std::string(500, 'b') + R"(":{"dtype":"F32","shape":[],"shape":[]}})",
      0));
  EXPECT_EQ(error.find_first_of("\n\x1b"), std::string::npos) << error;
  EXPECT_LT(error.size(), 200u);
}

// ---- writing -----------------------------------------------------------------------------------

class TraceFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              (std::string("sparsemla_") +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  size_t NumFiles() const {
    const std::filesystem::directory_iterator files(folder_);
    return static_cast<size_t>(std::distance(begin(files), end(files)));
  }

  std::filesystem::path folder_;
};

TEST_F(TraceFiles, WhatIsWrittenIsReadBackAligned) {
  const std::vector<uint8_t> bytes = {1, 2, 3};
  const std::vector<float> floats = {1.5f, -2.0f};
  ASSERT_TRUE(WriteSafetensors(Path("x.safetensors"), {{"k", "v"}},
                               {{"bytes", {"U8", {3}, std::as_bytes(std::span(bytes))}},
                                {"floats", {"F32", {1, 2}, std::as_bytes(std::span(floats))}}})
                  .ok());
  const auto file = Safetensors::ReadFile(Path("x.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file.value().metadata().at("k"), "v");
  EXPECT_EQ(std::memcmp(file.value().Find("bytes")->data.data(), bytes.data(), 3), 0);
  EXPECT_EQ(std::memcmp(file.value().Find("floats")->data.data(), floats.data(), 8), 0);
  EXPECT_EQ(NumFiles(), 1u);
}

TEST_F(TraceFiles, AFailedWriteLeavesNothingBehindAndTheOldFileAlone) {
  const std::string_view parts[] = {"new"};
  EXPECT_FALSE(WriteFileAtomically(Path("no/such/folder"), parts).ok());
  std::filesystem::create_directory(Path("folder"));
  const Status status = WriteFileAtomically(Path("folder"), parts);
  EXPECT_NE(status.message().find("not a regular file"), std::string::npos) << status.message();
  EXPECT_EQ(NumFiles(), 1u);
}

TEST_F(TraceFiles, FilesThatCannotBeReadAreNamed) {
  EXPECT_EQ(Safetensors::ReadFile(Path("absent")).status().message(),
            Path("absent") + ": no such file");
  EXPECT_EQ(Safetensors::ReadFile(folder_.string()).status().message(),
            folder_.string() + ": not a regular file");
}

// ---- the case ----------------------------------------------------------------------------------

struct RawTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

template <typename T>
RawTensor Raw(const std::string& dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  RawTensor tensor{dtype, std::move(shape), ""};
  for (const std::byte byte : bytes) tensor.bytes += static_cast<char>(byte);
  return tensor;
}

RawTensor Ints(std::vector<int64_t> shape, const std::vector<int32_t>& values) {
  return Raw("I32", std::move(shape), values);
}

RawTensor Floats(std::vector<int64_t> shape, float value = 0.5f) {
  size_t count = 1;
  for (const int64_t size : shape) count *= static_cast<size_t>(size);
  return Raw("F32", std::move(shape), std::vector<float>(count, value));
}

// Two requests of one token each; 2 heads, 4 + 2 columns, 3 keys a row, blocks of 2 tokens.
struct RawCase {
  std::map<std::string, std::string> metadata = {{"format", "sparsemla-case-1"},
                                                 {"name", "small"},
                                                 {"softmax_scale", "0.25"},
                                                 {"kv_lora_rank", "4"},
                                                 {"qk_rope_head_dim", "2"},
                                                 {"topk_tokens", "3"},
                                                 {"block_size", "2"},
                                                 {"model_dtype", "fp32"},
                                                 {"kv_cache_dtype", "fp32"}};
  std::map<std::string, RawTensor> tensors = {{"ql_nope", Floats({2, 2, 4})},
                                              {"q_pe", Floats({2, 2, 2})},
                                              {"kv_cache", Floats({5, 2, 6})},
                                              {"topk_indices", Ints({2, 3}, {0, 2, -1, 1, 0, -1})},
                                              {"block_table", Ints({2, 2}, {1, 2, 3, 4})},
                                              {"query_start_loc", Ints({3}, {0, 1, 2})},
                                              {"seq_lens", Ints({2}, {3, 2})}};

  // Gives the case an fp8 cache with scales.
  void MakeFp8() {
    metadata["kv_cache_dtype"] = "fp8_e4m3";
    tensors["kv_cache"] = {"F8_E4M3", {5, 2, 6}, std::string(60, '\0')};
    tensors["q_scale"] = Floats({1});
    tensors["kv_scale"] = Floats({1});
  }
};

class CaseTest : public TraceFiles {
 protected:
  Result<Case> Load(const RawCase& raw) const {
    std::map<std::string, TensorData> tensors;
    for (const auto& [name, tensor] : raw.tensors) {
      tensors[name] = {tensor.dtype, tensor.shape, std::as_bytes(std::span(tensor.bytes))};
    }
    const Status written = WriteSafetensors(Path("case"), raw.metadata, tensors);
    return written.ok() ? LoadCase(Path("case")) : Result<Case>(written);
  }

  void ExpectError(const RawCase& raw, const std::string& message) const {
    const std::string error = Load(raw).status().message();
    EXPECT_EQ(error, Path("case") + ": " + message);
  }
};

TEST_F(CaseTest, ViewsHaveTheSizesOfTheFile) {
  const auto loaded = Load(RawCase());
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  const Case& c = loaded.value();
  EXPECT_EQ(c.name, "small");
  EXPECT_EQ(c.dims, (MlaDims{.num_heads = 2, .kv_lora_rank = 4, .qk_rope_head_dim = 2}));
  EXPECT_EQ(c.num_tokens, 2);
  EXPECT_EQ(c.num_reqs, 2);
  EXPECT_EQ(c.topk_tokens, 3);
  EXPECT_EQ(c.softmax_scale, 0.25f);
  EXPECT_EQ(c.block_table.num_blocks, 5);
  EXPECT_EQ(c.kv_cache.num_slots, 10);
  EXPECT_EQ(c.topk_indices(1, 0), 1);
  EXPECT_EQ(c.block_table.blocks(1, 1), 4);
  EXPECT_EQ(static_cast<const float*>(c.query.ql_nope.data)[0], 0.5f);
  EXPECT_FALSE(c.expected.any());
}

TEST_F(CaseTest, AWholeQueryIsTheOtherForm) {
  RawCase raw;
  raw.tensors.erase("ql_nope");
  raw.tensors.erase("q_pe");
  raw.tensors["q"] = Floats({2, 2, 6});
  const auto loaded = Load(raw);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(loaded.value().query.q.shape, (std::array<int64_t, 3>{2, 2, 6}));
}

TEST_F(CaseTest, MissingOrUnknownTensorsAreNamed) {
  for (const std::string name : {"ql_nope", "q_pe", "kv_cache", "topk_indices", "block_table",
                                 "query_start_loc", "seq_lens"}) {
    RawCase raw;
    raw.tensors.erase(name);
    ExpectError(raw, "tensor \"" + name + "\" is missing");
  }
  RawCase raw;
  raw.tensors["sink"] = Floats({2});
  ExpectError(raw, "tensor \"sink\" is not part of the format sparsemla-case-1");
  raw = RawCase();
  raw.tensors["q"] = Floats({2, 2, 6});
  ExpectError(raw, "tensors \"q\" and \"ql_nope\"/\"q_pe\" are both given, expected one form");
}

TEST_F(CaseTest, MetadataMustBeThereAndInRange) {
  for (const std::string key :
       {"format", "name", "softmax_scale", "kv_lora_rank", "qk_rope_head_dim", "topk_tokens",
        "block_size", "model_dtype", "kv_cache_dtype"}) {
    RawCase raw;
    raw.metadata.erase(key);
    ExpectError(raw, "metadata \"" + key + "\" is missing");
  }
  const std::vector<std::pair<std::pair<std::string, std::string>, std::string>> wrong = {
      {{"format", "other"}, "metadata \"format\" is \"other\", expected \"sparsemla-case-1\""},
      {{"softmax_scale", "nan"}, "metadata \"softmax_scale\" is nan, must be finite"},
      {{"softmax_scale", "0,5"}, "metadata \"softmax_scale\" is \"0,5\", not a number in range"},
      {{"kv_lora_rank", "-4"}, "metadata \"kv_lora_rank\" is -4, outside [1, 65536]"},
      {{"kv_lora_rank", "99999999999"},
       "metadata \"kv_lora_rank\" is \"99999999999\", not a number in range"},
      {{"topk_tokens", "0"}, "metadata \"topk_tokens\" is 0, outside [1, 1048576]"},
      {{"topk_tokens", "4"}, "tensor \"topk_indices\" is 3 wide, topk_tokens is 4"},
      {{"block_size", "0"}, "metadata \"block_size\" is 0, outside [1, 2147483647]"},
      {{"model_dtype", "int8"},
       "metadata \"model_dtype\" is \"int8\", expected bf16, fp16 or fp32"},
      {{"kv_cache_dtype", "bf16"}, "tensor \"kv_cache\" is of F32, expected BF16"}};
  for (const auto& [entry, message] : wrong) {
    RawCase raw;
    raw.metadata[entry.first] = entry.second;
    ExpectError(raw, message);
  }
}

TEST_F(CaseTest, ShapesAndTypesMustAgreeWithEachOther) {
  const std::vector<std::pair<std::pair<std::string, RawTensor>, std::string>> wrong = {
      {{"ql_nope", Floats({2, 2, 5})}, "has shape [2, 2, 5], expected [any, any, 4]"},
      {{"ql_nope", Floats({2, 129, 4})}, "has 129 heads, outside [1, 128]"},
      {{"ql_nope", Ints({1, 1, 4}, {0, 0, 0, 0})}, "is of I32, expected BF16, F16 or F32"},
      {{"q_pe", Floats({2, 3, 2})}, "has shape [2, 3, 2], expected [2, 2, 2]"},
      {{"kv_cache", Floats({5, 3, 6})}, "has shape [5, 3, 6], expected [any, 2, 6]"},
      {{"kv_cache", Floats({5, 12})}, "has shape [5, 12], expected [any, 2, 6]"},
      {{"topk_indices", Floats({2, 3})}, "is of F32, expected I32"},
      {{"topk_indices", Ints({1, 3}, {0, 0, 0})}, "has shape [1, 3], expected [2, any]"},
      {{"block_table", Ints({1, 1}, {0})}, "has shape [1, 1], expected [2, any]"},
      {{"query_start_loc", Ints({0}, {})}, "is empty, expected [num_reqs + 1]"},
      {{"seq_lens", Ints({1}, {3})}, "has shape [1], expected [2]"},
      {{"sinks", Floats({3})}, "has shape [3], expected [2]"},
      {{"expected.out", Floats({2, 2, 6})}, "has shape [2, 2, 6], expected [2, 2, 4]"},
      {{"expected.lse", Floats({2, 1})}, "has shape [2, 1], expected [2, 2]"},
      {{"expected.paged_kv_indptr", Ints({2}, {0, 1})}, "has shape [2], expected [3]"}};
  for (const auto& [entry, message] : wrong) {
    RawCase raw;
    raw.tensors[entry.first] = entry.second;
    ExpectError(raw, "tensor \"" + entry.first + "\" " + message);
  }
}

TEST_F(CaseTest, APositionBeyondTheRequestIsAnErrorAndMinusOneIsNot) {
  for (const int32_t position :
       {2, -2, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    RawCase raw;
    raw.tensors["topk_indices"] = Ints({2, 3}, {0, 2, -1, 1, position, -1});
    ExpectError(raw, "index out of range: topk_indices[1, 1] is " + std::to_string(position) +
                         ", request 1 has positions [0, 2) and -1 stands for none");
  }
}

TEST_F(CaseTest, ScalesAreFiniteAndPositiveAndOnlyBesidePerTensorFp8) {
  RawCase raw;
  raw.MakeFp8();
  EXPECT_TRUE(Load(raw).ok()) << Load(raw).status().message();
  for (const float scale : {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity()}) {
    raw.tensors["kv_scale"] = Floats({1}, scale);
    EXPECT_NE(Load(raw).status().message().find("must be finite and positive"), std::string::npos);
  }
  raw.tensors.erase("kv_scale");
  ExpectError(raw, "tensor \"kv_scale\" is missing");
  raw = RawCase();
  raw.tensors["q_scale"] = Floats({1});
  ExpectError(raw, "tensor \"q_scale\" belongs to per-tensor fp8 caches; kv_cache_dtype is fp32");
}

TEST_F(CaseTest, DsMlaRowsHaveOneSizeOnly) {
  RawCase raw;
  raw.metadata["kv_cache_dtype"] = "fp8_ds_mla";
  raw.tensors["kv_cache"] = {"U8", {5, 2, 656}, std::string(6560, '\0')};
  ExpectError(raw,
              "fp8_ds_mla rows hold 512 latent and 64 rotary values; kv_lora_rank is 4, "
              "qk_rope_head_dim 2");
}

TEST_F(CaseTest, SelectedSlotsEndWhereTheirRangesEnd) {
  RawCase raw;
  raw.tensors["expected.selected_indptr"] = Ints({3}, {0, 2, 4});
  raw.tensors["expected.selected_slots"] = Ints({3}, {2, 4, 7});
  ExpectError(raw,
              "tensor \"expected.selected_slots\" has 3 entries, expected.selected_indptr "
              "ends with 4");
}

}  // namespace
}  // namespace sparsemla::trace
