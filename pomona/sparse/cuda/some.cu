/* The product of a packed balanced matrix with some vectors, on an NVIDIA GPU's tensor cores; compiled at run time.
 *
 * Load sparse, compute dense. A warp takes 64 rows and four blocks at a time. Lane 4g + t loads the survivors of rows
 * 8g to 8g + 7 in block t, eight rows with one load, and spreads them out over shared memory that is its own and all in
 * its own bank: wherever the survivors lie, no lane is in another's way, and none waits for one. What it reads back is
 * its part of a matrix for mma.m16n8k16: the sum over columns has no order, so the four lanes that share a row there
 * may as well bring a block each. Then it clears the few places it has written.
 *
 * Up to three survivors stay in registers; a place in memory is a byte that says which of them belongs there, as a
 * selector for the instruction that picks bytes from two registers. More of them are written out in full.
 *
 * TEAM warps take turns at the steps of the same rows. All warps of a thread block share x, which comes through shared
 * memory, SPAN steps at a time, cut in the same way. Where there is room for all of it, that is one stage, and a warp
 * waits for no other until the end. SPLIT thread blocks share the columns, as in sums.cuh.
 *
 * Given as macros: KIND of values and x (1 half, 2 bfloat16), KEPT of a block, WIDTH of a block in x (16 or 32), EIGHTS
 * of vectors a thread block multiplies, its WARPS, TEAM, SPLIT, CLUSTER, TILES of 16 rows spread out at a time (1, 2 or
 * 4), SPAN, and STAGES of x in shared memory: with one, SPAN is all steps of a thread block, else a multiple of TEAM.
 * x is n × pitch, of which `columns` are there, a multiple of 8.
 *
 * With CONV, x is images, channels × height × width each, and a vector is what one position of a convolution's kernel
 * sees: threads gather it when they bring it to shared memory. Then there are macros for both sizes of the kernel, its
 * STRIDE, PADDING and DILATION: HIGH is 3 for 3 rows, HIGH_STRIDE what it moves by, and so on.
 */
#ifndef CONV
#define CONV 0
#endif
#include "kinds.cuh"
#define THREADS (WARPS * LANES)
#define SLABS (WARPS / TEAM)               /* of ROWS rows, in a thread block */
#include "sums.cuh"

#define LINE (4 * LANES)                   /* bytes of a word of every lane */
#define PICK (KEPT <= 3)                   /* bytes that pick, or values */
#define SIZE (PICK ? 1 : 2)                /* bytes of a place */
#define DEEP (WIDTH * SIZE / 4)            /* words of a row in a block */
#define OWN (2 * TILES * DEEP)             /* words of a lane */
#define RUN (SPAN * SIDE * PARTS)          /* pieces of a vector in a stage */
#define STAGE (VECTORS * RUN)              /* pieces of x in a stage */
/* Where in a line of a stage a lane finds its piece: turned, so that those who write it hit banks of their own, too. */
#define TURN(lane, part) (CONV ? (lane) ^ (lane) >> 3 : (lane) ^ (part) * (8 / PARTS))
#define RESIDENT ((EIGHTS <= 2 ? 16 : 8) / WARPS ? (EIGHTS <= 2 ? 16 : 8) / WARPS : 1) /* thread blocks at a time */

#ifndef EMULATED
/* 16 bytes on their way to shared memory, zeros where there is nothing to copy. */
__device__ __forceinline__ void copy(uint4 *to, const void *from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from),
               "r"(there ? 16 : 0));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES > 1 ? STAGES - 2 : 0) : "memory");
}

__device__ __forceinline__ void mma(float *sums, const unsigned *a, unsigned b0, unsigned b1) {
#if KIND == 1
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
  asm(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Four of the eight bytes of two registers: unlike __byte_perm, it trusts the selector. */
__device__ __forceinline__ unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
  unsigned got;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(got) : "r"(low), "r"(high), "r"(selector));
  return got;
}

#endif

#if CONV
#define AT_ONCE (THREADS / VECTORS) /* pieces of a vector */

/* One thread's position, and where its pieces of it go. */
struct Feed {
  const Sight sight;

