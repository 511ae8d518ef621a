"""The fused bucket operations against plain formulas, in every dtype, on the compute stream and on a lane."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bagua_rt.backend import Stream, Views
from tests import kernel_oracles as oracles
from tests.contract.test_life import settled
from tests.contract.world import World, poisoned, same_bits, world
from tests.ranks import RankContext, RankPool

Pools = Callable[[int], RankPool]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def copies(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for stream in (w.device.compute_stream(), w.lanes[1]):
            for dtype in FLOATS:
                for scale in (1.0, 0.5, 1 / 3):
                    copy_case(w, stream, dtype, scale)
            hundreds = [torch.full((3,), float(k), device=w.device.torch_device) for k in range(300)]
            flat = torch.zeros(900, device=w.device.torch_device)
            w.backend.kernels.copy_in(hundreds, flat.split(3), 0.5, stream)
            w.device.synchronize(w.device.record(stream))
            assert torch.equal(flat, torch.cat(hundreds) * 0.5)


def copy_case(w: World, stream, dtype: torch.dtype, scale: float) -> None:  # type: ignore[no-untyped-def]
    dev = w.device.torch_device
    shapes = [(3,), (), (0,), (200, 100), (4, 5), (1,)]
    tensors = [torch.randn(s, device=dev).to(dtype) for s in shapes]
    tensors[4] = torch.randn(5, 4, device=dev).to(dtype).t()  # a gradient with strides of its own
    numels = [t.numel() for t in tensors]
    flat = poisoned(tensors[0], sum(numels) + 1)
    views = [part.view(s) for part, s in zip(flat[1:].split(numels), shapes, strict=True)]
    views[5].fill_(2.0)
    tensors[5] = views[5]  # already in place: scaled where it is
    w.backend.kernels.copy_in(tensors, views, scale, stream)
    w.device.synchronize(w.device.record(stream))
    for t, view in zip(tensors[:5], views[:5], strict=True):
        torch.testing.assert_close(view, (t.double() * scale).to(dtype))
    assert views[5].item() == (torch.tensor([2.0]).to(dtype) * scale).item()
    outs = [torch.zeros_like(t) for t in tensors]
    w.backend.kernels.copy_out(views, outs, stream)
    w.device.synchronize(w.device.record(stream))
    assert all(torch.equal(o, v) for o, v in zip(outs, views, strict=True))
    wide = [torch.zeros(s, device=dev) for s in shapes]
    w.backend.kernels.copy_out(views, wide, stream)
    w.backend.kernels.copy_in([t.float() for t in tensors], views, 1.0, stream)
    w.device.synchronize(w.device.record(stream))
    assert all(torch.equal(o, v.float()) for o, v in zip(wide, outs, strict=True))
    with_gaps = torch.full((2, 6, 8), 2.0, dtype=dtype, device=dev)
    square = torch.arange(9, device=dev).view(3, 3).to(dtype)
    turned = (square.t().double() * scale).to(dtype)
    source, target = (half[:, ::2] for half in with_gaps)
    w.backend.kernels.copy_in([source * 2, square.t()], [target, square], scale, stream)
    w.backend.kernels.copy_in([target], [source], 1.0, stream)  # of one stride, and not dense
    w.device.synchronize(w.device.record(stream))
    assert (with_gaps[:, :, ::2] == torch.tensor(4.0 * scale, dtype=torch.float64).to(dtype)).all()
    assert (with_gaps[:, :, 1::2] == 2.0).all()
    torch.testing.assert_close(square, turned)  # from its own memory, in another order


def copies_again(ctx: RankContext, backend: str) -> None:
    """What was worked out for a bucket's views holds for the same addresses, dtypes and strides only."""
    shapes, at = [(3,), (20, 10), (0,), (4, 5)], [8, 32, 300, 512]  # offsets of the tensors, in elements
    with world(ctx, backend) as w:
        kernels, dev = w.backend.kernels, w.device.torch_device
        numels = [math.prod(shape) for shape in shapes]
        flat = torch.zeros(sum(numels), device=dev)
        views = Views(part.view(s) for part, s in zip(flat.split(numels), shapes, strict=True))
        place = torch.zeros(1024, dtype=torch.float64, device=dev)

        def tensors(dtype: torch.dtype, *, turned: bool = False) -> list[torch.Tensor]:
            memory = place.view(dtype)
            step = place.element_size() // memory.element_size()  # the same addresses for every dtype
            strides = [
                torch.empty(s[::-1]).t().stride() if turned else torch.empty(s).stride() for s in shapes
            ]
            found = [memory.as_strided(s, st, o * step) for s, st, o in zip(shapes, strides, at, strict=True)]
            for k, t in enumerate(found):
                t.copy_(torch.arange(t.numel()).view(t.shape).to(dev) % 7 + k)
            return found

        kinds: list[tuple[torch.dtype, bool]] = [
            *[(torch.float32, False)] * 3,
            *((torch.float32, True), (torch.float16, False), (torch.int32, False), (torch.float64, True)),
            (torch.float32, False),
        ]
        for stream in (w.device.compute_stream(), w.lanes[1], w.device.compute_stream()):
            for dtype, turned in kinds:
                for scale in (0.5, 1.0, 0.5):
                    given = tensors(dtype, turned=turned)
                    wait_for(w, stream)
                    kernels.copy_in(given, views, scale, stream)
                    w.device.synchronize(w.device.record(stream))
                    assert all(torch.equal(v, t.float() * scale) for v, t in zip(views, given, strict=True))
                    for t in given:
                        t.fill_(0)
                    wait_for(w, stream)
                    kernels.copy_out(views, given, stream)
                    w.device.synchronize(w.device.record(stream))
                    assert all(torch.equal(t, v.to(dtype)) for v, t in zip(views, given, strict=True))
            before = flat.clone()
            for scale in (1.0, 0.5, 1.0):  # in place already
                wait_for(w, stream)
                kernels.copy_in(views, views, scale, stream)
            w.device.synchronize(w.device.record(stream))
            assert torch.equal(flat, before * 0.5)
        come_and_go(w, views)


