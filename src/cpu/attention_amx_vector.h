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

// Rounds float columns to bf16; exact for what FindQueryColumns promises this kernel.
SPARSEMLA_INLINE void StageQueryRow(const AttentionCall& call, const AttentionItem& item,
                                    int64_t head, uint16_t* row) {
  alignas(64) float tile[kQueryColumns] = {};
  for (int64_t begin = 0; begin < call.dims.head_dim_qk();) {
    const QueryColumns columns = FindQueryColumns(call, item, begin);
    const std::byte* const source = columns.data + head * columns.head_stride_bytes;
    if (columns.dtype == DType::kBFloat16 && call.quantise_scale == 0.0f) {
      __builtin_memcpy(row + begin, source, static_cast<size_t>(2 * columns.count));
    } else {
      ReadQueryColumns(call, columns, source, tile);
      NarrowRow<BFloat16>(tile, columns.count, 1.0f, row + begin);
    }
    begin += columns.count;
  }
}

// Fills scratch.queries, the B operand of the logits: words of two columns, heads side by side. A
// negative scale goes into the sign of the query, so that the largest product is the largest logit.
// Uses the ring as scratch.
void PackQueries(const AttentionCall& call, const AttentionItem& item, const AmxScratch& scratch) {
  const __m512i sign = _mm512_set1_epi32(call.scale_log2 < 0.0f ? -0x7FFF8000 : 0);
  const int64_t steps = scratch.width / 32;
  for (int64_t tile = 0; tile < scratch.head_tiles; ++tile) {
    const int64_t heads = item.num_heads - tile * 16;
    for (int64_t h = 0; h < 16; ++h) {
      uint16_t* const row = scratch.ring + h * scratch.width;
      for (int64_t i = 0; i < scratch.width; i += 32) _mm512_store_si512(row + i, __m512i{});
      if (h < heads) StageQueryRow(call, item, tile * 16 + h, row);
    }
    for (int64_t k = 0; k < steps; ++k) {
      __m512i rows[16];
      for (int h = 0; h < 16; ++h) {
        rows[h] = _mm512_load_si512(scratch.ring + h * scratch.width + k * 32);
      }
      Transpose16(rows);
      uint16_t* const target = scratch.queries + (tile * steps + k) * 512;
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

// ---- softmax ------------------------------------------------------------------------------------

// 2^x, to 3e-6; 0 from -127 on down; NaN for NaN. The constant term is 1, so that -127 gives 0.
SPARSEMLA_INLINE __m512 WeightOf(__m512 x, __mmask16 live) {
  const __m512 round = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23
  x = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);     // NaN comes from the second operand
  const __m512 shifted = _mm512_add_ps(x, round);
  const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, round));  // [-0.5, 0.5]
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.00958285295f), f, _mm512_set1_ps(0.0559064262f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240240991f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693124175f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(live, _mm512_castps_si512(p), exponent));
}

// Before any key: below every logit, yet finite, so that a logit of -inf has weight 0.
constexpr float kNoReference = -3.402823466e38f;
// A reference is raised only when a logit exceeds it by so much (log2): weights are bf16, whose
// range is float's, and most rows raise it once.
constexpr float kReferenceSlack = 20.0f;

// The logits of one pass over the query: 32 keys by kTiles tiles of heads, lanes = heads.
template <int kTiles>
class Softmax {
 public:
  static constexpr int kSteps = 18;  // as many as the logits of 576 columns have

  SPARSEMLA_INLINE Softmax(const AmxScratch& scratch, float scale_log2)
      : scratch_(scratch), scale_(_mm512_set1_ps(__builtin_fabsf(scale_log2))) {}

  // Takes over `logits` [32, 16 * kTiles] of `num_keys` keys of chunk `chunk`, tile `tile` on.
  SPARSEMLA_INLINE void Begin(const float* logits, int64_t tile, int chunk, int num_keys,
                              bool first_block) {
    logits_ = logits;
    tile_ = tile;
    chunk_ = chunk;
    num_keys_ = num_keys;
    live_ = num_keys >= 32 ? ~0u : (1u << num_keys) - 1;
    first_block_ = first_block;
    step_ = 0;
  }

  // One of kSteps parts of the work; nothing where none is left.
  SPARSEMLA_INLINE void Step() {
    if (step_ >= kSteps) return;
    if (step_ == 0) {
      UpdateReference();
    } else if (step_ <= 16) {
      WeighTwoKeys(step_ - 1);
    } else {
      Finish();
    }
    ++step_;
  }
  SPARSEMLA_INLINE void RunAll() {
    while (step_ < kSteps) Step();
  }

