/* The product of a packed balanced matrix with a few vectors on an NVIDIA GPU; compiled at run time.
 *
 * The lanes of a warp are 32 rows. For each block of x, lane i holds column i, and a shuffle gives every row the column
 * that its survivor needs: no shared memory, no bank conflicts, and only the matrix is read from global memory. The
 * warps of a thread block share the blocks of ROW_GROUPS × 32 rows and add up their sums at the end, without atomics.
 *
 * Macros: VALUE_TYPE of values and x (0 float, 1 half, 2 bfloat16); KEPT survivors of a BLOCK of columns; VECTORS;
 * ROW_GROUPS; WARPS; and UNROLL, the number of blocks that are loaded at a time. x has VECTORS rows, `pitch` apart, of
 * which the first `columns` entries are valid.
 *
 * BLOCK_PAIRS, for one vector of 16 bits, is a number of pairs of blocks that are loaded at a time instead. One half of
 * the warp has the first block of a pair, the other half the second, and a lane has two rows, so that a load reads
 * twice as much.
 *
 * With LSTM_STEP the matrix is [W_ih W_hh] of an LSTM, both padded to whole blocks: the blocks of x come before those
 * of the state h. Its rows are ordered by unit, then gate, so that four lanes have the gates of a unit and compute its
 * new c and h. The directions lie one after the other and are selected by blockIdx.z. With EARLY_LAUNCH, the kernel
 * starts before the previous one has ended.
 */
#ifndef LSTM_STEP
#define LSTM_STEP 0
#endif
#ifndef EARLY_LAUNCH
#define EARLY_LAUNCH 0
#endif
#ifndef BLOCK_PAIRS
#define BLOCK_PAIRS 0
#endif
/* The threads of a thread block, and the thread blocks that a multiprocessor has to hold. */
#if BLOCK_PAIRS
#define LAUNCH_BOUNDS WARPS * LANES, 2
#else
#define LAUNCH_BOUNDS WARPS * LANES
#endif
#include "value_types.cuh"

#if VALUE_TYPE == 0
#define COLUMN_REGISTERS VECTORS     /* registers that hold one column of x: a float each, or two halves */
#define EXPONENT_MASK 0x7F800000u
#define EXPONENT_LOW_BIT 0x00800000u /* the lowest bit of the exponent, of every number in a register */
#define SIGN_MASK 0x80000000u
#else
#define COLUMN_REGISTERS ((VECTORS + 1) / 2)
#define EXPONENT_MASK (VALUE_TYPE == 1 ? 0x7C007C00u : 0x7F807F80u)
#define EXPONENT_LOW_BIT (VALUE_TYPE == 1 ? 0x04000400u : 0x00800080u)
#define SIGN_MASK 0x80008000u
#endif

/* Allow the next kernel to launch, and wait until the writes of the previous one are visible. */
__device__ __forceinline__ void launch_next_and_wait() {
#if EARLY_LAUNCH && !defined EMULATED
  asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

/* The cache policy for the matrix of an LSTM: the next step reads it again, so that it may stay in the cache. */
__device__ __forceinline__ CachePolicy evict_normal_policy() {
#ifdef EMULATED
  return evict_first_policy();
#else
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
#endif
}

/* Return the sign bits of the numbers that are infinite or NaN: their exponents are all ones and overflow. */
__device__ __forceinline__ unsigned nonfinite_signs(unsigned numbers) {
  return (numbers & EXPONENT_MASK) + EXPONENT_LOW_BIT & SIGN_MASK;
}

/* Return the entry of vector i from the registers of a column. */
__device__ __forceinline__ float vector_value(const unsigned *column, int i) {
#if VALUE_TYPE == 0
  return from_bits(column[i]);
#else
  return to_float(column[i / 2] >> 16 * (i % 2));
#endif
}

/* The column of each vector that a lane reads, where blocks are counted from `first_block` on. */
struct LaneColumn {
  const Value *x;
  int pitch, left; /* columns from the lane's first one to the end */

  __device__ __forceinline__ LaneColumn(const Value *vectors, int pitch, int columns, int first_block) : pitch(pitch) {
    const int lane = threadIdx.x % LANES;
    x = vectors + lane - first_block * BLOCK;
    left = vectors && lane < BLOCK ? columns - lane + first_block * BLOCK : 0;
  }
};

/* The memory that a lane reads: its row of each group, and its column of each vector. */
struct LaneInputs {
  const Value *values[ROW_GROUPS];
  const Word *indices[ROW_GROUPS];
  const LaneColumn x, h;
  int first_state_block;
  CachePolicy policy;

  /* Load the lane's column of one block; `complete` says that the block has all its columns. */
  __device__ __forceinline__ void load_column(int block, bool complete, unsigned *to) const {
    const bool state = LSTM_STEP && block >= first_state_block;
    const bool valid = complete || block * BLOCK < (state ? h.left : x.left);
    const Value *const from = (state ? h.x : x.x) + block * BLOCK;
    const long long pitch = state ? h.pitch : x.pitch;
#pragma unroll
    for (int i = 0; i < COLUMN_REGISTERS; i++) to[i] = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const Value one = valid ? from[i * pitch] : 0;
#if VALUE_TYPE == 0
      to[i] = to_bits(one);
#else
      to[i / 2] |= one << 16 * (i % 2);
#endif
    }
  }
};

