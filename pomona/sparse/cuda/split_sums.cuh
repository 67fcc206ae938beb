/* The reduction of sums to the product, which all kernels for tensor cores share.
 *
 * At the end, the sums of a thread block lie in shared memory by vector and row, SLICE_K of each. SPLIT_K thread blocks
 * share the columns. They add up their sums in a fixed order: first those of a CLUSTER, which can read each other's
 * shared memory, then the clusters. Each cluster writes its sums to `partial_sums` and increments an arrival counter,
 * and the last one to arrive adds up all of them. THREADS threads of a thread block take part.
 */
#ifndef CONV
#define CONV 0
#endif
#include "tile_layout.cuh"
#define WARP_ROWS 64                                /* rows of a warp */
#define SUM_PITCH (SLABS * WARP_ROWS + 4)           /* distance of two vectors' sums, padded against bank conflicts */
#define ROW_QUADS (SLABS * WARP_ROWS / 4 / CLUSTER) /* groups of four rows that a thread block finishes */
#define OWN_QUADS (VECTORS * ROW_QUADS)             /* groups of four sums that a thread block finishes */
/* Groups of four sums that a thread reads at a time. */
#define THREAD_QUADS (OWN_QUADS < 4 * THREADS ? (OWN_QUADS + THREADS - 1) / THREADS : 4)
#define PARTIAL_SUMS (SPLIT_K / CLUSTER)            /* parts of a sum that are added up through global memory */

#ifndef EMULATED
extern __shared__ uint4 memory[];

/* Wait for the threads of the thread block that finish the product. */
__device__ __forceinline__ void sync_finishing_threads() { asm volatile("bar.sync 0, %0;" ::"n"(THREADS) : "memory"); }
/* Wait for these threads; return whether any of them passed true. */
__device__ __forceinline__ bool any_finishing_thread(bool mine) {
  unsigned got;
  asm volatile("{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %1, 0;\nbar.red.or.pred any, 0, %2, mine;\n"
               "selp.u32 %0, 1, 0, any;\n}"
               : "=r"(got)
               : "r"((unsigned)mine), "n"(THREADS)
               : "memory");
  return got;
}

/* Wait for the finishing threads of the whole cluster. */
__device__ __forceinline__ void sync_cluster() {
#if CLUSTER == 1
  sync_finishing_threads();
#else
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

/* Load from the same place in the shared memory of another thread block of the cluster. */
__device__ __forceinline__ float4 load_from_cluster(const float4 *here, int rank) {
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

/* Load what another thread block has written, bypassing the L1 cache, which may hold an older value. */
__device__ __forceinline__ float4 load_uncached(const float4 *from) {
  float4 got;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(got.x), "=f"(got.y), "=f"(got.z), "=f"(got.w)
               : "l"(from)
               : "memory");
  return got;
}
#endif

#if CLUSTER == 1
#define CLUSTER_ATTRIBUTE
#else
#define CLUSTER_ATTRIBUTE __cluster_dims__(1, CLUSTER, 1)
#endif

/* The vector and the group of four rows of the ith group of sums: neighbouring threads write to neighbouring places. */
#define QUAD_VECTOR(i) (CONV ? (i) % VECTORS : (i) / ROW_QUADS)
#define QUAD_ROW(i) (blockIdx.y % CLUSTER * ROW_QUADS + (CONV ? (i) / VECTORS : (i) % ROW_QUADS))
/* The index of the kth group that a thread reads at a time; past the end, the last one is read again. */
#define QUAD_INDEX(k) \
  (OWN_QUADS % (THREAD_QUADS * THREADS) ? min(i + (k) * THREADS, OWN_QUADS - 1) : i + (k) * THREADS)

__device__ __forceinline__ void add(float4 &sum, float4 part) {
  sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
}

/* Return the ith group of sums, added up over the warps and the thread blocks of the cluster. */
__device__ __forceinline__ float4 sum_over_cluster(int i) {
  float4 sum = {};
#pragma unroll
  for (int j = 0; j < CLUSTER * SLICE_K; j++) {
    const float *const here = (float *)memory + (j % SLICE_K * VECTORS + QUAD_VECTOR(i)) * SUM_PITCH + QUAD_ROW(i) * 4;
    add(sum, load_from_cluster((const float4 *)here, j / SLICE_K));
  }
  return sum;
}

/* Return whether this thread block is the last of PARTIAL_SUMS to arrive; it then sees what the others have written. */
__device__ __forceinline__ bool is_last_arrival(unsigned *counter) {
  bool is_last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicInc(counter, PARTIAL_SUMS - 1) == PARTIAL_SUMS - 1; /* the last increment wraps to zero */
    __threadfence();
  }
  return any_finishing_thread(is_last);
}

