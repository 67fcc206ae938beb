/* The product of a packed balanced matrix with more vectors on a Hopper GPU, where the tensor cores read both factors
 * from shared memory; compiled at run time.
 *
 * Load sparse, compute dense. A warp takes 64 rows and four blocks at a time. Lane 4g + t loads the survivors of rows
 * 8g to 8g + 7 in block t, and expands them to shared memory in the lane's own bank: the core matrix of wgmma, 8 rows
 * of 16 bytes, is 128 bytes, of which a lane owns four, row g and two columns. The sum over columns has no order, so
 * that these are two columns of block t. Later the lane clears the few places it has written.
 *
 * The four warps of a warpgroup have 256 rows, four tiles of 64: the qth row of a lane of warp w is in tile q / 2,
 * among the rows that wgmma assigns to w. With SWAP_OPERANDS, x is the factor of which wgmma takes 64 rows, and the
 * survivors are the other one: they are then read once for 64 vectors. One of WARPGROUPS expands while another one
 * multiplies.
 *
 * x comes through STAGES of a step each. It is arranged in the same way by arrange_input.cu, so that one thread of the
 * last four warps brings a stage by one copy. SPLIT_K thread blocks share the columns; see split_sums.cuh.
 *
 * Macros: VALUE_TYPE of values and x (1 half, 2 bfloat16); KEPT survivors of a block; WIDTH of a block in x (16 or 32);
 * VECTOR_TILES of 8 vectors that a thread block multiplies; its WARPS and WARPGROUPS; SPLIT_K; CLUSTER; SWAP_OPERANDS
 * (then VECTOR_TILES is 8); STAGES; and the operands of wgmma as text: WGMMA_N, WGMMA_SUM_REGISTERS,
 * WGMMA_SUM_OPERANDS, WGMMA_A and WGMMA_B. The VECTORS vectors of a thread block are `pitch` values of x. With
 * EARLY_LAUNCH, the kernel starts before arrange_input.cu has ended.
 *
 * With CONV, x is images, and a vector is the input of one output position, as in tensor_core.cu: all lanes of the last
 * four warps gather it. VECTOR_TILES is then a power of two.
 */
#ifndef EARLY_LAUNCH
#define EARLY_LAUNCH 0
#endif
#include "value_types.cuh"
#define SLICE_K 1
#define SLABS (WARPGROUPS * 4)                                   /* warps that multiply */
#define THREADS (SLABS * LANES)                                  /* threads that multiply */
#include "packed_blocks.cuh"

#define TILE_BYTES (8 * COLUMN_SLICES * CORE_BYTES)              /* of 64 rows */
#define STAGE_BYTES (COLUMN_SLICES * VECTOR_TILES * CORE_BYTES)  /* of a step of x */
#if CONV
#define STAGE_LOADERS ((VECTORS * PIECES + LANES - 1) / LANES)   /* warps that gather a stage */
/* Warps that gather: no more than distinguish the uses of a stage by their parity. */
#define ACTIVE_LOADERS (4 < STAGE_LOADERS * STAGES ? 4 : STAGE_LOADERS * STAGES)
#else
#define STAGE_LOADERS 1
#endif
#define ALIGNMENT (COLUMN_SLICES * CORE_BYTES)                   /* of the rows of a lane, in bytes */
#define OPERAND_BYTES (ALIGNMENT + WARPGROUPS * 4 * TILE_BYTES + STAGES * STAGE_BYTES)
#define SUM_BYTES (VECTORS * SUM_PITCH * 4)
#define BARRIER_OFFSET ((OPERAND_BYTES > SUM_BYTES ? OPERAND_BYTES : SUM_BYTES) / 8) /* in barriers of 8 bytes */
#define CACHE_PLACES (KEPT <= 4)                                  /* in registers, else recompute them */
#define PREFETCHED_STEPS (KEPT <= (SWAP_OPERANDS ? 3 : 4) ? 2 : 1) /* of the matrix, as registers allow */
#define AVERAGE_REGISTERS (65536 / (WARPS * LANES) / 8 * 8)      /* of a thread */
#define LOADER_REGISTERS (!CONV ? 24 : SWAP_OPERANDS ? 88 : 104) /* of a thread that loads x */
#define MULTIPLIER_REGISTERS (AVERAGE_REGISTERS + (AVERAGE_REGISTERS - LOADER_REGISTERS) / WARPGROUPS / 8 * 8)
#define REDISTRIBUTE_REGISTERS (WARPGROUPS > 1)                  /* else every thread has the maximum */

