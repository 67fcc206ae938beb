/* The product of a packed balanced matrix with a few vectors, on an NVIDIA GPU; compiled at run time.
 *
 * The lanes of a warp are 32 rows. For each block of x, lane i holds column i, and a shuffle hands every row the
 * column its survivor asks for: no shared memory, no bank conflicts, and only the matrix comes from far away. The
 * warps of a thread block share the blocks of GROUPS × 32 rows and add their sums up at the end: no atomics.
 *
 * Given as macros: KIND of values and x (0 float, 1 half, 2 bfloat16), KEPT of a BLOCK, BATCH vectors, GROUPS, WARPS,
 * and UNROLL, the blocks that are on their way at a time. x is BATCH × pitch, of which `columns` are there.
 *
 * With TWINS, for one vector of 16 bits, so many pairs of blocks are on their way instead: a half of the warp has one
 * block of a pair, the other half the other, and a lane two rows of it, so that it reads twice as much with one load.
 *
 * With STEP the matrix is an LSTM's, [W_ih W_hh], of whole blocks both: those of x go before those of the state h. Its
 * rows are in the order unit, gate, so that four lanes have the gates of a unit and turn them into its new c and h. All
 * is there for each direction, blockIdx.z, one behind the other. If it is EARLY, it was launched ahead of the end of the
 * kernel before it.
 */
#ifndef STEP
#define STEP 0
#endif
#ifndef EARLY
#define EARLY 0
#endif
#ifndef TWINS
#define TWINS 0
#endif
/* Threads of a thread block, and how many of these a processor is to hold. */
#if TWINS
#define BOUNDS WARPS * LANES, 2
#else
#define BOUNDS WARPS * LANES
#endif
#include "kinds.cuh"

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

/* Let the next kernel be launched, and wait for what the one before has written. */
__device__ __forceinline__ void take_turns() {
#if EARLY && !defined EMULATED
  asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

/* How an LSTM's matrix is read: the next step wants it again, so it may stay in the cache. */
__device__ __forceinline__ Policy lasting() {
#ifdef EMULATED
  return fleeting();
#else
  Policy policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
#endif
}

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

/* One lane's column of each vector, counted in blocks; `left` columns from its own first one to the last. */
struct Input {
  const Value *x;
  int pitch, left;

  __device__ __forceinline__ Input(const Value *all, int pitch, int columns, int ahead) : pitch(pitch) {
    const int lane = threadIdx.x % LANES;
    x = all + lane - ahead * BLOCK;
    left = all && lane < BLOCK ? columns - lane + ahead * BLOCK : 0;
  }
};

/* Where a lane reads: its row of each group, and its column of each vector. */
struct Place {
  const Value *values[GROUPS];
  const Word *indices[GROUPS];
  const Input x, h;
  int first; /* block of h */
  Policy policy;

  __device__ __forceinline__ void load_column(int at, bool all, unsigned *to) const {
    const bool state = STEP && at >= first, there = all || at * BLOCK < (state ? h.left : x.left);
    const Value *const from = (state ? h.x : x.x) + at * BLOCK;
    const long long pitch = state ? h.pitch : x.pitch;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) to[i] = 0;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const Value one = there ? from[i * pitch] : 0;
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
      place.load_column(at + u, COUNT > 1 && BLOCK == LANES && !STEP, column[u]);
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

#if TWINS
#define HALF (LANES / 2)

/* What a lane reads of TWINS pairs of blocks. */
struct Twins {
  unsigned word[TWINS][WORDS], value[TWINS][KEPT]; /* of two rows */
  unsigned column[TWINS];                          /* of both blocks */

  __device__ __forceinline__ Twins(const Place &place, int at) {
    const int lane = threadIdx.x % LANES, mine = at + lane / HALF;
    const unsigned *const indices = (const unsigned *)(place.indices[0] - lane) + mine * WORDS * HALF + lane % HALF;
    const unsigned *const values = (const unsigned *)(place.values[0] - lane) + mine * KEPT * HALF + lane % HALF;
#pragma unroll
    for (int u = 0; u < TWINS; u++) {
#pragma unroll
      for (int w = 0; w < WORDS; w++) word[u][w] = stream(indices + (2 * u * WORDS + w) * HALF, place.policy);
#pragma unroll
      for (int s = 0; s < KEPT; s++) value[u][s] = stream(values + (2 * u * KEPT + s) * HALF, place.policy);
      unsigned first, second;
      place.load_column(at + 2 * u, BLOCK == LANES, &first);
      place.load_column(at + 2 * u + 1, BLOCK == LANES, &second);
      column[u] = first | second << 16;
    }
  }

  __device__ __forceinline__ void multiply(float *sums, unsigned &strange) const {
    const int mine = threadIdx.x % LANES / HALF * 16;
#pragma unroll
    for (int u = 0; u < TWINS; u++) {
      strange |= wild(column[u]);
#pragma unroll
      for (int i = 0; i < 2 * KEPT; i++) {
        const int s = i / 2, row = i % 2 * 16;
        const unsigned picked = __shfl_sync(ALL, column[u], word[u][s / 3] >> (row + 5 * (s % 3)));
        sums[i % 2] += widen(value[u][s] >> row) * widen(picked >> mine);
      }
    }
  }
};

__device__ __forceinline__ float shuffle(float value, int lane) { return from_bits(__shfl_sync(ALL, to_bits(value), lane)); }

/* The sums of both halves of the warp, of two rows a lane, as those of a row a lane. */
__device__ __forceinline__ float apart(const float *sums) {
  const int lane = threadIdx.x % LANES;
  float both[2];
#pragma unroll
  for (int row = 0; row < 2; row++) both[row] = shuffle(sums[row] + shuffle(sums[row], lane ^ HALF), lane / 2);
  return both[lane % 2];
}
#endif

/* All of the product for GROUPS × 32 rows. One of the warps is done(sum, row, vector) with each, a row a lane. */
template <class Done>
__device__ __forceinline__ void multiply(Place place, const Value *values, const Word *indices, int rows, int blocks,
                                         int whole, Done done) {
  __shared__ float parts[WARPS][GROUPS * BATCH][LANES];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, first = blockIdx.x * GROUPS;
  const int groups = (rows + LANES - 1) / LANES;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) { /* a group that is not there is read as the first one */
    const long long group = (STEP ? blockIdx.z * groups : 0) + (first + g < groups ? first + g : 0);
    place.values[g] = values + group * blocks * KEPT * LANES + lane;
    place.indices[g] = indices + group * blocks * WORDS * LANES + lane;
  }

  float sums[GROUPS][BATCH] = {};
  unsigned strange = 0;
#if TWINS
  const int straight = whole / (2 * TWINS) * 2 * TWINS;
  float twins[2] = {};
  for (int at = warp * 2 * TWINS; at < straight; at += WARPS * 2 * TWINS) Twins(place, at).multiply(twins, strange);
  sums[0][0] = apart(twins);
#else
  const int straight = whole / UNROLL * UNROLL;
  for (int at = warp * UNROLL; at < straight; at += WARPS * UNROLL) Run<UNROLL>(place, at).multiply(sums, strange);
#endif
  for (int at = straight + warp; at < blocks; at += WARPS) Run<1>(place, at).multiply(sums, strange);
  if (__any_sync(ALL, strange))
    for (int at = 0; at < blocks; at++) Run<1>(place, at).poison(sums);

#pragma unroll
  for (int i = 0; i < GROUPS * BATCH; i++) parts[warp][i][lane] = sums[i / BATCH][i % BATCH];
  __syncthreads();
  for (int part = warp; part < GROUPS * BATCH; part += WARPS) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += parts[w][part][lane];
    done(sum, (first + part / BATCH) * LANES + lane, part % BATCH);
  }
}

