/* The product of a packed balanced matrix with dense vectors on a CPU, for every type of stored values.
 *
 * This file is compiled once for each instruction set, NAME, and each compilation has the same two functions:
 *
 *   multiply_rows     y (n × rows) = x (n × columns, contiguous rows) times the transposed matrix. The lanes of a
 *                     register are rows of the matrix, whose survivors lie side by side. A narrow block of x fits into
 *                     registers, and permuting these gathers the inputs of the lanes: only the matrix is read from
 *                     memory.
 *   multiply_columns  y (rows × n) = the matrix times x (columns × n), where the n values of a column are contiguous
 *                     and start at any offset.
 *
 * With many vectors, the lanes are vectors instead, and a survivor adds its multiple of a run of them.
 *
 * Values and words of indices lie as [group of 32 rows][block][survivor or word][row]. A word holds three indices of 5
 * bits, two of 8 or one of 16. Whatever the indices are, reads stay inside the memory: see `addressable_columns`.
 *
 * A 2:4 matrix has two survivors in each group of four columns. Its blocks are four groups, whose eight indices of 2 bits
 * are one word: each is a place in its own group, and a permutation of 4 numbers picks the input.
 *
 * Values may also be codes of 8 or 4 bits with scales, [group][span of blocks][row]. Those of some groups of rows at a
 * time become floats in the cache. Codes of 4 bits lie two in a byte: that of row i in the low half, and that of row
 * i + 16 in the high half.
 */

#include "common.h"

#define LANES 32

typedef struct {
  const char *values;
  const uint16_t *indices;
  const float *bias; /* or null */
  int64_t rows, columns, block, kept, value_type, relu;
  const float *scales; /* of codes, else null */
  int64_t span;        /* blocks that share a scale */
  int64_t bits;        /* of an index; set by `derive_sizes` where it is 0 */
  int64_t groups, blocks, words; /* set by `derive_sizes` */
  int64_t first;       /* the group of rows with which the values begin; the indices begin with group 0 */
} Matrix;

static Matrix derive_sizes(Matrix m) {
  m.groups = ceil_div(m.rows, LANES);
  m.blocks = ceil_div(m.columns, m.block);
  if (!m.bits) m.bits = m.block <= 32 ? 5 : m.block <= 256 ? 8 : 16;
  m.words = ceil_div(m.kept, 16 / m.bits);
  return m;
}

/* Return the number of columns that indices can address, whatever their values. */
INLINE int64_t addressable_columns(const Matrix *m) {
  return (m->blocks - 1) * m->block + greater(m->block, 1 << m->bits);
}

#define PLACE_BITS 2 /* of an index into a group of 4 columns */

/* Return the first column in a block of the survivors that are stored in place `s` of a word. */
INLINE int first_column(int s, int bits) { return bits == PLACE_BITS ? s / 2 * 4 : 0; }

INLINE const char *values_at(const Matrix *m, int64_t group, int64_t block) {
  return m->values + ((group - m->first) * m->blocks + block) * m->kept * LANES * value_bytes(m->value_type);
}

INLINE const uint16_t *words_at(const Matrix *m, int64_t group, int64_t block) {
  return m->indices + (group * m->blocks + block) * m->words * LANES;
}

/* Add the bias and apply the ReLU to adjacent sums: all of one row, or of consecutive rows from `row` on. */
static VECTORIZED void add_bias_and_relu(const Matrix *m, int64_t row, int same_row, float *restrict sums,
                                         int64_t count) {
  if (m->bias && same_row)
    for (int64_t i = 0; i < count; i++) sums[i] += m->bias[row];
  if (m->bias && !same_row)
    for (int64_t i = 0; i < count; i++) sums[i] += m->bias[row + i];
  if (m->relu)
    for (int64_t i = 0; i < count; i++) sums[i] = sums[i] < 0 ? 0.0f : sums[i]; /* keeps a NaN */
}

/* ---- codes */

INLINE int64_t code_bytes(const Matrix *m) { return m->value_type == INT8 ? LANES : LANES / 2; }

typedef int8_t HalfOfCodes __attribute__((vector_size(LANES / 2), aligned(1), may_alias));
#define UNPACKED 16 /* survivors whose codes of 4 bits are unpacked at a time */

/* Return the codes of some survivors in 8 bits, those of 4 bits in `to`. A compiler does not vectorise a loop over them
 * and the conversion at once. */