/* Finish four rows of a vector, and write those that exist to y. */
__device__ __forceinline__ void store_quad(float4 sum, Value *y, long long stride, const void *bias, int float_bias,
                                           int row, int rows, int relu) {
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  Value finished[4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (row + i < rows) finished[i] = finish_sum(sums[i], bias, float_bias, row + i, relu);
  if (stride == 1 && row + 4 <= rows && (unsigned long long)y % 8 == 0)
    *(uint2 *)y = {finished[0] | (unsigned)finished[1] << 16, finished[2] | (unsigned)finished[3] << 16};
  else
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (row + i < rows) y[i * stride] = finished[i];
}

/* Reduce the sums in shared memory to y, whose rows are `y_row` and vectors `y_vector` apart. In a convolution, `y_row`
 * is the number of positions of an image. */
__device__ __forceinline__ void reduce_and_store(Value *y, const void *bias, float4 *partial_sums, unsigned *arrivals,
                                                 int rows, int n, int y_row, int y_vector, int float_bias, int relu) {
  sync_cluster();
#if PARTIAL_SUMS > 1
  const int tile = (blockIdx.z * gridDim.x + blockIdx.x) * CLUSTER + blockIdx.y % CLUSTER;
  partial_sums += (long long)tile * PARTIAL_SUMS * OWN_QUADS;
#pragma unroll 1
  for (int i = threadIdx.x; i < OWN_QUADS; i += THREAD_QUADS * THREADS) {
    float4 sum[THREAD_QUADS];
#pragma unroll
    for (int k = 0; k < THREAD_QUADS; k++) sum[k] = sum_over_cluster(QUAD_INDEX(k));
#pragma unroll
    for (int k = 0; k < THREAD_QUADS; k++) partial_sums[blockIdx.y / CLUSTER * OWN_QUADS + QUAD_INDEX(k)] = sum[k];
  }
  sync_cluster();
  if (!is_last_arrival(arrivals + tile)) return;
#endif
#pragma unroll 1
  for (int i = threadIdx.x; i < OWN_QUADS; i += THREAD_QUADS * THREADS) {
    float4 sum[THREAD_QUADS] = {};
#pragma unroll
    for (int k = 0; k < THREAD_QUADS * PARTIAL_SUMS; k++)
      add(sum[k / PARTIAL_SUMS],
          PARTIAL_SUMS > 1
              ? load_uncached(partial_sums + k % PARTIAL_SUMS * OWN_QUADS + QUAD_INDEX(k / PARTIAL_SUMS))
              : sum_over_cluster(QUAD_INDEX(k)));
#pragma unroll
    for (int k = 0; k < THREAD_QUADS; k++) {
      const int vector = blockIdx.x * VECTORS + QUAD_VECTOR(QUAD_INDEX(k));
      const int row = blockIdx.z * SLABS * WARP_ROWS + QUAD_ROW(QUAD_INDEX(k)) * 4;
#if CONV
      const long long start = (long long)(vector / y_row) * rows * y_row + vector % y_row;
#else
      const long long start = (long long)vector * y_vector;
#endif
      if (vector < n) store_quad(sum[k], y + start + (long long)row * y_row, y_row, bias, float_bias, row, rows, relu);
    }
  }
  if (SPLIT_K == CLUSTER && CLUSTER > 1) sync_cluster(); /* others may still be reading this shared memory */
}
