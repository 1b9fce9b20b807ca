// Included inside a target region and an anonymous namespace, after stages_vector_deps.h and the
// constant kLanes. No guard.
//
// Index conversion and the sum of the merge, on vectors of kLanes elements.

#include "cpu/vector_types.h"

// ---- index conversion ---------------------------------------------------------------------------

// Positions looked up between two vector loops: their block numbers stay in L1.
constexpr int64_t kConvertChunk = 512;
// So many bytes ahead the next entries are asked for.
constexpr int64_t kPrefetchBytes = 4096;

typedef int32_t HalfInts __attribute__((vector_size(2 * kLanes)));
typedef uint32_t HalfWords __attribute__((vector_size(2 * kLanes)));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Quad __attribute__((vector_size(16)));

// Block numbers of kLanes positions; 0 for those outside [0, max_blocks).
SPARSEMLA_INLINE void StoreBlocks(const SlotRule& rule, double inverse, const int32_t* positions,
                                  uint32_t* blocks) {
  if (rule.shift >= 0) {
    const Words block = reinterpret_cast<Words>(Load<Ints>(positions) >> rule.shift);
    return Store(blocks, block < rule.max_blocks ? block : Words{});
  }
  for (int half = 0; half < 2; ++half) {
    const auto n = Load<HalfInts>(positions + half * (kLanes / 2));
    // (n + 0.5) / d is at least 0.5 / d away from a whole number, well above the rounding errors of
    // any n < 2^31.
    const Doubles quotient = __builtin_convertvector(n, Doubles) * inverse + 0.5 * inverse;
    const auto block = reinterpret_cast<HalfWords>(__builtin_convertvector(quotient, HalfInts));
    Store(blocks + half * (kLanes / 2), block < rule.max_blocks ? block : HalfWords{});
  }
}

// kCount entries of the table. Loads one by one beat the gather instructions of the CPUs measured,
// as long as the vector is put together in registers.
template <int kCount>
SPARSEMLA_INLINE auto LookUp(const int32_t* table, const uint32_t* indices) {
  if constexpr (kCount == 4) {
    uint64_t pairs[2];
    __builtin_memcpy(pairs, indices, sizeof(pairs));
    const auto at = [table](uint64_t index) { return static_cast<uint32_t>(table[index]); };
    return Quad{at(pairs[0] & 0xFFFFFFFFu), at(pairs[0] >> 32), at(pairs[1] & 0xFFFFFFFFu),
                at(pairs[1] >> 32)};
  } else {
    const auto low = LookUp<kCount / 2>(table, indices);
    const auto high = LookUp<kCount / 2>(table, indices + kCount / 2);
    if constexpr (kCount == 8) {
      return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
    } else {
      return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                     15);
    }
  }
}

SPARSEMLA_INLINE const void* Ahead(const void* data) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(data) + kPrefetchBytes);
}

// Converts `count` positions, a multiple of kLanes and at most kConvertChunk; counts in each lane
// those that name a row.
SPARSEMLA_INLINE Words ConvertChunk(const SlotRule& rule, double inverse, const int32_t* positions,
                                    int64_t count, int32_t* slots) {
  alignas(64) uint32_t blocks[kConvertChunk];
  for (int64_t i = 0; i < count; i += kLanes) {
    StoreBlocks(rule, inverse, positions + i, blocks + i);
  }
  // In registers: the compiler must take `slots` for something that may overlap the rule.
  const int32_t* const table = rule.blocks;
  const Words num_blocks = Words{} + rule.num_blocks;
  const Words block_stride = Words{} + rule.block_stride;
  const Words block_size = Words{} + rule.block_size;
  const Words invalid = Words{} + static_cast<uint32_t>(rule.invalid_slot);
  Words num_valid = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    __builtin_prefetch(Ahead(positions + i), 0, 3);
    __builtin_prefetch(Ahead(slots + i), 1, 3);
    const Words mapped = LookUp<kLanes>(table, blocks + i);
    // A position that is negative or beyond the table was looked up in block 0: its offset is too
    // large for that.
    const Words offset = Load<Words>(positions + i) - Load<Words>(blocks + i) * block_size;
    const Words slot = mapped * block_stride + offset;
    const auto valid = (offset < block_size) & (mapped < num_blocks);
    num_valid -= reinterpret_cast<Words>(valid);
    Store(slots + i, valid ? slot : invalid);
  }
  return num_valid;
}

