/* The work of the engine's step on a CPU: each function does in one pass over the weights what takes PyTorch several.
 *
 * This file is compiled once for each instruction set, NAME. The results have the same bits for all of them, for any
 * number of threads, and as PyTorch computes them: nothing here depends on the order of a sum, with one exception. The
 * row norms of `project_rows` are estimates, and `bound_factors` declines where their errors could matter.
 *
 * Large results are written past the cache ("stream"), as nobody reads them before they would be evicted.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define HAS_STREAM 1
#else
#define HAS_STREAM 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define NAMED_(level, name) pomona_##level##_##name
#define NAMED(level, name) NAMED_(level, name)
#define PUBLIC(name) __attribute__((visibility("default"))) NAMED(NAME, name)

#if defined(__AVX512F__)
#define VECTOR 64 /* bytes of a register */
#elif defined(__AVX2__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
#define LANES (VECTOR / 4) /* float32 values of a register */
#define CHUNK (1 << 16)    /* values that a thread takes at a time */

/* Vectors at any address. */
#define VECTOR_OF(type) type __attribute__((vector_size(VECTOR), aligned(1), may_alias))
typedef VECTOR_OF(float) Floats;
typedef VECTOR_OF(int32_t) Bits;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Return whether any bit of a vector is set. */
INLINE int any_bit(const void *vector) {
#if defined(__AVX512F__)
  __m512i v = _mm512_loadu_si512(vector);
  return _mm512_test_epi32_mask(v, v) != 0;
#elif defined(__AVX2__)
  __m256i v = _mm256_loadu_si256(vector);
  return !_mm256_testz_si256(v, v);
#else
  uint64_t words[2];
  memcpy(words, vector, VECTOR);
  return (words[0] | words[1]) != 0;
#endif
}

/* Write a vector past the cache, to an address that is a multiple of its size. */
INLINE void stream(void *to, const void *vector) {
#if defined(__AVX512F__)
  _mm512_stream_si512(to, _mm512_loadu_si512(vector));
#elif defined(__AVX2__)
  _mm256_stream_si256(to, _mm256_loadu_si256(vector));
#elif HAS_STREAM
  _mm_stream_si128(to, _mm_loadu_si128(vector));
#else
  memcpy(to, vector, VECTOR);
#endif
}

/* Make streamed values visible to other threads. */
INLINE void finish_stream(void) {
#if HAS_STREAM
  _mm_sfence();
#endif
}

/* Return how many values of `size` bytes precede the first multiple of VECTOR; all `count` where none is a multiple. */
INLINE int64_t values_before_alignment(const void *address, int64_t size, int64_t count) {
  int64_t bytes = (VECTOR - (uintptr_t)address % VECTOR) % VECTOR;
  return bytes % size ? count : smaller(bytes / size, count);
}

/* Return lanes of 16, 32 or 64 bits that are all ones where a mask's bytes are not zero, and all zeros elsewhere. */
typedef VECTOR_OF(int16_t) Vector16;
typedef VECTOR_OF(int32_t) Vector32;
typedef VECTOR_OF(int64_t) Vector64;

#if defined(__AVX512F__)
INLINE Vector16 lanes16(const uint8_t *mask) {
  return (Vector16)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)mask)) != 0;
}
INLINE Vector32 lanes32(const uint8_t *mask) {
  return (Vector32)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)mask)) != 0;
}
INLINE Vector64 lanes64(const uint8_t *mask) {
  return (Vector64)_mm512_cvtepi8_epi64(_mm_loadl_epi64((const void *)mask)) != 0;
}
#elif defined(__AVX2__)
INLINE Vector16 lanes16(const uint8_t *mask) {
  return (Vector16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)mask)) != 0;
}
INLINE Vector32 lanes32(const uint8_t *mask) {
  return (Vector32)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)mask)) != 0;
}
INLINE Vector64 lanes64(const uint8_t *mask) {
  int32_t bytes;
  memcpy(&bytes, mask, sizeof bytes);
  return (Vector64)_mm256_cvtepi8_epi64(_mm_cvtsi32_si128(bytes)) != 0;
}
#else
#define DEFINE_LANES(bits)                                                              \
  INLINE Vector##bits lanes##bits(const uint8_t *mask) {                                \
    Vector##bits lanes;                                                                 \
    for (int i = 0; i < VECTOR * 8 / bits; i++) lanes[i] = -(int##bits##_t)(mask[i] != 0); \
    return lanes;                                                                       \
  }