#if !STEP
extern "C" __global__ void __launch_bounds__(BOUNDS)
few(const Value *values, const Word *indices, const Value *x, const void *bias, Value *y, int rows, int columns,
    int pitch, int blocks, int y_row, int y_vector, int wide, int relu) {
  const Input input(x, pitch, columns, 0);
  const Place place = {{}, {}, input, input, blocks, fleeting()};
  multiply(place, values, indices, rows, blocks, columns / BLOCK, [=](float sum, int row, int vector) {
    if (row < rows) y[(long long)row * y_row + (long long)vector * y_vector] = finish(sum, bias, wide, row, relu);
  });
}
#else
/* x, h and y are given for both directions, as one alone has them twice. `last` is another place for h. */
extern "C" __global__ void __launch_bounds__(BOUNDS)
few(const Value *values, const Word *indices, const float *bias, const Value *x0, const Value *x1, const Value *h0,
    const Value *h1, const Value *c, Value *y0, Value *y1, Value *c_next, Value *last, int units, int columns,
    int x_pitch, int h_pitch, int y_pitch, int blocks) {
  take_turns();
  const bool back = blockIdx.z;
  const int first = (columns + BLOCK - 1) / BLOCK, rows = 4 * units;
  const Place place = {{}, {}, Input(back ? x1 : x0, x_pitch, columns, 0), Input(back ? h1 : h0, h_pitch, units, first),
                       first, lasting()};
  multiply(place, values, indices, rows, blocks, blocks, [=](float sum, int row, int vector) {
    const float gate = sum + (row < rows ? bias[back * rows + row] : 0);
    const float open = row % 4 == 2 ? tanhf(gate) : 1 / (1 + expf(-gate)); /* in, forget, cell, out */
    float gates[4];
#pragma unroll
    for (int i = 0; i < 4; i++) gates[i] = from_bits(__shfl_sync(ALL, to_bits(open), row % LANES / 4 * 4 + i));
    if (row >= rows || row % 4) return;
    const long long unit = row / 4, at = ((long long)back * BATCH + vector) * units + unit;
    const float cell = gates[1] * (c ? widen_value(c[at]) : 0) + gates[0] * gates[2];
    const Value state = narrow(gates[3] * tanhf(cell));
    c_next[at] = narrow(cell);
    (back ? y1 : y0)[(long long)vector * y_pitch + unit] = state;
    if (last) last[at] = state;
  });
}
#endif
