#include "trace/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/require.h"
#include "trace/file.h"

namespace sparsemla::trace {
namespace {

struct ElementType {
  std::string_view name;
  uint64_t bytes;
};
constexpr std::array kElementTypes = {
    ElementType{"BOOL", 1},        ElementType{"U8", 1},      ElementType{"I8", 1},
    ElementType{"F8_E4M3", 1},     ElementType{"F8_E5M2", 1}, ElementType{"F8_E4M3FNUZ", 1},
    ElementType{"F8_E5M2FNUZ", 1}, ElementType{"I16", 2},     ElementType{"U16", 2},
    ElementType{"F16", 2},         ElementType{"BF16", 2},    ElementType{"I32", 4},
    ElementType{"U32", 4},         ElementType{"F32", 4},     ElementType{"I64", 8},
    ElementType{"U64", 8},         ElementType{"F64", 8}};
constexpr size_t kMaxRank = 8;

const ElementType* FindElementType(std::string_view name) {
  const auto* found = std::find_if(kElementTypes.begin(), kElementTypes.end(),
                                   [&](const ElementType& type) { return type.name == name; });
  return found == kElementTypes.end() ? nullptr : found;
}

// Receives the events of nlohmann's parser. Anything that is not the format stops the parse, so
// nesting never goes deeper than three and nothing unknown is stored.
class HeaderReader {
 public:
  Header header;
  Status status;

  bool start_object(size_t) {
    if (place_ == Place::kStart) return Enter(Place::kRoot);
    if (place_ != Place::kRoot) return Unexpected("an object");
    if (key_ == "__metadata__") return Enter(Place::kMetadata);
    entry_ = {};
    fields_ = 0;
    tensor_ = key_;
    return Enter(Place::kTensor);
  }

  bool key(std::string& key) {
    key_ = key;
    switch (place_) {
      case Place::kMetadata:
        return Once(header.metadata.count(key) == 0);
      case Place::kTensor:
        return FieldKey();
      default:
        if (key == "__metadata__") return Once(!std::exchange(has_metadata_, true));
        return Once(header.entries.count(key) == 0);
    }
  }

  bool end_object() {
    if (place_ != Place::kTensor) {
      return Enter(place_ == Place::kRoot ? Place::kEnd : Place::kRoot);
    }
    if (fields_ != 7) return Fail("tensor ", Quoted(tensor_), ": needs dtype, shape, data_offsets");
    header.entries[tensor_] = std::move(entry_);
    return Enter(Place::kRoot);
  }

  bool start_array(size_t) {
    if (place_ == Place::kTensor && key_ == "shape") return Enter(Place::kShape);
    if (place_ == Place::kTensor && key_ == "data_offsets") return Enter(Place::kOffsets);
    return Unexpected("an array");
  }

  bool end_array() {
    if (place_ == Place::kOffsets) {
      if (offsets_ != 2) {
        return Fail("tensor ", Quoted(tensor_), ": data_offsets has ", offsets_,
                    " numbers, expected 2");
      }
      offsets_ = 0;
    }
    return Enter(Place::kTensor);
  }

  bool string(std::string& value) {
    if (place_ == Place::kMetadata) {
      header.metadata[key_] = value;
      return true;
    }
    if (place_ != Place::kTensor || key_ != "dtype") return Unexpected("a string");
    const ElementType* type = FindElementType(value);
    if (type == nullptr) {
      return Fail("tensor ", Quoted(tensor_), ": unknown dtype ", Quoted(value));
    }
    entry_.dtype = type->name;
    entry_.element_bytes = type->bytes;
    return true;
  }

  bool number_unsigned(uint64_t value) {
    if (place_ == Place::kShape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return Fail("tensor ", Quoted(tensor_), ": size ", value, " in shape overflows 63 bits");
      }
      if (entry_.shape.size() == kMaxRank) {
        return Fail("tensor ", Quoted(tensor_), ": shape has more than ", kMaxRank, " dimensions");
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ != Place::kOffsets) return Unexpected("a number");
    if (offsets_ == 0) entry_.begin = value;
    if (offsets_ == 1) entry_.end = value;
    ++offsets_;
    return true;
  }

  bool number_integer(int64_t value) { return NotACount(StrCat(value)); }
  bool number_float(double, const std::string& text) { return NotACount(text); }
  bool null() { return Unexpected("null"); }
  bool boolean(bool) { return Unexpected("a boolean"); }
  bool binary(std::vector<uint8_t>&) { return Unexpected("binary data"); }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    return Fail("header is not valid UTF-8 JSON at byte ", position);
  }

 private:
  enum class Place { kStart, kRoot, kMetadata, kTensor, kShape, kOffsets, kEnd };

  template <typename... Parts>
  bool Fail(const Parts&... parts) {
    status = Status(StatusCode::kInvalidArgument, StrCat(parts...));
    return false;
  }

  bool Enter(Place place) {
    place_ = place;
    return true;
  }

  std::string Where() const {
    switch (place_) {
      case Place::kStart:
      case Place::kEnd:
        return "header";
      case Place::kRoot:
        return StrCat("header entry ", Quoted(key_));
      case Place::kMetadata:
        return StrCat("metadata ", Quoted(key_));
      default:
        return StrCat("tensor ", Quoted(tensor_), ": ", Quoted(key_));
    }
  }

  bool Unexpected(std::string_view what) { return Fail(Where(), " holds ", what); }

  bool NotACount(const std::string& text) {
    if (place_ != Place::kShape && place_ != Place::kOffsets) return Unexpected("a number");
    return Fail(Where(), " holds ", Quoted(text), ", not a whole number >= 0");
  }

  bool Once(bool first) { return first || Fail(Where(), " appears twice"); }

  bool FieldKey() {
    const int field = key_ == "dtype" ? 1 : key_ == "shape" ? 2 : key_ == "data_offsets" ? 4 : 0;
    if (field == 0) return Fail(Where(), " is not a field of a tensor");
    const bool first = (fields_ & field) == 0;
    fields_ |= field;
    return Once(first);
  }

  Place place_ = Place::kStart;
  std::string key_;
  std::string tensor_;
  HeaderEntry entry_;
  int fields_ = 0;   // bit set of dtype (1), shape (2), data_offsets (4)
  int offsets_ = 0;  // numbers read of data_offsets
  bool has_metadata_ = false;
};

}  // namespace

uint64_t ElementBytes(std::string_view dtype) {
  const ElementType* type = FindElementType(dtype);
  return type == nullptr ? 0 : type->bytes;
}

Result<Header> ParseHeader(std::string_view json) {
  SPARSEMLA_REQUIRE(json.starts_with('{'), "header does not begin with '{'");
  HeaderReader reader;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &reader)) return reader.status;
  return std::move(reader.header);
}

}  // namespace sparsemla::trace
