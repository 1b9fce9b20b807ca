// Included by attention_amx.cc inside its target region and anonymous namespace. No guard.
//
// The vector half of the AMX kernel: what runs between the tile instructions, cut into steps small
// enough to hide under them. A step of four products lasts 64 cycles and hides about as many vector
// instructions.

// ---- transposing --------------------------------------------------------------------------------

// Transposes 16 x 16 words.
SPARSEMLA_INLINE void Transpose16(__m512i row[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // 128-bit lanes of rows i, i + 4, i + 8, i + 12
    t[i] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    row[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    row[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    row[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    row[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

// ---- the query ----------------------------------------------------------------------------------

// Columns of one part of a query row as bf16, quantised where the cache says so; exact for what the
// kernel takes. `floats` has room for them.
SPARSEMLA_INLINE void StageQueryPart(const AttentionCall& call, const QueryPart& part,
                                     const std::byte* source, int64_t count, float* floats,
                                     uint16_t* out) {
  WidenElements(part.dtype, source, count, floats);
  for (int64_t i = 0; call.quantise_scale != 0.0f && i < count; i += kQueryColumns) {
    QuantiseTile(call, floats + i);
  }
  NarrowRow<BFloat16>(floats, count, 1.0f, out);
}

// Row `head` of the item's query as bf16, padded with zeros.
SPARSEMLA_INLINE void StageQueryRow(const AttentionCall& call, const AttentionItem& item,
                                    int64_t head, int64_t width, float* floats, uint16_t* row) {
  const int64_t rank = call.dims.kv_lora_rank;
  for (int64_t i = 0; i < width; i += 32) _mm512_store_si512(row + i, __m512i{});
  const auto source = [&](const QueryPart& part) {
    return part.data + item.row * part.row_stride_bytes +
           (item.head_begin + head) * part.head_stride_bytes;
  };
  StageQueryPart(call, call.latent, source(call.latent), rank, floats, row);
  if (call.dims.qk_rope_head_dim > 0) {
    StageQueryPart(call, call.rope, source(call.rope), call.dims.qk_rope_head_dim, floats,
                   row + rank);
  }
}

// Fills the item's tiles of scratch.queries, from `first_tile` on: the B operand of the logits,
// words of two columns, heads side by side. A negative scale goes into the sign of the query, so
// that the largest product is the largest logit. Queries of another type, or of odd widths, pass
// through the ring.
void PackQueries(const AttentionCall& call, const AttentionItem& item, const AmxScratch& scratch,
                 int64_t first_tile) {
  const __m512i sign = _mm512_set1_epi32(call.scale_log2 < 0.0f ? -0x7FFF8000 : 0);
  const int64_t steps = scratch.width / 32;
  const bool direct = call.latent.dtype == DType::kBFloat16 && call.quantise_scale == 0.0f &&
                      call.dims.kv_lora_rank % 32 == 0 && call.dims.qk_rope_head_dim % 32 == 0;
  for (int64_t tile = 0; tile < scratch.item_tiles; ++tile) {
    const int64_t heads = item.num_heads - tile * 16;
    for (int64_t h = 0; !direct && h < heads && h < 16; ++h) {
      StageQueryRow(call, item, tile * 16 + h, scratch.width,
                    reinterpret_cast<float*>(scratch.block), scratch.ring + h * scratch.width);
    }
    for (int64_t k = 0; k < steps; ++k) {
      QueryColumns columns = {reinterpret_cast<const std::byte*>(scratch.ring + k * 32), 32,
                              2 * scratch.width};
      if (direct) {
        columns = k * 32 < call.dims.head_dim_qk() ? FindQueryColumns(call, item, k * 32)
                                                   : QueryColumns{};
        columns.data += tile * 16 * columns.head_stride_bytes;
      }
      __m512i rows[16];
      for (int h = 0; h < 16; ++h) {
        rows[h] = h < heads && columns.count > 0
                      ? _mm512_loadu_si512(columns.data + h * columns.head_stride_bytes)
                      : __m512i{};
      }
      Transpose16(rows);
      uint16_t* const target = scratch.queries + ((first_tile + tile) * steps + k) * 512;
      for (int i = 0; i < 16; ++i) {
        _mm512_store_si512(target + i * 32, _mm512_xor_si512(rows[i], sign));
      }
    }
  }
}

// ---- cache rows of other formats ----------------------------------------------------------------

// bf16 bytes of the 128 non-negative codes of an 8-bit format, as operands of VPERMI2B.
struct CodeTable {
  __m512i high[2];
  __m512i low[2];
  bool one_nan = false;  // fnuz: code 0x80 is NaN
};

template <typename T>
SPARSEMLA_INLINE CodeTable MakeCodeTable(bool one_nan) {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];
  for (int code = 0; code < 128; ++code) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, ToFloat(T{static_cast<uint8_t>(code)}));
    high[code] = static_cast<uint8_t>(bits >> 24);
    low[code] = static_cast<uint8_t>(bits >> 16);
  }
  CodeTable table;
  for (int i = 0; i < 2; ++i) {
    table.high[i] = _mm512_load_si512(high + 64 * i);
    table.low[i] = _mm512_load_si512(low + 64 * i);
  }
  table.one_nan = one_nan;
  return table;
}

// 64 codes -> two vectors of 32 bf16, in order.
SPARSEMLA_INLINE void DecodeCodes(const CodeTable& table, __m512i codes, __m512i out[2]) {
  // Unpacking works within 128-bit lanes: a lane gets the qwords that belong to it.
  codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
  __m512i high = _mm512_permutex2var_epi8(table.high[0], codes, table.high[1]);
  const __m512i low = _mm512_permutex2var_epi8(table.low[0], codes, table.low[1]);
  // high | (codes & 0x80)
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi32(-0x7F7F7F80), 0xF8);
  if (table.one_nan) {
    const __mmask64 nan = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(-0x80));
    high = _mm512_mask_mov_epi8(high, nan, _mm512_set1_epi8(0x7F));
    const __m512i quiet = _mm512_mask_mov_epi8(low, nan, _mm512_set1_epi8(-0x40));
    out[0] = _mm512_unpacklo_epi8(quiet, high);
    out[1] = _mm512_unpackhi_epi8(quiet, high);
    return;
  }
  out[0] = _mm512_unpacklo_epi8(low, high);
  out[1] = _mm512_unpackhi_epi8(low, high);
}

// 32 bf16 times a scale, rounded to nearest; the halves of a word are the even and odd columns.
SPARSEMLA_INLINE __m512i ScaleBFloat16(__m512i x, __m512 scale) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), scale);
  const __m512 odd =
      _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-0x10000))), scale);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_mask_blend_epi16(0xAAAAAAAA, low, high);
}

