/* The product of a matrix packed in blocks of height × width with dense vectors on a CPU.
 *
 * This file is compiled once for each instruction set, NAME, and each compilation has the same two functions:
 *
 *   blocks_rows     y (n × rows) = x (n × columns, contiguous rows) times the transposed matrix.
 *   blocks_columns  y (rows × n) = the matrix times x (columns × n), where the n values of a column are contiguous
 *                   and start at any offset.
 *
 * The blocks of a block row lie one after another, each as [row][column], with the number of its block column. For one
 * or two vectors, the lanes of a register are neighbouring weights of a block: the columns of x that they read are
 * loaded once, repeated where a register holds several rows. For more, the lanes are vectors: a column of x, loaded
 * once, is multiplied by several rows of the block, whose sums are registers for as long as a block row is.
 *
 * Whatever the contents of the matrix are, reads stay inside the memory: starts and block columns are checked where
 * they are used.
 */

#include "runs.h"

typedef struct {
  const char *values;
  const int32_t *block_columns; /* the block column of each block */
  const int32_t *starts;        /* the first block of each block row, and their number */
  const float *bias;            /* or null */
  int64_t rows, columns, height, width, blocks, value_type, relu;
  int64_t across, down; /* set by `derive_sizes`: blocks that cover the columns, and the rows */
} Matrix;

static Matrix derive_sizes(Matrix m) {
  m.across = ceil_div(m.columns, m.width);
  m.down = ceil_div(m.rows, m.height);
  return m;
}

/* The blocks of a block row. */
typedef struct {
  const char *values;
  const int32_t *columns;
  int64_t count, last; /* the last block column that there is */
  int64_t height, width;
} BlockRow;

static BlockRow block_row_at(const Matrix *m, int64_t i) {
  const int64_t start = between(0, m->starts[i], m->blocks), end = between(start, m->starts[i + 1], m->blocks);
  const int64_t size = m->height * m->width * value_bytes(m->value_type);
  return (BlockRow){m->values + start * size, m->block_columns + start, end - start, m->across - 1, m->height,
                    m->width};
}

/* Return the first column of a block. */
INLINE int64_t column_of(const BlockRow *r, int64_t block) { return between(0, r->columns[block], r->last) * r->width; }

/* Return the sum of some numbers, by four sums that are independent of each other. */
INLINE float add_up(const float *numbers, int64_t count) {
  float a = 0, b = 0, c = 0, d = 0;
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) a += numbers[i], b += numbers[i + 1], c += numbers[i + 2], d += numbers[i + 3];
  for (; i < count; i++) a += numbers[i];
  return (a + b) + (c + d);
}

/* ---- kernels whose lanes are weights of a block */

#define FEW 2 /* vectors, at most */
#ifdef __AVX512F__
#define MAX_REGISTERS 16 /* of sums */
#else
#define MAX_REGISTERS 8
#endif

/* Return a register of the `repeated` numbers of x, again and again, or of as many as it holds. */
INLINE Floats load_repeated(const float *x, int repeated) {
#if defined(__AVX512F__)
  if (repeated == 1) return _mm512_set1_ps(*x);
  if (repeated == 2) return _mm512_castpd_ps(_mm512_set1_pd(*(const double __attribute__((may_alias, aligned(4))) *)x));
  if (repeated == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(x));
  if (repeated == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(x));
  return _mm512_loadu_ps(x);
#elif defined(__AVX2__)
  if (repeated == 1) return _mm256_set1_ps(*x);
  if (repeated == 2) return _mm256_castpd_ps(_mm256_set1_pd(*(const double __attribute__((may_alias, aligned(4))) *)x));
  if (repeated == 4) return _mm256_broadcast_ps((const __m128 *)x);
  return _mm256_loadu_ps(x);
#else
  Floats result;
  FOR_EACH_LANE(x[lane % repeated]);
#endif
}

/* Add the products of so many registers of each block, from weight `from` on, to `sums`: `registers` of them. Where they
 * are few, several blocks add to sums of their own, which are independent of each other. */
