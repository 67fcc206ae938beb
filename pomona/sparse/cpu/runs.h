/* Vectors as the lanes of registers: runs of the n values of a column, loaded from any layout of x and written to y. */

#pragma once

#include "common.h"

/* The vectors: x and y by columns, each from its own offset, or by rows. */
typedef struct {
  const float *x;
  float *y;
  const int64_t *offsets; /* or null: then rows of x are `ldx` apart */
  int64_t ldx, n;
} Operands;

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));

#define AT_ONCE 256 /* columns or rows that a thread transposes at a time */

/* Load `width` vectors from `first` on, in the columns from `from` to `to`, as [column][vector], with zeros past the
 * last vector. */
static void load_runs(const Operands *v, int64_t first, int64_t width, int64_t from, int64_t to, float *x) {
  const int64_t count = smaller(width, v->n - first);
  if (count < width) memset(x + from * width, 0, (to - from) * width * sizeof *x);
  if (v->offsets)
    for (int64_t c = from; c < to; c++) memcpy(x + c * width, v->x + v->offsets[c] + first, count * sizeof *x);
  else transpose(v->x + first * v->ldx + from, v->ldx, count, to - from, x + from * width, width);
}

/* Write the results of the rows from `from` to `to` of a matrix with so many rows, as [row][vector], to y. */
static void write_results(const Operands *v, int64_t rows, const float *results, int64_t width, int64_t first,
                          int64_t from, int64_t to) {
  const int64_t count = smaller(width, v->n - first);
  if (v->offsets)
    for (int64_t row = from; row < to; row++)
      memcpy(v->y + row * v->n + first, results + row * width, count * sizeof *results);
  else transpose(results + from * width, width, to - from, count, v->y + first * rows + from, rows);
}
