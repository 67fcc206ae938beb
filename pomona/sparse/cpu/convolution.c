/* The convolution of images with a packed unstructured weight on a CPU.
 *
 * This file is compiled once for each instruction set, NAME, and each compilation has one function:
 *
 *   unstructured_conv2d  y (n × rows × height × width) = the convolution of x (n × channels × height × width, contiguous)
 *                        with a weight that is packed as rows × (channels · kernel height · kernel width), then a batch
 *                        norm and a ReLU where they are asked for.
 *
 * The output pixels of an image are computed a panel at a time: as many lines as leave its input in the L2 cache. The
 * input of a panel is copied to planes, one for each channel and each column of the kernel, whose lines are as long as
 * those of the output: a column of the matrix then reads one contiguous run of its plane, whatever the stride, the
 * padding and the dilation are, and no loop tests for the border. Lines of the kernel share a plane, unless the stride
 * leaves them different lines of the image. A tile is some registers of pixels for a few rows of a slice: their sums
 * stay in registers while the survivors of the rows are added up.
 *
 * Whatever the contents of the matrix are, reads and writes stay inside the memory: starts, indices and rows are checked
 * where they are used.
 */

#include "convolution.h"
#include "slices.h"

#define GROUP 2 /* rows that are added up together: their sums are independent of each other */

/* The rows' parameters that follow the sums: y = sum · scale + shift. */
typedef struct {
  const float *weight, *bias, *mean, *variance; /* of a batch norm, the first two or null; no batch norm without mean */
  double eps;
} Norm;

/* Write the offset of each column's run into `offsets`, and 0 behind the last one, for indices that are none. */
static void locate_columns(const Geometry *g, const Layout *l, uint32_t *offsets) {
  for (int64_t c = 0; c < g->channels; c++)
    for (int64_t i = 0; i < g->kernel_height; i++) {
      const int64_t lead = lead_of(g, i), moved = (i - lead) * g->dilation_height / g->stride_height;
      for (int64_t j = 0; j < g->kernel_width; j++)
        *offsets++ = ((c * l->leads + lead) * g->kernel_width + j) * l->plane + moved * l->out_width;
    }
  *offsets = 0;
}

/* Write the scale and the shift of each row: those of the batch norm with the bias of the convolution. */
static void combine_parameters(const Matrix *m, const Norm *norm, float *scales, float *shifts) {
  for (int64_t row = 0; row < m->rows; row++) {
    const double bias = m->bias ? m->bias[row] : 0.0;
    scales[row] = 1.0f;
    shifts[row] = bias;
    if (norm->mean) {
      const double scale = (norm->weight ? norm->weight[row] : 1.0) / sqrt(norm->variance[row] + norm->eps);
      scales[row] = scale;
      shifts[row] = (norm->bias ? norm->bias[row] : 0.0) + (bias - norm->mean[row]) * scale;
    }
  }
}

/* Write, for each lane, the number of steps up to its last value: shorter rows of a slice are padded with zeros. */
static void measure_lanes(const Matrix *m, int32_t *lengths) {
  for (int64_t slice = 0; slice < m->slices; slice++) {
    const Slice s = slice_at(m, 0, slice);
    for (int lane = 0; lane < LANES; lane++) {
      int64_t steps = s.steps;
      while (steps && value_at(s.values, (steps - 1) * LANES + lane, m->value_type) == 0) steps--;
      lengths[slice * LANES + lane] = steps;
    }
  }
}

/* A slice of the weight, where its columns are in the planes, and what follows its sums. */
typedef struct {
  const Matrix *m;
  const uint32_t *offsets;
  const int32_t *lengths;
  const float *scales, *shifts;
} Weight;

/* Write `count` pixels of a row: its sums with scale, shift and ReLU. */
INLINE void write_row(const Weight *w, int64_t row, const Floats *sum, int registers, int64_t count, float *to) {
  const Floats scale = broadcast(w->scales[row]), shift = broadcast(w->shifts[row]);
  float last[WIDTH];
#pragma GCC unroll 8
  for (int i = 0; i < registers; i++) {
    Floats value = add_product(sum[i], scale, shift);
    if (w->m->relu) value = rectify(value);
    if ((i + 1) * WIDTH <= count) store(to + i * WIDTH, value);
    else if (i * WIDTH < count) {
      store(last, value);
      memcpy(to + i * WIDTH, last, (count - i * WIDTH) * sizeof *to);
    }
  }
}

/* Compute all rows of a slice for `count` pixels, which fill some registers. x is their run at offset 0 of the planes,
 * and y their place in the first row of the output, whose rows are `ldy` apart. */
