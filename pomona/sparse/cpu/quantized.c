/* The product of a packed balanced matrix of int8 or int4 codes with dense vectors: see balanced.h for the layout.
 *
 * Processors with AVX-512, VBMI and VNNI multiply integers, for blocks of up to 64 columns. Each vector of x is rounded
 * to 16 bits: its largest magnitude becomes 32767. The high and the low byte of its elements are two planes, and a sum of
 * products with each is exact in 32 bits. A 32-bit lane belongs to one row, and its four bytes to four survivors, a
 * *quad*: one permutation of 64 bytes picks their inputs from a window of 64 columns, and one instruction adds the four
 * products. Quads take survivors in the order in which they are stored, so that those of several blocks may share one.
 *
 * Other processors, and wider blocks, use floats.
 */

#include "balanced.h"

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)

#define WINDOW 64              /* columns that a permutation picks from */
#define PARTS 2                /* registers with a lane for each of 32 rows */
#define VECTORS 4              /* vectors at a time, as many as the registers hold sums for */
#define MAX_SURVIVORS 60000    /* of a row, so that sums of 255 · 127 · survivors fit into 32 bits */
#define PANEL_BYTES (512 << 10) /* bytes of planes that stay in the L2 cache while all groups of rows are multiplied */
#define LEVELS 32767.0f        /* the largest magnitude of a rounded input */
#define SMALLEST 0x1p-100f     /* the smallest largest magnitude whose reciprocal is far from an overflow */
enum { TOO_SMALL = -1 };       /* the return code for vectors that are left to floats */

typedef struct {
  int32_t survivor, count; /* the first survivor of a row, counted over all blocks, and how many */
  int32_t window;          /* the column with which the window begins */
  int32_t word[4];         /* for each survivor: the word of its index, */
  int32_t shift[4];        /* the bits in that before it, */
  int32_t offset[4];       /* and the column of its block in the window */
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
        *quad = (Quad){.survivor = block * m->kept + s, .window = block * m->block};
      }
      quad->word[quad->count] = block * m->words + s / per_word;
      quad->shift[quad->count] = s % per_word * m->bits;
      quad->offset[quad->count++] = block * m->block - quad->window;
    }
    plan->ends[block / m->span] = plan->count;
  }
  return DONE;
}

/* The order that gathers the bytes of four survivors, stored one after the other, for each row of a part. */
static __m512i survivors_order(int rows, int part) {
  uint8_t order[64];
  for (int i = 0; i < 64; i++) order[i] = i % 4 * rows + part * (rows - 16) + i / 4;
  return _mm512_loadu_si512(order);
}

/* The order that gathers the words of two registers alternately, for each row of a part. */
static __m512i words_order(int part) {
  uint16_t order[32];
  for (int i = 0; i < 32; i++) order[i] = i % 2 * 32 + part * 16 + i / 2;
  return _mm512_loadu_si512(order);
}

/* Return the indices into the window of one survivor of 32 rows, in 16 bits each. */
INLINE __m512i indices_of(const uint16_t *words, const Quad *quad, int i, __m512i mask) {
  if (i >= quad->count) return _mm512_setzero_si512();
  __m512i word = _mm512_loadu_si512(words + quad->word[i] * LANES);
  word = _mm512_and_si512(_mm512_srl_epi16(word, _mm_cvtsi32_si128(quad->shift[i])), mask);
  return _mm512_add_epi16(word, _mm512_set1_epi16(quad->offset[i]));
}

/* Expand the codes and indices of a group of rows. */
static void expand_group(const Matrix *m, const Plan *plan, int64_t group, const Expanded *to) {
  const int64_t step = code_bytes(m);
  const char *codes = m->values + group * m->blocks * m->kept * step;
  const uint16_t *words = words_at(m, group, 0);
  const __m512i mask = _mm512_set1_epi16((1 << m->bits) - 1), eight = _mm512_set1_epi8(8);
  const __m512i low_words = words_order(0), high_words = words_order(1), half = _mm512_set1_epi8((char)128);
  const __m512i low_rows = survivors_order(step, 0), high_rows = survivors_order(step, 1);
  for (int64_t q = 0, span = 0; span < plan->spans; span++) {
    __m512i sums[PARTS] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (; q < plan->ends[span]; q++) {
      const Quad *quad = plan->quads + q;
      __m512i even = _mm512_or_si512(indices_of(words, quad, 0, mask),
                                     _mm512_slli_epi16(indices_of(words, quad, 1, mask), 8));
      __m512i odd = _mm512_or_si512(indices_of(words, quad, 2, mask),
                                    _mm512_slli_epi16(indices_of(words, quad, 3, mask), 8));
      to->indices[PARTS * q] = _mm512_permutex2var_epi16(even, low_words, odd);
      to->indices[PARTS * q + 1] = _mm512_permutex2var_epi16(even, high_words, odd);
      const char *from = codes + quad->survivor * step;
      const int64_t bytes = quad->count * step;
      __m512i first = _mm512_maskz_loadu_epi8(bytes < 64 ? (1ull << bytes) - 1 : ~0ull, from), part[PARTS];
      if (m->value_type == INT8) {
        __m512i second = _mm512_maskz_loadu_epi8(bytes > 64 ? ~0ull >> (128 - bytes) : 0, from + 64);
        part[0] = _mm512_permutex2var_epi8(first, low_rows, second);
        part[1] = _mm512_permutex2var_epi8(first, high_rows, second);
      } else {
        __m512i nibbles = _mm512_set1_epi8(15), high = _mm512_and_si512(_mm512_srli_epi16(first, 4), nibbles);
        first = _mm512_sub_epi8(_mm512_xor_si512(_mm512_and_si512(first, nibbles), eight), eight);
        high = _mm512_sub_epi8(_mm512_xor_si512(high, eight), eight);
        part[0] = _mm512_permutexvar_epi8(low_rows, first);
        part[1] = _mm512_permutexvar_epi8(low_rows, high);
      }
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++) {
        to->codes[PARTS * q + p] = part[p];
        sums[p] = _mm512_dpbusd_epi32(sums[p], half, part[p]);
      }
    }
    for (int p = 0; p < PARTS; p++) /* high bytes are stored with 128 added */
      to->corrections[PARTS * span + p] = _mm512_sub_epi32(_mm512_setzero_si512(), sums[p]);
  }
}

