/* The product of a packed balanced matrix with dense vectors, on a CPU.
 *
 * This file is compiled once for each level of instructions, NAME, and each level has the same two functions:
 *
 *   rows     y (n × rows) = x (n × columns, contiguous rows) times the transposed matrix. The lanes of a
 *            register are rows of the matrix, whose survivors lie side by side. A narrow block of x fits into
 *            registers, and permuting these gathers what the lanes ask for: only the matrix is read from memory.
 *   columns  y (rows × n) = the matrix times x (columns × n), each column's n values contiguous wherever they
 *            begin.
 *
 * Where there are many vectors, the lanes are these, and a survivor adds its multiple of a run of them.
 *
 * Values and words of indices lie as [group of 32 rows][block][slot or word][row]. A word holds three indices of
 * 5 bits, two of 8 or one of 16. Whatever the indices are, they stay inside the memory: see `reach`.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LANES 32
#define INLINE static inline __attribute__((always_inline))
#define NAMED_(level, name) pomona_##level##_##name
#define NAMED(level, name) NAMED_(level, name)
#define PUBLIC(name) __attribute__((visibility("default"))) NAMED(NAME, name)

enum { FLOAT32, FLOAT16, BFLOAT16 };       /* what the values are stored as */
enum { DONE, NO_MEMORY, NOT_FINITE };      /* what the functions return */

typedef struct {
  const char *values;
  const uint16_t *indices;
  const float *bias; /* or null */
  int64_t rows, columns, block, kept, kind, relu;
  int64_t groups, blocks, bits, words; /* these four follow from the others */
} Matrix;

INLINE int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t size(int64_t kind) { return kind == FLOAT32 ? 4 : 2; }

static Matrix derive(Matrix m) {
  m.groups = up(m.rows, LANES);
  m.blocks = up(m.columns, m.block);
  m.bits = m.block <= 32 ? 5 : m.block <= 256 ? 8 : 16;
  m.words = up(m.kept, 16 / m.bits);
  return m;
}

/* How many columns an index can reach, whatever it is. */
INLINE int64_t reach(const Matrix *m) { return (m->blocks - 1) * m->block + (1 << m->bits); }

INLINE const char *values_at(const Matrix *m, int64_t group, int64_t block) {
  return m->values + (group * m->blocks + block) * m->kept * LANES * size(m->kind);
}

INLINE const uint16_t *words_at(const Matrix *m, int64_t group, int64_t block) {
  return m->indices + (group * m->blocks + block) * m->words * LANES;
}

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
  float value = from_bits(rest << 13) * 0x1p112f; /* a product moves the exponent of subnormal numbers too */
  return sign ? -value : value;
#endif
}

INLINE float value_at(const char *values, int64_t i, int kind) {
  if (kind == FLOAT32) return ((const float *)values)[i];
  uint16_t bits = ((const uint16_t *)values)[i];
  return kind == FLOAT16 ? from_half(bits) : from_bits((uint32_t)bits << 16);
}

#if defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((optimize("O3")))
#else
#define VECTORIZED
#endif

/* Whether 0 times each of them is 0: else a pruned weight would count in the dense product, and here it does not. */
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

/* The same of n values behind each offset. Runs may overlap, as a convolution's do, so all between the first and
 * the last is looked at first. */
static int all_runs_finite(const float *x, const int64_t *offsets, int64_t columns, int64_t n) {
  int64_t first = offsets[0], last = offsets[0];
  for (int64_t c = 1; c < columns; c++) {
    first = least(first, offsets[c]);
    last = last > offsets[c] ? last : offsets[c];
  }
  if (last - first < columns * n && all_finite(x + first, last - first + n)) return 1;
  for (int64_t c = 0; c < columns; c++)
    if (!all_finite(x + offsets[c], n)) return 0;
  return 1;
}