 private:
  SPARSEMLA_INLINE void UpdateReference() {
    unsigned over = 0;
    for (int t = 0; t < kTiles; ++t) {
      const float* const logits = logits_ + t * 16;
      __m512 max[2] = {_mm512_set1_ps(-INFINITY), _mm512_set1_ps(-INFINITY)};
      for (int k = 0; k + 1 < num_keys_; k += 2) {
        max[0] = _mm512_max_ps(max[0], _mm512_load_ps(logits + k * 16 * kTiles));
        max[1] = _mm512_max_ps(max[1], _mm512_load_ps(logits + (k + 1) * 16 * kTiles));
      }
      if (num_keys_ % 2 != 0) {
        max[0] = _mm512_max_ps(max[0], _mm512_load_ps(logits + (num_keys_ - 1) * 16 * kTiles));
      }
      max_[t] = _mm512_mul_ps(_mm512_max_ps(max[0], max[1]), scale_);
      reference_[t] = _mm512_load_ps(scratch_.reference + (tile_ + t) * 16);
      over |=
          static_cast<unsigned>(_mm512_cmp_ps_mask(
              max_[t], _mm512_add_ps(reference_[t], _mm512_set1_ps(kReferenceSlack)), _CMP_GT_OQ))
          << 16 * t;
    }
    if (__builtin_expect(over != 0, 0)) {
      for (int t = 0; t < kTiles; ++t) {
        RaiseReference(scratch_, tile_ + t, chunk_, first_block_, over >> 16 * t & 0xFFFF, max_[t]);
        reference_[t] = _mm512_load_ps(scratch_.reference + (tile_ + t) * 16);
      }
    }
    for (int t = 0; t < kTiles; ++t) {
      sum_[t] = _mm512_load_ps(scratch_.sum + (tile_ + t) * 16);
      rounded_sum_[t] = _mm512_load_ps(scratch_.rounded_sum + (tile_ + t) * 16);
    }
  }

  // Raises the references of the heads in `heads` to the next integer above their largest logit:
  // what they have so far is multiplied by a power of two, which is exact.
  static __attribute__((noinline)) void RaiseReference(const AmxScratch& scratch, int64_t tile,
                                                       int chunk, bool first_block, unsigned heads,
                                                       __m512 max) {
    alignas(64) float maxima[16];
    _mm512_store_ps(maxima, max);
    for (int h = 0; h < 16; ++h) {
      if ((heads >> h & 1) == 0) continue;
      float& reference = scratch.reference[tile * 16 + h];
      const float raised = ceilf(maxima[h]);
      const float factor = reference == kNoReference ? 0.0f : exp2f(reference - raised);
      reference = raised;
      scratch.sum[tile * 16 + h] *= factor;
      scratch.rounded_sum[tile * 16 + h] *= factor;
      const __m512 factors = _mm512_set1_ps(factor);
      for (int64_t d = 0; !first_block && d < 2 * scratch.value_groups; ++d) {
        float* const out = scratch.out + ((tile * 2 * scratch.value_groups + d) * 16 + h) * 16;
        _mm512_store_ps(out, _mm512_mul_ps(_mm512_load_ps(out), factors));
      }
      for (int c = 0; c < chunk; ++c) {
        uint16_t* const weights =
            scratch.weights + ((tile * AmxScratch::kChunks + c) * 16 + h) * 32;
        _mm512_store_si512(weights, ScaleBFloat16(_mm512_load_si512(weights), factors));
      }
    }
  }

  SPARSEMLA_INLINE __m512 Weight(int key, int t) const {
    const __m512 logit = _mm512_load_ps(logits_ + (key * kTiles + t) * 16);
    const auto live = static_cast<__mmask16>(0u - (live_ >> key & 1));
    return WeightOf(_mm512_fmsub_ps(logit, scale_, reference_[t]), live);
  }