DEFINE_LANES(16)
DEFINE_LANES(32)
DEFINE_LANES(64)
#endif

/* ---- m ⊙ v for values of 2, 4 and 8 bytes. In place, only vectors that change are written. */

#define DEFINE_MASK(bits)                                                                                            \
  static void mask_run##bits(const char *values, const uint8_t *mask, char *out, int64_t n, int64_t filler,           \
                             int streams) {                                                                          \
    const int lanes = VECTOR * 8 / bits;                                                                             \
    const int##bits##_t *from = (const void *)values;                                                                \
    int##bits##_t *to = (void *)out, fill = (int##bits##_t)filler;                                                   \
    int64_t i = 0;                                                                                                   \
    if (streams)                                                                                                     \
      for (int64_t head = values_before_alignment(to, sizeof *to, n); i < head; i++) to[i] = mask[i] ? from[i] : fill; \
    for (; i + lanes <= n; i += lanes) {                                                                             \
      Vector##bits value = *(const Vector##bits *)(from + i);                                                        \
      Vector##bits on = lanes##bits(mask + i), kept = (value & on) | (fill & ~on);                                   \
      if (streams) {                                                                                                 \
        stream(to + i, &kept);                                                                                       \
      } else if (from != to) {                                                                                       \
        *(Vector##bits *)(to + i) = kept;                                                                            \
      } else {                                                                                                       \
        Vector##bits change = value ^ kept;                                                                          \
        if (any_bit(&change)) *(Vector##bits *)(to + i) = kept;                                                      \
      }                                                                                                              \
    }                                                                                                                \
    for (; i < n; i++) to[i] = mask[i] ? from[i] : fill;                                                             \
  }

DEFINE_MASK(16)
DEFINE_MASK(32)
DEFINE_MASK(64)

/* Write where(mask, values, fill) for n values of `size` bytes, given the bits of `fill`; `out` may be `values`. */
void PUBLIC(mask)(const char *values, const uint8_t *mask, char *out, int64_t n, int64_t size, int64_t fill,
                  int64_t streams, int64_t threads) {
  streams = streams && values != out;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t chunk = 0; chunk < ceil_div(n, CHUNK); chunk++) {
    int64_t start = chunk * CHUNK, count = smaller(CHUNK, n - start);
    const char *from = values + start * size;
    char *to = out + start * size;
    if (size == 2) mask_run16(from, mask + start, to, count, fill, (int)streams);
    else if (size == 4) mask_run32(from, mask + start, to, count, fill, (int)streams);
    else mask_run64(from, mask + start, to, count, fill, (int)streams);
    if (streams) finish_stream();
  }
}

/* ---- the projection of float32 weights whose outputs are contiguous rows */

/* Return s · sign(w) · max(|w| − t, 0) as PyTorch computes it: w − clamp(w, −t, t), times s. */
INLINE Floats shrink_vector(Floats w, Floats scale, Floats threshold) {
  Bits bits = (Bits)w, low = (Bits)(-threshold), high = (Bits)threshold;
  Bits is_low = w < -threshold;
  Bits clamped = (low & is_low) | (bits & ~is_low);
  Bits is_high = threshold < (Floats)clamped;
  clamped = (high & is_high) | (clamped & ~is_high);
  return (w - (Floats)clamped) * scale;
}

/* The constants of a row's projection. */
typedef struct {
  Floats scale, threshold;
  int shrinks, streams;
} Projection;

INLINE Floats project_vector(const Projection *p, Floats value, Bits kept, Floats *squares) {
  Floats sparse = p->shrinks ? shrink_vector(value, p->scale, p->threshold) : value;
  sparse = (Floats)((Bits)sparse & kept);
  *squares += sparse * sparse;
  return sparse;
}

/* Project fewer values than a vector has. */
INLINE void project_part(const Projection *p, const float *w, const uint8_t *mask, float *out, int64_t n,
                         Floats *squares) {
  Floats value = {0};
  uint8_t kept[LANES] = {0};
  memcpy(&value, w, n * sizeof *w);
  memcpy(kept, mask, n);
  Floats result = project_vector(p, value, lanes32(kept), squares);
  memcpy(out, &result, n * sizeof *out);
}

/* Project one row; return the sum of the squares of its sparse values. */
INLINE double project_row(const Projection *p, const float *w, const uint8_t *mask, float *out, int64_t n) {
  Floats squares = {0}, more_squares = {0};
  int64_t i = 0;
  if (p->streams) {
    int64_t head = values_before_alignment(out, sizeof *out, n);
    for (; i < head; i += smaller(LANES, head - i))
      project_part(p, w + i, mask + i, out + i, smaller(LANES, head - i), &squares);
  }
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    Floats one = project_vector(p, *(const Floats *)(w + i), lanes32(mask + i), &squares);
    Floats other = project_vector(p, *(const Floats *)(w + i + LANES), lanes32(mask + i + LANES), &more_squares);
    if (p->streams) {
      stream(out + i, &one);
      stream(out + i + LANES, &other);
    } else {
      *(Floats *)(out + i) = one;
      *(Floats *)(out + i + LANES) = other;
    }
  }
  for (; i < n; i += LANES) project_part(p, w + i, mask + i, out + i, smaller(LANES, n - i), &squares);
  double sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += (double)squares[lane] + more_squares[lane];
  return sum;
}