/* The bias and the activation of sums side by side: all of one row, or of the rows from there on. */
static VECTORIZED void activate(const Matrix *m, int64_t row, int one, float *restrict sums, int64_t count) {
  if (m->bias && one)
    for (int64_t i = 0; i < count; i++) sums[i] += m->bias[row];
  if (m->bias && !one)
    for (int64_t i = 0; i < count; i++) sums[i] += m->bias[row + i];
  if (m->relu)
    for (int64_t i = 0; i < count; i++) sums[i] = sums[i] < 0 ? 0.0f : sums[i]; /* a NaN is not below 0 and stays */
}

/* ---- lanes are rows */

/* What a level has to say: a register V of floats and I of indices, and how to fill them. `pick` takes x[index]
 * for every lane: by permuting registers where a block fits into `windows` times 32 floats, else (0) by a gather. */

#if defined(__AVX512F__)

#define WIDTH 16
#define TILE 6     /* vectors x at a time, as many as the registers hold sums for, */
#define TOGETHER 4 /* or groups of rows for a lone vector: more streams are read faster */
typedef __m512 V;
typedef __m512i I;

INLINE V load(const char *values, int64_t i, int kind) {
  if (kind == FLOAT32) return _mm512_loadu_ps((const float *)values + i);
  __m256i bits = _mm256_loadu_si256((const void *)((const uint16_t *)values + i));
  if (kind == FLOAT16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

INLINE I load_words(const uint16_t *words) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)words)); }
INLINE I shift(I words, int by) { return _mm512_srli_epi32(words, by); }
INLINE V add_product(V a, V b, V sum) { return _mm512_fmadd_ps(a, b, sum); }

/* A permutation of two registers looks at no more than the low 5 bits of an index. */
INLINE V window(const float *x, I index) {
  return _mm512_permutex2var_ps(_mm512_loadu_ps(x), index, _mm512_loadu_ps(x + 16));
}

INLINE V pick(const float *x, I index, int bits, int windows) {
  if (windows == 0)
    return _mm512_i32gather_ps(_mm512_and_si512(index, _mm512_set1_epi32((1 << bits) - 1)), x, 4);
  V low = window(x, index);
  if (windows == 1) return low;
  __mmask16 odd = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
  low = _mm512_mask_mov_ps(low, odd, window(x + 32, index));
  if (windows == 2) return low;
  V high = _mm512_mask_mov_ps(window(x + 64, index), odd, window(x + 96, index));
  return _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(index, _mm512_set1_epi32(64)), high);
}

#elif defined(__AVX2__)

#define WIDTH 8
#define TILE 1
#define TOGETHER 1
typedef __m256 V;
typedef __m256i I;

INLINE V load(const char *values, int64_t i, int kind) {
  if (kind == FLOAT32) return _mm256_loadu_ps((const float *)values + i);
  __m128i bits = _mm_loadu_si128((const void *)((const uint16_t *)values + i));
  if (kind == FLOAT16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

INLINE I load_words(const uint16_t *words) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)words)); }
INLINE I shift(I words, int by) { return _mm256_srli_epi32(words, by); }
INLINE V add_product(V a, V b, V sum) { return _mm256_fmadd_ps(a, b, sum); }
INLINE V octet(const float *x, I index) { return _mm256_permutevar8x32_ps(_mm256_loadu_ps(x), index); }

INLINE V pick(const float *x, I index, int bits, int windows) {
  if (windows != 1)
    return _mm256_i32gather_ps(x, _mm256_and_si256(index, _mm256_set1_epi32((1 << bits) - 1)), 4);
  /* A blend goes by the sign: bits 3 and 4 of the index are moved there. */
  V third = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)), fourth = _mm256_castsi256_ps(_mm256_slli_epi32(index, 27));
  V low = _mm256_blendv_ps(octet(x, index), octet(x + 8, index), third);
  V high = _mm256_blendv_ps(octet(x + 16, index), octet(x + 24, index), third);
  return _mm256_blendv_ps(low, high, fourth);
}

#else

#define WIDTH 8
#define TILE 1
#define TOGETHER 1
typedef struct { float at[WIDTH]; } V;
typedef struct { uint32_t at[WIDTH]; } I;
#define EACH(expression) for (int lane = 0; lane < WIDTH; lane++) result.at[lane] = expression; return result

