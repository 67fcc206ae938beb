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
#ifndef PANEL_BYTES
#define PANEL_BYTES (384 << 10) /* of input that stay in the L2 cache beside the weight */
#endif

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

/* The lines of an image that are copied to a plane: `count` pixels of each, from column `first` of the image on and
 * `stride` apart. Those of the pixels from `start` to `end` are in the image. */
typedef struct {
  int64_t pitch; /* numbers from one line to the next */
  int64_t first, stride, count, start, end;
  float border; /* the value of pixels outside of the image */
} Lines;

static Lines choose_lines(const Geometry *g, int64_t out_width, int64_t column, float border) {
  const int64_t first = column * g->dilation_width - g->padding_width, stride = g->stride_width;
  Lines l = {g->stride_height * g->width, first, stride, out_width, 0, 0, border};
  l.start = first < 0 ? smaller(ceil_div(-first, stride), out_width) : 0;
  l.end = first < g->width ? between(l.start, ceil_div(g->width - first, stride), out_width) : l.start;
  return l;
}

#ifdef __AVX512F__
/* Return a mask of the lanes among the WIDTH from `lane` on that lie between `start` and `end`. */
INLINE __mmask16 lanes_between(int64_t start, int64_t end, int64_t lane) {
  const int64_t low = between(0, start - lane, WIDTH), high = between(0, end - lane, WIDTH);
  return ((1u << high) - 1) & ~((1u << low) - 1);
}

#define MASKED_REGISTERS 16 /* of a line that is copied with masks */

/* Copy lines of at most that many registers. Up to WIDTH - 1 numbers are written behind the last one. */
INLINE void copy_lines_of_stride(const Lines *l, const float *x, int64_t lines, int64_t stride, float *to) {
  const __m512 border = _mm512_set1_ps(l->border);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const int64_t registers = ceil_div(l->count, WIDTH);
  __mmask16 inside[MASKED_REGISTERS];
  for (int64_t r = 0; r < registers; r++) inside[r] = lanes_between(l->start, l->end, r * WIDTH);
  x += l->first;
  for (int64_t i = 0; i < lines; i++, x += l->pitch, to += l->count)
    for (int64_t r = 0; r < registers; r++) {
      const float *from = x + r * WIDTH * stride;
      __m512 value;
      if (stride == 1) value = _mm512_mask_loadu_ps(border, inside[r], from);
      else {
        const uint32_t both = _pdep_u32(inside[r], 0x55555555);
        value = _mm512_permutex2var_ps(_mm512_maskz_loadu_ps(both, from), even,
                                       _mm512_maskz_loadu_ps(both >> 16, from + WIDTH));
        value = _mm512_mask_mov_ps(border, inside[r], value);
      }
      store(to + r * WIDTH, value);
    }
}
#endif

/* Copy lines. There is room for WIDTH numbers behind the last one. */
static VECTORIZED void copy_lines(const Lines *l, const float *x, int64_t lines, float *to) {
#ifdef __AVX512F__
  if (l->stride <= 2 && l->count <= MASKED_REGISTERS * WIDTH) {
    if (l->stride == 1) copy_lines_of_stride(l, x, lines, 1, to);
    else copy_lines_of_stride(l, x, lines, 2, to);
    return;
  }
#endif
  for (int64_t i = 0; i < lines; i++, x += l->pitch, to += l->count) {
    const float *from = x + l->first;
    for (int64_t j = 0; j < l->start; j++) to[j] = l->border;
    if (l->stride == 1)
      for (int64_t j = l->start; j < l->end; j++) to[j] = from[j];
    else
      for (int64_t j = l->start; j < l->end; j++) to[j] = from[j * l->stride];
    for (int64_t j = l->end; j < l->count; j++) to[j] = l->border;
  }
}

#define MAX_KERNEL 64 /* lines and columns of a kernel */

/* The lines of the image, of each line of the kernel that has planes, and the lines of each column of the kernel. */
typedef struct {
  int64_t count; /* lines of a plane */
  struct {
    int64_t top, above, end; /* the image's line that is the plane's first; where the image begins and ends in it */
  } leads[MAX_KERNEL];
  Lines columns[MAX_KERNEL];
} Panel;

static void describe_panel(const Geometry *g, const Layout *l, int64_t line, float border, Panel *p) {
  p->count = smaller(l->lines, l->out_height - line) + l->extra;
  for (int64_t lead = 0; lead < l->leads; lead++) {
    const int64_t top = line * g->stride_height + lead * g->dilation_height - g->padding_height;
    const int64_t above = top < 0 ? smaller(ceil_div(-top, g->stride_height), p->count) : 0;
    const int64_t inside = g->height - top;
    p->leads[lead].top = top;
    p->leads[lead].above = above;
    p->leads[lead].end = inside > 0 ? between(above, ceil_div(inside, g->stride_height), p->count) : above;
    if (lead_of(g, lead) != lead) p->leads[lead].end = -1; /* it shares the planes of another one */
  }
  for (int64_t j = 0; j < g->kernel_width; j++) p->columns[j] = choose_lines(g, l->out_width, j, border);
}

/* Copy what one channel contributes to a panel to its planes. */
static void copy_channel(const Geometry *g, const Layout *l, const Panel *p, const float *x, float *planes) {
  const int64_t width = l->out_width;
  for (int64_t lead = 0; lead < l->leads; lead++) {
    const int64_t above = p->leads[lead].above, end = p->leads[lead].end;
    if (end < 0) continue;
    const float *from = x + (p->leads[lead].top + above * g->stride_height) * g->width;
    for (int64_t j = 0; j < g->kernel_width; j++) {
      const Lines *lines = p->columns + j;
      float *to = planes + (lead * g->kernel_width + j) * l->plane;
      fill(to, lines->border, above * width);
      copy_lines(lines, from, end - above, to + above * width);
      fill(to + end * width, lines->border, (p->count - end) * width);
    }
  }
}
