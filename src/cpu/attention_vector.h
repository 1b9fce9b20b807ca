// Included inside a target region and an anonymous namespace, after attention_vector_deps.h and the
// constants kLanes, kPvHeads, kPvVectors and, for logits, kQkKeys of kQkVectors vectors of heads or
// kQkKeysOfOne of one (at most 16: g++ unrolls no more and would keep the sums in memory). No
// guard.
//
// One work item on vectors of kLanes floats. Per block of keys: the valid cache rows are widened to
// float once, for all heads; logits are a product with lanes = heads (the query lies transposed, a
// key's element is broadcast); the softmax is vertical; the output is a product with lanes =
// columns (a weight is broadcast). All sums are float, in an order that depends on the item alone.

#include "cpu/vector_types.h"

// ---- the query ----------------------------------------------------------------------------------

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

constexpr int kQueryColumns = 32;  // columns transposed at a time: their lines stay in L1

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

// Fills scratch.queries: widened, quantised where the cache says so, transposed. Heads of the
// padding are zero.
void LoadQueries(const AttentionCall& call, const AttentionItem& item,
                 const AttentionScratch& scratch) {
  const int64_t rank = call.dims.kv_lora_rank;
  const int64_t width = call.dims.head_dim_qk();
  alignas(64) float tile[kQueryColumns] = {};
  for (int64_t begin = 0; begin < width;) {
    const bool latent = begin < rank;
    const QueryPart& part = latent ? call.latent : call.rope;
    int64_t count = (latent ? rank : width) - begin;
    if (count > kQueryColumns) count = kQueryColumns;
    const std::byte* source = part.data + item.row * part.row_stride_bytes +
                              item.head_begin * part.head_stride_bytes +
                              (latent ? begin : begin - rank) * ElementBytes(part.dtype);
    float* const target = scratch.queries + begin * scratch.head_stride;
    for (int64_t h = 0; h < scratch.head_stride; ++h) {
      if (h < item.num_heads) {
        WidenElements(part.dtype, source, count, tile);
        if (call.quantise_scale != 0.0f) QuantiseTile(call, tile);
        source += part.head_stride_bytes;
      } else {
        for (float& element : tile) element = 0.0f;
      }
      for (int64_t i = 0; i < count; ++i) target[i * scratch.head_stride + h] = tile[i];
    }
    begin += count;
  }
}

// ---- cache rows ---------------------------------------------------------------------------------

constexpr int64_t kPanelColumns = AttentionScratch::kPanelColumns;
constexpr int64_t kPanelFloats = AttentionScratch::kPanelFloats;

// Spreads a row of elements over the panels that start with `key`.
template <typename T>
void WidenPanels(const std::byte* row, int64_t width, float* key) {
  for (; width >= kPanelColumns; width -= kPanelColumns) {
    WidenRow<T>(row, kPanelColumns, 1.0f, key);
    row += kPanelColumns * static_cast<int64_t>(sizeof(T));
    key += kPanelFloats;
  }
  WidenRow<T>(row, width, 1.0f, key);
}

// Widens one cache row into its place in the panels.
void WidenCacheRow(const AttentionCall& call, const std::byte* row, float* key) {
  const int64_t width = call.dims.head_dim_qk();
  switch (call.cache_format) {
    case CacheFormat::kFloat32:
      return WidenPanels<float>(row, width, key);
    case CacheFormat::kBFloat16:
      return WidenPanels<BFloat16>(row, width, key);
    case CacheFormat::kFloat16:
      return WidenPanels<Float16>(row, width, key);
    case CacheFormat::kFp8E4M3:
      return WidenPanels<Float8E4M3>(row, width, key);
    case CacheFormat::kFp8E4M3Fnuz:
      return WidenPanels<Float8E4M3Fnuz>(row, width, key);
    case CacheFormat::kFp8DsMla: {
      constexpr int64_t kCodes = 512;
      constexpr int64_t kCodesPerScale = 128;
      float scales[kCodes / kCodesPerScale];
      __builtin_memcpy(scales, row + kCodes, sizeof(scales));
      for (int64_t begin = 0; begin < kCodes; begin += kPanelColumns) {
        WidenRow<Float8E4M3>(row + begin, kPanelColumns, scales[begin / kCodesPerScale], key);
        key += kPanelFloats;
      }
      return WidenPanels<BFloat16>(row + kCodes + sizeof(scales), width - kCodes, key);
    }
  }
}

