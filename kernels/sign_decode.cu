// sign_decode: the values of rows compressed by sign_encode.
//   out[k, j] = narrow(bit[k, j] ? scale[k] : 0 - scale[k]): never -0
// Shapes:  wire [rows, 8 + columns/8], out [rows, columns] contiguous, columns % 8 == 0.
// Options: DTYPE (Float16, BFloat16, Float32, Float64).
// Launch:  256 threads, min(rows * columns / 2048, 8 a multiprocessor) blocks; a byte a thread at
//          a time.
// Moves:   1/8 + sizeof(DTYPE) bytes an element: 10 MB of float32 in 10.3 MB / 4.8 TB/s = 2.1 us.
// Oracle:  tests/kernel_oracles.py sign_decode and backends/gloo_kernels.py: bit for bit.

typedef DTYPE::Raw Raw;

extern "C" __global__ void __launch_bounds__(256)
NAMED(sign_decode, DTYPE)
(const u8* wire, Raw* out, i64 rows, i64 columns) {
  const int N = Pack<Raw>::value;
  const i64 groups = columns / 8;
  const bool packed = residue<N>(out) == 0;  // then every group of eight is: columns % 8 == 0
  for (i64 i = thread_index(); i < rows * groups; i += thread_count()) {
    const u8* row = wire + i / groups * sign_row_bytes(columns);
    const float scale = load_unaligned<float>(row);
    const u32 bits = row[SIGN_ROW_HEADER + i % groups];
    const Raw positive = DTYPE::narrow(scale);
    const Raw negative = DTYPE::narrow(sub_rn(0.0f, scale));
    for (int k = 0; k < 8; k += N) {
      Vec<Raw, N> pack;
      for (int j = 0; j < N; j++) pack.v[j] = bits >> (k + j) & 1 ? positive : negative;
      if (packed) store<N>(out + i * 8 + k, pack);
      else for (int j = 0; j < N; j++) out[i * 8 + k + j] = pack.v[j];
    }
  }
}
