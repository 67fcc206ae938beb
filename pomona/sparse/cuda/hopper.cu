/* The product of a packed balanced matrix with some vectors, where the tensor cores read both from shared memory: on a
 * Hopper GPU; compiled at run time.
 *
 * Load sparse, compute dense. A warp takes 64 rows and four blocks at a time. Lane 4g + t loads the survivors of rows
 * 8g to 8g + 7 in block t, and spreads them out over shared memory that is all in its own bank: the matrix of 8 rows
 * and 16 bytes that wgmma is made of is 128 bytes, of which a lane owns four, row g and two columns. The sum over
 * columns has no order, so that these are two columns of block t. Later the lane clears the few places it has written.
 *
 * Four warps, a group, have 256 rows, four tiles of 64: the qth row of a lane of warp w is in tile q / 2, where wgmma
 * has rows of its own for w. If TURNED, x is what wgmma multiplies 64 rows of, and the survivors are its other factor:
 * they are then read once for 64 vectors. Of GROUPS, one spreads while another multiplies.
 *
 * x comes through STAGES of a step each, laid out in the same way: cut.cu has done that, so that one thread of the last
 * four warps brings a stage by one copy. SPLIT thread blocks share the columns, as in sums.cuh.
 *
 * Given as macros: KIND of values and x (1 half, 2 bfloat16), KEPT of a block, WIDTH of a block in x (16 or 32), EIGHTS
 * of vectors a thread block multiplies, its WARPS and GROUPS, SPLIT, CLUSTER, TURNED (then EIGHTS is 8), STAGES; N of
 * wgmma and its sums as text: LIST, SUMS, A and B. VECTORS vectors of x are `pitch` values. If it is EARLY, it is
 * launched ahead of the end of cut.cu.
 *
 * With CONV, x is images, and a vector what one position of a convolution's kernel sees, as in some.cu: all lanes of
 * the last four warps gather it. EIGHTS is then a power of two.
 */
#ifndef CONV
#define CONV 0
#endif
#ifndef EARLY
#define EARLY 0
#endif
#include "kinds.cuh"
#define TEAM 1
#define SLABS (GROUPS * 4)                 /* warps that multiply */
#define THREADS (SLABS * LANES)            /* of these */
#include "sums.cuh"

#define TILE (8 * SLICES * CORE)           /* bytes of 64 rows */
#define STAGE (SLICES * EIGHTS * CORE)     /* bytes of a step of x */
#if CONV
#define HANDS ((VECTORS * PARTS + LANES - 1) / LANES) /* warps that bring a stage */
#define FEEDERS (4 < HANDS * STAGES ? 4 : HANDS * STAGES) /* that can tell a stage's uses apart */
#else
#define HANDS 1
#endif
#define ALIGNED (SLICES * CORE)            /* to what the rows of a lane are */
#define ROOM (ALIGNED + GROUPS * 4 * TILE + STAGES * STAGE)
#define END (VECTORS * PITCH * 4)
#define BARRIERS ((ROOM > END ? ROOM : END) / 8) /* where they are */
#define KEEP (KEPT <= 4)                   /* places, or find them again */
#define AHEAD (KEPT <= (TURNED ? 3 : 4) ? 2 : 1) /* steps of the matrix on their way, as registers allow */
#define ALLOTTED (65536 / (WARPS * LANES) / 8 * 8) /* registers of a thread */
#define LEAST (!CONV ? 24 : TURNED ? 88 : 104) /* of one that feeds */
#define MOST (ALLOTTED + (ALLOTTED - LEAST) / GROUPS / 8 * 8)
#define UNEVEN (GROUPS > 1)                /* else all have as many as can be */

#ifndef EMULATED
typedef unsigned long long Barrier, Description;
__device__ __forceinline__ unsigned address(const void *at) { return (unsigned)__cvta_generic_to_shared(at); }
__device__ __forceinline__ void put(unsigned at, int offset, unsigned value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(at + offset), "h"((Value)value) : "memory");
}

/* A barrier that so many arrive at, and others wait for; it has a parity, which changes when they are all there. */
__device__ __forceinline__ void prepare(Barrier *at, unsigned many) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(at)), "r"(many) : "memory");
}
__device__ __forceinline__ void arrive(Barrier *at) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(at)) : "memory");
}
__device__ __forceinline__ void await(Barrier *at, unsigned parity) {
  unsigned done;
  do
    asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                 : "=r"(done)
                 : "r"(address(at)), "r"(parity)
                 : "memory");
  while (!done);
}

/* One arrives, and so many bytes will; they come by themselves. */
__device__ __forceinline__ void expect(Barrier *at, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(at)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bring(unsigned to, const void *from, unsigned bytes, Barrier *full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(address(full))
               : "memory");
}

