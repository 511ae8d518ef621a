"""Each kernel, run on the CPU, against its oracle: every dtype, size, alignment and kind of number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagua_rt.backends import _codec_cpu
from bagua_rt.backends._nvrtc import OPERATIONS, Variant
from bagua_rt.backends.gloo_kernels import CpuKernels
from tests import kernel_oracles as oracles
from tests.kernel_host import COMPILER, Buffers, build, launch, same_bits

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PAIRS = [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)]
PAIRS += [(torch.float64, torch.bfloat16), (torch.float16, torch.float64)]
SIZES = [0, 1, 7, 8, 9, 255, 256, 257, 2047, 2048, 2049, 6000]
LARGE = 100_003
KINDS = ["normal", "tiny", "huge", "offset", "negative", "constant", "zero", "denormal", "wild", "nan", "inf"]

sizes = st.one_of(st.sampled_from(SIZES), st.integers(0, 5000))
seeds = st.integers(0, 2**32 - 1)
offsets = st.integers(0, 9)
blocks = st.integers(1, 5)
kinds = st.sampled_from(KINDS)
# Which of five arrays lie at another place than the rest: none, one, or any.
some = st.one_of(
    st.just([False] * 5),
    st.integers(0, 4).map(lambda one: [i == one for i in range(5)]),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(test: Callable[..., None]) -> Callable[..., None]:
    ignore = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=20, deadline=None, suppress_health_check=ignore)(test)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    singles = [operation for operation, macros in OPERATIONS.items() if len(macros) == 1]
    copies = [Variant.of(op, name(a), name(b)) for op in ("copy_in", "copy_out") for a, b in PAIRS]
    build([*copies, *(Variant.of(op, name(dtype)) for op in singles for dtype in DTYPES)])


@pytest.fixture(autouse=True)
def overflow_is_meant() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numbers(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of one kind, finite ones unless it says otherwise."""
    generator = torch.Generator().manual_seed(seed)
    limit = torch.finfo(dtype)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "tiny":
        x *= 1e-4 * limit.smallest_normal**0.5
    elif kind == "huge":
        x = x.clamp(-1, 1) * limit.max  # +-limit.max itself is among them
    elif kind == "offset":
        x = x.abs() % 1 + min(1e6, limit.max / 4)
    elif kind == "negative":
        x = -x.abs() - 1
    elif kind == "constant":
        x = torch.randn(1, generator=generator, dtype=torch.float64).expand(shape) * 1000
    elif kind == "zero":
        x = torch.zeros_like(x)
    elif kind == "denormal":
        x *= limit.smallest_normal / 8
    elif kind == "wild":
        x *= 10.0 ** torch.randint(-6, 5, shape, generator=generator)
        x[torch.rand(shape, generator=generator) < 0.3] = 0
    elif kind in {"nan", "inf"}:
        bad = torch.rand(shape, generator=generator) < 0.001
        bad.view(-1)[:1] = True
        x[bad] = float("nan") if kind == "nan" else float("-inf" if seed % 2 else "inf")
    return x.clamp(-limit.max, limit.max).to(dtype) if kind not in {"nan", "inf"} else x.to(dtype)


CALLER: Any = None  # the stream of the thread that calls


def gloo() -> CpuKernels:
    """The gloo backend's own operations, done at once."""
    device: Any = SimpleNamespace(run=lambda stream, operation: operation(), record=lambda stream: None)
    return CpuKernels(device)


