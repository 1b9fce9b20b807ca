// Attention on AMX: logits as K Q^T with the cache rows as they lie, weights in bf16 against a
// reference that is a power of two, values packed just in time. Why it is built so, its cycle
// budget and what lost: docs/amx.md.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// The intrinsics of g++ 12 leave registers undefined on purpose, and it warns of its own header.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "cpu/amx_scratch.h"
#include "cpu/amx_tile.h"
#include "cpu/attention_vector_deps.h"

SPARSEMLA_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma")
namespace sparsemla::cpu {
namespace {

constexpr int kLanes = 16;
#include "cpu/attention_common.h"
//
#include "cpu/attention_amx_vector.h"
//
#include "cpu/attention_amx_softmax.h"

constexpr int kChunkKeys = AmxScratch::kChunkKeys;

// ---- one chunk of keys --------------------------------------------------------------------------

// The A operand of the logits: two tiles of 16 rows each, where they lie or in the ring.
struct KeyTiles {
  const void* rows[2];
  int64_t stride_bytes[2];
  bool in_ring[2];
};

// Whether 16 rows lie one after the other, so that a tile can be loaded where they are.
SPARSEMLA_INLINE bool AreConsecutive(const std::byte* const* rows, int64_t stride) {
  const __m512i first = _mm512_set1_epi64(reinterpret_cast<int64_t>(rows[0]));
  const __m512i steps = _mm512_setr_epi64(0, stride, 2 * stride, 3 * stride, 4 * stride, 5 * stride,
                                          6 * stride, 7 * stride);
  const __m512i low = _mm512_add_epi64(first, steps);
  const __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(8 * stride));
  return (_mm512_cmpneq_epi64_mask(_mm512_loadu_si512(rows), low) |
          _mm512_cmpneq_epi64_mask(_mm512_loadu_si512(rows + 8), high)) == 0;
}

// Asks for rows some time before they are copied, a few lines at every step.
class RowPrefetcher {
 public:
  // Rows of `lines` lines, in `steps` steps.
  SPARSEMLA_INLINE RowPrefetcher(const std::byte* const* rows, int num_rows, int64_t lines,
                                 int64_t steps)
      : row_(rows), end_(rows + num_rows), lines_(lines) {
    per_step_ = (num_rows * lines + steps - 1) / steps;
  }
  SPARSEMLA_INLINE void Step() {
    for (int64_t i = 0; i < per_step_ && row_ != end_; ++i) {
      __builtin_prefetch(*row_ + line_ * 64, 0, 2);  // into L2: L1 is spoken for
      if (++line_ == lines_) {
        line_ = 0;
        ++row_;
      }
    }
  }

 private:
  const std::byte* const* row_;
  const std::byte* const* end_;
  int64_t lines_;
  int64_t per_step_;
  int64_t line_ = 0;
};

// Fills the ring with the next chunk, a column of 64 bytes as soon as the last pass has used it:
// the rows' cache misses overlap, 32 at a time, which beats prefetching them.
struct RingRefill {
  const std::byte* const* rows = nullptr;  // [kChunkKeys], or null: nothing to do
  bool tile[2] = {};                       // which tiles of rows are to be copied
  std::byte* ring = nullptr;
  int64_t stride_bytes = 0;

