// What every kernel begins with: _nvrtc.py puts the choice of element types and this text in front
// of each .cu file (README.md). NVRTC has no headers, so integer names and the 16-bit formats are
// spelled out here.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;  // every index and every count

#define DEVICE __device__ __forceinline__
// A kernel's name with its element type, as profiles show it: copy_in_BFloat16_Float32.
#define NAMED(operation, element) NAMED_AFTER_EXPANSION(operation, element)
#define NAMED_AFTER_EXPANSION(operation, element) operation##_##element

inline constexpr int THREADS = 256;          // every launch's block
inline constexpr int WARPS = THREADS / 32;
inline constexpr u32 ALL_LANES = 0xffffffffu;
inline constexpr i64 CHUNK = 2048;           // elements under one min/max: 8 for each thread
inline constexpr int PER_THREAD = CHUNK / THREADS;

// ---- arithmetic that rounds once ----------------------------------------------------------------
// NVRTC contracts a*b+c to a fused multiply-add unless it is spelled so; the oracles round twice.
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
DEVICE double add_rn(double a, double b) { return __dadd_rn(a, b); }
DEVICE double sub_rn(double a, double b) { return __dsub_rn(a, b); }
DEVICE double mul_rn(double a, double b) { return __dmul_rn(a, b); }
DEVICE double div_rn(double a, double b) { return __ddiv_rn(a, b); }

DEVICE float lower(float a, float b) { return fminf(a, b); }
DEVICE float upper(float a, float b) { return fmaxf(a, b); }
DEVICE double lower(double a, double b) { return fmin(a, b); }
DEVICE double upper(double a, double b) { return fmax(a, b); }
DEVICE float magnitude(float a) { return fabsf(a); }
DEVICE double magnitude(double a) { return fabs(a); }
DEVICE float nearest(float a) { return rintf(a); }
DEVICE double nearest(double a) { return rint(a); }

template <class W> struct Limits;
template <> struct Limits<float> {
  static DEVICE float infinity() { return __int_as_float(0x7f800000); }
  static DEVICE float nan() { return __int_as_float(0x7fc00000); }
  static DEVICE float smallest_normal() { return __int_as_float(0x00800000); }
};
template <> struct Limits<double> {
  static DEVICE double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
  static DEVICE double nan() { return __longlong_as_double(0x7ff8000000000000ll); }
  static DEVICE double smallest_normal() { return __longlong_as_double(0x0010000000000000ll); }
};

// ---- element types: Raw is what memory holds, Wide what is computed in --------------------------
struct Float64 {
  typedef double Raw;
  typedef double Wide;
  static DEVICE Wide widen(Raw r) { return r; }
  static DEVICE Raw narrow(double w) { return w; }
};

struct Float32 {
  typedef float Raw;
  typedef float Wide;
  static DEVICE Wide widen(Raw r) { return r; }
  static DEVICE Raw narrow(double w) { return (float)w; }
  static DEVICE Raw narrow(float w) { return w; }
};

struct BFloat16 {
  typedef u16 Raw;
  typedef float Wide;
  static DEVICE Wide widen(Raw r) { return __uint_as_float((u32)r << 16); }
  static DEVICE Raw narrow(double w) { return narrow((float)w); }
  // To nearest, ties to even, in integers: sm_70 has no instruction for it. A NaN stays one
  // (0x7fc0).
  static DEVICE Raw narrow(float w) {
    const u32 bits = __float_as_uint(w);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct Float16 {
  typedef u16 Raw;
  typedef float Wide;
  static DEVICE Raw narrow(double w) { return narrow((float)w); }
#ifdef __CUDACC__
  static DEVICE Wide widen(Raw r) {
    float w;
    asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(w) : "h"(r));
    return w;
  }
  static DEVICE Raw narrow(float w) {
    u16 r;
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(r) : "f"(w));
    return r;
  }
#else
  static DEVICE Wide widen(Raw r) { return (float)__builtin_bit_cast(_Float16, r); }
  static DEVICE Raw narrow(float w) { return __builtin_bit_cast(u16, (_Float16)w); }
#endif
};

