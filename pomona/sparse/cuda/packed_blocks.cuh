/* The loads of survivors, for the kernels that expand balanced blocks for tensor cores; and of a convolution's inputs.
 *
 * A lane loads the survivors of eight rows in one of STEP_BLOCKS blocks.
 */
#include "split_sums.cuh"

#ifndef EMULATED
/* Keep the compiler from recomputing a pointer at every use. */
__device__ __forceinline__ void pin_in_register(const uint4 *&pointer) { asm volatile("" : "+l"(pointer)); }
#endif

/* The survivors of eight rows in one block, two rows a register. */
struct Survivors {
  unsigned word[WORDS][4], value[KEPT][4];
};

/* A lane's position in the packed matrix. */
struct PackedReader {
  const uint4 *values, *indices;
  int left; /* blocks from the lane's first one to the end */
  CachePolicy policy;

  /* Read the slab of WARP_ROWS rows with this number, up to the step `end`. */
  __device__ __forceinline__ PackedReader(const uint4 *values, const uint4 *indices, int slab, int rows, int blocks,
                                          int end)
      : policy(evict_first_policy()) {
    const int lane = threadIdx.x % LANES, step_block = lane % STEP_BLOCKS, octet = lane / STEP_BLOCKS;
    const int group = (slab * 8 + octet) / 4;
    const long long first = (long long)group * blocks + step_block;
    this->values = values + first * KEPT * 4 + octet % 4, this->indices = indices + first * WORDS * 4 + octet % 4;
    left = group * LANES < rows ? min(blocks, end * STEP_BLOCKS) - step_block : 0;
    pin_in_register(this->values), pin_in_register(this->indices);
  }

  __device__ __forceinline__ void load(int step, Survivors &to) const {
    const bool valid = step * STEP_BLOCKS < left;
#pragma unroll
    for (int i = 0; i < WORDS; i++) load_registers(indices + (step * STEP_BLOCKS * WORDS + i) * 4, valid, to.word[i]);
#pragma unroll
    for (int i = 0; i < KEPT; i++) load_registers(values + (step * STEP_BLOCKS * KEPT + i) * 4, valid, to.value[i]);
  }

  __device__ __forceinline__ void load_registers(const uint4 *from, bool valid, unsigned *to) const {
    const uint4 got = valid ? load_streaming(from, policy) : uint4{0, 0, 0, 0};
    to[0] = got.x, to[1] = got.y, to[2] = got.z, to[3] = got.w;
  }
};

#if CONV
/* The gathering of the inputs of one output position of a convolution. */
struct ImageGather {
  const char *x;
  const uint4 *taps; /* for two columns each: the offset in x in bytes, and the tap of the kernel as a bit */
  unsigned inside;   /* the taps that lie inside the image, as bits */

  /* An image has `image_size` entries, and its output `out_width` positions in a row and `out_size` in all. */
  __device__ __forceinline__ ImageGather(const Value *images, const uint4 *taps, int position, int image_size,
                                         int height, int width, int out_width, int out_size, int n)
      : taps(taps), inside(0) {
    const int place = position % out_size;
    const int top = place / out_width * STRIDE_H - PADDING_H, left = place % out_width * STRIDE_W - PADDING_W;
    x = (const char *)(images + (long long)(position / out_size) * image_size + (long long)top * width + left);
    for (int tap = 0; tap < KERNEL_H * KERNEL_W; tap++) {
      const int row = top + tap / KERNEL_W * DILATION_H, column = left + tap % KERNEL_W * DILATION_W;
      const bool in_image = row >= 0 && row < height && column >= 0 && column < width;
      inside |= unsigned(in_image && position < n) << tap;
    }
  }

  __device__ __forceinline__ unsigned load(unsigned bytes, unsigned tap) const {
    return inside & tap ? *(const Value *)(x + bytes) : 0;
  }

  /* Return the 8 columns of one piece, counted from the first of the matrix. */
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
#define SIZE_PARAMETERS                                                                                            \
  const uint4 *taps, int rows, int blocks, int n, int image_size, int height, int width, int out_width, int out_size, \
      int float_bias, int relu
#else
#define SIZE_PARAMETERS                                                                                            \
  int rows, int columns, int pitch, int blocks, int n, int y_row, int y_vector, int float_bias, int relu
#endif