// Loads what is left of `bytes`, at most 64, without touching what lies behind.
SPARSEMLA_INLINE __m512i LoadUpTo64(const std::byte* source, int64_t bytes) {
  if (bytes >= 64) return _mm512_loadu_si512(source);
  if (bytes <= 0) return __m512i{};
  return _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, source);
}

// Copies a bf16 row; columns of the padding become zero.
SPARSEMLA_INLINE void CopyRow(const std::byte* row, int64_t columns, int64_t width, uint16_t* out) {
  for (int64_t i = 0; i < width; i += 32) {
    _mm512_store_si512(out + i, LoadUpTo64(row + 2 * i, 2 * (columns - i)));
  }
}

SPARSEMLA_INLINE void DecodeRow(const CodeTable& table, const std::byte* row, int64_t columns,
                                int64_t width, uint16_t* out) {
  for (int64_t i = 0; i < width; i += 64) {
    __m512i pair[2];
    DecodeCodes(table, LoadUpTo64(row + i, columns - i), pair);
    _mm512_store_si512(out + i, pair[0]);
    _mm512_store_si512(out + i + 32, pair[1]);
  }
}

SPARSEMLA_INLINE void DecodeDsMlaRow(const CodeTable& table, const std::byte* row, int64_t width,
                                     uint16_t* out) {
  constexpr int64_t kCodes = 512;
  float scales[4];
  __builtin_memcpy(scales, row + kCodes, sizeof(scales));
  for (int64_t i = 0; i < kCodes; i += 64) {
    const __m512 scale = _mm512_set1_ps(scales[i / 128]);
    __m512i pair[2];
    DecodeCodes(table, _mm512_loadu_si512(row + i), pair);
    _mm512_store_si512(out + i, ScaleBFloat16(pair[0], scale));
    _mm512_store_si512(out + i + 32, ScaleBFloat16(pair[1], scale));
  }
  for (int64_t i = kCodes; i < width; i += 32) {
    _mm512_store_si512(out + i,
                       _mm512_loadu_si512(row + kCodes + sizeof(scales) + 2 * (i - kCodes)));
  }
}

// ---- values and outputs -------------------------------------------------------------------------