def spans(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, int, int]:
    """The table of copy_in and copy_out, its length and its number of tiles."""
    rows, tiles = [], 0
    for source, target in pairs:
        rows.append((source.data_ptr(), target.data_ptr(), source.numel(), tiles))
        tiles += -(-source.numel() // 4096)
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4), len(rows), tiles


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("operation", ["copy_in", "copy_out"])
@drawn
@given(data=st.data(), kind=kinds, seed=seeds, offset=offsets, blocks=blocks)
def test_copies(
    operation: str,
    source: torch.dtype,
    target: torch.dtype,
    data: Any,
    kind: str,
    seed: int,
    offset: int,
    blocks: int,
) -> None:
    lengths = data.draw(
        st.lists(st.one_of(st.integers(0, 40), st.sampled_from([4095, 4096, 9001])), max_size=70)
    )
    scale = data.draw(st.sampled_from([1.0, 1 / 3, 0.5, 0.0, -7.0])) if operation == "copy_in" else 1.0
    memory = Buffers()
    bucket = memory.empty((sum(lengths),), target, offset)
    sources = [
        memory.put(numbers(kind, (length,), source, seed + i), (seed + i * 5) % 9)
        for i, length in enumerate(lengths)
    ]
    pairs = list(zip(sources, bucket.split(lengths), strict=True))
    table, count, tiles = spans(pairs)
    variant, reached = Variant.of(operation, name(source), name(target)), [bucket, *sources]
    launch(variant, table, count, tiles, blocks=blocks, reals=[scale], reached=reached)
    for tensor, view in pairs:
        if operation == "copy_in":
            assert same_bits(view, oracles.copy_in(tensor, target, scale))
        else:
            assert same_bits(view, oracles.copy_out(tensor, target))
    memory.check()
    if source is target:
        own = [torch.empty_like(view) for _, view in pairs]
        gloo().copy_in(sources, own, scale, CALLER)
        for (_, view), mine in zip(pairs, own, strict=True):
            # torch._foreach_mul_ rounds the scale to a 16-bit type first: 2 ulp.
            rtol = 0.0 if source.itemsize > 2 else 2 * torch.finfo(source).eps
            tiny = 0.0 if source.itemsize > 2 else torch.finfo(source).smallest_normal * rtol
            torch.testing.assert_close(view, mine, rtol=rtol, atol=tiny, equal_nan=True)


@by_dtype
def test_copy_in_scales_a_view_in_place_and_serves_thousands(dtype: torch.dtype) -> None:
    lengths = [i % 5 for i in range(3000)]
    memory = Buffers()
    bucket = memory.put(numbers("normal", (sum(lengths),), dtype, 1), 3)
    before = bucket.clone()
    table, count, tiles = spans([(view, view) for view in bucket.split(lengths)])
    variant = Variant.of("copy_in", name(dtype), name(dtype))
    launch(variant, table, count, tiles, blocks=7, reals=[1 / 3], reached=[bucket])
    assert same_bits(bucket, oracles.copy_in(before, dtype, 1 / 3))
    memory.check()


@by_dtype
@drawn
@given(n=sizes, rows=st.integers(1, 5), kind=kinds, seed=seeds, o=st.tuples(offsets, offsets), blocks=blocks)
def test_mean_rows(
    dtype: torch.dtype, n: int, rows: int, kind: str, seed: int, o: tuple[int, int], blocks: int
) -> None:
    memory = Buffers()
    values = memory.put(numbers(kind, (rows, n), dtype, seed), o[0])
    out = memory.empty((n,), dtype, o[0] if seed % 2 else o[1])
    launch(Variant.of("mean_rows", name(dtype)), values, out, rows, n, blocks=blocks)
    assert same_bits(out, oracles.narrow(oracles.mean_rows(oracles.wide(values)), dtype))
    memory.check()


@by_dtype
@drawn
@given(n=sizes, kind=kinds, seed=seeds, offset=offsets, apart=some, blocks=blocks)
def test_ring_and_add_difference(
    dtype: torch.dtype, n: int, kind: str, seed: int, offset: int, apart: list[bool], blocks: int
) -> None:
    memory = Buffers()
    at, shares = [offset + 3 * is_apart for is_apart in apart], (1 / 3, 1 / (3 + seed % 5))
    x, left, right, weights = (memory.put(numbers(kind, (n,), dtype, seed + i), at[i]) for i in range(4))
    out = memory.empty((n,), dtype, at[4])
    variant = Variant.of("ring_difference", name(dtype))
    launch(variant, x, left, right, weights, out, n, blocks=blocks, reals=shares)
    wides = [oracles.wide(t) for t in (x, left, right, weights)]
    assert same_bits(out, oracles.narrow(oracles.ring_difference(*wides, shares=shares), dtype))
    own = x.clone()
    gloo().ring_difference(own, left, right, weights, shares, CALLER)
    assert same_bits(own, out)
    right[::3] = x[::3]  # has not moved
    wides[2] = oracles.wide(right)
    own = x.clone()
    gloo().add_difference(own, left, right, CALLER)
    launch(Variant.of("add_difference", name(dtype)), x, left, right, n, blocks=blocks)
    assert same_bits(x, oracles.narrow(oracles.add_difference(*wides[:3]), dtype))
    assert same_bits(own, x)
    memory.check()


