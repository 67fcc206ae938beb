/* The product of a packed balanced matrix of int8 or int4 codes with dense vectors: see balanced.h for the layout.
 *
 * Processors with AVX-512, VBMI and VNNI multiply integers, for blocks of up to 64 columns. Each vector of x is rounded
 * to 16 bits: its largest magnitude becomes 32767. The high and the low byte of its elements are two planes, and a sum of
 * products with each is exact in 32 bits. A vector that is to be rounded to 8 bits has one plane. A 32-bit lane belongs to
 * one row, and its four bytes to four survivors, a *quad*: one permutation of 64 bytes picks their inputs from a window of
 * 64 columns, and one instruction adds the four products. Quads take survivors in the order in which they are stored, so
 * that those of several blocks may share one. The quads of a group of rows are expanded to bytes in the cache, for all
 * vectors, or in registers, for a single one.
 *
 * Other processors, and wider blocks, use floats.
 */

#include "balanced.h"

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)

#define WINDOW 64              /* columns that a permutation picks from */
#define PARTS 2                /* registers with a lane for each of 32 rows */
#define STREAMS 8              /* planes of vectors at a time, as many as the registers hold sums for */
#define MAX_SURVIVORS 60000    /* of a row, so that sums of 255 · 127 · survivors fit into 32 bits */
#define PANEL_BYTES (512 << 10) /* bytes of planes that stay in the L2 cache while all groups of rows are multiplied */
#define SMALLEST 0x1p-100f     /* the smallest largest magnitude whose reciprocal is far from an overflow */
enum { TOO_SMALL = -1 };       /* the return code for vectors that are left to floats */

/* Keep a register from being loaded again at each use. */
#define KEEP(x) __asm__("" : "+v"(x))

typedef struct {
  int32_t survivor, count; /* the first survivor of a row, counted over all blocks, and how many */
  int32_t window;          /* the column with which the window begins */
  int32_t words[4];        /* two pairs of words, which hold the indices of the survivors */
  uint32_t offset;         /* for each survivor, in a byte: the column of its block in the window, */
  uint64_t shift;          /* the bits before its index in a pair of words, for one row and then for another, */
  uint64_t second;         /* and a bit for whether that is the second pair, for 16 rows */
} Quad;

/* The quads of a row, which are those of all rows. */
typedef struct {
  Quad *quads;
  int64_t *ends; /* the number of quads up to the end of each span */
  int64_t count, spans;
} Plan;

/* The codes of one group of rows, a byte for each survivor of a quad and row, and what corrects their sums. */
typedef struct {
  __m512i *indices, *codes; /* quads × parts */
  __m512i *corrections;     /* spans × parts */
} Expanded;

INLINE int has_integer_kernel(const Matrix *m) { return m->block <= WINDOW && m->blocks * m->kept <= MAX_SURVIVORS; }

/* Add a survivor to a quad, whose index follows `shift` bits of a word and whose block begins in column `offset`. */
static void add_survivor(Quad *quad, int32_t word, int shift, int offset) {
  const int i = quad->count++;
  int place = 0;
  while (place < i && quad->words[place] != word && quad->words[place] >= 0) place++;
  quad->words[place] = word;
  const uint64_t bits = 16 * (place % 2) + shift;
  quad->shift |= (bits | (bits + 32) << 32) << 8 * i;
  quad->offset |= (uint32_t)offset << 8 * i;
  if (place >= 2) quad->second |= 0x1111111111111111ull << i;
}

static int make_plan(const Matrix *m, Plan *plan) {
  plan->spans = ceil_div(m->blocks, m->span), plan->count = 0;
  plan->quads = malloc(m->blocks * m->kept * sizeof *plan->quads);
  plan->ends = malloc(plan->spans * sizeof *plan->ends);
  if (!plan->quads || !plan->ends) return NO_MEMORY;
  const int per_word = 16 / m->bits;
  Quad *quad = NULL;
  for (int64_t block = 0; block < m->blocks; block++) {
    if (block % m->span == 0 || (block + 1) * m->block - quad->window > WINDOW) quad = NULL;
    for (int64_t s = 0; s < m->kept; s++) {
      if (!quad || quad->count == 4) {
        quad = plan->quads + plan->count++;
        *quad = (Quad){.survivor = block * m->kept + s, .window = block * m->block, .words = {-1, -1, -1, -1}};
      }
      add_survivor(quad, block * m->words + s / per_word, s % per_word * m->bits, block * m->block - quad->window);
    }
    plan->ends[block / m->span] = plan->count;
  }
  for (int64_t q = 0; q < plan->count; q++) /* words of no use are read too */
    for (int i = 1; i < 4; i++)
      if (plan->quads[q].words[i] < 0) plan->quads[q].words[i] = plan->quads[q].words[0];
  return DONE;
}