static void project_run(const float *latent, const uint8_t *mask, float *out, const float *scales,
                        const float *thresholds, float *norms, int64_t begin, int64_t end, int64_t length,
                        int streams) {
  for (int64_t row = begin; row < end; row++) {
    const float *w = latent + row * length;
    const uint8_t *kept = mask + row * length;
    float *to = out + row * length;
    float threshold = scales ? thresholds[row] : 0, scale = !scales ? 1 : isnan(threshold) ? NAN : scales[row];
    Floats all_scale = (Floats){0} + scale, all_threshold = (Floats){0} + threshold;
    /* Constant flags, so that each combination is compiled separately. */
    double squares = scales && streams ? project_row(&(Projection){all_scale, all_threshold, 1, 1}, w, kept, to, length)
                     : scales          ? project_row(&(Projection){all_scale, all_threshold, 1, 0}, w, kept, to, length)
                     : streams         ? project_row(&(Projection){all_scale, all_threshold, 0, 1}, w, kept, to, length)
                                       : project_row(&(Projection){all_scale, all_threshold, 0, 0}, w, kept, to, length);
    if (norms) norms[row] = (float)sqrt(squares);
  }
  if (streams) finish_stream();
}

/* Write the sparse values of latent (rows × length). Where `scales` is null they are m ⊙ w, else soft thresholds with
 * one scale and one threshold for each row. `norms`, where it is not null, gets an estimate of the norm of each row's
 * sparse values. */
void PUBLIC(project_rows)(const float *latent, const uint8_t *mask, float *out, const float *scales,
                          const float *thresholds, float *norms, int64_t rows, int64_t length, int64_t streams,
                          int64_t threads) {
  int64_t step = ceil_div(CHUNK, length < 1 ? 1 : length);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t chunk = 0; chunk < ceil_div(rows, step); chunk++)
    project_run(latent, mask, out, scales, thresholds, norms, chunk * step, smaller(rows, (chunk + 1) * step), length,
                (int)streams);
}

/* ---- the bound on gradients of weak outputs (`BoundedFeedback.transform_gradient`) */

static int compare_floats(const void *one, const void *other) {
  float a = *(const float *)one, b = *(const float *)other;
  return (a > b) - (a < b);
}

