/* The work of a private step on a CPU: ChaCha20, discrete Gaussian noise, clipped gradients on an integer grid, and
 * digests.
 *
 * This file is compiled once for each instruction set, NAME. The results have the same bits for all of them, for any
 * number of threads, and as PyTorch computes them in `pomona.privacy`: only integers are summed and compared. The norms
 * are the exception: their errors are bounded, and the bound is part of the sensitivity.
 */

#include <stdint.h>
#include <string.h>

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
#define LANES (VECTOR / 4)
#define VECTOR_OF(type) type __attribute__((vector_size(VECTOR), aligned(4), may_alias))
typedef VECTOR_OF(uint32_t) Words;
typedef VECTOR_OF(float) Floats;
typedef VECTOR_OF(int32_t) Integers;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- ChaCha20 (RFC 8439): the blocks of one key and nonce, LANES of them side by side */

#define ROTATE(x, n) (((x) << (n)) | ((x) >> (32 - (n))))
#define QUARTER_ROUND(a, b, c, d)         \
  a += b, d ^= a, d = ROTATE(d, 16);      \
  c += d, b ^= c, b = ROTATE(b, 12);      \
  a += b, d ^= a, d = ROTATE(d, 8);       \
  c += d, b ^= c, b = ROTATE(b, 7)

void PUBLIC(chacha20)(const uint32_t *state, uint32_t *out, int64_t blocks, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t first = 0; first < blocks; first += LANES) {
    Words start[16], x[16];
    for (int i = 0; i < 16; i++) start[i] = (Words){} + state[i];
    for (int lane = 0; lane < LANES; lane++) start[12][lane] += (uint32_t)(first + lane);
    for (int i = 0; i < 16; i++) x[i] = start[i];
    for (int round = 0; round < 10; round++) {
      QUARTER_ROUND(x[0], x[4], x[8], x[12]);
      QUARTER_ROUND(x[1], x[5], x[9], x[13]);
      QUARTER_ROUND(x[2], x[6], x[10], x[14]);
      QUARTER_ROUND(x[3], x[7], x[11], x[15]);
      QUARTER_ROUND(x[0], x[5], x[10], x[15]);
      QUARTER_ROUND(x[1], x[6], x[11], x[12]);
      QUARTER_ROUND(x[2], x[7], x[8], x[13]);
      QUARTER_ROUND(x[3], x[4], x[9], x[14]);
    }
    uint32_t words[16][LANES];
    for (int i = 0; i < 16; i++) {
      x[i] += start[i];
      memcpy(words[i], &x[i], VECTOR);
    }
    int64_t count = smaller(LANES, blocks - first);
    for (int64_t lane = 0; lane < count; lane++)
      for (int i = 0; i < 16; i++) out[(first + lane) * 16 + i] = words[i][lane];
  }
}

/* ---- discrete Gaussian proposals, as `pomona.privacy.discrete_gaussian` describes them */

/* Write the proposal of each word and its verdict: 0 rejected, 1 accepted, 2 to be compared with its probability. */
void PUBLIC(propose_noise)(const uint64_t *words, int64_t count, const int16_t *slots, const int64_t *accept_below,
                           const int64_t *reject_from, int64_t slot_bits, int64_t offset_bits, int64_t first_block,
                           int64_t *values, uint8_t *verdicts, int64_t threads) {
  const uint64_t slot_mask = (UINT64_C(1) << slot_bits) - 1, offset_mask = (UINT64_C(1) << offset_bits) - 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t i = 0; i < count; i++) {
    uint64_t word = words[i];
    int64_t block = slots[word & slot_mask], height = (int64_t)(word >> (slot_bits + offset_bits));
    values[i] = (first_block + block) * ((int64_t)1 << offset_bits) + (int64_t)((word >> slot_bits) & offset_mask);
    verdicts[i] = height < accept_below[block] ? 1 : height >= reject_from[block] ? 0 : 2;
  }
}

/* ---- gradients on a grid */

/* Add the squared norm of each row: float32 sums of NORM_BLOCK squares, summed in float64. */
#define NORM_BLOCK 1024
void PUBLIC(add_squared_norms)(const float *values, double *squares, int64_t rows, int64_t columns, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    const float *at = values + row * columns;
    double total = 0;
    for (int64_t first = 0; first < columns; first += NORM_BLOCK) {
      int64_t count = smaller(NORM_BLOCK, columns - first), i = 0;
      Floats sums[4] = {};
      for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int k = 0; k < 4; k++) {
          Floats x = *(const Floats *)(at + first + i + k * LANES);
          sums[k] += x * x;
        }
      Floats sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      float block = 0;
      for (int lane = 0; lane < LANES; lane++) block += sum[lane];
      for (; i < count; i++) block += at[first + i] * at[first + i];
      total += block;
    }
    squares[row] += total;
  }
}

/* Add Σ round(scale · value) over the rows to `totals`, rows of scale 0 left out. |scale · value| < 2²² for all, and the
 * sums of all rows fit 31 bits. Adding MAGIC = 1.5 · 2²³ rounds a product to the nearest integer, which is then the
 * difference of the bits; `barrier` keeps the compiler from fusing the product with the addition. */
#define MAGIC 12582912.0f
#define MAGIC_BITS 0x4B400000
#define COLUMNS 2048 /* whose sums stay in the cache */
#if defined(__x86_64__)
#define BARRIER(x) __asm__("" : "+x"(x))
#else
#define BARRIER(x) __asm__("" : "+m"(x))
#endif
void PUBLIC(add_rounded_rows)(const float *values, const float *scales, int64_t *totals, int64_t rows, int64_t columns,
                              int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t first = 0; first < columns; first += COLUMNS) {
    int32_t sums[COLUMNS] = {0};
    int64_t count = smaller(COLUMNS, columns - first);
    for (int64_t row = 0; row < rows; row++) {
      float scale = scales[row];
      if (scale == 0) continue;
      const float *at = values + row * columns + first;
      int64_t i = 0;
      for (; i + LANES <= count; i += LANES) {
        Floats x = *(const Floats *)(at + i) * scale;
        BARRIER(x);
        x += MAGIC;
        *(Integers *)(sums + i) += (Integers)x - MAGIC_BITS;
      }
      for (; i < count; i++) {
        float x = at[i] * scale;
        int32_t bits;
        BARRIER(x);
        x += MAGIC;
        memcpy(&bits, &x, sizeof bits);
        sums[i] += bits - MAGIC_BITS;
      }
    }
    for (int64_t i = 0; i < count; i++) totals[first + i] += sums[i];
  }
}

/* ---- digests, as `pomona.privacy.tensor_digest` describes them */

/* Write the sums of each block's words, times four sequences of random multipliers, modulo 2⁶⁴. */
#define BLOCK_WORDS 1024
void PUBLIC(sum_blocks)(const uint32_t *words, const uint32_t *multipliers, uint64_t *sums, int64_t blocks,
                        int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t block = 0; block < blocks; block++) {
    const uint32_t *at = words + block * BLOCK_WORDS, *by = multipliers;
    uint64_t a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
    for (int64_t i = 0; i < BLOCK_WORDS; i++) {
      a += (uint64_t)at[i] * by[i];
      b += (uint64_t)at[i] * by[i + BLOCK_WORDS];
      c += (uint64_t)at[i] * by[i + 2 * BLOCK_WORDS];
      d += (uint64_t)at[i] * by[i + 3 * BLOCK_WORDS];
    }
    sums[4 * block] = a;
    sums[4 * block + 1] = b;
    sums[4 * block + 2] = c;
    sums[4 * block + 3] = d;
  }
}