def test_ring_difference_is_the_formula_and_zero_where_nothing_moved() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    left, right, weights = (x + 1e-3 * torch.randn(1000, dtype=torch.float64) for _ in range(3))
    out, same = torch.empty_like(x), torch.empty_like(x)
    variant, thirds = Variant.of("ring_difference", "float64"), (1 / 3, 1 / 3)
    launch(variant, x, left, right, weights, out, 1000, blocks=1, reals=thirds)
    torch.testing.assert_close(out, x + left / 3 + right / 3 - weights * (5 / 3), rtol=1e-12, atol=1e-14)
    launch(variant, x, x, x, x, same, 1000, blocks=1, reals=thirds)
    assert (same == 0).all()


@by_dtype
@pytest.mark.parametrize("n", [9, 16])  # the last element alone; in a pack
def test_an_access_outside_of_a_tensor_shows_though_nothing_comes_of_it(dtype: torch.dtype, n: int) -> None:
    whole, short = torch.ones(1, n, dtype=dtype), torch.ones(1, n, dtype=dtype)[:, :-1]
    variant = Variant.of("mean_rows", name(dtype))
    launch(variant, whole, torch.empty_like(whole), 1, n, blocks=1)
    for values, out in ((short, whole), (whole, short)):
        with pytest.raises(AssertionError, match="accesses outside"):
            launch(variant, values, out, 1, n, blocks=1)
    with pytest.raises(AssertionError, match="not aligned"):
        launch(variant, whole.data_ptr() + 1, whole, 1, n - 1, blocks=1, reached=[whole])


# ── MinMaxUInt8 ──────────────────────────────────────────────────────────────────────────────────────────


def encode(
    memory: Buffers, values: torch.Tensor, numel: int, first: int, offset: int, blocks: int
) -> torch.Tensor:
    rows, columns = values.shape
    size = np.dtype(oracles.wide_type(values.dtype)).itemsize
    wire = memory.empty((rows, oracles.minmax_layout(columns, size)[1]), torch.uint8, offset)
    variant = Variant.of("minmax_encode", name(values.dtype))
    launch(variant, values, wire, rows, columns, numel, first, blocks=blocks)
    return wire


@by_dtype
@drawn
@given(
    columns=st.one_of(st.sampled_from(SIZES), st.integers(0, 5000)),
    rows=st.integers(1, 3),
    kind=kinds,
    seed=seeds,
    o=st.tuples(offsets, st.sampled_from([0, 0, 1, 4, 8]), offsets),
    blocks=blocks,
    padding=st.integers(0, 3000),
)
def test_minmax(
    dtype: torch.dtype,
    columns: int,
    rows: int,
    kind: str,
    seed: int,
    o: tuple[int, int, int],
    blocks: int,
    padding: int,
) -> None:
    memory = Buffers()
    values = memory.put(numbers(kind, (rows, columns), dtype, seed), o[0])
    first = seed % 100
    numel = max(0, first + rows * columns - padding) if seed % 3 else first + rows * columns
    wide_values, real = oracles.wide(values), oracles.wide_type(dtype)
    wire = encode(memory, values, numel, first, o[1], blocks)
    expected = oracles.minmax_encode(wide_values, numel, first)
    assert same_bits(wire, torch.from_numpy(expected))

    out = memory.empty((rows, columns), dtype, o[2])
    launch(Variant.of("minmax_decode", name(dtype)), wire, out, rows, columns, blocks=blocks)
    decoded = oracles.minmax_decode(expected, columns, real)
    assert same_bits(out, oracles.narrow(decoded, dtype))

    mean = memory.empty((columns,), dtype, o[2])
    launch(Variant.of("minmax_decode_mean", name(dtype)), wire, mean, rows, columns, blocks=blocks)
    assert same_bits(mean, oracles.narrow(oracles.mean_rows(decoded), dtype))
    memory.check()
    check_bound(values, out, numel - first)
    check_codec_of_gloo(values, numel, first, wire, out, mean)


