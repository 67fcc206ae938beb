/* The types of values, their conversions and loads, for all kernels. Macro: VALUE_TYPE (0 float,
 * 1 half, 2 bfloat16). */

#if VALUE_TYPE == 0
typedef float Value;
#else
typedef unsigned short Value;
#endif
typedef unsigned short Word;

#define LANES 32
#define FULL_MASK 0xFFFFFFFFu
#define WORDS ((KEPT + 2) / 3) /* of 16 bits, with three indices of 5 bits in each */

#ifndef EMULATED
__device__ __forceinline__ float from_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned to_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float from_half(unsigned bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}
__device__ __forceinline__ unsigned short to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

/* The cache policy for the matrix: each part is read once, so that it is evicted first and everything else can stay. */
typedef unsigned long long CachePolicy;
__device__ __forceinline__ CachePolicy evict_first_policy() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
#define STREAMING_LOAD "ld.global.L1::no_allocate.L2::cache_hint.L2::128B"
__device__ __forceinline__ unsigned short load_streaming(const unsigned short *from, CachePolicy policy) {
  unsigned short got;
  asm volatile(STREAMING_LOAD ".u16 %0, [%1], %2;" : "=h"(got) : "l"(from), "l"(policy) : "memory");
  return got;
}
__device__ __forceinline__ unsigned load_streaming(const unsigned *from, CachePolicy policy) {
  unsigned got;
  asm volatile(STREAMING_LOAD ".u32 %0, [%1], %2;" : "=r"(got) : "l"(from), "l"(policy) : "memory");
  return got;
}
__device__ __forceinline__ float load_streaming(const float *from, CachePolicy policy) {
  float got;
  asm volatile(STREAMING_LOAD ".f32 %0, [%1], %2;" : "=f"(got) : "l"(from), "l"(policy) : "memory");
  return got;
}
__device__ __forceinline__ uint4 load_streaming(const uint4 *from, CachePolicy policy) {
  uint4 got;
  asm volatile(STREAMING_LOAD ".v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
               : "l"(from), "l"(policy)
               : "memory");
  return got;
}
#endif

__device__ __forceinline__ float to_float(unsigned bits) {
#if VALUE_TYPE == 0
  return from_bits(bits);
#elif VALUE_TYPE == 1
  return from_half(bits & 0xFFFF);
#else
  return from_bits(bits << 16);
#endif
}

__device__ __forceinline__ Value to_value(float value) {
#if VALUE_TYPE == 0
  return value;
#elif VALUE_TYPE == 1
  return to_half(value);
#else
  unsigned bits = to_bits(value);
  if (value != value) return 0x7FC0;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; /* to the nearest, ties to even */
#endif
}

__device__ __forceinline__ float value_to_float(Value value) {
#if VALUE_TYPE == 0
  return value;
#else
  return to_float(value);
#endif
}

/* Return a sum as it is stored, with the bias added, of floats if `float_bias`, else of values. ReLU keeps a NaN. */
__device__ __forceinline__ Value finish_sum(float sum, const void *bias, int float_bias, int row, int relu) {
  if (bias) sum += float_bias ? ((const float *)bias)[row] : value_to_float(((const Value *)bias)[row]);
  return to_value(relu && sum < 0 ? 0.0f : sum);
}