INLINE V load(const char *values, int64_t i, int kind) { V result; EACH(value_at(values, i + lane, kind)); }
INLINE I load_words(const uint16_t *words) { I result; EACH(words[lane]); }
INLINE I shift(I words, int by) { I result; EACH(words.at[lane] >> by); }
INLINE V add_product(V a, V b, V sum) { V result; EACH(sum.at[lane] + a.at[lane] * b.at[lane]); }
INLINE V pick(const float *x, I index, int bits, int windows) {
  (void)windows;
  V result;
  EACH(x[index.at[lane] & ((1u << bits) - 1)]);
}

#endif

#define PARTS (LANES / WIDTH)

/* What `slots` ≤ 3 slots under one word add to the sums of `tile` vectors x. All is read in the order of memory. */
INLINE void add_word(const char *values, const uint16_t *words, const float *x, int64_t ldx, int slots, int tile,
                     int kind, int bits, int windows, V sums[][PARTS]) {
  I word[PARTS];
#pragma GCC unroll 4
  for (int part = 0; part < PARTS; part++) word[part] = load_words(words + part * WIDTH);
#pragma GCC unroll 3
  for (int s = 0; s < slots; s++)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      V value = load(values, s * LANES + part * WIDTH, kind);
      I index = shift(word[part], bits * s);
#pragma GCC unroll 8
      for (int t = 0; t < tile; t++)
        sums[t][part] = add_product(value, pick(x + t * ldx, index, bits, windows), sums[t][part]);
    }
}

/* `together` groups of rows times `tile` vectors. */
INLINE void add_groups(const Matrix *m, int64_t group, const float *x, int64_t ldx, float *y, int together, int tile,
                       int kind, int bits, int windows) {
  union { V wide[TILE][PARTS]; float narrow[TILE][LANES]; } sums[TOGETHER];
#pragma GCC unroll 4
  for (int g = 0; g < together; g++) memset(sums[g].wide, 0, tile * sizeof *sums[g].wide);
  const int per = 16 / bits, rest = m->kept % per;
  const int64_t full = m->kept / per, step = LANES * size(kind);
  const int64_t values_apart = m->blocks * m->kept * step, words_apart = m->blocks * m->words * LANES;
  const char *values = values_at(m, group, 0);
  const uint16_t *words = words_at(m, group, 0);
#define ADD(slots)                                                                                              \
  _Pragma("GCC unroll 4") for (int g = 0; g < together; g++)                                                    \
      add_word(values + g * values_apart, words + g * words_apart, x, ldx, slots, tile, kind, bits, windows,    \
               sums[g].wide)
  for (int64_t block = 0; block < m->blocks; block++, x += m->block) {
    for (int64_t word = 0; word < full; word++, values += per * step, words += LANES) ADD(per);
    if (rest == 1) ADD(1);
    if (rest == 2) ADD(2);
    if (rest) values += rest * step, words += LANES;
  }
#undef ADD
  for (int g = 0; g < together; g++) {
    int64_t first = (group + g) * LANES, count = least(LANES, m->rows - first);
    for (int t = 0; t < tile; t++) {
      activate(m, first, 0, sums[g].narrow[t], count);
      memcpy(y + t * m->rows + first, sums[g].narrow[t], count * sizeof *y);
    }
  }
}

/* The one of the many that fits, constants making each a loop of its own, from `group` on and before `end`.
 * It returns the group after those that are done. */
