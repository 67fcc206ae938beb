/* The product of a balanced matrix of int4 or int8 codes with a few vectors on an NVIDIA GPU; compiled at run time.
 *
 * The lanes of a warp are 32 rows. A unit is what they have in UNIT_BLOCKS consecutive blocks, as code_units.py arranges
 * it: for each lane the words of its indices, of its codes, and of its scales, four words of a lane side by side, so that
 * a warp loads 512 consecutive bytes at a time. For one vector, a lane also holds one column of x in each of these blocks,
 * and a shuffle gives every row the column that its survivor needs. With GATHER, rows read their columns from shared
 * memory, where the columns of a block lie in different banks: two vectors of 16 bits are a word, and words of other
 * vectors are in other planes.
 *
 * A thread block has `tile_groups` groups of 32 rows and every gridDim.y-th part of the columns. Its warps share the units
 * evenly, those of the same columns one after another, so that they read x once. Every lane copies its words through a
 * ring of STAGES units in shared memory, ahead of their use. The sums of the warps are added up in shared memory, and
 * those of gridDim.y thread blocks in global memory by the last one to arrive: always in the same order.
 *
 * A code c of b bits is stored as c + 2^(b - 1). It becomes a float without a conversion: it is the low bits of a power
 * of two, at any place in the word, and that power is subtracted.
 *
 * Macros: VALUE_TYPE of x (0 float, 1 half, 2 bfloat16); KEPT survivors of a BLOCK of columns, with INDEX_BITS each;
 * CODE_BITS (4 or 8); UNIT_BLOCKS; SCALE_BLOCKS, a divisor of it, that share a scale; VECTORS, a power of two, of which the
 * first `vectors` are there; GATHER, which several vectors and wider blocks than a warp need; WARPS of a thread block;
 * STAGES, or 1 to load units into registers; and MIN_BLOCKS, the thread blocks that a multiprocessor has to hold.
 */
#include "gathered_inputs.cuh"

#define INDEX_MASK ((1 << INDEX_BITS) - 1)
#define INDEX_PERIOD (INDEX_BITS < 5 ? 1 << INDEX_BITS : LANES) /* lanes after which the columns repeat */
#define UNIT_COLUMNS (UNIT_BLOCKS * BLOCK)
#define UNIT_SURVIVORS (UNIT_BLOCKS * KEPT)
#define WORD_INDICES (32 / INDEX_BITS)
#define WORD_CODES (32 / CODE_BITS)
#define HALF_CODES (WORD_CODES / 2) /* in half a word */
#define INDEX_WORDS ((UNIT_SURVIVORS + WORD_INDICES - 1) / WORD_INDICES)
#define CODE_WORDS ((UNIT_SURVIVORS + WORD_CODES - 1) / WORD_CODES)
#define UNIT_LOADS ((INDEX_WORDS + CODE_WORDS + UNIT_BLOCKS / SCALE_BLOCKS + 3) / 4) /* of 16 bytes and a lane */
#define RING_LOADS (STAGES > 1 ? WARPS * STAGES * UNIT_LOADS * LANES : 0)
#define PLANE_VECTORS (VALUE_TYPE == 0 || VECTORS == 1 ? 1 : 2) /* whose inputs of a column are side by side */
#define PLANES (VECTORS / PLANE_VECTORS)
#if PLANE_VECTORS == 1
typedef Value Input;
#else
typedef unsigned Input;
#endif

#ifdef EMULATED
static Value load_input(const Value *from) { return *from; }
static unsigned insert_bits(unsigned from, unsigned mask, unsigned into) { return from & mask | into; }
#else
__device__ __forceinline__ void copy_async(uint4 *to, const uint4 *from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
               "l"(from), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES > 1 ? STAGES - 2 : 0) : "memory");
}

