// The safetensors container: named arrays and string metadata in one file. Files come from
// anywhere, so every claim of the header is checked against the file before it is believed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <istream>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/status.h"

namespace sparsemla::trace {

// One array. Packed, little endian, aligned to its element.
struct TensorData {
  std::string_view dtype;      // the format's own names: "BF16", "F32", "I32", "F8_E4M3", ...
  std::vector<int64_t> shape;  // every size >= 0
  std::span<const std::byte> data;
};

// "[2, 16, 512]".
std::string ShapeText(std::span<const int64_t> shape);

// A loaded file; owns the data that its tensors point to. Movable, not copyable.
class Safetensors {
 public:
  // Errors name the file.
  static Result<Safetensors> ReadFile(const std::string& path);
  // Reads `size` bytes. kInvalidArgument names the tensor, its value and the bound.
  static Result<Safetensors> Read(std::istream& stream, uint64_t size);

  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::map<std::string, TensorData>& tensors() const { return tensors_; }
  const TensorData* Find(const std::string& name) const;  // null: not in the file

 private:
  std::map<std::string, std::string> metadata_;
  std::map<std::string, TensorData> tensors_;
  std::unique_ptr<std::byte[]> data_;
};

// Writes a file, atomically: on an error nothing is left at or beside `path`.
Status WriteSafetensors(const std::string& path, const std::map<std::string, std::string>& metadata,
                        const std::map<std::string, TensorData>& tensors);

}  // namespace sparsemla::trace
