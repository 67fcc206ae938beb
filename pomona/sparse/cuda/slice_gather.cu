/* The product of an unstructured packed matrix with a few vectors on an NVIDIA GPU; compiled at run time.
 *
 * A slice is 16 rows, whose survivors lie side by side: values[step][row], with their columns in indices[step][row]. A
 * thread reads 16 bytes of values, which are THREAD_ROWS rows of a step, and a warp WARP_STEPS steps at a time. x is in
 * shared memory, the entries of a column side by side, and threads gather the columns of their survivors from there.
 * SLICE_WARPS warps share the steps of a slice and add up their sums at the end, without atomics. A thread block reads x
 * once and works on one slice after another.
 *
 * Macros: VALUE_TYPE of values and x (0 float, 1 half, 2 bfloat16); VECTORS, a power of two, of which the first `vectors`
 * are there; WARPS of a thread block; SLICE_WARPS; UNROLL, the number of steps that a thread loads at a time; and
 * MIN_BLOCKS, the thread blocks that a multiprocessor has to hold.
 *
 * Whatever starts, indices and lanes are, reads and writes stay inside the memory.
 */
#include "gathered_inputs.cuh"

#define SLICE_ROWS 16
#define THREAD_ROWS (16 / (int)sizeof(Value))
#define STEP_THREADS (SLICE_ROWS / THREAD_ROWS)
#define WARP_STEPS (LANES / STEP_THREADS)
#define TEAMS (WARPS / SLICE_WARPS) /* slices that a thread block works on at a time */
#define SLICE_SUMS (SLICE_ROWS * VECTORS)

/* The survivors that a thread has of one step. */
struct Survivors {
  unsigned values[4], columns[THREAD_ROWS / 2];

  __device__ __forceinline__ void load(const Value *from_values, const Word *from_indices, long long place,
                                       CachePolicy policy) {
    unpack_words(load_streaming((const uint4 *)(from_values + place), policy), values);
#if VALUE_TYPE == 0
#pragma unroll
    for (int i = 0; i < THREAD_ROWS / 2; i++)
      columns[i] = load_streaming((const unsigned *)(from_indices + place) + i, policy);
#else
    unpack_words(load_streaming((const uint4 *)(from_indices + place), policy), columns);
#endif
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = 0;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS / 2; i++) columns[i] = 0;
  }

  __device__ __forceinline__ unsigned bits(int row) const {
    return THREAD_ROWS == 4 ? values[row] : values[row / 2] >> 16 * (row % 2) & 0xFFFF;
  }

  __device__ __forceinline__ int column(int row) const { return columns[row / 2] >> 16 * (row % 2) & 0xFFFF; }
};

/* Add the terms of one step to the sums of a thread's rows. */
template <Term TERM>
__device__ __forceinline__ void add_step(const Survivors &survivors, int last_column, float (*sums)[VECTORS]) {
#pragma unroll
  for (int row = 0; row < THREAD_ROWS; row++) {
    const int column = survivors.column(row);
    add_terms<TERM>(survivors.bits(row), column < last_column ? column : last_column, sums[row]);
  }
}

/* Write the sums of this warp's part of a slice to shared memory; `first` and `end` are the steps of the slice. */
template <Term TERM>
__device__ __forceinline__ void sum_part(const Value *values, const Word *indices, long long first, long long end,
                                         int last_column, float *warp_sums) {
  const CachePolicy policy = evict_first_policy();
  const int lane = threadIdx.x % LANES, member = threadIdx.x / LANES % SLICE_WARPS, stride = SLICE_WARPS * WARP_STEPS;
  const int own_rows = lane % STEP_THREADS * THREAD_ROWS;
  float sums[THREAD_ROWS][VECTORS] = {};
  for (long long step = first + member * WARP_STEPS + lane / STEP_THREADS; step < end; step += UNROLL * stride) {
    Survivors survivors[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      if (step + u * stride < end)
        survivors[u].load(values, indices, (step + u * stride) * SLICE_ROWS + own_rows, policy);
      else
        survivors[u].clear();
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (u == 0 || step + u * stride < end) add_step<TERM>(survivors[u], last_column, sums);
  }
#pragma unroll
  for (int i = 0; i < THREAD_ROWS * VECTORS; i++) {
    float sum = sums[i / VECTORS][i % VECTORS];
#pragma unroll
    for (int other = STEP_THREADS; other < LANES; other *= 2)
      sum += from_bits(__shfl_sync(FULL_MASK, to_bits(sum), lane ^ other));
    if (lane < STEP_THREADS) warp_sums[own_rows * VECTORS + i] = sum;
  }
}

/* Return one sum of a slice over all warps that have parts of it. */
__device__ __forceinline__ float add_parts(const float (*warp_sums)[SLICE_SUMS], int team, int place) {
  float sum = 0;
#pragma unroll
  for (int part = 0; part < SLICE_WARPS; part++) sum += warp_sums[team * SLICE_WARPS + part][place];
  return sum;
}

extern "C" __global__ void __launch_bounds__(WARPS *LANES, MIN_BLOCKS)
slice_gather(const Value *values, const Word *indices, const long long *starts, const int *lanes, const Value *x,
             const void *bias, Value *y, int rows, int columns, int slices, int steps, int vectors, int pitch, int y_row,
             int y_vector, int float_bias, int relu) {
  __shared__ float warp_sums[WARPS][SLICE_SUMS], warp_counts[WARPS][SLICE_SUMS];
  __shared__ int nonfinite_inputs[VECTORS];
  const int warp = threadIdx.x / LANES, team = warp / SLICE_WARPS;
  const bool nonfinite = load_inputs(x, vectors, pitch, columns, columns, nonfinite_inputs);
  for (int first_slice = blockIdx.x * TEAMS; first_slice < slices; first_slice += gridDim.x * TEAMS) {
    const int slice = first_slice + team;
    long long first = 0, end = 0;
    if (slice < slices) {
      first = starts[slice] < 0 ? 0 : starts[slice];
      end = starts[slice + 1] < steps ? starts[slice + 1] : steps;
    }
    if (!nonfinite) {
      sum_part<PRODUCT>(values, indices, first, end, columns - 1, warp_sums[warp]);
    } else {
      sum_part<CAREFUL_PRODUCT>(values, indices, first, end, columns - 1, warp_sums[warp]);
      sum_part<NONFINITE_INPUT>(values, indices, first, end, columns - 1, warp_counts[warp]);
    }
    __syncthreads();
    for (int place = threadIdx.x; place < TEAMS * SLICE_SUMS; place += WARPS * LANES) {
      const int own_team = place / SLICE_SUMS, own_slice = first_slice + own_team, vector = place % VECTORS;
      if (own_slice >= slices || vector >= vectors) continue;
      const int row = lanes[own_slice * SLICE_ROWS + place % SLICE_SUMS / VECTORS];
      if (row < 0 || row >= rows) continue;
      float sum = add_parts(warp_sums, own_team, place % SLICE_SUMS);
      /* A pruned weight times inf or NaN is NaN in the dense product. */
      if (nonfinite && add_parts(warp_counts, own_team, place % SLICE_SUMS) != nonfinite_inputs[vector])
        sum = from_bits(0x7FC00000u);
      y[(long long)row * y_row + (long long)vector * y_vector] = finish_sum(sum, bias, float_bias, row, relu);
    }
    __syncthreads();
  }
}