/* What threads have written is there for copies and the tensor cores, too. */
__device__ __forceinline__ void show() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void of_group(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
template <int registers> __device__ __forceinline__ void take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers> __device__ __forceinline__ void give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

__device__ __forceinline__ void open() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void finished() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
/* 64 rows times N, 16 columns of both in shared memory. */
__device__ __forceinline__ void multiply(float *d, Description a, Description b) {
#if KIND == 1
#define TYPES "f32.f16.f16"
#else
#define TYPES "f32.bf16.bf16"
#endif
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16." TYPES " {" LIST "}, " A ", " B ", 1, 1, 1, 0, 0;"
               : SUMS
               : "l"(a), "l"(b));
}
#endif

/* How wgmma finds cores: where they begin (an address in a cluster says whose memory it is, too), how many bytes on the
 * next 8 columns are, and the next 8 rows. */
__device__ __forceinline__ Description description(unsigned start, unsigned columns, unsigned rows) {
  return (start & 0x3FFFF) >> 4 | (Description)(columns >> 4) << 16 | (Description)(rows >> 4) << 32;
}

#define ROW(q) ((q) / 2 * TILE + (q) % 2 * SLICES * CORE) /* where the qth row of a lane begins */

/* Where the places of a lane's eight rows are, as far as that depends on survivors. */
struct Places {
#if KEEP
  unsigned at[8][KEPT];
#else
  unsigned word[WORDS][4], own;
#endif

  __device__ __forceinline__ Places(unsigned own) {
#if KEEP
#pragma unroll
    for (int i = 0; i < 8 * KEPT; i++) at[i / KEPT][i % KEPT] = own;
#else
#pragma unroll
    for (int i = 0; i < 4 * WORDS; i++) word[i / 4][i % 4] = 0;
    this->own = own;
#endif
  }

  static __device__ __forceinline__ unsigned find(const unsigned (*word)[4], int row, int s, unsigned own) {
    const unsigned column = word[s / 3][row / 2] >> (16 * (row % 2) + 5 * (s % 3)) & (WIDTH - 1);
    /* two columns of a lane are side by side, the next two a core on: one product puts both parts of it in place */
    return column * (CORE / 2 + 2) & ((SLICES - 1) * CORE + 2) | own;
  }

  /* Of the qth row, the sth survivor's. */
  __device__ __forceinline__ unsigned operator()(int q, int s) const {
#if KEEP
    return at[q][s];
#else
    return find(word, q, s, own);
#endif
  }

  __device__ __forceinline__ void move(const Survivors &to, int q, unsigned own) {
#if KEEP
#pragma unroll
    for (int s = 0; s < KEPT; s++) at[q][s] = find(to.word, q, s, own);
#else
    if (q % 2 == 0)
#pragma unroll
      for (int i = 0; i < WORDS; i++) word[i][q / 2] = to.word[i][q / 2];
#endif
  }
};

#if CONV
/* One lane's part of x: 8 columns in each block of one position for good, as vectors are a multiple of lanes, or the
 * other way round. */
struct Feed {
  const Sight sight;

  __device__ __forceinline__ void load(int step, int hand, uint4 *to) const {
#pragma unroll
    for (int side = 0; side < SIDE; side++) to[side] = sight.gather((step * SIDE + side) * PARTS + part(hand));
  }

  static __device__ __forceinline__ void put(const uint4 *from, int hand, uint4 *stage) {
    if (part(hand) < PARTS) lay(from, vector(hand), part(hand), stage);
  }

  static __device__ __forceinline__ int vector(int hand) { return (hand * LANES + threadIdx.x % LANES) % VECTORS; }
  static __device__ __forceinline__ int part(int hand) { return (hand * LANES + threadIdx.x % LANES) / VECTORS; }
};
#else
/* The kernel before this one, which has cut x, is done. */
__device__ __forceinline__ void follow() {
#if EARLY && !defined EMULATED
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

extern "C" __global__ void TOGETHER __launch_bounds__(WARPS * LANES, 1)
hopper(const uint4 *values, const uint4 *indices, const Value *x, const void *bias, Value *y, float4 *parts,
       unsigned *tickets, GIVEN) {
  const int lane = threadIdx.x % LANES, warp = __shfl_sync(ALL, threadIdx.x / LANES, 0), group = warp / 4;
  const int steps = (blocks + SIDE - 1) / SIDE, share = (steps + SPLIT - 1) / SPLIT;
  const int begin = blockIdx.y * share, end = min(begin + share, steps);
  const unsigned base = address(memory) + ALIGNED - 1 & ~(ALIGNED - 1u);
  uint4 *const room = memory + (base - address(memory)) / 16, *const stages = room + GROUPS * 4 * TILE / 16;
  Barrier *const full = (Barrier *)memory + BARRIERS, *const empty = full + STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) prepare(full + i, HANDS), prepare(empty + i, SLABS);
    show();
  }
  __syncthreads();

  if (warp >= SLABS) { /* a feeder */
#if UNEVEN
    give<LEAST>();
#endif
#if CONV
    const int first = warp - SLABS, many = first < FEEDERS ? (end - begin) * HANDS : 0;
    const Feed feed{Sight(x, taps, blockIdx.x * VECTORS + Feed::vector(first), image, height, width, line, area, n)};
#pragma unroll 1
    for (int item = first; item < many; item += FEEDERS) {
      const int step = item / HANDS, hand = item % HANDS, stage = step % STAGES;
      uint4 got[SIDE];
      feed.load(begin + step, hand, got);
      await(empty + stage, step / STAGES % 2 ^ 1);
      Feed::put(got, hand, stages + stage * (STAGE / 16));
      show();
      __syncwarp();
      if (lane == 0) arrive(full + stage);
    }
#else
    if (threadIdx.x > THREADS) return; /* one is enough */
    const char *from = (const char *)(x + (long long)blockIdx.x * pitch) + (long long)begin * STAGE;
    follow();
    int stage = 0, parity = 1;
#pragma unroll 1
    for (int step = begin; step < end; step++, from += STAGE) {
      await(empty + stage, parity);
      expect(full + stage, STAGE);
      bring(address(stages) + stage * STAGE, from, STAGE, full + stage);
      stage = stage + 1 < STAGES ? stage + 1 : 0, parity ^= stage == 0;
    }
#endif
    return;
  }

