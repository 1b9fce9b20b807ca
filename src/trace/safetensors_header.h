// The JSON header of a safetensors file. Read by safetensors.cc only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/status.h"

namespace sparsemla::trace {

struct HeaderEntry {
  std::string_view dtype;  // points to a constant
  uint64_t element_bytes = 0;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // bytes in the data section, end exclusive
  uint64_t end = 0;
};

struct Header {
  std::map<std::string, std::string> metadata;
  std::map<std::string, HeaderEntry> entries;
};

// Bytes of one element of a dtype of the format; 0: there is no such dtype.
uint64_t ElementBytes(std::string_view dtype);

// Accepts the format's grammar and nothing else: an object of tensors, each with dtype, shape and
// data_offsets once, and of string metadata. Does not know the size of the file.
Result<Header> ParseHeader(std::string_view json);

}  // namespace sparsemla::trace