INLINE const int8_t *unpack_codes(const char *codes, int64_t survivors, int value_type, int8_t *to) {
  if (value_type == INT8) return (const int8_t *)codes;
  for (int64_t s = 0; s < survivors; s++) {
    HalfOfCodes both = ((const HalfOfCodes *)codes)[s], *halves = (HalfOfCodes *)(to + s * LANES);
    halves[0] = ((both & 15) ^ 8) - 8, halves[1] = both >> 4;
  }
  return to;
}

/* Return the groups of rows from `group` to `end` of a matrix of codes as one of floats, which are written to `to`. */
static VECTORIZED Matrix dequantize_groups(const Matrix *m, int64_t group, int64_t end, float *restrict to) {
  const int64_t spans = ceil_div(m->blocks, m->span), step = code_bytes(m);
  const char *codes = m->values + group * m->blocks * m->kept * step;
  int8_t buffer[UNPACKED * LANES];
  Matrix floats = *m;
  floats.values = (const char *)to, floats.value_type = FLOAT32, floats.first = group, floats.scales = NULL;
  for (int64_t g = group; g < end; g++)
    for (int64_t block = 0; block < m->blocks; block++) {
      const float *restrict scale = m->scales + (g * spans + block / m->span) * LANES;
      for (int64_t s = 0, count; s < m->kept; s += count, codes += count * step) {
        count = smaller(UNPACKED, m->kept - s);
        const int8_t *restrict bytes = unpack_codes(codes, count, m->value_type, buffer);
        for (int64_t i = 0; i < count; i++, to += LANES, bytes += LANES)
          for (int row = 0; row < LANES; row++) to[row] = bytes[row] * scale[row];
      }
    }
  return floats;
}

/* Return memory for the floats of so many groups of codes, null where there is none; for floats, memory of no use. */
static float *allocate_values(const Matrix *m, int64_t groups) {
  return malloc(m->scales ? groups * m->blocks * m->kept * LANES * sizeof(float) : 1);
}

/* ---- kernels whose lanes are rows */

/* Each instruction set defines registers of Floats and of Indices, and how to load them. `pick_lanes` returns x[index]
 * for every lane: by permuting registers where a block fits into `windows` times 32 floats, else (0) by a gather. */

#if defined(__AVX512F__)

#define TILE 6     /* vectors at a time, as many as the registers hold sums for */
#define GROUPS_AT_ONCE 4 /* groups of rows for a single vector: several streams are read faster */
typedef __m512i Indices;

INLINE Indices load_words(const uint16_t *words) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)words));
}
INLINE Indices shift_right(Indices words, int by) { return _mm512_srli_epi32(words, by); }

/* A permutation of two registers uses only the low 5 bits of an index. */
INLINE Floats pick_from_32(const float *x, Indices index) {
  return _mm512_permutex2var_ps(_mm512_loadu_ps(x), index, _mm512_loadu_ps(x + 16));
}

INLINE Floats pick_lanes(const float *x, Indices index, int bits, int windows) {
  if (windows == 0)
    return _mm512_i32gather_ps(_mm512_and_si512(index, _mm512_set1_epi32((1 << bits) - 1)), x, 4);
  Floats low = pick_from_32(x, index);
  if (windows == 1) return low;
  __mmask16 odd = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
  low = _mm512_mask_mov_ps(low, odd, pick_from_32(x + 32, index));
  if (windows == 2) return low;
  Floats high = _mm512_mask_mov_ps(pick_from_32(x + 64, index), odd, pick_from_32(x + 96, index));
  return _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(index, _mm512_set1_epi32(64)), high);
}

INLINE Floats pick_from_4(const float *x, Indices index) {
  return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(x)), index); /* by the low 2 bits */
}

#elif defined(__AVX2__)

#define TILE 1
#define GROUPS_AT_ONCE 1
typedef __m256i Indices;

INLINE Indices load_words(const uint16_t *words) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)words)); }
INLINE Indices shift_right(Indices words, int by) { return _mm256_srli_epi32(words, by); }
INLINE Floats pick_from_8(const float *x, Indices index) { return _mm256_permutevar8x32_ps(_mm256_loadu_ps(x), index); }

