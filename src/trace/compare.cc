#include "trace/compare.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/numeric.h"
#include "core/require.h"

namespace sparsemla::trace {
namespace {

double OutRelative(CacheFormat format) {
  switch (format) {
    case CacheFormat::kFloat32:
      return 1e-5;
    case CacheFormat::kFloat16:
      return 1e-3;
    case CacheFormat::kBFloat16:
      return 6e-3;
    case CacheFormat::kFp8DsMla:
    case CacheFormat::kFp8E4M3:
    case CacheFormat::kFp8E4M3Fnuz:
      break;
  }
  return 4e-2;
}

void LoadRow(const ConstTensor<3>& tensor, int64_t token, int64_t head, std::vector<double>& row) {
  const int64_t offset = token * tensor.strides[0] + head * tensor.strides[1];
  VisitDType(tensor.dtype, [&]<typename T>() {
    const T* const data = static_cast<const T*>(tensor.data) + offset;
    for (size_t d = 0; d < row.size(); ++d) {
      row[d] = double{ToFloat(data[static_cast<int64_t>(d) * tensor.strides[2]])};
    }
  });
}

// Whether one value is finite and the other not, or they differ in kind.
bool DifferInKind(double got, double want) {
  if (std::isfinite(got) && std::isfinite(want)) return false;
  return std::isnan(want) ? !std::isnan(got) : got != want;
}

std::string Describe(int64_t token, int64_t head, double got, double want) {
  return StrCat("token ", token, ", head ", head, ": got ", got, ", want ", want);
}

struct RowError {
  double norm = 0.0;       // of the difference, over finite values
  double want_norm = 0.0;  // of the wanted row
  size_t worst_column = 0;
  bool differs_in_kind = false;  // at worst_column
};

RowError CompareRow(const std::vector<double>& got, const std::vector<double>& want) {
  RowError error;
  double sum = 0.0;
  double want_sum = 0.0;
  double worst = 0.0;
  for (size_t d = 0; d < want.size(); ++d) {
    if (DifferInKind(got[d], want[d])) {
      error.worst_column = d;
      error.differs_in_kind = true;
      return error;
    }
    if (!std::isfinite(want[d])) continue;
    const double difference = std::abs(got[d] - want[d]);
    if (difference > worst) {
      worst = difference;
      error.worst_column = d;
    }
    sum += difference * difference;
    want_sum += want[d] * want[d];
  }
  error.norm = std::sqrt(sum);
  error.want_norm = std::sqrt(want_sum);
  return error;
}

}  // namespace

Tolerance ToleranceFor(CacheFormat format, DType out_dtype) {
  const CacheFormat rounding = out_dtype == DType::kBFloat16  ? CacheFormat::kBFloat16
                               : out_dtype == DType::kFloat16 ? CacheFormat::kFloat16
                                                              : CacheFormat::kFloat32;
  Tolerance tolerance;
  tolerance.out_relative = std::max(OutRelative(format), OutRelative(rounding));
  if (IsPerTensorFp8(format)) tolerance.lse_absolute = 2e-2;
  if (format == CacheFormat::kFp8DsMla) {
    tolerance.lse_absolute = 2e-2;
    tolerance.lse_relative = 3e-3;
  }
  return tolerance;
}

Comparison CompareAnswers(const Answers& got, const Answers& want, int64_t num_tokens,
                          const Tolerance& tolerance) {
  Comparison result;
  const auto report = [&](const std::string& text) {
    if (result.first_mismatch.empty()) result.first_mismatch = text;
  };
  std::vector<double> got_row(static_cast<size_t>(want.out.shape[2]));
  std::vector<double> want_row(got_row.size());
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t h = 0; h < want.out.shape[1]; ++h) {
      LoadRow(got.out, t, h, got_row);
      LoadRow(want.out, t, h, want_row);
      const RowError error = CompareRow(got_row, want_row);
      const double allowed = tolerance.out_relative * error.want_norm + tolerance.out_absolute;
      if (std::isfinite(error.norm)) {
        result.worst_share = std::max(result.worst_share, error.norm / allowed);
      }
      if (error.differs_in_kind || error.norm > allowed) {
        const size_t d = error.worst_column;
        report(StrCat("token ", t, ", head ", h, ", column ", d, ": got ", got_row[d], ", want ",
                      want_row[d], " (row error ", error.norm, ", allowed ", allowed, ")"));
      }
      result.worst_out = std::max(
          result.worst_out, error.want_norm > 0.0 ? error.norm / error.want_norm : error.norm);
      if (got.lse.empty() || want.lse.empty()) continue;
      const double got_lse = got.lse(t, h);
      const double want_lse = want.lse(t, h);
      if (DifferInKind(got_lse, want_lse)) {
        report("lse, " + Describe(t, h, got_lse, want_lse));
      } else if (std::isfinite(want_lse)) {
        const double difference = std::abs(got_lse - want_lse);
        result.worst_lse = std::max(result.worst_lse, difference);
        const double lse_allowed =
            tolerance.lse_absolute + tolerance.lse_relative * std::abs(want_lse);
        result.worst_share = std::max(result.worst_share, difference / lse_allowed);
        if (difference > lse_allowed) {
          report("lse, " + Describe(t, h, got_lse, want_lse));
        }
      }
    }
  }
  return result;
}

}  // namespace sparsemla::trace
