/* The product of a packed unstructured matrix with dense vectors on a CPU.
 *
 * This file is compiled once for each instruction set, NAME, and each compilation has the same three functions:
 *
 *   unstructured_order    orders the survivors of a matrix that is packed, in place: see slice_order.h.
 *   unstructured_rows     y (n × rows) = x (n × columns, contiguous rows) times the transposed matrix.
 *   unstructured_columns  y (rows × n) = the matrix times x (columns × n), where the n values of a column are contiguous
 *                         and start at any offset.
 *
 * A slice is 16 rows of about the same number of survivors, which lie as [step][row]. For one or two vectors the lanes
 * of a register are rows: a step is one load of values, and a gather from x, which stays in the L1 cache, or with AVX-512
 * a permutation of a window of x. For more, the lanes are vectors: a survivor adds its multiple of a run of them. Several
 * rows of a slice advance together, so that the sums are independent of each other, and all rows take the same number of
 * steps before the next slice, so that the end of a loop is predicted and x is read from the cache: steps are about in the
 * order of their columns.
 *
 * Whatever the contents of the matrix are, reads and writes stay inside the memory: x is copied to where any index of 16
 * bits can address it, and starts and rows are checked where they are used.
 */

#include "runs.h"
#include "slice_order.h"

#define PANEL 8     /* slices that advance together, where lanes are vectors: their sums are in the cache too */
#define MIN_STEPS 4 /* that they advance: the sums are loaded and stored each time */

/* Return the number of columns that indices can address, whatever their values. */
INLINE int64_t addressable_columns(const Matrix *m) { return m->bands * BAND; }

/* Return the result of one row: the bands are added up, and the last one adds the bias and applies the ReLU. */
INLINE float finish(const Matrix *m, int64_t band, int64_t row, float sum, const float *before) {
  if (band) sum += *before;
  if (band < m->bands - 1) return sum;
  if (m->bias) sum += m->bias[row];
  return m->relu && sum < 0 ? 0.0f : sum; /* keeps a NaN */
}

/* ---- kernels whose lanes are rows */

#define REGISTERS (LANES / WIDTH) /* that hold one value of each row of a slice */
#define FEW 2                     /* vectors at a time */

/* Each instruction set gathers x[index] for the WIDTH indices from `index` on. Loads of single numbers are faster than
 * the instruction for it on many processors, and never much slower. Two indices are loaded at a time: a processor has as
 * few ports for loads as for insertions, and the compiler would load a number separately that it inserts. */

#ifdef __AVX2__
#define INSERT(target, source, place) \
  __asm__("vinsertps %3, %2, %1, %0" : "=x"(target) : "x"(target), "m"(*(source)), "i"((place) << 4))

INLINE __m128 gather_4(const float *x, const uint16_t *index) {
  uint32_t first, second;
  memcpy(&first, index, sizeof first);
  memcpy(&second, index + 2, sizeof second);
  __m128 result = _mm_load_ss(x + (first & 0xFFFF));
  INSERT(result, x + (first >> 16), 1);
  INSERT(result, x + (second & 0xFFFF), 2);
  INSERT(result, x + (second >> 16), 3);
  return result;
}

INLINE __m256 gather_8(const float *x, const uint16_t *index) {
  return _mm256_set_m128(gather_4(x, index + 4), gather_4(x, index));
}
#endif

