// Force-included when g++ compiles a .cu file for the emulator. It stands for what NVRTC offers
// without any header, so it includes nothing either: a kernel file that needs stdint.h fails here
// as it fails there. EMU_HOST tells a kernel file that it is compiled for the host (as does the
// absence of __CUDA_ARCH__), for what has no C++ equivalent, such as inline PTX.
//
// `__global__` and `__shared__` become markers that build.py replaces after preprocessing, since
// what they stand for depends on what surrounds them.
#pragma once

#define EMU_HOST 1
#define __global__ EMU_MARK_GLOBAL
#define __shared__ EMU_MARK_SHARED
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
// Kernels view buffers as uint4 and the like; strict aliasing is off in the build.

typedef __SIZE_TYPE__ size_t;

// ---- interface of kernel_rt.cpp and kernel_check.cpp ----------------------------------------
struct EmuDim {
    unsigned x, y, z;
};
struct EmuKernelEntry {
    const char* name;
    void (*run_thread)(void** params);
    int param_count;
    const size_t* param_sizes;
    char* shared_begin;
    char* shared_end;
};
extern "C" {
extern EmuDim emu_thread_index, emu_block_index, emu_block_size, emu_grid_size;
int emu_lane();
unsigned emu_block_barrier(int site, int value);
void emu_warp_barrier(unsigned mask, int site);
unsigned long emu_shuffle(unsigned mask, unsigned long value, int source, int site);
unsigned emu_ballot(unsigned mask, int predicate, int site);
unsigned emu_active_mask();
void emu_thread_fence();
void emu_touch_atomic(void* address, size_t bytes);
void emu_trap(const char* why);
void emu_register_kernel(const EmuKernelEntry* entry);
}
#define threadIdx emu_thread_index
#define blockIdx emu_block_index
#define blockDim emu_block_size
#define gridDim emu_grid_size
#define warpSize 32

// ---- barriers and warp operations -----------------------------------------------------------
// Which operation in the source a thread waits at: threads must wait at the same one.
#define EMU_SITE (__LINE__ * 1000 + __COUNTER__ % 1000)
#define __syncthreads() ((void)emu_block_barrier(EMU_SITE, 0))
#define __syncthreads_or(p) ((int)(emu_block_barrier(EMU_SITE, !!(p)) & 1))
#define __syncthreads_and(p) ((int)(emu_block_barrier(EMU_SITE, !!(p)) >> 1 & 1))
#define __syncthreads_count(p) ((int)(emu_block_barrier(EMU_SITE, !!(p)) >> 2))
#define EMU_MASK_OR_FULL(...) emu_mask(__VA_ARGS__)
static inline unsigned emu_mask() { return 0xffffffffu; }
static inline unsigned emu_mask(unsigned mask) { return mask; }
#define __syncwarp(...) emu_warp_barrier(EMU_MASK_OR_FULL(__VA_ARGS__), EMU_SITE)
#define __ballot_sync(m, p) emu_ballot(m, !!(p), EMU_SITE)
#define __any_sync(m, p) ((int)(emu_ballot(m, !!(p), EMU_SITE) != 0))
#define __all_sync(m, p) ((int)(emu_ballot(m, !(p), EMU_SITE) == 0))
#define __activemask() emu_active_mask()

