/* The product of a matrix packed with bitmaps with vectors on an NVIDIA GPU's tensor cores; compiled at run time.
 *
 * Load sparse, compute dense. A slab is 64 rows, and a step 64 columns of it: four tiles of 16 rows. Lane 4g + t has 16
 * columns, from 16t on, of rows 8g to 8g + 7, two of them in each tile: the sum over columns has no order, so that
 * these are its part of a matrix for four mma.m16n8k16. A bit says whether a weight was kept. The bits of a lane are
 * words[slab][step][lane][tile], bit 8s + 4h + j for column 4s + j of row h of the two. The values of a step lie one
 * after another by tile, h, s, lane and j: 32 lanes that read up to four values each find them within 32 banks.
 *
 * A lane has to know how many values other lanes have before its own. The tensor cores count them: a 16-bit integer
 * below 2048 is a half of that many 2^-24, and sums of these are exact.
 *
 * Values and bits come through shared memory, STAGES steps of a warp. The x of a thread block stays there as a whole.
 * SLICE_K warps take turns at the steps of the same rows, and SPLIT_K thread blocks share the columns; see
 * split_sums.cuh.
 *
 * Macros: VALUE_TYPE of values and x (1 half, 2 bfloat16); VECTOR_TILES of 8 vectors that a thread block multiplies; its
 * WARPS; SLICE_K; SPLIT_K; CLUSTER; and STAGES, at least 2. x has n rows, `pitch` apart, of which the first `columns`
 * entries are valid, a multiple of 8. starts[slab][step] are the places of a step's first value, and a stage has
 * `stage_pieces` of 16 bytes.
 *
 * Whatever words and starts are, reads and writes stay inside the memory.
 */
#include "value_types.cuh"
#define THREADS (WARPS * LANES)
#define SLABS (WARPS / SLICE_K) /* of WARP_ROWS rows, in a thread block */
#include "split_sums.cuh"
#include "mma.cuh"

#define ROW_TILES 4             /* of a slab */
#define STEP_COLUMNS 64
#define WORD_PIECES LANES       /* pieces, of 16 bytes, of the bits of a step */
#define STEP_PIECES (STEP_COLUMNS / 8)
#define RESIDENT_WARPS (VECTOR_TILES <= 2 ? 16 : 8) /* of a multiprocessor, as registers allow */
#define RESIDENT_BLOCKS (RESIDENT_WARPS / WARPS ? RESIDENT_WARPS / WARPS : 1)

#ifndef EMULATED
/* Add the product of halves to d, 16 × 8, two in a register. The left factor has 8 columns. */
__device__ __forceinline__ void mma_half(unsigned *d, unsigned a0, unsigned a1, unsigned b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a0), "r"(a1), "r"(b));
}
/* The same, where it has 16 columns, and zeros in half of them: 8 rows each are multiplied with a factor of their own. */
__device__ __forceinline__ void mma_half_twice(unsigned *d, unsigned a, const unsigned *b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %3, %2}, {%4, %5}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a), "r"(0), "r"(b[0]), "r"(b[1]));
}

/* Load the next 16 bits of shared memory to the lower, or to the upper, half of a register. With a `one` that the compiler
 * does not know, the address grows in the units for products, which are less busy than those for sums. */
__device__ __forceinline__ void load_low(unsigned &to, unsigned &next, unsigned one) {
  asm volatile("ld.shared.u16 %0, [%1];\nmad.lo.u32 %1, %2, 2, %1;" : "+r"(to), "+r"(next) : "r"(one) : "memory");
}
__device__ __forceinline__ void load_high(unsigned &to, unsigned &next, unsigned one) {
  asm volatile("{\n.reg .b32 got;\nld.shared.u16 got, [%1];\nmad.lo.u32 %1, %2, 2, %1;\n"
               "prmt.b32 %0, %0, got, 0x5410;\n}"
               : "+r"(to), "+r"(next)
               : "r"(one)
               : "memory");
}
__device__ __forceinline__ unsigned shared_address(const void *at) { return (unsigned)__cvta_generic_to_shared(at); }
#endif

/* Return two halves that are `one` or zero. */
__device__ __forceinline__ unsigned pack_halves(unsigned one, bool low, bool high) {
  return (low ? one : 0) | (high ? one << 16 : 0);
}

