// The vector code of the memory-bound stages, once for every instruction set. convert_indices.cc
// and merge.cc call it; each row of the table is defined in stages_<isa>.cc.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "sparsemla/types.h"

namespace sparsemla::cpu {

// How many of `count` entries are valid, that is, not negative.
using CountFunction = int64_t (*)(const int32_t* entries, int64_t count);

// How the positions of one request become slots.
struct SlotRule {
  const int32_t* blocks = nullptr;  // [max_blocks], adjacent, max_blocks >= 1
  uint32_t max_blocks = 0;
  uint32_t num_blocks = 0;    // of the cache
  uint32_t block_stride = 0;  // in rows
  uint32_t block_size = 0;
  int32_t shift = 0;          // log2(block_size), or -1
  int32_t invalid_slot = -1;  // for positions that name no row
};

// Converts `count` positions; returns how many of them name a row.
using ConvertFunction = int64_t (*)(const SlotRule& rule, const int32_t* positions, int64_t count,
                                    int32_t* slots);

// out = (carry + sum over pieces p of weights[p] * values[p]) * factor, column by column, summed in
// the order of the pieces and rounded to nearest even.
struct WeightedSum {
  const float* const* values = nullptr;  // [num_pieces] of [num_columns]
  const float* weights = nullptr;        // [num_pieces]
  int64_t num_pieces = 0;
  int64_t num_columns = 0;
  const float* carry = nullptr;  // [num_columns], or null: 0
  float factor = 1.0f;
  DType out_dtype = DType::kFloat32;  // fp32, bf16 or fp16
  void* out = nullptr;                // [num_columns]; may be `carry`
};
using SumFunction = void (*)(const WeightedSum& sum);

struct StageKernels {
  ArchFlags arch = kAnyCpu;  // what they need
  CountFunction count = nullptr;
  ConvertFunction convert = nullptr;
  SumFunction sum = nullptr;
};

#define SPARSEMLA_STAGE_KERNELS(isa)                                                   \
  int64_t count_##isa(const int32_t* entries, int64_t count);                          \
  int64_t convert_##isa(const SlotRule& rule, const int32_t* positions, int64_t count, \
                        int32_t* slots);                                               \
  void sum_##isa(const WeightedSum& sum);
SPARSEMLA_STAGE_KERNELS(avx512)
SPARSEMLA_STAGE_KERNELS(avx2)
SPARSEMLA_STAGE_KERNELS(portable)
#undef SPARSEMLA_STAGE_KERNELS

// The best ones beside an attention kernel that needs `arch`: those of this machine that need no
// newer instruction set, that is, no higher bit. A forced attention kernel so forces the stages'.
const StageKernels& SelectStageKernels(ArchFlags arch);

}  // namespace sparsemla::cpu