INLINE Floats pick_lanes(const float *x, Indices index, int bits, int windows) {
  if (windows != 1)
    return _mm256_i32gather_ps(x, _mm256_and_si256(index, _mm256_set1_epi32((1 << bits) - 1)), 4);
  /* A blend selects by the sign, so that bits 3 and 4 of the index are moved there. */
  Floats bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
  Floats bit4 = _mm256_castsi256_ps(_mm256_slli_epi32(index, 27));
  Floats low = _mm256_blendv_ps(pick_from_8(x, index), pick_from_8(x + 8, index), bit3);
  Floats high = _mm256_blendv_ps(pick_from_8(x + 16, index), pick_from_8(x + 24, index), bit3);
  return _mm256_blendv_ps(low, high, bit4);
}
INLINE Floats pick_from_4(const float *x, Indices index) {
  return _mm256_permutevar_ps(_mm256_broadcast_ps((const __m128 *)x), index); /* by the low 2 bits */
}

#else

#define TILE 1
#define GROUPS_AT_ONCE 1
typedef struct { uint32_t at[WIDTH]; } Indices;

INLINE Indices load_words(const uint16_t *words) { Indices result; FOR_EACH_LANE(words[lane]); }
INLINE Indices shift_right(Indices words, int by) { Indices result; FOR_EACH_LANE(words.at[lane] >> by); }
INLINE Floats pick_lanes(const float *x, Indices index, int bits, int windows) {
  (void)windows;
  Floats result;
  FOR_EACH_LANE(x[index.at[lane] & ((1u << bits) - 1)]);
}
INLINE Floats pick_from_4(const float *x, Indices index) { return pick_lanes(x, index, PLACE_BITS, 0); }

#endif

#define REGISTERS (LANES / WIDTH) /* that hold one value of each row of a group */

/* Add the products of the survivors of one word to the sums of `tile` vectors, reading in memory order. */
INLINE void add_word(const char *values, const uint16_t *words, const float *x, int64_t ldx, int survivors, int tile,
                     int value_type, int bits, int windows, Floats sums[][REGISTERS]) {
  Indices word[REGISTERS];
#pragma GCC unroll 4
  for (int part = 0; part < REGISTERS; part++) word[part] = load_words(words + part * WIDTH);
#pragma GCC unroll 8
  for (int s = 0; s < survivors; s++)
#pragma GCC unroll 4
    for (int part = 0; part < REGISTERS; part++) {
      Floats value = load(values, s * LANES + part * WIDTH, value_type);
      Indices index = shift_right(word[part], bits * s);
#pragma GCC unroll 8
      for (int t = 0; t < tile; t++) {
        const float *from = x + t * ldx + first_column(s, bits);
        const Floats picked = bits == PLACE_BITS ? pick_from_4(from, index) : pick_lanes(from, index, bits, windows);
        sums[t][part] = add_product(value, picked, sums[t][part]);
      }
    }
}

/* Multiply `groups_at_once` groups of rows by `tile` vectors. */
INLINE void multiply_groups(const Matrix *m, int64_t group, const float *x, int64_t ldx, float *y, int groups_at_once,
                            int tile, int value_type, int bits, int windows) {
  union { Floats wide[TILE][REGISTERS]; float narrow[TILE][LANES]; } sums[GROUPS_AT_ONCE];
#pragma GCC unroll 4
  for (int g = 0; g < groups_at_once; g++) memset(sums[g].wide, 0, tile * sizeof *sums[g].wide);
  const int per_word = 16 / bits, rest = m->kept % per_word;
  const int64_t full = m->kept / per_word, step = LANES * value_bytes(value_type);
  const int64_t values_apart = m->blocks * m->kept * step, words_apart = m->blocks * m->words * LANES;
  const char *values = values_at(m, group, 0);
  const uint16_t *words = words_at(m, group, 0);
#define ADD(survivors)                                                                                            \
  _Pragma("GCC unroll 4") for (int g = 0; g < groups_at_once; g++)                                                \
      add_word(values + g * values_apart, words + g * words_apart, x, ldx, survivors, tile, value_type, bits,     \
               windows, sums[g].wide)
  for (int64_t block = 0; block < m->blocks; block++, x += m->block) {
    for (int64_t word = 0; word < full; word++, values += per_word * step, words += LANES) ADD(per_word);
    if (rest == 1) ADD(1);
    if (rest == 2) ADD(2);
    if (rest) values += rest * step, words += LANES;
  }
#undef ADD
  for (int g = 0; g < groups_at_once; g++) {
    int64_t first = (group + g) * LANES, count = smaller(LANES, m->rows - first);
    for (int t = 0; t < tile; t++) {
      add_bias_and_relu(m, first, 0, sums[g].narrow[t], count);
      memcpy(y + t * m->rows + first, sums[g].narrow[t], count * sizeof *y);
    }
  }
}

