/* The kinds of values, for all kernels. Given as a macro: KIND (0 float, 1 half, 2 bfloat16). */

#if KIND == 0
typedef float Value;
#else
typedef unsigned short Value;
#endif
typedef unsigned short Word;

#define LANES 32
#define ALL 0xFFFFFFFFu
#define WORDS ((KEPT + 2) / 3) /* three indices of 5 bits in each */

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

/* How the matrix is read: each part once, so it is the first to leave the cache again, and all else can stay there. */
typedef unsigned long long Policy;
__device__ __forceinline__ Policy fleeting() {
  Policy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
#define STREAM "ld.global.L1::no_allocate.L2::cache_hint.L2::128B"
__device__ __forceinline__ unsigned short stream(const unsigned short *from, Policy policy) {
  unsigned short got;
  asm volatile(STREAM ".u16 %0, [%1], %2;" : "=h"(got) : "l"(from), "l"(policy) : "memory");
  return got;
}
__device__ __forceinline__ unsigned stream(const unsigned *from, Policy policy) {
  unsigned got;
  asm volatile(STREAM ".u32 %0, [%1], %2;" : "=r"(got) : "l"(from), "l"(policy) : "memory");
  return got;
}
__device__ __forceinline__ float stream(const float *from, Policy policy) {
  float got;
  asm volatile(STREAM ".f32 %0, [%1], %2;" : "=f"(got) : "l"(from), "l"(policy) : "memory");
  return got;
}
__device__ __forceinline__ uint4 stream(const uint4 *from, Policy policy) {
  uint4 got;
  asm volatile(STREAM ".v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
               : "l"(from), "l"(policy)
               : "memory");
  return got;
}
#endif

__device__ __forceinline__ float widen(unsigned bits) {
#if KIND == 0
  return from_bits(bits);
#elif KIND == 1
  return from_half(bits & 0xFFFF);
#else
  return from_bits(bits << 16);
#endif
}

__device__ __forceinline__ Value narrow(float value) {
#if KIND == 0
  return value;
#elif KIND == 1
  return to_half(value);
#else
  unsigned bits = to_bits(value);
  if (value != value) return 0x7FC0;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; /* to the nearest, ties to even */
#endif
}

__device__ __forceinline__ float widen_value(Value value) {
#if KIND == 0
  return value;
#else
  return widen(value);
#endif
}

/* A sum as it is stored, with a bias of floats if `wide`, else of values; a NaN stays one. */
__device__ __forceinline__ Value finish(float sum, const void *bias, int wide, int row, int relu) {
  if (bias) sum += wide ? ((const float *)bias)[row] : widen_value(((const Value *)bias)[row]);
  return narrow(relu && sum < 0 ? 0.0f : sum);
}
