#include "trace/compare.h"

#include <algorithm>
#include <cmath>

#include "core/numeric.h"
#include "core/require.h"

namespace sparsemla::trace {
namespace {

double RelativeOf(DType model_dtype) {
  switch (model_dtype) {
    case DType::kBFloat16:
      return 6e-3;
    case DType::kFloat16:
      return 1e-3;
    default:
      return 1e-5;
  }
}

double RelativeOf(CacheFormat format) {
  switch (format) {
    case CacheFormat::kFp8E4M3:
    case CacheFormat::kFp8E4M3Fnuz:
      return 4e-2;
    case CacheFormat::kBFloat16:
    case CacheFormat::kFp8DsMla:
      return 6e-3;
    case CacheFormat::kFloat16:
      return 1e-3;
    default:
      return 1e-5;
  }
}

// NaN beside NaN, an infinity beside the same one, or both finite.
bool SameKind(float got, float expected) {
  if (std::isnan(expected)) return std::isnan(got);
  if (std::isinf(expected)) return got == expected;
  return std::isfinite(got);
}

float Element(const ConstTensor<3>& tensor, int64_t token, int64_t head, int64_t column) {
  const int64_t offset =
      token * tensor.strides[0] + head * tensor.strides[1] + column * tensor.strides[2];
  return VisitDType(tensor.dtype, [&]<typename T>() {
    return ToFloat(static_cast<const T*>(tensor.data)[offset]);
  });
}

template <size_t Rank>
std::string SizesDiffer(const std::array<int64_t, Rank>& got,
                        const std::array<int64_t, Rank>& expected) {
  std::string text = "sizes are";
  for (const int64_t size : got) text += StrCat(" ", size);
  text += ", expected";
  for (const int64_t size : expected) text += StrCat(" ", size);
  return text;
}

// One row of `out` against its expected values.
struct RowError {
  double difference = 0;  // squared 2-norms of the finite elements
  double norm = 0;
  int64_t worst_column = 0;
  bool same_kinds = true;
};

RowError CompareRow(const ConstTensor<3>& out, const View<const float, 3>& expected, int64_t token,
                    int64_t head) {
  RowError row;
  double worst = -1;
  for (int64_t column = 0; column < expected.shape[2]; ++column) {
    const float got = Element(out, token, head, column);
    const float want = expected(token, head, column);
    if (!SameKind(got, want)) {
      row.worst_column = column;
      row.same_kinds = false;
      return row;
    }
    if (!std::isfinite(want)) continue;
    const double difference = double{got} - double{want};
    row.difference += difference * difference;
    row.norm += double{want} * double{want};
    if (std::abs(difference) > worst) {
      worst = std::abs(difference);
      row.worst_column = column;
    }
  }
  return row;
}

}  // namespace

Tolerance ToleranceFor(CacheFormat cache_format, DType model_dtype) {
  Tolerance tolerance;
  tolerance.out_relative = std::max(RelativeOf(cache_format), RelativeOf(model_dtype));
  if (IsPerTensorFp8(cache_format)) tolerance.lse_absolute = 2e-2;
  return tolerance;
}

Comparison CompareOut(const ConstTensor<3>& out, const View<const float, 3>& expected,
                      const Tolerance& tolerance) {
  Comparison result;
  if (out.shape != expected.shape) {
    result.mismatch = SizesDiffer(out.shape, expected.shape);
    return result;
  }
  for (int64_t token = 0; token < expected.shape[0]; ++token) {
    for (int64_t head = 0; head < expected.shape[1]; ++head) {
      const RowError row = CompareRow(out, expected, token, head);
      const double error = std::sqrt(row.difference) /
                           (std::sqrt(row.norm) + tolerance.out_absolute / tolerance.out_relative);
      result.error = std::max(result.error, error);
      if ((row.same_kinds && error <= tolerance.out_relative) || !result.ok()) continue;
      result.mismatch = StrCat("token ", token, ", head ", head, ", column ", row.worst_column,
                               ": got ", Element(out, token, head, row.worst_column), ", expected ",
                               expected(token, head, row.worst_column));
      if (row.same_kinds) result.mismatch += StrCat(" (error of the row ", error, ")");
    }
  }
  return result;
}

Comparison CompareLse(const View<const float, 2>& lse, const View<const float, 2>& expected,
                      const Tolerance& tolerance) {
  Comparison result;
  if (lse.shape != expected.shape) {
    result.mismatch = SizesDiffer(lse.shape, expected.shape);
    return result;
  }
  for (int64_t token = 0; token < expected.shape[0]; ++token) {
    for (int64_t head = 0; head < expected.shape[1]; ++head) {
      const float got = lse(token, head);
      const float want = expected(token, head);
      bool right = SameKind(got, want);
      if (right && std::isfinite(want)) {
        const double error =
            std::abs(double{got} - double{want}) /
            (1 + tolerance.lse_relative / tolerance.lse_absolute * std::abs(double{want}));
        result.error = std::max(result.error, error);
        right = error <= tolerance.lse_absolute;
      }
      if (right || !result.ok()) continue;
      result.mismatch =
          StrCat("token ", token, ", head ", head, ": got ", got, ", expected ", want);
    }
  }
  return result;
}

Comparison CompareInts(std::span<const int32_t> got, std::span<const int32_t> expected) {
  Comparison result;
  const auto [g, e] = std::mismatch(got.begin(), got.end(), expected.begin(), expected.end());
  if (g != got.end() && e != expected.end()) {
    result.mismatch = StrCat("entry ", g - got.begin(), ": got ", *g, ", expected ", *e);
  } else if (got.size() != expected.size()) {
    result.mismatch = StrCat(got.size(), " entries, expected ", expected.size());
  }
  return result;
}

}  // namespace sparsemla::trace
