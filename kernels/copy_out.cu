// copy_out: scatters a bucket to tensors.
//   target[i] = narrow(source[i]), for every span of the table; same types: the same bits, NaNs too
// Shapes:  as copy_in, with the bucket's views as sources.
// Launch:  as copy_in.
// Options: SRC and DST (each one of Float16, BFloat16, Float32, Float64).
// Moves:   sizeof(SRC) + sizeof(DST) bytes an element, and 32 a span.
// Oracle:  tests/kernel_oracles.py copy_out: bit for bit.

template <class A, class B> struct Cast {
  static DEVICE typename B::Raw of(typename A::Raw value) { return B::narrow(A::widen(value)); }
};
template <class A> struct Cast<A, A> {
  static DEVICE typename A::Raw of(typename A::Raw value) { return value; }
};

extern "C" __global__ void __launch_bounds__(256)
NAMED(NAMED(copy_out, SRC), DST)
(const Span* spans, i64 count, i64 tiles) {
  copy_spans<SRC, DST>(spans, count, tiles, [](SRC::Raw raw) { return Cast<SRC, DST>::of(raw); });
}
