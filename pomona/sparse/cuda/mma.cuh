/* Asynchronous copies to shared memory, and products of matrices by a warp, whose lane 4g + t has rows 8g to 8g + 7. To be
 * included after split_sums.cuh. Macros: VALUE_TYPE (1 half, 2 bfloat16), and STAGES of shared memory. */

#ifndef EMULATED
/* Start a copy of 16 bytes to shared memory, or of zeros where the source is not valid. */
__device__ __forceinline__ void copy_async(uint4 *to, const void *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from),
               "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES > 1 ? STAGES - 2 : 0) : "memory");
}
__device__ __forceinline__ void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void mma(float *sums, const unsigned *a, unsigned b0, unsigned b1) {
#if VALUE_TYPE == 1
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
  asm(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Return four of the eight bytes of two registers. Unlike __byte_perm, this does not mask the selector. */
__device__ __forceinline__ unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
  unsigned got;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(got) : "r"(low), "r"(high), "r"(selector));
  return got;
}
#endif

/* Store the sums of a warp in shared memory, where they are reduced. */
__device__ __forceinline__ void store_warp_sums(const float (*sums)[VECTOR_TILES][4]) {
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
#pragma unroll
  for (int i = 0; i < VECTOR_TILES * 4; i++) { /* two of the rows are in each tile */
    const int vector_tile = i / 4, odd = i / 2 % 2, tile = i % 2 * 2;
    const float *low = sums[tile][vector_tile] + odd, *high = sums[tile + 1][vector_tile] + odd;
    const int vector = (warp % SLICE_K * VECTOR_TILES + vector_tile) * 8 + lane % 4 * 2 + odd;
    const int row = warp / SLICE_K * WARP_ROWS + lane / 4 * 8 + tile * 2;
    *(float4 *)((float *)memory + vector * SUM_PITCH + row) = {low[0], low[2], high[0], high[2]};
  }
}