/* Load an input where the program says so: not after copies that were started later. */
#if VALUE_TYPE == 0
__device__ __forceinline__ Value load_input(const Value *from) {
  Value got;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(got) : "l"(from) : "memory");
  return got;
}
#else
__device__ __forceinline__ Value load_input(const Value *from) {
  Value got;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(got) : "l"(from) : "memory");
  return got;
}
#endif

/* Return the masked bits of a word inside others. */
__device__ __forceinline__ unsigned insert_bits(unsigned from, unsigned mask, unsigned into) {
  unsigned got;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(got) : "r"(from), "r"(mask), "r"(into));
  return got;
}
#endif

/* The arguments of the kernel. */
struct Product {
  const uint4 *units; /* groups × slices × UNIT_LOADS × 32 */
  const Value *x;
  const void *bias;
  Value *y;
  float *partial_sums; /* tiles × gridDim.y × tile_groups × VECTORS × 32 */
  unsigned *arrivals;  /* of each tile */
  int rows, columns, pitch, slices, tile_groups, vectors, y_row, y_vector, float_bias, relu;

  /* Return an entry of x; zero outside of it. */
  __device__ __forceinline__ Value input(int vector, int column) const {
    return vector < vectors && column < columns ? x[(long long)vector * pitch + column] : (Value)0;
  }
};

/* The columns of x in the blocks of a unit, of which a lane has one of each; for one vector. */
struct Columns {
  Value loaded[GATHER ? 1 : UNIT_BLOCKS];
  float inputs[GATHER ? 1 : UNIT_BLOCKS];

  /* Start to load the columns of a slice. */
  __device__ __forceinline__ void load(const Product &product, int slice) {
    if (GATHER) return;
    const int own = threadIdx.x % INDEX_PERIOD, first = slice * UNIT_COLUMNS;
    const int left = own < BLOCK ? product.columns - first - own : 0;
    const Value *const from = product.x + first + own;
    if (BLOCK == LANES && first + UNIT_COLUMNS <= product.columns)
#pragma unroll
      for (int b = 0; b < UNIT_BLOCKS; b++) loaded[b] = load_input(from + b * BLOCK);
    else
#pragma unroll
      for (int b = 0; b < UNIT_BLOCKS; b++) loaded[b] = b * BLOCK < left ? from[b * BLOCK] : (Value)0;
  }

  /* Convert what was loaded; `zero` becomes NaN where a column is infinite or NaN. */
  __device__ __forceinline__ void convert(float &zero) {
    if (GATHER) return;
#pragma unroll
    for (int b = 0; b < UNIT_BLOCKS; b++) {
      inputs[b] = value_to_float(loaded[b]);
      zero += 0 * inputs[b];
    }
  }
};

/* Return the entry of vector i in the planes of a column, which are `distance` apart. */
__device__ __forceinline__ float input_in_planes(const Input *column, int distance, int i) {
#if PLANE_VECTORS == 1
  return value_to_float(column[i * distance]);
#else
  return to_float(column[i / 2 * distance] >> 16 * (i % 2));
#endif
}

/* Copy the columns of x from first_column on to the planes of each block in shared memory, and zeros after the last
 * one. All threads of the thread block call this. Return whether an input is infinite or NaN. */
__device__ __forceinline__ bool stage_inputs(const Product &product, int first_column, int count) {
  bool nonfinite = false;
#pragma unroll 2
  for (int at = threadIdx.x; at < count; at += WARPS * LANES) {
    const int column = first_column + at, left = column < product.columns ? product.vectors : 0;
    Input *const to = (Input *)memory + at / BLOCK * (PLANES * BLOCK) + at % BLOCK;
    const Value *const from = product.x + column;
    Value found[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) found[i] = i < left ? from[(long long)i * product.pitch] : (Value)0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      nonfinite |= is_nonfinite(found[i]);
#if PLANE_VECTORS == 1
      to[i * BLOCK] = found[i];
#else
      if (i % 2) to[i / 2 * BLOCK] = found[i - 1] | (unsigned)found[i] << 16;
#endif
    }
  }
  return __syncthreads_or(nonfinite);
}

