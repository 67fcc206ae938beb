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
 * waits for no other until the end. SPLIT thread blocks share the columns. They add their sums up in a fixed order:
 * first those of a CLUSTER, which see each other's memory, then the clusters. Each of these leaves its sums in `parts`
 * and takes a ticket; who has the last one adds them all up.
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

#define ROWS 64                            /* of a warp */
#define SIDE 4                             /* blocks side by side */
#define LINE (4 * LANES)                   /* bytes of a word of every lane */
#define PICK (KEPT <= 3)                   /* bytes that pick, or values */
#define SIZE (PICK ? 1 : 2)                /* bytes of a place */
#define DEEP (WIDTH * SIZE / 4)            /* words of a row in a block */
#define OWN (2 * TILES * DEEP)             /* words of a lane */
#define PARTS (WIDTH / 8)                  /* pieces, of 16 bytes, of a vector in a block */
#define VECTORS (EIGHTS * 8)
#define RUN (SPAN * SIDE * PARTS)          /* pieces of a vector in a stage */
#define STAGE (VECTORS * RUN)              /* pieces of x in a stage */
#define THREADS (WARPS * LANES)
#define SLABS (WARPS / TEAM)               /* of ROWS rows, in a thread block */
/* Where in a line of a stage a lane finds its piece: turned, so that those who write it hit banks of their own, too. */
#define TURN(lane, part) (CONV ? (lane) ^ (lane) >> 3 : (lane) ^ (part) * (8 / PARTS))
#define RESIDENT ((EIGHTS <= 2 ? 16 : 8) / WARPS ? (EIGHTS <= 2 ? 16 : 8) / WARPS : 1) /* thread blocks at a time */
#define PITCH (SLABS * ROWS + 4)           /* sums of a vector, and some against bank conflicts */
#define QUADS (SLABS * ROWS / 4 / CLUSTER) /* fours of rows that a thread block finishes */
#define MINE (VECTORS * QUADS)             /* fours of sums */
#define BATCH (MINE < 4 * THREADS ? (MINE + THREADS - 1) / THREADS : 4) /* of them, that a thread reads at a time */
#define SHARES (SPLIT / CLUSTER)           /* of a sum, that are added up with tickets */

#ifndef EMULATED
extern __shared__ uint4 memory[];

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

/* All threads of the cluster. */
__device__ __forceinline__ void meet() {
#if CLUSTER == 1
  __syncthreads();
#else
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

/* What lies at the same place in the shared memory of another thread block. */
__device__ __forceinline__ float4 across(const float4 *here, int rank) {
#if CLUSTER == 1
  return *here;
#else
  unsigned there;
  float4 got;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"((unsigned)__cvta_generic_to_shared(here)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(got.x), "=f"(got.y), "=f"(got.z), "=f"(got.w)
               : "r"(there)
               : "memory");
  return got;
#endif
}

/* What another thread block has written: not what a cache nearby may have of it. */
__device__ __forceinline__ float4 fresh(const float4 *from) {
  float4 got;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(got.x), "=f"(got.y), "=f"(got.z), "=f"(got.w)
               : "l"(from)
               : "memory");
  return got;
}
#endif

#if CLUSTER == 1
#define TOGETHER
#else
#define TOGETHER __cluster_dims__(1, CLUSTER, 1)
#endif

/* The survivors of eight rows in one block, two rows a register. */
struct Survivors {
  unsigned word[WORDS][4], value[KEPT][4];
};

/* One lane's place in the packed matrix. */
struct Source {
  const uint4 *values, *indices;
  int left; /* blocks from its own first one to the last */
  Policy policy;

  __device__ __forceinline__ void load(int step, Survivors &to) const {
    const bool there = step * SIDE < left;
#pragma unroll
    for (int i = 0; i < WORDS; i++) unpack(indices + (step * SIDE * WORDS + i) * 4, there, to.word[i]);
#pragma unroll
    for (int i = 0; i < KEPT; i++) unpack(values + (step * SIDE * KEPT + i) * 4, there, to.value[i]);
  }