// A `__builtin_memcpy` of 4 or 8 bytes: no access of memory remains of it.
template <class T>
static inline T emu_exchange(unsigned mask, T value, int source, int site) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles take 4- and 8-byte types");
    unsigned long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    bits = emu_shuffle(mask, bits, source, site);
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T>
static inline T emu_shfl(unsigned m, T v, int lane, int site, int width = 32) {
    return emu_exchange(m, v, (emu_lane() & ~(width - 1)) | (lane & (width - 1)), site);
}
template <class T>
static inline T emu_shfl_up(unsigned m, T v, unsigned delta, int site, int width = 32) {
    int source = emu_lane() - (int)delta;
    return emu_exchange(m, v, source < (emu_lane() & ~(width - 1)) ? emu_lane() : source, site);
}
template <class T>
static inline T emu_shfl_down(unsigned m, T v, unsigned delta, int site, int width = 32) {
    int source = emu_lane() + (int)delta;
    return emu_exchange(m, v, source > (emu_lane() | (width - 1)) ? emu_lane() : source, site);
}
template <class T>
static inline T emu_shfl_xor(unsigned m, T v, int bits, int site, int width = 32) {
    int source = emu_lane() ^ bits;
    return emu_exchange(m, v, source > (emu_lane() | (width - 1)) ? emu_lane() : source, site);
}
#define EMU_SHUFFLE(kind, m, v, n, ...) kind(m, v, n, EMU_SITE, ##__VA_ARGS__)
#define __shfl_sync(m, v, ...) EMU_SHUFFLE(emu_shfl, m, v, __VA_ARGS__)
#define __shfl_up_sync(m, v, ...) EMU_SHUFFLE(emu_shfl_up, m, v, __VA_ARGS__)
#define __shfl_down_sync(m, v, ...) EMU_SHUFFLE(emu_shfl_down, m, v, __VA_ARGS__)
#define __shfl_xor_sync(m, v, ...) EMU_SHUFFLE(emu_shfl_xor, m, v, __VA_ARGS__)

static inline void __threadfence() { emu_thread_fence(); }
static inline void __threadfence_block() {}
static inline void __threadfence_system() { emu_thread_fence(); }
static inline void __trap() { emu_trap("__trap()"); }

// ---- vector types ---------------------------------------------------------------------------
#define EMU_VECTORS(T, N, two, four)                                                     \
    struct N##1 { T x; };                                                                \
    struct __align__(two) N##2 { T x, y; };                                              \
    struct N##3 { T x, y, z; };                                                          \
    struct __align__(four) N##4 { T x, y, z, w; };                                       \
    static inline N##1 make_##N##1(T x) { return {x}; }                                  \
    static inline N##2 make_##N##2(T x, T y) { return {x, y}; }                          \
    static inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }                  \
    static inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(signed char, char, 2, 4)
EMU_VECTORS(unsigned char, uchar, 2, 4)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(unsigned short, ushort, 4, 8)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(unsigned, uint, 8, 16)
EMU_VECTORS(long long, longlong, 16, 16)
EMU_VECTORS(unsigned long long, ulonglong, 16, 16)
EMU_VECTORS(float, float, 8, 16)
EMU_VECTORS(double, double, 16, 16)
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// ---- loads and stores with cache hints ------------------------------------------------------
#define EMU_LOAD(name) template <class T> static inline T name(const T* p) { return *p; }
#define EMU_STORE(name) template <class T> static inline void name(T* p, T v) { *p = v; }
EMU_LOAD(__ldg) EMU_LOAD(__ldcg) EMU_LOAD(__ldca) EMU_LOAD(__ldcs) EMU_LOAD(__ldlu) EMU_LOAD(__ldcv)
EMU_STORE(__stcg) EMU_STORE(__stcs) EMU_STORE(__stwb) EMU_STORE(__stwt)

// ---- reinterpreting bits --------------------------------------------------------------------
template <class To, class From>
static inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __int_as_float(int v) { return emu_bits<float>(v); }
static inline int __float_as_int(float v) { return emu_bits<int>(v); }
static inline float __uint_as_float(unsigned v) { return emu_bits<float>(v); }
static inline unsigned __float_as_uint(float v) { return emu_bits<unsigned>(v); }
static inline double __longlong_as_double(long long v) { return emu_bits<double>(v); }
static inline long long __double_as_longlong(double v) { return emu_bits<long long>(v); }

// ---- integer functions ----------------------------------------------------------------------
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __ffsll(long long v) { return __builtin_ffsll(v); }
static inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (v >> i & 1u) << (31 - i);
    return r;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned nibble = selector >> (4 * i);
        unsigned byte = both >> (8 * (nibble & 7)) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << (8 * i);
    }
    return result;
}
static inline int __mul24(int a, int b) { return a * b; }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((unsigned long long)a * b >> 32);
}