/* Constants for the expansion of quads. */
typedef struct {
  __m512i words[PARTS]; /* the order that takes the words of two registers alternately, for each row of a part */
  __m512i rows[PARTS];  /* the order that takes the bytes of four survivors, stored one after the other, likewise */
  __m512i mask;         /* the bits of an index */
  __m512i signs;        /* the values of codes of 4 bits */
} Orders;

static Orders make_orders(const Matrix *m) {
  const int step = code_bytes(m);
  uint8_t bytes[PARTS][64];
  uint16_t words[PARTS][32];
  for (int part = 0; part < PARTS; part++) {
    for (int i = 0; i < 64; i++) bytes[part][i] = i % 4 * step + part * (step - 16) + i / 4;
    for (int i = 0; i < 32; i++) words[part][i] = i % 2 * 32 + part * 16 + i / 2;
  }
  return (Orders){
      .words = {_mm512_loadu_si512(words[0]), _mm512_loadu_si512(words[1])},
      .rows = {_mm512_loadu_si512(bytes[0]), _mm512_loadu_si512(bytes[1])},
      .mask = _mm512_set1_epi8((1 << m->bits) - 1),
      .signs = _mm512_set4_epi32(0xFFFEFDFC, 0xFBFAF9F8, 0x07060504, 0x03020100),
  };
}

INLINE __m512i load_words_at(const uint16_t *words, int32_t word) { return _mm512_loadu_si512(words + word * LANES); }

/* Expand a quad of a group, whose codes and words are given: a byte for each survivor and row of a part. */
INLINE void expand_quad(const Quad *quad, const Orders *orders, const char *codes, const uint16_t *words,
                        int value_type, __m512i *indices, __m512i *parts) {
  const int step = value_type == INT8 ? LANES : LANES / 2;
  const __m512i shift = _mm512_set1_epi64(quad->shift), offset = _mm512_set1_epi32(quad->offset);
  __m512i a = load_words_at(words, quad->words[0]), b = load_words_at(words, quad->words[1]);
#pragma GCC unroll 2
  for (int p = 0; p < PARTS; p++)
    indices[p] = _mm512_multishift_epi64_epi8(shift, _mm512_permutex2var_epi16(a, orders->words[p], b));
  if (quad->second) {
    a = load_words_at(words, quad->words[2]), b = load_words_at(words, quad->words[3]);
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++)
      indices[p] = _mm512_mask_multishift_epi64_epi8(indices[p], quad->second, shift,
                                                     _mm512_permutex2var_epi16(a, orders->words[p], b));
  }
#pragma GCC unroll 2
  for (int p = 0; p < PARTS; p++)
    indices[p] = _mm512_add_epi8(_mm512_and_si512(indices[p], orders->mask), offset);
  const char *from = codes + quad->survivor * step;
  const int bytes = quad->count * step;
  if (value_type == INT8) {
    __m512i first, second;
    if (bytes == 128) first = _mm512_loadu_si512(from), second = _mm512_loadu_si512(from + 64);
    else {
      first = _mm512_maskz_loadu_epi8(bytes < 64 ? (1ull << bytes) - 1 : ~0ull, from);
      second = _mm512_maskz_loadu_epi8(bytes > 64 ? ~0ull >> (128 - bytes) : 0, from + 64);
    }
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) parts[p] = _mm512_permutex2var_epi8(first, orders->rows[p], second);
  } else {
    const __m512i nibbles = _mm512_set1_epi8(15);
    __m512i both = bytes == 64 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8((1ull << bytes) - 1, from);
    both = _mm512_permutexvar_epi8(orders->rows[0], both);
    parts[0] = _mm512_shuffle_epi8(orders->signs, _mm512_and_si512(both, nibbles));
    parts[1] = _mm512_shuffle_epi8(orders->signs, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibbles));
  }
}