INLINE void multiply_part(const BlockRow *r, int64_t from, const float *x, float *sums, int registers, int repeated,
                          int value_type) {
  const int chains = registers < 4 ? 4 / registers : 1;
  Floats sum[MAX_REGISTERS], zero;
  memset(&zero, 0, sizeof zero);
#pragma GCC unroll 16
  for (int i = 0; i < registers * chains; i++) sum[i] = zero;
  const int64_t size = r->height * r->width;
  const char *values = r->values + from * value_bytes(value_type);
  x += from % r->width;
#define ADD_BLOCK(chain)                                                                                           \
  {                                                                                                                \
    const float *inputs = x + column_of(r, block + (chain));                                                       \
    const char *weights = values + (chain) * size * value_bytes(value_type);                                       \
    _Pragma("GCC unroll 16") for (int i = 0; i < registers; i++) {                                                  \
      const int64_t place = repeated < WIDTH ? 0 : (from + i * WIDTH) % r->width - from % r->width;                \
      Floats *to = sum + (chain) * registers + i;                                                                  \
      *to = add_product(load(weights, i * WIDTH, value_type), load_repeated(inputs + place, repeated), *to);       \
    }                                                                                                              \
  }
  int64_t block = 0;
  for (; block + chains <= r->count; block += chains, values += chains * size * value_bytes(value_type)) {
    ADD_BLOCK(0);
    if (chains > 1) ADD_BLOCK(1);
    if (chains > 2) ADD_BLOCK(2);
    if (chains > 2) ADD_BLOCK(3);
  }
  for (; block < r->count; block++, values += size * value_bytes(value_type)) ADD_BLOCK(0);
#undef ADD_BLOCK
  float some[MAX_REGISTERS * WIDTH];
  memcpy(some, sum, registers * chains * sizeof *sum);
  for (int i = 0; i < registers * WIDTH; i++)
    for (int chain = 1; chain < chains; chain++) some[i] += some[chain * registers * WIDTH + i];
  memcpy(sums, some, registers * WIDTH * sizeof *sums);
}

/* Multiply a block row by one vector, into sums[row][column], weights whose product with x is added up later. */
INLINE void multiply_parts(const BlockRow *r, const float *x, float *sums, int repeated, int value_type) {
  const int64_t size = r->height * r->width;
  for (int64_t from = 0; from < size;) {
    const int64_t left = (size - from) / WIDTH;
    float *to = sums + from;
    if (MAX_REGISTERS > 8 && left >= MAX_REGISTERS) {
      multiply_part(r, from, x, to, MAX_REGISTERS, repeated, value_type);
      from += MAX_REGISTERS * WIDTH;
    } else if (left >= 8) multiply_part(r, from, x, to, 8, repeated, value_type), from += 8 * WIDTH;
    else if (left >= 4) multiply_part(r, from, x, to, 4, repeated, value_type), from += 4 * WIDTH;
    else if (left >= 2) multiply_part(r, from, x, to, 2, repeated, value_type), from += 2 * WIDTH;
    else multiply_part(r, from, x, to, 1, repeated, value_type), from += WIDTH;
  }
}

/* The same for blocks that do not fill registers. */
INLINE void multiply_any(const BlockRow *r, const float *x, float *sums, int value_type) {
  const int64_t size = r->height * r->width;
  memset(sums, 0, size * sizeof *sums);
  for (int64_t block = 0; block < r->count; block++) {
    const float *inputs = x + column_of(r, block);
    for (int64_t i = 0, row = 0; row < r->height; row++)
      for (int64_t column = 0; column < r->width; column++, i++)
        sums[i] += value_at(r->values, block * size + i, value_type) * inputs[column];
  }
}

/* Call the function for the blocks of a matrix with constant arguments, so that each combination is compiled
 * separately. */
INLINE void multiply_block_row_of(const BlockRow *r, const float *x, float *sums, int value_type) {
  if (r->height * r->width % WIDTH == 0) {
    if (r->width % WIDTH == 0) return multiply_parts(r, x, sums, WIDTH, value_type);
    if (r->width == 8) return multiply_parts(r, x, sums, 8, value_type);
    if (r->width == 4) return multiply_parts(r, x, sums, 4, value_type);
    if (r->width == 2) return multiply_parts(r, x, sums, 2, value_type);
    if (r->width == 1) return multiply_parts(r, x, sums, 1, value_type);
  }
  multiply_any(r, x, sums, value_type);
}

static void multiply_block_row(const BlockRow *r, const float *x, float *sums, int64_t value_type) {
  if (value_type == FLOAT32) return multiply_block_row_of(r, x, sums, FLOAT32);
  value_type == FLOAT16 ? multiply_block_row_of(r, x, sums, FLOAT16) : multiply_block_row_of(r, x, sums, BFLOAT16);
}

