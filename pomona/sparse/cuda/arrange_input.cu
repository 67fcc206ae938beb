/* Arrange x in the stages of hopper_wgmma.cu: each is a step of VECTORS vectors in contiguous memory, so that one copy
 * brings it.
 *
 * Macros: VALUE_TYPE, WIDTH and VECTOR_TILES as in hopper_wgmma.cu, and WARPS. x has n rows, `pitch` apart, of which
 * the first `columns` entries are valid, a multiple of 8; everything else becomes zero. A thread has 8 columns in each
 * block of a vector.
 */
#include "value_types.cuh"
#include "tile_layout.cuh"
#define STEP_THREADS (VECTORS * PIECES) /* threads that arrange a step */

/* Allow hopper_wgmma.cu to start; it waits for this kernel before it reads x. */
__device__ __forceinline__ void launch_next() {
#ifndef EMULATED
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES)
arrange_input(const Value *x, uint4 *stages, int columns, int pitch, int steps, int n) {
  launch_next();
  const int thread = blockIdx.x * WARPS * LANES + threadIdx.x, step = thread / STEP_THREADS;
  if (step >= steps) return;
  /* 8 neighbouring threads have 8 vectors, and the next 8 the next piece of them */
  const int inner = thread % STEP_THREADS / 8, part = inner % PIECES, vector = inner / PIECES * 8 + thread % 8;
  const Value *const from = x + (long long)(blockIdx.y * VECTORS + vector) * pitch;
  uint4 got[STEP_BLOCKS];
#pragma unroll
  for (int step_block = 0; step_block < STEP_BLOCKS; step_block++) {
    const int column = (step * STEP_BLOCKS + step_block) * WIDTH + part * 8;
    const bool valid = blockIdx.y * VECTORS + vector < n && column < columns;
    got[step_block] = valid ? *(const uint4 *)(from + column) : uint4{0, 0, 0, 0};
  }
  store_pieces(got, vector, part, stages + ((long long)blockIdx.y * steps + step) * (STEP_BLOCKS * STEP_THREADS));
}