  __device__ __forceinline__ void fetch(int step, int end, uint4 *stage) const {
    const int vector = threadIdx.x % VECTORS;
    if (step >= end) return;
#pragma unroll
    for (int i = 0; i < RUN; i += AT_ONCE) { /* no step is left out, so that none waits: behind the end are no taps */
      const int piece = i + threadIdx.x / VECTORS, span = piece / (SIDE * PARTS);
      if (RUN % AT_ONCE && piece >= RUN) break;
      const int part = piece % PARTS, lane = vector % 8 * SIDE + piece / PARTS % SIDE;
      stage[((span * EIGHTS + vector / 8) * PARTS + part) * LANES + TURN(lane, part)] =
          sight.gather(step * SIDE * PARTS + piece);
    }
  }
};
#else
#define AT_ONCE (THREADS / SIDE / PARTS) /* vectors that all threads copy a step of at a time */

/* One thread's place in x, and in a step of it: the same piece of every AT_ONCEth vector. */
struct Feed {
  const Value *x;
  int pitch, columns, vectors, piece; /* columns from its own first one to the last */

  __device__ __forceinline__ Feed(const Value *all, int wide, int pitch, int n) : pitch(pitch) {
    piece = threadIdx.x % (SIDE * PARTS);
    x = all + (long long)blockIdx.x * VECTORS * pitch + piece * 8;
    columns = wide - piece * 8, vectors = n - blockIdx.x * VECTORS;
  }

  __device__ __forceinline__ void fetch(int step, int end, uint4 *stage) const {
    const int part = piece % PARTS, side = piece / PARTS;
    if (step < end)
#pragma unroll 8
      for (int i = 0; i < SPAN * VECTORS; i += AT_ONCE) {
        const int at = i + threadIdx.x / (SIDE * PARTS), vector = at % VECTORS;
        const int column = (step + at / VECTORS) * SIDE * WIDTH;
        if (SPAN * VECTORS % AT_ONCE && at >= SPAN * VECTORS) break;
        uint4 *const to = stage + (at / 8 * PARTS + part) * LANES; /* as lanes will read it */
        copy(to + TURN(vector % 8 * SIDE + side, part), x + (long long)vector * pitch + column,
             column < columns && vector < vectors);
      }
    commit();
  }
};
#endif

/* Write the survivors of TILES tiles of 16 rows to where they are wanted, or clear those places. */
__device__ __forceinline__ void spread(const Survivors &from, int tile, unsigned own, bool clear) {
#pragma unroll
  for (int row = 0; row < 2 * TILES; row++) {
    const int pair = tile + row / 2, shift = 16 * (row % 2);
    char *const to = (char *)memory + row * DEEP * LINE;
#pragma unroll
    for (int s = 0; s < KEPT; s++) {
      const unsigned column = from.word[s / 3][pair] >> (shift + 5 * (s % 3)) & (WIDTH - 1);
      /* a word holds 4 / SIZE columns, and the next is a LINE on: one product puts both parts of the number in place */
      const unsigned place = column * (SIZE + LINE * SIZE / 4) & ((DEEP - 1) * LINE + 4 - SIZE);
#if PICK /* bytes 3 and 2, 5 and 4, or 7 and 6: what `multiply` has there; byte 0 is zero */
      *(unsigned char *)(to + (place | own)) = clear ? 0 : 0x32 + 0x22 * s;
#else
      *(Value *)(to + (place | own)) = clear ? 0 : from.value[s][pair] >> shift;
#endif
    }
  }
}

/* TILES tiles of 16 rows times all vectors. */
__device__ __forceinline__ void multiply(const unsigned *own, const Survivors &from, int first, const uint4 *stage,
                                         float (*sums)[EIGHTS][4]) {
#if PICK
  unsigned low[2 * TILES], high[2 * TILES]; /* of each row: nothing and the first survivor, the second and the third */
#pragma unroll
  for (int row = 0; row < 2 * TILES; row++) {
    const int pair = first + row / 2;
    low[row] = pick_bytes(from.value[0][pair], 0, row % 2 ? 0x3244 : 0x1044);
    high[row] = pick_bytes(from.value[KEPT > 1 ? 1 : 0][pair], from.value[KEPT - 1][pair], row % 2 ? 0x7632 : 0x5410);
  }
#endif
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    uint4 b[EIGHTS];
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++)
      b[eight] = stage[(eight * PARTS + part) * LANES + TURN(threadIdx.x % LANES, part)];
    unsigned a[TILES][2][4]; /* of columns 8 · part and on, four of both rows at a time */
#if PICK
    unsigned pick[TILES][2][2];
