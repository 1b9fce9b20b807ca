// Files of the tool: whole or not at all.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "sparsemla/status.h"

namespace sparsemla::trace {

// `text` made fit for one line of a message: control characters replaced, long texts shortened,
// in double quotes.
std::string Quoted(std::string_view text);

// The same status with "path: " before its message.
Status AtPath(std::string_view path, const Status& status);

// Writes the parts one after the other to a new file beside `path` and renames it to `path` when
// all is written, so a reader sees the old file or the complete new one. Nothing is left on an
// error.
Status WriteFileAtomically(const std::string& path, std::span<const std::string_view> parts);

}  // namespace sparsemla::trace
