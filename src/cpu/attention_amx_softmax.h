// Included by attention_amx.cc inside its target region and anonymous namespace, after
// attention_amx_vector.h. No guard.
//
// The softmax of the AMX kernel: logits of one pass over the query become weights in bf16 while the
// next pass is multiplied.

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