def wait_for(w: World, stream: Stream) -> None:
    """Let `stream` see what torch has just computed."""
    w.device.wait(stream, w.device.record(w.device.compute_stream()))


def come_and_go(w: World, views: Views) -> None:
    """Gradients at ever new addresses, and buckets that end: what was worked out doesn't pile up."""
    stream, dev, kept = w.device.compute_stream(), w.device.torch_device, []
    for k in range(40):
        kept.append([torch.full(v.shape, float(k), device=dev) for v in views])
        w.backend.kernels.copy_in(kept[-1], views, 1.0, stream)
        w.device.synchronize(w.device.record(stream))
        assert all(v.eq(k).all() for v in views)
        others = Views(torch.zeros_like(v) for v in views)
        w.backend.kernels.copy_in(kept[-1], others, 1.0, stream)
        w.device.synchronize(w.device.record(stream))
        memory = weakref.ref(others[1])
        del others
        w.device.record(stream)
        assert memory() is None
    assert len(views.notes) <= 8
    if not w.device.host_is_compute:
        kernels: Any = w.backend.kernels
        spare = sum(map(len, kernels._copies._tables._spare.values()))
        assert 0 < spare <= 40


def reference(u: np.ndarray, valid: int) -> tuple[np.ndarray, np.ndarray, np.float64]:
    scale = np.abs(u[:valid]).mean() if valid else np.float64(0)
    signs = np.where(u >= 0, 1.0, -1.0)
    rest = u - scale * signs
    rest[valid:] = 0
    return np.packbits(u >= 0, bitorder="little"), rest, scale


SHAPES = ((3, 64, 192, 0), (2, 128, 150, 0), (2, 8, 13, 8), (1, 8, 3, 8))  # rows, columns, numel, first