/* Multiply the matrix by the `few` vectors from `first` on, which lie in rows. Return whether memory sufficed. */
static int multiply_few(const Matrix *m, const Operands *v, int64_t first, int64_t few, int threads) {
  const int64_t padded = m->across * m->width;
  float *x = calloc(few * padded, sizeof *x);
  int done = x != NULL;
  for (int64_t i = 0; i < few && x; i++)
    memcpy(x + i * padded, v->x + (first + i) * v->ldx, m->columns * sizeof *x);
#pragma omp parallel num_threads(threads)
  {
    float *sums = malloc(m->height * m->width * sizeof *sums);
    if (!sums) done = 0;
#pragma omp for schedule(static, 4)
    for (int64_t i = 0; i < m->down; i++) {
      const BlockRow r = block_row_at(m, i);
      for (int64_t k = 0; k < few && x && sums; k++) {
        multiply_block_row(&r, x + k * padded, sums, m->value_type);
        for (int64_t row = i * m->height, j = 0; row < smaller(m->rows, (i + 1) * m->height); row++) {
          const float sum = add_up(sums + j, m->width) + (m->bias ? m->bias[row] : 0);
          v->y[(first + k) * m->rows + row] = m->relu && sum < 0 ? 0.0f : sum; /* keeps a NaN */
          j += m->width;
        }
      }
    }
    free(sums);
  }
  free(x);
  return done;
}

/* ---- kernels whose lanes are vectors: a run of the n values of a column */

#define INDEPENDENT_SUMS 8 /* registers at least, so that the time of an addition is hidden */

/* Add the products of the blocks from `start` to `end`, for `rows` rows from `row` on, to results[row][vector]. Where
 * these sums are few, neighbouring columns add to sums of their own, the chains. */
#define DEFINE_MULTIPLY_ROWS(name, Register)                                                                          \
  INLINE void name(const BlockRow *r, int64_t start, int64_t end, int64_t row, const float *x, float *results,        \
                   int rows, int registers, int value_type) {                                                         \
    const int width = registers * (int)(sizeof(Register) / sizeof(float)), size = rows * registers;                   \
    const int chains = smaller(4, greater(1, INDEPENDENT_SUMS / size));                         \
    Register sum[16], zero, *to = (Register *)results;                                                                \
    memset(&zero, 0, sizeof zero);                                                                                    \
    _Pragma("GCC unroll 16") for (int i = 0; i < size * chains; i++) {                                                \
      if (i < size) sum[i] = to[i];                                                                                   \
      else sum[i] = zero;                                                                                             \
    }                                                                                                                 \
    for (int64_t block = start; block < end; block++) {                                                               \
      int64_t at = (block * r->height + row) * r->width;                                                              \
      const Register *run = (const Register *)(x + column_of(r, block) * width);                                      \
      int64_t column = 0;                                                                                             \
      for (; column + chains <= r->width; column += chains, at += chains, run += chains * registers)                  \
        _Pragma("GCC unroll 4") for (int chain = 0; chain < chains; chain++)                                          \
          _Pragma("GCC unroll 8") for (int i = 0; i < rows; i++) {                                                    \
            const float value = value_at(r->values, at + i * r->width + chain, value_type);                           \
            _Pragma("GCC unroll 4") for (int k = 0; k < registers; k++)                                               \
              sum[chain * size + i * registers + k] += value * run[chain * registers + k];                            \
          }                                                                                                           \
      for (; chains > 1 && column < r->width; column++, at++, run += registers)                                       \
        _Pragma("GCC unroll 8") for (int i = 0; i < rows; i++) {                                                      \
          const float value = value_at(r->values, at + i * r->width, value_type);                                     \
          _Pragma("GCC unroll 4") for (int k = 0; k < registers; k++) sum[i * registers + k] += value * run[k];       \
        }                                                                                                             \
    }                                                                                                                 \
    _Pragma("GCC unroll 16") for (int i = 0; i < size; i++) {                                                         \
      _Pragma("GCC unroll 4") for (int chain = 1; chain < chains; chain++) sum[i] += sum[chain * size + i];           \
      to[i] = sum[i];                                                                                                 \
    }                                                                                                                 \
  }