INLINE int64_t choose_groups(const Matrix *m, int64_t group, int64_t end, int64_t n, const float *x, int64_t ldx,
                             float *y, int kind) {
  if (m->bits == 5 && n == 1 && TOGETHER > 1 && group + TOGETHER <= end) {
    add_groups(m, group, x, ldx, y, TOGETHER, 1, kind, 5, 1);
    return group + TOGETHER;
  }
#define CASE(tile) case tile: add_groups(m, group, x, ldx, y, 1, tile, kind, 5, 1); return group + 1
  if (m->bits == 5)
    switch (n) {
      CASE(1);
#if TILE > 1
      CASE(2);
      CASE(3);
      CASE(4);
      CASE(5);
      CASE(6);
#endif
    }
#undef CASE
  if (m->bits == 16) add_groups(m, group, x, ldx, y, 1, 1, kind, 16, 0);
  else if (m->block <= 64) add_groups(m, group, x, ldx, y, 1, 1, kind, 8, 2);
  else if (m->block <= 128) add_groups(m, group, x, ldx, y, 1, 1, kind, 8, 4);
  else add_groups(m, group, x, ldx, y, 1, 1, kind, 8, 0);
  return group + 1;
}

#define CHOICE(name, kind)                                                                                        \
  static int64_t name(const Matrix *m, int64_t group, int64_t end, int64_t n, const float *x, int64_t ldx, float *y) { \
    return choose_groups(m, group, end, n, x, ldx, y, kind);                                                      \
  }
CHOICE(add_float32, FLOAT32)
CHOICE(add_float16, FLOAT16)
CHOICE(add_bfloat16, BFLOAT16)
#undef CHOICE

#define DEPTH 8 /* groups whose part of the matrix stays in the second cache while all vectors pass */

static void by_rows(const Matrix *m, int64_t n, const float *x, int64_t ldx, float *y, int threads) {
  int64_t (*add)(const Matrix *, int64_t, int64_t, int64_t, const float *, int64_t, float *) =
      m->kind == FLOAT32 ? add_float32 : m->kind == FLOAT16 ? add_float16 : add_bfloat16;
  const int64_t tile = m->bits == 5 ? TILE : 1;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
  for (int64_t first = 0; first < m->groups; first += DEPTH)
    for (int64_t i = 0; i < n; i += tile) {
      int64_t end = least(m->groups, first + DEPTH);
      for (int64_t group = first; group < end;)
        group = add(m, group, end, least(tile, n - i), x + i * ldx, ldx, y + i * m->rows);
    }
}

/* ---- lanes are the n values of a column */

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
typedef float Run __attribute__((vector_size(BYTES), aligned(4), may_alias));
#define RUN BYTES /* values at a time, in four registers of sums */

#define HEIGHT 8         /* groups of rows at a time, */
#define CACHE (48 << 10) /* and bytes of x that stay near while these pass */

/* 16 × 16 numbers, from rows `ld` apart to columns of `to`. */
INLINE void turn(const float *x, int64_t ld, float *to, int64_t ldto) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(x + i * ld);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
#define PAIRS(f, x, y) _mm512_castpd_ps(f(_mm512_castps_pd(x), _mm512_castps_pd(y)))
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = PAIRS(_mm512_unpacklo_pd, b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = PAIRS(_mm512_unpackhi_pd, b[i + j], b[i + j + 2]);
    }
#undef PAIRS
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
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[j * ldto + i] = x[i * ld + j];
#endif
}

/* rows × columns numbers turned. */
static void turn_all(const float *x, int64_t ld, int64_t rows, int64_t columns, float *to, int64_t ldto) {
  for (int64_t i = 0; i < rows; i += 16)
    for (int64_t j = 0; j < columns; j += 16)
      if (i + 16 <= rows && j + 16 <= columns) turn(x + i * ld + j, ld, to + j * ldto + i, ldto);
      else
        for (int64_t r = i; r < least(rows, i + 16); r++)
          for (int64_t c = j; c < least(columns, j + 16); c++) to[c * ldto + r] = x[r * ld + c];
}

/* Where x comes from and y goes to: column by column, each from its own offset, or row by row. */
typedef struct {
  const float *x;
  float *y;
  const int64_t *offsets; /* or null: then rows of x are `ldx` apart */
  int64_t ldx, n;
} Vectors;

