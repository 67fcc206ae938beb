// Runs a CUDA kernel on a CPU: every thread is a fiber, and what a warp, a thread block or a cluster does together
// waits for all of it. Clusters run one after another, in another order at every launch. Copies that are under way arrive
// when they are waited for, no sooner.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#define EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __cluster_dims__(x, y, z)
#ifndef CLUSTER
#define CLUSTER 1 // thread blocks of a cluster, which are run together
#endif
#ifndef STAGES
#define STAGES 2
#endif

struct Index { int x, y, z; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
static Index threadIdx, blockIdx, gridDim;

// ---- fibers

static const int STACK = 1 << 16;
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(STACK);
  bool done, vote;
  int turns, groups, barriers, meetings; // how often it has met its warp, its four warps, its thread block, its cluster
  std::vector<std::vector<std::function<void()>>> copies, products; // groups under way; the last one is still open
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current;
static std::function<void()> body;
static std::mt19937 chance;

static void yield() { swapcontext(&fibers[current].context, &scheduler); }

// The shared memory of a thread block, which nothing may be read from before it is written, nor when it has gone.
static const int threads = WARPS * 32, DIRT = 0xA5;
struct Memory {
  uint4 shared[(SHARED + 15) / 16], guard[64];
  void spoil() { memset(shared, DIRT, sizeof shared); }
  bool sound() const {
    return std::all_of((const uint8_t *)guard, (const uint8_t *)(guard + 64), [](int byte) { return byte == DIRT; });
  }
};
static Memory memories[CLUSTER];
#define memory (memories[current / threads].shared)

static bool lost; // copies were under way at the end
static void enter() {
  body();
  for (const auto &group : fibers[current].copies) lost |= !group.empty();
  fibers[current].done = true;
  const auto first = fibers.begin() + current / threads * threads;
  if (std::all_of(first, first + threads, [](Fiber &fiber) { return fiber.done; })) memories[current / threads].spoil();
  yield();
}

// Waits until all fibers from one on have come here as often as this one.
static void gather(int Fiber::*count, int from, int many) {
  const int target = ++(fibers[current].*count);
  for (int i = from; i < from + many; i++)
    while (fibers[i].*count < target && !fibers[i].done) yield();
}

// ---- warps

static unsigned exchange[2][128][32][6];
static unsigned (*share(std::initializer_list<unsigned> mine))[6] {
  const int warp = current / 32;
  auto *all = exchange[fibers[current].turns % 2][warp];
  std::copy(mine.begin(), mine.end(), all[current % 32]);
  gather(&Fiber::turns, warp * 32, 32);
  return all;
}
static unsigned __shfl_sync(unsigned, unsigned value, int lane) { return share({value})[lane & 31][0]; }
static unsigned __ballot_sync(unsigned, bool value) {
  const auto *all = share({value});
  unsigned bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= all[lane][0] << lane;
  return bits;
}
static bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
static void __syncwarp() { share({}); }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }

// ---- thread blocks

static void __syncthreads() { gather(&Fiber::barriers, current / threads * threads, threads); }
static bool __syncthreads_or(bool mine) {
  fibers[current].vote = mine;
  __syncthreads();
  const auto first = fibers.begin() + current / threads * threads;
  const bool any = std::any_of(first, first + threads, [](Fiber &fiber) { return fiber.vote; });
  __syncthreads();
  return any;
}
static void __threadfence() {}
static float4 fresh(const float4 *from) { return *from; }
static unsigned atomicInc(unsigned *at, unsigned most) {
  const unsigned old = *at;
  *at = old >= most ? 0 : old + 1;
  return old;
}