/* Return whether several vectors are multiplied at a time. */
INLINE int is_tiled(const Matrix *m) { return m->bits <= 5; }

/* Call `multiply_groups` with constant arguments, so that each combination is compiled separately, from `group` on and
 * before `end`. Return the group after those that are computed. */
INLINE int64_t multiply_groups_specialized(const Matrix *m, int64_t group, int64_t end, int64_t n, const float *x,
                                           int64_t ldx, float *y, int value_type) {
#define WITH_BITS(at_once, tile)                                                                              \
  (m->bits == PLACE_BITS ? multiply_groups(m, group, x, ldx, y, at_once, tile, value_type, PLACE_BITS, 1)     \
                         : multiply_groups(m, group, x, ldx, y, at_once, tile, value_type, 5, 1))
  if (is_tiled(m) && n == 1 && GROUPS_AT_ONCE > 1 && group + GROUPS_AT_ONCE <= end) {
    WITH_BITS(GROUPS_AT_ONCE, 1);
    return group + GROUPS_AT_ONCE;
  }
#define CASE(tile) case tile: WITH_BITS(1, tile); return group + 1
  if (is_tiled(m))
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
#undef WITH_BITS
  if (m->bits == 16) multiply_groups(m, group, x, ldx, y, 1, 1, value_type, 16, 0);
  else if (m->block <= 64) multiply_groups(m, group, x, ldx, y, 1, 1, value_type, 8, 2);
  else if (m->block <= 128) multiply_groups(m, group, x, ldx, y, 1, 1, value_type, 8, 4);
  else multiply_groups(m, group, x, ldx, y, 1, 1, value_type, 8, 0);
  return group + 1;
}

#define DEFINE_FOR_TYPE(name, value_type)                                                                       \
  static int64_t name(const Matrix *m, int64_t group, int64_t end, int64_t n, const float *x, int64_t ldx,      \
                      float *y) {                                                                               \
    return multiply_groups_specialized(m, group, end, n, x, ldx, y, value_type);                                \
  }
DEFINE_FOR_TYPE(multiply_groups_float32, FLOAT32)
DEFINE_FOR_TYPE(multiply_groups_float16, FLOAT16)
DEFINE_FOR_TYPE(multiply_groups_bfloat16, BFLOAT16)
#undef DEFINE_FOR_TYPE

#define CACHED_GROUPS 8 /* groups whose part of the matrix stays in the L2 cache while all vectors are multiplied */

static int multiply_row_lanes(const Matrix *m, int64_t n, const float *x, int64_t ldx, float *y, int threads) {
  int64_t (*multiply)(const Matrix *, int64_t, int64_t, int64_t, const float *, int64_t, float *) =
      m->value_type == FLOAT16    ? multiply_groups_float16
      : m->value_type == BFLOAT16 ? multiply_groups_bfloat16
                                  : multiply_groups_float32;
  const int64_t tile = is_tiled(m) ? TILE : 1;
  int failed = 0;
#pragma omp parallel num_threads(threads)
  {
    float *values = allocate_values(m, CACHED_GROUPS);
    Matrix part = *m;
    int64_t dequantized = -1; /* the groups of which `values` has the values */
    if (!values) failed = 1;
#pragma omp for collapse(2) schedule(static)
    for (int64_t first = 0; first < m->groups; first += CACHED_GROUPS)
      for (int64_t i = 0; i < n; i += tile) {
        if (!values) continue;
        int64_t end = smaller(m->groups, first + CACHED_GROUPS);
        if (m->scales && dequantized != first) part = dequantize_groups(m, dequantized = first, end, values);
        for (int64_t group = first; group < end;)
          group = multiply(&part, group, end, smaller(tile, n - i), x + i * ldx, ldx, y + i * m->rows);
      }
    free(values);
  }
  return failed ? NO_MEMORY : DONE;
}

/* ---- kernels whose lanes are vectors: the n values of a column */

typedef float Run __attribute__((vector_size(REGISTER_BYTES), aligned(4), may_alias));
#define RUN REGISTER_BYTES /* vectors at a time, in four registers of sums */

#define TILE_GROUPS 8         /* groups of rows at a time */
#define CACHE_BYTES (48 << 10) /* bytes of x that stay in the cache meanwhile */

/* The vectors: x and y by columns, each from its own offset, or by rows. */
typedef struct {
  const float *x;
  float *y;
  const int64_t *offsets; /* or null: then rows of x are `ldx` apart */
  int64_t ldx, n;
} Operands;

