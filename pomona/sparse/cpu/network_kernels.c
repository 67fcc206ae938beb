/* The run of a network of convolutions with sparse weights on a CPU, in one call.
 *
 * This file is compiled once for each instruction set, NAME, and each compilation has these functions:
 *
 *   network_scratch   the numbers of scratch memory that a thread needs for a step.
 *   network_channels  the channels of a chunk.
 *   network_offsets   where the columns of a weight lie in the planes of its input.
 *   network_run       y = the network of x, one image after the other. It declines where a number is not finite.
 *
 * An activation is one plane for each channel, its lines without gaps, and a multiple of WIDTH numbers from one plane to
 * the next. A 1×1 convolution of stride 1 reads these planes as they are; others copy them first, as convolution.h says.
 * The survivors of a weight lie row by row as [chunk][row], where a chunk is some channels whose input stays in the L1
 * cache; the sums of a tile are kept in memory from one chunk to the next. A batch norm is part of values and shifts.
 */

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_num_threads() 1
#endif

#include "convolution.h"

#define CHUNK_BYTES (40 << 10) /* of input that stay in the L1 cache */

enum { LOAD, STORE, CONVOLVE, MAX_POOL, MEAN }; /* the kinds of steps */

/* One step of a network; places are in numbers from the begin of the workspace. */
typedef struct {
  int64_t kind, channels, height, width, kernel_height, kernel_width, stride_height, stride_width, padding_height,
      padding_width, dilation_height, dilation_width, rows, relu;
  int64_t input, input_plane, output, output_plane, residual, residual_plane; /* no residual: -1 */
  int64_t chunks;
  const int64_t *starts;   /* chunks · rows + 1: the first survivor of each row of a chunk */
  const uint32_t *offsets; /* of each survivor's run */
  const float *values, *shifts;
} Step;

/* A thread's part in a run. */
typedef struct {
  float *workspace, *planes, *sums; /* sums has a tile of all rows for each thread */
  int thread, threads;
  int *is_finite; /* of all threads */
} Run;

/* Wait until all threads have come here. */
INLINE void wait_for_team(const Run *run) {
  if (run->threads > 1) {
#pragma omp barrier
  }
}

static Geometry geometry_of(const Step *s) {
  Geometry g;
  memcpy(&g, &s->channels, sizeof g);
  return g;
}

/* Return whether a convolution reads its input as it is. */
static int is_direct(const Geometry *g) {
  return g->kernel_height == 1 && g->kernel_width == 1 && g->stride_height == 1 && g->stride_width == 1 &&
         g->padding_height == 0 && g->padding_width == 0;
}

/* ---- convolution */

/* Return the larger ones, or b where any is NaN. */
#if defined(__AVX512F__)
INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
#elif defined(__AVX2__)
INLINE Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
#else
INLINE Floats larger(Floats a, Floats b) {
  Floats result;
  FOR_EACH_LANE(a.at[lane] > b.at[lane] ? a.at[lane] : b.at[lane]);
}
#endif

/* Add the survivors from `from` to `end` to the sums of a row: `sets` of them at a time, independent of each other. */
INLINE void add_survivors(const Step *s, int64_t from, int64_t end, const float *x, Floats *sum, int registers,
                          int sets) {
  Floats more[4][MAX_REGISTERS];
#pragma GCC unroll 4
  for (int set = 1; set < sets; set++)
#pragma GCC unroll 8
    for (int i = 0; i < registers; i++) more[set][i] = broadcast(0.0f);
  int64_t k = from;
  for (; k + sets <= end; k += sets)
#pragma GCC unroll 4
    for (int set = 0; set < sets; set++) {
      const char *run = (const char *)(x + s->offsets[k + set]);
      const Floats value = broadcast(s->values[k + set]);
      Floats *into = set ? more[set] : sum;
#pragma GCC unroll 8
      for (int i = 0; i < registers; i++) into[i] = add_product(value, load(run, i * WIDTH, FLOAT32), into[i]);
    }
  for (; k < end; k++) {
    const char *run = (const char *)(x + s->offsets[k]);
    const Floats value = broadcast(s->values[k]);
#pragma GCC unroll 8
    for (int i = 0; i < registers; i++) sum[i] = add_product(value, load(run, i * WIDTH, FLOAT32), sum[i]);
  }
#pragma GCC unroll 4
  for (int set = 1; set < sets; set++)
#pragma GCC unroll 8
    for (int i = 0; i < registers; i++) sum[i] = add_product(more[set][i], broadcast(1.0f), sum[i]);
}