/* The floats from which the codes at HALF_CODES places of a word are made, in registers. */
struct CodeBases {
  unsigned bits[HALF_CODES];

  __device__ __forceinline__ CodeBases() {
#pragma unroll
    /* gridDim.z is 1; the compiler would make two instructions of one with two constants */
    for (int i = 0; i < HALF_CODES; i++) bits[i] = gridDim.z * (127 + 23 - i * CODE_BITS << 23);
  }
};

/* What a lane has of a unit. */
struct Unit {
  unsigned words[UNIT_LOADS * 4];

  __device__ __forceinline__ void load(const uint4 *from, CachePolicy policy) {
#pragma unroll
    for (int i = 0; i < UNIT_LOADS; i++)
      unpack_words(STAGES > 1 ? from[i * LANES] : load_streaming(from + i * LANES, policy), words + 4 * i);
  }

  /* Return the index of the nth survivor, with other bits above it. */
  __device__ __forceinline__ unsigned index(int n) const {
    return words[n / WORD_INDICES] >> n % WORD_INDICES * INDEX_BITS;
  }

  __device__ __forceinline__ float code(int n, const CodeBases &bases) const {
    const int half = n % WORD_CODES / HALF_CODES, place = n % HALF_CODES, shift = place * CODE_BITS;
    const unsigned word = words[INDEX_WORDS + n / WORD_CODES] >> 16 * half;
    return from_bits(insert_bits(word, (1 << CODE_BITS) - 1 << shift, bases.bits[place])) -
           (float)((1 << 23 - shift) + (1 << CODE_BITS - 1));
  }

  __device__ __forceinline__ float scale(int n) const { return from_bits(words[INDEX_WORDS + CODE_WORDS + n]); }

  /* Add the products to the totals; `staged` are the columns of the unit in shared memory, or else `columns`. */
  __device__ __forceinline__ void multiply(const Columns &columns, const Input *staged, const CodeBases &bases,
                                           float *totals) const {
    float sums[VECTORS];
#pragma unroll
    for (int block = 0; block < UNIT_BLOCKS; block++) {
#pragma unroll
      for (int s = 0; s < KEPT; s++) {
        const int n = block * KEPT + s;
        const float weight = code(n, bases);
        const Input *const column = staged + block * (PLANES * BLOCK) + (index(n) & INDEX_MASK);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
          const float input = GATHER ? input_in_planes(column, BLOCK, i)
                                     : from_bits(__shfl_sync(FULL_MASK, to_bits(columns.inputs[block]), index(n)));
          sums[i] = block % SCALE_BLOCKS || s ? sums[i] + weight * input : weight * input;
        }
      }
      if (block % SCALE_BLOCKS == SCALE_BLOCKS - 1)
#pragma unroll
        for (int i = 0; i < VECTORS; i++) totals[i] += scale(block / SCALE_BLOCKS) * sums[i];
    }
  }
};

/* The units of a warp, in the order in which it reads them. */
struct UnitOrder {
  int group, slice, count, left; /* `count` groups of the thread block, and the units that are left */

  /* Go to the first unit of a warp, of the slices from `first` to `end`. */
  __device__ __forceinline__ UnitOrder(int count, int first, int end) : count(count) {
    const int warp = threadIdx.x / LANES, units = (end - first) * count, from = warp * units / WARPS;
    left = (warp + 1) * units / WARPS - from;
    slice = first + from / count, group = from % count;
  }

  __device__ __forceinline__ void advance() {
    left--;
    if (++group == count) group = 0, slice++;
  }

  /* Return the first load of a lane. */
  __device__ __forceinline__ const uint4 *address(const Product &product) const {
    const long long unit = (long long)(blockIdx.x * product.tile_groups + group) * product.slices + slice;
    return product.units + unit * (UNIT_LOADS * LANES) + threadIdx.x % LANES;
  }
};

