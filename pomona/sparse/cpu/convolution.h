/* What the convolutions of a CPU share: the geometry, the planes to which their input is copied, and registers.
 *
 * The output pixels of an image are computed a panel at a time: as many lines as leave its input in the L2 cache. The
 * input of a panel is copied to planes, one for each channel and each column of the kernel, whose lines are as long as
 * those of the output: a column of the matrix then reads one contiguous run of its plane, whatever the stride, the
 * padding and the dilation are, and no loop tests for the border. Lines of the kernel share a plane, unless the stride
 * leaves them different lines of the image.
 */

#include <math.h>

#include "common.h"

#ifdef __AVX512F__
#define MAX_REGISTERS 8 /* of pixels in a tile; the sums of a group, and its values, fit into the registers */
#else
#define MAX_REGISTERS 4
#endif
#define TILE (MAX_REGISTERS * WIDTH)
#define PANEL_BYTES (384 << 10) /* of input that stay in the L2 cache beside the weight */

typedef struct {
  int64_t channels, height, width, kernel_height, kernel_width, stride_height, stride_width, padding_height,
      padding_width, dilation_height, dilation_width;
} Geometry;

/* What `derive_layout` finds for a geometry. */
typedef struct {
  int64_t out_height, out_width;
  int64_t lines;  /* lines of output in a panel */
  int64_t extra;  /* lines of a plane more than that, which the last line of the kernel reads */
  int64_t leads;  /* lines of the kernel that have planes of their own */
  int64_t plane;  /* numbers from one plane to the next */
} Layout;

/* Return the first line of the kernel that reads the same lines of the image as line i, moved by whole strides. */
INLINE int64_t lead_of(const Geometry *g, int64_t i) {
  int64_t lead = 0;
  while ((i - lead) * g->dilation_height % g->stride_height) lead++;
  return lead;
}

static Layout derive_layout(const Geometry *g) {
  const int64_t span_height = g->dilation_height * (g->kernel_height - 1) + 1;
  const int64_t span_width = g->dilation_width * (g->kernel_width - 1) + 1;
  Layout l = {0};
  l.out_height = (g->height + 2 * g->padding_height - span_height) / g->stride_height + 1;
  l.out_width = (g->width + 2 * g->padding_width - span_width) / g->stride_width + 1;
  for (int64_t i = 0; i < g->kernel_height; i++) {
    const int64_t lead = lead_of(g, i), moved = (i - lead) * g->dilation_height / g->stride_height;
    l.leads = lead == i ? i + 1 : l.leads;
    l.extra = moved > l.extra ? moved : l.extra;
  }
  const int64_t planes = g->channels * l.leads * g->kernel_width;
  const int64_t cached = PANEL_BYTES / (int64_t)sizeof(float) / planes / l.out_width - l.extra;
  const int64_t least = ceil_div(TILE, l.out_width);
  l.lines = smaller(l.out_height, cached > least ? cached : least);
  /* A tile may end behind the last pixel. */
  l.plane = ceil_div((l.lines + l.extra) * l.out_width + TILE, WIDTH) * WIDTH;
  return l;
}

#if defined(__AVX512F__)
INLINE Floats broadcast(float value) { return _mm512_set1_ps(value); }
INLINE Floats rectify(Floats value) { return _mm512_max_ps(_mm512_setzero_ps(), value); } /* keeps a NaN */
INLINE void store(float *to, Floats value) { _mm512_storeu_ps(to, value); }
#elif defined(__AVX2__)
INLINE Floats broadcast(float value) { return _mm256_set1_ps(value); }
INLINE Floats rectify(Floats value) { return _mm256_max_ps(_mm256_setzero_ps(), value); }
INLINE void store(float *to, Floats value) { _mm256_storeu_ps(to, value); }
#else
INLINE Floats broadcast(float value) {
  Floats result;
  FOR_EACH_LANE(value);
}
INLINE Floats rectify(Floats value) {
  Floats result;
  FOR_EACH_LANE(value.at[lane] < 0 ? 0.0f : value.at[lane]);
}
INLINE void store(float *to, Floats value) { memcpy(to, value.at, sizeof value.at); }
#endif

/* Write `count` times the same number. */
static VECTORIZED void fill(float *to, float value, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = value;
}

/* Copy `count` pixels of a line, from column `first` of the image on and `stride` apart, with `border` outside of it. */
static VECTORIZED void copy_line(const float *x, int64_t width, int64_t first, int64_t stride, int64_t count,
                                 float border, float *to) {
  const int64_t start = first < 0 ? smaller(ceil_div(-first, stride), count) : 0;
  const int64_t end = first < width ? between(start, ceil_div(width - first, stride), count) : start;
  const float *from = x + first;
  for (int64_t i = 0; i < start; i++) to[i] = border;
  if (stride == 1)
    for (int64_t i = start; i < end; i++) to[i] = from[i];
  else if (stride == 2)
    for (int64_t i = start; i < end; i++) to[i] = from[2 * i];
  else
    for (int64_t i = start; i < end; i++) to[i] = from[i * stride];
  for (int64_t i = end; i < count; i++) to[i] = border;
}

/* Copy lines of the same length as those of the image, moved by `shift` columns: all at once, and then the border. */
static void copy_moved_lines(const float *x, int64_t width, int64_t lines, int64_t shift, float border, float *to) {
  const int64_t before = shift < 0 ? -shift : 0, after = shift > 0 ? shift : 0;
  memcpy(to + before, x + after, (lines * width - before - after) * sizeof *x);
  for (int64_t i = 0; i < lines; i++) {
    for (int64_t j = 0; j < before; j++) to[i * width + j] = border;
    for (int64_t j = width - after; j < width; j++) to[i * width + j] = border;
  }
}

/* Copy what one channel contributes to the panel of the lines from `line` on to its planes. */
static void copy_channel(const Geometry *g, const Layout *l, const float *x, int64_t line, float border,
                         float *planes) {
  const int64_t count = smaller(l->lines, l->out_height - line) + l->extra, width = l->out_width;
  for (int64_t lead = 0; lead < l->leads; lead++) {
    if (lead_of(g, lead) != lead) continue;
    /* The lines of the plane that are lines of the image, `above` of the border before them. */
    const int64_t top = line * g->stride_height + lead * g->dilation_height - g->padding_height;
    const int64_t above = top < 0 ? smaller(ceil_div(-top, g->stride_height), count) : 0;
    const int64_t end = top < g->height ? between(above, ceil_div(g->height - top, g->stride_height), count) : above;
    for (int64_t j = 0; j < g->kernel_width; j++) {
      float *to = planes + (lead * g->kernel_width + j) * l->plane;
      const int64_t first = j * g->dilation_width - g->padding_width;
      const int is_moved = g->stride_height == 1 && g->stride_width == 1 && width == g->width && end > above &&
                           first > -width && first < width;
      fill(to, border, above * width);
      if (is_moved) copy_moved_lines(x + (top + above) * width, width, end - above, first, border, to + above * width);
      else
        for (int64_t i = above; i < end; i++)
          copy_line(x + (top + i * g->stride_height) * g->width, g->width, first, g->stride_width, width, border,
                    to + i * width);
      fill(to + end * width, border, l->plane - end * width);
    }
  }
}