/* Write `count` pixels of a row, with ReLU. Return zeros, or NaN where any is not finite. */
INLINE Floats write_row(const Floats *sum, float least, int64_t count, float *to, int registers) {
  Floats check = broadcast(0.0f);
  const int64_t whole = count / WIDTH;
  float last[WIDTH] = {0};
#pragma GCC unroll 8
  for (int i = 0; i < registers; i++) {
    const Floats value = larger(broadcast(least), sum[i]);
    if (i + 1 < registers || i < whole) {
      store(to + i * WIDTH, value);
      check = add_product(value, broadcast(0.0f), check);
    } else {
      store(last, value);
      memcpy(to + i * WIDTH, last, (count - whole * WIDTH) * sizeof *to);
      memset(last + count - whole * WIDTH, 0, ((whole + 1) * WIDTH - count) * sizeof *to);
      check = add_product(load((const char *)last, 0, FLOAT32), broadcast(0.0f), check);
    }
  }
  return check;
}

/* Set the sums of a row to what they begin with: the shift and the residual. */
INLINE void begin_row(Floats *sum, float shift, const float *residual, int registers) {
#pragma GCC unroll 8
  for (int i = 0; i < registers; i++) sum[i] = broadcast(shift);
  if (residual)
#pragma GCC unroll 8
    for (int i = 0; i < registers; i++)
      sum[i] = add_product(load((const char *)residual, i * WIDTH, FLOAT32), broadcast(1.0f), sum[i]);
}

/* Compute `count` pixels of the rows from `from` to `to`; x, y and residual are their places in the first planes. The
 * last of the registers may be partly used. */
INLINE int convolve_tile(const Step *s, int64_t from, int64_t to, const float *x, int64_t count, const float *residual,
                         float *y, float *sums, int registers) {
  const int sets = registers <= 2 ? 4 : registers <= 4 ? 2 : 1;
  const float least = s->relu ? 0 : -INFINITY;
  Floats check = broadcast(0.0f), sum[MAX_REGISTERS];
  for (int64_t chunk = 0; chunk < s->chunks; chunk++)
    for (int64_t row = from; row < to; row++) {
      const int64_t *starts = s->starts + chunk * s->rows + row;
      float *stored = sums + row * registers * WIDTH;
      if (chunk == 0) begin_row(sum, s->shifts[row], residual ? residual + row * s->residual_plane : 0, registers);
      else
#pragma GCC unroll 8
        for (int i = 0; i < registers; i++) sum[i] = load((const char *)stored, i * WIDTH, FLOAT32);
      add_survivors(s, starts[0], starts[1], x, sum, registers, sets);
      if (chunk + 1 < s->chunks) {
#pragma GCC unroll 8
        for (int i = 0; i < registers; i++) store(stored + i * WIDTH, sum[i]);
      } else {
        const Floats wrong = write_row(sum, least, count, y + row * s->output_plane, registers);
        check = add_product(wrong, broadcast(1.0f), check);
      }
    }
  float lanes[WIDTH];
  store(lanes, check);
  int is_finite = 1;
  for (int i = 0; i < WIDTH; i++) is_finite &= lanes[i] == 0;
  return is_finite;
}

typedef int ConvolveTile(const Step *, int64_t, int64_t, const float *, int64_t, const float *, float *, float *);

#define DEFINE_TILE(registers)                                                                                        \
  static int convolve_tile_##registers(const Step *s, int64_t from, int64_t to, const float *x, int64_t count,        \
                                       const float *residual, float *y, float *sums) {                                \
    return convolve_tile(s, from, to, x, count, residual, y, sums, registers);                                        \
  }
DEFINE_TILE(1) DEFINE_TILE(2) DEFINE_TILE(3) DEFINE_TILE(4)
#if MAX_REGISTERS == 8
DEFINE_TILE(5) DEFINE_TILE(6) DEFINE_TILE(7) DEFINE_TILE(8)
#endif

static ConvolveTile *const CONVOLVE_TILE[MAX_REGISTERS] = {
    convolve_tile_1, convolve_tile_2, convolve_tile_3, convolve_tile_4,
#if MAX_REGISTERS == 8
    convolve_tile_5, convolve_tile_6, convolve_tile_7, convolve_tile_8,
#endif
};

/* Return the registers of pixels in a tile: the tiles of a panel are of equal size, except the last one. */
INLINE int64_t registers_of_tile(int64_t pixels) {
  const int64_t registers = ceil_div(pixels, WIDTH);
  return ceil_div(registers, ceil_div(registers, MAX_REGISTERS));
}