#pragma unroll
    for (int i = 0; i < TILES * 4; i++)
      pick[i / 4][i / 2 % 2][i % 2] = own[((i / 4 * 2 + i % 2) * DEEP + part * 2 + i / 2 % 2) * LANES];
#pragma unroll
    for (int i = 0; i < TILES * 8; i++) {
      const int row = i / 8 * 2 + i % 2;
      a[i / 8][i / 4 % 2][i % 4] = pick_bytes(low[row], high[row], pick[i / 8][i / 4 % 2][i % 2] >> 16 * (i / 2 % 2));
    }
#else
#pragma unroll
    for (int i = 0; i < TILES * 8; i++)
      a[i / 8][i / 4 % 2][i % 4] = own[((i / 8 * 2 + i % 2) * DEEP + part * 4 + i % 8 / 2) * LANES];
#endif
#pragma unroll
    for (int i = 0; i < TILES * 2 * EIGHTS; i++) {
      const int tile = i / EIGHTS / 2, half = i / EIGHTS % 2, eight = i % EIGHTS;
      mma(sums[tile][eight], a[tile][half], half ? b[eight].z : b[eight].x, half ? b[eight].w : b[eight].y);
    }
  }
}

extern "C" __global__ void TOGETHER __launch_bounds__(THREADS, RESIDENT)
some(const uint4 *values, const uint4 *indices, const Value *x, const void *bias, Value *y, float4 *parts,
     unsigned *tickets, GIVEN) {
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, side = lane % SIDE, eighth = lane / SIDE;
  const int steps = (blocks + SIDE - 1) / SIDE, share = (steps + SPLIT - 1) / SPLIT;
  const int begin = blockIdx.y * share, end = min(begin + share, steps);

  const Source source(values, indices, blockIdx.z * SLABS + warp / TEAM, rows, blocks, end);
  Survivors now, next;
  source.load(begin + warp % TEAM, now);

  uint4 *const stages = memory + WARPS * OWN * LANES / 4;
#if CONV
  const int position = blockIdx.x * VECTORS + threadIdx.x % VECTORS;
  const Feed feed{Sight(x, taps, position, image, height, width, line, area, n)};
#else
  const Feed feed(x, columns, pitch, n);
#endif
#pragma unroll
  for (int i = 0; i < (STAGES > 1 ? STAGES - 1 : 1); i++) feed.fetch(begin + i * SPAN, end, stages + i * STAGE);
  unsigned *const own = (unsigned *)memory + warp * OWN * LANES + lane;
#pragma unroll
  for (int i = 0; i < OWN; i++) own[i * LANES] = 0;
  float sums[4][EIGHTS][4] = {};

  for (int from = begin, at = 0; from < end; from += SPAN, at = at + 1 < STAGES ? at + 1 : 0) {
    wait();
    __syncthreads(); /* the stage is there for all, and all are done with the one before */
    if (STAGES > 1) feed.fetch(from + (STAGES - 1) * SPAN, end, stages + (at ? at - 1 : STAGES - 1) * STAGE);
#pragma unroll 1
    for (int step = warp % TEAM; step < min(SPAN, end - from); step += TEAM) {
      source.load(from + step + TEAM, next);
      __syncwarp(); /* else the compiler puts the loads off */
#pragma unroll
      for (int tile = 0; tile < 4; tile += TILES) {
        spread(now, tile, warp * OWN * LINE + lane * 4, false);
        multiply(own, now, tile, stages + at * STAGE + step * (STAGE / SPAN), sums + tile);
        spread(now, tile, warp * OWN * LINE + lane * 4, true);
      }
      now = next;
    }
  }

  __syncthreads();
#pragma unroll
  for (int i = 0; i < EIGHTS * 4; i++) { /* rows 8g to 8g + 7 are in one lane: the tiles have two of them each */
    const int eight = i / 4, odd = i / 2 % 2, tile = i % 2 * 2;
    const float *low = sums[tile][eight] + odd, *high = sums[tile + 1][eight] + odd;
    const int vector = (warp % TEAM * EIGHTS + eight) * 8 + side * 2 + odd;
    const int row = warp / TEAM * ROWS + eighth * 8 + tile * 2;
    *(float4 *)((float *)memory + vector * PITCH + row) = {low[0], low[2], high[0], high[2]};
  }
#if CONV
  const int y_row = area, y_vector = 0;
#endif
  complete(y, bias, parts, tickets, rows, n, y_row, y_vector, wide, relu);
}