#if defined(__AVX512F__)
/* Return x[index] from the window of the lowest index, if it has all of them, else from one load for each. */
INLINE Floats gather(const float *x, const uint16_t *index) {
  const __m256i indices = _mm256_loadu_si256((const void *)index);
  const __m128i pairs = _mm_min_epu16(_mm256_castsi256_si128(indices), _mm256_extracti128_si256(indices, 1));
  const uint32_t first = _mm_cvtsi128_si32(_mm_minpos_epu16(pairs)) & UINT16_MAX & -WINDOW_START;
  const __m256i offsets = _mm256_sub_epi16(indices, _mm256_set1_epi16(first));
  if (_mm256_testz_si256(offsets, _mm256_set1_epi16(-WINDOW))) {
    const __m512i place = _mm512_cvtepu16_epi32(offsets);
    const __mmask16 in_second_half = _mm512_test_epi32_mask(place, _mm512_set1_epi32(32));
    x += first;
    const __m512 low = _mm512_permutex2var_ps(_mm512_loadu_ps(x), place, _mm512_loadu_ps(x + 16));
    const __m512 high = _mm512_permutex2var_ps(_mm512_loadu_ps(x + 32), place, _mm512_loadu_ps(x + 48));
    return _mm512_mask_mov_ps(low, in_second_half, high);
  }
  return _mm512_insertf32x8(_mm512_castps256_ps512(gather_8(x, index)), gather_8(x, index + 8), 1);
}
#elif defined(__AVX2__)
INLINE Floats gather(const float *x, const uint16_t *index) { return gather_8(x, index); }
#else
INLINE Floats gather(const float *x, const uint16_t *index) {
  Floats result;
  FOR_EACH_LANE(x[index[lane]]);
}
#endif

/* Multiply a slice by `few` vectors, which are `ldx` apart, into sums[vector][lane]. */
INLINE void multiply_slice(const Slice *s, const float *x, int64_t ldx, float *sums, int few, int value_type) {
  Floats sum[FEW * REGISTERS], zero; /* one by one, so that they are registers */
  memset(&zero, 0, sizeof zero);
#pragma GCC unroll 4
  for (int i = 0; i < few * REGISTERS; i++) sum[i] = zero;
  const char *values = s->values;
  const uint16_t *indices = s->indices;
  for (int64_t step = 0; step < s->steps; step++, values += LANES * value_bytes(value_type), indices += LANES)
#pragma GCC unroll 2
    for (int part = 0; part < REGISTERS; part++) {
      const Floats value = load(values, part * WIDTH, value_type);
#pragma GCC unroll 2
      for (int i = 0; i < few; i++)
        sum[i * REGISTERS + part] =
            add_product(value, gather(x + i * ldx, indices + part * WIDTH), sum[i * REGISTERS + part]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < few * REGISTERS; i++) memcpy(sums + i * WIDTH, sum + i, sizeof *sum);
}

static void multiply_slice_few(const Slice *s, const float *x, int64_t ldx, float *sums, int64_t few,
                               int64_t value_type) {
#define CASE(type)                                                 \
  case type:                                                       \
    if (few == 1) multiply_slice(s, x, ldx, sums, 1, type);        \
    else multiply_slice(s, x, ldx, sums, FEW, type);               \
    return
  switch (value_type) {
    CASE(FLOAT32);
    CASE(FLOAT16);
    CASE(BFLOAT16);
  }
#undef CASE
}

/* Multiply the matrix by the `few` vectors from `first` on, which lie in rows. The slices are sorted by length: threads
 * take them in turns, to have about as much work each. `x` has room for the vectors. */
static void multiply_row_lanes(const Matrix *m, const Operands *v, int64_t first, int64_t few, float *x, int threads) {
  const int64_t ldx = addressable_columns(m);
  float *y = v->y + first * m->rows;
  for (int64_t i = 0; i < few; i++) memcpy(x + i * ldx, v->x + (first + i) * v->ldx, m->columns * sizeof *x);
  for (int64_t band = 0; band < m->bands; band++)
#pragma omp parallel for num_threads(threads) schedule(static, 4)
    for (int64_t slice = 0; slice < m->slices; slice++) {
      const Slice s = slice_at(m, band, slice);
      float sums[FEW * LANES];
      multiply_slice_few(&s, x + band * BAND, ldx, sums, few, m->value_type);
      for (int64_t i = 0; i < few; i++)
        for (int64_t lane = 0; lane < LANES; lane++) {
          const int64_t row = s.lanes[lane];
          if (is_row(m, row)) y[i * m->rows + row] = finish(m, band, row, sums[i * LANES + lane], y + i * m->rows + row);
        }
    }
}

/* ---- kernels whose lanes are vectors: a run of the n values of a column */

#define SUMS 8 /* registers of sums: as many runs times registers of a run as hide the time of an addition */

/* Add the products of the steps before `end` to the sums of all rows of a slice, sums[lane][vector]. */
#define DEFINE_ADD_STEPS(name, Register)                                                                            \
  INLINE void name(const Slice *s, int64_t from, int64_t end, const float *x, float *sums, int registers,           \
                   int value_type) {                                                                 \
    const int rows = SUMS / registers, width = registers * (int)(sizeof(Register) / sizeof(float));                 \
    for (int lane = 0; lane < LANES; lane += rows) {                                                                \
      Register sum[SUMS], *stored = (Register *)(sums + lane * width);                                              \
      _Pragma("GCC unroll 8") for (int i = 0; i < SUMS; i++) sum[i] = stored[i];                                    \
      for (int64_t step = from; step < end; step++)                                                                 \
        _Pragma("GCC unroll 8") for (int row = 0; row < rows; row++) {                                              \
          const float value = value_at(s->values, step * LANES + lane + row, value_type);                           \
          const Register *run = (const Register *)(x + (int64_t)s->indices[step * LANES + lane + row] * width);     \
          _Pragma("GCC unroll 8") for (int i = 0; i < registers; i++) sum[row * registers + i] += value * run[i];   \
        }                                                                                                           \
      _Pragma("GCC unroll 8") for (int i = 0; i < SUMS; i++) stored[i] = sum[i];                                    \
    }                                                                                                               \
  }

DEFINE_ADD_STEPS(add_steps_of_four, Four)
#ifdef __AVX2__
DEFINE_ADD_STEPS(add_steps_of_eight, Eight)
#endif
#ifdef __AVX512F__
DEFINE_ADD_STEPS(add_steps_of_sixteen, Sixteen)
#endif

typedef void AddSteps(const Slice *, int64_t, int64_t, const float *, float *);

#define DEFINE_FOR_TYPE(width, add, registers, type)                                                                \
  static void add_##width##_##type(const Slice *s, int64_t from, int64_t end, const float *x, float *sums) {        \
    add(s, from, end, x, sums, registers, type);                                                                    \
  }
