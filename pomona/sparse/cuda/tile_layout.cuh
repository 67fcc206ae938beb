/* The layout of a step of x, STEP_BLOCKS blocks, for the kernels on tensor cores. Macros: WIDTH of a block in x, and
 * VECTOR_TILES of 8 vectors. */
#define STEP_BLOCKS 4             /* blocks of a step, side by side */
#define PIECES (WIDTH / 8)        /* pieces, of 8 columns and 16 bytes, of a vector in a block */
#define VECTORS (VECTOR_TILES * 8)

/* wgmma reads core matrices: 8 rows, or vectors, of 8 columns each. */
#define CORE_BYTES 128
#define COLUMN_SLICES (WIDTH / 2) /* slices of 8 columns in a step */

/* Store one piece of a vector, of each block of a step, as hopper_wgmma.cu reads it: two columns of all blocks side by
 * side. */
__device__ __forceinline__ void store_pieces(const uint4 *from, int vector, int part, uint4 *stage) {
  uint4 *const to = stage + (part * 4 * VECTOR_TILES + vector / 8) * 8 + vector % 8;
  to[0 * VECTOR_TILES * 8] = {from[0].x, from[1].x, from[2].x, from[3].x};
  to[1 * VECTOR_TILES * 8] = {from[0].y, from[1].y, from[2].y, from[3].y};
  to[2 * VECTOR_TILES * 8] = {from[0].z, from[1].z, from[2].z, from[3].z};
  to[3 * VECTOR_TILES * 8] = {from[0].w, from[1].w, from[2].w, from[3].w};
}