#ifndef EMULATED
typedef unsigned long long Barrier, Descriptor;
__device__ __forceinline__ unsigned shared_address(const void *at) { return (unsigned)__cvta_generic_to_shared(at); }
__device__ __forceinline__ void store_shared(unsigned at, int offset, unsigned value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(at + offset), "h"((Value)value) : "memory");
}

/* A barrier at which `count` arrive and others wait. Its parity changes when all have arrived. */
__device__ __forceinline__ void init_barrier(Barrier *at, unsigned count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(at)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(Barrier *at) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(at)) : "memory");
}
__device__ __forceinline__ void wait_barrier(Barrier *at, unsigned parity) {
  unsigned done;
  do
    asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                 : "=r"(done)
                 : "r"(shared_address(at)), "r"(parity)
                 : "memory");
  while (!done);
}

/* Arrive, and make the barrier wait for this many bytes of asynchronous copies too. */
__device__ __forceinline__ void arrive_expecting_bytes(Barrier *at, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(at)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk_async(unsigned to, const void *from, unsigned bytes, Barrier *full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(full))
               : "memory");
}

/* Make what threads have written visible to asynchronous copies and to the tensor cores. */
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}
template <int registers> __device__ __forceinline__ void raise_register_limit() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers> __device__ __forceinline__ void lower_register_limit() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
/* Add the product of 64 rows with WGMMA_N others to d, over 16 columns, both in shared memory. */
__device__ __forceinline__ void wgmma(float *d, Descriptor a, Descriptor b) {
#if VALUE_TYPE == 1
#define WGMMA_TYPES "f32.f16.f16"
#else
#define WGMMA_TYPES "f32.bf16.bf16"
#endif
  asm volatile("wgmma.mma_async.sync.aligned.m64n" WGMMA_N "k16." WGMMA_TYPES " {" WGMMA_SUM_REGISTERS
               "}, " WGMMA_A ", " WGMMA_B ", 1, 1, 1, 0, 0;"
               : WGMMA_SUM_OPERANDS
               : "l"(a), "l"(b));
}
#endif

/* Return the descriptor by which wgmma finds core matrices: where they begin (without the bits by which an address in a
 * cluster names its thread block), and the distances in bytes of the next 8 columns and of the next 8 rows. */
__device__ __forceinline__ Descriptor make_descriptor(unsigned start, unsigned columns, unsigned rows) {
  return (start & 0x3FFFF) >> 4 | (Descriptor)(columns >> 4) << 16 | (Descriptor)(rows >> 4) << 32;
}

/* Where the qth row of a lane begins. */
#define ROW_OFFSET(q) ((q) / 2 * TILE_BYTES + (q) % 2 * COLUMN_SLICES * CORE_BYTES)

/* The places of the survivors of a lane's eight rows in shared memory, without ROW_OFFSET. */
struct Places {
#if CACHE_PLACES
  unsigned at[8][KEPT];
#else
  unsigned word[WORDS][4], own;
#endif

  __device__ __forceinline__ Places(unsigned own) {
#if CACHE_PLACES
#pragma unroll
    for (int i = 0; i < 8 * KEPT; i++) at[i / KEPT][i % KEPT] = own;
#else
#pragma unroll
    for (int i = 0; i < 4 * WORDS; i++) word[i / 4][i % 4] = 0;
    this->own = own;
#endif
  }

  static __device__ __forceinline__ unsigned locate(const unsigned (*word)[4], int row, int s, unsigned own) {
    const unsigned column = word[s / 3][row / 2] >> (16 * (row % 2) + 5 * (s % 3)) & (WIDTH - 1);
    /* Two columns of a lane are side by side, and the next two are a core matrix further on. One product computes both
     * parts of the place, and the mask selects them. */
    return column * (CORE_BYTES / 2 + 2) & ((COLUMN_SLICES - 1) * CORE_BYTES + 2) | own;
  }

  /* Return the place of the sth survivor of the qth row. */
  __device__ __forceinline__ unsigned operator()(int q, int s) const {
#if CACHE_PLACES
    return at[q][s];
#else
    return locate(word, q, s, own);
#endif
  }

  __device__ __forceinline__ void update(const Survivors &to, int q, unsigned own) {
#if CACHE_PLACES
#pragma unroll
    for (int s = 0; s < KEPT; s++) at[q][s] = locate(to.word, q, s, own);
#else
    if (q % 2 == 0)
#pragma unroll
      for (int i = 0; i < WORDS; i++) word[i][q / 2] = to.word[i][q / 2];
#endif
  }
};

#if CONV
/* The inputs that a lane gathers: 8 columns in each block, always of the same position, since VECTORS is a multiple of
 * LANES or divides it. `share` is one of the STAGE_LOADERS shares of a stage. */