#define DEFINE_FOR_WIDTH(width, add, registers)                                                                     \
  DEFINE_FOR_TYPE(width, add, registers, FLOAT32)                                                                   \
  DEFINE_FOR_TYPE(width, add, registers, FLOAT16)                                                                   \
  DEFINE_FOR_TYPE(width, add, registers, BFLOAT16)
#define WITH_TYPES(width) {add_##width##_FLOAT32, add_##width##_FLOAT16, add_##width##_BFLOAT16}

DEFINE_FOR_WIDTH(4, add_steps_of_four, 1)
#if defined(__AVX512F__)
DEFINE_FOR_WIDTH(8, add_steps_of_eight, 1)
DEFINE_FOR_WIDTH(16, add_steps_of_sixteen, 1)
DEFINE_FOR_WIDTH(32, add_steps_of_sixteen, 2)
DEFINE_FOR_WIDTH(64, add_steps_of_sixteen, 4)
#elif defined(__AVX2__)
DEFINE_FOR_WIDTH(8, add_steps_of_eight, 1)
DEFINE_FOR_WIDTH(16, add_steps_of_eight, 2)
DEFINE_FOR_WIDTH(32, add_steps_of_eight, 4)
#else
DEFINE_FOR_WIDTH(8, add_steps_of_four, 2)
DEFINE_FOR_WIDTH(16, add_steps_of_four, 4)
DEFINE_FOR_WIDTH(32, add_steps_of_four, 8)
#endif

/* The numbers of vectors in a run, the bytes of x that the steps of a panel read at a time, and the function for each type
 * of values. Wide runs stay in an L1 cache beside the sums; runs of less than a cache line are read from the L2 cache. */
