/* The product of a matrix packed with gaps with a few vectors on an NVIDIA GPU; compiled at run time.
 *
 * A slice is 32 rows, one for each lane of a warp, and has whole parts, which a warp loads at a time. A part has 16 ×
 * PART_CHUNKS survivors of each row: values[part][chunk][half][lane][8] and, in GAP_BITS bits each, the numbers of columns
 * between them, gaps[part][chunk][word][lane]. firsts[part][lane] is the column at which a lane starts. Padding is a
 * survivor of value zero. x is in shared memory, the entries of a column side by side, and threads gather the columns of
 * their survivors from there.
 *
 * Rows differ in length, so that all warps of the GPU share the parts evenly, whatever slices they belong to. A warp that
 * has all parts of a slice writes its sums to y. Warps of a thread block that share a slice add up their sums in shared
 * memory, and thread blocks in global memory, where the last one to arrive adds them up: always in the same order.
 *
 * Macros: VALUE_TYPE of values and x (0 float, 1 half, 2 bfloat16); VECTORS, a power of two, of which the first `vectors`
 * are there; GAP_BITS (2, 4, 6 or 8); PART_CHUNKS; PREFETCHED_PARTS, which a warp has loaded or is loading; WARPS of a
 * thread block; and MIN_BLOCKS, the thread blocks that a multiprocessor has to hold.
 *
 * Whatever gaps, firsts, starts, owners and lanes are, reads and writes stay inside the memory.
 */
#include "gathered_inputs.cuh"

#define CHUNK 16                          /* survivors that a lane has of a chunk */
#define GAP_WORDS (CHUNK * GAP_BITS / 32) /* of a lane and a chunk */
#define VALUE_WORDS (CHUNK * (int)sizeof(Value) / 4)
#define SLICE_SUMS (LANES * VECTORS)

#ifdef EMULATED
static float load_from_other_block(const float *from) { return *from; }
static void order_with_other_blocks() {}
#else
/* Order memory accesses before and after this for the whole GPU; cheaper than __threadfence. */
__device__ __forceinline__ void order_with_other_blocks() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
/* Load what another thread block has written, bypassing the L1 cache, which may hold an older value. */
__device__ __forceinline__ float load_from_other_block(const float *from) {
  float got;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(got) : "l"(from) : "memory");
  return got;
}
#endif

/* The arguments of the kernel. */
struct Product {
  const Value *values;
  const unsigned *gaps;
  const Word *firsts;
  const int *starts, *lanes;
  const void *bias;
  Value *y;
  float *exchange;    /* for each run, thread block and end of its range: sums of a slice */
  unsigned *arrivals; /* for each run and thread block */
  int rows, columns, slices, block_parts, longer_blocks, vectors, y_row, y_vector, float_bias, relu;
  const int *nonfinite_inputs;

  /* Return the first part of a thread block: all have `block_parts`, and the first `longer_blocks` one more. */
  __device__ __forceinline__ int first_part(int block) const {
    return block * block_parts + (block < longer_blocks ? block : longer_blocks);
  }

  /* Return the thread block that has a part. */
  __device__ __forceinline__ int block_of(int part) const {
    const int shorter = part - longer_blocks * (block_parts + 1);
    const int block = shorter < 0 ? part / (block_parts + 1) : longer_blocks + shorter / block_parts;
    return block < 0 ? 0 : block < gridDim.x ? block : gridDim.x - 1;
  }

  /* Write the sums of a lane's row to y; or NaN, where pruned weights meet an input that is infinite or NaN. */
  template <Term TERM> __device__ __forceinline__ void finish(int row, const float *sums) const {
    if (row < 0 || row >= rows) return;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      if (i >= vectors) break;
      Value *const to = y + ((long long)row * y_row + (long long)i * y_vector);
      if (TERM != NONFINITE_INPUT) *to = finish_sum(sums[i], bias, float_bias, row, relu);
      else if (sums[i] != nonfinite_inputs[i]) *to = to_value(from_bits(0x7FC00000u));
    }
  }
};