  // Column k of one tile of rows.
  SPARSEMLA_INLINE void Copy(int64_t k, int which) const {
    if (rows == nullptr || !tile[which]) return;
    for (int i = which * kTileRows; i < (which + 1) * kTileRows; ++i) {
      _mm512_store_si512(ring + i * stride_bytes + k * 64, _mm512_loadu_si512(rows[i] + k * 64));
    }
  }
};

// logits [32 keys, 16 * kTiles heads] of one chunk, with the softmax of the previous pass in the
// shadow of the products. One tile of heads has two sums, of even and of odd steps, as a product
// waits for the one before it.
template <int kTiles>
SPARSEMLA_INLINE void ComputeLogits(const KeyTiles& keys, const uint16_t* queries, int64_t steps,
                                    Softmax<kTiles>& softmax, const RingRefill& refill,
                                    RowPrefetcher& prefetcher, float* logits) {
  const auto* const a0 = static_cast<const std::byte*>(keys.rows[0]);
  const auto* const a1 = static_cast<const std::byte*>(keys.rows[1]);
  const int64_t stride0 = keys.stride_bytes[0];
  const int64_t stride1 = keys.stride_bytes[1];
  ZeroTile<0>();
  ZeroTile<1>();
  ZeroTile<2>();
  ZeroTile<3>();
  if constexpr (kTiles == 2) {
    const uint16_t* const second = queries + steps * 512;
    for (int64_t k = 0; k < steps; ++k) {
      StreamTile<6>(queries + k * 512, 64);
      LoadTile<4>(a0 + k * 64, stride0);
      MultiplyTiles<0, 4, 6>();
      softmax.template Step<0>();
      LoadTile<5>(a1 + k * 64, stride1);
      MultiplyTiles<2, 5, 6>();
      softmax.template Step<1>();
      StreamTile<6>(second + k * 512, 64);
      refill.Copy(k, 0);
      MultiplyTiles<1, 4, 6>();
      softmax.template Step<2>();
      MultiplyTiles<3, 5, 6>();
      softmax.template Step<3>();
      refill.Copy(k, 1);
      prefetcher.Step();
    }
    while (softmax.pending()) softmax.Step();
    StoreTile<0>(logits, 128);
    StoreTile<1>(logits + 16, 128);
    StoreTile<2>(logits + 512, 128);
    StoreTile<3>(logits + 528, 128);
  } else {
    for (int64_t k = 0; k < steps; k += 2) {
      StreamTile<6>(queries + k * 512, 64);
      LoadTile<4>(a0 + k * 64, stride0);
      MultiplyTiles<0, 4, 6>();
      LoadTile<5>(a1 + k * 64, stride1);
      MultiplyTiles<1, 5, 6>();
      softmax.Step();
      refill.Copy(k, 0);
      refill.Copy(k, 1);
      prefetcher.Step();
      StreamTile<6>(queries + (k + 1) * 512, 64);
      LoadTile<4>(a0 + k * 64 + 64, stride0);
      MultiplyTiles<2, 4, 6>();
      LoadTile<5>(a1 + k * 64 + 64, stride1);
      MultiplyTiles<3, 5, 6>();
      softmax.Step();
      refill.Copy(k + 1, 0);
      refill.Copy(k + 1, 1);
      prefetcher.Step();
    }
    while (softmax.pending()) softmax.Step();
    alignas(64) float odd[512];
    StoreTile<0>(logits, 64);
    StoreTile<1>(logits + 256, 64);
    StoreTile<2>(odd, 64);
    StoreTile<3>(odd + 256, 64);
    for (int i = 0; i < 512; i += 16) {
      _mm512_store_ps(logits + i,
                      _mm512_add_ps(_mm512_load_ps(logits + i), _mm512_load_ps(odd + i)));
    }
  }
}

// Sets the logits of the keys in `keys` to -inf, which weighs nothing: one tile of heads, keys
// `stride` floats apart. Returns whether one of them was not finite; a key with a column that is
// not finite has such logits for every query, the zeros that pad a tile included.
SPARSEMLA_INLINE bool DropLogits(unsigned keys, float* logits, int64_t stride) {
  constexpr int kNotFinite = 0x99;  // NaN of both kinds, infinity of both signs
  unsigned not_finite = 0;
  for (; keys != 0; keys &= keys - 1) {
    float* const logit = logits + __builtin_ctz(keys) * stride;
    not_finite |= _mm512_fpclass_ps_mask(_mm512_load_ps(logit), kNotFinite);
    _mm512_store_ps(logit, _mm512_set1_ps(-INFINITY));
  }
  return not_finite != 0;
}

// ---- one group of value columns -----------------------------------------------------------------

// out += weights of all chunks . panel, with the next panel's packing in the shadow: two tiles of
// heads, `second` floats apart, by two of columns, or one by four.
template <int kTiles, typename Packer>
SPARSEMLA_INLINE void ComputeValues(const uint16_t* weights, const std::byte* panel, int num_chunks,
                                    Packer& packer, bool first_block, float* out, int64_t second) {
  float* const out2 = out + second;
  if (first_block) {
    ZeroTile<0>();
    ZeroTile<1>();
    ZeroTile<2>();
    ZeroTile<3>();
  } else {
    LoadTile<0>(out, 64);
    LoadTile<1>(out + 256, 64);
    LoadTile<2>(out2, 64);
    LoadTile<3>(out2 + 256, 64);
  }
  for (int c = 0; c < num_chunks; ++c) {
    if constexpr (kTiles == 2) {
      LoadTile<6>(panel, 64);
      StreamTile<4>(weights, 64);
      MultiplyTiles<0, 4, 6>();
      StreamTile<5>(weights + AmxScratch::kChunks * 512, 64);
      MultiplyTiles<2, 5, 6>();
      LoadTile<6>(panel + kTileBytes, 64);
      packer.HalfChunk();
      MultiplyTiles<1, 4, 6>();
      packer.HalfChunk();
      MultiplyTiles<3, 5, 6>();
      panel += 2 * kTileBytes;
    } else {
      LoadTile<4>(weights, 64);
      LoadTile<5>(panel, 64);
      MultiplyTiles<0, 4, 5>();
      LoadTile<6>(panel + kTileBytes, 64);
      MultiplyTiles<1, 4, 6>();
      LoadTile<5>(panel + 2 * kTileBytes, 64);
      MultiplyTiles<2, 4, 5>();
      LoadTile<6>(panel + 3 * kTileBytes, 64);
      packer.HalfChunk();
      MultiplyTiles<3, 4, 6>();
      packer.HalfChunk();
      panel += 4 * kTileBytes;
    }
    weights += 512;
  }
  StoreTile<0>(out, 64);
  StoreTile<1>(out + 256, 64);
  StoreTile<2>(out2, 64);
  StoreTile<3>(out2 + 256, 64);
}

// ---- an item or a group -------------------------------------------------------------------------

// What a run attends: an item, or the union of a group's slots for several.
struct Work {
  const AttentionItem* items = nullptr;  // every item_tiles tiles of heads belong to the next one
  RowCursor cursor;
  const uint8_t* masks = nullptr;  // of a group: which items name a key
};

template <int kTiles>
class Runner {
 public:
  Runner(const AttentionCall& call, const Work& work, const AmxScratch& scratch)
      : call_(call),
        items_(work.items),
        cursor_(work.cursor),
        masks_(work.masks),
        scratch_(scratch) {
    const int64_t columns = call.dims.head_dim_qk();
    in_place_ = call.cache_format == CacheFormat::kBFloat16 && columns % 64 == 0;
    tile_copy_ = scratch.width / 64 <= kTileRows;
    if (call.cache_format == CacheFormat::kFp8E4M3Fnuz) {
      table_ = MakeCodeTable<Float8E4M3Fnuz>(true);
    } else if (call.cache_format != CacheFormat::kBFloat16) {
      table_ = MakeCodeTable<Float8E4M3>(false);
    }
    const bool aligned = (reinterpret_cast<uintptr_t>(call.cache) % 64 == 0) &&
                         call.cache_row_stride_bytes % 64 == 0;
    lines_ = (call.cache_row_bytes + 63 + (aligned ? 0 : 63)) / 64;
  }