#define ROWS_AT_ONCE 16 /* that a thread takes at a time, where there are several threads */

/* Compute one thread's part of the `count` pixels from `first` on, whose planes begin at `planes`. */
static void convolve_pixels(const Step *s, const Run *run, const float *planes, int64_t first, int64_t count) {
  const int64_t registers = registers_of_tile(count), tiles = ceil_div(count, registers * WIDTH);
  const int64_t rows = run->threads > 1 ? ROWS_AT_ONCE : s->rows, blocks = ceil_div(s->rows, rows);
  const float *residual = s->residual < 0 ? 0 : run->workspace + s->residual + first;
  float *y = run->workspace + s->output + first, *sums = run->sums + run->thread * s->rows * TILE;
  int is_finite = 1;
  for (int64_t job = run->thread; job < tiles * blocks; job += run->threads) {
    const int64_t start = job / blocks * registers * WIDTH, row = job % blocks * rows;
    const int64_t rest = smaller(registers * WIDTH, count - start);
    is_finite &= CONVOLVE_TILE[ceil_div(rest, WIDTH) - 1](s, row, smaller(s->rows, row + rows), planes + start, rest,
                                                          residual ? residual + start : 0, y + start, sums);
  }
  if (!is_finite) {
#pragma omp atomic write
    *run->is_finite = 0;
  }
}

/* Compute one thread's part of a convolution. */
static void convolve(const Step *s, const Run *run) {
  const Geometry g = geometry_of(s);
  const Layout l = derive_layout(&g);
  const int64_t planes_of_channel = l.leads * g.kernel_width * l.plane;
  const float *input = run->workspace + s->input;
  if (is_direct(&g)) {
    convolve_pixels(s, run, input, 0, g.height * g.width);
    return;
  }
  for (int64_t line = 0; line < l.out_height; line += l.lines) {
    Panel panel;
    describe_panel(&g, &l, line, 0, &panel);
    for (int64_t c = run->thread; c < g.channels; c += run->threads)
      copy_channel(&g, &l, &panel, input + c * s->input_plane, run->planes + c * planes_of_channel);
    wait_for_team(run);
    const int64_t count = smaller(l.lines, l.out_height - line) * l.out_width;
    convolve_pixels(s, run, run->planes, line * l.out_width, count);
    wait_for_team(run);
  }
}

/* ---- pools */

/* Write the maxima of one channel for the panel of the lines from `line` on. */
static void pool_panel(const Geometry *g, const Layout *l, const float *planes, int64_t line, float *y) {
  const int64_t count = smaller(l->lines, l->out_height - line) * l->out_width;
  for (int64_t first = 0; first < count; first += WIDTH) {
    Floats most = broadcast(-INFINITY);
    for (int64_t i = 0; i < g->kernel_height; i++) {
      const int64_t lead = lead_of(g, i), moved = (i - lead) * g->dilation_height / g->stride_height;
      for (int64_t j = 0; j < g->kernel_width; j++) {
        const float *run = planes + (lead * g->kernel_width + j) * l->plane + moved * l->out_width + first;
        most = larger(most, load((const char *)run, 0, FLOAT32));
      }
    }
    float lanes[WIDTH];
    store(lanes, most);
    memcpy(y + line * l->out_width + first, lanes, smaller(WIDTH, count - first) * sizeof *y);
  }
}

/* Return the geometry of one channel of a pool, which are pooled one after the other. */
static Geometry channel_geometry(const Step *s) {
  Geometry g = geometry_of(s);
  g.channels = 1;
  return g;
}

/* Compute one thread's part of a pool. */
static void pool(const Step *s, const Run *run) {
  const Geometry g = channel_geometry(s);
  const Layout l = derive_layout(&g);
  float *planes = run->planes + run->thread * l.leads * g.kernel_width * l.plane;
  for (int64_t line = 0; line < l.out_height; line += l.lines) {
    Panel panel;
    describe_panel(&g, &l, line, -INFINITY, &panel);
    for (int64_t c = run->thread; c < s->channels; c += run->threads) {
      copy_channel(&g, &l, &panel, run->workspace + s->input + c * s->input_plane, planes);
      pool_panel(&g, &l, planes, line, run->workspace + s->output + c * s->output_plane);
    }
  }
}

