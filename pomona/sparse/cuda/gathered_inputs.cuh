/* Inputs in shared memory, from which threads gather the columns of their survivors.
 *
 * Macros: VALUE_TYPE of values and x; VECTORS, a power of two, of which the first `vectors` are there; and WARPS of a
 * thread block. */
#include "value_types.cuh"

#ifndef EMULATED
extern __shared__ uint4 memory[];
#endif

/* The inputs of one column, which are side by side and read with one load. */
#define COLUMN_BYTES (VECTORS * (VALUE_TYPE == 0 ? 4 : 2))
#if COLUMN_BYTES == 2
typedef unsigned short Column;
#elif COLUMN_BYTES == 4
typedef unsigned Column;
#elif COLUMN_BYTES == 8
typedef uint2 Column;
#else
typedef uint4 Column;
#endif

/* What is added up for a survivor and an input: their product; the product, where the survivor is no padding; or 1 where
 * the input is infinite or NaN and the survivor is no padding. */
enum Term { PRODUCT, CAREFUL_PRODUCT, NONFINITE_INPUT };

/* Return the entry of vector i in the inputs of a column. */
__device__ __forceinline__ float input_at(const Value *column, int i) { return value_to_float(column[i]); }

/* Add the terms of the survivor with these bits and the inputs of its column to the sums of its row. */
template <Term TERM> __device__ __forceinline__ void add_terms(unsigned bits, int column, float *sums) {
  const Column inputs = ((const Column *)memory)[column];
  const float weight = to_float(bits);
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const float input = input_at((const Value *)&inputs, i);
    if (TERM == PRODUCT) sums[i] += weight * input;
    else if (bits) sums[i] += TERM == CAREFUL_PRODUCT ? weight * input : input - input != 0;
  }
}

/* Store 16 bytes as four words. */
__device__ __forceinline__ void unpack_words(uint4 loaded, unsigned *to) {
  to[0] = loaded.x, to[1] = loaded.y, to[2] = loaded.z, to[3] = loaded.w;
}

__device__ __forceinline__ bool is_nonfinite(Value value) {
  const float number = value_to_float(value);
  return number - number != 0;
}

/* Copy one vector from aligned memory to shared memory; return the columns that were copied. */
__device__ __forceinline__ int copy_vector(const Value *x, int columns, bool &nonfinite) {
  const int load = 16 / (int)sizeof(Value), loads = columns / load; /* of 16 bytes */
#pragma unroll 2
  for (int at = threadIdx.x; at < loads; at += WARPS * LANES) {
    const uint4 loaded = ((const uint4 *)x)[at];
    memory[at] = loaded;
#pragma unroll
    for (int i = 0; i < load; i++) nonfinite |= is_nonfinite(((const Value *)&loaded)[i]);
  }
  return loads * load;
}

/* Copy vectors of 16 bits, two columns of each at a time; return the columns that were copied. */
__device__ __forceinline__ int copy_pairs(const Value *x, int vectors, int pitch, int columns, bool &nonfinite) {
#pragma unroll 4
  for (int pair = threadIdx.x; pair < columns / 2; pair += WARPS * LANES) {
    Column loaded[2];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const unsigned both = i < vectors ? ((const unsigned *)(x + (long long)i * pitch))[pair] : 0;
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const Value input = both >> 16 * side;
        ((Value *)&loaded[side])[i] = input;
        nonfinite |= is_nonfinite(input);
      }
    }
    ((Column *)memory)[2 * pair] = loaded[0];
    ((Column *)memory)[2 * pair + 1] = loaded[1];
  }
  return columns / 2 * 2;
}

/* Copy x to shared memory, with zeros from `columns` to `padded_columns`; all threads of the thread block call this.
 * Return whether an input is infinite or NaN; nonfinite_inputs are then their numbers, one for each vector. */
__device__ __forceinline__ bool load_inputs(const Value *x, int vectors, int pitch, int columns, int padded_columns,
                                            int *nonfinite_inputs) {
  bool nonfinite = false;
  int copied = 0;
  if (VECTORS == 1) {
    if ((unsigned long long)x % 16 == 0) copied = copy_vector(x, columns, nonfinite);
  } else if (sizeof(Value) == 2) {
    if ((unsigned long long)x % 4 == 0 && pitch % 2 == 0) copied = copy_pairs(x, vectors, pitch, columns, nonfinite);
  }
  for (int column = copied + threadIdx.x; column < padded_columns; column += WARPS * LANES) {
    Column loaded;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const Value input = i < vectors && column < columns ? x[(long long)i * pitch + column] : (Value)0;
      ((Value *)&loaded)[i] = input;
      nonfinite |= is_nonfinite(input);
    }
    ((Column *)memory)[column] = loaded;
  }
  nonfinite = __syncthreads_or(nonfinite);
  if (nonfinite && threadIdx.x < VECTORS) {
    int count = 0;
#pragma unroll 1
    for (int column = 0; column < columns; column++)
      count += is_nonfinite(((const Value *)memory)[(long long)column * VECTORS + threadIdx.x]);
    nonfinite_inputs[threadIdx.x] = count;
  }
  return nonfinite;
}