/* What a lane reads of a part, in loads that are all in flight together. */
struct Part {
  unsigned values[PART_CHUNKS][VALUE_WORDS], gaps[PART_CHUNKS][GAP_WORDS];
  int first;

  __device__ __forceinline__ void load(const Product &product, int part, CachePolicy policy) {
    const int lane = threadIdx.x % LANES;
    const long long chunk = (long long)part * PART_CHUNKS;
#pragma unroll
    for (int c = 0; c < PART_CHUNKS; c++) {
      const unsigned *const words = product.gaps + (chunk + c) * (GAP_WORDS * LANES) + lane;
#pragma unroll
      for (int i = 0; i < VALUE_WORDS / 4; i++) {
        /* a half has 8 values of each lane */
        const int half = i * 2 / (VALUE_WORDS / 4), rest = i % (VALUE_WORDS / 8);
        const uint4 *const at = (const uint4 *)(product.values + ((chunk + c) * 2 + half) * (8 * LANES) + lane * 8);
        unpack_words(load_streaming(at + rest, policy), values[c] + 4 * i);
      }
#pragma unroll
      for (int word = 0; word < GAP_WORDS; word++) gaps[c][word] = load_streaming(words + word * LANES, policy);
    }
    first = load_streaming(product.firsts + ((long long)part * LANES + lane), policy);
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

/* The slice that a warp works on. */
struct Slice {
  int number, first, end, row; /* its parts, and the lane's row */

  __device__ __forceinline__ void enter(const Product &product, int slice) {
    number = slice < 0 ? 0 : slice < product.slices ? slice : product.slices - 1;
    first = product.starts[number], end = product.starts[number + 1];
    row = product.lanes[number * LANES + threadIdx.x % LANES];
  }
};

/* Add the sums of a slice to those of other thread blocks. The last one to arrive writes them to y. */
template <Term TERM>
__device__ __forceinline__ void exchange_sums(const Product &product, const Slice &slice, float *sums) {
  const int lane = threadIdx.x % LANES, run = TERM == NONFINITE_INPUT, blocks = gridDim.x;
  const int from = product.block_of(slice.first), to = product.block_of(slice.end - 1);
  float *const exchange = product.exchange + (long long)run * blocks * 2 * SLICE_SUMS + lane;
  const bool is_first = blockIdx.x == from;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) exchange[(blockIdx.x * 2 + is_first) * SLICE_SUMS + i * LANES] = sums[i];
  order_with_other_blocks();
  __syncwarp();
  unsigned arrived = 0;
  if (lane == 0) arrived = atomicInc(product.arrivals + run * blocks + from, to - from); /* the last wraps to zero */
  arrived = __shfl_sync(FULL_MASK, arrived, 0);
  if (arrived != to - from) return;
  order_with_other_blocks();
#pragma unroll
  for (int i = 0; i < VECTORS; i++) sums[i] = 0;
  for (int block = from; block <= to; block++)
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      sums[i] += load_from_other_block(exchange + ((block * 2 + (block == from)) * SLICE_SUMS + i * LANES));
  product.finish<TERM>(slice.row, sums);
}

/* Where warps leave the sums of slices that they share: of the first slice of their parts, and of the last. */
struct Shared {
  float sums[2][WARPS][SLICE_SUMS];
  Slice slices[2][WARPS]; /* the number is -1 where there is none */
  int rows[2][WARPS][LANES];

  __device__ __forceinline__ void store(int which, const Slice &slice, const float *from) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (lane == 0) slices[which][warp] = slice;
    rows[which][warp][lane] = slice.row;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) sums[which][warp][i * LANES + lane] = from[i];
  }
};

/* Start the loads of the first parts. */
__device__ __forceinline__ void prefetch_parts(const Product &product, Part *loaded, int first, int end,
                                               CachePolicy policy) {
#pragma unroll
  for (int i = 0; i < PREFETCHED_PARTS; i++)
    if (first + i < end) loaded[i].load(product, first + i, policy);
}