  // Keys 2i and 2i + 1 become the halves of words. Outputs are divided by the sum of the rounded
  // weights, so that a row of one key returns its value.
  SPARSEMLA_INLINE void WeighTwoKeys(int i) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i ones = _mm512_set1_epi32(0x3F803F80);
    for (int t = 0; t < kTiles; ++t) {
      const __m512 even = Weight(2 * i, t);
      const __m512 odd = Weight(2 * i + 1, t);
      sum_[t] = _mm512_add_ps(sum_[t], _mm512_add_ps(even, odd));
      const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
      const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
      const __m512i pair = _mm512_mask_blend_epi16(0xAAAAAAAA, low, high);
      rounded_sum_[t] = _mm512_dpbf16_ps(rounded_sum_[t], (__m512bh)pair, (__m512bh)ones);
      _mm512_store_si512(scratch_.pairs + (t * 16 + i) * 16, pair);
    }
  }

  SPARSEMLA_INLINE void Finish() {
    for (int t = 0; t < kTiles; ++t) {
      __m512i rows[16];
      for (int i = 0; i < 16; ++i) {
        rows[i] = _mm512_load_si512(scratch_.pairs + (t * 16 + i) * 16);
      }
      Transpose16(rows);
      uint16_t* const weights =
          scratch_.weights + ((tile_ + t) * AmxScratch::kChunks + chunk_) * 512;
      for (int h = 0; h < 16; ++h) _mm512_store_si512(weights + h * 32, rows[h]);
      _mm512_store_ps(scratch_.sum + (tile_ + t) * 16, sum_[t]);
      _mm512_store_ps(scratch_.rounded_sum + (tile_ + t) * 16, rounded_sum_[t]);
    }
  }

  const AmxScratch& scratch_;
  const __m512 scale_;
  const float* logits_ = nullptr;
  int64_t tile_ = 0;
  int chunk_ = 0;
  int num_keys_ = 0;
  uint32_t live_ = 0;  // bit k: key k counts
  bool first_block_ = false;
  int step_ = kSteps;
  __m512 max_[kTiles];
  __m512 reference_[kTiles];
  __m512 sum_[kTiles];
  __m512 rounded_sum_[kTiles];
};

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

// The next panel while this one is used: values of all keys of the block, `kLines` lines of each.
template <int kLines>
class PanelPacker {
 public:
  SPARSEMLA_INLINE PanelPacker(const AmxScratch& scratch, int num_chunks)
      : values_(scratch.values), end_(num_chunks * 16) {}

  // Starts with the lines from byte `offset` of the rows on.
  SPARSEMLA_INLINE void Begin(int64_t offset, std::byte* panel) {
    offset_ = offset;
    panel_ = panel;
    next_ = 0;
  }
  SPARSEMLA_INLINE void Step(int pairs) {
    for (int i = 0; i < pairs && next_ < end_; ++i, ++next_) {
      std::byte* const tile = panel_ + (next_ / 16) * (2 * kLines * kTileBytes) + next_ % 16 * 64;
      for (int line = 0; line < kLines; ++line) {
        PackLine(values_[2 * next_] + offset_ + line * 64,
                 values_[2 * next_ + 1] + offset_ + line * 64, tile + line * 2 * kTileBytes);
      }
    }
  }
  SPARSEMLA_INLINE void Stop() { next_ = end_; }

 private:
  const std::byte* const* values_;
  const int end_;
  int64_t offset_ = 0;
  std::byte* panel_ = nullptr;
  int next_ = 0;
};

// Adds finished products to the outputs, a row of four tiles at a time.
class Folder {
 public:
  SPARSEMLA_INLINE explicit Folder(bool first_block)
      : keep_(first_block ? __mmask16{0} : __mmask16{0xFFFF}) {}

  // `folded` [4, 16, 16]; tiles 0 and 1 belong at `out`, 2 and 3 at `out` + `second`.
  SPARSEMLA_INLINE void Begin(const float* folded, float* out, int64_t second) {
    folded_ = folded;
    out_ = out;
    second_ = second;
    row_ = 0;
  }
  SPARSEMLA_INLINE void Step(int rows) {
    for (int i = 0; i < rows && row_ < 16; ++i, ++row_) {
      for (int t = 0; t < 4; ++t) {
        float* const out = out_ + (t / 2) * second_ + (t % 2) * 256 + row_ * 16;
        const __m512 sum = _mm512_add_ps(_mm512_maskz_load_ps(keep_, out),
                                         _mm512_load_ps(folded_ + t * 256 + row_ * 16));
        _mm512_store_ps(out, sum);
      }
    }
  }

 private:
  const __mmask16 keep_;  // none in the first block: `out` holds nothing yet
  const float* folded_ = nullptr;
  float* out_ = nullptr;
  int64_t second_ = 0;
  int row_ = 16;
};

// Puts the columns of one head in order and writes it.
void WriteOutput(const AttentionCall& call, const AttentionItem& item, const AmxScratch& scratch,
                 int64_t h, float* values) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t g = 0; g < scratch.value_groups; ++g) {
    const float* const tiles =
        scratch.out + (((h / 16) * scratch.value_groups + g) * 32 + h % 16) * 16;
    const __m512 a = _mm512_load_ps(tiles);
    const __m512 b = _mm512_load_ps(tiles + 256);
    _mm512_store_ps(values + g * 32, _mm512_permutex2var_ps(a, low, b));
    _mm512_store_ps(values + g * 32 + 16, _mm512_permutex2var_ps(a, high, b));
  }
  WriteHead(
      call, item, h,
      {.max_log2 = scratch.reference[h], .sum = scratch.sum[h], .divisor = scratch.rounded_sum[h]},
      values);
}