  // Returns false, with nothing written, where weights of 0 cannot keep the items of a group apart.
  bool Run() {
    const std::byte** rows = scratch_.rows;
    const std::byte** next_rows = scratch_.rows + AmxScratch::kBlockKeys;
    const int num_keys = cursor_.Next(rows, kBlockKeys);
    if (num_keys == 0) {
      WriteEmpty();
      return true;
    }
    // The first rows are on their way while the query is packed.
    RowPrefetcher(rows, AtMost(num_keys, kChunkKeys), lines_, 1).Step();
    ConfigureTiles(tile_copy_ ? static_cast<int>(scratch_.width / 64) : kTileRows);
    Start();
    {
      const FlushSubnormals flush;
      AddKeys(rows, next_rows, num_keys);
    }
    ReleaseTiles();
    if (others_not_finite_) return false;
    Write();
    return true;
  }

 private:
  static constexpr int kPanelTiles = kTiles == 2 ? 2 : 4;  // tiles of value columns in a panel
  static constexpr int kLines = kPanelTiles / 2;           // lines of a row in a panel
  static constexpr int kBlockKeys = AmxScratch::kBlockKeys / kLines;

  // All keys, a block at a time; `rows` holds the first `num_keys` of them.
  void AddKeys(const std::byte** rows, const std::byte** next_rows, int num_keys) {
    for (bool first = true; num_keys > 0 && !others_not_finite_; first = false) {
      const int num_next = cursor_.Next(next_rows, kBlockKeys);
      const int num_chunks = (num_keys + kChunkKeys - 1) / kChunkKeys;
      for (int k = num_keys; k < num_chunks * kChunkKeys; ++k) {
        rows[k] = reinterpret_cast<const std::byte*>(scratch_.zeros);
      }
      AddLogits(rows, num_keys, first);
      AddValues(num_chunks, first, next_rows, num_next);
      const std::byte** const done = rows;
      rows = next_rows;
      next_rows = done;
      num_keys = num_next;
    }
  }

