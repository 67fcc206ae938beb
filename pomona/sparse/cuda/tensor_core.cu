/* The product of a packed balanced matrix with more vectors on an NVIDIA GPU's tensor cores; compiled at run time.
 *
 * Load sparse, compute dense. A warp takes 64 rows and four blocks at a time. Lane 4g + t loads the survivors of rows
 * 8g to 8g + 7 in block t, eight rows with one load, and expands them to shared memory that no other lane uses and that
 * lies in the lane's own bank. Wherever the survivors lie, lanes have no bank conflicts and do not wait for each other.
 * What a lane reads back is its part of a matrix for mma.m16n8k16: the sum over columns has no order, so that each of
 * the four lanes that share a row there may bring another block. Then the lane clears the few places it has written.
 *
 * Up to three survivors stay in registers. A place in shared memory is then a byte that says which of them belongs
 * there, as a selector for the instruction that picks bytes from two registers. More survivors are written as values.
 *
 * SLICE_K warps take turns at the steps of the same rows. All warps of a thread block share x, which comes through
 * shared memory, STAGE_STEPS steps at a time, arranged in the same way. Where there is room for all of it, that is one
 * stage, and a warp waits for no other until the end. SPLIT_K thread blocks share the columns; see split_sums.cuh.
 *
 * Macros: VALUE_TYPE of values and x (1 half, 2 bfloat16); KEPT survivors of a block; WIDTH of a block in x (16 or 32);
 * VECTOR_TILES of 8 vectors that a thread block multiplies; its WARPS; SLICE_K; SPLIT_K; CLUSTER; ROW_TILES of 16 rows
 * that are expanded at a time (1, 2 or 4); STAGE_STEPS; and STAGES of x in shared memory. With one stage, STAGE_STEPS
 * is all steps of a thread block, else a multiple of SLICE_K. x has n rows, `pitch` apart, of which the first `columns`
 * entries are valid, a multiple of 8.
 *
 * With CONV, x is images, channels × height × width each, and a vector is the input of one output position: threads
 * gather it on its way to shared memory. The macros KERNEL_H, KERNEL_W, STRIDE_H and so on give the geometry.
 */
#include "value_types.cuh"
#define THREADS (WARPS * LANES)
#define SLABS (WARPS / SLICE_K)                            /* of WARP_ROWS rows, in a thread block */
#include "packed_blocks.cuh"
#include "mma.cuh"

#define LINE_BYTES (4 * LANES)                             /* of one word of every lane */
#define USE_SELECTORS (KEPT <= 3)                          /* a place is a selector byte, else a value */
#define PLACE_BYTES (USE_SELECTORS ? 1 : 2)
#define ROW_WORDS (WIDTH * PLACE_BYTES / 4)                /* words of a row in a block */
#define LANE_WORDS (2 * ROW_TILES * ROW_WORDS)             /* words of shared memory of a lane */
#define VECTOR_PIECES (STAGE_STEPS * STEP_BLOCKS * PIECES) /* pieces of a vector in a stage */
#define STAGE_PIECES (VECTORS * VECTOR_PIECES)             /* pieces of x in a stage */
/* The place of a lane's piece in a line of a stage: swizzled, so that writing threads have no bank conflicts either. */
#define SWIZZLE(lane, part) (CONV ? (lane) ^ (lane) >> 3 : (lane) ^ (part) * (8 / PIECES))
#define RESIDENT_WARPS (VECTOR_TILES <= 2 ? 16 : 8)        /* of a multiprocessor, as registers allow */
#define RESIDENT_BLOCKS (RESIDENT_WARPS / WARPS ? RESIDENT_WARPS / WARPS : 1)

#if CONV
#define PIECES_AT_ONCE (THREADS / VECTORS) /* of a vector, which all threads gather at a time */

/* The output position whose input a thread gathers. */
struct InputLoader {
  const ImageGather gatherer;

  __device__ __forceinline__ void load_stage(int step, int end, uint4 *stage) const {
    const int vector = threadIdx.x % VECTORS;
    if (step >= end) return;
#pragma unroll
    /* Steps past the end are gathered too, so that no load waits for a branch: they have no taps. */
    for (int i = 0; i < VECTOR_PIECES; i += PIECES_AT_ONCE) {
      const int piece = i + threadIdx.x / VECTORS, stage_step = piece / (STEP_BLOCKS * PIECES);
      if (VECTOR_PIECES % PIECES_AT_ONCE && piece >= VECTOR_PIECES) break;
      const int part = piece % PIECES, lane = vector % 8 * STEP_BLOCKS + piece / PIECES % STEP_BLOCKS;
      stage[((stage_step * VECTOR_TILES + vector / 8) * PIECES + part) * LANES + SWIZZLE(lane, part)] =
          gatherer.gather(step * STEP_BLOCKS * PIECES + piece);
    }
  }
};
#else
#define VECTORS_AT_ONCE (THREADS / STEP_BLOCKS / PIECES) /* of which all threads copy a step at a time */

