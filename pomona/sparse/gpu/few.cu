/* The product of a packed balanced matrix with a few vectors, on an NVIDIA GPU; compiled at run time.
 *
 * The lanes of a warp are 32 rows. For each block of x, lane i holds column i, and a shuffle hands every row the
 * column its survivor asks for: no shared memory, no bank conflicts, and only the matrix comes from far away. The
 * warps of a thread block share the blocks of GROUPS × 32 rows and add their sums up at the end: no atomics.
 *
 * Given as macros: KIND of values and x (0 float, 1 half, 2 bfloat16), KEPT of a block, BATCH vectors at a time,
 * GROUPS, WARPS, and UNROLL, the blocks that are on their way at a time. x is columns × BATCH.
 */

#if KIND == 0
typedef float Value;
#else
typedef unsigned short Value;
#endif
typedef unsigned short Word;

#define LANES 32
#define ALL 0xFFFFFFFFu
#define WORDS ((KEPT + 2) / 3)
#if KIND == 0
#define PAIRS BATCH /* registers that hold one column of x: a float each, or two halves */
#else
#define PAIRS ((BATCH + 1) / 2)
#endif

#ifndef EMULATED
__device__ __forceinline__ float from_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned to_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float from_half(unsigned bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}
__device__ __forceinline__ unsigned short to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

__device__ __forceinline__ float widen(unsigned bits) {
#if KIND == 0
  return from_bits(bits);
#elif KIND == 1
  return from_half(bits & 0xFFFF);
#else
  return from_bits(bits << 16);
#endif
}

__device__ __forceinline__ float widen_value(Value value) {
#if KIND == 0
  return value;
#else
  return widen(value);
#endif
}

__device__ __forceinline__ Value narrow(float value) {
#if KIND == 0
  return value;
#elif KIND == 1
  return to_half(value);
#else
  unsigned bits = to_bits(value);
  if (value != value) return 0x7FC0;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; /* to the nearest, ties to even */
#endif
}

/* One of the vectors' numbers in the registers of a column. */
__device__ __forceinline__ float number(const unsigned *column, int i) {
#if KIND == 0
  return from_bits(column[i]);
#else
  return widen(column[i / 2] >> 16 * (i % 2));
#endif
}

__device__ __forceinline__ bool wild(float value) { return (to_bits(value) & 0x7F800000u) == 0x7F800000u; }

/* Column `lane` of a block; zeros behind the end of the block and of x. */
__device__ __forceinline__ void load_column(const Value *x, int column, bool there, unsigned *to) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++) to[i] = 0;
  if (!there) return;
#if KIND == 0
#pragma unroll
  for (int i = 0; i < BATCH; i++) to[i] = to_bits(x[(long long)column * BATCH + i]);
#elif BATCH == 1
  to[0] = x[column];
#else
  const unsigned *pairs = (const unsigned *)x + (long long)column * PAIRS;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) to[i] = pairs[i];
#endif
}

/* A pruned weight times inf or NaN is NaN in the dense product: so it is here, where a block of x has one. */
__device__ __forceinline__ void poison(const unsigned *column, const Word (*word)[WORDS], float (*sums)[BATCH]) {
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    const unsigned mine = wild(number(column, i));
    const int all = __popc(__ballot_sync(ALL, mine));
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      int kept = 0;
#pragma unroll
      for (int s = 0; s < KEPT; s++) kept += __shfl_sync(ALL, mine, word[g][s / 3] >> 5 * (s % 3) & 31);
      if (kept != all) sums[g][i] = from_bits(0x7FC00000u);
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES)
few(const Value *values, const Word *indices, const Value *x, const float *bias, Value *y, int rows, int columns,
    int block, int blocks, int n, int relu) {
  __shared__ float parts[WARPS][GROUPS * BATCH][LANES];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, first = blockIdx.x * GROUPS;
  const int groups = (rows + LANES - 1) / LANES;
  float sums[GROUPS][BATCH] = {};

  for (int begin = warp; begin < blocks; begin += WARPS * UNROLL) {
    Word word[UNROLL][GROUPS][WORDS];
    Value value[UNROLL][GROUPS][KEPT];
    unsigned column[UNROLL][PAIRS];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) { /* all loads first, so that they are on their way together */
      const int at = begin + u * WARPS;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const bool there = at < blocks && first + g < groups;
        const long long here = there ? (long long)(first + g) * blocks + at : 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++) word[u][g][w] = there ? indices[(here * WORDS + w) * LANES + lane] : 0;
#pragma unroll
        for (int s = 0; s < KEPT; s++) value[u][g][s] = there ? values[(here * KEPT + s) * LANES + lane] : 0;
      }
      const int mine = at * block + lane;
      load_column(x, mine, at < blocks && lane < block && mine < columns, column[u]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
#pragma unroll
      for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int s = 0; s < KEPT; s++) {
          const float weight = widen_value(value[u][g][s]);
          unsigned picked[PAIRS];
#pragma unroll
          for (int i = 0; i < PAIRS; i++)
            picked[i] = __shfl_sync(ALL, column[u][i], word[u][g][s / 3] >> 5 * (s % 3) & 31);
#pragma unroll
          for (int i = 0; i < BATCH; i++) sums[g][i] += weight * number(picked, i);
        }
      bool any = false;
#pragma unroll
      for (int i = 0; i < BATCH; i++) any |= wild(number(column[u], i));
      if (__any_sync(ALL, any)) poison(column[u], word[u], sums);
    }
  }

#pragma unroll
  for (int g = 0; g < GROUPS; g++)
#pragma unroll
    for (int i = 0; i < BATCH; i++) parts[warp][g * BATCH + i][lane] = sums[g][i];
  __syncthreads();
  for (int part = warp; part < GROUPS * BATCH; part += WARPS) {
    const int row = (first + part / BATCH) * LANES + lane, i = part % BATCH;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += parts[w][part][lane];
    if (row < rows && i < n) {
      sum += bias ? bias[row] : 0;
      y[(long long)i * rows + row] = narrow(relu && sum < 0 ? 0.0f : sum);
    }
  }
}
