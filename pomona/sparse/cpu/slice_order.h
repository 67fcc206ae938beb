/* The order of the survivors of a slice, in which most of its steps read inputs from a few neighbouring columns.
 *
 * Any order of the survivors of a row gives the same product. With AVX-512, inputs from one window of columns are
 * permuted in registers, which is faster than loading them one by one. So the rows of a slice advance together from left
 * to right: a step takes the next survivor of every row, where all of these are in one window. Where a row is behind the
 * others, its survivor is put off. Those that were put off follow every CHUNK columns, while their inputs are in the
 * cache, in steps that read from anywhere. No step is added.
 */

#include "slices.h"

#define WINDOW 64       /* columns, the first of which is a multiple of WINDOW_START */
#define WINDOW_START 16 /* numbers of a cache line */
#define CHUNK 2048      /* columns */
#define NO_COLUMN UINT32_MAX

/* A slice that is ordered. Each row has its survivors in the order of their columns, and then padding. */
typedef struct {
  Slice slice;
  int64_t value_bytes;
  char *values; /* of the steps that are written so far, as are the indices */
  uint16_t *indices;
  int64_t written;
  int64_t next[LANES], ends[LANES], padding[LANES]; /* the place of a row's next survivor; those left of each kind */
  int32_t *late;                                    /* the places of survivors that were put off, [number][lane] */
  int64_t late_counts[LANES], late_written;
} Order;

/* Return the number of steps up to the last value of a lane. */
static int64_t measure_lane(const Slice *s, int lane, int64_t value_bytes) {
  static const char zero[sizeof(float)];
  int64_t steps = s->steps;
  while (steps && !memcmp(s->values + ((steps - 1) * LANES + lane) * value_bytes, zero, value_bytes)) steps--;
  return steps;
}

INLINE uint32_t column_at(const Order *o, int lane, int64_t place) {
  return place < o->ends[lane] ? o->slice.indices[place * LANES + lane] : NO_COLUMN;
}

/* Write a survivor of a lane into the step that is written, and padding with some column for the place -1. */
static void write_survivor(Order *o, int lane, int64_t place, uint16_t column) {
  const int64_t to = o->written * LANES + lane;
  if (place < 0) memset(o->values + to * o->value_bytes, 0, o->value_bytes);
  else memcpy(o->values + to * o->value_bytes, o->slice.values + (place * LANES + lane) * o->value_bytes, o->value_bytes);
  o->indices[to] = place < 0 ? column : o->slice.indices[place * LANES + lane];
}

/* Write a step from the window of the lowest column, if every row has a survivor there, or padding left. */
static int write_window(Order *o, uint32_t lowest) {
  const uint32_t end = lowest / WINDOW_START * WINDOW_START + WINDOW;
  for (int lane = 0; lane < LANES; lane++)
    if (column_at(o, lane, o->next[lane]) >= end && !o->padding[lane]) return 0;
  for (int lane = 0; lane < LANES; lane++) {
    const int inside = column_at(o, lane, o->next[lane]) < end;
    write_survivor(o, lane, inside ? o->next[lane]++ : -1, lowest);
    o->padding[lane] -= !inside;
  }
  o->written++;
  return 1;
}

/* Write steps of survivors that were put off: those that every row has, or all of them, with padding. */
static void write_late(Order *o, int all) {
  int64_t least = INT64_MAX, most = 0;
  for (int lane = 0; lane < LANES; lane++) {
    least = smaller(least, o->late_counts[lane]);
    most = greater(most, o->late_counts[lane]);
  }
  for (; o->late_written < (all ? most : least); o->late_written++, o->written++)
    for (int lane = 0; lane < LANES; lane++) {
      const int late = o->late_written < o->late_counts[lane];
      write_survivor(o, lane, late ? o->late[o->late_written * LANES + lane] : -1, 0);
    }
}

static void write_steps(Order *o) {
  for (uint32_t chunk_end = CHUNK;;) {
    uint32_t lowest = NO_COLUMN;
    int behind = 0;
    for (int lane = 0; lane < LANES; lane++)
      if (column_at(o, lane, o->next[lane]) < lowest) lowest = column_at(o, behind = lane, o->next[lane]);
    if (lowest >= chunk_end) write_late(o, lowest == NO_COLUMN);
    if (lowest == NO_COLUMN) return;
    if (lowest >= chunk_end) chunk_end = (lowest / CHUNK + 1) * CHUNK;
    if (!write_window(o, lowest)) o->late[o->late_counts[behind]++ * LANES + behind] = o->next[behind]++;
  }
}

/* Order the survivors of one slice, in place. The buffers have room for its steps. */
static void order_slice(const Slice *s, int64_t value_bytes, char *values, uint16_t *indices, int32_t *late) {
  Order o = {.slice = *s, .value_bytes = value_bytes, .values = values, .indices = indices, .late = late};
  for (int lane = 0; lane < LANES; lane++) {
    o.ends[lane] = measure_lane(s, lane, value_bytes);
    o.padding[lane] = s->steps - o.ends[lane];
  }
  write_steps(&o);
  memset(values + o.written * LANES * value_bytes, 0, (s->steps - o.written) * LANES * value_bytes);
  memset(indices + o.written * LANES, 0, (s->steps - o.written) * LANES * sizeof *indices);
  memcpy((char *)s->values, values, s->steps * LANES * value_bytes);
  memcpy((uint16_t *)s->indices, indices, s->steps * LANES * sizeof *indices);
}