/* The RUN values from `first` on of the columns from `from` to `to`, as [column][value]; what is not there is zero. */
static void fetch(const Matrix *m, const Vectors *v, int64_t first, int64_t from, int64_t to, float *tile) {
  const int64_t count = least(RUN, v->n - first), end = least(to, m->columns);
  memset(tile + from * RUN, 0, (to - from) * RUN * sizeof *tile);
  if (v->offsets)
    for (int64_t c = from; c < end; c++) memcpy(tile + c * RUN, v->x + v->offsets[c] + first, count * sizeof *tile);
  else if (from < end)
    turn_all(v->x + first * v->ldx + from, v->ldx, count, end - from, tile + from * RUN, RUN);
}

/* What the blocks from `from` to `to` add to the sums of one row. A word is widened to 64 bits: where GCC puts 16 of
 * them on the stack and reads 32 back, each survivor waits for it. */
INLINE void add_row(const Matrix *m, int64_t group, int64_t row, int64_t from, int64_t to, const float *tile,
                    float *sums, int kind, int bits) {
  const int per = 16 / bits, mask = (1 << bits) - 1;
  const uint16_t *words = words_at(m, group, from) + row;
  const char *values = values_at(m, group, from) + row * size(kind);
  Run *sum = (Run *)sums, a = sum[0], b = sum[1], c = sum[2], d = sum[3];
#define ADD(s)                                                                          \
  {                                                                                     \
    const Run *run = (const Run *)(tile + (word >> (s) * bits & mask) * RUN);           \
    const float value = value_at(values, (s) * LANES, kind);                            \
    a += value * run[0], b += value * run[1], c += value * run[2], d += value * run[3]; \
  }
  tile += from * m->block * RUN;
  for (int64_t block = from; block < to; block++, tile += m->block * RUN) {
    int64_t left = m->kept;
    for (; left >= per; left -= per, words += LANES, values += per * LANES * size(kind)) {
      uint64_t word = *words;
      ADD(0);
      if (per > 1) ADD(1);
      if (per > 2) ADD(2);
    }
    if (left) {
      uint64_t word = *words;
      ADD(0);
      if (left > 1) ADD(1);
      words += LANES, values += left * LANES * size(kind);
    }
  }
#undef ADD
  sum[0] = a, sum[1] = b, sum[2] = c, sum[3] = d;
}

/* The same for all rows of the groups from `group` to `end`. */
static void add_rows(const Matrix *m, int64_t group, int64_t end, int64_t from, int64_t to, const float *tile,
                     float *sums) {
#define CASE(kind, bits)                                               \
  case kind * 32 + bits:                                               \
    for (int64_t g = group; g < end; g++)                              \
      for (int64_t row = 0; row < LANES; row++, sums += RUN)           \
        add_row(m, g, row, from, to, tile, sums, kind, bits);          \
    return
  switch (m->kind * 32 + m->bits) {
    CASE(FLOAT32, 5);
    CASE(FLOAT32, 8);
    CASE(FLOAT32, 16);
    CASE(FLOAT16, 5);
    CASE(FLOAT16, 8);
    CASE(FLOAT16, 16);
    CASE(BFLOAT16, 5);
    CASE(BFLOAT16, 8);
    CASE(BFLOAT16, 16);
  }
#undef CASE
}

/* HEIGHT groups of rows times one tile. */
static void add_tile(const Matrix *m, const Vectors *v, int64_t group, int64_t first, const float *tile, float *sums) {
  const int64_t end = least(m->groups, group + HEIGHT), count = least(RUN, v->n - first), top = group * LANES;
  const int64_t rows = least(m->rows, end * LANES) - top, width = m->block * RUN * (int64_t)sizeof *tile;
  const int64_t chunk = width < CACHE ? CACHE / width : 1;
  memset(sums, 0, (end - group) * LANES * RUN * sizeof *sums);
  for (int64_t block = 0; block < m->blocks; block += chunk)
    add_rows(m, group, end, block, least(m->blocks, block + chunk), tile, sums);
  for (int64_t row = 0; row < rows; row++) activate(m, top + row, 1, sums + row * RUN, count);
  if (v->offsets)
    for (int64_t row = 0; row < rows; row++)
      memcpy(v->y + (top + row) * v->n + first, sums + row * RUN, count * sizeof *sums);
  else turn_all(sums, RUN, rows, count, v->y + first * m->rows + top, m->rows);
}