DEFINE_MULTIPLY_ROWS(multiply_rows_of_four, Four)
#ifdef __AVX2__
DEFINE_MULTIPLY_ROWS(multiply_rows_of_eight, Eight)
#endif
#ifdef __AVX512F__
DEFINE_MULTIPLY_ROWS(multiply_rows_of_sixteen, Sixteen)
#endif

typedef void MultiplyBlockRow(const BlockRow *, const float *, float *);

#define PIECE_BYTES (16 << 10) /* of values that all rows of a block row read before the next ones: they stay cached */
#define CACHE_LINE 64
INLINE int64_t block_bytes(const BlockRow *r, int64_t value_type) {
  return r->height * r->width * value_bytes(value_type);
}

/* Load the values of some blocks into the cache: some rows of each block at a time are no stream that a processor sees. */
static void prefetch_blocks(const BlockRow *r, int64_t start, int64_t end, int64_t value_type) {
  const int64_t size = block_bytes(r, value_type);
  for (int64_t byte = start * size; byte < end * size; byte += CACHE_LINE) __builtin_prefetch(r->values + byte);
}

/* Define the functions for one width of runs: all rows of a block row, as many at a time as the registers hold sums
 * for. `results` are zeros at first. */
#define DEFINE_FOR_TYPE(width, multiply, registers, most, type)                                                       \
  static void multiply_##width##_##type(const BlockRow *r, const float *x, float *results) {                          \
    const int64_t piece = greater(1, PIECE_BYTES / block_bytes(r, type));                                             \
    for (int64_t start = 0, end; start < r->count; start = end) {                                                     \
      end = smaller(r->count, start + piece);                                                                         \
      if (r->height > most) prefetch_blocks(r, end, smaller(r->count, end + piece), type);                            \
      int64_t row = 0;                                                                                                \
      for (; row + most <= r->height; row += most)                                                                    \
        multiply(r, start, end, row, x, results + row * width, most, registers, type);                                \
      for (; row + 4 <= r->height; row += 4)                                                                          \
        multiply(r, start, end, row, x, results + row * width, 4, registers, type);                                   \
      for (; row + 2 <= r->height; row += 2)                                                                          \
        multiply(r, start, end, row, x, results + row * width, 2, registers, type);                                   \
      for (; row < r->height; row++) multiply(r, start, end, row, x, results + row * width, 1, registers, type);      \
    }                                                                                                                 \
  }
#define DEFINE_FOR_WIDTH(width, multiply, registers, most)        \
  DEFINE_FOR_TYPE(width, multiply, registers, most, FLOAT32)      \
  DEFINE_FOR_TYPE(width, multiply, registers, most, FLOAT16)      \
  DEFINE_FOR_TYPE(width, multiply, registers, most, BFLOAT16)
#define WITH_TYPES(width) {multiply_##width##_FLOAT32, multiply_##width##_FLOAT16, multiply_##width##_BFLOAT16}

DEFINE_FOR_WIDTH(4, multiply_rows_of_four, 1, 8)
#if defined(__AVX512F__)
DEFINE_FOR_WIDTH(8, multiply_rows_of_eight, 1, 8)
DEFINE_FOR_WIDTH(16, multiply_rows_of_sixteen, 1, 8)
DEFINE_FOR_WIDTH(32, multiply_rows_of_sixteen, 2, 8)
DEFINE_FOR_WIDTH(64, multiply_rows_of_sixteen, 4, 4)
#elif defined(__AVX2__)
DEFINE_FOR_WIDTH(8, multiply_rows_of_eight, 1, 8)
DEFINE_FOR_WIDTH(16, multiply_rows_of_eight, 2, 4)
DEFINE_FOR_WIDTH(32, multiply_rows_of_eight, 4, 2)
#else
DEFINE_FOR_WIDTH(8, multiply_rows_of_four, 2, 4)
DEFINE_FOR_WIDTH(16, multiply_rows_of_four, 4, 2)
#endif

/* The numbers of vectors in a run, and the function for each type of values. */
static const struct { int64_t width; MultiplyBlockRow *multiply[3]; } RUNS[] = {
    {4, WITH_TYPES(4)},
    {8, WITH_TYPES(8)},
    {16, WITH_TYPES(16)},
#ifdef __AVX2__
    {32, WITH_TYPES(32)},
#endif
#ifdef __AVX512F__
    {64, WITH_TYPES(64)},
#endif
};
#define WIDEST ((int)(sizeof RUNS / sizeof *RUNS) - 1)