/* What a lane reads of COUNT consecutive blocks, in loads that are all in flight together. */
template <int COUNT> struct BlockRun {
  Word word[COUNT][ROW_GROUPS][WORDS];
  Value value[COUNT][ROW_GROUPS][KEPT];
  unsigned column[COUNT][COLUMN_REGISTERS]; /* zeros past the end of a block and of x */

  __device__ __forceinline__ BlockRun(const LaneInputs &inputs, int block) {
    const Word *indices[ROW_GROUPS];
    const Value *values[ROW_GROUPS];
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; g++) {
      indices[g] = inputs.indices[g] + block * WORDS * LANES;
      values[g] = inputs.values[g] + block * KEPT * LANES;
    }
#pragma unroll
    for (int u = 0; u < COUNT; u++) {
#pragma unroll
      for (int g = 0; g < ROW_GROUPS; g++) {
#pragma unroll
        for (int w = 0; w < WORDS; w++)
          word[u][g][w] = load_streaming(indices[g] + (u * WORDS + w) * LANES, inputs.policy);
#pragma unroll
        for (int s = 0; s < KEPT; s++)
          value[u][g][s] = load_streaming(values[g] + (u * KEPT + s) * LANES, inputs.policy);
      }
      /* several blocks are loaded at once only where all are complete */
      inputs.load_column(block + u, COUNT > 1 && BLOCK == LANES && !LSTM_STEP, column[u]);
    }
  }

  __device__ __forceinline__ void multiply(float (*sums)[VECTORS], unsigned &nonfinite) const {
#pragma unroll
    for (int u = 0; u < COUNT; u++) {
#pragma unroll
      for (int i = 0; i < COLUMN_REGISTERS; i++) nonfinite |= nonfinite_signs(column[u][i]);
#pragma unroll
      for (int g = 0; g < ROW_GROUPS; g++)
#pragma unroll
        for (int s = 0; s < KEPT; s++) {
          const float weight = value_to_float(value[u][g][s]);
          unsigned picked[COLUMN_REGISTERS];
#pragma unroll
          for (int i = 0; i < COLUMN_REGISTERS; i++)
            picked[i] = __shfl_sync(FULL_MASK, column[u][i], word[u][g][s / 3] >> 5 * (s % 3));
#pragma unroll
          for (int i = 0; i < VECTORS; i++) sums[g][i] += weight * vector_value(picked, i);
        }
    }
  }

  /* Make the sums NaN that a pruned weight times inf or NaN makes NaN in the dense product. */
  __device__ __forceinline__ void propagate_nonfinite(float (*sums)[VECTORS]) const {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const float entry = vector_value(column[0], i);
      const unsigned is_nonfinite = entry - entry != 0;
      const int all = __popc(__ballot_sync(FULL_MASK, is_nonfinite));
#pragma unroll
      for (int g = 0; g < ROW_GROUPS; g++) {
        int kept = 0;
#pragma unroll
        for (int s = 0; s < KEPT; s++) kept += __shfl_sync(FULL_MASK, is_nonfinite, word[0][g][s / 3] >> 5 * (s % 3));
        if (kept != all) sums[g][i] = from_bits(0x7FC00000u);
      }
    }
  }
};