// ---- memory -------------------------------------------------------------------------------------
template <class R, int N> struct alignas(sizeof(R) * N) Vec {
  R v[N];
};
template <int N> struct Width {
  static const int value = N;
};

template <class R> struct Pack {
  static const int value = 16 / sizeof(R);  // elements in a 16-byte access
};

template <int N, class R> DEVICE Vec<R, N> load(const R* p) {
  return *reinterpret_cast<const Vec<R, N>*>(p);
}
template <int N, class R> DEVICE void store(R* p, const Vec<R, N>& v) {
  // By instruction: a plain assignment may be split into elements again.
  if constexpr (sizeof v == 16) {
    __stwb(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&v));
  } else if constexpr (sizeof v == 8) {
    __stwb(reinterpret_cast<uint2*>(p), *reinterpret_cast<const uint2*>(&v));
  } else {
    *reinterpret_cast<Vec<R, N>*>(p) = v;
  }
}

// How many elements p lies past a boundary of N of them. Arrays of one residue can be walked
// together.
template <int N, class R> DEVICE i64 residue(const R* p) { return (i64)((u64)p / sizeof(R) % N); }

// A value at an address of any alignment, byte by byte where it must be.
template <class V> DEVICE V load_unaligned(const u8* p) {
  if ((u64)p % sizeof(V) == 0) return *reinterpret_cast<const V*>(p);
  V value;
  u8* bytes = reinterpret_cast<u8*>(&value);
  for (int i = 0; i < (int)sizeof(V); i++) bytes[i] = p[i];
  return value;
}
template <class V> DEVICE void store_unaligned(u8* p, V value) {
  const u8* bytes = reinterpret_cast<const u8*>(&value);
  for (int i = 0; i < (int)sizeof(V); i++) p[i] = bytes[i];
}

// Calls body(Width<N>(), i) for N elements from i on, or body(Width<1>(), i) for one, until each
// of n elements had its turn: thread `index` of `stride`. `head` elements come before the first
// boundary; without `packed` everything goes one by one.
template <int N, class Body>
DEVICE void walk(i64 n, i64 head, bool packed, i64 index, i64 stride, Body body) {
  if (!packed) {
    for (i64 i = index; i < n; i += stride) body(Width<1>(), i);
    return;
  }
  const i64 packs = (n - head) / N, tail = head + packs * N;  // head < N: none if n < head
  for (i64 i = index; i < packs; i += stride) body(Width<N>(), head + i * N);
  for (i64 i = index; i < head + n - tail; i += stride) {
    body(Width<1>(), i < head ? i : i - head + tail);
  }
}

DEVICE i64 thread_index() { return (i64)blockIdx.x * THREADS + threadIdx.x; }
DEVICE i64 thread_count() { return (i64)gridDim.x * THREADS; }
DEVICE i64 at_least_zero(i64 n) { return n < 0 ? 0 : n; }
DEVICE i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
DEVICE i64 round_up(i64 n, i64 unit) { return (n + unit - 1) / unit * unit; }

// ---- a table of tensors, for the kernels that serve thousands in one launch ---------------------
inline constexpr i64 TILE = 4096;  // elements that a block copies at a time

struct Span {
  const void* source;
  void* target;
  i64 numel;
  i64 first_tile;  // tiles of all spans before this one
};

// The span that holds `tile`: the last whose first_tile is not above it (an empty span shares its
// number with the next one, which wins). 32 probes a round, no barrier; two rounds for 1,024
// spans, three for 32,768.
DEVICE i64 span_of_tile(const Span* spans, i64 count, i64 tile) {
  i64 low = 0;
  while (count > 1) {
    const i64 step = (count + 31) / 32, probe = (threadIdx.x & 31) * step;
    const bool reached = probe < count && spans[low + probe].first_tile <= tile;
    const i64 skipped = (__popc(__ballot_sync(ALL_LANES, reached)) - 1) * step;
    low += skipped;
    count = smaller(step, count - skipped);
  }
  return low;
}