/* Return the index of the narrowest run that holds n vectors, or of the widest one. */
static int choose_run(int64_t n) {
  int run = 0;
  while (run < WIDEST && RUNS[run].width < n) run++;
  return run;
}

/* Add the bias to the results of some rows, and apply the ReLU. Compilers vectorize loops without conditions. */
static VECTORIZED void finish_runs(const Matrix *m, int64_t from, int64_t to, int64_t width, float *results) {
  for (int64_t row = from; row < to; row++) {
    float *result = results + row * width;
    if (m->bias)
      for (int64_t i = 0; i < width; i++) result[i] += m->bias[row];
    if (m->relu)
      for (int64_t i = 0; i < width; i++) result[i] = result[i] < 0 ? 0.0f : result[i]; /* keeps a NaN */
  }
}

/* Multiply the matrix by one run of vectors from `first` on. `x` and `results` have room for them. */
static void multiply_run(const Matrix *m, const Operands *v, int64_t first, int run, float *x, float *results,
                         int threads) {
  const int64_t width = RUNS[run].width;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t c = 0; c < m->columns; c += AT_ONCE)
      load_runs(v, first, width, c, smaller(m->columns, c + AT_ONCE), x);
#pragma omp for schedule(static, 4)
    for (int64_t i = 0; i < m->down; i++) {
      const BlockRow r = block_row_at(m, i);
      memset(results + i * m->height * width, 0, m->height * width * sizeof *results);
      RUNS[run].multiply[m->value_type](&r, x, results + i * m->height * width);
      finish_runs(m, i * m->height, smaller(m->rows, (i + 1) * m->height), width, results);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < m->rows; row += AT_ONCE)
      write_results(v, m->rows, results, width, first, row, smaller(m->rows, row + AT_ONCE));
  }
}

static int multiply(const Matrix *m, const Operands *v, int threads) {
  const int64_t few = v->offsets ? 0 : FEW; /* weights as lanes, up to so many vectors */
  const int64_t room = v->n > few ? RUNS[choose_run(v->n)].width : 0;
  float *x = malloc(greater(1, m->across * m->width * room) * sizeof *x);
  float *results = malloc(greater(1, m->down * m->height * room) * sizeof *results);
  int done = x && results;
  for (int64_t first = 0; first < v->n && done;) {
    const int64_t rest = v->n - first;
    const int run = choose_run(rest);
    if (rest <= few) done = multiply_few(m, v, first, rest, threads);
    else {
      const int64_t width = RUNS[run].width;
      memset(x + m->columns * width, 0, (m->across * m->width - m->columns) * width * sizeof *x);
      multiply_run(m, v, first, run, x, results, threads);
    }
    first += rest <= few ? rest : RUNS[run].width;
  }
  free(x);
  free(results);
  return done ? DONE : NO_MEMORY;
}

/* ---- public functions */

#define MATRIX_PARAMETERS                                                                                           \
  const char *values, const int32_t *block_columns, const int32_t *starts, const float *bias, int64_t rows,        \
      int64_t columns, int64_t height, int64_t width, int64_t blocks, int64_t value_type, int64_t relu
#define MATRIX \
  derive_sizes((Matrix){values, block_columns, starts, bias, rows, columns, height, width, blocks, value_type, relu, 0, 0})

int PUBLIC(blocks_rows)(MATRIX_PARAMETERS, int64_t n, const float *x, int64_t ldx, float *y, int64_t threads) {
  const Matrix m = MATRIX;
  for (int64_t i = 0; i < n; i++)
    if (!all_finite(x + i * ldx, columns)) return NOT_FINITE;
  return multiply(&m, &(Operands){.x = x, .y = y, .ldx = ldx, .n = n}, threads);
}

int PUBLIC(blocks_columns)(MATRIX_PARAMETERS, int64_t n, const float *x, const int64_t *offsets, float *y,
                           int64_t threads) {
  const Matrix m = MATRIX;
  if (!all_runs_finite(x, offsets, columns, n)) return NOT_FINITE;
  return multiply(&m, &(Operands){.x = x, .y = y, .offsets = offsets, .n = n}, threads);
}
