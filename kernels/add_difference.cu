// add_difference: what an asynchronous average gives to weights that moved on meanwhile.
//   x = narrow(x + (mean - y)), y being the copy of x that entered the mean; mean itself, bit for
//   bit, where x is still y
// Shapes:  x, mean and y, all [n].
// Options: DTYPE (Float16, BFloat16, Float32, Float64). Computed in float32, float64 for
//          Float64.
// Launch:  256 threads, min(n / (256 * elements in 16 bytes), 8 a multiprocessor) blocks.
// Moves:   4 * sizeof(DTYPE) bytes an element: 10 MB of float32 in 40 MB / 4.8 TB/s = 8 us.
// Oracle:  tests/kernel_oracles.py add_difference: bit for bit.

typedef DTYPE::Raw Raw;
typedef DTYPE::Wide Wide;

extern "C" __global__ void __launch_bounds__(256)
NAMED(add_difference, DTYPE)
(Raw* x, const Raw* mean, const Raw* y, i64 n) {
  const int N = Pack<Raw>::value;
  const i64 past = residue<N>(x);
  const bool packed = past == residue<N>(mean) && past == residue<N>(y);
  walk<N>(n, (N - past) % N, packed, thread_index(), thread_count(), [&](auto width, i64 i) {
    const int W = decltype(width)::value;
    Vec<Raw, W> own = load<W>(x + i);
    const Vec<Raw, W> m = load<W>(mean + i), old = load<W>(y + i);
    for (int j = 0; j < W; j++) {
      const Wide now = DTYPE::widen(own.v[j]), before = DTYPE::widen(old.v[j]);
      if (now == before)
        own.v[j] = m.v[j];
      else
        own.v[j] = DTYPE::narrow(add_rn(now, sub_rn(DTYPE::widen(m.v[j]), before)));
    }
    store<W>(x + i, own);
  });
}