  __device__ __forceinline__ void unpack(const uint4 *from, bool there, unsigned *to) const {
    const uint4 got = there ? stream(from, policy) : uint4{0, 0, 0, 0};
    to[0] = got.x, to[1] = got.y, to[2] = got.z, to[3] = got.w;
  }
};

#if CONV
#define AT_ONCE (THREADS / VECTORS) /* pieces of a vector */

/* One thread's position, and where its pieces of it go. */
struct Feed {
  const char *x;
  const uint4 *taps; /* of two columns each: how many bytes on in x they are, and their tap of the kernel as a bit */
  unsigned there;   /* taps that see the image */

  __device__ __forceinline__ Feed(const Value *images, const uint4 *taps, int image, int height, int width, int line,
                                  int area, int n)
      : taps(taps), there(0) {
    const int position = blockIdx.x * VECTORS + threadIdx.x % VECTORS, place = position % area;
    const int top = place / line * HIGH_STRIDE - HIGH_PADDING, left = place % line * WIDE_STRIDE - WIDE_PADDING;
    x = (const char *)(images + (long long)(position / area) * image + (long long)top * width + left);
    for (int tap = 0; tap < HIGH * WIDE; tap++) {
      const int row = top + tap / WIDE * HIGH_DILATION, column = left + tap % WIDE * WIDE_DILATION;
      const bool inside = row >= 0 && row < height && column >= 0 && column < width;
      there |= unsigned(inside && position < n) << tap;
    }
  }

  __device__ __forceinline__ unsigned load(unsigned bytes, unsigned tap) const {
    return there & tap ? *(const Value *)(x + bytes) : 0;
  }