def check_codec_of_gloo(
    values: torch.Tensor, numel: int, first: int, wire: torch.Tensor, out: torch.Tensor, mean: torch.Tensor
) -> None:
    """The gloo backend's torch operations give what the kernels gave."""
    columns = values.shape[1]
    assert wire.shape[1] == _codec_cpu.minmax_row_bytes(columns, values.dtype)
    mine, own_out, own_mean = torch.full_like(wire, 0xA5), torch.full_like(out, 7), torch.full_like(mean, 7)
    _codec_cpu.minmax_encode(values, numel, first, mine)
    assert same_bits(mine, wire)
    _codec_cpu.minmax_decode(wire, own_out)
    assert same_bits(own_out, out)
    _codec_cpu.minmax_decode_mean(wire, own_mean)
    assert same_bits(own_mean, mean)


def check_bound(values: torch.Tensor, out: torch.Tensor, valid: int) -> None:
    """|x' - x| <= (max - min)/508 + 1 ulp of the larger magnitude, chunk by chunk; padding is 0."""
    valid = max(0, min(valid, values.numel()))
    assert (out.view(-1)[valid:] == 0).all()
    for r, begin in itertools.product(range(values.shape[0]), range(0, values.shape[1], oracles.CHUNK)):
        stop = min(begin + oracles.CHUNK, values.shape[1], valid - r * values.shape[1])
        if stop <= begin:
            continue
        x, got = values[r, begin:stop], out[r, begin:stop]
        if not x.isfinite().all():
            assert not got.isfinite().any()
            continue
        low, high = x.double().min(), x.double().max()
        limits, wide_limits = torch.finfo(x.dtype), torch.finfo(torch.promote_types(x.dtype, torch.float32))
        largest = max(abs(float(low)), abs(float(high)), limits.smallest_normal)
        # 1.5 ulp: at a tie the roundings of quotient and product meet (kernels/README.md).
        bound = float(high / 508 - low / 508) + 1.5 * largest * limits.eps
        if high / 254 - low / 254 < wide_limits.smallest_normal:
            bound = float(high - low)  # decoded to a constant within the range
        worst = float((got.double() - x.double()).abs().max())
        assert worst <= bound, (worst, bound, float(low), float(high))
        assert (got[x == 0] == 0).all()
        if low == high:
            assert (got == x).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_minmax_of_a_large_row(dtype: torch.dtype) -> None:
    memory = Buffers()
    values = memory.put(numbers("wild", (1, LARGE), dtype, 5), 1)
    wire = encode(memory, values, LARGE, 0, 0, 3)
    assert same_bits(wire, torch.from_numpy(oracles.minmax_encode(oracles.wide(values), LARGE, 0)))


@by_dtype
@pytest.mark.parametrize("other", [0.0, -3.0, 3.0])
def test_minmax_of_negative_zeros_has_the_bytes_of_zeros(dtype: torch.dtype, other: float) -> None:
    values = torch.full((1, 2048), -0.0, dtype=dtype)
    values[0, ::2] = other
    wires = [encode(Buffers(), each, 2048, 0, 0, 1) for each in (values, values + 0)]
    _codec_cpu.minmax_encode(values, 2048, 0, own := torch.empty_like(wires[0]))
    assert same_bits(wires[0], wires[1])
    assert same_bits(own, wires[1])


def test_minmax_near_ties_divides() -> None:
    """Quotients next to a half: the shortcut by the reciprocal must not decide them."""
    low, high = np.float32(-1.7), np.float32(2.3)
    step = oracles.step_of(low, high)
    ties = (np.arange(-100, 145, dtype=np.float64) + 0.5) * float(step)
    near = np.concatenate([np.nextafter(ties.astype(np.float32), np.float32(s)) for s in (-9, 0, 9)])
    x = np.concatenate([[low, high], near, np.linspace(low, high, 1311)]).astype(np.float32)
    values = torch.from_numpy(x.clip(low, high))[None]
    wire = encode(Buffers(), values, values.numel(), 0, 0, 1)
    assert same_bits(wire, torch.from_numpy(oracles.minmax_encode(values.numpy(), values.numel(), 0)))


