// An emulator that runs a CUDA kernel on a CPU. Every thread is a fiber, and collective operations of a warp, a thread
// block or a cluster wait for all its threads. Clusters run one after another, in a random order at every launch.
// Asynchronous copies are executed when they are waited for, no sooner.
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
#define __noinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __cluster_dims__(x, y, z)
#ifndef CLUSTER
#define CLUSTER 1 // thread blocks of a cluster, which run together
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
typedef std::vector<std::vector<std::function<void()>>> PendingGroups; // operations in progress, in committed groups
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(STACK);
  bool done, vote;
  int warp_exchanges, warpgroup_barriers, block_barriers, cluster_barriers; // how many of each it has reached
  PendingGroups copies, products; // the last group is still open
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current_fiber;
static std::function<void()> body;
static std::mt19937 random_engine;

static void yield() { swapcontext(&fibers[current_fiber].context, &scheduler); }

// The shared memory of a thread block. It is overwritten before its first use and after its last, so that a read of
// stale values is noticed, and followed by a guard against stores past its end.
static const int threads = WARPS * 32, FILL = 0xA5;
struct Memory {
  uint4 shared[(SHARED + 15) / 16], guard[64];
  void overwrite() { memset(shared, FILL, sizeof shared); }
  bool guard_intact() const {
    return std::all_of((const uint8_t *)guard, (const uint8_t *)(guard + 64), [](int byte) { return byte == FILL; });
  }
};
static Memory memories[CLUSTER];
#define memory (memories[current_fiber / threads].shared)

static bool unfinished_copies; // at the end of a fiber
static void run_fiber() {
  body();
  for (const auto &group : fibers[current_fiber].copies) unfinished_copies |= !group.empty();
  fibers[current_fiber].done = true;
  const auto first = fibers.begin() + current_fiber / threads * threads;
  const bool all_done = std::all_of(first, first + threads, [](Fiber &fiber) { return fiber.done; });
  if (all_done) memories[current_fiber / threads].overwrite();
  yield();
}

// Waits until `count` fibers from `first` on have reached a barrier as often as this one.
static void wait_for_fibers(int Fiber::*reached, int first, int count) {
  const int target = ++(fibers[current_fiber].*reached);
  for (int i = first; i < first + count; i++)
    while (fibers[i].*reached < target && !fibers[i].done) yield();
}

// ---- warps

static unsigned exchange[2][128][32][6];
static unsigned (*exchange_in_warp(std::initializer_list<unsigned> mine))[6] {
  const int warp = current_fiber / 32;
  auto *all = exchange[fibers[current_fiber].warp_exchanges % 2][warp];
  std::copy(mine.begin(), mine.end(), all[current_fiber % 32]);
  wait_for_fibers(&Fiber::warp_exchanges, warp * 32, 32);
  return all;
}
static unsigned __shfl_sync(unsigned, unsigned value, int lane) { return exchange_in_warp({value})[lane & 31][0]; }
static unsigned __ballot_sync(unsigned, bool value) {
  const auto *all = exchange_in_warp({value});
  unsigned bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= all[lane][0] << lane;
  return bits;
}
static bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
static void __syncwarp() { exchange_in_warp({}); }
static unsigned __reduce_add_sync(unsigned, unsigned mine) {
  const auto *all = exchange_in_warp({mine});
  return std::accumulate(all, all + 32, 0u, [](unsigned sum, const unsigned *one) { return sum + one[0]; });
}
static unsigned __dp4a(unsigned bytes, unsigned factors, unsigned sum) {
  for (int i = 0; i < 32; i += 8) sum += (bytes >> i & 255) * (factors >> i & 255);
  return sum;
}
static int __popc(unsigned bits) { return __builtin_popcount(bits); }

// ---- thread blocks

static void __syncthreads() { wait_for_fibers(&Fiber::block_barriers, current_fiber / threads * threads, threads); }
static bool __syncthreads_or(bool mine) {
  fibers[current_fiber].vote = mine;
  __syncthreads();
  const auto first = fibers.begin() + current_fiber / threads * threads;
  const bool any = std::any_of(first, first + threads, [](Fiber &fiber) { return fiber.vote; });
  __syncthreads();
  return any;
}
static void __threadfence() {}
static float4 load_uncached(const float4 *from) { return *from; }
static unsigned atomicInc(unsigned *at, unsigned most) {
  const unsigned old = *at;
  *at = old >= most ? 0 : old + 1;
  return old;
}