/* The piece of a step that a thread copies, from every VECTORS_AT_ONCE-th vector. */
struct InputLoader {
  const Value *x;
  int pitch, columns, vectors, piece; /* columns from the thread's first one to the end */

  __device__ __forceinline__ InputLoader(const Value *all, int all_columns, int pitch, int n) : pitch(pitch) {
    piece = threadIdx.x % (STEP_BLOCKS * PIECES);
    x = all + (long long)blockIdx.x * VECTORS * pitch + piece * 8;
    columns = all_columns - piece * 8, vectors = n - blockIdx.x * VECTORS;
  }

  __device__ __forceinline__ void load_stage(int step, int end, uint4 *stage) const {
    const int part = piece % PIECES, step_block = piece / PIECES;
    if (step < end)
#pragma unroll 8
      for (int i = 0; i < STAGE_STEPS * VECTORS; i += VECTORS_AT_ONCE) {
        const int at = i + threadIdx.x / (STEP_BLOCKS * PIECES), vector = at % VECTORS;
        const int column = (step + at / VECTORS) * STEP_BLOCKS * WIDTH;
        if (STAGE_STEPS * VECTORS % VECTORS_AT_ONCE && at >= STAGE_STEPS * VECTORS) break;
        uint4 *const to = stage + (at / 8 * PIECES + part) * LANES; /* in the order in which lanes will read it */
        copy_async(to + SWIZZLE(vector % 8 * STEP_BLOCKS + step_block, part), x + (long long)vector * pitch + column,
                   column < columns && vector < vectors);
      }
    commit_copies();
  }
};
#endif

/* Write the survivors of ROW_TILES tiles of 16 rows to their places in shared memory, or clear those places. */
__device__ __forceinline__ void expand(const Survivors &from, int tile, unsigned own, bool clear) {
#pragma unroll
  for (int row = 0; row < 2 * ROW_TILES; row++) {
    const int pair = tile + row / 2, shift = 16 * (row % 2);
    char *const to = (char *)memory + row * ROW_WORDS * LINE_BYTES;
#pragma unroll
    for (int s = 0; s < KEPT; s++) {
      const unsigned column = from.word[s / 3][pair] >> (shift + 5 * (s % 3)) & (WIDTH - 1);
      /* A word holds 4 / PLACE_BYTES columns, and the next word is LINE_BYTES further on. One product computes both
       * the word and the place in it, and the mask selects them. */
      const unsigned place = column * (PLACE_BYTES + LINE_BYTES * PLACE_BYTES / 4) &
                             ((ROW_WORDS - 1) * LINE_BYTES + 4 - PLACE_BYTES);
#if USE_SELECTORS /* bytes 3 and 2, 5 and 4, or 7 and 6, where `multiply_tiles` has the survivors; byte 0 is zero */
      *(unsigned char *)(to + (place | own)) = clear ? 0 : 0x32 + 0x22 * s;
#else
      *(Value *)(to + (place | own)) = clear ? 0 : from.value[s][pair] >> shift;
#endif
    }
  }
}

