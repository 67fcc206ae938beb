/* What all kernels on a CPU share: the types of stored values, registers of floats, checks of x, and transposition. */

#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define NAMED_(level, name) pomona_##level##_##name
#define NAMED(level, name) NAMED_(level, name)
#define PUBLIC(name) __attribute__((visibility("default"))) NAMED(NAME, name)

enum { FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 }; /* the type of the stored values; the last two are codes */
enum { DONE, NO_MEMORY, NOT_FINITE, TOO_LARGE, NOT_ROUNDED }; /* the return codes */

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t between(int64_t low, int64_t i, int64_t high) { return i < low ? low : smaller(i, high); }
INLINE int64_t value_bytes(int64_t value_type) { return value_type == FLOAT32 ? 4 : 2; }

INLINE float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE float from_half(uint16_t half) {
#ifdef __F16C__
  return _cvtsh_ss(half);
#else
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
  if (rest >= 0x7C00) return from_bits(sign | 0x7F800000 | (rest & 0x3FF) << 13);
  float value = from_bits(rest << 13) * 0x1p112f; /* a product shifts the exponent of subnormal numbers too */
  return sign ? -value : value;
#endif
}

INLINE float value_at(const char *values, int64_t i, int value_type) {
  if (value_type == FLOAT32) return ((const float *)values)[i];
  uint16_t bits = ((const uint16_t *)values)[i];
  return value_type == FLOAT16 ? from_half(bits) : from_bits((uint32_t)bits << 16);
}

#if defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((optimize("O3")))
#else
#define VECTORIZED
#endif

/* Return whether all numbers are finite: a pruned weight times another one is not 0 in the dense product. */
static VECTORIZED int all_finite(const float *x, int64_t count) {
  uint32_t worst = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    worst = bits > worst ? bits : worst;
  }
  return worst < 0x7F800000;
}

/* Return whether the n values from each offset on are finite. Runs may overlap, as those of a convolution do, so that
 * everything between the first and the last offset is checked first. */
static int all_runs_finite(const float *x, const int64_t *offsets, int64_t columns, int64_t n) {
  int64_t first = offsets[0], last = offsets[0];
  for (int64_t c = 1; c < columns; c++) {
    first = smaller(first, offsets[c]);
    last = last > offsets[c] ? last : offsets[c];
  }
  if (last - first < columns * n && all_finite(x + first, last - first + n)) return 1;
  for (int64_t c = 0; c < columns; c++)
    if (!all_finite(x + offsets[c], n)) return 0;
  return 1;
}

/* ---- registers of WIDTH floats */

#if defined(__AVX512F__)

#define REGISTER_BYTES 64
#define WIDTH 16
typedef __m512 Floats;

INLINE Floats load(const char *values, int64_t i, int value_type) {
  if (value_type == FLOAT32) return _mm512_loadu_ps((const float *)values + i);
  __m256i bits = _mm256_loadu_si256((const void *)((const uint16_t *)values + i));
  if (value_type == FLOAT16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
INLINE Floats add_product(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }

#elif defined(__AVX2__)

#define REGISTER_BYTES 32
#define WIDTH 8
typedef __m256 Floats;

INLINE Floats load(const char *values, int64_t i, int value_type) {
  if (value_type == FLOAT32) return _mm256_loadu_ps((const float *)values + i);
  __m128i bits = _mm_loadu_si128((const void *)((const uint16_t *)values + i));
  if (value_type == FLOAT16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
INLINE Floats add_product(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }

#else

#define REGISTER_BYTES 16
#define WIDTH 8
typedef struct { float at[WIDTH]; } Floats;
#define FOR_EACH_LANE(expression) for (int lane = 0; lane < WIDTH; lane++) result.at[lane] = expression; return result

INLINE Floats load(const char *values, int64_t i, int value_type) {
  Floats result;
  FOR_EACH_LANE(value_at(values, i + lane, value_type));
}
INLINE Floats add_product(Floats a, Floats b, Floats sum) {
  Floats result;
  FOR_EACH_LANE(sum.at[lane] + a.at[lane] * b.at[lane]);
}

#endif

/* ---- transposition */

#if defined(__AVX2__) && !defined(__AVX512F__)
#define SQUARE 8
#else
#define SQUARE 16
#endif

/* Transpose SQUARE × SQUARE numbers, from rows `ld` apart to columns of `to`. */
INLINE void transpose_square(const float *x, int64_t ld, float *to, int64_t ldto) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(x + i * ld);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
#define UNPACK_PAIRS(f, x, y) _mm512_castpd_ps(f(_mm512_castps_pd(x), _mm512_castps_pd(y)))
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = UNPACK_PAIRS(_mm512_unpacklo_pd, b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = UNPACK_PAIRS(_mm512_unpackhi_pd, b[i + j], b[i + j + 2]);
    }
#undef UNPACK_PAIRS
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) { /* a[j + 4 i] has columns j, j + 4, j + 8 and j + 12 of rows 4 i to 4 i + 3 */
    __m512 low = _mm512_shuffle_f32x4(a[j], a[j + 4], 0x88), high = _mm512_shuffle_f32x4(a[j], a[j + 4], 0xDD);
    __m512 more = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0x88);
    __m512 most = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0xDD);
    _mm512_storeu_ps(to + j * ldto, _mm512_shuffle_f32x4(low, more, 0x88));
    _mm512_storeu_ps(to + (j + 4) * ldto, _mm512_shuffle_f32x4(high, most, 0x88));
    _mm512_storeu_ps(to + (j + 8) * ldto, _mm512_shuffle_f32x4(low, more, 0xDD));
    _mm512_storeu_ps(to + (j + 12) * ldto, _mm512_shuffle_f32x4(high, most, 0xDD));
  }
#elif defined(__AVX2__)
  __m256 a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    __m256 even = _mm256_loadu_ps(x + i * ld), odd = _mm256_loadu_ps(x + (i + 1) * ld);
    a[i] = _mm256_unpacklo_ps(even, odd);
    a[i + 1] = _mm256_unpackhi_ps(even, odd);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) /* b[i + j] has columns j and j + 4 of rows i to i + 3 */
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
      b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xEE);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    _mm256_storeu_ps(to + j * ldto, _mm256_permute2f128_ps(b[j], b[j + 4], 0x20));
    _mm256_storeu_ps(to + (j + 4) * ldto, _mm256_permute2f128_ps(b[j], b[j + 4], 0x31));
  }
#else
  for (int i = 0; i < SQUARE; i++)
    for (int j = 0; j < SQUARE; j++) to[j * ldto + i] = x[i * ld + j];
#endif
}

/* Transpose rows × columns numbers. */
static void transpose(const float *x, int64_t ld, int64_t rows, int64_t columns, float *to, int64_t ldto) {
  for (int64_t i = 0; i < rows; i += SQUARE)
    for (int64_t j = 0; j < columns; j += SQUARE)
      if (i + SQUARE <= rows && j + SQUARE <= columns) transpose_square(x + i * ld + j, ld, to + j * ldto + i, ldto);
      else
        for (int64_t r = i; r < smaller(rows, i + SQUARE); r++)
          for (int64_t c = j; c < smaller(columns, j + SQUARE); c++) to[c * ldto + r] = x[r * ld + c];
}