/* Constant matrices, as registers of this lane, by which the numbers of values of lanes become the bytes of the values
 * that precede a lane's own: of lanes with the same g and a lower t, and of lanes with a lower g. */
struct Counter {
  unsigned same, lower_g, lower_t;

  __device__ __forceinline__ Counter() {
    const int g = threadIdx.x % LANES / 4, t = threadIdx.x % 4;
    const unsigned one = 0x3C00, two = 0x4000;
    same = pack_halves(one, g % 2 == 0, g % 2 == 1);
    lower_g = pack_halves(two, 2 * t < g, 2 * t + 1 < g);
    lower_t = pack_halves(two, g % 2 == 0 && t < g / 2, g % 2 == 1 && t < g / 2);
  }

  /* Add to `places`, of s = 0 to 3, two in a word; given the numbers of values of each s, in the same way. */
  __device__ __forceinline__ void add_preceding(const unsigned *counts, unsigned *places) const {
    unsigned of_quad[2] = {}; /* of all lanes with the same g, by s, with g as the column */
    mma_half_twice(of_quad, same, counts);
    mma_half(places, counts[0], counts[1], lower_t);
    mma_half_twice(places, lower_g, of_quad);
  }
};

/* Return the number of bits in each four bits of a word. */
__device__ __forceinline__ unsigned count_nibbles(unsigned word) {
  const unsigned pairs = word - (word >> 1 & 0x55555555);
  return (pairs & 0x33333333) + (pairs >> 2 & 0x33333333);
}

/* The places of a step's values. */
struct Range {
  int first, last;
};

/* The part of the packed matrix that a warp multiplies. */
struct StepReader {
  const uint4 *values, *words;
  const int *starts;
  int end, count, stage_pieces; /* steps; all values */

  /* Steps from `end` on are empty. */
  __device__ __forceinline__ Range find(int step) const {
    Range range = {};
    if (step < end) range.first = starts[step], range.last = starts[step + 1];
    return range;
  }

  /* Start the copies of a step to a stage. */
  __device__ __forceinline__ void copy(int step, Range range, uint4 *stage) const {
    const int lane = threadIdx.x % LANES;
    range.first = min(max(range.first, 0), count), range.last = min(max(range.last, range.first), count);
    const int first = range.first / 8, pieces = min((range.last + 7) / 8 - first, stage_pieces - WORD_PIECES);
    copy_async(stage + lane, words + ((long long)step * LANES + lane) * (step < end), step < end);
    for (int piece = lane; piece < pieces; piece += LANES)
      copy_async(stage + WORD_PIECES + piece, values + first + piece, true);
    commit_copies();
  }
};

/* Copy the columns of a thread block's vectors to shared memory, in the order in which lanes read them. */
__device__ __forceinline__ void copy_inputs(const Value *x, int columns, int pitch, int n, int begin, int end, uint4 *to) {
  const int first_vector = blockIdx.x * VECTORS;
#pragma unroll 4
  for (int i = threadIdx.x; i < (end - begin) * VECTORS * STEP_PIECES; i += THREADS) {
    const int piece = i % STEP_PIECES, vector = i / STEP_PIECES % VECTORS, step = i / STEP_PIECES / VECTORS;
    const int column = (begin + step) * STEP_COLUMNS + piece * 8;
    const bool valid = column < columns && first_vector + vector < n;
    uint4 *const at = to + ((step * VECTOR_TILES + vector / 8) * 2 + piece % 2) * LANES + vector % 8 * 4 + piece / 2;
    copy_async(at, x + (valid ? (long long)(first_vector + vector) * pitch + column : 0), valid);
  }
  commit_copies();
}