/* The ring through which a lane copies its words. */
struct Ring {
  uint4 *const own;   /* the first load of the lane */
  int filled, used;   /* stages */
  UnitOrder next;     /* the unit that is copied next */

  __device__ __forceinline__ Ring(const Product &product, uint4 *ring, UnitOrder order)
      : own(ring + threadIdx.x / LANES * (STAGES * UNIT_LOADS * LANES) + threadIdx.x % LANES), filled(0), used(0),
        next(order) {
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fill(product);
  }

  /* Start to copy the next unit, if there is one. */
  __device__ __forceinline__ void fill(const Product &product) {
    if (STAGES == 1) return;
    if (next.left > 0) {
      const uint4 *const from = next.address(product);
#pragma unroll
      for (int i = 0; i < UNIT_LOADS; i++) copy_async(own + (filled * UNIT_LOADS + i) * LANES, from + i * LANES, true);
      next.advance();
    }
    commit_copies();
    filled = filled + 1 == STAGES ? 0 : filled + 1;
  }

  /* Wait for the oldest unit and return its first load. */
  __device__ __forceinline__ const uint4 *wait() {
    wait_for_copies();
    const uint4 *const oldest = own + used * (UNIT_LOADS * LANES);
    used = used + 1 == STAGES ? 0 : used + 1;
    return oldest;
  }
};

/* Make the sums NaN that a pruned weight times an infinity or NaN makes NaN in the dense product. */
__device__ __noinline__ void propagate_nonfinite(const Product &product, UnitOrder order, float *own_sums) {
#pragma unroll 1
  for (; order.left > 0; order.advance()) {
    const unsigned *const words = (const unsigned *)order.address(product);
#pragma unroll 1
    for (int at = 0; at < UNIT_BLOCKS * VECTORS; at++) {
      const int b = at / VECTORS, i = at % VECTORS, first = (order.slice * UNIT_BLOCKS + b) * BLOCK;
      int all = 0, kept = 0;
#pragma unroll 1
      for (int c = 0; c < BLOCK; c++) all += is_nonfinite(product.input(i, first + c));
#pragma unroll 1
      for (int n = b * KEPT; n < (b + 1) * KEPT; n++) {
        const int word = n / WORD_INDICES;
        const unsigned index = words[word / 4 * (4 * LANES) + word % 4] >> n % WORD_INDICES * INDEX_BITS & INDEX_MASK;
        kept += index < BLOCK && is_nonfinite(product.input(i, first + index));
      }
      if (kept != all) own_sums[(order.group * VECTORS + i) * (WARPS * LANES)] = from_bits(0x7FC00000u);
    }
  }
}

/* Multiply the units of this warp, and add the sums of each to those that the warp has of its group. */
__device__ __forceinline__ void multiply_units(const Product &product, const UnitOrder &all, uint4 *ring_memory,
                                               int first_slice, int end_slice, float *own_sums) {
  const CachePolicy policy = evict_first_policy();
  const CodeBases bases;
  UnitOrder order = all;
  Columns columns;
  Unit unit;
  if (order.left > 0) columns.load(product, order.slice); /* first, so that x does not wait for the matrix */
  Ring ring(product, ring_memory, order);
  if (STAGES == 1 && order.left > 0) unit.load(order.address(product), policy);
  float zero = 0; /* NaN where an input is infinite or NaN */
  if (GATHER && stage_inputs(product, first_slice * UNIT_COLUMNS, (end_slice - first_slice) * UNIT_COLUMNS)) zero = 1;
  columns.convert(zero);
#pragma unroll 1
  while (order.left > 0) {
    const UnitOrder now = order;
    order.advance();
    if (STAGES > 1) unit.load(ring.wait(), policy);
    float totals[VECTORS] = {};
    const Input *const staged = (const Input *)memory + (now.slice - first_slice) * (UNIT_COLUMNS * PLANES);
    unit.multiply(columns, staged, bases, totals);
    if (STAGES > 1) ring.fill(product);
    else if (order.left > 0) unit.load(order.address(product), policy);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) own_sums[(now.group * VECTORS + i) * (WARPS * LANES)] += totals[i];
    if (order.left > 0 && order.slice != now.slice) {
      columns.load(product, order.slice);
      columns.convert(zero);
    }
  }
  if (__any_sync(FULL_MASK, zero != 0)) propagate_nonfinite(product, all, own_sums);
}

