// sign_encode: compresses rows to one bit an element and one scale a row, with error feedback.
//   u = values + error;  scale = float32(mean |u| over the row's valid elements);  bit = u >= 0
//   error = u - scale * sign(u), sign(u) = 1 where the bit is set, else -1; 0 on padding
// Shapes:  values and error [rows, columns] contiguous, columns % 8 == 0, lying at element `first`
//          of a bucket; elements at or past `numel` of it are padding: not in the mean. error is
//          float32, float64 for Float64. wire [rows, 8 + columns/8], every byte of it written:
//          scale (float32), 4 zero bytes, then bit j%8 of byte j/8 for element j.
//          partial [rows, tiles] float64: the lane's scratch.
// Options: DTYPE (Float16, BFloat16, Float32, Float64), of the values.
// Launch:  two kernels, one after the other on one stream: sign_encode_sums, then sign_encode, both
//          with 256 threads and rows * tiles blocks. tiles = min(1024, max(1, ceil(columns/8192))):
//          from the shape alone, so that the order of the sum, and with it the scale, is the same
//          on any device.
// Moves:   twice sizeof(DTYPE) + sizeof(error) read, sizeof(error) + 1/8 written an element: 10 MB
//          of float32 in 50 MB / 4.8 TB/s = 11 us.
// Oracle:  tests/kernel_oracles.py sign_encode: bits and error exact given the scale; the scale
//          (summed in float64 here) within 1 ulp. backends/gloo_kernels.py sums in float32: its
//          scale is within 1e-6 of this one.
// Source:  Tang et al. 2021, "1-bit Adam", algorithm 1.

typedef DTYPE::Raw Raw;
typedef DTYPE::Wide Wide;

// The block's sum, the same in every thread, in one fixed order.
DEVICE double block_sum(double sum) {
  __shared__ double sums[WARPS];
  for (int lane = 16; lane; lane >>= 1) sum = add_rn(sum, __shfl_xor_sync(ALL_LANES, sum, lane));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < WARPS; warp++) sum = add_rn(sum, sums[warp]);
  return sum;
}

// Eight elements, by 16-byte accesses where their address allows it.
template <class R> DEVICE Vec<R, 8> load_eight(const R* p) {
  const int N = Pack<R>::value;
  Vec<R, 8> eight;
  if (residue<N>(p) == 0) {
    for (int k = 0; k < 8; k += N) {
      const Vec<R, N> pack = load<N>(p + k);
      for (int j = 0; j < N; j++) eight.v[k + j] = pack.v[j];
    }
  } else {
    for (int k = 0; k < 8; k++) eight.v[k] = p[k];
  }
  return eight;
}
template <class R> DEVICE void store_eight(R* p, const Vec<R, 8>& eight) {
  const int N = Pack<R>::value;
  if (residue<N>(p) == 0) {
    for (int k = 0; k < 8; k += N) {
      Vec<R, N> pack;
      for (int j = 0; j < N; j++) pack.v[j] = eight.v[k + j];
      store<N>(p + k, pack);
    }
  } else {
    for (int k = 0; k < 8; k++) p[k] = eight.v[k];
  }
}

// The part of a row that this block serves, in groups of eight elements.
struct Part {
  i64 row, tile, begin, end, valid;
};
DEVICE Part part_of_block(i64 columns, i64 numel, i64 first, i64 tiles) {
  const i64 row = blockIdx.x / tiles, tile = blockIdx.x % tiles, groups = columns / 8;
  const i64 size = (groups + tiles - 1) / tiles;
  const i64 valid = smaller(columns, at_least_zero(numel - first - row * columns));
  return {row, tile, smaller(groups, tile * size), smaller(groups, (tile + 1) * size), valid};
}

extern "C" __global__ void __launch_bounds__(256)
NAMED(sign_encode_sums, DTYPE)
(const Raw* values, const Wide* error, double* partial, i64 columns, i64 numel, i64 first,
 i64 tiles) {
  const Part part = part_of_block(columns, numel, first, tiles);
  double sum = 0;
  for (i64 group = part.begin + threadIdx.x; group < part.end; group += THREADS) {
    const i64 at = part.row * columns + group * 8;
    const Vec<Raw, 8> value = load_eight(values + at);
    const Vec<Wide, 8> old = load_eight(error + at);
    for (int j = 0; j < 8; j++) {
      const Wide u = add_rn(DTYPE::widen(value.v[j]), old.v[j]);
      if (group * 8 + j < part.valid) sum = add_rn(sum, (double)magnitude(u));
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[part.row * tiles + part.tile] = sum;
}

extern "C" __global__ void __launch_bounds__(256)
NAMED(sign_encode, DTYPE)
(const Raw* values, Wide* error, u8* wire, const double* partial, i64 columns, i64 numel, i64 first,
 i64 tiles) {
  const Part part = part_of_block(columns, numel, first, tiles);
  double sum = 0;
  for (i64 tile = threadIdx.x; tile < tiles; tile += THREADS) {
    sum = add_rn(sum, partial[part.row * tiles + tile]);
  }
  sum = block_sum(sum);
  const float scale = part.valid > 0 ? (float)div_rn(sum, (double)part.valid) : 0.0f;
  u8* row = wire + part.row * sign_row_bytes(columns);
  if (part.tile == 0 && threadIdx.x == 0) {
    store_unaligned(row, scale);
    for (int i = 4; i < 8; i++) row[i] = 0;
  }
  for (i64 group = part.begin + threadIdx.x; group < part.end; group += THREADS) {
    const i64 at = part.row * columns + group * 8;
    const Vec<Raw, 8> value = load_eight(values + at);
    const Vec<Wide, 8> old = load_eight(error + at);
    Vec<Wide, 8> left;
    u32 bits = 0;
    for (int j = 0; j < 8; j++) {
      const bool valid = group * 8 + j < part.valid;
      const Wide u = add_rn(DTYPE::widen(value.v[j]), old.v[j]);
      bits |= (u32)(u >= 0) << j;
      left.v[j] = valid ? sub_rn(u, u >= 0 ? (Wide)scale : -(Wide)scale) : (Wide)0;
    }
    store_eight(error + at, left);
    row[SIGN_ROW_HEADER + group] = (u8)bits;
  }
}
