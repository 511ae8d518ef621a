// ring_difference: what a rank of the low-precision ring sends to its neighbours.
//   d = (x - W) + (L - W) * left_share + (R - W) * right_share, from left to right, each operation
//   rounded: with both shares 1/3 it is x + L/3 + R/3 - 5/3 W, but exactly 0 where all four are
//   equal, and free of the cancellation that would drown a small difference in 5/3 W's rounding
// Shapes:  x (own weights), left, right (replicas of the neighbours), weights (the last agreed
//          model W) and out, all [n]; out may be x. The shares are the neighbours' in the mean.
// Options: DTYPE (Float16, BFloat16, Float32, Float64). Computed in float32, float64 for
//          Float64.
// Launch:  256 threads, min(n / (256 * elements in 16 bytes), 8 a multiprocessor) blocks.
// Moves:   5 * sizeof(DTYPE) bytes an element: 10 MB of float32 in 50 MB / 4.8 TB/s = 10 us.
// Oracle:  tests/kernel_oracles.py ring_difference: bit for bit.
// Source:  ../docs/algorithms.md, LowPrecisionDecentralized; Tang et al. 2018, "Communication
//          Compression for Decentralized Training", DCD-PSGD.

typedef DTYPE::Raw Raw;
typedef DTYPE::Wide Wide;

extern "C" __global__ void __launch_bounds__(256)
NAMED(ring_difference, DTYPE)
(const Raw* x, const Raw* left, const Raw* right, const Raw* weights, Raw* out, i64 n,
 double left_share, double right_share) {
  const int N = Pack<Raw>::value;
  const i64 past = residue<N>(out);
  const bool packed = past == residue<N>(x) && past == residue<N>(left) &&
                      past == residue<N>(right) && past == residue<N>(weights);
  const Wide l_share = (Wide)left_share, r_share = (Wide)right_share;
  walk<N>(n, (N - past) % N, packed, thread_index(), thread_count(), [&](auto width, i64 i) {
    const int W = decltype(width)::value;
    const Vec<Raw, W> own = load<W>(x + i), l = load<W>(left + i), r = load<W>(right + i);
    const Vec<Raw, W> agreed = load<W>(weights + i);
    Vec<Raw, W> difference;
    for (int j = 0; j < W; j++) {
      const Wide w = DTYPE::widen(agreed.v[j]);
      Wide sum = sub_rn(DTYPE::widen(own.v[j]), w);
      sum = add_rn(sum, mul_rn(sub_rn(DTYPE::widen(l.v[j]), w), l_share));
      sum = add_rn(sum, mul_rn(sub_rn(DTYPE::widen(r.v[j]), w), r_share));
      difference.v[j] = DTYPE::narrow(sum);
    }
    store<W>(out + i, difference);
  });
}