static const struct { int64_t width, cached_bytes; AddSteps *add[3]; } RUNS[] = {
    {4, 256 << 10, WITH_TYPES(4)},
    {8, 256 << 10, WITH_TYPES(8)},
    {16, 48 << 10, WITH_TYPES(16)},
    {32, 24 << 10, WITH_TYPES(32)},
#ifdef __AVX512F__
    {64, 16 << 10, WITH_TYPES(64)},
#endif
};
#define WIDEST ((int)(sizeof RUNS / sizeof *RUNS) - 1)

/* Return the index of the narrowest run that holds n vectors, or of the widest one. */
static int choose_run(int64_t n) {
  int run = 0;
  while (run < WIDEST && RUNS[run].width < n) run++;
  return run;
}

/* Write the sums of the `count` lanes of a panel to the results, as [row][vector], like `finish`. Compilers vectorize loops
 * without conditions. */
static VECTORIZED void store_runs(const Matrix *m, int64_t band, const int32_t *lanes, int64_t count, float *sums,
                                  int64_t width, float *results) {
  const int last = band == m->bands - 1;
  for (int64_t lane = 0; lane < count; lane++) {
    const int64_t row = lanes[lane];
    if (!is_row(m, row)) continue;
    float *sum = sums + lane * width, *to = results + row * width;
    if (band)
      for (int64_t i = 0; i < width; i++) sum[i] += to[i];
    if (last && m->bias)
      for (int64_t i = 0; i < width; i++) sum[i] += m->bias[row];
    if (last && m->relu)
      for (int64_t i = 0; i < width; i++) sum[i] = sum[i] < 0 ? 0.0f : sum[i]; /* keeps a NaN */
    memcpy(to, sum, width * sizeof *to);
  }
}

/* Return how many steps all rows of a panel take before the next ones: those that read as much of x as is cached. */
static int64_t steps_at_once(int64_t longest, int64_t columns, int run) {
  const int64_t cached = RUNS[run].cached_bytes / (RUNS[run].width * (int64_t)sizeof(float));
  const int64_t steps = longest * cached / columns / 4 * 4 + 4;
  return cached >= columns ? longest : greater(steps, MIN_STEPS);
}

#define CACHE_LINE 64
#define MIN_PREFETCHED 32 /* vectors of a run, for which the next steps are loaded ahead */

/* Load the steps of a slice into the cache: they are too few for a processor to foresee. */
static void prefetch_steps(const Slice *s, int64_t from, int64_t end, int64_t value_type) {
  const int64_t value = LANES * value_bytes(value_type), index = LANES * sizeof *s->indices;
  for (int64_t byte = from * value; byte < end * value; byte += CACHE_LINE) __builtin_prefetch(s->values + byte);
  for (int64_t byte = from * index; byte < end * index; byte += CACHE_LINE)
    __builtin_prefetch((const char *)s->indices + byte);
}

/* Multiply a panel of slices by a run of vectors, and write the sums to the results. */
static void multiply_panel(const Matrix *m, int64_t band, int64_t panel, int run, const float *x, float *sums,
                           float *results) {
  const int64_t width = RUNS[run].width, count = smaller(PANEL, m->slices - panel);
  AddSteps *add = RUNS[run].add[m->value_type];
  Slice slices[PANEL];
  int64_t longest = 0;
  for (int64_t i = 0; i < count; i++) {
    slices[i] = slice_at(m, band, panel + i);
    longest = greater(longest, slices[i].steps);
  }
  memset(sums, 0, count * LANES * width * sizeof *sums);
  const int64_t steps = steps_at_once(longest, smaller(BAND, m->columns - band * BAND), run);
  for (int64_t from = 0; from < longest; from += steps)
    for (int64_t i = 0; i < count; i++) {
      const int64_t end = smaller(slices[i].steps, from + steps);
      if (width >= MIN_PREFETCHED) {
        const Slice *next = slices + (i + 1) % count;
        const int64_t first = i + 1 < count ? from : from + steps;
        prefetch_steps(next, first, smaller(next->steps, first + steps), m->value_type);
      }
      if (from < end) add(slices + i, from, end, x + band * BAND * width, sums + i * LANES * width);
    }
  store_runs(m, band, slices[0].lanes, count * LANES, sums, width, results);
}

