#include "trace/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/require.h"

namespace sparsemla::trace {
namespace {

Status WriteAll(int descriptor, std::string_view part) {
  while (!part.empty()) {
    const ssize_t written = ::write(descriptor, part.data(), part.size());
    if (written < 0 && errno == EINTR) continue;
    SPARSEMLA_CHECK(written >= 0, StatusCode::kResourceExhausted,
                    "cannot write: ", std::strerror(errno));
    part.remove_prefix(static_cast<size_t>(written));
  }
  return {};
}

Status WriteAndClose(int descriptor, std::span<const std::string_view> parts) {
  Status status;
  for (const std::string_view part : parts) {
    if (status.ok()) status = WriteAll(descriptor, part);
  }
  if (::close(descriptor) != 0 && status.ok()) {
    status = Status(StatusCode::kResourceExhausted, StrCat("cannot write: ", std::strerror(errno)));
  }
  return status;
}

}  // namespace

std::string Quoted(std::string_view text) {
  constexpr size_t kMaxLength = 80;
  std::string quoted = "\"";
  for (const char c : text.substr(0, kMaxLength)) {
    const auto byte = static_cast<unsigned char>(c);
    quoted += byte < 0x20 || byte == 0x7F ? '?' : c;
  }
  return quoted + (text.size() > kMaxLength ? "...\"" : "\"");
}

Status AtPath(std::string_view path, const Status& status) {
  return status.ok() ? Status() : Status(status.code(), StrCat(path, ": ", status.message()));
}

Status WriteFileAtomically(const std::string& path, std::span<const std::string_view> parts) {
  struct stat existing = {};
  SPARSEMLA_REQUIRE(::stat(path.c_str(), &existing) != 0 || S_ISREG(existing.st_mode), path,
                    ": exists and is not a regular file");
  const std::string temporary = StrCat(path, ".", ::getpid(), ".tmp");
  const int descriptor = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  SPARSEMLA_REQUIRE(descriptor >= 0, path, ": cannot create: ", std::strerror(errno));
  Status status = WriteAndClose(descriptor, parts);
  if (status.ok() && std::rename(temporary.c_str(), path.c_str()) != 0) {
    status = Status(StatusCode::kInvalidArgument, StrCat("cannot rename: ", std::strerror(errno)));
  }
  if (!status.ok()) ::unlink(temporary.c_str());
  return AtPath(path, status);
}

}  // namespace sparsemla::trace
