// Included inside a target region and an anonymous namespace, after attention_vector_deps.h and the
// constants kLanes, kPvHeads, kPvVectors and, for logits, kQkKeys of kQkVectors vectors of heads or
// kQkKeysOfOne of one (at most 16: g++ unrolls no more and would keep the sums in memory). No
// guard.
//
// One work item on vectors of kLanes floats. Per block of keys: the valid cache rows are widened to
// float once, for all heads; logits are a product with lanes = heads (the query lies transposed, a
// key's element is broadcast); the softmax is vertical; the output is a product with lanes =
// columns (a weight is broadcast). All sums are float, in an order that depends on the item alone.

#include "cpu/attention_common.h"

// ---- the query ----------------------------------------------------------------------------------

// Fills scratch.queries: widened, quantised where the cache says so, transposed. Heads of the
// padding are zero.
void LoadQueries(const AttentionCall& call, const AttentionItem& item,
                 const VectorScratch& scratch) {
  const int64_t width = call.dims.head_dim_qk();
  alignas(64) float tile[kQueryColumns] = {};
  for (int64_t begin = 0; begin < width;) {
    const QueryColumns columns = FindQueryColumns(call, item, begin);
    const std::byte* source = columns.data;
    float* const target = scratch.queries + begin * scratch.head_stride;
    for (int64_t h = 0; h < scratch.head_stride; ++h) {
      if (h < item.num_heads) {
        ReadQueryColumns(call, columns, source, tile);
        source += columns.head_stride_bytes;
      } else {
        for (float& element : tile) element = 0.0f;
      }
      for (int64_t i = 0; i < columns.count; ++i) target[i * scratch.head_stride + h] = tile[i];
    }
    begin += columns.count;
  }
}

// ---- cache rows ---------------------------------------------------------------------------------

constexpr int64_t kPanelColumns = VectorScratch::kPanelColumns;
constexpr int64_t kPanelFloats = VectorScratch::kPanelFloats;

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
SPARSEMLA_INLINE void QkTiles(const AttentionCall& call, const VectorScratch& scratch, int64_t head,
                              int first_key, int num_keys, Prefetcher& prefetcher) {
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

void ComputeLogits(const AttentionCall& call, const VectorScratch& scratch, int64_t num_heads,
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
void UpdateSoftmax(const VectorScratch& scratch, int64_t num_heads, int num_keys, bool first) {
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
SPARSEMLA_INLINE void PvTile(const VectorScratch& scratch, int64_t head, int64_t column,
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
SPARSEMLA_INLINE void PvTiles(const VectorScratch& scratch, int64_t head, int64_t num_heads,
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

void AddValues(const VectorScratch& scratch, int64_t num_heads, int64_t rank, int num_keys,
               bool first, Prefetcher& prefetcher) {
  int64_t column = 0;
  for (; column + (kPvVectors - 1) * kLanes < rank; column += kPvVectors * kLanes) {
    PvTiles<kPvHeads, kPvVectors>(scratch, 0, num_heads, column, num_keys, first, prefetcher);
  }
  for (; column < rank; column += kLanes) {
    PvTiles<kPvHeads, 1>(scratch, 0, num_heads, column, num_keys, first, prefetcher);
  }
}

void RunItem(const AttentionCall& call, const AttentionItem& item, const VectorScratch& scratch) {
  RowCursor cursor(call, item);
  const std::byte** rows = scratch.rows;
  const std::byte** next_rows = scratch.rows + VectorScratch::kKeyBlock;
  int num_keys = cursor.Next(rows, VectorScratch::kKeyBlock);
  const bool any = num_keys > 0;
  if (!any && item.partial_out == nullptr && !call.write_empty_rows) return;
  if (any) LoadQueries(call, item, scratch);
  // About how many tiles a block has.
  const int64_t columns =
      (call.dims.kv_lora_rank + kPvVectors * kLanes - 1) / (kPvVectors * kLanes);
  const int64_t steps = columns * ((item.num_heads + kPvHeads - 1) / kPvHeads);
  for (bool first = true; num_keys > 0; first = false) {
    const int num_next = cursor.Next(next_rows, VectorScratch::kKeyBlock);
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
  for (int64_t h = 0; h < item.num_heads; ++h) {
    HeadState state;
    if (any) state = {scratch.max_log2[h], scratch.sum[h], scratch.sum[h]};
    WriteHead(call, item, h, state, scratch.out + h * scratch.value_stride);
  }
}

#undef SPARSEMLA_INLINE