  void Start() {
    for (int64_t i = 0; i < scratch_.width; i += 32) {
      _mm512_store_si512(scratch_.zeros + i, __m512i{});
    }
    for (int64_t i = 0; i < scratch_.head_tiles * 16; ++i) {
      scratch_.reference[i] = kNoReference;
      scratch_.sum[i] = 0.0f;
      scratch_.rounded_sum[i] = 0.0f;
    }
    for (int64_t tile = 0; tile < scratch_.head_tiles; tile += scratch_.item_tiles) {
      PackQueries(call_, ItemOf(tile), scratch_, tile);
    }
  }

  // Where the tiles of a chunk are or are going to be.
  SPARSEMLA_INLINE KeyTiles Locate(const std::byte* const* rows, int chunk) const {
    const int64_t width = scratch_.width;
    const int64_t stride = call_.cache_row_stride_bytes;
    uint16_t* const target =
        in_place_ ? scratch_.ring : scratch_.block + chunk * kChunkKeys * width;
    KeyTiles keys = {{target, target + kTileRows * width}, {2 * width, 2 * width}, {true, true}};
    for (int t = 0; in_place_ && t < 2; ++t) {
      if (!AreConsecutive(rows + t * kTileRows, stride)) continue;
      keys.rows[t] = rows[t * kTileRows];
      keys.stride_bytes[t] = stride;
      keys.in_ring[t] = false;
    }
    return keys;
  }

  // Sees to it that the rows of a chunk are where `keys` says: converted into the block, or, for
  // the first chunk of a block, copied into the ring; the others come by RingRefill.
  SPARSEMLA_INLINE void Stage(const std::byte* const* rows, int chunk, int num_keys,
                              const KeyTiles& keys, Softmax<kTiles>& softmax) {
    const std::byte** const values = scratch_.values + chunk * kChunkKeys;
    if (in_place_) {
      for (int k = 0; k < kChunkKeys; ++k) {
        values[k] = rows[k];
        if (chunk == 0 && keys.in_ring[k / kTileRows]) {
          CopyToRing(rows[k], scratch_.ring + k * scratch_.width);
        }
      }
      return;
    }
    uint16_t* const target = scratch_.block + chunk * kChunkKeys * scratch_.width;
    for (int k = 0; k < kChunkKeys; ++k) {
      uint16_t* const row = target + k * scratch_.width;
      values[k] = reinterpret_cast<const std::byte*>(row);
      ConvertRow(k < num_keys ? rows[k] : nullptr, row);
      softmax.Step();
    }
  }