#if BLOCK_PAIRS
#define HALF_WARP (LANES / 2)

/* What a lane reads of BLOCK_PAIRS pairs of blocks. */
struct BlockPairs {
  unsigned word[BLOCK_PAIRS][WORDS], value[BLOCK_PAIRS][KEPT]; /* of two rows */
  unsigned column[BLOCK_PAIRS];                                /* of both blocks */

  __device__ __forceinline__ BlockPairs(const LaneInputs &inputs, int block) {
    const int lane = threadIdx.x % LANES, own_block = block + lane / HALF_WARP, rows = lane % HALF_WARP;
    const unsigned *const indices = (const unsigned *)(inputs.indices[0] - lane) + own_block * WORDS * HALF_WARP + rows;
    const unsigned *const values = (const unsigned *)(inputs.values[0] - lane) + own_block * KEPT * HALF_WARP + rows;
#pragma unroll
    for (int u = 0; u < BLOCK_PAIRS; u++) {
#pragma unroll
      for (int w = 0; w < WORDS; w++)
        word[u][w] = load_streaming(indices + (2 * u * WORDS + w) * HALF_WARP, inputs.policy);
#pragma unroll
      for (int s = 0; s < KEPT; s++)
        value[u][s] = load_streaming(values + (2 * u * KEPT + s) * HALF_WARP, inputs.policy);
      unsigned first, second;
      inputs.load_column(block + 2 * u, BLOCK == LANES, &first);
      inputs.load_column(block + 2 * u + 1, BLOCK == LANES, &second);
      column[u] = first | second << 16;
    }
  }

  __device__ __forceinline__ void multiply(float *sums, unsigned &nonfinite) const {
    const int block_shift = threadIdx.x % LANES / HALF_WARP * 16;
#pragma unroll
    for (int u = 0; u < BLOCK_PAIRS; u++) {
      nonfinite |= nonfinite_signs(column[u]);
#pragma unroll
      for (int i = 0; i < 2 * KEPT; i++) {
        const int s = i / 2, row_shift = i % 2 * 16;
        const unsigned picked = __shfl_sync(FULL_MASK, column[u], word[u][s / 3] >> (row_shift + 5 * (s % 3)));
        sums[i % 2] += to_float(value[u][s] >> row_shift) * to_float(picked >> block_shift);
      }
    }
  }
};

__device__ __forceinline__ float shuffle_float(float value, int lane) {
  return from_bits(__shfl_sync(FULL_MASK, to_bits(value), lane));
}

/* Add up the sums of both halves of the warp, which have two rows a lane; return the sum of one row a lane. */
__device__ __forceinline__ float separate_rows(const float *sums) {
  const int lane = threadIdx.x % LANES;
  float both[2];
#pragma unroll
  for (int row = 0; row < 2; row++)
    both[row] = shuffle_float(sums[row] + shuffle_float(sums[row], lane ^ HALF_WARP), lane / 2);
  return both[lane % 2];
}
#endif

