// AMX's tiles in plain memory, for tests on machines without them: compiled in with
// SPARSEMLA_EMULATE_AMX only. What the hardware answers with a fault ends the program with a trap;
// tiles that were never written hold NaN.
#pragma once

#if defined(SPARSEMLA_EMULATE_AMX)

#include <cstdint>
#include <cstring>

namespace sparsemla::cpu {

class TileEmulator {
 public:
  void Configure(const uint16_t* row_bytes, const uint8_t* rows) {
    for (int t = 0; t < kTiles; ++t) {
      Require(rows[t] >= 1 && rows[t] <= kRows && row_bytes[t] == 4 * kColumns);
      rows_[t] = rows[t];
      std::memset(words_[t], 0xFF, sizeof(words_[t]));
    }
    configured_ = true;
  }
  void Release() { configured_ = false; }

  void Zero(int t) {
    Require(configured_);
    std::memset(words_[t], 0, sizeof(words_[t]));
  }
  void Load(int t, const void* source, int64_t stride) {
    Require(configured_);
    std::memset(words_[t], 0, sizeof(words_[t]));
    for (int r = 0; r < rows_[t]; ++r) {
      std::memcpy(words_[t][r], static_cast<const char*>(source) + r * stride, 4 * kColumns);
    }
  }
  void Store(int t, void* target, int64_t stride) const {
    Require(configured_);
    for (int r = 0; r < rows_[t]; ++r) {
      std::memcpy(static_cast<char*>(target) + r * stride, words_[t][r], 4 * kColumns);
    }
  }
  // The sums of even and of odd positions are kept apart and added at the end.
  void MultiplyBFloat16(int c, int a, int b) {
    Require(configured_ && rows_[c] == kRows && rows_[a] == kRows && rows_[b] == kRows);
    for (int m = 0; m < kRows; ++m) {
      float even[kColumns] = {};
      float odd[kColumns] = {};
      for (int k = 0; k < kColumns; ++k) {
        const float a_even = Even(words_[a][m][k]);
        const float a_odd = Odd(words_[a][m][k]);
        for (int n = 0; n < kColumns; ++n) {
          even[n] += a_even * Even(words_[b][k][n]);
          odd[n] += a_odd * Odd(words_[b][k][n]);
        }
      }
      for (int n = 0; n < kColumns; ++n) {
        float sum;
        std::memcpy(&sum, &words_[c][m][n], sizeof(sum));
        sum += even[n] + odd[n];
        std::memcpy(&words_[c][m][n], &sum, sizeof(sum));
      }
    }
  }

 private:
  static constexpr int kTiles = 8;
  static constexpr int kRows = 16;
  static constexpr int kColumns = 16;  // words of 4 bytes

  static void Require(bool condition) {
    if (!condition) __builtin_trap();
  }
  static float Widened(uint32_t bits) {
    if ((bits & 0x7F800000u) == 0) bits &= 0x80000000u;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static float Even(uint32_t word) { return Widened(word << 16); }
  static float Odd(uint32_t word) { return Widened(word & 0xFFFF0000u); }

  uint32_t words_[kTiles][kRows][kColumns] = {};
  int rows_[kTiles] = {};
  bool configured_ = false;
};

inline TileEmulator& EmulatedTiles() {
  static thread_local TileEmulator tiles;
  return tiles;
}

}  // namespace sparsemla::cpu

#endif
