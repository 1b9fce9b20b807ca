// Matrices of int32 for tests of the index stages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sparsemla/types.h"

namespace sparsemla::test {

inline constexpr int32_t kGuard = 0x5EED5EED;
using Rows = std::vector<std::vector<int32_t>>;

// A matrix whose elements are apart in memory; the gaps hold guard words.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t columns, int64_t column_stride = 1, int64_t row_gap = 0)
      : rows_(rows),
        columns_(columns),
        column_stride_(column_stride),
        row_stride_(columns * column_stride + row_gap),
        words_(static_cast<size_t>(rows * row_stride_ + 1), kGuard) {}
  // NOLINTNEXTLINE: implicit, so that tests can write literals
  Matrix(const Rows& rows, int64_t column_stride = 1, int64_t row_gap = 0)
      : Matrix(static_cast<int64_t>(rows.size()),
               rows.empty() ? 0 : static_cast<int64_t>(rows[0].size()), column_stride, row_gap) {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < columns_; ++c) {
        view()(r, c) = rows[static_cast<size_t>(r)][static_cast<size_t>(c)];
      }
    }
  }

  View<int32_t, 2> view() {
    return {words_.data(), {rows_, columns_}, {row_stride_, column_stride_}};
  }
  View<const int32_t, 2> view() const {
    return {words_.data(), {rows_, columns_}, {row_stride_, column_stride_}};
  }
  Rows rows() const {
    Rows copy(static_cast<size_t>(rows_));
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < columns_; ++c) copy[static_cast<size_t>(r)].push_back(view()(r, c));
    }
    return copy;
  }
  bool GapsAreIntact() const {
    return std::count(words_.begin(), words_.end(), kGuard) ==
           static_cast<int64_t>(words_.size()) - rows_ * columns_;
  }

 private:
  int64_t rows_;
  int64_t columns_;
  int64_t column_stride_;
  int64_t row_stride_;
  std::vector<int32_t> words_;
};

}  // namespace sparsemla::test
