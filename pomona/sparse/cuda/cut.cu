/* x, cut into the stages of hopper.cu: each a step of VECTORS vectors, all side by side, so that one copy brings it.
 *
 * Given as macros: KIND, WIDTH, EIGHTS as in hopper.cu, and WARPS. x is n × pitch, of which `columns` are there, a
 * multiple of 8; there are zeros for all the others. A thread has 8 columns in each block of a vector.
 */
#include "kinds.cuh"
#include "steps.cuh"
#define UNITS (VECTORS * PARTS)            /* threads that a step takes */

/* Let hopper.cu begin, all but what reads x. */
__device__ __forceinline__ void invite() {
#ifndef EMULATED
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES)
cut(const Value *x, uint4 *stages, int columns, int pitch, int steps, int n) {
  invite();
  const int unit = blockIdx.x * WARPS * LANES + threadIdx.x, step = unit / UNITS;
  if (step >= steps) return;
  /* threads have 8 vectors at a time, and of these what is side by side */
  const int inner = unit % UNITS / 8, part = inner % PARTS, vector = inner / PARTS * 8 + unit % 8;
  const Value *const from = x + (long long)(blockIdx.y * VECTORS + vector) * pitch;
  uint4 got[SIDE];
#pragma unroll
  for (int side = 0; side < SIDE; side++) {
    const int column = (step * SIDE + side) * WIDTH + part * 8;
    const bool there = blockIdx.y * VECTORS + vector < n && column < columns;
    got[side] = there ? *(const uint4 *)(from + column) : uint4{0, 0, 0, 0};
  }
  lay(got, vector, part, stages + ((long long)blockIdx.y * steps + step) * (SIDE * UNITS));
}