/* Bytes of vectors are stored with 128 added, which the sums of the codes times −128 undo. */
INLINE __m512i correct(__m512i correction, __m512i codes) {
  return _mm512_sub_epi32(correction, _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8((char)128), codes));
}

/* Expand the codes and indices of a group of rows. */
INLINE void expand_quads(const Matrix *m, const Plan *plan, int64_t group, const Expanded *to, int value_type) {
  const Orders orders = make_orders(m);
  const char *codes = m->values + group * m->blocks * m->kept * code_bytes(m);
  const uint16_t *words = words_at(m, group, 0);
  for (int64_t q = 0, span = 0; span < plan->spans; span++) {
    __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();
    for (; q < plan->ends[span]; q++) {
      expand_quad(plan->quads + q, &orders, codes, words, value_type, to->indices + PARTS * q, to->codes + PARTS * q);
      low = correct(low, to->codes[PARTS * q]);
      high = correct(high, to->codes[PARTS * q + 1]);
    }
    to->corrections[PARTS * span] = low, to->corrections[PARTS * span + 1] = high;
  }
}

static void expand_group(const Matrix *m, const Plan *plan, int64_t group, const Expanded *to) {
  if (m->value_type == INT8) expand_quads(m, plan, group, to, INT8);
  else expand_quads(m, plan, group, to, INT4);
}

/* The bytes of some vectors. A vector of 16 bits has two planes, its high bytes, from −128 on, and its low bytes; one
 * of 8 bits has one. */
typedef struct {
  uint8_t *bytes;
  float *scales; /* of each vector */
  int64_t width; /* of a plane */
  int count;     /* of planes of a vector */
} Planes;

/* Round a vector to 8 bits, or to 16 bits where it has a low plane. */
static int round_vector(const Matrix *m, const float *x, uint8_t *high, uint8_t *low, float *scale) {
  const float levels = low ? 32767 : 127;
  __m512i most = _mm512_setzero_si512(), magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  for (int64_t c = 0; c < m->columns; c += 16) {
    __mmask16 mask = m->columns - c < 16 ? (1 << (m->columns - c)) - 1 : 0xFFFF;
    most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_maskz_loadu_epi32(mask, x + c), magnitude));
  }
  float largest = from_bits(_mm512_reduce_max_epi32(most));
  if (!(largest < from_bits(0x7F800000))) return NOT_FINITE;
  if (largest > 0 && largest < SMALLEST) return TOO_SMALL;
  *scale = largest / levels;
  const __m512 factor = _mm512_set1_ps(largest > 0 ? levels / largest : 0);
  for (int64_t c = 0; c < m->columns; c += 16) {
    __mmask16 mask = m->columns - c < 16 ? (1 << (m->columns - c)) - 1 : 0xFFFF;
    __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + c), factor));
    __m128i top = _mm512_cvtepi32_epi8(low ? _mm512_srai_epi32(rounded, 8) : rounded);
    _mm_mask_storeu_epi8(high + c, mask, _mm_xor_si128(top, _mm_set1_epi8((char)128)));
    if (low) _mm_mask_storeu_epi8(low + c, mask, _mm512_cvtepi32_epi8(rounded));
  }
  return DONE;
}

/* Return the sums of one part of a group and a vector as floats, given those of each of its planes. */
INLINE __m512 join_planes(const __m512i (*sums)[PARTS], int part, int planes) {
  const __m512 top = _mm512_cvtepi32_ps(sums[0][part]);
  return planes == 1 ? top : _mm512_fmadd_ps(top, _mm512_set1_ps(256), _mm512_cvtepi32_ps(sums[1][part]));
}

