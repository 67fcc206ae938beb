/* The product of a balanced matrix of int4 or int8 codes with a few vectors on an NVIDIA GPU; compiled at run time.
 *
 * The lanes of a warp are 32 rows. A unit is what they have in UNIT_BLOCKS consecutive blocks, as code_units.py arranges
 * it: for each lane the words of its indices, of its codes, and of its scales, four words of a lane side by side, so that
 * a warp loads 512 consecutive bytes at a time. A lane also holds one column of x in each of these blocks, and a shuffle
 * gives every row the column that its survivor needs. With GATHER, rows read their columns from shared memory instead.
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
 * first `vectors` are there; STAGED_INPUTS, whether x comes through shared memory, as several vectors do; GATHER, which
 * needs that; CHUNK_BLOCKS, a divisor of UNIT_BLOCKS, whose columns are in registers at a time; WARPS of a thread block;
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
#define COLUMN_REGISTERS (VALUE_TYPE == 0 || VECTORS == 1 ? VECTORS : VECTORS / 2)
#define COLUMN_FLOATS (VALUE_TYPE == 0 || VECTORS == 1) /* a register holds a float, else two vectors */

#ifdef EMULATED
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

/* The columns of x in CHUNK_BLOCKS blocks, one of each for every lane. */
struct Columns {
  unsigned registers[GATHER ? 1 : CHUNK_BLOCKS][COLUMN_REGISTERS];
  const Column *staged; /* those of the first block */

  /* Load the columns of the blocks from first_block on, where staged_block is the first one in shared memory. `zero`
   * becomes NaN where one of them is infinite or NaN, unless they are staged. */
  __device__ __forceinline__ void load(const Product &product, int first_block, int staged_block, float &zero) {
    staged = (const Column *)memory + (first_block - staged_block) * BLOCK;
    if (GATHER) return;
    const bool complete = BLOCK == LANES && (first_block + CHUNK_BLOCKS) * BLOCK <= product.columns;
    if (STAGED_INPUTS) load_staged();
    else if (complete) load_values<true>(product, first_block * BLOCK, zero);
    else load_values<false>(product, first_block * BLOCK, zero);
  }