struct InputLoader {
  const ImageGather gatherer;

  __device__ __forceinline__ void load(int step, int share, uint4 *to) const {
#pragma unroll
    for (int step_block = 0; step_block < STEP_BLOCKS; step_block++)
      to[step_block] = gatherer.gather((step * STEP_BLOCKS + step_block) * PIECES + part(share));
  }

  static __device__ __forceinline__ void store(const uint4 *from, int share, uint4 *stage) {
    if (part(share) < PIECES) store_pieces(from, vector(share), part(share), stage);
  }

  static __device__ __forceinline__ int vector(int share) { return (share * LANES + threadIdx.x % LANES) % VECTORS; }
  static __device__ __forceinline__ int part(int share) { return (share * LANES + threadIdx.x % LANES) / VECTORS; }
};
#else
/* Wait until the previous kernel, which has arranged x, has ended. */
__device__ __forceinline__ void wait_for_arranged_input() {
#if EARLY_LAUNCH && !defined EMULATED
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

extern "C" __global__ void CLUSTER_ATTRIBUTE __launch_bounds__(WARPS * LANES, 1)
hopper_wgmma(const uint4 *values, const uint4 *indices, const Value *x, const void *bias, Value *y,
             float4 *partial_sums, unsigned *arrivals, SIZE_PARAMETERS) {
  const int lane = threadIdx.x % LANES, warp = __shfl_sync(FULL_MASK, threadIdx.x / LANES, 0), warpgroup = warp / 4;
  const int steps = (blocks + STEP_BLOCKS - 1) / STEP_BLOCKS, own_steps = (steps + SPLIT_K - 1) / SPLIT_K;
  const int begin = blockIdx.y * own_steps, end = min(begin + own_steps, steps);
  const unsigned base = shared_address(memory) + ALIGNMENT - 1 & ~(ALIGNMENT - 1u);
  uint4 *const operands = memory + (base - shared_address(memory)) / 16;
  uint4 *const stages = operands + WARPGROUPS * 4 * TILE_BYTES / 16;
  Barrier *const full = (Barrier *)memory + BARRIER_OFFSET, *const empty = full + STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) init_barrier(full + i, STAGE_LOADERS), init_barrier(empty + i, SLABS);
    fence_async_proxy();
  }
  __syncthreads();

  if (warp >= SLABS) { /* a warp that loads x */
#if REDISTRIBUTE_REGISTERS
    lower_register_limit<LOADER_REGISTERS>();
#endif
#if CONV
    const int first = warp - SLABS, shares = first < ACTIVE_LOADERS ? (end - begin) * STAGE_LOADERS : 0;
    const int position = blockIdx.x * VECTORS + InputLoader::vector(first);
    const InputLoader loader{ImageGather(x, taps, position, image_size, height, width, out_width, out_size, n)};
#pragma unroll 1
    for (int item = first; item < shares; item += ACTIVE_LOADERS) {
      const int step = item / STAGE_LOADERS, share = item % STAGE_LOADERS, stage = step % STAGES;
      uint4 got[STEP_BLOCKS];
      loader.load(begin + step, share, got);
      wait_barrier(empty + stage, step / STAGES % 2 ^ 1);
      InputLoader::store(got, share, stages + stage * (STAGE_BYTES / 16));
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) arrive(full + stage);
    }
#else
    if (threadIdx.x > THREADS) return; /* one thread copies everything */
    const char *from = (const char *)(x + (long long)blockIdx.x * pitch) + (long long)begin * STAGE_BYTES;
    wait_for_arranged_input();
    int stage = 0, parity = 1;
#pragma unroll 1
    for (int step = begin; step < end; step++, from += STAGE_BYTES) {
      wait_barrier(empty + stage, parity);
      arrive_expecting_bytes(full + stage, STAGE_BYTES);
      copy_bulk_async(shared_address(stages) + stage * STAGE_BYTES, from, STAGE_BYTES, full + stage);
      stage = stage + 1 < STAGES ? stage + 1 : 0, parity ^= stage == 0;
    }
#endif
    return;
  }

#if REDISTRIBUTE_REGISTERS
  raise_register_limit<MULTIPLIER_REGISTERS>();
#endif
  const PackedReader reader(values, indices, blockIdx.z * SLABS + warp, rows, blocks, end);
  Survivors prefetched[PREFETCHED_STEPS];
#pragma unroll
  for (int i = 0; i < PREFETCHED_STEPS; i++) reader.load(begin + i, prefetched[i]);