/* Write one part of the results of a vector: its sums times its scale, plus the bias, and their ReLU. */
INLINE void write_part(const Matrix *m, int64_t group, int part, __m512 sum, float scale, float *y) {
  const int64_t row = group * LANES + 16 * part, left = m->rows - row;
  const __mmask16 mask = left >= 16 ? 0xFFFF : left > 0 ? (1 << left) - 1 : 0;
  sum = _mm512_mul_ps(sum, _mm512_set1_ps(scale));
  if (m->bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, m->bias + row));
  if (m->relu) sum = _mm512_max_ps(_mm512_setzero_ps(), sum); /* the second operand where one is NaN */
  _mm512_mask_storeu_ps(y + 16 * part, mask, sum);
}

/* Sum the products of the quads from `q` on and before `end` with so many planes, of which `count` are of one vector. The
 * sums are written to memory only at the end, so that a compiler keeps them in registers. */
INLINE void sum_quads(const Quad *quads, const Expanded *from, int64_t q, int64_t end, const __m512i *corrections,
                      const uint8_t *bytes, int64_t width, __m512i (*to)[PARTS], int streams, int count) {
  __m512i sums[STREAMS][PARTS];
#pragma GCC unroll 8
  for (int s = 0; s < streams; s++)
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) sums[s][p] = s % count == 0 ? corrections[p] : _mm512_setzero_si512();
  for (; q < end; q++) {
    const uint8_t *window = bytes + quads[q].window;
    const __m512i *index = from->indices + PARTS * q, *code = from->codes + PARTS * q;
#pragma GCC unroll 8
    for (int s = 0; s < streams; s++) {
      __m512i x = _mm512_loadu_si512(window + s * width);
      KEEP(x);
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++)
        sums[s][p] = _mm512_dpbusd_epi32(sums[s][p], _mm512_permutexvar_epi8(index[p], x), code[p]);
    }
  }
#pragma GCC unroll 8
  for (int s = 0; s < streams; s++)
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) to[s][p] = sums[s][p];
}

/* Multiply a group of rows by `tile` vectors from `first` on, whose results lie `ldy` apart in y. */
INLINE void multiply_tile(const Matrix *m, const Plan *plan, const Expanded *from, int64_t group, const Planes *planes,
                          int64_t first, float *y, int64_t ldy, int tile, int count) {
  __m512i sums[STREAMS][PARTS];
  __m512 totals[STREAMS][PARTS];
  const uint8_t *bytes = planes->bytes + count * first * planes->width;
  for (int64_t span = 0; span < plan->spans; span++) {
    sum_quads(plan->quads, from, span ? plan->ends[span - 1] : 0, plan->ends[span], from->corrections + PARTS * span,
              bytes, planes->width, sums, tile * count, count);
    __asm__ volatile("" : : "r"(sums) : "memory");
    const float *scale = m->scales + (group * plan->spans + span) * LANES;
    for (int t = 0; t < tile; t++)
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++) {
        const __m512 before = span ? totals[t][p] : _mm512_setzero_ps(), by = _mm512_loadu_ps(scale + 16 * p);
        totals[t][p] = _mm512_fmadd_ps(join_planes(sums + count * t, p, count), by, before);
      }
  }
  for (int t = 0; t < tile; t++)
    for (int p = 0; p < PARTS; p++)
      write_part(m, group, p, totals[t][p], planes->scales[first + t], y + t * ldy);
}

