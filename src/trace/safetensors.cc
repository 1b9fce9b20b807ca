#include "trace/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/require.h"
#include "trace/file.h"
#include "trace/safetensors_header.h"

namespace sparsemla::trace {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

using NamedEntry = std::pair<const std::string, HeaderEntry>;

// Size and alignment of one tensor against its own claims and the data section.
Status CheckEntry(const NamedEntry& named, uint64_t data_bytes) {
  const auto& [name, entry] = named;
  const std::string tensor = StrCat("tensor ", Quoted(name));
  SPARSEMLA_REQUIRE(entry.begin <= entry.end, tensor, ": data_offsets [", entry.begin, ", ",
                    entry.end, "] end before they begin");
  SPARSEMLA_REQUIRE(entry.end <= data_bytes, tensor, ": data_offsets [", entry.begin, ", ",
                    entry.end, "] reach beyond the file's ", data_bytes, " bytes of data");
  uint64_t bytes = entry.element_bytes;
  for (const int64_t size : entry.shape) {
    SPARSEMLA_REQUIRE(!__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes), tensor,
                      ": shape ", ShapeText(entry.shape), " overflows 64 bits");
  }
  SPARSEMLA_REQUIRE(bytes == entry.end - entry.begin, tensor, ": shape ", ShapeText(entry.shape),
                    " of ", entry.dtype, " needs ", bytes, " bytes, data_offsets [", entry.begin,
                    ", ", entry.end, "] hold ", entry.end - entry.begin);
  SPARSEMLA_REQUIRE(entry.begin % entry.element_bytes == 0, tensor, ": data offset ", entry.begin,
                    " is not aligned to the ", entry.element_bytes, " bytes of ", entry.dtype);
  return {};
}

// Tensors fill the data section without overlaps and without holes.
Status CheckEntries(const std::map<std::string, HeaderEntry>& entries, uint64_t data_bytes) {
  std::vector<const NamedEntry*> order;
  for (const NamedEntry& named : entries) {
    SPARSEMLA_RETURN_IF_ERROR(CheckEntry(named, data_bytes));
    order.push_back(&named);
  }
  std::sort(order.begin(), order.end(), [](const NamedEntry* a, const NamedEntry* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  uint64_t filled = 0;
  for (const NamedEntry* named : order) {
    const HeaderEntry& entry = named->second;
    SPARSEMLA_REQUIRE(entry.begin >= filled, "tensor ", Quoted(named->first), ": data_offsets [",
                      entry.begin, ", ", entry.end,
                      "] overlap the tensor before it, which ends at ", filled);
    SPARSEMLA_REQUIRE(entry.begin == filled, "tensor ", Quoted(named->first), ": data_offsets [",
                      entry.begin, ", ", entry.end, "] leave a hole after byte ", filled);
    filled = entry.end;
  }
  SPARSEMLA_REQUIRE(filled == data_bytes, "the tensors hold ", filled,
                    " bytes, the file has data of ", data_bytes);
  return {};
}

Status ReadBytes(std::istream& stream, void* destination, uint64_t bytes) {
  stream.read(static_cast<char*>(destination), static_cast<std::streamsize>(bytes));
  SPARSEMLA_REQUIRE(static_cast<uint64_t>(stream.gcount()) == bytes, "cannot read: ", bytes,
                    " bytes expected, ", stream.gcount(), " read");
  return {};
}

}  // namespace

std::string ShapeText(std::span<const int64_t> shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += StrCat(text.size() > 1 ? ", " : "", size);
  return text + "]";
}

Result<Safetensors> Safetensors::ReadFile(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  SPARSEMLA_REQUIRE(std::filesystem::exists(status), path, ": no such file");
  SPARSEMLA_REQUIRE(std::filesystem::is_regular_file(status), path, ": not a regular file");
  const uint64_t size = std::filesystem::file_size(path, error);
  std::ifstream stream(path, std::ios::binary);
  SPARSEMLA_REQUIRE(!error && stream.is_open(), path, ": cannot be opened");
  Result<Safetensors> file = Read(stream, size);
  if (!file.ok()) return AtPath(path, file.status());
  return file;
}

Result<Safetensors> Safetensors::Read(std::istream& stream, uint64_t size) {
  SPARSEMLA_REQUIRE(size >= 8, "truncated: ", size, " bytes, a safetensors file has at least 8");
  std::array<uint8_t, 8> length_bytes = {};
  SPARSEMLA_RETURN_IF_ERROR(ReadBytes(stream, length_bytes.data(), length_bytes.size()));
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < 8; ++i) header_bytes |= uint64_t{length_bytes[i]} << (8 * i);
  SPARSEMLA_REQUIRE(header_bytes <= kMaxHeaderBytes, "header length ", header_bytes,
                    " is above the format's limit of ", kMaxHeaderBytes,
                    " bytes: not a safetensors file?");
  SPARSEMLA_REQUIRE(header_bytes <= size - 8, "truncated: header length ", header_bytes, ", only ",
                    size - 8, " bytes follow");
  std::string header(header_bytes, '\0');
  SPARSEMLA_RETURN_IF_ERROR(ReadBytes(stream, header.data(), header_bytes));

  Result<Header> parsed = ParseHeader(header);
  if (!parsed.ok()) return parsed.status();
  const uint64_t data_bytes = size - 8 - header_bytes;
  SPARSEMLA_RETURN_IF_ERROR(CheckEntries(parsed->entries, data_bytes));

  Safetensors file;
  file.metadata_ = std::move(parsed->metadata);
  file.data_.reset(new (std::nothrow) std::byte[data_bytes]);
  SPARSEMLA_CHECK(file.data_ != nullptr, StatusCode::kResourceExhausted, "no memory for ",
                  data_bytes, " bytes of data");
  SPARSEMLA_RETURN_IF_ERROR(ReadBytes(stream, file.data_.get(), data_bytes));
  for (auto& [name, entry] : parsed->entries) {
    file.tensors_[name] = {entry.dtype,
                           std::move(entry.shape),
                           {file.data_.get() + entry.begin, entry.end - entry.begin}};
  }
  return file;
}

const TensorData* Safetensors::Find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

Status WriteSafetensors(const std::string& path, const std::map<std::string, std::string>& metadata,
                        const std::map<std::string, TensorData>& tensors) {
  // Wide elements first: then every tensor is aligned without padding.
  std::vector<const std::pair<const std::string, TensorData>*> order;
  for (const auto& named : tensors) order.push_back(&named);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return ElementBytes(a->second.dtype) > ElementBytes(b->second.dtype);
  });
  nlohmann::ordered_json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::vector<std::string_view> parts(2);
  uint64_t offset = 0;
  for (const auto* named : order) {
    const auto& [name, tensor] = *named;
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {offset, offset + tensor.data.size()}}};
    offset += tensor.data.size();
    parts.emplace_back(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::array<char, 8> length = {};
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>((text.size() >> (8 * i)) & 0xFF);
  parts[0] = {length.data(), length.size()};
  parts[1] = text;
  return WriteFileAtomically(path, parts);
}

}  // namespace sparsemla::trace
