/* The product of a matrix packed with gaps with a few vectors on an NVIDIA GPU; compiled at run time.
 *
 * A slice is 16 rows and a part of it, which a warp loads at a time, PART_CHUNKS chunks. A chunk is 16 survivors of each
 * lane: values[chunk][half][lane][8] and, in GAP_BITS bits each, the numbers of columns between them,
 * gaps[chunk][word][lane]. Lanes i and 16 + i have consecutive survivors of row i, and firsts[part][lane] is the column
 * at which a lane starts. Padding is a survivor of value zero. x is in shared memory, the entries of a column side by
 * side, and threads gather the columns of their survivors from there.
 *
 * A thread block works on SLICES slices at a time, whose parts its warps share evenly, and adds up the sums of its warps
 * without atomics. Slices are sorted by length: a thread block takes them from the front and the back of the order.
 *
 * Macros: VALUE_TYPE of values and x (0 float, 1 half, 2 bfloat16); VECTORS, a power of two, of which the first `vectors`
 * are there; GAP_BITS (2, 4, 6 or 8); PART_CHUNKS; SLICES; WARPS of a thread block; and MIN_BLOCKS, the thread blocks
 * that a multiprocessor has to hold.
 *
 * Whatever gaps, firsts, starts and lanes are, reads and writes stay inside the memory.
 */
#include "gathered_inputs.cuh"

#define SLICE_ROWS 16
#define CHUNK 16                         /* survivors that a lane has of a chunk */
#define GAP_WORDS (CHUNK * GAP_BITS / 32) /* of a lane and a chunk */
#define VALUE_WORDS (CHUNK * (int)sizeof(Value) / 4)
#define SLICE_SUMS (SLICE_ROWS * VECTORS)

/* The parts of the slices that a thread block works on. Lane k of each warp has slice k. */
struct BlockSlices {
  int slice, chunk, chunks, parts, end; /* its first chunk, numbers of chunks and parts, and parts up to its end */
  int total;                            /* parts of all slices */

  __device__ __forceinline__ BlockSlices(const int *starts, int slices, int all_chunks, int round) {
    const int lane = threadIdx.x % LANES, turn = round * SLICES + lane;
    const int place = turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x; /* from the front and from the back */
    chunk = chunks = 0;
    slice = lane < SLICES ? turn * gridDim.x + place : slices;
    if (slice < slices) {
      const int from = starts[slice], to = starts[slice + 1];
      chunk = from < 0 ? 0 : from;
      chunks = (to < all_chunks ? to : all_chunks) - chunk;
      if (chunks < 0) chunks = 0;
    }
    parts = end = (chunks + PART_CHUNKS - 1) / PART_CHUNKS;
#pragma unroll
    for (int distance = 1; distance < SLICES; distance *= 2) {
      const int before = __shfl_sync(FULL_MASK, end, (lane - distance) & (LANES - 1));
      if (lane >= distance) end += before;
    }
    total = __shfl_sync(FULL_MASK, end, SLICES - 1);
  }

  /* Return the lane that has the slice of a part. */
  __device__ __forceinline__ int find_slice(int part) const {
    return __popc(__ballot_sync(FULL_MASK, threadIdx.x % LANES < SLICES && end <= part));
  }
};

/* What a lane reads of a part of a slice, in loads that are all in flight together. */
struct Part {
  unsigned values[PART_CHUNKS][VALUE_WORDS], gaps[PART_CHUNKS][GAP_WORDS];
  int first, chunks;

  __device__ __forceinline__ void load(const BlockSlices &block, int owner, int part, const Value *from_values,
                                       const unsigned *from_gaps, const Word *firsts, CachePolicy policy) {
    const int lane = threadIdx.x % LANES;
    const int start = __shfl_sync(FULL_MASK, block.chunk, owner), slice = __shfl_sync(FULL_MASK, block.slice, owner);
    const int before = __shfl_sync(FULL_MASK, block.end - block.parts, owner);
    const int offset = (part - before) * PART_CHUNKS;
    const long long chunk = start + offset;
    chunks = __shfl_sync(FULL_MASK, block.chunks, owner) - offset;
    if (chunks > PART_CHUNKS) chunks = PART_CHUNKS;
    first = load_streaming(firsts + ((long long)(start / PART_CHUNKS + slice + part - before) * LANES + lane), policy);
#pragma unroll
    for (int c = 0; c < PART_CHUNKS; c++)
      if (c < chunks) {
        const unsigned *const words = from_gaps + (chunk + c) * (GAP_WORDS * LANES) + lane;
#pragma unroll
        for (int word = 0; word < GAP_WORDS; word++) gaps[c][word] = load_streaming(words + word * LANES, policy);
#pragma unroll
        for (int i = 0; i < VALUE_WORDS / 4; i++) {
          /* a half has 8 values of each lane */
          const int half = i * 2 / (VALUE_WORDS / 4), rest = i % (VALUE_WORDS / 8);
          const uint4 *const at = (const uint4 *)(from_values + ((chunk + c) * 2 + half) * (8 * LANES) + lane * 8);
          unpack_words(load_streaming(at + rest, policy), values[c] + 4 * i);
        }
      }
  }

  __device__ __forceinline__ unsigned bits(int c, int i) const {
    return sizeof(Value) == 4 ? values[c][i] : values[c][i / 2] >> 16 * (i % 2) & 0xFFFF;
  }

