/* A packed unstructured matrix, as its kernels on a CPU read it: slices of 16 rows, whose survivors lie as [step][row]. */

#include "common.h"

#define LANES 16       /* rows of a slice */
#define BAND (1 << 16) /* columns that an index of 16 bits can address */

typedef struct {
  const char *values;
  const uint16_t *indices;
  const int64_t *starts; /* the first step of each slice */
  const int32_t *lanes;  /* the row of each lane of each slice; a number that is none for padding */
  const float *bias;     /* or null */
  int64_t rows, columns, steps, value_type, relu;
  int64_t slices, bands; /* set by `derive_sizes`: slices of a band, bands of columns */
} Matrix;

typedef struct {
  const char *values;
  const uint16_t *indices;
  const int32_t *lanes;
  int64_t steps;
} Slice;

/* The parameters of a public function that describe the matrix. */
#define MATRIX_PARAMETERS                                                                                          \
  const char *values, const uint16_t *indices, const int64_t *starts, const int32_t *lanes, const float *bias,     \
      int64_t rows, int64_t columns, int64_t steps, int64_t value_type, int64_t relu
#define MATRIX_WITH_SIZES \
  derive_sizes((Matrix){values, indices, starts, lanes, bias, rows, columns, steps, value_type, relu, 0, 0})

static Matrix derive_sizes(Matrix m) {
  m.slices = ceil_div(m.rows, LANES);
  m.bands = ceil_div(m.columns, BAND);
  return m;
}

static Slice slice_at(const Matrix *m, int64_t band, int64_t slice) {
  const int64_t i = band * m->slices + slice, start = between(0, m->starts[i], m->steps);
  const int64_t end = between(start, m->starts[i + 1], m->steps);
  return (Slice){m->values + start * LANES * value_bytes(m->value_type), m->indices + start * LANES,
                 m->lanes + i * LANES, end - start};
}

INLINE int is_row(const Matrix *m, int64_t row) { return row >= 0 && row < m->rows; }
