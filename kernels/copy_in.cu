// copy_in: gathers tensors into a bucket, scaled.
//   target[i] = narrow(source[i] * scale), for every span of the table
// Shapes:  spans[count] in device memory; source and target dense, numel elements each (a tensor
//          with strides is passed as the flat memory that it covers; both sides then lie in one
//          order). A span may have source == target (a gradient that is its bucket's view already).
// Options: SRC and DST (each one of Float16, BFloat16, Float32, Float64). Computed
//          in float32, in float64 where either side is; rounded once.
// Launch:  one for a whole bucket: 256 threads, min(tiles, 8 a multiprocessor) blocks; a tile is
//          4,096 elements of one span.
// Moves:   sizeof(SRC) + sizeof(DST) bytes an element, and 32 a span: 8 bytes an element for
//          float32, so 10 MB in 20 MB / 4.8 TB/s = 4.4 us on an H200: launch and latency, not
//          bandwidth.
// Oracle:  tests/kernel_oracles.py copy_in: bit for bit.

template <class A, class B> struct Wider { typedef double type; };
template <> struct Wider<float, float> { typedef float type; };

extern "C" __global__ void __launch_bounds__(256)
NAMED(NAMED(copy_in, SRC), DST)
(const Span* spans, i64 count, i64 tiles, double scale) {
  typedef Wider<SRC::Wide, DST::Wide>::type Wide;
  const Wide factor = (Wide)scale;
  copy_spans<SRC, DST>(spans, count, tiles, [=](SRC::Raw value) {
    return DST::narrow(mul_rn((Wide)SRC::widen(value), factor));
  });
}