  __device__ __forceinline__ int gap(int c, int i) const {
    const int word = i * GAP_BITS / 32, shift = i * GAP_BITS % 32;
    unsigned found = gaps[c][word] >> shift;
    if (shift + GAP_BITS > 32) found |= gaps[c][(word + 1) % GAP_WORDS] << (32 - shift);
    return found & ((1 << GAP_BITS) - 1);
  }

  /* Add the terms of the part to the sums of the lane's row. */
  template <Term TERM> __device__ __forceinline__ void add(int columns, float *sums) const {
    int column = first;
#pragma unroll
    for (int c = 0; c < PART_CHUNKS; c++) {
      if (c >= chunks) break;
      /* Zeros follow the inputs in shared memory, as many as a chunk can go past the last column. */
      column = column < columns ? column : columns;
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        column += gap(c, i);
        add_terms<TERM>(bits(c, i), column + i, sums);
      }
      column += CHUNK;
    }
  }
};

/* Add up the sums of the two lanes of each row, write them to shared memory, and clear them. */
__device__ __forceinline__ void store_sums(float *sums, float *to) {
  const int lane = threadIdx.x % LANES;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const float sum = sums[i] + from_bits(__shfl_sync(FULL_MASK, to_bits(sums[i]), lane ^ SLICE_ROWS));
    if (lane < SLICE_ROWS) to[lane * VECTORS + i] = sum;
    sums[i] = 0;
  }
}

/* The arrays of the packed matrix. */
struct PackedMatrix {
  const Value *values;
  const unsigned *gaps;
  const Word *firsts;
};

/* Write the sums of this warp's parts to shared memory, one for each row and vector of the slices. The first part is
 * loaded already. */
template <Term TERM>
__device__ __forceinline__ void sum_parts(const BlockSlices &block, const PackedMatrix &matrix, Part &loaded, int first,
                                          int end, int columns, float *warp_sums, CachePolicy policy) {
  for (int i = threadIdx.x % LANES; i < SLICES * SLICE_SUMS; i += LANES) warp_sums[i] = 0;
  __syncwarp();
  float sums[VECTORS] = {};
  int owner = block.find_slice(first);
  for (int part = first; part < end;) {
    loaded.template add<TERM>(columns, sums);
    if (++part == end) break;
    const int next = block.find_slice(part);
    loaded.load(block, next, part, matrix.values, matrix.gaps, matrix.firsts, policy);
    if (next != owner) store_sums(sums, warp_sums + owner * SLICE_SUMS);
    owner = next;
  }
  if (first < end) store_sums(sums, warp_sums + owner * SLICE_SUMS);
}

/* Return one sum over all warps. */
__device__ __forceinline__ float add_warps(const float (*warp_sums)[SLICES * SLICE_SUMS], int place) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += warp_sums[warp][place];
  return sum;
}

extern "C" __global__ void __launch_bounds__(WARPS *LANES, MIN_BLOCKS)
gap_gather(const Value *values, const unsigned *gaps, const Word *firsts, const int *starts, const int *lanes,
           const Value *x, const void *bias, Value *y, int rows, int columns, int slices, int chunks, int vectors,
           int pitch, int y_row, int y_vector, int float_bias, int relu) {
  __shared__ float warp_sums[WARPS][SLICES * SLICE_SUMS], warp_counts[WARPS][SLICES * SLICE_SUMS];
  __shared__ int nonfinite_inputs[VECTORS];
  const PackedMatrix matrix = {values, gaps, firsts};
  const CachePolicy policy = evict_first_policy();
  const int warp = threadIdx.x / LANES, rounds = (slices + SLICES * gridDim.x - 1) / (SLICES * gridDim.x);
  bool nonfinite = false;
  for (int round = 0; round < rounds; round++) {
    const BlockSlices block(starts, slices, chunks, round);
    const int first = (long long)warp * block.total / WARPS, end = (long long)(warp + 1) * block.total / WARPS;
    Part loaded;
    if (first < end) loaded.load(block, block.find_slice(first), first, values, gaps, firsts, policy);
    if (round == 0)
      nonfinite = load_inputs(x, vectors, pitch, columns, columns + (CHUNK << GAP_BITS), nonfinite_inputs);
    if (!nonfinite) {
      sum_parts<PRODUCT>(block, matrix, loaded, first, end, columns, warp_sums[warp], policy);
    } else {
      sum_parts<CAREFUL_PRODUCT>(block, matrix, loaded, first, end, columns, warp_sums[warp], policy);
      if (first < end) loaded.load(block, block.find_slice(first), first, values, gaps, firsts, policy);
      sum_parts<NONFINITE_INPUT>(block, matrix, loaded, first, end, columns, warp_counts[warp], policy);
    }
    __syncthreads();
    for (int base = 0; base < SLICES * SLICE_SUMS; base += WARPS * LANES) {
      const int place = base + threadIdx.x, vector = place % VECTORS;
      const int slice = __shfl_sync(FULL_MASK, block.slice, place / SLICE_SUMS);
      if (place >= SLICES * SLICE_SUMS || slice >= slices || vector >= vectors) continue;
      const int row = lanes[slice * SLICE_ROWS + place % SLICE_SUMS / VECTORS];
      if (row < 0 || row >= rows) continue;
      float sum = add_warps(warp_sums, place);
      /* A pruned weight times inf or NaN is NaN in the dense product. */
      if (nonfinite && add_warps(warp_counts, place) != nonfinite_inputs[vector]) sum = from_bits(0x7FC00000u);
      y[(long long)row * y_row + (long long)vector * y_vector] = finish_sum(sum, bias, float_bias, row, relu);
    }
    __syncthreads();
  }
}