  __device__ __forceinline__ void fetch(int step, int end, uint4 *stage) const {
    const int vector = threadIdx.x % VECTORS;
    if (step >= end) return;
#pragma unroll
    for (int i = 0; i < RUN; i += AT_ONCE) { /* no step is left out, so that none waits: behind the end are no taps */
      const int piece = i + threadIdx.x / VECTORS, span = piece / (SIDE * PARTS);
      if (RUN % AT_ONCE && piece >= RUN) break;
      unsigned got[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint4 two = taps[(step * SIDE * PARTS + piece) * 4 + j];
        got[j] = load(two.x, two.y) | load(two.z, two.w) << 16;
      }
      const int part = piece % PARTS, lane = vector % 8 * SIDE + piece / PARTS % SIDE;
      uint4 &to = stage[((span * EIGHTS + vector / 8) * PARTS + part) * LANES + TURN(lane, part)];
      to = {got[0], got[1], got[2], got[3]};
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

/* Where the ith four of sums belongs: threads side by side write side by side. */
#define VECTOR(i) (CONV ? (i) % VECTORS : (i) / QUADS)
#define QUAD(i) (blockIdx.y % CLUSTER * QUADS + (CONV ? (i) / VECTORS : (i) % QUADS))
/* The kth of a batch; where there is none, the last of all once more. */
#define OF(k) (MINE % (BATCH * THREADS) ? min(i + (k) * THREADS, MINE - 1) : i + (k) * THREADS)

__device__ __forceinline__ void add(float4 &sum, float4 part) {
  sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
}

/* What all teams of the cluster have of it. */
__device__ __forceinline__ float4 of_cluster(int i) {
  float4 sum = {};
#pragma unroll
  for (int j = 0; j < CLUSTER * TEAM; j++) {
    const float *const here = (float *)memory + (j % TEAM * VECTORS + VECTOR(i)) * PITCH + QUAD(i) * 4;
    add(sum, across((const float4 *)here, j / TEAM));
  }
  return sum;
}

/* Whether this thread block is the last of SHARES to come here; then it sees what the others have written. */
__device__ __forceinline__ bool last(unsigned *ticket) {
  bool mine = false;
  if (threadIdx.x == 0) {
    __threadfence();
    mine = atomicInc(ticket, SHARES - 1) == SHARES - 1; /* which makes it zero again */
    __threadfence();
  }
  return __syncthreads_or(mine);
}

/* Finishes four rows of a vector. */
__device__ __forceinline__ void store(float4 sum, Value *y, long long stride, const void *bias, int wide, int row,
                                      int rows, int relu) {
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  Value made[4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (row + i < rows) made[i] = finish(sums[i], bias, wide, row + i, relu);
  if (stride == 1 && row + 4 <= rows && (unsigned long long)y % 8 == 0)
    *(uint2 *)y = {made[0] | (unsigned)made[1] << 16, made[2] | (unsigned)made[3] << 16};
  else
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (row + i < rows) y[i * stride] = made[i];
}

#if CONV
#define GIVEN const uint4 *taps, int rows, int blocks, int n, int wide, int relu, int image, int height, int width, \
              int line, int area
#else
#define GIVEN int rows, int columns, int pitch, int blocks, int n, int y_row, int y_vector, int wide, int relu
#endif

extern "C" __global__ void TOGETHER __launch_bounds__(THREADS, RESIDENT)
some(const uint4 *values, const uint4 *indices, const Value *x, const void *bias, Value *y, float4 *parts,
     unsigned *tickets, GIVEN) {
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, side = lane % SIDE, eighth = lane / SIDE;
  const int steps = (blocks + SIDE - 1) / SIDE, share = (steps + SPLIT - 1) / SPLIT;
  const int begin = blockIdx.y * share, end = min(begin + share, steps);

  const int group = ((blockIdx.z * SLABS + warp / TEAM) * 8 + eighth) / 4;
  const long long first = (long long)group * blocks + side;
  const Source source = {values + first * KEPT * 4 + eighth % 4, indices + first * WORDS * 4 + eighth % 4,
                         group * LANES < rows ? min(blocks, end * SIDE) - side : 0, fleeting()};
  Survivors now, next;
  source.load(begin + warp % TEAM, now);

  uint4 *const stages = memory + WARPS * OWN * LANES / 4;
#if CONV
  const Feed feed(x, taps, image, height, width, line, area, n);
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
  meet();

#if SHARES > 1
  const int mine = (blockIdx.z * gridDim.x + blockIdx.x) * CLUSTER + blockIdx.y % CLUSTER;
  parts += (long long)mine * SHARES * MINE;
#pragma unroll 1
  for (int i = threadIdx.x; i < MINE; i += BATCH * THREADS) {
    float4 sum[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++) sum[k] = of_cluster(OF(k));
#pragma unroll
    for (int k = 0; k < BATCH; k++) parts[blockIdx.y / CLUSTER * MINE + OF(k)] = sum[k];
  }
  meet();
  if (!last(tickets + mine)) return;
#endif
#pragma unroll 1
  for (int i = threadIdx.x; i < MINE; i += BATCH * THREADS) {
    float4 sum[BATCH] = {};
#pragma unroll
    for (int k = 0; k < BATCH * SHARES; k++)
      add(sum[k / SHARES], SHARES > 1 ? fresh(parts + k % SHARES * MINE + OF(k / SHARES)) : of_cluster(OF(k)));
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      const int vector = blockIdx.x * VECTORS + VECTOR(OF(k)), row = blockIdx.z * SLABS * ROWS + QUAD(OF(k)) * 4;
#if CONV
      const long long y_row = area, start = (long long)(vector / area) * rows * area + vector % area;
#else
      const long long start = (long long)vector * y_vector;
#endif
      if (vector < n) store(sum[k], y + start + (long long)row * y_row, y_row, bias, wide, row, rows, relu);
    }
  }
  if (SPLIT == CLUSTER && CLUSTER > 1) meet(); /* others may still be reading here */
}
