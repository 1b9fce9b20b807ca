// Included inside a target region and an anonymous namespace, where kLanes is known. No guard.
//
// What every kernel does to an item beside its products: reading the query, finding the rows,
// writing a head.

#include "cpu/vector_types.h"

// ---- the query ----------------------------------------------------------------------------------

constexpr int kQueryColumns = 32;  // read at a time: transposed, their lines stay in L1

// Rounds to the nearest e4m3 code, saturating, and gives the code's value: what FromFloat and
// ToFloat of numeric.h give for finite values and NaN, but for the sign of zero.
SPARSEMLA_INLINE Floats QuantiseVector(Floats x, int bias, float largest) {
  const Words sign = AsWords(x) & 0x80000000u;
  Floats magnitude = AsFloats(AsWords(x) & 0x7FFFFFFFu);
  magnitude = magnitude > largest ? Broadcast(largest) : magnitude;
  const Words bits = AsWords(magnitude);
  const Floats normal = AsFloats((bits + 0x7FFFFu + ((bits >> 20) & 1u)) & 0xFFF00000u);
  // The last mantissa bit of 2^(21 - bias) is the subnormal step.
  const Floats aligner = AsFloats(Words{} + (static_cast<uint32_t>(148 - bias) << 23));
  const Floats subnormal = (magnitude + aligner) - aligner;
  const Ints order = reinterpret_cast<Ints>(bits);
  Floats value = order < ((128 - bias) << 23) ? subnormal : normal;
  value = magnitude == magnitude ? value : magnitude;
  return AsFloats(AsWords(value) | sign);
}

SPARSEMLA_INLINE int64_t ElementBytes(DType dtype) {
  if (dtype == DType::kFloat32) return 4;
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2 : 1;
}

SPARSEMLA_INLINE void QuantiseTile(const AttentionCall& call, float* tile) {
  const bool fnuz = call.cache_format == CacheFormat::kFp8E4M3Fnuz;
  for (int i = 0; i < kQueryColumns; i += kLanes) {
    const Floats x = Load<Floats>(tile + i) * call.quantise_scale;
    Store(tile + i, fnuz ? QuantiseVector(x, 8, 224.0f) : QuantiseVector(x, 7, 448.0f));
  }
}

// Where head `head` of the item has its columns from `begin` on: at most kQueryColumns, of one
// part.
struct QueryColumns {
  const std::byte* data = nullptr;
  int64_t count = 0;
  int64_t head_stride_bytes = 0;
  DType dtype = DType::kFloat32;
};

SPARSEMLA_INLINE QueryColumns FindQueryColumns(const AttentionCall& call, const AttentionItem& item,
                                               int64_t begin) {
  const int64_t rank = call.dims.kv_lora_rank;
  const bool latent = begin < rank;
  const QueryPart& part = latent ? call.latent : call.rope;
  int64_t count = (latent ? rank : call.dims.head_dim_qk()) - begin;
  if (count > kQueryColumns) count = kQueryColumns;
  return {.data = part.data + item.row * part.row_stride_bytes +
                  item.head_begin * part.head_stride_bytes +
                  (latent ? begin : begin - rank) * ElementBytes(part.dtype),
          .count = count,
          .head_stride_bytes = part.head_stride_bytes,
          .dtype = part.dtype};
}

// Widens `count` columns of one head, quantised where the cache says so.
SPARSEMLA_INLINE void ReadQueryColumns(const AttentionCall& call, const QueryColumns& columns,
                                       const std::byte* data, float* tile) {
  WidenElements(columns.dtype, data, columns.count, tile);
  if (call.quantise_scale != 0.0f) QuantiseTile(call, tile);
}

// ---- cache rows ---------------------------------------------------------------------------------

// The valid rows of an item, a block at a time.
class RowCursor {
 public:
  SPARSEMLA_INLINE RowCursor(const AttentionCall& call, const AttentionItem& item)
      : call_(call), slot_(item.slots), end_(item.slots + item.num_slots) {}

  // Writes the addresses of the next rows, at most `limit`, and returns how many there are, 0 at
  // the end.
  SPARSEMLA_INLINE int Next(const std::byte** rows, int limit) {
    int count = 0;
    for (; slot_ != end_ && count < limit; ++slot_) {
      if (*slot_ < 0 || *slot_ >= call_.num_slots) continue;
      rows[count++] = call_.cache + *slot_ * call_.cache_row_stride_bytes;
    }
    return count;
  }

 private:
  const AttentionCall& call_;
  const int32_t* slot_;
  const int32_t* end_;
};

// ---- the result ---------------------------------------------------------------------------------

// What the softmax of a head has come to: weights are 2^(logit - max_log2).
struct HeadState {
  float max_log2 = 0.0f;
  float sum = 0.0f;      // of the weights; 0: no keys, or logits of -inf only
  float divisor = 0.0f;  // of the weights as they multiplied the values
};

// Writes the lse of head `h` of the item, sink included where the row is whole, and returns what
// its values are to be multiplied with.
SPARSEMLA_INLINE float FinishHead(const AttentionCall& call, const AttentionItem& item, int64_t h,
                                  const HeadState& state) {
  float lse = -INFINITY;
  float factor = 0.0f;
  if (state.sum != 0.0f) {
    constexpr double kLn2 = 0.69314718055994530942;
    lse = static_cast<float>(kLn2 * static_cast<double>(state.max_log2) +
                             log(static_cast<double>(state.sum)));
    factor = call.value_scale / state.divisor;
  }
  if (item.partial_out != nullptr) {
    item.partial_lse[h] = lse;
    return factor;
  }
  const int64_t head = item.head_begin + h;
  if (call.sinks != nullptr) {
    const float total = LogAddExp(lse, call.sinks[head]);
    factor *= MergeWeight(lse, total);
    lse = total;
  }
  if (call.lse != nullptr) {
    call.lse[item.row * call.lse_strides[0] + head * call.lse_strides[1]] = lse;
  }
  return factor;
}

// Where head `h` of the item begins in `out`, in elements.
SPARSEMLA_INLINE int64_t OutOffset(const AttentionCall& call, const AttentionItem& item,
                                   int64_t h) {
  return item.row * call.out_strides[0] + (item.head_begin + h) * call.out_strides[1];
}

// Normalises and writes head `h` of the item from its values [kv_lora_rank].
void WriteHead(const AttentionCall& call, const AttentionItem& item, int64_t h,
               const HeadState& state, float* values) {
  const int64_t rank = call.dims.kv_lora_rank;
  if (state.sum == 0.0f) {
    for (int64_t d = 0; d < rank; ++d) values[d] = 0.0f;
  }
  const float factor = FinishHead(call, item, h, state);
  if (item.partial_out != nullptr) {
    return NarrowRow<float>(values, rank, factor, item.partial_out + h * rank);
  }
  const int64_t offset = OutOffset(call, item, h);
  switch (call.out_dtype) {
    case DType::kBFloat16:
      return NarrowRow<BFloat16>(values, rank, factor, static_cast<BFloat16*>(call.out) + offset);
    case DType::kFloat16:
      return NarrowRow<Float16>(values, rank, factor, static_cast<Float16*>(call.out) + offset);
    default:
      return NarrowRow<float>(values, rank, factor, static_cast<float*>(call.out) + offset);
  }
}