/* Multiply the matrix by one run of vectors from `first` on. `x` and `results` have room for them. Return whether memory
 * sufficed. */
static int multiply_run(const Matrix *m, const Operands *v, int64_t first, int run, float *x, float *results,
                        int threads) {
  const int64_t width = RUNS[run].width;
  int done = 1;
#pragma omp parallel num_threads(threads)
  {
    float *sums = aligned_alloc(64, PANEL * LANES * width * sizeof *sums);
    if (!sums) done = 0;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < m->columns; c += AT_ONCE)
      load_runs(v, first, width, c, smaller(m->columns, c + AT_ONCE), x);
    for (int64_t band = 0; band < m->bands; band++)
#pragma omp for schedule(static, 1)
      for (int64_t panel = 0; panel < m->slices; panel += PANEL)
        if (sums) multiply_panel(m, band, panel, run, x, sums, results);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < m->rows; row += AT_ONCE)
      write_results(v, m->rows, results, width, first, row, smaller(m->rows, row + AT_ONCE));
    free(sums);
  }
  return done;
}

static int multiply(const Matrix *m, const Operands *v, int threads) {
  const int64_t few = v->offsets ? 0 : FEW; /* rows as lanes, up to so many vectors */
  const int64_t room = v->n > few ? RUNS[choose_run(v->n)].width : few;
  float *x = aligned_alloc(64, (addressable_columns(m) * room + WINDOW) * sizeof *x); /* the last window ends behind it */
  float *results = calloc(v->n > few ? m->rows * room : 1, sizeof *results); /* rows that no lane has are 0 */
  int done = x && results;
  for (int64_t first = 0; first < v->n && done;) {
    const int64_t rest = v->n - first;
    const int run = choose_run(rest);
    if (rest <= few) multiply_row_lanes(m, v, first, rest, x, threads);
    else done = multiply_run(m, v, first, run, x, results, threads);
    first += rest <= few ? rest : RUNS[run].width;
  }
  free(x);
  free(results);
  return done ? DONE : NO_MEMORY;
}

/* ---- public functions */

int PUBLIC(unstructured_order)(char *values, uint16_t *indices, const int64_t *starts, const int32_t *lanes,
                               int64_t slices, int64_t steps, int64_t value_type) {
  const Matrix m = {.values = values, .indices = indices, .starts = starts, .lanes = lanes, .steps = steps,
                    .value_type = value_type, .slices = slices};
  int64_t longest = 1;
  for (int64_t i = 0; i < slices; i++) longest = greater(longest, slice_at(&m, 0, i).steps);
  const int64_t size = value_bytes(value_type), places = longest * LANES;
  char *ordered = malloc(places * (size + sizeof *indices + sizeof(int32_t)));
  if (!ordered) return NO_MEMORY;
  for (int64_t i = 0; i < slices; i++) {
    const Slice s = slice_at(&m, 0, i);
    int32_t *late = (int32_t *)ordered;
    order_slice(&s, size, (char *)(late + places), (uint16_t *)((char *)(late + places) + places * size), late);
  }
  free(ordered);
  return DONE;
}

int PUBLIC(unstructured_rows)(MATRIX_PARAMETERS, int64_t n, const float *x, int64_t ldx, float *y, int64_t threads) {
  const Matrix m = MATRIX_WITH_SIZES;
  for (int64_t i = 0; i < n; i++)
    if (!all_finite(x + i * ldx, columns)) return NOT_FINITE;
  return multiply(&m, &(Operands){.x = x, .y = y, .ldx = ldx, .n = n}, threads);
}

int PUBLIC(unstructured_columns)(MATRIX_PARAMETERS, int64_t n, const float *x, const int64_t *offsets, float *y,
                                 int64_t threads) {
  const Matrix m = MATRIX_WITH_SIZES;
  if (!all_runs_finite(x, offsets, columns, n)) return NOT_FINITE;
  return multiply(&m, &(Operands){.x = x, .y = y, .offsets = offsets, .n = n}, threads);
}