// The valid rows of an item, a block at a time.
class RowCursor {
 public:
  SPARSEMLA_INLINE RowCursor(const AttentionCall& call, const AttentionItem& item)
      : call_(call), slot_(item.slots), end_(item.slots + item.num_slots) {}

  // Writes the addresses of the next rows and returns how many there are, 0 at the end.
  SPARSEMLA_INLINE int Next(const std::byte** rows) {
    int count = 0;
    for (; slot_ != end_ && count < AttentionScratch::kKeyBlock; ++slot_) {
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

// Asks for the next block's rows while this one is computed, a few cache lines per tile, so that
// the requests never fill the line buffers.
class Prefetcher {
 public:
  SPARSEMLA_INLINE Prefetcher(const std::byte** rows, int num_rows, int64_t row_bytes,
                              int64_t steps)
      : row_(rows), end_(rows + num_rows), row_bytes_(row_bytes) {
    const int64_t lines = num_rows * ((row_bytes + kLine - 1) / kLine);
    lines_per_step_ = (lines + steps - 1) / steps;
  }

  SPARSEMLA_INLINE void Step() {
    for (int64_t i = 0; i < lines_per_step_ && row_ != end_; ++i) {
      __builtin_prefetch(*row_ + offset_, 0, 2);  // into L2: L1 holds the tiles
      offset_ += kLine;
      if (offset_ >= row_bytes_) {
        offset_ = 0;
        ++row_;
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  const std::byte** row_;
  const std::byte** end_;
  int64_t row_bytes_;
  int64_t offset_ = 0;
  int64_t lines_per_step_ = 0;
};

// ---- logits -------------------------------------------------------------------------------------

// scores[k, h] = scale * (keys[k] . queries[h]) for kKeys keys and kVectors vectors of heads.
template <int kKeys, int kVectors>
SPARSEMLA_INLINE void QkTile(const float* keys, const float* queries, int64_t head_stride,
                             int64_t width, float scale, float* scores) {
  Floats sum[kKeys][kVectors] = {};
  for (int64_t begin = 0; begin < width; begin += kPanelColumns) {
    const int64_t columns = width - begin < kPanelColumns ? width - begin : kPanelColumns;
    for (int64_t d = 0; d < columns; ++d) {
      Floats query[kVectors];
      for (int v = 0; v < kVectors; ++v) query[v] = Load<Floats>(queries + v * kLanes);
      for (int k = 0; k < kKeys; ++k) {
        const Floats key = Broadcast(keys[k * kPanelColumns + d]);
        for (int v = 0; v < kVectors; ++v) sum[k][v] = key * query[v] + sum[k][v];
      }
      queries += head_stride;
    }
    keys += kPanelFloats;
  }
  for (int k = 0; k < kKeys; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      Store(scores + k * head_stride + v * kLanes, sum[k][v] * scale);
    }
  }
}

// The same for all keys of a block: as many large tiles as fit, then smaller ones.
template <int kKeys, int kVectors>
SPARSEMLA_INLINE void QkTiles(const AttentionCall& call, const AttentionScratch& scratch,
                              int64_t head, int first_key, int num_keys, Prefetcher& prefetcher) {
  int k = first_key;
  for (; k + kKeys <= num_keys; k += kKeys) {
    prefetcher.Step();
    QkTile<kKeys, kVectors>(scratch.keys + k * kPanelColumns, scratch.queries + head,
                            scratch.head_stride, call.dims.head_dim_qk(), call.scale_log2,
                            scratch.scores + k * scratch.head_stride + head);
  }
  if constexpr (kKeys > 1) {
    QkTiles<kKeys / 2, kVectors>(call, scratch, head, k, num_keys, prefetcher);
  }
}

void ComputeLogits(const AttentionCall& call, const AttentionScratch& scratch, int64_t num_heads,
                   int num_keys, Prefetcher& prefetcher) {
  int64_t head = 0;
  for (; head + (kQkVectors - 1) * kLanes < num_heads; head += kQkVectors * kLanes) {
    QkTiles<kQkKeys, kQkVectors>(call, scratch, head, 0, num_keys, prefetcher);
  }
  for (; head < num_heads; head += kLanes) {  // one vector is left
    QkTiles<kQkKeysOfOne, 1>(call, scratch, head, 0, num_keys, prefetcher);
  }
}

// ---- softmax ------------------------------------------------------------------------------------

// 2^x for x <= 0, to 1.5 ulp; 0 below 2^-125, so that no result is subnormal; NaN for NaN.
SPARSEMLA_INLINE Floats Exp2(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x + kRound;
  const Floats f = x - (shifted - kRound);  // [-0.5, 0.5]
  Floats p = f * 0.000153458124f + 0.00133999309f;
  p = p * f + 0.00961848907f;
  p = p * f + 0.0555032864f;
  p = p * f + 0.240226462f;
  p = p * f + 0.693147182f;
  p = p * f + 1.0f;
  p = AsFloats(AsWords(p) + (AsWords(shifted) << 23));
  p = x < -125.0f ? Floats{} : p;
  return x == x ? p : x;  // the addition above may have broken a NaN
}

// Turns the block's logits into weights 2^(logit - max), and brings max, sum and rescale up to
// date.
void UpdateSoftmax(const AttentionScratch& scratch, int64_t num_heads, int num_keys, bool first) {
  const int64_t stride = scratch.head_stride;
  const Floats none = Broadcast(-INFINITY);
  for (int64_t head = 0; head < num_heads; head += kLanes) {
    float* const scores = scratch.scores + head;
    const Floats old_max = first ? none : Load<Floats>(scratch.max_log2 + head);
    Floats max = old_max;
    for (int k = 0; k < num_keys; ++k) {
      const Floats score = Load<Floats>(scores + k * stride);
      max = score > max ? score : max;  // NaN is passed over here and found in the weights
    }
    // Until a logit is above -inf the reference is 0, and every weight is 2^-inf = 0.
    const Floats reference = max == none ? Floats{} : max;
    const Floats rescale = Exp2(old_max - reference);
    Floats sum = first ? Floats{} : Load<Floats>(scratch.sum + head) * rescale;
    for (int k = 0; k < num_keys; ++k) {
      const Floats weight = Exp2(Load<Floats>(scores + k * stride) - reference);
      sum += weight;
      Store(scores + k * stride, weight);
    }
    Store(scratch.max_log2 + head, max);
    Store(scratch.sum + head, sum);
    Store(scratch.rescale + head, rescale);
  }
}

// ---- output -------------------------------------------------------------------------------------

// out[h] = out[h] * rescale[h] + weights[h] . keys for kHeads heads and kVectors vectors of
// columns.
template <int kHeads, int kVectors>
SPARSEMLA_INLINE void PvTile(const AttentionScratch& scratch, int64_t head, int64_t column,
                             int num_keys, bool first) {
  Floats sum[kHeads][kVectors] = {};
  float* const out = scratch.out + head * scratch.value_stride + column;
  if (!first) {
    for (int h = 0; h < kHeads; ++h) {
      for (int v = 0; v < kVectors; ++v) {
        sum[h][v] =
            Load<Floats>(out + h * scratch.value_stride + v * kLanes) * scratch.rescale[head + h];
      }
    }
  }
  const float* weights = scratch.scores + head;
  const float* keys = scratch.keys + column / kPanelColumns * kPanelFloats + column % kPanelColumns;
  for (int k = 0; k < num_keys; ++k) {
    Floats value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = Load<Floats>(keys + v * kLanes);
    for (int h = 0; h < kHeads; ++h) {
      const Floats weight = Broadcast(weights[h]);
      for (int v = 0; v < kVectors; ++v) sum[h][v] = weight * value[v] + sum[h][v];
    }
    weights += scratch.head_stride;
    keys += kPanelColumns;
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) {
      Store(out + h * scratch.value_stride + v * kLanes, sum[h][v]);
    }
  }
}

template <int kHeads, int kVectors>
SPARSEMLA_INLINE void PvTiles(const AttentionScratch& scratch, int64_t head, int64_t num_heads,
                              int64_t column, int num_keys, bool first, Prefetcher& prefetcher) {
  for (; head + kHeads <= num_heads; head += kHeads) {
    prefetcher.Step();
    PvTile<kHeads, kVectors>(scratch, head, column, num_keys, first);
  }
  if constexpr (kHeads > 1) {
    constexpr int kFewer = kHeads > 2 ? kHeads - 2 : 1;
    PvTiles<kFewer, kVectors>(scratch, head, num_heads, column, num_keys, first, prefetcher);
  }
}

static_assert(kPanelColumns % (kPvVectors * kLanes) == 0, "a group of columns lies in one panel");

void AddValues(const AttentionScratch& scratch, int64_t num_heads, int64_t rank, int num_keys,
               bool first, Prefetcher& prefetcher) {
  int64_t column = 0;
  for (; column + (kPvVectors - 1) * kLanes < rank; column += kPvVectors * kLanes) {
    PvTiles<kPvHeads, kPvVectors>(scratch, 0, num_heads, column, num_keys, first, prefetcher);
  }
  for (; column < rank; column += kLanes) {
    PvTiles<kPvHeads, 1>(scratch, 0, num_heads, column, num_keys, first, prefetcher);
  }
}

// Normalises and writes one head. `any` is false where the item has no valid key; a head whose
// logits are all -inf counts as one without keys.
void WriteHead(const AttentionCall& call, const AttentionItem& item,
               const AttentionScratch& scratch, int64_t h, bool any) {
  const int64_t rank = call.dims.kv_lora_rank;
  float* const values = scratch.out + h * scratch.value_stride;
  float lse = -INFINITY;
  float factor = 0.0f;
  if (any && scratch.sum[h] != 0.0f) {
    constexpr double kLn2 = 0.69314718055994530942;
    lse = static_cast<float>(kLn2 * static_cast<double>(scratch.max_log2[h]) +
                             log(static_cast<double>(scratch.sum[h])));
    factor = call.value_scale / scratch.sum[h];
  } else {
    for (int64_t d = 0; d < rank; ++d) values[d] = 0.0f;
  }
  if (item.partial_out != nullptr) {
    item.partial_lse[h] = lse;
    return NarrowRow<float>(values, rank, factor, item.partial_out + h * rank);
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
  const int64_t offset = item.row * call.out_strides[0] + head * call.out_strides[1];
  switch (call.out_dtype) {
    case DType::kBFloat16:
      return NarrowRow<BFloat16>(values, rank, factor, static_cast<BFloat16*>(call.out) + offset);
    case DType::kFloat16:
      return NarrowRow<Float16>(values, rank, factor, static_cast<Float16*>(call.out) + offset);
    default:
      return NarrowRow<float>(values, rank, factor, static_cast<float*>(call.out) + offset);
  }
}

void RunItem(const AttentionCall& call, const AttentionItem& item,
             const AttentionScratch& scratch) {
  RowCursor cursor(call, item);
  const std::byte** rows = scratch.rows;
  const std::byte** next_rows = scratch.rows + AttentionScratch::kKeyBlock;
  int num_keys = cursor.Next(rows);
  const bool any = num_keys > 0;
  if (!any && item.partial_out == nullptr && !call.write_empty_rows) return;
  if (any) LoadQueries(call, item, scratch);
  // About how many tiles a block has.
  const int64_t columns =
      (call.dims.kv_lora_rank + kPvVectors * kLanes - 1) / (kPvVectors * kLanes);
  const int64_t steps = columns * ((item.num_heads + kPvHeads - 1) / kPvHeads);
  for (bool first = true; num_keys > 0; first = false) {
    const int num_next = cursor.Next(next_rows);
    Prefetcher prefetcher(next_rows, num_next, call.cache_row_bytes, steps);
    for (int k = 0; k < num_keys; ++k) {
      WidenCacheRow(call, rows[k], scratch.keys + k * kPanelColumns);
    }
    ComputeLogits(call, scratch, item.num_heads, num_keys, prefetcher);
    UpdateSoftmax(scratch, item.num_heads, num_keys, first);
    AddValues(scratch, item.num_heads, call.dims.kv_lora_rank, num_keys, first, prefetcher);
    const std::byte** const done = rows;
    rows = next_rows;
    next_rows = done;
    num_keys = num_next;
  }
  for (int64_t h = 0; h < item.num_heads; ++h) WriteHead(call, item, scratch, h, any);
}

#undef SPARSEMLA_INLINE