/* Write the factor of each output's gradient, given the exact norms of the gradients and estimates of those of the
 * weights. Return how many differ from 1; −1 where an output is not certainly weak or certainly not, and −2 without
 * memory. An estimate is off by at most `error` times itself. */
int64_t PUBLIC(bound_factors)(const float *norms, const float *weight_norms, float *factors, int64_t count,
                              double feedback, double weak, double error) {
  const double tiny = 1e-15; /* squares of smaller weights may underflow */
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += weight_norms[i];
  double limit = weak * sum / count, slack = error * limit + tiny;
  if (!(limit > 1e3 * tiny && limit < 1e18)) return -1; /* also for NaN */
  float *compared = malloc(count * sizeof *compared);
  if (!compared) return -2;
  int64_t ranked = 0;
  for (int64_t i = 0; i < count; i++) {
    if (!(fabs(weight_norms[i] - limit) > slack)) {
      free(compared);
      return -1;
    }
    if (weight_norms[i] > limit && norms[i] > 0) compared[ranked++] = norms[i];
  }
  qsort(compared, ranked, sizeof *compared, compare_floats);
  float median = ranked ? compared[(ranked - 1) / 2] : INFINITY;
  free(compared);
  float most_of_weak = median * (float)feedback, most_of_others = median * (float)(1 / weak);
  int64_t bounded = 0;
  for (int64_t i = 0; i < count; i++) {
    float most = weight_norms[i] < limit ? most_of_weak : most_of_others;
    factors[i] = norms[i] > most ? most / norms[i] : 1.0f;
    bounded += factors[i] != 1.0f;
  }
  return bounded;
}

/* ---- mask updates */

/* Count the entries of two masks that are set, and those that differ: counts[0] of `mask`, [1] of `before`, [2]. */
void PUBLIC(compare_masks)(const uint8_t *mask, const uint8_t *before, int64_t n, int64_t *counts) {
  typedef VECTOR_OF(uint8_t) Counters;       /* a lane counts to at most 255 */
  const int64_t most_per_turn = 255 * VECTOR;
  counts[0] = counts[1] = counts[2] = 0;
  for (int64_t start = 0; start < n; start += most_per_turn) {
    int64_t end = smaller(n, start + most_per_turn), i = start;
    Counters now = {0}, then = {0}, changed = {0};
    for (; i + VECTOR <= end; i += VECTOR) {
      Counters a = (Counters)(*(const Counters *)(mask + i) != 0), b = (Counters)(*(const Counters *)(before + i) != 0);
      now -= a;
      then -= b;
      changed -= a ^ b;
    }
    for (int lane = 0; lane < VECTOR; lane++) {
      counts[0] += now[lane];
      counts[1] += then[lane];
      counts[2] += changed[lane];
    }
    for (; i < end; i++) {
      counts[0] += mask[i] != 0;
      counts[1] += before[i] != 0;
      counts[2] += (mask[i] != 0) != (before[i] != 0);
    }
  }
}

/* Write |w|, and return the largest |w| off the mask, which is NaN where one of these is. */
float PUBLIC(measure_magnitudes)(const float *weights, const uint8_t *mask, float *magnitude, int64_t n) {
  const int32_t magnitude_bits = 0x7FFFFFFF;
  Bits most = {0}; /* the bits of positive floats, and of NaN above them, are in the order of integers */
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    Bits bits = *(const Bits *)(weights + i) & magnitude_bits, pruned = bits & ~lanes32(mask + i);
    *(Bits *)(magnitude + i) = bits;
    Bits is_more = pruned > most;
    most = (pruned & is_more) | (most & ~is_more);
  }
  int32_t largest = 0;
  for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
  for (; i < n; i++) {
    int32_t bits;
    memcpy(&bits, weights + i, sizeof bits);
    bits &= magnitude_bits;
    memcpy(magnitude + i, &bits, sizeof bits);
    if (!mask[i] && bits > largest) largest = bits;
  }
  float result;
  memcpy(&result, &largest, sizeof result);
  return result;
}