@by_dtype
@pytest.mark.parametrize("byte", [0, 1, 2])
def test_minmax_of_another_version_decodes_to_nan(dtype: torch.dtype, byte: int) -> None:
    values = numbers("normal", (2, 3000), dtype, 3)
    wire = encode(Buffers(), values, values.numel(), 0, 0, 2)
    wire[0, byte] += 1
    out, mean = torch.empty_like(values), torch.empty_like(values[0])
    launch(Variant.of("minmax_decode", name(dtype)), wire, out, 2, 3000, blocks=2)
    launch(Variant.of("minmax_decode_mean", name(dtype)), wire, mean, 2, 3000, blocks=2)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    assert mean.isnan().all()


# ── the sign codec ───────────────────────────────────────────────────────────────────────────────────────


@by_dtype
@drawn
@given(
    groups=st.one_of(st.sampled_from([0, 1, 2, 31, 32, 33, 255, 256, 257]), st.integers(0, 600)),
    rows=st.integers(1, 3),
    tiles=st.integers(1, 4),
    kind=kinds,
    seed=seeds,
    o=st.tuples(offsets, offsets, st.integers(0, 3)),
    padding=st.integers(0, 3000),
)
def test_sign(
    dtype: torch.dtype,
    groups: int,
    rows: int,
    tiles: int,
    kind: str,
    seed: int,
    o: tuple[int, int, int],
    padding: int,
) -> None:
    memory, columns, first = Buffers(), groups * 8, seed % 100
    values = memory.put(numbers(kind, (rows, columns), dtype, seed), o[0])
    kind_of_error = torch.promote_types(dtype, torch.float32)
    error = memory.put(numbers("normal", (rows, columns), kind_of_error, seed + 1), o[1])
    numel = max(0, first + rows * columns - padding) if seed % 3 else first + rows * columns
    wire = memory.empty((rows, 8 + columns // 8), torch.uint8, o[2])
    partial = memory.empty((rows, tiles), torch.float64)
    wide_values, before = oracles.wide(values), error.clone()
    variant, shape = Variant.of("sign_encode", name(dtype)), (columns, numel, first, tiles)
    launch(variant, values, error, partial, *shape, blocks=rows * tiles, operation="sign_encode_sums")
    launch(variant, values, error, wire, partial, *shape, blocks=rows * tiles)
    scales = wire.numpy()[:, :4].copy().view(np.float32)[:, 0]
    exact = oracles.sign_scales(wide_values, before.numpy(), numel, first)
    np.testing.assert_allclose(scales, exact, rtol=2**-23, atol=1e-45)
    expected, left = oracles.sign_encode(wide_values, before.numpy(), numel, first, scales)
    assert same_bits(wire[:, 4:], torch.from_numpy(expected[:, 4:]))
    assert same_bits(error, torch.from_numpy(left))

    out, mean = memory.empty((rows, columns), dtype, o[0]), memory.empty((columns,), dtype, o[1])
    launch(Variant.of("sign_decode", name(dtype)), wire, out, rows, columns, blocks=2)
    launch(Variant.of("sign_decode_mean", name(dtype)), wire, mean, rows, columns, blocks=2)
    assert same_bits(out, oracles.narrow(oracles.sign_decode(wire.numpy()), dtype))
    assert same_bits(mean, oracles.narrow(oracles.sign_decode_mean(wire.numpy()), dtype))
    memory.check()
    if not columns or not (scales < 1e38).all():
        return  # gloo's way through 2 * scale turns an infinity into NaN
    own_wire, own_out, own_mean = torch.empty_like(wire), torch.empty_like(out), torch.empty_like(mean)
    gloo().sign_decode(wire, own_out, CALLER)
    gloo().sign_decode_mean(wire, own_mean, CALLER)
    assert same_bits(own_out, out)
    assert same_bits(own_mean, mean)
    gloo().sign_encode(values, before, numel, first, own_wire, CALLER)
    assert same_bits(own_wire[:, 4:], wire[:, 4:])
    own_scales = own_wire.numpy()[:, :4].copy().view(np.float32)[:, 0]
    np.testing.assert_allclose(own_scales, scales, rtol=1e-6, atol=1e-45)
