/* What the kernels for tensor cores have in common: how survivors are loaded, and how sums become a product.
 *
 * A lane loads the survivors of eight rows in one of SIDE blocks. At the end the sums of a thread block lie in shared
 * memory, by vector and row, TEAM of each. SPLIT thread blocks share the columns; they add their sums up in a fixed
 * order: first those of a CLUSTER, which see each other's memory, then the clusters. Each of these leaves its sums in
 * `parts` and takes a ticket; who has the last one adds them all up. THREADS threads of a thread block do it.
 */
#include "steps.cuh"
#define ROWS 64                            /* of a warp */
#define PITCH (SLABS * ROWS + 4)           /* sums of a vector, and some against bank conflicts */
#define QUADS (SLABS * ROWS / 4 / CLUSTER) /* fours of rows that a thread block finishes */
#define MINE (VECTORS * QUADS)             /* fours of sums */
#define BATCH (MINE < 4 * THREADS ? (MINE + THREADS - 1) / THREADS : 4) /* of them, that a thread reads at a time */
#define SHARES (SPLIT / CLUSTER)           /* of a sum, that are added up with tickets */

#ifndef EMULATED
extern __shared__ uint4 memory[];

/* A pointer that is not to be found anew each time it is used. */
__device__ __forceinline__ void hold(const uint4 *&pointer) { asm volatile("" : "+l"(pointer)); }

/* Those threads of the thread block that finish the product. */
__device__ __forceinline__ void together() { asm volatile("bar.sync 0, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ bool any_of(bool mine) {
  unsigned got;
  asm volatile("{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %1, 0;\nbar.red.or.pred any, 0, %2, mine;\n"
               "selp.u32 %0, 1, 0, any;\n}"
               : "=r"(got)
               : "r"((unsigned)mine), "n"(THREADS)
               : "memory");
  return got;
}

/* Those of the cluster. */
__device__ __forceinline__ void meet() {
#if CLUSTER == 1
  together();
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

  /* Of so manieth ROWS rows, as far as a step. */
  __device__ __forceinline__ Source(const uint4 *values, const uint4 *indices, int slab, int rows, int blocks, int end)
      : policy(fleeting()) {
    const int lane = threadIdx.x % LANES, side = lane % SIDE, eighth = lane / SIDE, group = (slab * 8 + eighth) / 4;
    const long long first = (long long)group * blocks + side;
    this->values = values + first * KEPT * 4 + eighth % 4, this->indices = indices + first * WORDS * 4 + eighth % 4;
    left = group * LANES < rows ? min(blocks, end * SIDE) - side : 0;
    hold(this->values), hold(this->indices);
  }

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
/* What one position of a convolution's kernel sees. */
struct Sight {
  const char *x;
  const uint4 *taps; /* of two columns each: how many bytes on in x they are, and their tap of the kernel as a bit */
  unsigned there;    /* taps that see the image */

  __device__ __forceinline__ Sight(const Value *images, const uint4 *taps, int position, int image, int height,
                                   int width, int line, int area, int n)
      : taps(taps), there(0) {
    const int place = position % area;
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

  /* The so manieth 8 columns. */
  __device__ __forceinline__ uint4 gather(int piece) const {
    unsigned got[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 two = taps[piece * 4 + i];
      got[i] = load(two.x, two.y) | load(two.z, two.w) << 16;
    }
    return {got[0], got[1], got[2], got[3]};
  }
};
#endif

#if CONV
#define GIVEN const uint4 *taps, int rows, int blocks, int n, int image, int height, int width, int line, int area, \
              int wide, int relu
#else
#define GIVEN int rows, int columns, int pitch, int blocks, int n, int y_row, int y_vector, int wide, int relu
#endif

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
  return any_of(mine);
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

/* From sums in shared memory to y, whose rows and vectors are so far apart; in a convolution a row is all positions. */
__device__ __forceinline__ void complete(Value *y, const void *bias, float4 *parts, unsigned *tickets, int rows, int n,
                                         int y_row, int y_vector, int wide, int relu) {
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
      const long long start = (long long)(vector / y_row) * rows * y_row + vector % y_row;
#else
      const long long start = (long long)vector * y_vector;
#endif
      if (vector < n) store(sum[k], y + start + (long long)row * y_row, y_row, bias, wide, row, rows, relu);
    }
  }
  if (SPLIT == CLUSTER && CLUSTER > 1) meet(); /* others may still be reading here */
}