/* Compute the product for ROW_GROUPS × 32 rows. One warp calls finish_row(sum, row, vector) with each, a row a lane. */
template <class Finish>
__device__ __forceinline__ void multiply_rows(LaneInputs inputs, const Value *values, const Word *indices, int rows,
                                              int blocks, int whole_blocks, Finish finish_row) {
  __shared__ float warp_sums[WARPS][ROW_GROUPS * VECTORS][LANES];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, first = blockIdx.x * ROW_GROUPS;
  const int groups = (rows + LANES - 1) / LANES;
#pragma unroll
  for (int g = 0; g < ROW_GROUPS; g++) { /* a group past the end is read as the first one */
    const long long group = (LSTM_STEP ? blockIdx.z * groups : 0) + (first + g < groups ? first + g : 0);
    inputs.values[g] = values + group * blocks * KEPT * LANES + lane;
    inputs.indices[g] = indices + group * blocks * WORDS * LANES + lane;
  }

  float sums[ROW_GROUPS][VECTORS] = {};
  unsigned nonfinite = 0;
#if BLOCK_PAIRS
  const int unrolled_end = whole_blocks / (2 * BLOCK_PAIRS) * 2 * BLOCK_PAIRS;
  float pair_sums[2] = {};
  for (int block = warp * 2 * BLOCK_PAIRS; block < unrolled_end; block += WARPS * 2 * BLOCK_PAIRS)
    BlockPairs(inputs, block).multiply(pair_sums, nonfinite);
  sums[0][0] = separate_rows(pair_sums);
#else
  const int unrolled_end = whole_blocks / UNROLL * UNROLL;
  for (int block = warp * UNROLL; block < unrolled_end; block += WARPS * UNROLL)
    BlockRun<UNROLL>(inputs, block).multiply(sums, nonfinite);
#endif
  for (int block = unrolled_end + warp; block < blocks; block += WARPS)
    BlockRun<1>(inputs, block).multiply(sums, nonfinite);
  if (__any_sync(FULL_MASK, nonfinite))
    for (int block = 0; block < blocks; block++) BlockRun<1>(inputs, block).propagate_nonfinite(sums);

#pragma unroll
  for (int i = 0; i < ROW_GROUPS * VECTORS; i++) warp_sums[warp][i][lane] = sums[i / VECTORS][i % VECTORS];
  __syncthreads();
  for (int part = warp; part < ROW_GROUPS * VECTORS; part += WARPS) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += warp_sums[w][part][lane];
    finish_row(sum, (first + part / VECTORS) * LANES + lane, part % VECTORS);
  }
}

#if !LSTM_STEP
extern "C" __global__ void __launch_bounds__(LAUNCH_BOUNDS)
warp_shuffle(const Value *values, const Word *indices, const Value *x, const void *bias, Value *y, int rows,
             int columns, int pitch, int blocks, int y_row, int y_vector, int float_bias, int relu) {
  const LaneColumn column(x, pitch, columns, 0);
  const LaneInputs inputs = {{}, {}, column, column, blocks, evict_first_policy()};
  multiply_rows(inputs, values, indices, rows, blocks, columns / BLOCK, [=](float sum, int row, int vector) {
    if (row >= rows) return;
    y[(long long)row * y_row + (long long)vector * y_vector] = finish_sum(sum, bias, float_bias, row, relu);
  });
}
#else
/* x, h and y are given for both directions; a single direction has them twice. The last step also writes h to `h_last`,
 * which is null in the others. */
extern "C" __global__ void __launch_bounds__(LAUNCH_BOUNDS)
warp_shuffle(const Value *values, const Word *indices, const float *bias, const Value *x0, const Value *x1,
             const Value *h0, const Value *h1, const Value *c, Value *y0, Value *y1, Value *c_next, Value *h_last,
             int units, int columns, int x_pitch, int h_pitch, int y_pitch, int blocks) {
  launch_next_and_wait();
  const bool backward = blockIdx.z;
  const int first_state_block = (columns + BLOCK - 1) / BLOCK, rows = 4 * units;
  const LaneColumn x_column(backward ? x1 : x0, x_pitch, columns, 0);
  const LaneColumn h_column(backward ? h1 : h0, h_pitch, units, first_state_block);
  const LaneInputs inputs = {{}, {}, x_column, h_column, first_state_block, evict_normal_policy()};
  multiply_rows(inputs, values, indices, rows, blocks, blocks, [=](float sum, int row, int vector) {
    const float gate = sum + (row < rows ? bias[backward * rows + row] : 0);
    const float activated = row % 4 == 2 ? tanhf(gate) : 1 / (1 + expf(-gate));
    float gates[4]; /* input, forget, cell, output */
#pragma unroll
    for (int i = 0; i < 4; i++)
      gates[i] = from_bits(__shfl_sync(FULL_MASK, to_bits(activated), row % LANES / 4 * 4 + i));
    if (row >= rows || row % 4) return;
    const long long unit = row / 4, at = ((long long)backward * VECTORS + vector) * units + unit;
    const float cell = gates[1] * (c ? value_to_float(c[at]) : 0) + gates[0] * gates[2];
    const Value state = to_value(gates[3] * tanhf(cell));
    c_next[at] = to_value(cell);
    (backward ? y1 : y0)[(long long)vector * y_pitch + unit] = state;
    if (h_last) h_last[at] = state;
  });
}
#endif