/* Multiply values by 1 on a mask and by 0 off it: a pruned inf becomes NaN, which a mask would hide. */
void PUBLIC(scale_by_mask)(float *values, const uint8_t *mask, int64_t n) {
  const Bits one = (Bits)((Floats){0} + 1.0f);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) *(Floats *)(values + i) *= (Floats)(one & lanes32(mask + i));
  for (; i < n; i++) values[i] *= (float)(mask[i] != 0);
}

/* ---- exact selection (`patterns.selection`), where a NaN is above everything */

/* Count the values below `high`, and copy those of them that are not at most `low` into `inside`, in their order, which
 * has room for n. Return how many these are. */
int64_t PUBLIC(collect_between)(const float *values, int64_t n, float low, float high, float *inside,
                                int64_t *below_high) {
  const Floats lows = (Floats){0} + low, highs = (Floats){0} + high;
  Bits count = {0};
  int64_t found = 0, below = 0, i = 0;
  while (i + LANES <= n) {
    int64_t end = smaller(n - LANES, i + LANES * 1048576); /* so that no lane of the counter overflows */
    for (; i <= end; i += LANES) {
      Floats value = *(const Floats *)(values + i);
      Bits under = value < highs, between = under & ~(value <= lows);
      count -= under;
      if (any_bit(&between))
        for (int lane = 0; lane < LANES; lane++) {
          inside[found] = value[lane];
          found -= between[lane];
        }
    }
    for (int lane = 0; lane < LANES; lane++) below += count[lane];
    count = (Bits){0};
  }
  for (; i < n; i++) {
    below += values[i] < high;
    if (values[i] < high && !(values[i] <= low)) inside[found++] = values[i];
  }
  *below_high = below;
  return found;
}

/* Mark the values that are not at most `threshold`; return how many these are. */
int64_t PUBLIC(mark_above)(const float *values, int64_t n, float threshold, uint8_t *mask) {
  const Floats thresholds = (Floats){0} + threshold;
  int64_t marked = 0, i = 0;
#if defined(__AVX2__)
  for (; i + 32 <= n; i += 32) {
    uint32_t above = 0;
    for (int part = 0; part < 32; part += LANES) {
#if defined(__AVX512F__)
      __mmask16 lanes = _mm512_cmp_ps_mask(_mm512_loadu_ps(values + i + part), (__m512)thresholds, _CMP_NLE_UQ);
      above |= (uint32_t)lanes << part;
#else
      __m256 lanes = _mm256_cmp_ps(_mm256_loadu_ps(values + i + part), (__m256)thresholds, _CMP_NLE_UQ);
      above |= (uint32_t)_mm256_movemask_ps(lanes) << part;
#endif
    }
    /* Each byte of the mask is one bit of `above`. */
    const __m256i bytes = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3,
                                           3, 3, 3, 3, 3, 3);
    const __m256i bits = _mm256_set1_epi64x((int64_t)0x8040201008040201ull);
    __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)above), bytes), bits);
    __m256i ones = _mm256_and_si256(_mm256_cmpeq_epi8(spread, bits), _mm256_set1_epi8(1));
    _mm256_storeu_si256((void *)(mask + i), ones);
    marked += __builtin_popcount(above);
  }
#else
  (void)thresholds;
#endif
  for (; i < n; i++) marked += mask[i] = !(values[i] <= threshold);
  return marked;
}

/* ---- selection by counts of keys (`patterns.counting_selection`): integers in the order of the scores */

typedef VECTOR_OF(uint32_t) Words;
#define LARGEST_KEY 0x7f000001 /* of NaN; an infinity has the key before it */
#define MOST_DIGITS 2048

/* Return the keys of scores from their bits: −0.0 and 0.0 share a key, and so do all NaN. */
INLINE Bits keys_of(Words bits) {
  const Words sign = (Words)((Bits)bits >> 31);
  const Bits keys = (Bits)((bits ^ (sign & 0x7fffffff)) - sign - 0x00800000), over = keys > LARGEST_KEY;
  return (over & LARGEST_KEY) | (~over & keys);
}