INLINE void convolve_tile(const Weight *w, int64_t slice, const float *x, int64_t count, float *y, int64_t ldy,
                          int registers, int value_type) {
  const Slice s = slice_at(w->m, 0, slice);
  const uint32_t columns = w->m->columns;
  for (int lane = 0; lane < LANES; lane += GROUP) {
    const int32_t *lengths = w->lengths + slice * LANES + lane;
    const int64_t steps = lengths[0] > lengths[1] ? lengths[0] : lengths[1];
    Floats sum[GROUP][MAX_REGISTERS];
#pragma GCC unroll 2
    for (int r = 0; r < GROUP; r++)
#pragma GCC unroll 8
      for (int i = 0; i < registers; i++) sum[r][i] = broadcast(0.0f);
    for (int64_t step = 0; step < steps; step++)
#pragma GCC unroll 2
      for (int r = 0; r < GROUP; r++) {
        const uint32_t index = s.indices[step * LANES + lane + r];
        const char *run = (const char *)(x + w->offsets[index < columns ? index : columns]);
        const Floats value = broadcast(value_at(s.values, step * LANES + lane + r, value_type));
#pragma GCC unroll 8
        for (int i = 0; i < registers; i++) sum[r][i] = add_product(value, load(run, i * WIDTH, FLOAT32), sum[r][i]);
      }
#pragma GCC unroll 2
    for (int r = 0; r < GROUP; r++) {
      const int64_t row = s.lanes[lane + r];
      if (is_row(w->m, row)) write_row(w, row, sum[r], registers, count, y + row * ldy);
    }
  }
}

typedef void ConvolveTile(const Weight *, int64_t, const float *, int64_t, float *, int64_t);

#define DEFINE_TILE(registers, type)                                                                               \
  static void convolve_tile_##registers##_##type(const Weight *w, int64_t slice, const float *x, int64_t count,    \
                                                 float *y, int64_t ldy) {                                          \
    convolve_tile(w, slice, x, count, y, ldy, registers, type);                                                    \
  }
#define DEFINE_TYPES(registers) \
  DEFINE_TILE(registers, FLOAT32) DEFINE_TILE(registers, FLOAT16) DEFINE_TILE(registers, BFLOAT16)
#define LIST_TYPES(registers) \
  {convolve_tile_##registers##_FLOAT32, convolve_tile_##registers##_FLOAT16, convolve_tile_##registers##_BFLOAT16}

DEFINE_TYPES(1) DEFINE_TYPES(2) DEFINE_TYPES(3) DEFINE_TYPES(4)
#if MAX_REGISTERS == 8
DEFINE_TYPES(5) DEFINE_TYPES(6) DEFINE_TYPES(7) DEFINE_TYPES(8)
#endif

static ConvolveTile *const CONVOLVE_TILE[MAX_REGISTERS][3] = {
    LIST_TYPES(1), LIST_TYPES(2), LIST_TYPES(3), LIST_TYPES(4),
#if MAX_REGISTERS == 8
    LIST_TYPES(5), LIST_TYPES(6), LIST_TYPES(7), LIST_TYPES(8),
#endif
};

/* Convolve one image. */
static void convolve_image(const Weight *w, const Geometry *g, const Layout *l, const float *x, float *planes, float *y,
                           int threads) {
  const Matrix *m = w->m;
  const int64_t pixels = l->out_height * l->out_width, planes_of_channel = l->leads * g->kernel_width * l->plane;
#pragma omp parallel num_threads(threads)
  for (int64_t line = 0; line < l->out_height; line += l->lines) {
    const int64_t first = line * l->out_width, count = smaller(l->lines * l->out_width, pixels - first);
    const int64_t tiles = ceil_div(count, TILE);
    Panel panel;
    describe_panel(g, l, line, 0, &panel);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < g->channels; c++)
      copy_channel(g, l, &panel, x + c * g->height * g->width, planes + c * planes_of_channel);
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < tiles * m->slices; job++) {
      const int64_t start = job / m->slices * TILE, rest = smaller(TILE, count - start);
      CONVOLVE_TILE[ceil_div(rest, WIDTH) - 1][m->value_type](w, job % m->slices, planes + start, rest,
                                                              y + first + start, pixels);
    }
  }
}

int PUBLIC(unstructured_conv2d)(MATRIX_PARAMETERS, const int64_t *sizes, const float *const *norm, double eps,
                                int64_t n, const float *x, float *y, int64_t threads) {
  const Matrix m = MATRIX_WITH_SIZES;
  Geometry g;
  memcpy(&g, sizes, sizeof g);
  if (g.kernel_height > MAX_KERNEL || g.kernel_width > MAX_KERNEL) return TOO_LARGE;
  const Layout l = derive_layout(&g);
  const int64_t image = g.channels * g.height * g.width;
  if (!all_finite(x, n * image)) return NOT_FINITE;
  const int64_t room = g.channels * l.leads * g.kernel_width * l.plane;
  if (room > UINT32_MAX) return TOO_LARGE;
  float *planes = aligned_alloc(64, ceil_div(room, 16) * 16 * sizeof *planes);
  uint32_t *offsets = malloc((columns + 1) * sizeof *offsets);
  int32_t *lengths = malloc(m.slices * LANES * sizeof *lengths);
  float *scales = malloc(2 * rows * sizeof *scales), *shifts = scales + rows;
  const int done = planes && offsets && lengths && scales;
  if (done) {
    const Weight w = {&m, offsets, lengths, scales, shifts};
    locate_columns(&g, &l, offsets);
    measure_lanes(&m, lengths);
    combine_parameters(&m, &(Norm){norm[0], norm[1], norm[2], norm[3], eps}, scales, shifts);
    for (int64_t i = 0; i < n; i++)
      convolve_image(&w, &g, &l, x + i * image, planes, y + i * rows * l.out_height * l.out_width, threads);
  }
  free(planes);
  free(offsets);
  free(lengths);
  free(scales);
  return done ? DONE : NO_MEMORY;
}