#if UNEVEN
  take<MOST>();
#endif
  const Source source(values, indices, blockIdx.z * SLABS + warp, rows, blocks, end);
  Survivors ahead[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) source.load(begin + i, ahead[i]);
#pragma unroll
  for (int i = 0; i < 4 * TILE / 16; i += 128) room[group * (4 * TILE / 16) + threadIdx.x % 128 + i] = {0, 0, 0, 0};
  const unsigned own = base + group * 4 * TILE + warp % 4 * 2 * SLICES * CORE + lane * 4;
  Places places(own);
  const Description spread = description(base + group * 4 * TILE, CORE, SLICES * CORE);
  float sums[TURNED ? 1 : 4][TURNED ? 128 : EIGHTS * 4] = {};

  int stage = 0, parity = 0, before = 0;
#pragma unroll 1
  for (int from = begin; from < end; from += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (i && from + i >= end) break;
      finished();
      if (from + i > begin && lane == 0) arrive(empty + before);
      of_group(group);
#pragma unroll
      for (int q = 0; q < 8; q++)
#pragma unroll
        for (int s = 0; s < KEPT; s++) put(places(q, s), ROW(q), 0);
#pragma unroll
      for (int q = 0; q < 8; q++) {
        places.move(ahead[i], q, own);
#pragma unroll
        for (int s = 0; s < KEPT; s++) put(places(q, s), ROW(q), ahead[i].value[s][q / 2] >> 16 * (q % 2));
      }
      show();
      source.load(from + i + AHEAD, ahead[i]);
      of_group(group);
      await(full + stage, parity);
      const Description fed = description(address(stages) + stage * STAGE, EIGHTS * CORE, CORE);
      open();
#pragma unroll
      for (int slice = 0; slice < SLICES; slice += 2) {
        const Description column = fed + slice * (STAGE / SLICES >> 4);
#pragma unroll
        for (int tile = 0; tile < (TURNED ? 1 : 4); tile++) {
          const Description row = spread + (tile * TILE + slice * CORE >> 4);
          multiply(sums[tile], TURNED ? column : row, TURNED ? row : column);
        }
      }
      close();
      before = stage, stage = stage + 1 < STAGES ? stage + 1 : 0, parity ^= stage == 0;
    }
  finished();

  together();
  const int side = lane % SIDE, eighth = lane / SIDE;
#if TURNED
#define SUM(q, slab, i) sums[0][((q) / 2 * 8 + (slab) * 2 + (q) % 2) * 4 + (i)]
#pragma unroll
  for (int i = 0; i < 32; i++) { /* a lane has two vectors, and of each row of a slab's lanes 2t and 2t + 1 */
    const int slab = i / 8, q = i % 2 * 4, at = i / 2 % 4;
    const int vector = warp % 4 * 16 + eighth + at / 2 * 8;
    const int row = (group * 4 + slab) * ROWS + (side * 2 + at % 2) * 8 + q;
    *(float4 *)((float *)memory + vector * PITCH + row) = {SUM(q, slab, at), SUM(q + 1, slab, at), SUM(q + 2, slab, at),
                                                           SUM(q + 3, slab, at)};
  }
#else
#pragma unroll
  for (int i = 0; i < EIGHTS * 4; i++) { /* rows 8g to 8g + 7 are in one lane: the tiles have two of them each */
    const int eight = i / 4, odd = i / 2 % 2, tile = i % 2 * 2;
    const float *low = sums[tile] + eight * 4 + odd, *high = sums[tile + 1] + eight * 4 + odd;
    const int vector = eight * 8 + side * 2 + odd, row = warp * ROWS + eighth * 8 + tile * 2;
    *(float4 *)((float *)memory + vector * PITCH + row) = {low[0], low[2], high[0], high[2]};
  }
#endif
#if CONV
  const int y_row = area, y_vector = 0;
#endif
  complete(y, bias, parts, tickets, rows, n, y_row, y_vector, wide, relu);
}
