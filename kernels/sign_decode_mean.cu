// sign_decode_mean: the mean of rows compressed by sign_encode.
//   out[j] = narrow((sum over k of (bit[k, j] ? scale[k] : 0 - scale[k])) / rows), in row order and
//   in float32 whatever the elements, each operation rounded: the same bits on every rank
// Shapes:  wire [rows, 8 + columns/8], out [columns], columns % 8 == 0.
// Options: DTYPE (Float16, BFloat16, Float32, Float64).
// Launch:  256 threads, min(columns / 2048, 8 a multiprocessor) blocks; a byte of each row a
//          thread at a time.
// Moves:   rows/8 + sizeof(DTYPE) bytes an element: 8 rows, 10 MB of float32 in 12.5 MB / 4.8 TB/s
//          = 2.6 us.
// Oracle:  tests/kernel_oracles.py sign_decode_mean and backends/gloo_kernels.py: bit for bit.

typedef DTYPE::Raw Raw;

extern "C" __global__ void __launch_bounds__(256)
NAMED(sign_decode_mean, DTYPE)
(const u8* wire, Raw* out, i64 rows, i64 columns) {
  const int N = Pack<Raw>::value;
  const bool packed = residue<N>(out) == 0;  // then every group of eight is: columns % 8 == 0
  for (i64 i = thread_index(); i < columns / 8; i += thread_count()) {
    float sum[8] = {};
    for (i64 k = 0; k < rows; k++) {
      const u8* row = wire + k * sign_row_bytes(columns);
      const float scale = load_unaligned<float>(row);
      const u32 bits = row[SIGN_ROW_HEADER + i];
      for (int j = 0; j < 8; j++) sum[j] = add_rn(sum[j], bits >> j & 1 ? scale : -scale);
    }
    for (int k = 0; k < 8; k += N) {
      Vec<Raw, N> pack;
      for (int j = 0; j < N; j++) pack.v[j] = DTYPE::narrow(div_rn(sum[k + j], (float)rows));
      if (packed) store<N>(out + i * 8 + k, pack);
      else for (int j = 0; j < N; j++) out[i * 8 + k + j] = pack.v[j];
    }
  }
}
