// minmax_decode: the values of rows compressed by minmax_encode.
//   x' = (code + rint(min/step)) * step   where min <= 0 <= max
//   x' = min + code * step                elsewhere; clamped into [min, max] in both cases
//   |x' - x| <= (max - min)/508 + 1 ulp of the larger magnitude; padding becomes 0.
//   A chunk that held NaN or an infinity, and a row of an unknown version or format: NaN.
// Shapes:  wire [rows, minmax_row_bytes(columns)], out [rows, columns] contiguous.
// Options: DTYPE (Float16, BFloat16, Float32, Float64).
// Launch:  256 threads, min(rows * chunks, 8 a multiprocessor) blocks; a chunk a block at a time.
// Moves:   1 + sizeof(DTYPE) bytes an element: for float32 10 MB in 13 MB / 4.8 TB/s = 2.7 us.
// Oracle:  tests/kernel_oracles.py minmax_decode and backends/_codec_cpu.py: bit for bit.

typedef DTYPE::Raw Raw;
typedef DTYPE::Wide Wide;

template <int N>
DEVICE void decode_chunk(const Grid<Wide>& grid, const u8* codes, i64 valid, i64 size, Raw* out) {
  for (int k = 0; k < PER_THREAD; k += N) {
    const i64 at = (i64)k * THREADS + threadIdx.x * N;
    if (at >= size) return;
    const bool whole = at + N <= size;
    Vec<u8, N> code = {};
    if (whole) code = load<N>(codes + at);
    else for (int j = 0; j < N; j++) if (at + j < size) code.v[j] = codes[at + j];
    Vec<Raw, N> value;
    for (int j = 0; j < N; j++) {
      value.v[j] = DTYPE::narrow(at + j < valid ? grid.decode(code.v[j]) : (Wide)0);
    }
    if (whole) store<N>(out + at, value);
    else for (int j = 0; j < N; j++) if (at + j < size) out[at + j] = value.v[j];
  }
}

extern "C" __global__ void __launch_bounds__(256)
NAMED(minmax_decode, DTYPE)
(const u8* wire, Raw* out, i64 rows, i64 columns) {
  const int N = Pack<Raw>::value;
  const i64 chunks = minmax_chunks(columns), codes_at = minmax_codes_at<Wide>(columns);
  for (i64 job = blockIdx.x; job < rows * chunks; job += gridDim.x) {
    const i64 r = job / chunks, chunk = job % chunks, begin = chunk * CHUNK;
    const u8* row = wire + r * minmax_row_bytes<Wide>(columns);
    const u8* codes = row + codes_at + begin;
    Raw* to = out + r * columns + begin;
    const Grid<Wide> grid = minmax_grid<Wide>(row, chunk);
    const i64 valid = minmax_valid<Wide>(row, chunk);
    const i64 size = smaller(CHUNK, columns - begin);
    if (residue<N>(to) == 0 && (u64)codes % N == 0) decode_chunk<N>(grid, codes, valid, size, to);
    else decode_chunk<1>(grid, codes, valid, size, to);
  }
}
