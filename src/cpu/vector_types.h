// Included by attention_vector.h inside a target region and an anonymous namespace, where kLanes is
// known. No includes, no guard.
//
// Vectors of kLanes elements and the exact conversions of numeric.h on them.

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

#define SPARSEMLA_INLINE inline __attribute__((always_inline))

template <typename V>
SPARSEMLA_INLINE V Load(const void* source) {
  V v;
  __builtin_memcpy(&v, source, sizeof(V));
  return v;
}

template <typename V>
SPARSEMLA_INLINE void Store(void* target, V v) {
  __builtin_memcpy(target, &v, sizeof(V));
}

// x - 0 is x for every x, -0 and NaN included.
SPARSEMLA_INLINE Floats Broadcast(float x) {
  return x - Floats{};
}

SPARSEMLA_INLINE Floats AsFloats(Words w) {
  return reinterpret_cast<Floats>(w);
}
SPARSEMLA_INLINE Words AsWords(Floats v) {
  return reinterpret_cast<Words>(v);
}

// ---- storage types, a vector at a time ---------------------------------------------------------

SPARSEMLA_INLINE Floats WidenVector(float, const std::byte* source) {
  return Load<Floats>(source);
}

SPARSEMLA_INLINE Floats WidenVector(BFloat16, const std::byte* source) {
  return AsFloats(__builtin_convertvector(Load<Halves>(source), Words) << 16);
}

// A value with a small exponent and `kMantissaBits` of mantissa, widened: normal numbers by moving
// the exponent, subnormal ones by converting the mantissa (`least` is the smallest of them).
template <int kMantissaBits>
SPARSEMLA_INLINE Words WidenMagnitude(Words magnitude, uint32_t rebias, float least) {
  const Words normal = (magnitude << (23 - kMantissaBits)) + (rebias << 23);
  const Ints count = reinterpret_cast<Ints>(magnitude);
  const Words subnormal = AsWords(__builtin_convertvector(count, Floats) * least);
  return count < (1 << kMantissaBits) ? subnormal : normal;
}

SPARSEMLA_INLINE Floats WidenVector(Float16, const std::byte* source) {
  const Words bits = __builtin_convertvector(Load<Halves>(source), Words);
  const Words magnitude = bits & 0x7FFFu;
  const Words special = (magnitude << 13) | 0x7F800000u;
  const Words finite = WidenMagnitude<10>(magnitude, 112, 0x1p-24f);
  const Words value = reinterpret_cast<Ints>(magnitude) >= 0x7C00 ? special : finite;
  return AsFloats(value | (bits & 0x8000u) << 16);
}

// In two steps: g++ takes a direct conversion apart.
SPARSEMLA_INLINE Words LoadBytes(const std::byte* source) {
  return __builtin_convertvector(__builtin_convertvector(Load<Bytes>(source), Halves), Words);
}

SPARSEMLA_INLINE Floats WidenVector(Float8E4M3, const std::byte* source) {
  const Words bits = LoadBytes(source);
  const Words magnitude = bits & 0x7Fu;
  const Words finite = WidenMagnitude<3>(magnitude, 120, 0x1p-9f);
  const Words value = reinterpret_cast<Ints>(magnitude) == 0x7F ? Words{} + 0x7FC00000u : finite;
  return AsFloats(value | (bits & 0x80u) << 24);
}

SPARSEMLA_INLINE Floats WidenVector(Float8E4M3Fnuz, const std::byte* source) {
  const Words bits = LoadBytes(source);
  const Words finite = WidenMagnitude<3>(bits & 0x7Fu, 119, 0x1p-10f) | (bits & 0x80u) << 24;
  return AsFloats(reinterpret_cast<Ints>(bits) == 0x80 ? Words{} + 0x7FC00000u : finite);
}

// target[i] = source[i] * factor, for elements of type T at any address.
template <typename T>
void WidenRow(const std::byte* source, int64_t count, float factor, float* target) {
  const int64_t whole = count - count % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Store(target + i, WidenVector(T{}, source + i * static_cast<int64_t>(sizeof(T))) * factor);
  }
  for (int64_t i = whole; i < count; ++i) {
    T element;
    __builtin_memcpy(&element, source + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    target[i] = ToFloat(element) * factor;
  }
}

[[maybe_unused]] void WidenElements(DType dtype, const std::byte* source, int64_t count,
                                    float* target) {
  switch (dtype) {
    case DType::kFloat32:
      return WidenRow<float>(source, count, 1.0f, target);
    case DType::kBFloat16:
      return WidenRow<BFloat16>(source, count, 1.0f, target);
    case DType::kFloat16:
      return WidenRow<Float16>(source, count, 1.0f, target);
    case DType::kFloat8E4M3:
      return WidenRow<Float8E4M3>(source, count, 1.0f, target);
    case DType::kFloat8E4M3Fnuz:
      return WidenRow<Float8E4M3Fnuz>(source, count, 1.0f, target);
  }
}

SPARSEMLA_INLINE Halves NarrowVector(BFloat16, Floats x) {
  const Words bits = AsWords(x);
  const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40u, Halves);
}

SPARSEMLA_INLINE Halves NarrowVector(Float16, Floats x) {
  const Words bits = AsWords(x);
  const Words magnitude = bits & 0x7FFFFFFFu;
  const Ints order = reinterpret_cast<Ints>(magnitude);
  const Words rebiased = magnitude - (112u << 23);
  Words code = (rebiased + 0xFFFu + ((rebiased >> 13) & 1u)) >> 13;
  // Below 2^-14, adding 0.5 leaves x * 2^24 rounded in the low bits.
  const Words subnormal = AsWords(AsFloats(magnitude) + 0.5f) - 0x3F000000u;
  code = order < 0x38800000 ? subnormal : code;
  code = order >= 0x477FF000 ? Words{} + 0x7C00u : code;  // >= 65520
  code = order > 0x7F800000 ? Words{} + 0x7E00u : code;
  return __builtin_convertvector(code | ((bits >> 16) & 0x8000u), Halves);
}

SPARSEMLA_INLINE Floats NarrowVector(float, Floats x) {
  return x;
}

// target[i] = source[i] * factor, rounded to nearest even.
template <typename T>
void NarrowRow(const float* source, int64_t count, float factor, void* target) {
  T* const out = static_cast<T*>(target);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Store(out + i, NarrowVector(T{}, Load<Floats>(source + i) * factor));
  }
  for (; i < count; ++i) out[i] = FromFloat<T>(source[i] * factor);
}
