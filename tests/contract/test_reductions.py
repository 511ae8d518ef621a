"""all_reduce, reduce and reduce_scatter: values against closed forms, bits equal on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from bagua_rt.backend import ReduceOp
from tests.contract.world import REDUCED, World, inputs, poisoned, same_bits, same_everywhere, world
from tests.ranks import RankContext, RankPool

Pools = Callable[[int], RankPool]
SIZES = (0, 1, 7, 1000)
OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)


def allowed(dtype: torch.dtype, op: str) -> bool:
    if dtype is torch.bool:
        return op in ("max", "min", "prod")
    if dtype.is_complex:
        return op in ("sum", "avg")
    return op != "avg" or dtype.is_floating_point


def reference(ts: list[torch.Tensor], op: str) -> torch.Tensor:
    stack = torch.stack([t.cpu() for t in ts])
    dtype = stack.dtype
    wide = stack.to(torch.float64) if dtype.is_floating_point else stack
    if op == "prod":
        return wide.to(torch.int64).prod(0).to(dtype) if dtype is torch.bool else wide.prod(0).to(dtype)
    if op == "avg":
        return (wide.sum(0) / len(ts)).to(dtype)
    if op == "sum":
        return wide.sum(0).to(dtype)
    return (wide.amax(0) if op == "max" else wide.amin(0)).to(dtype)


def check(found: torch.Tensor, right: torch.Tensor) -> None:
    rtol, atol = {torch.float16: (2e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2)}.get(found.dtype, (1e-6, 1e-6))
    torch.testing.assert_close(found.cpu(), right, rtol=rtol, atol=atol)


def every_case(w: World, label: str) -> Any:
    for dtype in REDUCED:
        for op in OPS:
            if allowed(dtype, op):
                for numel in SIZES:
                    yield dtype, op, numel, f"{label}/{op}"


def all_reduce(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for index, (dtype, op, numel, label) in enumerate(every_case(w, "all_reduce")):
            ts = inputs(w, dtype, numel, label)
            mine, kept = ts[w.rank], ts[w.rank].clone()
            right = reference(ts, op) if numel else mine.cpu()
            out, lane = poisoned(mine), w.lanes[index % 2]
            w.comm.all_reduce(out, mine, op, stream=lane).wait()
            check(out, right)
            assert same_bits(mine, kept), "the input was modified"
            inside = mine.clone()
            w.comm.all_reduce_(inside, op).wait()
            assert same_bits(inside, out)
            w.comm.all_reduce(mine, mine, op).wait()
            assert same_bits(mine, out)
            assert same_everywhere(w, out)
        shaped = w.tensor([[1.0, 2.0], [3.0, 4.0]])
        w.comm.all_reduce_(shaped).wait()
        assert shaped.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        scalar = w.tensor(float(w.rank))
        w.comm.all_reduce_(scalar, "sum").wait()
        assert scalar.item() == sum(range(w.size))


def reduce_(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for index, (dtype, op, numel, label) in enumerate(every_case(w, "reduce")):
            ts = inputs(w, dtype, numel, label)
            root, mine = index % w.size, ts[w.rank].clone()
            w.comm.reduce_(mine, root, op, stream=w.lanes[index % 2]).wait()
            if w.rank != root or not numel:
                assert same_bits(mine, ts[w.rank]), "a rank other than root was modified"
            else:
                check(mine, reference(ts, op))


def reduce_scatter(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for index, (dtype, op, numel, label) in enumerate(every_case(w, "reduce_scatter")):
            ts = inputs(w, dtype, numel * w.size, label)
            mine, kept = ts[w.rank], ts[w.rank].clone()
            here = slice(w.rank * numel, (w.rank + 1) * numel)
            right = (reference(ts, op) if numel else mine.cpu())[here]
            out = poisoned(mine, numel)
            w.comm.reduce_scatter(out, mine, op, stream=w.lanes[index % 2]).wait()
            check(out, right)
            assert same_bits(mine, kept), "the input was modified"
            w.comm.reduce_scatter(mine[here], mine, op).wait()
            assert same_bits(mine[here], out)
            kept[here] = out
            assert same_bits(mine, kept), "in place, the other ranks' parts were modified"


def averages_do_not_overflow(ctx: RankContext, backend: str) -> None:
    """B36: 1/n goes in before the sum."""
    with world(ctx, backend) as w:
        for dtype, value in ((torch.float16, 60000.0), (torch.bfloat16, 3e38)):
            t = w.tensor([value] * w.size, dtype)
            right = t[0].item()
            for found in (t.clone(), t.clone()):
                w.comm.all_reduce_(found, "avg").wait()
                torch.testing.assert_close(found, t, rtol=1e-2 if w.size == 3 else 0, atol=0)
                assert found.isfinite().all()
            out = poisoned(t, 1)
            w.comm.reduce_scatter(out, t, "avg").wait()
            w.comm.reduce_(t, 0, "avg").wait()
            assert out.isfinite().all()
            assert abs(t[0].item() / right - 1) < 1e-2


def leaves(ctx: RankContext, backend: str) -> None:
    """Parameters and buffers of autograd's are data like any other."""
    with world(ctx, backend) as w:
        p = torch.nn.Parameter(w.tensor([float(w.rank)] * 2))
        w.comm.all_reduce_(p, "avg").wait()
        w.comm.reduce_(p, 0, "avg").wait()
        w.comm.broadcast_(p).wait()
        out = w.tensor([0.0] * 2)
        w.comm.all_reduce(out, p, "avg").wait()
        torch.testing.assert_close(out, w.tensor([(w.size - 1) / 2] * 2))
        assert p.requires_grad
        assert p.grad_fn is None
        assert not out.requires_grad


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("fn", [all_reduce, reduce_, reduce_scatter, averages_do_not_overflow, leaves])
def test_reduction(pools: Pools, backend: str, size: int, fn: Callable[..., None]) -> None:
    pools(size).run(fn, backend, timeout=100)


def bytes_are_counted(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        assert w.comm.bytes_sent == 0
        w.comm.all_reduce_(w.tensor([1.0] * 6)).wait()
        assert w.comm.bytes_sent == int(2 * 24 * (w.size - 1) / w.size)
        before = w.comm.bytes_sent
        w.comm.all_gather(w.tensor([0.0] * 6 * w.size), w.tensor([1.0] * 6)).wait()
        assert w.comm.bytes_sent - before == 24 * (w.size - 1)
        assert (w.lanes[0].busy_us > 0) == w.device.host_is_compute  # 0 where it isn't measured


@pytest.mark.parametrize("size", [1, 3])
def test_bytes_and_busy_time_are_counted(pools: Pools, backend: str, size: int) -> None:
    pools(size).run(bytes_are_counted, backend)