SPARSEMLA_INLINE int64_t SumLanes(Words lanes) {
  int64_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
}

// How many of `count` entries are not negative.
int64_t CountValid(const int32_t* entries, int64_t count) {
  constexpr int kSums = 4;
  Words negative[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= count; i += kSums * kLanes) {
    for (int s = 0; s < kSums; ++s) negative[s] += Load<Words>(entries + i + s * kLanes) >> 31;
  }
  int64_t num_valid = i - SumLanes(negative[0] + negative[1]) - SumLanes(negative[2] + negative[3]);
  for (; i < count; ++i) num_valid += entries[i] >= 0;
  return num_valid;
}

int64_t ConvertPositions(const SlotRule& rule, const int32_t* positions, int64_t count,
                         int32_t* slots) {
  const double inverse = 1.0 / rule.block_size;
  Words num_valid = {};
  const int64_t whole = count - count % kLanes;
  for (int64_t begin = 0; begin < whole; begin += kConvertChunk) {
    const int64_t size = whole - begin < kConvertChunk ? whole - begin : kConvertChunk;
    num_valid += ConvertChunk(rule, inverse, positions + begin, size, slots + begin);
  }
  if (whole < count) {
    alignas(64) int32_t tail[kLanes];
    alignas(64) int32_t tail_slots[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) tail[i] = i < count - whole ? positions[whole + i] : -1;
    num_valid += ConvertChunk(rule, inverse, tail, kLanes, tail_slots);
    for (int64_t i = whole; i < count; ++i) slots[i] = tail_slots[i - whole];
  }
  return SumLanes(num_valid);
}

// ---- merge --------------------------------------------------------------------------------------

// One group of kVectors vectors of columns, or of single columns.
template <int kVectors, typename T>
SPARSEMLA_INLINE void SumTile(const WeightedSum& sum, int64_t column, T* out) {
  Floats total[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    total[v] = sum.carry == nullptr ? Floats{} : Load<Floats>(sum.carry + column + v * kLanes);
  }
  for (int64_t p = 0; p < sum.num_pieces; ++p) {
    const float* const values = sum.values[p] + column;
    const Floats weight = Broadcast(sum.weights[p]);
    for (int v = 0; v < kVectors; ++v) {
      // The same columns of the next head, which usually come next.
      __builtin_prefetch(values + v * kLanes + sum.num_columns, 0, 3);
      total[v] = weight * Load<Floats>(values + v * kLanes) + total[v];
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    Store(out + column + v * kLanes, NarrowVector(T{}, total[v] * sum.factor));
  }
}

template <typename T>
void SumColumns(const WeightedSum& sum) {
  constexpr int kTile = kLanes == 16 ? 16 : 8;  // at most half of the registers
  T* const out = static_cast<T*>(sum.out);
  int64_t column = 0;
  for (; column + kTile * kLanes <= sum.num_columns; column += kTile * kLanes) {
    SumTile<kTile>(sum, column, out);
  }
  for (; column + kLanes <= sum.num_columns; column += kLanes) SumTile<1>(sum, column, out);
  for (; column < sum.num_columns; ++column) {
    float total = sum.carry == nullptr ? 0.0f : sum.carry[column];
    for (int64_t p = 0; p < sum.num_pieces; ++p) {
      total = sum.weights[p] * sum.values[p][column] + total;
    }
    out[column] = FromFloat<T>(total * sum.factor);
  }
}

void SumPieces(const WeightedSum& sum) {
  switch (sum.out_dtype) {
    case DType::kBFloat16:
      return SumColumns<BFloat16>(sum);
    case DType::kFloat16:
      return SumColumns<Float16>(sum);
    default:
      return SumColumns<float>(sum);
  }
}

#undef SPARSEMLA_INLINE