// Copies every span with 16-byte accesses where source and target allow it; convert: raw source ->
// raw target.
template <class S, class D, class Convert>
DEVICE void copy_spans(const Span* spans, i64 count, i64 tiles, Convert convert) {
  typedef typename S::Raw Source;
  typedef typename D::Raw Target;
  const int N = 16 / (sizeof(Source) > sizeof(Target) ? sizeof(Source) : sizeof(Target));
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Span span = spans[span_of_tile(spans, count, tile)];
    const i64 begin = (tile - span.first_tile) * TILE;
    const Source* from = static_cast<const Source*>(span.source) + begin;
    Target* to = static_cast<Target*>(span.target) + begin;
    const i64 past = residue<N>(to);
    const bool packed = past == residue<N>(from);
    const i64 size = smaller(TILE, span.numel - begin);
    walk<N>(size, (N - past) % N, packed, threadIdx.x, THREADS, [&](auto width, i64 i) {
      const int W = decltype(width)::value;
      const Vec<Source, W> in = load<W>(from + i);
      Vec<Target, W> out;
      for (int k = 0; k < W; k++) out.v[k] = convert(in.v[k]);
      store<W>(to + i, out);
    });
  }
}

// ---- the min-max grid: what encoder and decoders agree on (README.md, "MinMaxUInt8") ------------
inline constexpr u8 MINMAX_VERSION = 1;
inline constexpr i64 MINMAX_ROW_HEADER = 16;

// code <-> value: value = (code + shift) * step + origin, clamped into [low, high].
template <class W> struct Grid {
  W low, high, step, shift, origin;

  static DEVICE Grid of(W low, W high) {
    const bool through_zero = low <= 0 && high >= 0;
    W step = sub_rn(div_rn(high, (W)254), div_rn(low, (W)254));
    // A constant; or NaN, which origin carries on.
    if (!(step >= Limits<W>::smallest_normal())) step = 0;
    const W shift = through_zero && step > 0 ? nearest(div_rn(low, step)) : (W)0;
    return {low, high, step, shift, through_zero ? (W)0 : low};
  }

  DEVICE W decode(u8 code) const {
    const W value = add_rn(mul_rn((W)code + shift, step), origin);
    // A grid point may lie half a step outside [low, high], and so past the format's largest
    // number.
    return value == value ? lower(upper(value, low), high) : value;
  }
};

DEVICE i64 minmax_chunks(i64 columns) { return (columns + CHUNK - 1) / CHUNK; }
template <class W> DEVICE i64 minmax_codes_at(i64 columns) {
  return MINMAX_ROW_HEADER + round_up(minmax_chunks(columns) * 2 * (i64)sizeof(W), 16);
}
template <class W> DEVICE i64 minmax_row_bytes(i64 columns) {
  return minmax_codes_at<W>(columns) + round_up(columns, 16);
}

// Was the row encoded by this version, for elements of this width?
template <class W> DEVICE bool minmax_known(const u8* row) {
  return row[0] == MINMAX_VERSION && row[1] == sizeof(W) && row[2] + 256 * row[3] == CHUNK;
}

// The grid of one chunk of one encoded row; all NaN where the row is not known.
template <class W> DEVICE Grid<W> minmax_grid(const u8* row, i64 chunk) {
  const u8* header = row + MINMAX_ROW_HEADER + chunk * 2 * sizeof(W);
  const W nan = Limits<W>::nan();
  if (!minmax_known<W>(row)) return Grid<W>::of(nan, nan);
  return Grid<W>::of(load_unaligned<W>(header), load_unaligned<W>(header + sizeof(W)));
}

// How many elements from a chunk's first on are not padding; in a row that is not known, all.
template <class W> DEVICE i64 minmax_valid(const u8* row, i64 chunk) {
  return minmax_known<W>(row) ? at_least_zero(load_unaligned<i64>(row + 8) - chunk * CHUNK) : CHUNK;
}

// ---- the sign codec's row: scale (float32), 4 zero bytes, one bit an element --------------------
inline constexpr i64 SIGN_ROW_HEADER = 8;
DEVICE i64 sign_row_bytes(i64 columns) { return SIGN_ROW_HEADER + columns / 8; }
