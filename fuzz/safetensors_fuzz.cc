// Any bytes as a case file: a clean error or a loaded case, and a small case runs on `ref`.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "ref/ref_backend.h"
#include "trace/case.h"
#include "trace/run_case.h"
#include "trace/safetensors.h"

namespace {

using namespace sparsemla;
using namespace sparsemla::trace;

// Inputs that begin with '{' are a header up to the first zero byte and then data: the length field
// in front is filled in, since mutations would hardly ever keep it right. Others are whole files.
std::string FileFromInput(const std::string& input) {
  if (!input.starts_with('{')) return input;
  const size_t header_bytes = std::min(input.find('\0'), input.size());
  std::string file;
  for (size_t i = 0; i < 8; ++i) file += static_cast<char>((header_bytes >> (8 * i)) & 0xFF);
  file += input.substr(0, header_bytes);
  if (header_bytes < input.size()) file += input.substr(header_bytes + 1);
  return file;
}

// Multiplications of the reference for the whole case.
double Work(const Case& input) {
  return 1.0 * input.num_tokens * input.dims.num_heads * input.dims.head_dim_qk() *
         static_cast<double>(input.topk_indices.shape[1]);
}

void Require(bool condition) {
  if (!condition) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes = FileFromInput(std::string(reinterpret_cast<const char*>(data), size));
  std::istringstream stream(bytes);
  Result<Safetensors> file = Safetensors::Read(stream, bytes.size());
  if (!file.ok()) {
    Require(!file.status().message().empty());
    return 0;
  }
  const Result<Case> input = MakeCase(std::move(file).value());
  if (!input.ok()) {
    Require(!input.status().message().empty());
    return 0;
  }
  if (Work(input.value()) > 1e6) return 0;
  static const std::unique_ptr<Backend> ref = MakeRefBackend();
  const Result<CaseResult> result = RunCase(
      input.value(), *ref, {.num_compute_units = 3, .splits = static_cast<int32_t>(size % 4)});
  if (!result.ok()) {
    Require(!result.status().message().empty());
    return 0;
  }
  const auto num_tokens = static_cast<size_t>(input.value().num_tokens);
  Require(result.value().req_id_per_token.size() == num_tokens);
  Require(result.value().selected_indptr.size() == num_tokens + 1);
  for (const int32_t slot : result.value().selected_slots) {
    Require(slot >= 0 && slot < input.value().kv_cache.num_slots);
  }
  return 0;
}