#define EMU_MIN_MAX(T)                                           \
    static inline T min(T a, T b) { return b < a ? b : a; }      \
    static inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int) EMU_MIN_MAX(unsigned) EMU_MIN_MAX(long) EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long) EMU_MIN_MAX(unsigned long long)
static inline float min(float a, float b) { return __builtin_fminf(a, b); }
static inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
static inline double min(double a, double b) { return __builtin_fmin(a, b); }
static inline double max(double a, double b) { return __builtin_fmax(a, b); }

// ---- floating point -------------------------------------------------------------------------
// Through builtins; float overloads as CUDA has them. The build uses -ffp-contract=off, so an fma
// happens where the kernel asks for one and nowhere else.
#define EMU_MATH1(name)                                                     \
    static inline float name##f(float a) { return __builtin_##name##f(a); } \
    static inline float name(float a) { return __builtin_##name##f(a); }    \
    static inline double name(double a) { return __builtin_##name(a); }
#define EMU_MATH2(name)                                                                       \
    static inline float name##f(float a, float b) { return __builtin_##name##f(a, b); }       \
    static inline float name(float a, float b) { return __builtin_##name##f(a, b); }          \
    static inline double name(double a, double b) { return __builtin_##name(a, b); }
EMU_MATH1(fabs) EMU_MATH1(sqrt) EMU_MATH1(rint) EMU_MATH1(nearbyint) EMU_MATH1(round)
EMU_MATH1(floor) EMU_MATH1(ceil) EMU_MATH1(trunc) EMU_MATH1(exp) EMU_MATH1(exp2) EMU_MATH1(log)
EMU_MATH1(log2) EMU_MATH1(log10) EMU_MATH1(tanh) EMU_MATH1(sin) EMU_MATH1(cos)
EMU_MATH2(fmin) EMU_MATH2(fmax) EMU_MATH2(copysign) EMU_MATH2(pow) EMU_MATH2(fmod)
static inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
static inline double rsqrt(double a) { return 1.0 / __builtin_sqrt(a); }
static inline float ldexpf(float a, int e) { return __builtin_ldexpf(a, e); }
template <class T> static inline bool isnan(T a) { return __builtin_isnan(a); }
template <class T> static inline bool isinf(T a) { return __builtin_isinf(a); }
template <class T> static inline bool isfinite(T a) { return __builtin_isfinite(a); }
template <class T> static inline bool signbit(T a) { return __builtin_signbit(a); }

#define EMU_ROUNDED(T, prefix, suffix)                                                        \
    static inline T prefix##add_rn(T a, T b) { return a + b; }                                \
    static inline T prefix##sub_rn(T a, T b) { return a - b; }                                \
    static inline T prefix##mul_rn(T a, T b) { return a * b; }                                \
    static inline T prefix##div_rn(T a, T b) { return a / b; }                                \
    static inline T prefix##sqrt_rn(T a) { return __builtin_sqrt##suffix(a); }                \
    static inline T prefix##rcp_rn(T a) { return T(1) / a; }
EMU_ROUNDED(float, __f, f)
EMU_ROUNDED(double, __d, )
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __expf(float a) { return __builtin_expf(a); }
static inline float __logf(float a) { return __builtin_logf(a); }
static inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }

// Conversions to integers saturate, and NaN gives 0 (for 64 bits: 0x8000...).
#define EMU_TO_INTEGER(name, F, I, low, high, nan, round)            \
    static inline I name(F a) {                                      \
        if (__builtin_isnan(a)) return nan;                          \
        F r = round(a);                                              \
        return r <= (F)(low) ? (low) : r >= (F)(high) ? (high) : (I)r; \
    }
#define EMU_TO_INTEGERS(F, prefix, round, trunc)                                              \
    EMU_TO_INTEGER(prefix##2int_rn, F, int, -__INT_MAX__ - 1, __INT_MAX__, 0, round)          \
    EMU_TO_INTEGER(prefix##2int_rz, F, int, -__INT_MAX__ - 1, __INT_MAX__, 0, trunc)          \
    EMU_TO_INTEGER(prefix##2uint_rn, F, unsigned, 0u, 0xffffffffu, 0u, round)                 \
    EMU_TO_INTEGER(prefix##2uint_rz, F, unsigned, 0u, 0xffffffffu, 0u, trunc)                 \
    EMU_TO_INTEGER(prefix##2ll_rn, F, long long, -__LONG_LONG_MAX__ - 1, __LONG_LONG_MAX__,   \
                   -__LONG_LONG_MAX__ - 1, round)
EMU_TO_INTEGERS(float, __float, __builtin_rintf, __builtin_truncf)
EMU_TO_INTEGERS(double, __double, __builtin_rint, __builtin_trunc)
static inline float __int2float_rn(int a) { return (float)a; }
static inline float __uint2float_rn(unsigned a) { return (float)a; }
static inline float __ll2float_rn(long long a) { return (float)a; }
static inline float __double2float_rn(double a) { return (float)a; }

// ---- atomics --------------------------------------------------------------------------------
// One launch runs at a time and its fibers switch only at barriers, so plain code is atomic. It
// must not be instrumented, or the checks would see plain accesses.
#define EMU_ATOMIC __attribute__((noinline, no_sanitize("thread")))
#define EMU_ATOMIC_OP(name, next)                                \
    template <class T, class V>                                  \
    EMU_ATOMIC static T name(T* p, V value) {                    \
        emu_touch_atomic(p, sizeof(T));                          \
        T old = *p, v = (T)value;                                \
        *p = (T)(next);                                          \
        return old;                                              \
    }
EMU_ATOMIC_OP(atomicAdd, old + v)
EMU_ATOMIC_OP(atomicSub, old - v)
EMU_ATOMIC_OP(atomicMax, old < v ? v : old)
EMU_ATOMIC_OP(atomicMin, v < old ? v : old)
EMU_ATOMIC_OP(atomicExch, v)
EMU_ATOMIC_OP(atomicAnd, old & v)
EMU_ATOMIC_OP(atomicOr, old | v)
EMU_ATOMIC_OP(atomicXor, old ^ v)
EMU_ATOMIC_OP(atomicInc, old >= v ? 0 : old + 1)
EMU_ATOMIC_OP(atomicDec, old == 0 || old > v ? v : old - 1)
template <class T, class C, class V>
EMU_ATOMIC static T atomicCAS(T* p, C compare, V value) {
    emu_touch_atomic(p, sizeof(T));
    T old = *p;
    if (old == (T)compare) *p = (T)value;
    return old;
}

// ---- registration ---------------------------------------------------------------------------
// The bounds of the file's static shared memory, made by the linker (absent: none).
extern char emu_shared_begin[] __asm__("__start_emu_shared")
    __attribute__((weak, visibility("hidden")));
extern char emu_shared_end[] __asm__("__stop_emu_shared")
    __attribute__((weak, visibility("hidden")));

template <unsigned... I>
struct EmuIndices {};
template <unsigned N, unsigned... I>
struct EmuCount : EmuCount<N - 1, N - 1, I...> {};
template <unsigned... I>
struct EmuCount<0, I...> {
    using type = EmuIndices<I...>;
};
template <auto F>
struct EmuKernel;
template <class... A, void (*F)(A...)>
struct EmuKernel<F> {
    // Not instrumented: it reads the launch's arguments, which lie in the emulator's own memory.
    template <unsigned... I>
    __attribute__((no_sanitize("thread"))) static void call(void** params, EmuIndices<I...>) {
        F(*(A*)params[I]...);
    }
    static void run_thread(void** params) {
        call(params, typename EmuCount<sizeof...(A)>::type{});
    }
    explicit EmuKernel(const char* name) {
        const size_t sizes[] = {sizeof(A)..., 0};
        EmuKernelEntry entry = {name, run_thread, (int)sizeof...(A), sizes,
                                emu_shared_begin, emu_shared_end};
        emu_register_kernel(&entry);
    }
};