#pragma unroll
  for (int i = 0; i < 4 * TILE_BYTES / 16; i += 128)
    operands[warpgroup * (4 * TILE_BYTES / 16) + threadIdx.x % 128 + i] = {0, 0, 0, 0};
  const unsigned own = base + warpgroup * 4 * TILE_BYTES + warp % 4 * 2 * COLUMN_SLICES * CORE_BYTES + lane * 4;
  Places places(own);
  const Descriptor matrix_descriptor =
      make_descriptor(base + warpgroup * 4 * TILE_BYTES, CORE_BYTES, COLUMN_SLICES * CORE_BYTES);
  float sums[SWAP_OPERANDS ? 1 : 4][SWAP_OPERANDS ? 128 : VECTOR_TILES * 4] = {};

  int stage = 0, parity = 0, previous_stage = 0;
#pragma unroll 1
  for (int from = begin; from < end; from += PREFETCHED_STEPS)
#pragma unroll
    for (int i = 0; i < PREFETCHED_STEPS; i++) {
      if (i && from + i >= end) break;
      wgmma_wait();
      if (from + i > begin && lane == 0) arrive(empty + previous_stage);
      sync_warpgroup(warpgroup);
#pragma unroll
      for (int q = 0; q < 8; q++)
#pragma unroll
        for (int s = 0; s < KEPT; s++) store_shared(places(q, s), ROW_OFFSET(q), 0);
#pragma unroll
      for (int q = 0; q < 8; q++) {
        places.update(prefetched[i], q, own);
#pragma unroll
        for (int s = 0; s < KEPT; s++)
          store_shared(places(q, s), ROW_OFFSET(q), prefetched[i].value[s][q / 2] >> 16 * (q % 2));
      }
      fence_async_proxy();
      reader.load(from + i + PREFETCHED_STEPS, prefetched[i]);
      sync_warpgroup(warpgroup);
      wait_barrier(full + stage, parity);
      const Descriptor x_descriptor =
          make_descriptor(shared_address(stages) + stage * STAGE_BYTES, VECTOR_TILES * CORE_BYTES, CORE_BYTES);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < COLUMN_SLICES; slice += 2) {
        const Descriptor column = x_descriptor + slice * (STAGE_BYTES / COLUMN_SLICES >> 4);
#pragma unroll
        for (int tile = 0; tile < (SWAP_OPERANDS ? 1 : 4); tile++) {
          const Descriptor row = matrix_descriptor + (tile * TILE_BYTES + slice * CORE_BYTES >> 4);
          wgmma(sums[tile], SWAP_OPERANDS ? column : row, SWAP_OPERANDS ? row : column);
        }
      }
      wgmma_commit();
      previous_stage = stage, stage = stage + 1 < STAGES ? stage + 1 : 0, parity ^= stage == 0;
    }
  wgmma_wait();

  sync_finishing_threads();
  const int step_block = lane % STEP_BLOCKS, octet = lane / STEP_BLOCKS;
#if SWAP_OPERANDS
#define SUM(q, slab, i) sums[0][((q) / 2 * 8 + (slab) * 2 + (q) % 2) * 4 + (i)]
#pragma unroll
  for (int i = 0; i < 32; i++) { /* a lane has two vectors, and of each the rows of the slab's lanes 2t and 2t + 1 */
    const int slab = i / 8, q = i % 2 * 4, at = i / 2 % 4;
    const int vector = warp % 4 * 16 + octet + at / 2 * 8;
    const int row = (warpgroup * 4 + slab) * WARP_ROWS + (step_block * 2 + at % 2) * 8 + q;
    *(float4 *)((float *)memory + vector * SUM_PITCH + row) = {SUM(q, slab, at), SUM(q + 1, slab, at),
                                                               SUM(q + 2, slab, at), SUM(q + 3, slab, at)};
  }
#else
#pragma unroll
  for (int i = 0; i < VECTOR_TILES * 4; i++) { /* a lane has rows 8g to 8g + 7: two of them in each tile */
    const int vector_tile = i / 4, odd = i / 2 % 2, tile = i % 2 * 2;
    const float *low = sums[tile] + vector_tile * 4 + odd, *high = sums[tile + 1] + vector_tile * 4 + odd;
    const int vector = vector_tile * 8 + step_block * 2 + odd, row = warp * WARP_ROWS + octet * 8 + tile * 2;
    *(float4 *)((float *)memory + vector * SUM_PITCH + row) = {low[0], low[2], high[0], high[2]};
  }
#endif
#if CONV
  const int y_row = out_size, y_vector = 0;
#endif
  reduce_and_store(y, bias, partial_sums, arrivals, rows, n, y_row, y_vector, float_bias, relu);
}
