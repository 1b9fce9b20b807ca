// Errors as values. Every call of the library that can fail returns a Status or a Result<T>; the
// library throws nothing of its own, prints nothing and never aborts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#pragma GCC visibility push(default)
namespace sparsemla {

// The values are part of the C ABI (sparsemla.h) and never change.
enum class StatusCode : int32_t {
  kOk = 0,
  kInvalidArgument = 1,  // a value is out of its bounds; the message names both
  kUnsupported = 2,      // a valid problem that this back end does not solve; the message says why
  kFailedPrecondition = 3,  // calls in a wrong order, or a plan that was made for other inputs
  kResourceExhausted = 4,   // memory, capacity or workspace too small
  kDeviceError = 5,         // a driver or device reported an error
  kInternal = 6,            // a defect of the library
};

// The name of a code, as printed by the tool: "invalid argument".
std::string_view StatusCodeName(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }  // empty when ok()

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}       // NOLINT: implicit
  Result(Status error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit

  bool ok() const { return state_.index() == 0; }
  Status status() const { return ok() ? Status() : std::get<1>(state_); }

  // Only after ok(); otherwise the behaviour is undefined.
  T& value() & { return *std::get_if<0>(&state_); }
  const T& value() const& { return *std::get_if<0>(&state_); }
  T&& value() && { return std::move(*std::get_if<0>(&state_)); }
  T* operator->() { return std::get_if<0>(&state_); }
  const T* operator->() const { return std::get_if<0>(&state_); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace sparsemla
#pragma GCC visibility pop
