// Runs the CUDA kernel on a CPU: every thread is a fiber, and a warp's votes and shuffles wait for all its lanes.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(threads)

struct Index { int x; };
static thread_local Index threadIdx, blockIdx;

static const int STACK = 1 << 16;
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> stacks, finished;
static int current;
static unsigned exchange[2][64][32];
static std::vector<int> turns;

static void yield() { swapcontext(&fibers[current], &scheduler); }

// All lanes write their value; once every lane of the warp has passed the same point, each may read.
static std::vector<int> arrived;
static const unsigned *meet(unsigned value) {
  int me = current, warp = me / 32, turn = turns[me]++;
  exchange[turn % 2][warp][me % 32] = value;
  arrived[me] = turn + 1;
  for (int lane = warp * 32; lane < warp * 32 + 32; lane++)
    while (arrived[lane] < turn + 1) yield();
  return exchange[turn % 2][warp];
}
static unsigned __shfl_sync(unsigned, unsigned value, int lane) { return meet(value)[lane & 31]; }
static unsigned __ballot_sync(unsigned, bool value) {
  const unsigned *all = meet(value);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= (all[lane] != 0) << lane;
  return bits;
}
static bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }

static std::vector<int> barriers;
static void __syncthreads() {
  int target = ++barriers[current];
  for (size_t other = 0; other < barriers.size(); other++)
    while (barriers[other] < target && !finished[other]) yield();
}

static float from_bits(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static unsigned to_bits(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static float from_half(unsigned bits) { _Float16 half; uint16_t low = bits; memcpy(&half, &low, 2); return half; }
static uint16_t to_half(float value) { _Float16 half = value; uint16_t bits; memcpy(&bits, &half, 2); return bits; }

#include SOURCE

static std::function<void()> body;
static void enter() { body(); finished[current] = 1; swapcontext(&fibers[current], &scheduler); }

extern "C" void launch(int grid, const Value *values, const Word *indices, const Value *x, const float *bias, Value *y,
                       int rows, int columns, int block, int blocks, int n, int relu) {
  const int threads = WARPS * LANES;
  fibers.resize(threads), stacks.resize((size_t)threads * STACK);
  for (int cta = 0; cta < grid; cta++) {
    finished.assign(threads, 0), turns.assign(threads, 0), arrived.assign(threads, 0), barriers.assign(threads, 0);
    body = [&] { few(values, indices, x, bias, y, rows, columns, block, blocks, n, relu); };
    for (int i = 0; i < threads; i++) {
      getcontext(&fibers[i]);
      fibers[i].uc_stack = {&stacks[(size_t)i * STACK], 0, (size_t)STACK};
      fibers[i].uc_link = nullptr;
      makecontext(&fibers[i], enter, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (current = 0; current < threads; current++)
        if (!finished[current]) {
          left = true;
          threadIdx.x = current, blockIdx.x = cta;
          swapcontext(&scheduler, &fibers[current]);
        }
    }
  }
}