/* Multiply a step by all vectors; `lead` is the place of its first value in a stage. */
__device__ __forceinline__ void multiply_step(const uint4 *stage, int lead, const uint4 *x, const Counter &counter,
                                              unsigned one, float (*sums)[VECTOR_TILES][4]) {
  const int lane = threadIdx.x % LANES;
  const uint4 all = stage[lane];
  const unsigned words[ROW_TILES] = {all.x, all.y, all.z, all.w};
  uint4 b[VECTOR_TILES][2];
#pragma unroll
  for (int i = 0; i < VECTOR_TILES * 2; i++) b[i / 2][i % 2] = x[i * LANES + lane];
  unsigned first = shared_address(stage + WORD_PIECES) + lead * 2;
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; tile++) {
    const unsigned word = words[tile], nibbles = count_nibbles(word);
    unsigned a[4][4]; /* by s, for an mma each */
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const unsigned bytes = nibbles >> 4 * h & 0x0F0F0F0F; /* the number of values by s */
      const unsigned totals = __reduce_add_sync(FULL_MASK, bytes);
      const unsigned counts[2] = {pick_bytes(bytes, 0, 0x4140), pick_bytes(bytes, 0, 0x4342)};
      /* in bytes, after those of all lanes with a lower s */
      unsigned places[2] = {(totals & 0xFF) << 17,
                            pick_bytes(__dp4a(totals, 0x0202u, 0u), __dp4a(totals, 0x020202u, 0u), 0x5410)};
      counter.add_preceding(counts, places);
#pragma unroll
      for (int s = 0; s < 4; s++) {
        const int bit = 8 * s + 4 * h;
        unsigned next = first + (places[s / 2] >> 16 * (s % 2) & 0xFFFF);
        a[s][h] = a[s][2 + h] = 0;
        if (word >> bit & 1) load_low(a[s][h], next, one);
        if (word >> bit & 2) load_high(a[s][h], next, one);
        if (word >> bit & 4) load_low(a[s][2 + h], next, one);
        if (word >> bit & 8) load_high(a[s][2 + h], next, one);
      }
      first = __dp4a(totals, 0x02020202u, first);
    }
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
      for (int i = 0; i < VECTOR_TILES; i++) {
        const uint4 &columns = b[i][s / 2];
        mma(sums[tile][i], a[s], s % 2 ? columns.z : columns.x, s % 2 ? columns.w : columns.y);
      }
  }
}

extern "C" __global__ void CLUSTER_ATTRIBUTE __launch_bounds__(THREADS, RESIDENT_BLOCKS)
bitmap_tiles(const uint4 *values, const uint4 *words, const int *starts, const Value *x, const void *bias, Value *y,
             float4 *partial_sums, unsigned *arrivals, int rows, int columns, int pitch, int steps, int count,
             int stage_pieces, int n, int y_row, int y_vector, int float_bias, int relu) {
  const int warp = threadIdx.x / LANES, slab = blockIdx.z * SLABS + warp / SLICE_K;
  const int own_steps = (steps + SPLIT_K - 1) / SPLIT_K;
  const int begin = min(blockIdx.y * own_steps, steps), end = min(begin + own_steps, steps);
  const bool has_rows = slab * WARP_ROWS < rows;
  const long long first_step = has_rows ? (long long)slab * steps : 0;
  const StepReader reader = {values, words + first_step * LANES, starts + first_step, has_rows ? end : 0, count,
                             stage_pieces};
  uint4 *const stages = memory + warp * STAGES * stage_pieces;
  uint4 *const inputs = memory + WARPS * STAGES * stage_pieces;
  int step = begin + warp % SLICE_K;
  Range ranges[STAGES]; /* of the steps that are in a stage, and of the next one */
#pragma unroll
  for (int i = 0; i < STAGES; i++) ranges[i] = reader.find(step + i * SLICE_K);
  copy_inputs(x, columns, pitch, n, begin, end, inputs);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) reader.copy(step + i * SLICE_K, ranges[i], stages + i * stage_pieces);
  const Counter counter;
  const unsigned one = min(n, 1);
  float sums[ROW_TILES][VECTOR_TILES][4] = {};
  wait_for_copies();
  __syncthreads(); /* all see x */
  for (int stage = 0; step < reader.end; step += SLICE_K, stage = stage + 1 < STAGES ? stage + 1 : 0) {
    wait_for_copies();
    __syncwarp(); /* all see the stage, and all have finished with the previous one */
    const int free_stage = stage ? stage - 1 : STAGES - 1, lead = ranges[0].first & 7;
    reader.copy(step + (STAGES - 1) * SLICE_K, ranges[STAGES - 1], stages + free_stage * stage_pieces);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) ranges[i] = ranges[i + 1];
    ranges[STAGES - 1] = reader.find(step + STAGES * SLICE_K);
    multiply_step(stages + stage * stage_pieces, lead, inputs + (step - begin) * VECTOR_TILES * 2 * LANES, counter, one, sums);
  }
  wait_for_all_copies();
  __syncthreads();
  store_warp_sums(sums);
  reduce_and_store(y, bias, partial_sums, arrivals, rows, n, y_row, y_vector, float_bias, relu);
}
