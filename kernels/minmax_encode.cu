// minmax_encode: compresses rows to one byte an element, with one minimum and maximum per 2,048.
//   step = max/254 - min/254
//   code = rint(x/step) - rint(min/step)   where min <= 0 <= max: zero is exact
//   code = rint((x - min)/step)            elsewhere; clamped into [0, 255] in both cases
//   A step below the smallest normal number: code = 0, and the chunk decodes to 0 or min.
//   A chunk that holds NaN or an infinity: min = max = NaN, code = 0.
// Shapes:  values [rows, columns] contiguous, lying at element `first` of a bucket; elements at or
//          past `numel` of the bucket are padding: they enter no min or max, and their code is 0.
//          wire [rows, minmax_row_bytes(columns)], every byte of it written (README.md has the
//          format).
// Options: DTYPE (Float16, BFloat16, Float32, Float64). Headers and arithmetic are
//          float32, float64 for Float64.
// Launch:  256 threads, min(rows * max(1, chunks), 8 a multiprocessor) blocks; a chunk a block at
//          a time, its elements read once and kept in registers, 8 a thread.
// Moves:   sizeof(DTYPE) + 1 bytes an element, 8 a chunk: for float32 10 MB in 13 MB / 4.8 TB/s =
//          2.7 us.
// Oracle:  tests/kernel_oracles.py minmax_encode and backends/_codec_cpu.py: byte for byte.

typedef DTYPE::Raw Raw;
typedef DTYPE::Wide Wide;

// rint(x / step), without a division for all but 1 element in 500: the product with the reciprocal
// is off by at most 1e-4 where the code is in range, so it rounds alike unless it lies that near
// to a tie.
DEVICE Wide nearest_quotient(Wide x, Wide step, Wide reciprocal) {
  const Wide quotient = mul_rn(x, reciprocal), whole = nearest(quotient);
  const Wide to_tie = magnitude(magnitude(quotient - whole) - (Wide)0.5);
  return to_tie < (Wide)1e-3 ? nearest(div_rn(x, step)) : whole;
}

DEVICE u8 code_of(Wide x, const Grid<Wide>& grid, Wide reciprocal) {
  const Wide level = nearest_quotient(sub_rn(x, grid.origin), grid.step, reciprocal) - grid.shift;
  return (u8)(int)lower(upper(level, (Wide)0), (Wide)255);
}

// The block's minimum and maximum, the same in every thread. Order does not matter: both are exact.
DEVICE void block_range(Wide& low, Wide& high) {
  __shared__ Wide lows[WARPS], highs[WARPS];
  for (int lane = 16; lane; lane >>= 1) {
    low = lower(low, __shfl_xor_sync(ALL_LANES, low, lane));
    high = upper(high, __shfl_xor_sync(ALL_LANES, high, lane));
  }
  __syncthreads();  // the last chunk's readers are done
  if (threadIdx.x % 32 == 0) {
    lows[threadIdx.x / 32] = low;
    highs[threadIdx.x / 32] = high;
  }
  __syncthreads();
  for (int warp = 0; warp < WARPS; warp++) {
    low = lower(low, lows[warp]);
    high = upper(high, highs[warp]);
  }
}

// Encodes one chunk: `valid` elements at x, `stored` codes at `codes` (those past `valid` are 0).
template <int N>
DEVICE void encode_chunk(const Raw* x, i64 valid, i64 stored, u8* header, u8* codes) {
  const Wide infinity = Limits<Wide>::infinity();
  Wide v[PER_THREAD], low = infinity, high = -infinity;
  for (int k = 0; k < PER_THREAD; k += N) {
    const i64 at = (i64)k * THREADS + threadIdx.x * N;
    Vec<Raw, N> raw = {};
    if (at + N <= valid) raw = load<N>(x + at);
    else for (int j = 0; j < N; j++) if (at + j < valid) raw.v[j] = x[at + j];
    for (int j = 0; j < N; j++) {
      v[k + j] = DTYPE::widen(raw.v[j]);
      if (at + j >= valid) continue;
      low = lower(low, v[k + j] == v[k + j] ? v[k + j] : -infinity);  // fminf would drop a NaN
      high = upper(high, v[k + j]);
    }
  }
  block_range(low, high);
  const bool finite = low > -infinity && high < infinity;
  const Wide nan = Limits<Wide>::nan();
  low = valid == 0 ? (Wide)0 : finite ? add_rn(low, (Wide)0) : nan;  // -0 becomes +0
  high = valid == 0 ? (Wide)0 : finite ? add_rn(high, (Wide)0) : nan;
  if (threadIdx.x == 0) {
    store_unaligned(header, low);
    store_unaligned(header + sizeof(Wide), high);
  }
  const Grid<Wide> grid = Grid<Wide>::of(low, high);
  const Wide reciprocal = grid.step > 0 ? div_rn((Wide)1, grid.step) : (Wide)0;
  for (int k = 0; k < PER_THREAD; k += N) {
    const i64 at = (i64)k * THREADS + threadIdx.x * N;
    Vec<u8, N> out;
    for (int j = 0; j < N; j++) {
      out.v[j] = grid.step > 0 && at + j < valid ? code_of(v[k + j], grid, reciprocal) : (u8)0;
    }
    if (at < stored) store<N>(codes + at, out);  // a multiple of 16, so of N
  }
}

DEVICE void write_row_header(u8* row, i64 valid) {
  row[0] = MINMAX_VERSION;
  row[1] = sizeof(Wide);
  row[2] = CHUNK % 256;
  row[3] = CHUNK / 256;
  for (int i = 4; i < 8; i++) row[i] = 0;
  store_unaligned(row + 8, valid);
}

extern "C" __global__ void __launch_bounds__(256)
NAMED(minmax_encode, DTYPE)
(const Raw* values, u8* wire, i64 rows, i64 columns, i64 numel, i64 first) {
  const int N = Pack<Raw>::value;
  const i64 chunks = minmax_chunks(columns), jobs = chunks > 0 ? chunks : 1;
  const i64 codes_at = minmax_codes_at<Wide>(columns);
  for (i64 job = blockIdx.x; job < rows * jobs; job += gridDim.x) {
    const i64 r = job / jobs, chunk = job % jobs, begin = chunk * CHUNK;
    const i64 in_row = smaller(columns, at_least_zero(numel - first - r * columns));
    u8* row = wire + r * minmax_row_bytes<Wide>(columns);
    if (chunk == 0 && threadIdx.x == 32) write_row_header(row, in_row);
    if (chunk == chunks - 1 && threadIdx.x == 64) {
      u8* end = row + MINMAX_ROW_HEADER + chunks * 2 * sizeof(Wide);
      while (end < row + codes_at) *end++ = 0;
    }
    if (chunks == 0) continue;
    const i64 valid = smaller(CHUNK, at_least_zero(in_row - begin));
    const i64 stored = smaller(CHUNK, round_up(columns, 16) - begin);
    const Raw* x = values + r * columns + begin;
    u8* header = row + MINMAX_ROW_HEADER + chunk * 2 * sizeof(Wide);
    u8* codes = row + codes_at + begin;
    if (residue<N>(x) == 0 && (u64)codes % N == 0) encode_chunk<N>(x, valid, stored, header, codes);
    else encode_chunk<1>(x, valid, stored, header, codes);
  }
}