  // Through a tile and past L1, so that the source's lines do not push the ring out of it.
  SPARSEMLA_INLINE void CopyToRing(const std::byte* row, uint16_t* target) {
    if (!tile_copy_) return CopyRow(row, scratch_.width, scratch_.width, target);
    StreamTile<kCopyTile>(row, 64);
    StoreTile<kCopyTile>(target, 64);
    StreamTile<kCopyTile>(row + scratch_.width, 64);
    StoreTile<kCopyTile>(target + scratch_.width / 2, 64);
  }

  SPARSEMLA_INLINE void ConvertRow(const std::byte* row, uint16_t* target) {
    const int64_t columns = call_.dims.head_dim_qk();
    if (row == nullptr) return CopyRow(nullptr, 0, scratch_.width, target);
    switch (call_.cache_format) {
      case CacheFormat::kFp8DsMla:
        return DecodeDsMlaRow(table_, row, columns, target);
      case CacheFormat::kFp8E4M3:
      case CacheFormat::kFp8E4M3Fnuz:
        return DecodeRow(table_, row, columns, scratch_.width, target);
      default:
        return CopyRow(row, columns, scratch_.width, target);
    }
  }

  // Weights of a block of keys.
  void AddLogits(const std::byte* const* rows, int num_keys, bool first_block) {
    const int64_t steps = scratch_.width / 32;
    const int64_t passes = scratch_.head_tiles / kTiles;
    const int num_chunks = (num_keys + kChunkKeys - 1) / kChunkKeys;
    Softmax<kTiles> softmax(scratch_, call_.scale_log2);
    KeyTiles next = Locate(rows, 0);
    for (int c = 0; c < num_chunks; ++c) {
      const int in_chunk = AtMost(num_keys - c * kChunkKeys, kChunkKeys);
      const KeyTiles keys = next;
      Stage(rows + c * kChunkKeys, c, in_chunk, keys, softmax);
      RingRefill last_refill;
      if (c + 1 < num_chunks) {
        next = Locate(rows + (c + 1) * kChunkKeys, c + 1);
        if (in_place_) {
          last_refill = {rows + (c + 1) * kChunkKeys,
                         {next.in_ring[0], next.in_ring[1]},
                         reinterpret_cast<std::byte*>(scratch_.ring),
                         2 * scratch_.width};
        }
      }
      // Rows to be converted are asked for two chunks ahead.
      const int ahead = (c + 2) * kChunkKeys;
      RowPrefetcher prefetcher(rows + ahead, in_place_ ? 0 : AtMost(num_keys - ahead, kChunkKeys),
                               lines_, passes * steps);
      for (int64_t tile = 0; tile < scratch_.head_tiles; tile += kTiles) {
        const bool last = tile + kTiles == scratch_.head_tiles;
        ComputeLogits<kTiles>(keys, scratch_.queries + tile * steps * 512, steps, softmax,
                              last ? last_refill : RingRefill(), prefetcher, scratch_.logits);
        if (kTiles == 2 && masks_ != nullptr)
          DropOtherKeys(tile, masks_ + c * kChunkKeys, in_chunk);
        softmax.Begin(scratch_.logits, tile, c, in_chunk, first_block);
      }
    }
    while (softmax.pending()) softmax.Step();
    if (masks_ != nullptr) masks_ += num_keys;
  }

  // Drops the logits of keys that an item does not name, for the tiles from `tile` on.
  void DropOtherKeys(int64_t tile, const uint8_t* masks, int num_keys) {
    const __mmask32 valid = num_keys == kChunkKeys ? ~__mmask32{0} : (__mmask32{1} << num_keys) - 1;
    const __m256i names = _mm256_maskz_loadu_epi8(valid, masks);
    for (int t = 0; t < kTiles; ++t) {
      if (ItemOf(tile + t).num_heads == 0) continue;  // fills up a pair of tiles
      const __m256i item = _mm256_set1_epi8(static_cast<char>(1 << (tile + t)));
      const __mmask32 others = valid & _mm256_testn_epi8_mask(names, item);
      others_not_finite_ |= DropLogits(others, scratch_.logits + t * 16, kTiles * 16);
    }
  }