typedef int Policy;
static Policy fleeting() { return 0; }
template <class T> static T stream(const T *from, Policy) { return *from; }
static float from_bits(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static unsigned to_bits(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static float from_half(unsigned bits) { _Float16 half; uint16_t low = bits; memcpy(&half, &low, 2); return half; }
static uint16_t to_half(float value) { _Float16 half = value; uint16_t bits; memcpy(&bits, &half, 2); return bits; }

// ---- what the tensor cores and clusters of a newer GPU do

using std::min;
static void copy(uint4 *to, const void *from, bool there) {
  fibers[current].copies.back().push_back([=] { there ? memcpy(to, from, 16) : memset(to, 0, 16); });
}
static void commit() { fibers[current].copies.emplace_back(); }
static void finish(std::vector<std::vector<std::function<void()>>> &groups, int pending) {
  for (; groups.size() > pending + 1; groups.erase(groups.begin()))
    for (auto &go : groups[0]) go();
}
static void wait() { finish(fibers[current].copies, STAGES > 1 ? STAGES - 2 : 0); }
static unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = (uint64_t)high << 32 | low;
  unsigned got = 0;
  for (int i = 0; i < 4; i++) got |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return got;
}
static void meet() { gather(&Fiber::meetings, 0, threads * CLUSTER); }
static float4 across(const float4 *here, int rank) {
  return *(const float4 *)((const char *)here + ((const char *)memories[rank].shared - (const char *)memory));
}
static float widen(unsigned bits);
static void mma(float *sums, const unsigned *a, unsigned b0, unsigned b1) {
  const auto *all = share({a[0], a[1], a[2], a[3], b0, b1});
  const int g = current % 32 / 4, t = current % 4;
  for (int i = 0; i < 4; i++) // row g or g + 8, vector 2t or 2t + 1
    for (int k = 0; k < 16; k++) {
      const int part = k % 8 / 2, shift = k % 2 * 16; // the lane of four that has it, and where
      const unsigned left = all[g * 4 + part][i / 2 + k / 8 * 2], right = all[(2 * t + i % 2) * 4 + part][4 + k / 8];
      sums[i] += widen(left >> shift & 0xFFFF) * widen(right >> shift & 0xFFFF);
    }
}

// ---- what those of Hopper do: barriers with a parity, and products of what is in shared memory, which are under way
// until they are waited for

static void hold(const uint4 *&) {}
static void together() { __syncthreads(); }
static bool any_of(bool mine) { return __syncthreads_or(mine); }

struct Barrier { uint8_t many, missing, parity; int bytes; }; // those that are still to come
static std::vector<std::function<void()>> coming; // copies that no thread waits for by itself
static void prepare(Barrier *at, unsigned many) { *at = {(uint8_t)many, (uint8_t)many, 0, 0}; }
static void complete(Barrier *at) {
  if (!at->missing && !at->bytes) at->missing = at->many, at->parity ^= 1;
}
static void arrive(Barrier *at) {
  if (!at->missing--) abort();
  complete(at);
}
static void expect(Barrier *at, unsigned bytes) { at->bytes += bytes, arrive(at); }
static void await(Barrier *at, unsigned parity) {
  for (; at->parity == parity; yield())
    if (!coming.empty() && chance() % 4 == 0) { // one of them arrives
      std::swap(coming[chance() % coming.size()], coming.back());
      const auto go = coming.back();
      coming.pop_back(), go();
    }
}

static const unsigned FIRST = 1024, RANK = 1 << 24; // the address of shared memory; from one of a cluster to the next
static unsigned address(const void *at) {
  return (const char *)at - (const char *)memory + FIRST + current / threads * RANK;
}
static void put(unsigned at, int offset, unsigned value) {
  const uint16_t low = value;
  memcpy((char *)memory + ((at + offset) % RANK - FIRST), &low, 2);
}
static void bring(unsigned to, const void *from, unsigned bytes, Barrier *full) {
  char *const at = (char *)memory + (to % RANK - FIRST);
  if (bytes % 16 || to % 16 || (uintptr_t)from % 16) abort();
  coming.push_back([=] { memcpy(at, from, bytes), full->bytes -= bytes, complete(full); });
}
static void show() {}
static void of_group(int group) { gather(&Fiber::groups, current / threads * threads + group * 128, 128); }
template <int> static void take() {}
template <int> static void give() {}

typedef uint64_t Description;
static bool eager; // products are done when they are begun, or when they are waited for
static float element(Description of, int row, int column) {
  const unsigned start = (of & 0x3FFF) << 4, columns = (of >> 16 & 0x3FFF) << 4, rows = (of >> 32 & 0x3FFF) << 4;
  if (of >> 46) abort();
  const unsigned at = start + column / 8 * columns + row / 8 * rows + row % 8 * 16 + column % 8 * 2;
  uint16_t bits;
  memcpy(&bits, (const char *)memory + (at - FIRST), 2);
  return widen(bits);
}
static void open() {}
static void close() { fibers[current].products.emplace_back(); }
static void finished() { finish(fibers[current].products, 0); }
#ifdef TURNED
static void multiply(float *sums, Description a, Description b) {
  const int many = TURNED ? 256 : EIGHTS * 8;
  const auto go = [=] {
    const int g = current % 32 / 4, t = current % 4, warp = current % threads / 32 % 4;
    for (int i = 0; i < many / 2; i++)
      for (int k = 0; k < 16; k++)
        sums[i] += element(a, warp * 16 + g + i / 2 % 2 * 8, k) * element(b, i / 4 * 8 + 2 * t + i % 2, k);
  };
  if (eager) go(); else fibers[current].products.back().push_back(go);
}
#endif

#include SOURCE

// ---- launch, with pointers to the arguments as CUDA has it; false where the kernel did what it must not

template <class... Given, size_t... I>
static void call(void (*kernel)(Given...), void **given, std::index_sequence<I...>) { kernel(*(Given *)given[I]...); }
template <class... Given> static void call(void (*kernel)(Given...), void **given) {
  call(kernel, given, std::index_sequence_for<Given...>());
}

extern "C" bool launch(int grid_x, int grid_y, int grid_z, void **given) {
  std::vector<int> order(grid_x * grid_y / CLUSTER * grid_z);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), chance);
  fibers.resize(threads * CLUSTER);
  eager = chance() % 2;
  gridDim = {grid_x, grid_y, grid_z};
  body = [=] { call(KERNEL, given); };
  memset(memories, DIRT, sizeof memories);
  for (int cluster : order) {
    const int x = cluster % grid_x, y = cluster / grid_x % (grid_y / CLUSTER), z = cluster / grid_x / (grid_y / CLUSTER);
    for (Fiber &fiber : fibers) {
      fiber.done = false, fiber.turns = fiber.groups = fiber.barriers = fiber.meetings = 0, fiber.copies.assign(1, {}), fiber.products = fiber.copies;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = STACK;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, enter, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (current = 0; current < threads * CLUSTER; current++)
        if (!fibers[current].done) {
          left = true;
          threadIdx = {current % threads, 0, 0}, blockIdx = {x, y * CLUSTER + current / threads, z};
          swapcontext(&scheduler, &fibers[current].context);
        }
    }
  }
  return grid_y % CLUSTER == 0 && coming.empty() && !lost && std::all_of(memories, memories + CLUSTER, [](Memory &one) { return one.sound(); });
}