/* Load RUN vectors from `first` on, in the columns from `from` to `to`, as [column][vector], with zeros past the end. */
static void load_tile(const Matrix *m, const Operands *v, int64_t first, int64_t from, int64_t to, float *tile) {
  const int64_t count = smaller(RUN, v->n - first), end = smaller(to, m->columns);
  memset(tile + from * RUN, 0, (to - from) * RUN * sizeof *tile);
  if (v->offsets)
    for (int64_t c = from; c < end; c++) memcpy(tile + c * RUN, v->x + v->offsets[c] + first, count * sizeof *tile);
  else if (from < end)
    transpose(v->x + first * v->ldx + from, v->ldx, count, end - from, tile + from * RUN, RUN);
}

/* Add the products of the blocks from `from` to `to` to the sums of one row. A word is widened to 64 bits: GCC would
 * spill 16 bits to the stack and read 32 or 64 back, and each survivor would wait for that. The empty assembly keeps the
 * word in a register for the same reason. */
#define KEEP_IN_REGISTER(word) __asm__("" : "+r"(word))
INLINE void add_row(const Matrix *m, int64_t group, int64_t row, int64_t from, int64_t to, const float *tile,
                    float *sums, int value_type, int bits) {
  const int per_word = 16 / bits, mask = (1 << bits) - 1;
  const uint16_t *words = words_at(m, group, from) + row;
  const char *values = values_at(m, group, from) + row * value_bytes(value_type);
  Run *sum = (Run *)sums, a = sum[0], b = sum[1], c = sum[2], d = sum[3];
#define ADD(s)                                                                          \
  {                                                                                     \
    const Run *run = (const Run *)(tile + ((word >> (s) * bits & mask) + first_column(s, bits)) * RUN); \
    const float value = value_at(values, (s) * LANES, value_type);                            \
    a += value * run[0], b += value * run[1], c += value * run[2], d += value * run[3]; \
  }
  tile += from * m->block * RUN;
  for (int64_t block = from; block < to; block++, tile += m->block * RUN) {
    int64_t left = m->kept;
    for (; left >= per_word; left -= per_word, words += LANES, values += per_word * LANES * value_bytes(value_type)) {
      uint64_t word = *words;
      KEEP_IN_REGISTER(word);
      ADD(0);
      if (per_word > 1) ADD(1);
      if (per_word > 2) ADD(2);
      if (bits == PLACE_BITS) { ADD(3) ADD(4) ADD(5) ADD(6) ADD(7) }
    }
    if (left) {
      uint64_t word = *words;
      KEEP_IN_REGISTER(word);
      ADD(0);
      if (left > 1) ADD(1);
      words += LANES, values += left * LANES * value_bytes(value_type);
    }
  }
#undef ADD
  sum[0] = a, sum[1] = b, sum[2] = c, sum[3] = d;
}

/* Add the products of the blocks from `from` to `to` to the sums of all rows of the groups from `group` to `end`. */
static void add_rows(const Matrix *m, int64_t group, int64_t end, int64_t from, int64_t to, const float *tile,
                     float *sums) {
#define CASE(value_type, bits)                                               \
  case value_type * 32 + bits:                                               \
    for (int64_t g = group; g < end; g++)                              \
      for (int64_t row = 0; row < LANES; row++, sums += RUN)           \
        add_row(m, g, row, from, to, tile, sums, value_type, bits);          \
    return
  switch (m->value_type * 32 + m->bits) {
    CASE(FLOAT32, PLACE_BITS);
    CASE(FLOAT32, 5);
    CASE(FLOAT32, 8);
    CASE(FLOAT32, 16);
    CASE(FLOAT16, PLACE_BITS);
    CASE(FLOAT16, 5);
    CASE(FLOAT16, 8);
    CASE(FLOAT16, 16);
    CASE(BFLOAT16, PLACE_BITS);
    CASE(BFLOAT16, 5);
    CASE(BFLOAT16, 8);
    CASE(BFLOAT16, 16);
  }
#undef CASE
}