/* Multiply ROW_TILES tiles of 16 rows by all vectors. */
__device__ __forceinline__ void multiply_tiles(const unsigned *own, const Survivors &from, int first,
                                               const uint4 *stage, float (*sums)[VECTOR_TILES][4]) {
#if USE_SELECTORS
  /* of each row: zero and the first survivor; the second and the third */
  unsigned low[2 * ROW_TILES], high[2 * ROW_TILES];
#pragma unroll
  for (int row = 0; row < 2 * ROW_TILES; row++) {
    const int pair = first + row / 2;
    low[row] = pick_bytes(from.value[0][pair], 0, row % 2 ? 0x3244 : 0x1044);
    high[row] = pick_bytes(from.value[KEPT > 1 ? 1 : 0][pair], from.value[KEPT - 1][pair], row % 2 ? 0x7632 : 0x5410);
  }
#endif
#pragma unroll
  for (int part = 0; part < PIECES; part++) {
    uint4 b[VECTOR_TILES];
#pragma unroll
    for (int vector_tile = 0; vector_tile < VECTOR_TILES; vector_tile++)
      b[vector_tile] = stage[(vector_tile * PIECES + part) * LANES + SWIZZLE(threadIdx.x % LANES, part)];
    unsigned a[ROW_TILES][2][4]; /* of the columns from 8 · part on, four of both rows at a time */
#if USE_SELECTORS
    unsigned selector[ROW_TILES][2][2];
#pragma unroll
    for (int i = 0; i < ROW_TILES * 4; i++)
      selector[i / 4][i / 2 % 2][i % 2] = own[((i / 4 * 2 + i % 2) * ROW_WORDS + part * 2 + i / 2 % 2) * LANES];
#pragma unroll
    for (int i = 0; i < ROW_TILES * 8; i++) {
      const int row = i / 8 * 2 + i % 2;
      const unsigned both = selector[i / 8][i / 4 % 2][i % 2];
      a[i / 8][i / 4 % 2][i % 4] = pick_bytes(low[row], high[row], both >> 16 * (i / 2 % 2));
    }
#else
#pragma unroll
    for (int i = 0; i < ROW_TILES * 8; i++)
      a[i / 8][i / 4 % 2][i % 4] = own[((i / 8 * 2 + i % 2) * ROW_WORDS + part * 4 + i % 8 / 2) * LANES];
#endif
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2 * VECTOR_TILES; i++) {
      const int tile = i / VECTOR_TILES / 2, half = i / VECTOR_TILES % 2, vector_tile = i % VECTOR_TILES;
      const uint4 &column = b[vector_tile];
      mma(sums[tile][vector_tile], a[tile][half], half ? column.z : column.x, half ? column.w : column.y);
    }
  }
}

extern "C" __global__ void CLUSTER_ATTRIBUTE __launch_bounds__(THREADS, RESIDENT_BLOCKS)
tensor_core(const uint4 *values, const uint4 *indices, const Value *x, const void *bias, Value *y, float4 *partial_sums,
            unsigned *arrivals, SIZE_PARAMETERS) {
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const int step_block = lane % STEP_BLOCKS, octet = lane / STEP_BLOCKS;
  const int steps = (blocks + STEP_BLOCKS - 1) / STEP_BLOCKS, own_steps = (steps + SPLIT_K - 1) / SPLIT_K;
  const int begin = blockIdx.y * own_steps, end = min(begin + own_steps, steps);

  const PackedReader reader(values, indices, blockIdx.z * SLABS + warp / SLICE_K, rows, blocks, end);
  Survivors current, next;
  reader.load(begin + warp % SLICE_K, current);

  uint4 *const stages = memory + WARPS * LANE_WORDS * LANES / 4;
#if CONV
  const int position = blockIdx.x * VECTORS + threadIdx.x % VECTORS;
  const InputLoader loader{ImageGather(x, taps, position, image_size, height, width, out_width, out_size, n)};
#else
  const InputLoader loader(x, columns, pitch, n);
#endif
#pragma unroll
  for (int i = 0; i < (STAGES > 1 ? STAGES - 1 : 1); i++)
    loader.load_stage(begin + i * STAGE_STEPS, end, stages + i * STAGE_PIECES);
  unsigned *const own = (unsigned *)memory + warp * LANE_WORDS * LANES + lane;
#pragma unroll
  for (int i = 0; i < LANE_WORDS; i++) own[i * LANES] = 0;
  float sums[4][VECTOR_TILES][4] = {};

  for (int from = begin, stage = 0; from < end; from += STAGE_STEPS, stage = stage + 1 < STAGES ? stage + 1 : 0) {
    wait_for_copies();
    __syncthreads(); /* all see the stage, and all have finished with the previous one */
    const int free_stage = stage ? stage - 1 : STAGES - 1;
    if (STAGES > 1) loader.load_stage(from + (STAGES - 1) * STAGE_STEPS, end, stages + free_stage * STAGE_PIECES);
#pragma unroll 1
    for (int step = warp % SLICE_K; step < min(STAGE_STEPS, end - from); step += SLICE_K) {
      reader.load(from + step + SLICE_K, next);
      __syncwarp(); /* keeps the compiler from delaying the loads */
#pragma unroll
      for (int tile = 0; tile < 4; tile += ROW_TILES) {
        expand(current, tile, warp * LANE_WORDS * LINE_BYTES + lane * 4, false);
        multiply_tiles(own, current, tile, stages + stage * STAGE_PIECES + step * (STAGE_PIECES / STAGE_STEPS),
                       sums + tile);
        expand(current, tile, warp * LANE_WORDS * LINE_BYTES + lane * 4, true);
      }
      current = next;
    }
  }

  __syncthreads();
  store_warp_sums(sums);
#if CONV
  const int y_row = out_size, y_vector = 0;
#endif
  reduce_and_store(y, bias, partial_sums, arrivals, rows, n, y_row, y_vector, float_bias, relu);
}
