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

// ---- softmax ------------------------------------------------------------------------------------

// A constant in a register: the compiler would fetch it from memory at every step.
SPARSEMLA_INLINE __m512 Pinned(float value) {
  __m512 x = _mm512_set1_ps(value);
  asm("" : "+v"(x));
  return x;
}

// 2^x, to 5e-6 and exactly for integers: a polynomial of the fraction, scaled by the integer below
// x. Few instructions, as only about one vector instruction a cycle hides under the products. NaN
// for NaN, 0 for -inf, +inf beyond the range; with results below 2^-126 flushed, since they would
// cost an assist.
class Exp2 {
 public:
  SPARSEMLA_INLINE Exp2()
      : c4_(Pinned(0.0134266847745f)),
        c3_(Pinned(0.0522424727678f)),
        c2_(Pinned(0.241280198097f)),
        c1_(Pinned(0.69304484129f)),
        c0_(Pinned(1.0f)) {}
  SPARSEMLA_INLINE __m512 operator()(__m512 x) const {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_fmadd_ps(c4_, f, c3_);
    p = _mm512_fmadd_ps(p, f, c2_);
    p = _mm512_fmadd_ps(p, f, c1_);
    p = _mm512_fmadd_ps(p, f, c0_);
    return _mm512_scalef_ps(p, x);
  }

 private:
  const __m512 c4_;
  const __m512 c3_;
  const __m512 c2_;
  const __m512 c1_;
  const __m512 c0_;
};