/* Multiply TILE_GROUPS groups of rows by one tile, and write the results to y. `values` is memory for those of codes. */
static void add_tile(const Matrix *m, const Operands *v, int64_t group, int64_t first, const float *tile, float *sums,
                     float *values) {
  const int64_t end = smaller(m->groups, group + TILE_GROUPS), count = smaller(RUN, v->n - first), top = group * LANES;
  const int64_t rows = smaller(m->rows, end * LANES) - top, width = m->block * RUN * (int64_t)sizeof *tile;
  const int64_t chunk = width < CACHE_BYTES ? CACHE_BYTES / width : 1;
  const Matrix part = m->scales ? dequantize_groups(m, group, end, values) : *m;
  memset(sums, 0, (end - group) * LANES * RUN * sizeof *sums);
  for (int64_t block = 0; block < m->blocks; block += chunk)
    add_rows(&part, group, end, block, smaller(m->blocks, block + chunk), tile, sums);
  for (int64_t row = 0; row < rows; row++) add_bias_and_relu(m, top + row, 1, sums + row * RUN, count);
  if (v->offsets)
    for (int64_t row = 0; row < rows; row++)
      memcpy(v->y + (top + row) * v->n + first, sums + row * RUN, count * sizeof *sums);
  else transpose(sums, RUN, rows, count, v->y + first * m->rows + top, m->rows);
}

/* Multiply the matrix by the first n vectors. */
static int multiply_vector_lanes(const Matrix *m, const Operands *v, int64_t n, int threads) {
  if (n == 0) return DONE;
  const int64_t count = addressable_columns(m);
  float *tile = aligned_alloc(64, count * RUN * sizeof *tile);
  int failed = !tile;
#pragma omp parallel num_threads(threads)
  {
    float *sums = aligned_alloc(64, TILE_GROUPS * LANES * RUN * sizeof *sums);
    float *values = allocate_values(m, TILE_GROUPS);
    if (!sums || !values) failed = 1;
    for (int64_t first = 0; first < n; first += RUN) {
#pragma omp for schedule(static)
      for (int64_t c = 0; c < count; c += 256)
        if (tile) load_tile(m, v, first, c, smaller(count, c + 256), tile);
#pragma omp for schedule(static)
      for (int64_t group = 0; group < m->groups; group += TILE_GROUPS)
        if (tile && sums && values) add_tile(m, v, group, first, tile, sums, values);
    }
    free(values);
    free(sums);
  }
  free(tile);
  return failed ? NO_MEMORY : DONE;
}

/* ---- any number of vectors */

/* Return how many of n vectors are multiplied with vectors as lanes. The rest, too few to fill lanes, have rows. */
INLINE int64_t vector_lane_count(const Matrix *m, int64_t n) {
  int64_t rest = n % RUN;
  return rest < (TILE > 1 && is_tiled(m) ? RUN : RUN / 2) ? n - rest : n;
}

static int multiply_rows(const Matrix *m, int64_t n, const float *x, int64_t ldx, float *y, int64_t threads) {
  const int64_t count = addressable_columns(m), done = vector_lane_count(m, n), rest = n - done;
  for (int64_t i = 0; i < n; i++)
    if (!all_finite(x + i * ldx, m->columns)) return NOT_FINITE;
  if (multiply_vector_lanes(m, &(Operands){.x = x, .y = y, .ldx = ldx, .n = n}, done, threads)) return NO_MEMORY;
  x += done * ldx, y += done * m->rows;
  float *copy = NULL;
  if (rest && count > m->columns) { /* an index may address columns past the end of x: put zeros there */
    copy = calloc(rest * count, sizeof *copy);
    if (!copy) return NO_MEMORY;
    for (int64_t i = 0; i < rest; i++) memcpy(copy + i * count, x + i * ldx, m->columns * sizeof *x);
    x = copy, ldx = count;
  }
  int code = multiply_row_lanes(m, rest, x, ldx, y, threads);
  free(copy);
  return code;
}

static int multiply_columns(const Matrix *m, int64_t n, const float *x, const int64_t *offsets, float *y,
                            int64_t threads) {
  const int64_t count = addressable_columns(m), done = vector_lane_count(m, n), rest = n - done;
  const Operands v = {.x = x, .y = y, .offsets = offsets, .n = n};
  if (!all_runs_finite(x, offsets, m->columns, n)) return NOT_FINITE;
  if (multiply_vector_lanes(m, &v, done, threads)) return NO_MEMORY;
  if (!rest) return DONE;
  float *tile = malloc((count * RUN + rest * (count + m->rows)) * sizeof *tile);
  if (!tile) return NO_MEMORY;
  float *transposed = tile + count * RUN, *result = transposed + rest * count;
  load_tile(m, &v, done, 0, count, tile);
  transpose(tile, RUN, count, rest, transposed, count);
  int code = multiply_row_lanes(m, rest, transposed, count, result, threads);
  transpose(result, m->rows, rest, m->rows, y + done, n);
  free(tile);
  return code;
}
