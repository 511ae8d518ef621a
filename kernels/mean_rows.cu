// mean_rows: the mean of gathered chunks.
//   out[j] = narrow(sum over k of values[k, j] * (1/rows)), in row order, each term rounded: the
//   same bits on every rank, and no overflow before the mean itself overflows
// Shapes:  values [rows, columns] contiguous, out [columns]; out may be one of the rows.
// Options: DTYPE (Float16, BFloat16, Float32, Float64). Computed in float32, float64 for
//          Float64.
// Launch:  256 threads, min(columns / (256 * elements in 16 bytes), 8 a multiprocessor) blocks.
// Moves:   (rows + 1) * sizeof(DTYPE) bytes an element: 8 rows of 10 MB in 90 MB / 4.8 TB/s = 19
//          us.
// Oracle:  tests/kernel_oracles.py mean_rows: bit for bit.

typedef DTYPE::Raw Raw;
typedef DTYPE::Wide Wide;

extern "C" __global__ void __launch_bounds__(256)
NAMED(mean_rows, DTYPE)
(const Raw* values, Raw* out, i64 rows, i64 columns) {
  const int N = Pack<Raw>::value;
  const i64 past = residue<N>(out);
  const bool packed = past == residue<N>(values) && (rows == 1 || columns % N == 0);
  const Wide weight = div_rn((Wide)1, (Wide)rows);
  walk<N>(columns, (N - past) % N, packed, thread_index(), thread_count(), [&](auto width, i64 i) {
    const int W = decltype(width)::value;
    Wide sum[W] = {};
    for (i64 k = 0; k < rows; k++) {
      const Vec<Raw, W> row = load<W>(values + k * columns + i);
      for (int j = 0; j < W; j++) sum[j] = add_rn(sum[j], mul_rn(DTYPE::widen(row.v[j]), weight));
    }
    Vec<Raw, W> mean;
    for (int j = 0; j < W; j++) mean.v[j] = DTYPE::narrow(sum[j]);
    store<W>(out + i, mean);
  });
}