/* The planes of some vectors: the high bytes of each, from −128 on, and then its low bytes. */
typedef struct {
  uint8_t *bytes;
  float *scales; /* of each vector */
  int64_t width; /* of a plane */
} Planes;

/* Round a vector to 16 bits. */
static int round_vector(const Matrix *m, const float *x, uint8_t *high, uint8_t *low, float *scale) {
  __m512i most = _mm512_setzero_si512(), magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  for (int64_t c = 0; c < m->columns; c += 16) {
    __mmask16 mask = m->columns - c < 16 ? (1 << (m->columns - c)) - 1 : 0xFFFF;
    most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_maskz_loadu_epi32(mask, x + c), magnitude));
  }
  float largest = from_bits(_mm512_reduce_max_epi32(most));
  if (!(largest < from_bits(0x7F800000))) return NOT_FINITE;
  if (largest > 0 && largest < SMALLEST) return TOO_SMALL;
  *scale = largest / LEVELS;
  const __m512 factor = _mm512_set1_ps(largest > 0 ? LEVELS / largest : 0);
  for (int64_t c = 0; c < m->columns; c += 16) {
    __mmask16 mask = m->columns - c < 16 ? (1 << (m->columns - c)) - 1 : 0xFFFF;
    __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + c), factor));
    __m128i top = _mm512_cvtepi32_epi8(_mm512_srai_epi32(rounded, 8));
    _mm_mask_storeu_epi8(high + c, mask, _mm_xor_si128(top, _mm_set1_epi8((char)128)));
    _mm_mask_storeu_epi8(low + c, mask, _mm512_cvtepi32_epi8(rounded));
  }
  return DONE;
}

/* Multiply a group of rows by `tile` vectors from `first` on, whose results lie `ldy` apart in y. */
INLINE void multiply_quads(const Matrix *m, const Plan *plan, const Expanded *from, int64_t group, const Planes *planes,
                           int64_t first, float *y, int64_t ldy, int tile) {
  __m512 totals[VECTORS][PARTS];
  const uint8_t *bytes = planes->bytes + 2 * first * planes->width;
  for (int t = 0; t < tile; t++)
    for (int p = 0; p < PARTS; p++) totals[t][p] = _mm512_setzero_ps();
  for (int64_t q = 0, span = 0; span < plan->spans; span++) {
    __m512i high[VECTORS][PARTS], low[VECTORS][PARTS];
#pragma GCC unroll 4
    for (int t = 0; t < tile; t++)
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++)
        high[t][p] = from->corrections[PARTS * span + p], low[t][p] = _mm512_setzero_si512();
    for (; q < plan->ends[span]; q++) {
      const uint8_t *window = bytes + plan->quads[q].window;
      const __m512i *index = from->indices + PARTS * q, *code = from->codes + PARTS * q;
#pragma GCC unroll 4
      for (int t = 0; t < tile; t++) {
        __m512i top = _mm512_loadu_si512(window + 2 * t * planes->width);
        __m512i bottom = _mm512_loadu_si512(window + (2 * t + 1) * planes->width);
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; p++) {
          high[t][p] = _mm512_dpbusd_epi32(high[t][p], _mm512_permutexvar_epi8(index[p], top), code[p]);
          low[t][p] = _mm512_dpbusd_epi32(low[t][p], _mm512_permutexvar_epi8(index[p], bottom), code[p]);
        }
      }
    }
    const float *scale = m->scales + (group * plan->spans + span) * LANES;
#pragma GCC unroll 4
    for (int t = 0; t < tile; t++)
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++) {
        __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[t][p]), _mm512_set1_ps(256),
                                     _mm512_cvtepi32_ps(low[t][p]));
        totals[t][p] = _mm512_fmadd_ps(sum, _mm512_loadu_ps(scale + 16 * p), totals[t][p]);
      }
  }
  const int64_t top = group * LANES, rows = smaller(LANES, m->rows - top);