  // Outputs of a block of keys. The next block's first rows are asked for meanwhile.
  void AddValues(int num_chunks, bool first_block, const std::byte* const* next_rows,
                 int num_next) {
    const int64_t value_tiles = 2 * scratch_.value_groups;
    const int64_t passes = scratch_.head_tiles / kTiles * (scratch_.value_groups / kLines);
    RowPrefetcher prefetcher(next_rows, AtMost(num_next, 2 * kChunkKeys), lines_, passes);
    PanelPacker<kLines> packer(scratch_, num_chunks);
    packer.Begin(0, scratch_.panel);
    packer.PackAll();
    for (int64_t group = 0; group < scratch_.value_groups; group += kLines) {
      const bool last_group = group + kLines == scratch_.value_groups;
      for (int64_t tile = 0; tile < scratch_.head_tiles; tile += kTiles) {
        prefetcher.Step();
        // The last pass makes room for the next group's panel as it goes.
        if (tile + kTiles == scratch_.head_tiles && !last_group) {
          packer.Begin((group + kLines) * 64, scratch_.panel);
        }
        ComputeValues<kTiles>(scratch_.weights + tile * AmxScratch::kChunks * 512, scratch_.panel,
                              num_chunks, packer, first_block,
                              scratch_.out + (tile * value_tiles + 2 * group) * 256,
                              kTiles == 2 ? value_tiles * 256 : 512);
      }
    }
  }

  void Write() {
    // The ring is free now and holds a row of values, twice as wide.
    auto* const values = reinterpret_cast<float*>(scratch_.ring);
    for (int64_t tile = 0; tile < scratch_.head_tiles; tile += scratch_.item_tiles) {
      const AttentionItem& item = ItemOf(tile);
      for (int64_t h = 0; h < item.num_heads; ++h) {
        WriteOutput(call_, item, scratch_, h, tile * 16 + h, values);
      }
    }
  }

  // An item's: a group has keys.
  void WriteEmpty() {
    const AttentionItem& item = *items_;
    if (item.partial_out == nullptr && !call_.write_empty_rows) return;
    auto* const values = reinterpret_cast<float*>(scratch_.ring);
    for (int64_t h = 0; h < item.num_heads; ++h) WriteHead(call_, item, h, {}, values);
  }

  const AttentionItem& ItemOf(int64_t tile) const { return items_[tile / scratch_.item_tiles]; }

  static int AtMost(int count, int limit) { return count < 0 ? 0 : count < limit ? count : limit; }

  const AttentionCall& call_;
  const AttentionItem* const items_;
  RowCursor cursor_;
  const uint8_t* masks_;  // of the keys from the present block on, or null
  const AmxScratch scratch_;
  CodeTable table_ = {};
  int64_t lines_ = 0;               // of a cache row
  bool in_place_ = false;           // cache rows are operands as they lie
  bool tile_copy_ = false;          // half a row fits the copy tile
  bool others_not_finite_ = false;  // a key that some item of the group does not name
};

}  // namespace

void attention_amx_bf16(const AttentionCall& call, const AttentionItem& item, std::byte* scratch) {
  const AmxScratch carved = AmxScratch::At(scratch, call.dims, 1);
  const Work work = {.items = &item, .cursor = RowCursor(call, item)};
  if (carved.head_tiles == 1) {
    Runner<1>(call, work, carved).Run();
  } else {
    Runner<2>(call, work, carved).Run();
  }
}

bool attention_amx_bf16_group(const AttentionCall& call, const AttentionGroup& group,
                              std::byte* scratch) {
  const AmxScratch carved = AmxScratch::At(scratch, call.dims, group.num_items);
  const AttentionItem keys = {.slots = group.slots, .num_slots = group.num_slots};
  const Work work = {.items = group.items, .cursor = RowCursor(call, keys), .masks = group.masks};
  return Runner<2>(call, work, carved).Run();
}

}  // namespace sparsemla::cpu
SPARSEMLA_TARGET_END

#endif