/* Return whether this thread block is the last of gridDim.y to arrive; it then sees what the others have written. */
__device__ __forceinline__ bool is_last_arrival(unsigned *counter) {
  bool is_last = false;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicInc(counter, gridDim.y - 1) == gridDim.y - 1; /* the last increment wraps to zero */
    __threadfence();
  }
  return __syncthreads_or(is_last);
}

/* Add up the sums of the warps, and those of the thread blocks that share the columns, and write them to y. */
__device__ __forceinline__ void finish(const Product &product, const float *sums, int first_group, int count) {
  const int lane = threadIdx.x % LANES, tile_sums = product.tile_groups * VECTORS * LANES, parts = gridDim.y;
  float *const exchange = product.partial_sums + (long long)blockIdx.x * parts * tile_sums;
  for (int run = parts == 1; run < 2; run++) {
    for (int at = threadIdx.x; at < count * VECTORS * LANES; at += WARPS * LANES) {
      float sum = 0;
      if (parts == 1 || run == 0)
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += sums[at / LANES * (WARPS * LANES) + warp * LANES + lane];
      else
        for (int part = 0; part < parts; part++) sum += ((const volatile float *)exchange)[part * tile_sums + at];
      const int row = (first_group + at / LANES / VECTORS) * LANES + lane, vector = at / LANES % VECTORS;
      if (run == 0) exchange[blockIdx.y * tile_sums + at] = sum;
      else if (row < product.rows && vector < product.vectors)
        product.y[(long long)row * product.y_row + (long long)vector * product.y_vector] =
            finish_sum(sum, product.bias, product.float_bias, row, product.relu);
    }
    if (run == 0 && !is_last_arrival(product.arrivals + blockIdx.x)) return;
  }
}

extern "C" __global__ void __launch_bounds__(WARPS *LANES, MIN_BLOCKS)
code_gather(const uint4 *units, const Value *x, const void *bias, Value *y, float *partial_sums, unsigned *arrivals,
            int rows, int columns, int pitch, int slices, int tile_groups, int vectors, int y_row, int y_vector,
            int float_bias, int relu) {
  const Product product = {units, x, bias, y, partial_sums, arrivals, rows, columns, pitch, slices, tile_groups, vectors,
                           y_row, y_vector, float_bias, relu};
  const int first_group = blockIdx.x * tile_groups, groups = (rows + LANES - 1) / LANES - first_group;
  const int count = groups < tile_groups ? groups : tile_groups, parts = gridDim.y;
  const int first_slice = blockIdx.y * slices / parts, end_slice = (blockIdx.y + 1) * slices / parts;
  const int staged_bytes = (slices + parts - 1) / parts * UNIT_COLUMNS * VECTORS * (int)sizeof(Value);
  uint4 *const ring = memory + (GATHER ? (staged_bytes + 15) / 16 : 0);
  float *const sums = (float *)(ring + RING_LOADS), *const own_sums = sums + threadIdx.x;
  for (int i = 0; i < count * VECTORS; i++) own_sums[i * (WARPS * LANES)] = 0;
  multiply_units(product, UnitOrder(count, first_slice, end_slice), ring, first_slice, end_slice, own_sums);
  __syncthreads();
  finish(product, sums, first_group, count);
}
