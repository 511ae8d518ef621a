// Force-included where g++ compiles a kernel for tests/kernel_host.py: CUDA's names, and a block's threads as
// fibers, so that barriers and shuffles work. One thread of the host runs the whole grid, block by block.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __shared__ static
struct Dim {
    unsigned x;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
static Dim threadIdx, blockIdx, gridDim;

namespace host {
enum State { READY, AT_BARRIER, IN_WARP, DONE };
struct Fiber {
    ucontext_t context;
    State state;
    unsigned long long given[2];  // two, for a lane may reach the next exchange before another has read
    int round;
};
const int THREADS = 256, STACK = 64 << 10;
static Fiber fibers[THREADS];
static char stacks[THREADS][STACK];
static ucontext_t scheduler;
static int current;
static long long integers[10];
static double reals[2];
static void (*body)();

static void yield(State state) {
    fibers[current].state = state;
    swapcontext(&fibers[current].context, &scheduler);
}
static void enter() {
    // Integers and reals travel in separate registers, so a kernel finds its own among these.
    typedef void (*Kernel)(long long, long long, long long, long long, long long, long long, long long, long long,
                           long long, long long, double, double);
    const long long* a = integers;
    reinterpret_cast<Kernel>(body)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], reals[0],
                                   reals[1]);
    yield(DONE);
}
static unsigned long long exchange(unsigned long long value, int source_lane) {
    const int me = current, warp = me / 32 * 32, round = fibers[me].round ^= 1;
    fibers[me].given[round] = value;
    yield(IN_WARP);
    return fibers[warp + source_lane].given[round];
}
static int count(State state, int begin, int end) {
    int n = 0;
    for (int i = begin; i < end; i++) n += fibers[i].state == state;
    return n;
}
static void release(int begin, int end) {
    for (int i = begin; i < end; i++) fibers[i].state = READY;
}
static void run_warp(int begin) {
    do {
        for (int i = begin; i < begin + 32; i++) {
            if (fibers[i].state != READY) continue;
            current = i;
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
        }
        if (count(IN_WARP, begin, begin + 32) < 32) return;
        release(begin, begin + 32);
    } while (true);
}
static void run_block() {
    for (int i = 0; i < THREADS; i++) {
        Fiber& fiber = fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks[i];
        fiber.context.uc_stack.ss_size = STACK;
        fiber.state = READY;
        makecontext(&fiber.context, enter, 0);
    }
    for (unsigned pass = blockIdx.x; count(DONE, 0, THREADS) < THREADS; pass++) {
        // In another order each time: a missing barrier shows as a wrong value.
        for (int warp = 0; warp < THREADS; warp += 32) run_warp(pass % 2 ? warp : THREADS - 32 - warp);
        if (count(AT_BARRIER, 0, THREADS) == THREADS) release(0, THREADS);
        else if (count(DONE, 0, THREADS) < THREADS) {
            fprintf(stderr, "some threads wait where others don't\n");
            abort();
        }
    }
}
template <class T> static T shuffle(T value, int source_lane) {
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(bits, source_lane);
    memcpy(&value, &bits, sizeof value);
    return value;
}
static unsigned ballot(bool set) {
    const int warp = current / 32 * 32, round = fibers[current].round ^ 1;
    exchange(set, 0);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= static_cast<unsigned>(fibers[warp + lane].given[round]) << lane;
    return bits;
}
template <class To, class From> static To bits(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace host

// What -fsanitize=thread calls for each access, =bounds for an index beyond its array, and =alignment: their libraries
// need not be there. A kernel may touch the tensors of its launch, and of the rest this library alone, where shared
// memory and the fibers' stacks are.
extern "C" char __ehdr_start __attribute__((visibility("hidden"))), _end __attribute__((visibility("hidden")));
extern "C" long long misaligned = 0, outside = 0, first_outside = 0, bytes_outside = 0;
#define UNCHECKED __attribute__((no_sanitize("thread", "bounds", "alignment")))
#define HOOK extern "C" UNCHECKED void

namespace host {
struct Range {
    unsigned long long begin, bytes;
};
static const Range* ranges;
static int range_count, latest;

UNCHECKED static void touch(void* at, unsigned long bytes) {
    if (at >= &__ehdr_start && at < &_end) return;
    const auto address = reinterpret_cast<unsigned long long>(at);
    for (int i = 0; i < range_count; i++, latest = (latest + 1) % range_count) {
        const unsigned long long past = address - ranges[latest].begin;
        if (past < ranges[latest].bytes && bytes <= ranges[latest].bytes - past) return;
    }
    if (!outside++) first_outside = address, bytes_outside = bytes;
}
}  // namespace host

#define HOOKS(bytes)                                                        \
    HOOK __tsan_read##bytes(void* at) { host::touch(at, bytes); }           \
    HOOK __tsan_write##bytes(void* at) { host::touch(at, bytes); }          \
    HOOK __tsan_unaligned_read##bytes(void* at) { host::touch(at, bytes); } \
    HOOK __tsan_unaligned_write##bytes(void* at) { host::touch(at, bytes); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
HOOK __tsan_read_range(void* at, unsigned long bytes) { host::touch(at, bytes); }
HOOK __tsan_write_range(void* at, unsigned long bytes) { host::touch(at, bytes); }
HOOK __tsan_init() {}
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __ubsan_handle_out_of_bounds(void*, void*) { outside++; }
HOOK __ubsan_handle_type_mismatch_v1(void*, void*) { misaligned++; }

HOOK launch(void (*kernel)(), unsigned blocks, const long long* integers, const double* reals,
            const host::Range* ranges, int range_count) {
    memcpy(host::integers, integers, sizeof host::integers);
    host::body = kernel;
    memcpy(host::reals, reals, sizeof host::reals);
    host::ranges = ranges;
    host::range_count = range_count;
    host::latest = 0;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) host::run_block();
}

#define __syncthreads() host::yield(host::AT_BARRIER)
#define __shfl_xor_sync(mask, value, lanes) host::shuffle(value, (threadIdx.x % 32) ^ (lanes))
#define __ballot_sync(mask, set) host::ballot(set)
#define __popc(bits) __builtin_popcount(bits)
static inline float __int_as_float(int v) { return host::bits<float>(v); }
static inline float __uint_as_float(unsigned v) { return host::bits<float>(v); }
static inline unsigned __float_as_uint(float v) { return host::bits<unsigned>(v); }
static inline double __longlong_as_double(long long v) { return host::bits<double>(v); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
template <class V> static inline void __stwb(V* p, V v) { *p = v; }