  __device__ __forceinline__ void load_staged() {
    const int own = threadIdx.x % INDEX_PERIOD;
#pragma unroll
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
      const Column found = staged[b * BLOCK + (own < BLOCK ? own : 0)];
#pragma unroll
      for (int i = 0; i < COLUMN_REGISTERS; i++)
        registers[b][i] = VECTORS == 1 ? to_bits(input_at((const Value *)&found, 0)) : ((const unsigned *)&found)[i];
    }
  }

  /* Load the columns of a single vector from x; `COMPLETE` says that no block goes past the last one. */
  template <bool COMPLETE>
  __device__ __forceinline__ void load_values(const Product &product, int first_column, float &zero) {
    const int own = threadIdx.x % INDEX_PERIOD, left = own < BLOCK ? product.columns - first_column - own : 0;
    const Value *const from = product.x + first_column + own;
    Value found[CHUNK_BLOCKS];
#pragma unroll
    for (int b = 0; b < CHUNK_BLOCKS; b++)
      found[b] = COMPLETE || b * BLOCK < left ? from[b * BLOCK] : (Value)0;
#pragma unroll
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
      const float entry = value_to_float(found[b]);
      registers[b][0] = to_bits(entry);
      zero += 0 * entry;
    }
  }

  /* Return the entry of vector i from the registers of a column. */
  static __device__ __forceinline__ float vector_value(const unsigned *column, int i) {
    return COLUMN_FLOATS ? from_bits(column[i]) : to_float(column[i / 2] >> 16 * (i % 2));
  }

  /* Give every lane the column of block b with its index, whose bits above INDEX_BITS are arbitrary. */
  __device__ __forceinline__ void pick(int b, unsigned index, float *inputs) const {
    if (GATHER) {
      const Column found = staged[b * BLOCK + (index & INDEX_MASK)];
#pragma unroll
      for (int i = 0; i < VECTORS; i++) inputs[i] = input_at((const Value *)&found, i);
    } else {
      unsigned picked[COLUMN_REGISTERS];
#pragma unroll
      for (int i = 0; i < COLUMN_REGISTERS; i++) picked[i] = __shfl_sync(FULL_MASK, registers[b][i], index);
#pragma unroll
      for (int i = 0; i < VECTORS; i++) inputs[i] = vector_value(picked, i);
    }
  }
};

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

  /* Add the products of the blocks from first_block on to the totals; `sums` are those of the scale that is unfinished. */
  __device__ __forceinline__ void multiply(const Columns &columns, const CodeBases &bases, int first_block, float *sums,
                                           float *totals) const {
#pragma unroll
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
      const int block = first_block + b;
#pragma unroll
      for (int s = 0; s < KEPT; s++) {
        const int n = block * KEPT + s;
        const float weight = code(n, bases);
        float inputs[VECTORS];
        columns.pick(b, index(n), inputs);
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
          sums[i] = block % SCALE_BLOCKS || s ? sums[i] + weight * inputs[i] : weight * inputs[i];
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
__device__ __forceinline__ void multiply_units(const Product &product, UnitOrder order, Ring &ring, int staged_block,
                                               bool nonfinite, float *own_sums) {
  const CachePolicy policy = evict_first_policy();
  const CodeBases bases;
  const UnitOrder all = order;
  Columns columns;
  float zero = 0; /* NaN where an input is infinite or NaN */
#pragma unroll 1
  for (int loaded_slice = -1; order.left > 0; order.advance()) {
    const int first_block = order.slice * UNIT_BLOCKS;
    if (CHUNK_BLOCKS == UNIT_BLOCKS && order.slice != loaded_slice)
      columns.load(product, first_block, staged_block, zero);
    loaded_slice = order.slice;
    Unit unit;
    unit.load(STAGES > 1 ? ring.wait() : order.address(product), policy);
    float sums[VECTORS], totals[VECTORS] = {};
#pragma unroll
    for (int block = 0; block < UNIT_BLOCKS; block += CHUNK_BLOCKS) {
      if (CHUNK_BLOCKS < UNIT_BLOCKS) columns.load(product, first_block + block, staged_block, zero);
      unit.multiply(columns, bases, block, sums, totals);
    }
    ring.fill(product);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) own_sums[(order.group * VECTORS + i) * (WARPS * LANES)] += totals[i];
  }
  if (__any_sync(FULL_MASK, nonfinite || zero != 0)) propagate_nonfinite(product, all, own_sums);
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
  __shared__ int nonfinite_inputs[VECTORS];
  const Product product = {units, x, bias, y, partial_sums, arrivals, rows, columns, pitch, slices, tile_groups, vectors,
                           y_row, y_vector, float_bias, relu};
  const int first_group = blockIdx.x * tile_groups, groups = (rows + LANES - 1) / LANES - first_group;
  const int count = groups < tile_groups ? groups : tile_groups, parts = gridDim.y;
  const int first_slice = blockIdx.y * slices / parts, end_slice = (blockIdx.y + 1) * slices / parts;
  const int staged_loads = STAGED_INPUTS ? (slices + parts - 1) / parts * UNIT_COLUMNS * COLUMN_BYTES / 16 : 0;
  uint4 *const ring_memory = memory + staged_loads;
  float *const sums = (float *)(ring_memory + RING_LOADS), *const own_sums = sums + threadIdx.x;
  const UnitOrder order(count, first_slice, end_slice);
  Ring ring(product, ring_memory, order);
  for (int i = 0; i < count * VECTORS; i++) own_sums[i * (WARPS * LANES)] = 0;
  bool nonfinite = false;
  if (STAGED_INPUTS) {
    const int first = first_slice * UNIT_COLUMNS, staged = (end_slice - first_slice) * UNIT_COLUMNS;
    const int there = columns - first < staged ? columns - first : staged;
    nonfinite = load_inputs(x + first, vectors, pitch, there < 0 ? 0 : there, staged, nonfinite_inputs);
  }
  multiply_units(product, order, ring, first_slice * UNIT_BLOCKS, nonfinite, own_sums);
  __syncthreads();
  finish(product, sums, first_group, count);
}
