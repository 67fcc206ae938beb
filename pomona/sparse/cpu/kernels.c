/* The product of a packed matrix, balanced or 2:4, of float32, float16 or bfloat16 with dense vectors: see balanced.h. */

#include "balanced.h"

#define MATRIX_PARAMETERS                                                                                       \
  const char *values, const uint16_t *indices, const float *bias, int64_t rows, int64_t columns, int64_t block, \
      int64_t kept, int64_t value_type, int64_t relu
#define MATRIX derive_sizes((Matrix){.values = values, .indices = indices, .bias = bias, .rows = rows,              \
                                     .columns = columns, .block = block, .kept = kept, .value_type = value_type,    \
                                     .relu = relu})

int PUBLIC(rows)(MATRIX_PARAMETERS, int64_t n, const float *x, int64_t ldx, float *y, int64_t threads) {
  const Matrix m = MATRIX;
  return multiply_rows(&m, n, x, ldx, y, threads);
}

int PUBLIC(columns)(MATRIX_PARAMETERS, int64_t n, const float *x, const int64_t *offsets, float *y, int64_t threads) {
  const Matrix m = MATRIX;
  return multiply_columns(&m, n, x, offsets, y, threads);
}

#define TWO_OF_FOUR_PARAMETERS                                                                                      \
  const char *values, const uint16_t *places, const float *bias, int64_t rows, int64_t columns, int64_t value_type, \
      int64_t relu
#define TWO_OF_FOUR_MATRIX derive_sizes((Matrix){.values = values, .indices = places, .bias = bias, .rows = rows,    \
                                                 .columns = columns, .block = 16, .kept = 8, .bits = PLACE_BITS,     \
                                                 .value_type = value_type, .relu = relu})

int PUBLIC(two_of_four_rows)(TWO_OF_FOUR_PARAMETERS, int64_t n, const float *x, int64_t ldx, float *y,
                             int64_t threads) {
  const Matrix m = TWO_OF_FOUR_MATRIX;
  return multiply_rows(&m, n, x, ldx, y, threads);
}

int PUBLIC(two_of_four_columns)(TWO_OF_FOUR_PARAMETERS, int64_t n, const float *x, const int64_t *offsets, float *y,
                                int64_t threads) {
  const Matrix m = TWO_OF_FOUR_MATRIX;
  return multiply_columns(&m, n, x, offsets, y, threads);
}