/* Multiply a group of rows by a single vector, for which its quads are not stored. */
INLINE void multiply_single(const Matrix *m, const Plan *plan, int64_t group, const Planes *planes, float *y,
                            int value_type, int count) {
  const Orders orders = make_orders(m);
  const char *codes = m->values + group * m->blocks * m->kept * code_bytes(m);
  const uint16_t *words = words_at(m, group, 0);
  __m512 totals[PARTS] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t q = 0, span = 0; span < plan->spans; span++) {
    __m512i sums[2][PARTS], correction[PARTS];
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) sums[0][p] = sums[1][p] = correction[p] = _mm512_setzero_si512();
    for (; q < plan->ends[span]; q++) {
      const Quad *quad = plan->quads + q;
      const uint8_t *window = planes->bytes + quad->window;
      __m512i index[PARTS], code[PARTS];
      expand_quad(quad, &orders, codes, words, value_type, index, code);
#pragma GCC unroll 2
      for (int s = 0; s < count; s++) {
        __m512i x = _mm512_loadu_si512(window + s * planes->width);
        KEEP(x);
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; p++)
          sums[s][p] = _mm512_dpbusd_epi32(sums[s][p], _mm512_permutexvar_epi8(index[p], x), code[p]);
      }
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++)
        correction[p] = _mm512_dpbusd_epi32(correction[p], _mm512_set1_epi8((char)128), code[p]);
    }
    const float *scale = m->scales + (group * plan->spans + span) * LANES;
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) {
      sums[0][p] = _mm512_sub_epi32(sums[0][p], correction[p]);
      totals[p] = _mm512_fmadd_ps(join_planes(sums, p, count), _mm512_loadu_ps(scale + 16 * p), totals[p]);
    }
  }
  for (int p = 0; p < PARTS; p++) write_part(m, group, p, totals[p], planes->scales[0], y);
}

static void multiply_one(const Matrix *m, const Plan *plan, int64_t group, const Planes *planes, float *y) {
#define CASE(type, number) \
  if (m->value_type == type && planes->count == number) multiply_single(m, plan, group, planes, y, type, number)
  CASE(INT8, 1);
  CASE(INT8, 2);
  CASE(INT4, 1);
  CASE(INT4, 2);
#undef CASE
}

/* Multiply a group of rows by `count` vectors, whose results lie `ldy` apart in y. */
static void multiply_panel(const Matrix *m, const Plan *plan, const Expanded *from, int64_t group, const Planes *planes,
                           int64_t count, float *y, int64_t ldy) {
  int64_t i = 0;
#define TILES(tile, planes_of_vector)                                                                        \
  for (; planes->count == planes_of_vector && i + tile <= count; i += tile)                                  \
  multiply_tile(m, plan, from, group, planes, i, y + i * ldy, ldy, tile, planes_of_vector)
  TILES(8, 1);
  TILES(4, 1);
  TILES(4, 2);
  TILES(2, 1);
  TILES(2, 2);
  TILES(1, 1);
  TILES(1, 2);
#undef TILES
}

/* Round the vectors of a panel from `first` on, for which vectors that lie by columns are transposed in `copy`. */
static int round_panel(const Matrix *m, const Operands *v, int64_t first, int64_t count, const Planes *planes,
                       float *copy, int threads) {
  const float *x = v->offsets ? copy + m->columns * RUN : v->x + first * v->ldx;
  const int64_t ldx = v->offsets ? m->columns : v->ldx, padding = planes->width - m->columns;
  int worst = DONE;
  if (v->offsets) {
    load_tile(m, v, first, 0, m->columns, copy);
    transpose(copy, RUN, m->columns, count, copy + m->columns * RUN, m->columns);
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) {
    uint8_t *high = planes->bytes + planes->count * i * planes->width, *low = NULL;
    memset(high + m->columns, 128, padding);
    if (planes->count == 2) low = high + planes->width, memset(low + m->columns, 0, padding);
    int code = round_vector(m, x + i * ldx, high, low, planes->scales + i);
    if (code == NOT_FINITE || (code && worst == DONE)) worst = code;
  }
  return worst;
}

/* Return the number of vectors whose planes are rounded at a time: panels are of one size, as far as possible. */
static int64_t panel_size(const Operands *v, int64_t vector_bytes) {
  if (v->offsets || v->n <= STREAMS) return smaller(v->n, RUN);
  const int64_t fitting = PANEL_BYTES / vector_bytes, most = fitting < STREAMS ? STREAMS : fitting;
  return ceil_div(ceil_div(v->n, ceil_div(v->n, most)), STREAMS) * STREAMS;
}