#pragma GCC unroll 4
  for (int t = 0; t < tile; t++)
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) {
      const int64_t left = rows - 16 * p;
      const __mmask16 mask = left >= 16 ? 0xFFFF : left > 0 ? (1 << left) - 1 : 0;
      __m512 sum = _mm512_mul_ps(totals[t][p], _mm512_set1_ps(planes->scales[first + t]));
      if (m->bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, m->bias + top + 16 * p));
      if (m->relu) sum = _mm512_max_ps(_mm512_setzero_ps(), sum); /* the second operand where one is NaN */
      _mm512_mask_storeu_ps(y + t * ldy + 16 * p, mask, sum);
    }
}

/* Multiply a group of rows by `count` vectors from `first` on, whose results lie `ldy` apart in y. */
static void multiply_panel(const Matrix *m, const Plan *plan, const Expanded *from, int64_t group, const Planes *planes,
                           int64_t count, float *y, int64_t ldy) {
  int64_t i = 0;
  for (; i + VECTORS <= count; i += VECTORS) multiply_quads(m, plan, from, group, planes, i, y + i * ldy, ldy, VECTORS);
#define CASE(tile) case tile: multiply_quads(m, plan, from, group, planes, i, y + i * ldy, ldy, tile); break
  switch (count - i) {
    CASE(1);
    CASE(2);
    CASE(3);
  }
#undef CASE
}

/* Round the vectors of a panel from `first` on, for which vectors that lie by columns are transposed in `copy`. */
static int round_panel(const Matrix *m, const Operands *v, int64_t first, int64_t count, const Planes *planes,
                       float *copy, int threads) {
  const float *x = v->offsets ? copy + m->columns * RUN : v->x + first * v->ldx;
  const int64_t ldx = v->offsets ? m->columns : v->ldx;
  int worst = DONE;
  if (v->offsets) {
    load_tile(m, v, first, 0, m->columns, copy);
    transpose(copy, RUN, m->columns, count, copy + m->columns * RUN, m->columns);
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) {
    uint8_t *high = planes->bytes + 2 * i * planes->width, *low = high + planes->width;
    memset(high + m->columns, 128, planes->width - m->columns);
    memset(low + m->columns, 0, planes->width - m->columns);
    int code = round_vector(m, x + i * ldx, high, low, planes->scales + i);
    if (code == NOT_FINITE || (code && worst == DONE)) worst = code;
  }
  return worst;
}

static int multiply_integers(const Matrix *m, const Operands *v, int threads) {
  /* An odd number of cache lines, so that the planes of several vectors do not compete for the same places. */
  const int64_t width = (ceil_div((m->blocks - 1) * m->block + WINDOW, 64) | 1) * 64;
  int64_t panel = PANEL_BYTES / (2 * width) / VECTORS * VECTORS;
  panel = smaller(v->n, v->offsets ? RUN : panel < VECTORS ? VECTORS : panel);
  Planes planes = {aligned_alloc(64, 2 * panel * width), malloc(panel * sizeof(float)), width};
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
        const int64_t top = group * LANES;
        expand_group(m, &plan, group, &from);
        if (!v->offsets) multiply_panel(m, &plan, &from, group, &planes, count, v->y + first * m->rows + top, m->rows);
        else {
          multiply_panel(m, &plan, &from, group, &planes, count, y, LANES);
          transpose(y, LANES, count, smaller(LANES, m->rows - top), v->y + top * v->n + first, v->n);
        }
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

#define MATRIX_PARAMETERS                                                                                        \
  const char *values, const uint16_t *indices, const float *scales, const float *bias, int64_t rows,             \
      int64_t columns, int64_t block, int64_t span, int64_t kept, int64_t value_type, int64_t relu
#define MATRIX derive_sizes((Matrix){.values = values, .indices = indices, .bias = bias, .rows = rows,           \
                                     .columns = columns, .block = block, .kept = kept, .value_type = value_type, \
                                     .relu = relu, .scales = scales, .span = span})

/* Return whether the processor has the instructions that this compilation needs besides those of torch's levels. */
int PUBLIC(supported)(void) {
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
  return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#else
  return 1;
#endif
}

int PUBLIC(quantized_rows)(MATRIX_PARAMETERS, int64_t n, const float *x, int64_t ldx, float *y, int64_t threads) {
  const Matrix m = MATRIX;
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
  if (has_integer_kernel(&m)) {
    int code = multiply_integers(&m, &(Operands){.x = x, .y = y, .ldx = ldx, .n = n}, threads);
    if (code != TOO_SMALL) return code;
  }
#endif
  return multiply_rows(&m, n, x, ldx, y, threads);
}

int PUBLIC(quantized_columns)(MATRIX_PARAMETERS, int64_t n, const float *x, const int64_t *offsets, float *y,
                              int64_t threads) {
  const Matrix m = MATRIX;
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
  if (has_integer_kernel(&m)) {
    int code = multiply_integers(&m, &(Operands){.x = x, .y = y, .offsets = offsets, .n = n}, threads);
    if (code != TOO_SMALL) return code;
  }
#endif
  return multiply_columns(&m, n, x, offsets, y, threads);
}