// Packs one line (32 columns) of two neighbouring keys into two tiles of a panel: words of the two
// keys, columns side by side. Unpacking works within 128-bit lanes, so the first tile gets columns
// 0-3, 8-11, 16-19, 24-27 and the second the others; WriteOutput puts them in order.
SPARSEMLA_INLINE void PackLine(const std::byte* even_row, const std::byte* odd_row,
                               std::byte* tile) {
  const __m512i even = _mm512_loadu_si512(even_row);
  const __m512i odd = _mm512_loadu_si512(odd_row);
  _mm512_store_si512(tile, _mm512_unpacklo_epi16(even, odd));
  _mm512_store_si512(tile + kTileBytes, _mm512_unpackhi_epi16(even, odd));
}

// Packs a panel: `kLines` lines of the values of all keys of the block, half a chunk at a time,
// where the panel before it has just been used.
template <int kLines>
class PanelPacker {
 public:
  SPARSEMLA_INLINE PanelPacker(const AmxScratch& scratch, int num_chunks)
      : values_(scratch.values), end_(num_chunks * 16), next_(end_) {}

  // Starts with the lines from byte `offset` of the rows on.
  SPARSEMLA_INLINE void Begin(int64_t offset, std::byte* panel) {
    offset_ = offset;
    panel_ = panel;
    next_ = 0;
  }
  // Nothing after the last one.
  SPARSEMLA_INLINE void HalfChunk() {
    if (next_ == end_) return;
    std::byte* const tile = panel_ + next_ / 16 * (2 * kLines * kTileBytes) + next_ % 16 * 64;
    const std::byte* const* const rows = values_ + 2 * next_;
    for (int i = 0; i < 8; ++i) {
      for (int line = 0; line < kLines; ++line) {
        const int64_t at = offset_ + line * 64;
        PackLine(rows[2 * i] + at, rows[2 * i + 1] + at, tile + i * 64 + line * 2 * kTileBytes);
      }
    }
    next_ += 8;
  }
  SPARSEMLA_INLINE void PackAll() {
    while (next_ != end_) HalfChunk();
  }

 private:
  const std::byte* const* values_;
  const int end_;  // pairs of keys
  int next_;
  int64_t offset_ = 0;
  std::byte* panel_ = nullptr;
};

// Stores 32 columns as the output's type.
SPARSEMLA_INLINE void StoreColumns(float* out, __m512 low, __m512 high) {
  _mm512_storeu_ps(out, low);
  _mm512_storeu_ps(out + 16, high);
}
SPARSEMLA_INLINE void StoreColumns(BFloat16* out, __m512 low, __m512 high) {
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
SPARSEMLA_INLINE void StoreColumns(Float16* out, __m512 low, __m512 high) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(low, kNearest));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), _mm512_cvtps_ph(high, kNearest));
}

// out = tiles * factor with the columns in order; `tiles` [groups, 2, 16 heads, 16], one head.
template <typename T>
SPARSEMLA_INLINE void OrderColumns(const float* tiles, int64_t groups, float factor, T* out) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 factors = _mm512_set1_ps(factor);
  for (int64_t g = 0; g < groups; ++g) {
    const __m512 a = _mm512_load_ps(tiles + g * 512);
    const __m512 b = _mm512_load_ps(tiles + g * 512 + 256);
    StoreColumns(out + g * 32, _mm512_mul_ps(_mm512_permutex2var_ps(a, low, b), factors),
                 _mm512_mul_ps(_mm512_permutex2var_ps(a, high, b), factors));
  }
}

// Writes head `h` of the item, lane `at` of all tiles. `values` holds a row of an odd width.
void WriteOutput(const AttentionCall& call, const AttentionItem& item, const AmxScratch& scratch,
                 int64_t h, int64_t at, float* values) {
  const float* const tiles = scratch.out + ((at / 16) * scratch.value_groups * 32 + at % 16) * 16;
  const HeadState state = {.max_log2 = scratch.reference[at],
                           .sum = scratch.sum[at],
                           .divisor = scratch.rounded_sum[at]};
  const int64_t rank = call.dims.kv_lora_rank;
  if (rank % 32 != 0 || state.sum == 0.0f) {
    OrderColumns(tiles, scratch.value_groups, 1.0f, values);
    return WriteHead(call, item, h, state, values);
  }
  const float factor = FinishHead(call, item, h, state);
  if (item.partial_out != nullptr) {
    return OrderColumns(tiles, rank / 32, factor, item.partial_out + h * rank);
  }
  const int64_t offset = OutOffset(call, item, h);
  switch (call.out_dtype) {
    case DType::kBFloat16:
      return OrderColumns(tiles, rank / 32, factor, static_cast<BFloat16*>(call.out) + offset);
    case DType::kFloat16:
      return OrderColumns(tiles, rank / 32, factor, static_cast<Float16*>(call.out) + offset);
    default:
      return OrderColumns(tiles, rank / 32, factor, static_cast<float*>(call.out) + offset);
  }
}