/* Multiply vectors that are rounded to integers with so many planes. */
static int multiply_integers(const Matrix *m, const Operands *v, int plane_count, int threads) {
  /* An odd number of cache lines, so that the planes of several vectors do not compete for the same places. */
  const int64_t width = (ceil_div((m->blocks - 1) * m->block + WINDOW, 64) | 1) * 64;
  const int64_t panel = panel_size(v, plane_count * width);
  Planes planes = {aligned_alloc(64, plane_count * panel * width), malloc(panel * sizeof(float)), width, plane_count};
  float *copy = malloc(v->offsets ? 2 * m->columns * RUN * sizeof *copy : 1);
  Plan plan;
  int code = make_plan(m, &plan);
  if (!planes.bytes || !planes.scales || !copy) code = NO_MEMORY;
  for (int64_t first = 0; first < v->n && code == DONE; first += panel) {
    const int64_t count = smaller(panel, v->n - first);
    code = round_panel(m, v, first, count, &planes, copy, threads);
    if (code) break;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
      const int64_t size = PARTS * plan.count;
      Expanded from = {aligned_alloc(64, (2 * size + PARTS * plan.spans) * sizeof(__m512i)), NULL, NULL};
      float *y = malloc(v->offsets ? panel * LANES * sizeof *y : 1);
      if (!from.indices || !y) failed = 1;
      from.codes = from.indices + size, from.corrections = from.codes + size;
#pragma omp for schedule(static)
      for (int64_t group = 0; group < m->groups; group++) {
        if (!from.indices || !y) continue;
        const int64_t top = group * LANES, ldy = v->offsets ? LANES : m->rows;
        float *to = v->offsets ? y : v->y + first * m->rows + top;
        if (count == 1) multiply_one(m, &plan, group, &planes, to);
        else {
          expand_group(m, &plan, group, &from);
          multiply_panel(m, &plan, &from, group, &planes, count, to, ldy);
        }
        if (v->offsets) transpose(y, LANES, count, smaller(LANES, m->rows - top), v->y + top * v->n + first, v->n);
      }
      free(from.indices);
      free(y);
    }
    if (failed) code = NO_MEMORY;
  }
  free(planes.bytes);
  free(planes.scales);
  free(copy);
  free(plan.quads);
  free(plan.ends);
  return code;
}

#endif

/* ---- public functions */

/* Vectors are rounded to 8 bits where `input_bits` is 8. NOT_ROUNDED says that this processor does not do so: the product
 * is that of other instruction sets with rounded vectors. */
#define MATRIX_PARAMETERS                                                                                           \
  const char *values, const uint16_t *indices, const float *scales, const float *bias, int64_t rows,                \
      int64_t columns, int64_t block, int64_t span, int64_t kept, int64_t input_bits, int64_t value_type, int64_t relu
#define MATRIX derive_sizes((Matrix){.values = values, .indices = indices, .bias = bias, .rows = rows,              \
                                     .columns = columns, .block = block, .kept = kept, .value_type = value_type,    \
                                     .relu = relu, .scales = scales, .span = span})

/* Return whether the processor has the instructions that this compilation needs besides those of torch's levels. */
int PUBLIC(supported)(void) {
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
  return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#else
  return 1;
#endif
}

/* Return the code of the product with integers, or NOT_ROUNDED where floats have to be used. */
static int try_integers(const Matrix *m, const Operands *v, int64_t input_bits, int threads) {
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
  if (has_integer_kernel(m)) {
    const int code = multiply_integers(m, v, input_bits == 8 ? 1 : 2, threads);
    if (code != TOO_SMALL) return code;
  }
#endif
  return NOT_ROUNDED;
}

int PUBLIC(quantized_rows)(MATRIX_PARAMETERS, int64_t n, const float *x, int64_t ldx, float *y, int64_t threads) {
  const Matrix m = MATRIX;
  const int code = try_integers(&m, &(Operands){.x = x, .y = y, .ldx = ldx, .n = n}, input_bits, threads);
  return code == NOT_ROUNDED && input_bits != 8 ? multiply_rows(&m, n, x, ldx, y, threads) : code;
}

int PUBLIC(quantized_columns)(MATRIX_PARAMETERS, int64_t n, const float *x, const int64_t *offsets, float *y,
                              int64_t threads) {
  const Matrix m = MATRIX;
  const int code = try_integers(&m, &(Operands){.x = x, .y = y, .offsets = offsets, .n = n}, input_bits, threads);
  return code == NOT_ROUNDED && input_bits != 8 ? multiply_columns(&m, n, x, offsets, y, threads) : code;
}