/* Compute one thread's part of the means. */
static VECTORIZED void average(const Step *s, const Run *run) {
  const int64_t pixels = s->height * s->width;
  for (int64_t c = run->thread; c < s->channels; c += run->threads) {
    const float *x = run->workspace + s->input + c * s->input_plane;
    float sums[16] = {0}, sum = 0;
    for (int64_t i = 0; i + 16 <= pixels; i += 16)
      for (int j = 0; j < 16; j++) sums[j] += x[i + j];
    for (int64_t i = pixels / 16 * 16; i < pixels; i++) sum += x[i];
    for (int j = 0; j < 16; j++) sum += sums[j];
    run->workspace[s->output + c * s->output_plane] = sum / pixels;
  }
}

/* ---- runs */

/* Copy all channels of an image from planes of one distance to those of another. */
static void copy_planes(const Step *s, const float *from, int64_t from_plane, float *to, int64_t to_plane) {
  const int64_t pixels = s->height * s->width;
  for (int64_t c = 0; c < s->channels; c++) memcpy(to + c * to_plane, from + c * from_plane, pixels * sizeof *to);
}

/* Compute one thread's part of the network for one image. All threads of the team do the same steps. */
static void run_image(const Step *steps, int64_t count, const Run *run, const float *x, float *y) {
  for (const Step *s = steps; s < steps + count; s++) {
    switch (s->kind) {
      case LOAD:
        if (run->thread == 0) copy_planes(s, x, s->height * s->width, run->workspace + s->output, s->output_plane);
        break;
      case STORE:
        if (run->thread == 0) copy_planes(s, run->workspace + s->input, s->input_plane, y, s->height * s->width);
        break;
      case CONVOLVE: convolve(s, run); break;
      case MAX_POOL: pool(s, run); break;
      case MEAN: average(s, run); break;
    }
    wait_for_team(run);
  }
}

/* ---- public functions */

int64_t PUBLIC(network_scratch)(const Step *s) {
  const Geometry g = s->kind == MAX_POOL ? channel_geometry(s) : geometry_of(s);
  if (s->kind == MEAN || (s->kind == CONVOLVE && is_direct(&g))) return 0;
  const Layout l = derive_layout(&g);
  return g.channels * l.leads * g.kernel_width * l.plane;
}

int64_t PUBLIC(network_channels)(const Step *s) {
  const Geometry g = geometry_of(s);
  const Layout l = derive_layout(&g);
  const int64_t pixels = is_direct(&g) ? g.height * g.width : l.lines * l.out_width;
  int64_t bytes = registers_of_tile(pixels) * WIDTH * sizeof(float);
  if (!is_direct(&g)) bytes = (bytes + l.extra * l.out_width * sizeof(float)) * l.leads * g.kernel_width;
  return bytes < CHUNK_BYTES ? CHUNK_BYTES / bytes : 1;
}

void PUBLIC(network_offsets)(const Step *s, int64_t count, const int32_t *columns, uint32_t *offsets) {
  const Geometry g = geometry_of(s);
  const Layout l = derive_layout(&g);
  const int64_t taps = g.kernel_height * g.kernel_width;
  for (int64_t k = 0; k < count; k++) {
    const int64_t channel = columns[k] / taps, i = columns[k] % taps / g.kernel_width, j = columns[k] % g.kernel_width;
    const int64_t lead = lead_of(&g, i), moved = (i - lead) * g.dilation_height / g.stride_height;
    offsets[k] = is_direct(&g)
                     ? channel * s->input_plane
                     : ((channel * l.leads + lead) * g.kernel_width + j) * l.plane + moved * l.out_width;
  }
}

int PUBLIC(network_run)(const Step *steps, int64_t count, int64_t n, const float *x, float *y, float *workspace,
                        int64_t planes, int64_t sums, int64_t threads) {
  const Step *first = steps, *last = steps + count - 1;
  const int64_t image = first->channels * first->height * first->width;
  const int64_t result = last->channels * last->height * last->width;
  int is_finite = all_finite(x, n * image);
  const Run alone = {workspace, workspace + planes, workspace + sums, 0, 1, &is_finite};
  for (int64_t i = 0; i < n && is_finite; i++, x += image, y += result)
    if (threads == 1) run_image(steps, count, &alone, x, y);
    else
#pragma omp parallel num_threads(threads)
    {
      Run part = alone;
      part.thread = omp_get_thread_num();
      part.threads = omp_get_num_threads();
      run_image(steps, count, &part, x, y);
    }
  return is_finite ? DONE : NOT_FINITE;
}
