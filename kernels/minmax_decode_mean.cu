// minmax_decode_mean: the mean of rows compressed by minmax_encode.
//   out[j] = narrow(sum over k of x'[k, j] * (1/rows)), in row order, each term rounded: no
//   overflow before the mean itself overflows, and the same bits on every rank. x' is
//   minmax_decode's value before it is narrowed.
// Shapes:  wire [rows, minmax_row_bytes(columns)], out [columns].
// Options: DTYPE (Float16, BFloat16, Float32, Float64).
// Launch:  256 threads, min(chunks, 8 a multiprocessor) blocks; a chunk of all rows a block at a
//          time, the sums in registers, the rows' grids worked out 32 at a time in shared memory.
// Moves:   rows + sizeof(DTYPE) bytes an element. About 10 instructions a byte: expect an
//          H200 to be bound by them, not by its memory, from some 8 rows on.
// Oracle:  tests/kernel_oracles.py minmax_decode_mean and backends/_codec_cpu.py: bit for bit.

typedef DTYPE::Raw Raw;
typedef DTYPE::Wide Wide;
constexpr int BATCH = 32;

struct Source {
  Grid<Wide> grid;
  const u8* codes;
  i64 valid;
};

DEVICE Source source_of(const u8* row, i64 columns, i64 chunk) {
  const u8* codes = row + minmax_codes_at<Wide>(columns) + chunk * CHUNK;
  return {minmax_grid<Wide>(row, chunk), codes, minmax_valid<Wide>(row, chunk)};
}

// Adds one row's chunk, times weight, to the sums.
template <int N>
DEVICE void accumulate(const Source& from, i64 size, Wide weight, Wide* sum) {
  for (int k = 0; k < PER_THREAD; k += N) {
    const i64 at = (i64)k * THREADS + threadIdx.x * N;
    Vec<u8, N> code = {};
    if (at + N <= size) code = load<N>(from.codes + at);
    else for (int j = 0; j < N; j++) if (at + j < size) code.v[j] = from.codes[at + j];
    for (int j = 0; j < N; j++) {
      const Wide value = at + j < from.valid ? from.grid.decode(code.v[j]) : (Wide)0;
      sum[k + j] = add_rn(sum[k + j], mul_rn(value, weight));
    }
  }
}

template <int N>
DEVICE void mean_chunk(
    const u8* wire, Raw* out, i64 rows, i64 columns, i64 chunk, Source* sources) {
  const i64 size = smaller(CHUNK, columns - chunk * CHUNK);
  const Wide weight = div_rn((Wide)1, (Wide)rows);
  Wide sum[PER_THREAD] = {};
  for (i64 r = 0; r < rows; r += BATCH) {
    const i64 mine = r + threadIdx.x;
    __syncthreads();  // the last batch's readers are done
    if (threadIdx.x < BATCH && mine < rows) {
      const u8* row = wire + mine * minmax_row_bytes<Wide>(columns);
      sources[threadIdx.x] = source_of(row, columns, chunk);
    }
    __syncthreads();
    for (i64 k = 0; k < smaller(BATCH, rows - r); k++) accumulate<N>(sources[k], size, weight, sum);
  }
  for (int k = 0; k < PER_THREAD; k += N) {
    const i64 at = (i64)k * THREADS + threadIdx.x * N;
    Vec<Raw, N> value;
    for (int j = 0; j < N; j++) value.v[j] = DTYPE::narrow(sum[k + j]);
    if (at + N <= size) store<N>(out + chunk * CHUNK + at, value);
    else for (int j = 0; j < N; j++) if (at + j < size) out[chunk * CHUNK + at + j] = value.v[j];
  }
}

extern "C" __global__ void __launch_bounds__(256)
NAMED(minmax_decode_mean, DTYPE)
(const u8* wire, Raw* out, i64 rows, i64 columns) {
  __shared__ u64 memory[BATCH * sizeof(Source) / 8];
  Source* sources = reinterpret_cast<Source*>(memory);
  const int N = Pack<Raw>::value;
  // A row's bytes are a multiple of 16: what holds for the first row's address holds for all.
  const bool packed = residue<N>(out) == 0 && (u64)wire % N == 0;
  for (i64 chunk = blockIdx.x; chunk < minmax_chunks(columns); chunk += gridDim.x) {
    if (packed) mean_chunk<N>(wire, out, rows, columns, chunk, sources);
    else mean_chunk<1>(wire, out, rows, columns, chunk, sources);
  }
}
