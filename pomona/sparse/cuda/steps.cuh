/* A step of x, SIDE blocks, for kernels on tensor cores. Given as macros: WIDTH of a block, EIGHTS of vectors. */
#define SIDE 4                             /* blocks side by side */
#define PARTS (WIDTH / 8)                  /* pieces, of 16 bytes, of a vector in a block */
#define VECTORS (EIGHTS * 8)

/* What wgmma reads is made of cores: 8 rows, or vectors, of 8 columns each. */
#define CORE 128                           /* bytes */
#define SLICES (WIDTH / 2)                 /* of 8 columns, in a step */

/* A piece of a vector, of each block, as hopper.cu has it: two columns of all blocks side by side. */
__device__ __forceinline__ void lay(const uint4 *from, int vector, int part, uint4 *stage) {
  uint4 *const to = stage + (part * 4 * EIGHTS + vector / 8) * 8 + vector % 8;
  to[0 * EIGHTS * 8] = {from[0].x, from[1].x, from[2].x, from[3].x};
  to[1 * EIGHTS * 8] = {from[0].y, from[1].y, from[2].y, from[3].y};
  to[2 * EIGHTS * 8] = {from[0].z, from[1].z, from[2].z, from[3].z};
  to[3 * EIGHTS * 8] = {from[0].w, from[1].w, from[2].w, from[3].w};
}
