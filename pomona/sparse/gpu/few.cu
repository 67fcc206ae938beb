/* The product of a packed balanced matrix with a few vectors, on an NVIDIA GPU; compiled at run time.
 *
 * The lanes of a warp are 32 rows. For each block of x, lane i holds column i, and a shuffle hands every row the
 * column its survivor asks for: no shared memory, no bank conflicts, and only the matrix comes from far away. The
 * warps of a thread block share the blocks of GROUPS × 32 rows and add their sums up at the end: no atomics.
 *
 * Given as macros: KIND of values and x (0 float, 1 half, 2 bfloat16), KEPT of a BLOCK, BATCH vectors, GROUPS, WARPS,
 * and UNROLL, the blocks that are on their way at a time. x is BATCH × pitch, of which `columns` are there.
 */

#if KIND == 0
#define PAIRS BATCH /* registers that hold one column of x: a float each, or two halves */
#define EXPONENT 0x7F800000u
#define LOWEST 0x00800000u /* the last bit of the exponent, for every number in a register */
#define SIGN 0x80000000u
#else
#define PAIRS ((BATCH + 1) / 2)
#define EXPONENT (KIND == 1 ? 0x7C007C00u : 0x7F807F80u)
#define LOWEST (KIND == 1 ? 0x04000400u : 0x00800080u)
#define SIGN 0x80008000u
#endif

/* The signs of those numbers that are infinite or NaN: their exponents are all ones and run over. */
__device__ __forceinline__ unsigned wild(unsigned numbers) { return (numbers & EXPONENT) + LOWEST & SIGN; }

/* One of the vectors' numbers in the registers of a column. */
__device__ __forceinline__ float number(const unsigned *column, int i) {
#if KIND == 0
  return from_bits(column[i]);
#else
  return widen(column[i / 2] >> 16 * (i % 2));
#endif
}

/* Where a lane reads: its row of each group, and its column of each vector. */
struct Place {
  const Value *values[GROUPS], *x[BATCH];
  const Word *indices[GROUPS];
  int left; /* columns from its own first one to the last */
  Policy policy;

  __device__ __forceinline__ void load_column(int at, bool there, unsigned *to) const {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) to[i] = 0;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const Value one = there ? x[i][at * BLOCK] : 0;
#if KIND == 0
      to[i] = to_bits(one);
#else
      to[i / 2] |= one << 16 * (i % 2);
#endif
    }
  }
};

/* What a lane reads of COUNT blocks in a row, all at once, so that it is on its way together. */
template <int COUNT> struct Run {
  Word word[COUNT][GROUPS][WORDS];
  Value value[COUNT][GROUPS][KEPT];
  unsigned column[COUNT][PAIRS]; /* zeros behind the end of a block and of x; several blocks are all there */

  __device__ __forceinline__ Run(const Place &place, int at) {
    const Word *indices[GROUPS];
    const Value *values[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      indices[g] = place.indices[g] + at * WORDS * LANES;
      values[g] = place.values[g] + at * KEPT * LANES;
    }
#pragma unroll
    for (int u = 0; u < COUNT; u++) {
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int w = 0; w < WORDS; w++) word[u][g][w] = stream(indices[g] + (u * WORDS + w) * LANES, place.policy);
#pragma unroll
        for (int s = 0; s < KEPT; s++) value[u][g][s] = stream(values[g] + (u * KEPT + s) * LANES, place.policy);
      }
      place.load_column(at + u, (COUNT > 1 && BLOCK == LANES) || (at + u) * BLOCK < place.left, column[u]);
    }
  }

  __device__ __forceinline__ void multiply(float (*sums)[BATCH], unsigned &strange) const {
#pragma unroll
    for (int u = 0; u < COUNT; u++) {
#pragma unroll
      for (int i = 0; i < PAIRS; i++) strange |= wild(column[u][i]);
#pragma unroll
      for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int s = 0; s < KEPT; s++) {
          const float weight = widen_value(value[u][g][s]);
          unsigned picked[PAIRS];
#pragma unroll
          for (int i = 0; i < PAIRS; i++)
            picked[i] = __shfl_sync(ALL, column[u][i], word[u][g][s / 3] >> 5 * (s % 3));
#pragma unroll
          for (int i = 0; i < BATCH; i++) sums[g][i] += weight * number(picked, i);
        }
    }
  }

  /* A pruned weight times inf or NaN is NaN in the dense product: so it is here. */
  __device__ __forceinline__ void poison(float (*sums)[BATCH]) const {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const float it = number(column[0], i);
      const unsigned mine = it - it != 0;
      const int all = __popc(__ballot_sync(ALL, mine));
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        int kept = 0;
#pragma unroll
        for (int s = 0; s < KEPT; s++) kept += __shfl_sync(ALL, mine, word[0][g][s / 3] >> 5 * (s % 3));
        if (kept != all) sums[g][i] = from_bits(0x7FC00000u);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * LANES)
few(const Value *values, const Word *indices, const Value *x, const void *bias, Value *y, int rows, int columns,
    int pitch, int blocks, int y_row, int y_vector, int wide, int relu) {
  __shared__ float parts[WARPS][GROUPS * BATCH][LANES];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, first = blockIdx.x * GROUPS;
  Place place;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) { /* a group that is not there is read as the first one */
    const long long group = (first + g) * LANES < rows ? first + g : 0;
    place.values[g] = values + group * blocks * KEPT * LANES + lane;
    place.indices[g] = indices + group * blocks * WORDS * LANES + lane;
  }
#pragma unroll
  for (int i = 0; i < BATCH; i++) place.x[i] = x + (long long)i * pitch + lane;
  place.left = lane < BLOCK ? columns - lane : 0;
  place.policy = fleeting();

  float sums[GROUPS][BATCH] = {};
  unsigned strange = 0;
  const int runs = columns / (BLOCK * UNROLL);
  for (int run = warp; run < runs; run += WARPS) Run<UNROLL>(place, run * UNROLL).multiply(sums, strange);
  for (int at = runs * UNROLL + warp; at < blocks; at += WARPS) Run<1>(place, at).multiply(sums, strange);
  if (__any_sync(ALL, strange))
    for (int at = 0; at < blocks; at++) Run<1>(place, at).poison(sums);

#pragma unroll
  for (int i = 0; i < GROUPS * BATCH; i++) parts[warp][i][lane] = sums[i / BATCH][i % BATCH];
  __syncthreads();
  for (int part = warp; part < GROUPS * BATCH; part += WARPS) {
    const int row = (first + part / BATCH) * LANES + lane;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += parts[w][part][lane];
    if (row < rows)
      y[(long long)row * y_row + (long long)(part % BATCH) * y_vector] = finish(sum, bias, wide, row, relu);
  }
}