// Subnormal operands and results count as zero while it lives.
class FlushSubnormals {
 public:
  SPARSEMLA_INLINE FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  SPARSEMLA_INLINE ~FlushSubnormals() { _mm_setcsr(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  const unsigned saved_;
};

// Before any key: below every logit, yet finite, so that a logit of -inf has weight 0.
constexpr float kNoReference = -3.402823466e38f;
// Weights may exceed 1, as bf16 has the range of float. The reference of a head comes from the
// first chunk and is raised only when the sum of the weights passes this: the maximum of every
// other chunk need not be known.
constexpr float kLargestSum = 0x1p64f;

// A scale of 0 would make NaN of a logit of -inf; the least normal number weighs all keys alike
// too.
SPARSEMLA_INLINE float MagnitudeOf(float scale) {
  const float magnitude = __builtin_fabsf(scale);
  return magnitude < 1.17549435e-38f ? 1.17549435e-38f : magnitude;
}

// The logits of one pass over the query: 32 keys by kTiles tiles of heads, lanes = heads.
template <int kTiles>
class Softmax {
 public:
  static constexpr int kSteps = 18;  // as many as the logits of 576 columns have

  SPARSEMLA_INLINE Softmax(const AmxScratch& scratch, float scale_log2)
      : scratch_(scratch),
        scale_(Pinned(MagnitudeOf(scale_log2))),
        ones_(Pinned(__builtin_bit_cast(float, 0x3F803F80))) {}  // pairs of 1 in bf16

  // Takes over `logits` [32, 16 * kTiles] of `num_keys` keys of chunk `chunk`, tile `tile` on. The
  // keys that fill up a chunk get weight 0.
  SPARSEMLA_INLINE void Begin(float* logits, int64_t tile, int chunk, int num_keys,
                              bool first_block) {
    for (int i = num_keys * 16 * kTiles; i < 32 * 16 * kTiles; i += 16) {
      _mm512_store_ps(logits + i, _mm512_set1_ps(-INFINITY));
    }
    logits_ = logits;
    tile_ = tile;
    chunk_ = chunk;
    first_block_ = first_block;
    step_ = 0;
  }

  // One quarter of one of kSteps parts of the work, quarters in order; nothing where none is left.
  // A part has a quarter for each product of a step, so that every product has its share of vector
  // work behind it.
  template <int kQuarter>
  SPARSEMLA_INLINE void Step() {
    constexpr int t = kQuarter / 2;
    if (__builtin_expect(step_ > 0 && step_ <= 16, 1)) {
      if constexpr (t < kTiles && kQuarter % 2 == 0) {
        even_[t] = Weight<t>(2 * (step_ - 1));
      } else if constexpr (t < kTiles) {
        PairKeys<t>(step_ - 1);
        if (step_ % 4 == 0) TransposeQuads<t>(step_ - 4);
      }
    } else if (step_ == 0) {
      if constexpr (kQuarter == 3) LoadStates();
    } else if (step_ == kSteps - 1) {
      TransposeLanes<0>(kQuarter);
      if constexpr (kTiles == 2) TransposeLanes<1>(kQuarter);
      if constexpr (kQuarter == 3) {
        if (__builtin_expect(SumsAreTooLarge(), 0)) {
          Redo(scratch_, scale_, logits_, tile_, chunk_, first_block_);
        } else {
          StoreStates();
        }
      }
    }
    if (kQuarter == 3 && step_ < kSteps) ++step_;
  }
  SPARSEMLA_INLINE void Step() {
    Step<0>();
    Step<1>();
    Step<2>();
    Step<3>();
  }
  SPARSEMLA_INLINE bool pending() const { return step_ < kSteps; }

 private:
  SPARSEMLA_INLINE void LoadStates() {
    LoadState<0>();
    if constexpr (kTiles == 2) LoadState<1>();
    if (__builtin_expect(raise_ || AnyHeadIsFresh(), 0)) {
      RaiseReferences(scratch_, scale_, logits_, tile_, chunk_, first_block_);
      LoadState<0>();
      if constexpr (kTiles == 2) LoadState<1>();
    }
  }
  template <int t>
  SPARSEMLA_INLINE void LoadState() {
    reference_[t] = _mm512_load_ps(scratch_.reference + (tile_ + t) * 16);
    sum_[t] = _mm512_load_ps(scratch_.sum + (tile_ + t) * 16);
    rounded_sum_[t] = _mm512_load_ps(scratch_.rounded_sum + (tile_ + t) * 16);
  }
  SPARSEMLA_INLINE bool AnyHeadIsFresh() const {
    const __m512 none = _mm512_set1_ps(kNoReference);
    unsigned fresh = _mm512_cmp_ps_mask(reference_[0], none, _CMP_EQ_OQ);
    if constexpr (kTiles == 2) fresh |= _mm512_cmp_ps_mask(reference_[1], none, _CMP_EQ_OQ);
    return fresh != 0;
  }
  SPARSEMLA_INLINE bool SumsAreTooLarge() const {
    if (raise_) return false;
    const __m512 limit = _mm512_set1_ps(kLargestSum);
    unsigned large = _mm512_cmp_ps_mask(sum_[0], limit, _CMP_GT_OQ);
    if constexpr (kTiles == 2) large |= _mm512_cmp_ps_mask(sum_[1], limit, _CMP_GT_OQ);
    return large != 0;
  }

  // The same logits once more, with references that fit them.
  static __attribute__((noinline)) void Redo(const AmxScratch& scratch, __m512 scale, float* logits,
                                             int64_t tile, int chunk, bool first_block) {
    Softmax softmax(scratch, _mm512_cvtss_f32(scale));
    softmax.Begin(logits, tile, chunk, 32, first_block);
    softmax.raise_ = true;
    while (softmax.pending()) softmax.Step();
  }

  static __attribute__((noinline)) void RaiseReferences(const AmxScratch& scratch, __m512 scale,
                                                        const float* logits, int64_t tile,
                                                        int chunk, bool first_block) {
    for (int t = 0; t < kTiles; ++t) {
      __m512 max = _mm512_set1_ps(-INFINITY);
      for (int k = 0; k < 32; ++k) {
        max = _mm512_max_ps(max, _mm512_load_ps(logits + (k * kTiles + t) * 16));
      }
      max = _mm512_mul_ps(max, scale);
      const __m512 reference = _mm512_load_ps(scratch.reference + (tile + t) * 16);
      const unsigned heads = _mm512_cmp_ps_mask(max, reference, _CMP_GT_OQ);
      RaiseReference(scratch, tile + t, chunk, first_block, heads, max);
    }
  }

  // Raises the references of the heads in `heads` to the next integer above their largest logit:
  // what they have so far is multiplied by a power of two, which is exact.
  static void RaiseReference(const AmxScratch& scratch, int64_t tile, int chunk, bool first_block,
                             unsigned heads, __m512 max) {
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

  template <int t>
  SPARSEMLA_INLINE __m512 Weight(int key) const {
    const __m512 logit = _mm512_load_ps(logits_ + (key * kTiles + t) * 16);
    return exp2_(_mm512_fmsub_ps(logit, scale_, reference_[t]));
  }

  // Keys 2i and 2i + 1 become the halves of words. Weights are cut to bf16 and outputs divided by
  // the sum of the cut weights: a row of one key returns its value, and what cutting takes from all
  // weights alike cancels.
  template <int t>
  SPARSEMLA_INLINE void PairKeys(int i) {
    const __m512 odd = Weight<t>(2 * i + 1);
    sum_[t] = _mm512_add_ps(sum_[t], _mm512_add_ps(even_[t], odd));
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even_[t]), 16);
    const __m512i pair = _mm512_mask_blend_epi16(0xAAAAAAAA, low, _mm512_castps_si512(odd));
    rounded_sum_[t] = _mm512_dpbf16_ps(rounded_sum_[t], (__m512bh)pair, (__m512bh)ones_);
    _mm512_store_si512(Pairs<t>(i), pair);
  }

  template <int t>
  SPARSEMLA_INLINE uint32_t* Pairs(int i) const {
    return scratch_.pairs + (t * 16 + i) * 16;
  }

  // The weights as the A operand, heads by keys, are the transpose of the pairs: first 4 x 4 words
  // within the lanes of four pairs, then 4 x 4 lanes.
  template <int t>
  SPARSEMLA_INLINE void TransposeQuads(int i) {
    const __m512i r0 = _mm512_load_si512(Pairs<t>(i));
    const __m512i r1 = _mm512_load_si512(Pairs<t>(i + 1));
    const __m512i r2 = _mm512_load_si512(Pairs<t>(i + 2));
    const __m512i r3 = _mm512_load_si512(Pairs<t>(i + 3));
    const __m512i t0 = _mm512_unpacklo_epi32(r0, r1);
    const __m512i t1 = _mm512_unpackhi_epi32(r0, r1);
    const __m512i t2 = _mm512_unpacklo_epi32(r2, r3);
    const __m512i t3 = _mm512_unpackhi_epi32(r2, r3);
    _mm512_store_si512(Pairs<t>(i), _mm512_unpacklo_epi64(t0, t2));
    _mm512_store_si512(Pairs<t>(i + 1), _mm512_unpackhi_epi64(t0, t2));
    _mm512_store_si512(Pairs<t>(i + 2), _mm512_unpacklo_epi64(t1, t3));
    _mm512_store_si512(Pairs<t>(i + 3), _mm512_unpackhi_epi64(t1, t3));
  }

  // Heads j, j + 4, j + 8 and j + 12.
  template <int t>
  SPARSEMLA_INLINE void TransposeLanes(int j) {
    const __m512i r0 = _mm512_load_si512(Pairs<t>(j));
    const __m512i r1 = _mm512_load_si512(Pairs<t>(j + 4));
    const __m512i r2 = _mm512_load_si512(Pairs<t>(j + 8));
    const __m512i r3 = _mm512_load_si512(Pairs<t>(j + 12));
    const __m512i t0 = _mm512_shuffle_i32x4(r0, r1, 0x88);
    const __m512i t1 = _mm512_shuffle_i32x4(r0, r1, 0xDD);
    const __m512i t2 = _mm512_shuffle_i32x4(r2, r3, 0x88);
    const __m512i t3 = _mm512_shuffle_i32x4(r2, r3, 0xDD);
    uint16_t* const weights =
        scratch_.weights + ((tile_ + t) * AmxScratch::kChunks + chunk_) * 512 + j * 32;
    _mm512_store_si512(weights, _mm512_shuffle_i32x4(t0, t2, 0x88));
    _mm512_store_si512(weights + 4 * 32, _mm512_shuffle_i32x4(t1, t3, 0x88));
    _mm512_store_si512(weights + 8 * 32, _mm512_shuffle_i32x4(t0, t2, 0xDD));
    _mm512_store_si512(weights + 12 * 32, _mm512_shuffle_i32x4(t1, t3, 0xDD));
  }

  SPARSEMLA_INLINE void StoreStates() {
    for (int t = 0; t < kTiles; ++t) {
      _mm512_store_ps(scratch_.sum + (tile_ + t) * 16, sum_[t]);
      _mm512_store_ps(scratch_.rounded_sum + (tile_ + t) * 16, rounded_sum_[t]);
    }
  }

  const AmxScratch& scratch_;
  const __m512 scale_;
  const Exp2 exp2_;
  const __m512 ones_;
  float* logits_ = nullptr;
  int64_t tile_ = 0;
  int chunk_ = 0;
  bool first_block_ = false;
  bool raise_ = false;  // fit the references to these logits first
  int step_ = kSteps;
  __m512 even_[kTiles];
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