/* The first n of them. */
static int by_columns(const Matrix *m, const Vectors *v, int64_t n, int threads) {
  if (n == 0) return DONE;
  const int64_t count = reach(m);
  float *tile = aligned_alloc(64, count * RUN * sizeof *tile);
  int failed = !tile;
#pragma omp parallel num_threads(threads)
  {
    float *sums = aligned_alloc(64, HEIGHT * LANES * RUN * sizeof *sums);
    if (!sums) failed = 1;
    for (int64_t first = 0; first < n; first += RUN) {
#pragma omp for schedule(static)
      for (int64_t c = 0; c < count; c += 256)
        if (tile) fetch(m, v, first, c, least(count, c + 256), tile);
#pragma omp for schedule(static)
      for (int64_t group = 0; group < m->groups; group += HEIGHT)
        if (tile && sums) add_tile(m, v, group, first, tile, sums);
    }
    free(sums);
  }
  free(tile);
  return failed ? NO_MEMORY : DONE;
}

/* ---- what is called from outside */

#define MATRIX                                                                                                  \
  const char *values, const uint16_t *indices, const float *bias, int64_t rows, int64_t columns, int64_t block, \
      int64_t kept, int64_t kind, int64_t relu
#define DERIVED derive((Matrix){values, indices, bias, rows, columns, block, kept, kind, relu, 0, 0, 0, 0})

/* How many of n vectors go with lanes that are values; for the rest, too few to fill such lanes, these are rows. */
INLINE int64_t bulk(const Matrix *m, int64_t n) {
  int64_t rest = n % RUN;
  return rest < (TILE > 1 && m->bits == 5 ? RUN : RUN / 2) ? n - rest : n;
}

int PUBLIC(rows)(MATRIX, int64_t n, const float *x, int64_t ldx, float *y, int64_t threads) {
  const Matrix m = DERIVED;
  const int64_t count = reach(&m), done = bulk(&m, n), rest = n - done;
  for (int64_t i = 0; i < n; i++)
    if (!all_finite(x + i * ldx, columns)) return NOT_FINITE;
  if (by_columns(&m, &(Vectors){.x = x, .y = y, .ldx = ldx, .n = n}, done, threads)) return NO_MEMORY;
  x += done * ldx, y += done * rows;
  float *copy = NULL;
  if (rest && count > columns) { /* an index may reach behind the end of x: put zeros there */
    copy = calloc(rest * count, sizeof *copy);
    if (!copy) return NO_MEMORY;
    for (int64_t i = 0; i < rest; i++) memcpy(copy + i * count, x + i * ldx, columns * sizeof *x);
    x = copy, ldx = count;
  }
  by_rows(&m, rest, x, ldx, y, threads);
  free(copy);
  return DONE;
}

int PUBLIC(columns)(MATRIX, int64_t n, const float *x, const int64_t *offsets, float *y, int64_t threads) {
  const Matrix m = DERIVED;
  const int64_t count = reach(&m), done = bulk(&m, n), rest = n - done;
  const Vectors v = {.x = x, .y = y, .offsets = offsets, .n = n};
  if (!all_runs_finite(x, offsets, columns, n)) return NOT_FINITE;
  if (by_columns(&m, &v, done, threads)) return NO_MEMORY;
  if (!rest) return DONE;
  float *tile = malloc((count * RUN + rest * (count + rows)) * sizeof *tile);
  if (!tile) return NO_MEMORY;
  float *turned = tile + count * RUN, *result = turned + rest * count;
  fetch(&m, &v, done, 0, count, tile);
  turn_all(tile, RUN, count, rest, turned, count);
  by_rows(&m, rest, turned, count, result, threads);
  turn_all(result, rows, rest, rows, y + done, n);
  free(tile);
  return DONE;
}
