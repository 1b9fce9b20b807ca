// The matrix unit of AMX as functions: eight tile registers of 16 rows of 64 bytes. In assembly, so
// that no compiler flag is needed and every load and store is seen as touching memory (g++ 12's
// intrinsics name too little of it). With SPARSEMLA_EMULATE_AMX the same functions work on memory
// and check what the hardware takes for granted, so that the kernels are tested on any machine with
// AVX-512. Formulas: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2,
// TDPBF16PS, TILELOADD, LDTILECFG.
#pragma once

#include <cstdint>

#include "cpu/amx_emulator.h"

namespace sparsemla::cpu {

inline constexpr int kTileRows = 16;
inline constexpr int kTileRowBytes = 64;
inline constexpr int kTileBytes = kTileRows * kTileRowBytes;

// The operand of LDTILECFG. All tiles are 16 x 64 bytes, but for the copy tile, whose rows vary.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline constexpr int kCopyTile = 7;

namespace {

// Ends with ReleaseTiles: a live configuration makes the system save 8 KB at every switch.
inline void ConfigureTiles(int copy_tile_rows) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = kTileRowBytes;
    config.rows[t] = static_cast<uint8_t>(t == kCopyTile ? copy_tile_rows : kTileRows);
  }
#if defined(SPARSEMLA_EMULATE_AMX)
  EmulatedTiles().Configure(config.row_bytes, config.rows);
#else
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
#endif
}

inline void ReleaseTiles() {
#if defined(SPARSEMLA_EMULATE_AMX)
  EmulatedTiles().Release();
#else
  asm volatile("tilerelease" : : : "memory");
#endif
}

template <int kTile>
inline __attribute__((always_inline)) void ZeroTile() {
#if defined(SPARSEMLA_EMULATE_AMX)
  EmulatedTiles().Zero(kTile);
#else
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
#endif
}

// Loads the tile's rows from memory, `stride` bytes apart.
template <int kTile>
inline __attribute__((always_inline)) void LoadTile(const void* source, int64_t stride) {
#if defined(SPARSEMLA_EMULATE_AMX)
  EmulatedTiles().Load(kTile, source, stride);
#else
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(source), "r"(stride), "i"(kTile) : "memory");
#endif
}

// The same past L1: what is read from L2 once does not push the operand that stays out of L1.
template <int kTile>
inline __attribute__((always_inline)) void StreamTile(const void* source, int64_t stride) {
#if defined(SPARSEMLA_EMULATE_AMX)
  EmulatedTiles().Load(kTile, source, stride);
#else
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
               :
               : "r"(source), "r"(stride), "i"(kTile)
               : "memory");
#endif
}

template <int kTile>
inline __attribute__((always_inline)) void StoreTile(void* target, int64_t stride) {
#if defined(SPARSEMLA_EMULATE_AMX)
  EmulatedTiles().Store(kTile, target, stride);
#else
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
               :
               : "r"(target), "r"(stride), "i"(kTile)
               : "memory");
#endif
}

// c[m, n] += sum over k of a[m, 2k] b[k, 2n] + a[m, 2k + 1] b[k, 2n + 1]: bfloat16 operands, float
// sums. Subnormal operands count as zero.
template <int kC, int kA, int kB>
inline __attribute__((always_inline)) void MultiplyTiles() {
#if defined(SPARSEMLA_EMULATE_AMX)
  EmulatedTiles().MultiplyBFloat16(kC, kA, kB);
#else
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
#endif
}

}  // namespace

}  // namespace sparsemla::cpu
