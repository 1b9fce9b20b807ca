// Check macros of the doors: they build the message from values, and only when the check fails.
#pragma once

#include <sstream>
#include <string>

#include "sparsemla/status.h"

namespace sparsemla {

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return std::move(stream).str();
}

}  // namespace sparsemla

// Returns a Status with `code` and the message made of the remaining arguments unless `condition`.
#define SPARSEMLA_CHECK(condition, code, ...)                             \
  do {                                                                    \
    if (!(condition)) {                                                   \
      return ::sparsemla::Status(code, ::sparsemla::StrCat(__VA_ARGS__)); \
    }                                                                     \
  } while (false)

#define SPARSEMLA_REQUIRE(condition, ...) \
  SPARSEMLA_CHECK(condition, ::sparsemla::StatusCode::kInvalidArgument, __VA_ARGS__)

#define SPARSEMLA_RETURN_IF_ERROR(expression)                        \
  do {                                                               \
    if (::sparsemla::Status status_ = (expression); !status_.ok()) { \
      return status_;                                                \
    }                                                                \
  } while (false)