def shifted(t: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values, `offset` elements past an address that fits the widest accesses."""
    memory = torch.empty(t.numel() + offset, dtype=t.dtype, device=t.device)
    return memory[offset:].view(t.shape).copy_(t)


def signs(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        torch.manual_seed(5)
        for offset, stream in enumerate((w.device.compute_stream(), w.lanes[0])):
            for dtype in FLOATS:
                for shape in SHAPES:
                    kept = torch.promote_types(dtype, torch.float32)
                    for error_dtype in {dtype, torch.float32} if w.device.host_is_compute else {kept}:
                        wire = encode_case(w, shape, dtype, error_dtype, stream, offset)
                        decode_case(w, wire, shape[1], dtype, stream, offset)


def encode_case(
    w: World,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    error_dtype: torch.dtype,
    stream: Stream,
    offset: int,
) -> torch.Tensor:
    (rows, columns, numel, first), dev = shape, w.device.torch_device
    values = shifted(torch.randn(rows, columns, device=dev).to(dtype), offset)
    error = shifted(torch.randn(rows, columns, device=dev).to(error_dtype), offset)
    values.view(-1)[max(numel - first, 0) :] = 0
    error.view(-1)[max(numel - first, 0) :] = 0
    values[0, 0] = error[0, 0] = 0  # zero counts as positive
    u, kept = (values.double() + error.double()).cpu().numpy(), values.clone()
    wire = torch.full((rows, 8 + columns // 8), 255, dtype=torch.uint8, device=dev)
    w.backend.kernels.sign_encode(values, error, numel, first, wire, stream)
    w.device.synchronize(w.device.record(stream))
    assert same_bits(values, kept)
    exact = {error_dtype, dtype} <= {torch.float32, torch.float64}
    tolerance = 1e-6 if exact else 2e-2 if torch.bfloat16 in (error_dtype, dtype) else 2e-3
    for r in range(rows):
        valid = min(max(numel - first - r * columns, 0), columns)
        bits, rest, scale = reference(u[r], valid)
        row = wire[r].cpu().numpy()
        np.testing.assert_allclose(row[:4].view(np.float32)[0], scale, rtol=1e-6)
        assert (row[4:8] == 0).all()
        assert (row[8:] == bits).all()
        np.testing.assert_allclose(error[r].double().cpu().numpy(), rest, rtol=tolerance, atol=tolerance)
        assert (error[r, valid:] == 0).all()
    return wire


def decode_case(
    w: World, wire: torch.Tensor, columns: int, dtype: torch.dtype, stream: Stream, offset: int
) -> None:
    raw = wire.cpu().numpy()
    scales = raw[:, :4].copy().view(np.float32).astype(np.float64)
    values = scales * (2.0 * np.unpackbits(raw[:, 8:], axis=1, bitorder="little") - 1)
    like = torch.zeros(1, dtype=dtype, device=wire.device)
    rows = len(values)
    out = shifted(poisoned(like, rows * columns), offset).view(rows, columns)
    mean = shifted(poisoned(like, columns), offset)
    w.backend.kernels.sign_decode(wire, out, stream)
    w.backend.kernels.sign_decode_mean(wire, mean, stream)
    w.device.synchronize(w.device.record(stream))
    torch.testing.assert_close(out.cpu(), torch.from_numpy(values).to(dtype))
    tolerance = 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6
    torch.testing.assert_close(
        mean.cpu(), torch.from_numpy(values.mean(0)).to(dtype), rtol=tolerance, atol=tolerance
    )


MINMAX_SHAPES = (*SHAPES, (2, 4112, 8200, 0), (1, 2048, 9000, 4096))


def minmax(ctx: RankContext, backend: str) -> None:
    """The bytes, the values and the mean are the oracle's, on every backend."""
    with world(ctx, backend) as w:
        kernels, dev = w.backend.kernels, w.device.torch_device
        for offset, stream in enumerate((w.device.compute_stream(), w.lanes[0])):
            for dtype in FLOATS:
                for rows, columns, numel, first in MINMAX_SHAPES:
                    values = torch.randn(rows, columns).to(dtype)
                    values[0, -1] = float("nan")  # of the last chunk of a row
                    valid = oracles.wide(values)
                    here = shifted(values.to(dev), offset)
                    row_bytes = kernels.minmax_row_bytes(columns, dtype)
                    wire = torch.full((rows, row_bytes), 255, dtype=torch.uint8, device=dev)
                    out = shifted(torch.full_like(here, 9), offset)
                    mean = shifted(torch.full_like(here[0], 9), offset)
                    kernels.minmax_encode(here, numel, first, wire, stream)
                    kernels.minmax_decode(wire, out, stream)
                    kernels.minmax_decode_mean(wire, mean, stream)
                    w.device.synchronize(w.device.record(stream))
                    expected = oracles.minmax_encode(valid, numel, first)
                    np.testing.assert_array_equal(wire.cpu().numpy(), expected)
                    decoded = oracles.minmax_decode(expected, columns, oracles.wide_type(dtype))
                    for ours, right in ((out, decoded), (mean, oracles.mean_rows(decoded))):
                        wanted = oracles.narrow(right, dtype)
                        torch.testing.assert_close(ours.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def differences(ctx: RankContext, backend: str) -> None:
    """Bit for bit the oracle's, on every backend, at every alignment of 16 bytes and with nothing to do."""
    with world(ctx, backend) as w:
        kernels, dev, shares = w.backend.kernels, w.device.torch_device, (1 / 3, 1 / 6)
        for offset, stream in enumerate((w.device.compute_stream(), w.lanes[0])):
            for dtype in FLOATS:
                for n in (0, 1, 7, 5000):
                    given = [torch.randn(n).to(dtype) for _ in range(4)]
                    given[2][::3] = given[0][::3]  # has not moved
                    wide = [oracles.wide(t) for t in given]
                    x, left, right, agreed = (shifted(t.to(dev), offset) for t in given)
                    own = shifted(x, offset)
                    kernels.ring_difference(x, left, right, agreed, shares, stream)
                    kernels.add_difference(own, left, right, stream)
                    w.device.synchronize(w.device.record(stream))
                    ring = oracles.narrow(oracles.ring_difference(*wide, shares=shares), dtype)
                    assert same_bits(x.cpu(), ring)
                    assert same_bits(own.cpu(), oracles.narrow(oracles.add_difference(*wide[:3]), dtype))


def memory_stays(ctx: RankContext, backend: str) -> None:
    """What a kernel reads and writes lives until it has run, and no longer, whoever has dropped it."""
    with world(ctx, backend) as w:
        kernels, dev, lane, rows, columns = w.backend.kernels, w.device.torch_device, w.lanes[0], 2, 128
        views = Views([torch.zeros(columns, device=dev)])
        minmax_bytes = kernels.minmax_row_bytes(columns, torch.float32)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=dev)

        def wire(row_bytes: int) -> torch.Tensor:
            return zeros(rows, row_bytes, dtype=torch.uint8)

        def encoded() -> torch.Tensor:
            found = wire(minmax_bytes)
            kernels.minmax_encode(zeros(rows, columns), rows * columns, 0, found, lane)
            w.device.synchronize(w.device.record(lane))
            return found

        calls: list[tuple[Callable[..., object], Callable[[], list[Any]]]] = [
            (lambda t, *a: kernels.copy_in([t], views, 0.5, *a), lambda: [zeros(columns)]),
            (lambda t, *a: kernels.copy_in([t], views, 0.5, *a), lambda: [zeros(columns, dtype=torch.int32)]),
            (lambda t, *a: kernels.copy_out(views, [t], *a), lambda: [zeros(columns)]),
            (lambda t, *a: kernels.copy_out([views[0].clone()], [t], *a), lambda: [zeros(columns)]),
            (
                lambda v, e, wire, *a: kernels.sign_encode(v, e, v.numel(), 0, wire, *a),
                lambda: [zeros(rows, columns), zeros(rows, columns), wire(8 + columns // 8)],
            ),
            (kernels.sign_decode, lambda: [wire(8 + columns // 8), zeros(rows, columns)]),
            (kernels.sign_decode_mean, lambda: [wire(8 + columns // 8), zeros(columns)]),
            (
                lambda v, wire, *a: kernels.minmax_encode(v, v.numel(), 0, wire, *a),
                lambda: [zeros(rows, columns), wire(minmax_bytes)],
            ),
            (kernels.minmax_decode, lambda: [encoded(), zeros(rows, columns)]),
            (kernels.minmax_decode_mean, lambda: [encoded(), zeros(columns)]),
            (
                lambda x, y, z, agreed, *a: kernels.ring_difference(x, y, z, agreed, (0.5, 0.25), *a),
                lambda: [zeros(columns) for _ in range(4)],
            ),
            (kernels.add_difference, lambda: [zeros(columns) for _ in range(3)]),
        ]
        for call, make in calls:
            gate, tensors = threading.Event(), make()
            w.hold(lane, gate)
            call(*tensors, lane)
            memory = [weakref.ref(t.untyped_storage()) for t in tensors]
            del tensors
            assert None not in [each() for each in memory]
            gate.set()
            w.device.synchronize(w.device.record(lane))
            w.device.record(lane)
            assert settled(lambda memory=memory: sum(each() is not None for each in memory), 0) == 0  # type: ignore[misc]


@pytest.mark.parametrize("fn", [copies, copies_again, signs, minmax, differences, memory_stays])
def test_kernels(pools: Pools, backend: str, fn: Callable[..., None]) -> None:
    pools(1).run(fn, backend)
