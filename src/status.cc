#include "sparsemla/status.h"

namespace sparsemla {

std::string_view StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kFailedPrecondition:
      return "failed precondition";
    case StatusCode::kResourceExhausted:
      return "resource exhausted";
    case StatusCode::kDeviceError:
      return "device error";
    case StatusCode::kInternal:
      break;
  }
  return "internal error";
}

}  // namespace sparsemla