/* Return the keys of the scores at `values`; `kept_bits` clears the sign where magnitudes are ranked. */
INLINE Bits load_keys(const uint32_t *values, uint32_t kept_bits) {
  return keys_of(*(const Words *)values & kept_bits);
}

/* The same for the last scores of an array; the lanes from `count` on repeat the first. */
INLINE Bits load_last_keys(const uint32_t *values, int64_t count, uint32_t kept_bits) {
  Words words = {0};
  for (int lane = 0; lane < LANES; lane++) words[lane] = values[lane < count ? lane : 0];
  return keys_of(words & kept_bits);
}

/* Add to `counts` how many keys have each value of the digit (key >> shift) − base, which is less than `digits`. */
void PUBLIC(count_digits)(const uint32_t *values, int64_t n, int64_t kept_bits, int64_t shift, int64_t base,
                          int64_t digits, int64_t *counts, int64_t threads) {
  const Words limit = (Words){0} + (uint32_t)digits;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    /* Four, so that equal digits in a row do not wait for each other. They hold the counts of 2^34 values. */
    uint32_t own[4][MOST_DIGITS];
    memset(own, 0, sizeof own);
#pragma omp for schedule(static)
    for (int64_t begin = 0; begin < n; begin += CHUNK) {
      const int64_t end = smaller(n, begin + CHUNK);
      for (int64_t i = begin; i < end; i += LANES) {
        const int64_t count = smaller(LANES, end - i);
        const Bits keys = count == LANES ? load_keys(values + i, (uint32_t)kept_bits)
                                         : load_last_keys(values + i, count, (uint32_t)kept_bits);
        const Words digit = (Words)(keys >> (int)shift) - (uint32_t)base;
        const Bits counted = digit < limit;
        if (any_bit(&counted))
          for (int lane = 0; lane < count; lane++)
            if (digit[lane] < (uint32_t)digits) own[lane & 3][digit[lane]]++;
      }
    }
    for (int64_t digit = 0; digit < digits; digit++) {
      const int64_t found = (int64_t)own[0][digit] + own[1][digit] + own[2][digit] + own[3][digit];
      if (found) {
#pragma omp atomic
        counts[digit] += found;
      }
    }
  }
}

typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* Mark the keys above a threshold; return how many equal it. */
int64_t PUBLIC(mark_keys)(const uint32_t *values, int64_t n, int64_t kept_bits, int64_t threshold, uint8_t *mask,
                          int64_t threads) {
  int64_t ties = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static) reduction(+ : ties)
  for (int64_t begin = 0; begin < n; begin += CHUNK) {
    const int64_t end = smaller(n, begin + CHUNK);
    Bits equal = {0};
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
      const Bits keys = load_keys(values + i, (uint32_t)kept_bits);
      *(Bytes *)(mask + i) = __builtin_convertvector(keys > (int32_t)threshold, Bytes) & 1;
      equal -= keys == (int32_t)threshold;
    }
    for (int lane = 0; lane < LANES; lane++) ties += equal[lane];
    if (i < end) {
      const Bits keys = load_last_keys(values + i, end - i, (uint32_t)kept_bits);
      for (int lane = 0; i + lane < end; lane++) {
        mask[i + lane] = keys[lane] > threshold;
        ties += keys[lane] == threshold;
      }
    }
  }
  return ties;
}

/* Mark the first `quota` keys that equal a threshold. */
void PUBLIC(mark_ties)(const uint32_t *values, int64_t n, int64_t kept_bits, int64_t threshold, int64_t quota,
                       uint8_t *mask) {
  for (int64_t i = 0; i < n && quota > 0; i += LANES) {
    const int64_t count = smaller(LANES, n - i);
    const Bits keys = count == LANES ? load_keys(values + i, (uint32_t)kept_bits)
                                     : load_last_keys(values + i, count, (uint32_t)kept_bits);
    const Bits equal = keys == (int32_t)threshold;
    if (any_bit(&equal))
      for (int lane = 0; lane < count && quota > 0; lane++)
        if (equal[lane]) {
          mask[i + lane] = 1;
          quota--;
        }
  }
}
