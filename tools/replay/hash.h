// The one source of randomness of a replay: a value depends on what it is for, never on order or
// threads.
#pragma once

#include <cstdint>

namespace sparsemla::replay {

// A bijection without visible pattern (the finaliser of SplitMix64).
constexpr uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr uint64_t Mix(uint64_t a, uint64_t b) {
  return Mix(Mix(a) ^ b);
}
constexpr uint64_t Mix(uint64_t a, uint64_t b, uint64_t c) {
  return Mix(Mix(a, b) ^ c);
}

// A stream of such values.
class Random {
 public:
  explicit constexpr Random(uint64_t seed) : state_(seed) {}
  constexpr uint64_t Next() { return Mix(state_++); }
  // Uniform in [0, bound), bound >= 1.
  constexpr int32_t Below(int32_t bound) {
    return static_cast<int32_t>(((Next() >> 32) * static_cast<uint64_t>(bound)) >> 32);
  }
  constexpr double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

}  // namespace sparsemla::replay