/* Multiply the parts from `first` to `end`; the first ones are loaded already. All warps of a thread block call this. */
template <Term TERM>
__device__ __forceinline__ void multiply_parts(const Product &product, Part *loaded, Slice slice, int first, int end,
                                               Shared &shared, CachePolicy policy) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  if (lane < 2) shared.slices[lane][warp].number = -1;
  __syncwarp();
  float sums[VECTORS] = {};
  for (int from = first, which = 0; from < end; from += PREFETCHED_PARTS)
#pragma unroll
    for (int ahead = 0; ahead < PREFETCHED_PARTS; ahead++) {
      const int next = from + ahead + 1;
      if (next > end) break;
      loaded[ahead].add<TERM>(product.columns, sums);
      if (next - 1 + PREFETCHED_PARTS < end) loaded[ahead].load(product, next - 1 + PREFETCHED_PARTS, policy);
      if (next < end && next != slice.end) continue;
      if (slice.first >= first && slice.end <= end) product.finish<TERM>(slice.row, sums);
      else shared.store(which, slice, sums);
      if (next < end) slice.enter(product, slice.number + 1);
      which = 1;
#pragma unroll
      for (int i = 0; i < VECTORS; i++) sums[i] = 0;
    }
  __syncthreads();
  const int block_first = product.first_part(blockIdx.x), block_end = product.first_part(blockIdx.x + 1);
#pragma unroll
  for (int which = 0; which < 2; which++) {
    Slice own = shared.slices[which][warp];
    own.row = shared.rows[which][warp][lane];
    /* The first warp of the thread block that has parts of a slice adds up its sums. */
    if (own.number < 0 || (own.first < first && first != block_first)) continue;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) sums[i] = shared.sums[which][warp][i * LANES + lane];
    for (int other = warp + 1; other < WARPS; other++)
      if (shared.slices[0][other].number == own.number)
#pragma unroll
        for (int i = 0; i < VECTORS; i++) sums[i] += shared.sums[0][other][i * LANES + lane];
    if (own.first >= block_first && own.end <= block_end) product.finish<TERM>(own.row, sums);
    else exchange_sums<TERM>(product, own, sums);
  }
}

extern "C" __global__ void __launch_bounds__(WARPS *LANES, MIN_BLOCKS)
gap_gather(const Value *values, const unsigned *gaps, const Word *firsts, const int *starts, const int *owners,
           const int *lanes, const Value *x, const void *bias, Value *y, float *exchange, unsigned *arrivals, int rows,
           int columns, int slices, int block_parts, int longer_blocks, int vectors, int pitch, int y_row, int y_vector,
           int float_bias, int relu) {
  __shared__ Shared shared;
  __shared__ int nonfinite_inputs[VECTORS];
  const Product product = {values, gaps, firsts, starts, lanes, bias, y, exchange, arrivals, rows, columns, slices,
                           block_parts, longer_blocks, vectors, y_row, y_vector, float_bias, relu, nonfinite_inputs};
  const CachePolicy policy = evict_first_policy();
  const int warp = threadIdx.x / LANES;
  const int block_first = product.first_part(blockIdx.x), own_parts = product.first_part(blockIdx.x + 1) - block_first;
  const int first = block_first + warp * own_parts / WARPS, end = block_first + (warp + 1) * own_parts / WARPS;
  Part loaded[PREFETCHED_PARTS];
  prefetch_parts(product, loaded, first, end, policy);
  Slice slice = {};
  const int owner = first < end ? owners[first] : 0;
  const bool nonfinite = load_inputs(x, vectors, pitch, columns, columns + (CHUNK << GAP_BITS), nonfinite_inputs);
  slice.enter(product, owner); /* not before, so that nothing waits for the owner */
  if (!nonfinite) {
    multiply_parts<PRODUCT>(product, loaded, slice, first, end, shared, policy);
    return;
  }
  multiply_parts<CAREFUL_PRODUCT>(product, loaded, slice, first, end, shared, policy);
  __syncthreads();
  prefetch_parts(product, loaded, first, end, policy);
  multiply_parts<NONFINITE_INPUT>(product, loaded, slice, first, end, shared, policy);
}