typedef int CachePolicy;
static CachePolicy evict_first_policy() { return 0; }
template <class T> static T load_streaming(const T *from, CachePolicy) { return *from; }
static float from_bits(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static unsigned to_bits(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static float from_half(unsigned bits) { _Float16 half; uint16_t low = bits; memcpy(&half, &low, 2); return half; }
static uint16_t to_half(float value) { _Float16 half = value; uint16_t bits; memcpy(&bits, &half, 2); return bits; }

// ---- tensor cores and clusters

using std::max;
using std::min;
static void copy_async(uint4 *to, const void *from, bool valid) {
  fibers[current_fiber].copies.back().push_back([=] { valid ? memcpy(to, from, 16) : memset(to, 0, 16); });
}
static void commit_copies() { fibers[current_fiber].copies.emplace_back(); }
// Executes all committed groups but the last `pending` ones.
static void run_pending(PendingGroups &groups, int pending) {
  for (; groups.size() > pending + 1; groups.erase(groups.begin()))
    for (auto &execute : groups[0]) execute();
}
static void wait_for_copies() { run_pending(fibers[current_fiber].copies, STAGES > 1 ? STAGES - 2 : 0); }
static void wait_for_all_copies() { run_pending(fibers[current_fiber].copies, 0); }
static unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = (uint64_t)high << 32 | low;
  unsigned got = 0;
  for (int i = 0; i < 4; i++) got |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return got;
}
static void sync_cluster() { wait_for_fibers(&Fiber::cluster_barriers, 0, threads * CLUSTER); }
static float4 load_from_cluster(const float4 *here, int rank) {
  return *(const float4 *)((const char *)here + ((const char *)memories[rank].shared - (const char *)memory));
}
static float to_float(unsigned bits);
static void mma(float *sums, const unsigned *a, unsigned b0, unsigned b1) {
  const auto *all = exchange_in_warp({a[0], a[1], a[2], a[3], b0, b1});
  const int g = current_fiber % 32 / 4, t = current_fiber % 4;
  for (int i = 0; i < 4; i++) // row g or g + 8, vector 2t or 2t + 1
    for (int k = 0; k < 16; k++) {
      const int part = k % 8 / 2, shift = k % 2 * 16; // the lane of four that has it, and where
      const unsigned left = all[g * 4 + part][i / 2 + k / 8 * 2], right = all[(2 * t + i % 2) * 4 + part][4 + k / 8];
      sums[i] += to_float(left >> shift & 0xFFFF) * to_float(right >> shift & 0xFFFF);
    }
}
static void mma_half(unsigned *d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const auto *all = exchange_in_warp({a0, a1, a2, a3, b0, b1});
  const int g = current_fiber % 32 / 4, t = current_fiber % 4;
  for (int i = 0; i < 4; i++) { // row g or g + 8, column 2t or 2t + 1
    float sum = from_half(d[i / 2] >> i % 2 * 16 & 0xFFFF);
    for (int k = 0; k < 16; k++) {
      const int part = k % 8 / 2, shift = k % 2 * 16;
      const unsigned left = all[g * 4 + part][i / 2 + k / 8 * 2], right = all[(2 * t + i % 2) * 4 + part][4 + k / 8];
      sum += from_half(left >> shift & 0xFFFF) * from_half(right >> shift & 0xFFFF);
    }
    d[i / 2] = d[i / 2] & (i % 2 ? 0xFFFFu : 0xFFFF0000u) | (unsigned)to_half(sum) << i % 2 * 16;
  }
}
static void mma_half(unsigned *d, unsigned a0, unsigned a1, unsigned b) { mma_half(d, a0, a1, 0, 0, b, 0); }
static void mma_half_twice(unsigned *d, unsigned a, const unsigned *b) { mma_half(d, a, 0, 0, a, b[0], b[1]); }

// ---- Hopper: barriers with a parity, and products of factors in shared memory, in progress until they are waited for

static void pin_in_register(const uint4 *&) {}
static void sync_finishing_threads() { __syncthreads(); }
static bool any_finishing_thread(bool mine) { return __syncthreads_or(mine); }

struct Barrier { uint8_t count, expected, parity; int bytes; }; // `expected` arrivals and `bytes` are still missing
static std::vector<std::function<void()>> bulk_copies; // in progress; a barrier waits for them, not a thread
static void init_barrier(Barrier *at, unsigned count) { *at = {(uint8_t)count, (uint8_t)count, 0, 0}; }
static void complete_phase(Barrier *at) {
  if (!at->expected && !at->bytes) at->expected = at->count, at->parity ^= 1;
}
static void arrive(Barrier *at) {
  if (!at->expected--) abort();
  complete_phase(at);
}
static void arrive_expecting_bytes(Barrier *at, unsigned bytes) { at->bytes += bytes, arrive(at); }
static void wait_barrier(Barrier *at, unsigned parity) {
  for (; at->parity == parity; yield())
    if (!bulk_copies.empty() && random_engine() % 4 == 0) { // complete one of them
      std::swap(bulk_copies[random_engine() % bulk_copies.size()], bulk_copies.back());
      const auto execute = bulk_copies.back();
      bulk_copies.pop_back(), execute();
    }
}

// The address of shared memory, and the distance from one thread block of a cluster to the next.
static const unsigned FIRST = 1024, RANK = 1 << 24;
static unsigned shared_address(const void *at) {
  return (const char *)at - (const char *)memory + FIRST + current_fiber / threads * RANK;
}
static void store_shared(unsigned at, int offset, unsigned value) {
  const uint16_t low = value;
  memcpy((char *)memory + ((at + offset) % RANK - FIRST), &low, 2);
}
static void copy_bulk_async(unsigned to, const void *from, unsigned bytes, Barrier *full) {
  char *const at = (char *)memory + (to % RANK - FIRST);
  if (bytes % 16 || to % 16 || (uintptr_t)from % 16) abort();
  bulk_copies.push_back([=] { memcpy(at, from, bytes), full->bytes -= bytes, complete_phase(full); });
}
static unsigned load_next(unsigned &next) {
  uint16_t got;
  memcpy(&got, (const char *)memory + (next % RANK - FIRST), 2), next += 2;
  return got;
}
static void load_low(unsigned &to, unsigned &next, unsigned) { to = load_next(next); }
static void load_high(unsigned &to, unsigned &next, unsigned) { to = to & 0xFFFF | load_next(next) << 16; }
static void fence_async_proxy() {}
static void sync_warpgroup(int group) {
  wait_for_fibers(&Fiber::warpgroup_barriers, current_fiber / threads * threads + group * 128, 128);
}
template <int> static void raise_register_limit() {}
template <int> static void lower_register_limit() {}

typedef uint64_t Descriptor;
static bool multiply_at_once; // products are computed when they start, else when they are waited for
static float element(Descriptor of, int row, int column) {
  const unsigned start = (of & 0x3FFF) << 4, columns = (of >> 16 & 0x3FFF) << 4, rows = (of >> 32 & 0x3FFF) << 4;
  if (of >> 46) abort();
  const unsigned at = start + column / 8 * columns + row / 8 * rows + row % 8 * 16 + column % 8 * 2;
  uint16_t bits;
  memcpy(&bits, (const char *)memory + (at - FIRST), 2);
  return to_float(bits);
}
static void wgmma_fence() {}
static void wgmma_commit() { fibers[current_fiber].products.emplace_back(); }
static void wgmma_wait() { run_pending(fibers[current_fiber].products, 0); }
#ifdef SWAP_OPERANDS
static void wgmma(float *sums, Descriptor a, Descriptor b) {
  const int count = SWAP_OPERANDS ? 256 : VECTOR_TILES * 8;
  const auto execute = [=] {
    const int g = current_fiber % 32 / 4, t = current_fiber % 4, warp = current_fiber % threads / 32 % 4;
    for (int i = 0; i < count / 2; i++)
      for (int k = 0; k < 16; k++)
        sums[i] += element(a, warp * 16 + g + i / 2 % 2 * 8, k) * element(b, i / 4 * 8 + 2 * t + i % 2, k);
  };
  if (multiply_at_once) execute(); else fibers[current_fiber].products.back().push_back(execute);
}
#endif

#include SOURCE

// ---- launch, with pointers to the arguments as in CUDA; false where the kernel broke a rule

template <class... Given, size_t... I>
static void call(void (*kernel)(Given...), void **given, std::index_sequence<I...>) { kernel(*(Given *)given[I]...); }
template <class... Given> static void call(void (*kernel)(Given...), void **given) {
  call(kernel, given, std::index_sequence_for<Given...>());
}

extern "C" bool launch(int grid_x, int grid_y, int grid_z, void **given) {
  std::vector<int> order(grid_x * grid_y / CLUSTER * grid_z);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_engine);
  fibers.resize(threads * CLUSTER);
  multiply_at_once = random_engine() % 2;
  gridDim = {grid_x, grid_y, grid_z};
  body = [=] { call(KERNEL, given); };
  memset(memories, FILL, sizeof memories);
  for (int cluster : order) {
    const int rows = grid_y / CLUSTER, x = cluster % grid_x, y = cluster / grid_x % rows, z = cluster / grid_x / rows;
    for (Fiber &fiber : fibers) {
      fiber.done = false, fiber.copies.assign(1, {}), fiber.products = fiber.copies;
      fiber.warp_exchanges = fiber.warpgroup_barriers = fiber.block_barriers = fiber.cluster_barriers = 0;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = STACK;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (current_fiber = 0; current_fiber < threads * CLUSTER; current_fiber++)
        if (!fibers[current_fiber].done) {
          left = true;
          threadIdx = {current_fiber % threads, 0, 0}, blockIdx = {x, y * CLUSTER + current_fiber / threads, z};
          swapcontext(&scheduler, &fibers[current_fiber].context);
        }
    }
  }
  const bool intact = std::all_of(memories, memories + CLUSTER, [](Memory &one) { return one.guard_intact(); });
  return intact && grid_y % CLUSTER == 0 && bulk_copies.empty() && !unfinished_copies;
}
