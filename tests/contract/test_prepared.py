"""Prepared calls, and calls that were made before: cheaper, and as careful."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from bagua_rt.backend import Call
from bagua_rt.errors import ClosedError, CollectiveError, UsageError
from tests.contract.test_life import settled
from tests.contract.world import World, world
from tests.ranks import RankContext, RankPool

Pools = Callable[[int], RankPool]


def launches(ctx: RankContext, backend: str) -> None:
    """Launched again and again, beside other operations, it reduces what is in the memory at that time."""
    with world(ctx, backend) as w:
        total = sum(range(1, w.size + 1))
        for dtype, op in ((torch.float32, "sum"), (torch.float64, "avg"), (torch.complex64, "sum")):
            t, other = w.tensor([0.0] * 300, dtype), w.tensor([1.0])
            prepared = w.comm.prepare_all_reduce_(t, op, stream=w.lanes[1])  # type: ignore[arg-type]
            sent = w.comm.bytes_sent
            for k in range(1, 9):
                t.fill_(k * (w.rank + 1))
                work = prepared.launch()
                if k % 3 == 0:
                    w.comm.all_reduce_(other, "avg", stream=w.lanes[k % 2])
                work.wait()
                assert work.is_done()
                right = k * total / (w.size if op == "avg" else 1)
                torch.testing.assert_close(t, torch.full_like(t, right))  # an average by thirds is rounded
            launched = w.comm.bytes_sent - sent - 2 * int(2 * 4 * (w.size - 1) / w.size)
            assert launched == 8 * int(2 * t.nbytes * (w.size - 1) / w.size)
        prepared = w.comm.prepare_all_reduce_(w.tensor([0.0]), "sum", stream=w.lanes[1])
        works = [prepared.launch() for _ in range(300)]  # not one is waited for
        works[-1].wait_stream(w.lanes[0])
        w.device.synchronize(w.device.record(w.lanes[0]))
        record = w.comm.flight_record()[-300:]
        assert [entry["operation"] for entry in record] == ["all_reduce_"] * len(record)
        first = record[0]["sequence"]
        assert [entry["sequence"] for entry in record] == list(range(first, first + len(record)))
        assert {entry["state"] for entry in record} == {"complete"}
        empty = w.comm.prepare_all_reduce_(w.tensor([]))
        empty.launch().wait()


def in_a_group(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        a, b = w.tensor([1.0]), w.tensor([1.0])
        prepared = w.comm.prepare_all_reduce_(a, "sum")
        prepared.launch().wait()
        w.comm.all_reduce_(b, "max").wait()
        with w.comm.group():
            works = [w.comm.all_reduce_(b, "max"), prepared.launch()]
            assert not works[0].is_done()
            assert not works[1].is_done()
            with pytest.raises(UsageError, match="not launched yet"):
                works[1].wait()
        for work in works:
            work.wait()
        assert (a.item(), b.item()) == (w.size**2, 1.0)
        states = [(entry["operation"], entry["state"]) for entry in w.comm.flight_record()]
        assert states == [("all_reduce_", "complete")] * 4


def moves(t: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to give a tensor other memory; `t` has room for as many elements as it has."""
    return {
        "resized": lambda: t.resize_(t.numel() * 50),
        "storage resized": lambda: t.untyped_storage().resize_(t.nbytes * 50),
        "storage freed": lambda: t.untyped_storage().resize_(0),
        "set": lambda: t.set_(torch.zeros_like(t)),  # type: ignore[call-overload]
        "data": lambda: setattr(t, "data", torch.zeros_like(t)),
    }


def what_moves_is_refused(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for how in moves(torch.empty(1)):
            t = torch.zeros(100, device=w.device.torch_device)
            prepared = w.comm.prepare_all_reduce_(t, "sum")
            prepared.launch().wait()
            moves(t)[how]()
            with pytest.raises(UsageError, match=r"all_reduce_.*has moved.*prepare the call anew"):
                prepared.launch()
        t = w.tensor([1.0, 2.0, 3.0, 4.0])
        wrong: list[tuple[Any, Any, str]] = [
            (t.view(2, 2).t(), "sum", "contiguous"),
            (t.to(torch.int64), "avg", "sum"),
            (t, "mean", "sum, avg"),
            ([1.0], "sum", "torch.Tensor"),
        ]
        for bad, op, text in wrong:
            with pytest.raises(UsageError, match=rf"prepare_all_reduce_.*{text}"):
                w.comm.prepare_all_reduce_(bad, op)
        with pytest.raises(UsageError, match="lane0, lane1"):
            w.comm.prepare_all_reduce_(t, stream=w.device.compute_stream())
        prepared = w.comm.prepare_all_reduce_(t, "sum")
        t.unsqueeze_(0)  # the memory is what it was
        prepared.launch().wait()
        assert t.tolist() == [[w.size * x for x in (1.0, 2.0, 3.0, 4.0)]]


def memory_stays(ctx: RankContext, backend: str) -> None:
    """A call that is dropped with its tensor keeps the memory until its launch is complete, and no longer,
    be it a prepared one or an all_reduce_ of what was reduced before. Nobody holds its work either."""
    with world(ctx, backend) as w:
        lane = w.lanes[0]
        for is_prepared in (False, True):
            t = torch.full((50_000,), 1.0, device=w.device.torch_device)
            memory, gate = weakref.ref(t.untyped_storage()), threading.Event()
            launch: Callable[[], Any] = partial(w.comm.all_reduce_, t, "avg", stream=lane)
            if is_prepared:
                launch = w.comm.prepare_all_reduce_(t, "avg", stream=lane).launch
            launch().wait()
            w.hold(lane, gate)
            launch()
            del t, launch
            assert memory() is not None, "the operation has not run yet"
            gate.set()
            w.device.synchronize(w.device.record(lane))
            w.comm.barrier().wait()
            assert settled(lambda memory=memory: memory() is not None, 0) == 0  # type: ignore[misc]


def ends(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        other = w.comm.duplicate("other", w.lanes)
        t = w.tensor([1.0])
        prepared, known = other.prepare_all_reduce_(t), other.prepare_all_reduce_(t, stream=w.lanes[1])
        for _ in range(2):
            prepared.launch().wait()
            known.launch().wait()
            other.all_reduce_(t).wait()
        if w.rank == 0:
            stuck = prepared.launch()
            other.abort()
            with pytest.raises(CollectiveError, match="aborted"):
                stuck.wait(5)
        else:
            other.abort()
        for call in (prepared.launch, known.launch, lambda: other.all_reduce_(t)):
            with pytest.raises(CollectiveError, match="aborted"):
                call()
        other.close()
        for call in (prepared.launch, lambda: other.all_reduce_(t)):
            with pytest.raises(ClosedError, match="was closed"):
                call()
        w.comm.all_reduce_(w.tensor([1.0])).wait()


def wrong_tensors_at_a_known_address(ctx: RankContext, backend: str) -> None:
    """What was reduced before is not let through again for its address alone."""
    with world(ctx, backend) as w:
        dev = w.device.torch_device
        wrong: Any = [1.0]
        t = torch.zeros(8, device=dev)
        z = torch.zeros(8, dtype=torch.complex64, device=dev)
        for _ in range(3):
            w.comm.all_reduce_(t, "sum").wait()
            w.comm.all_reduce_(t, "avg").wait()
            w.comm.all_reduce_(z, "avg", stream=w.lanes[1]).wait()
        cases: list[tuple[Callable[[], object], str]] = [
            (lambda: w.comm.all_reduce_(t.view(2, 4).t()), "contiguous"),
            (lambda: w.comm.all_reduce_(t[:1].expand(8)), "contiguous"),
            (lambda: w.comm.all_reduce_(torch._neg_view(t)), "neg"),
            (lambda: w.comm.all_reduce_(z.conj(), stream=w.lanes[1]), "conj"),
            (lambda: w.comm.all_reduce_(t.view(torch.int32)), "int32"),
            (lambda: w.comm.all_reduce_(t, "mean"), "sum, avg"),  # type: ignore[arg-type]
            (lambda: w.comm.all_reduce_(t, wrong), "sum, avg"),
            (lambda: w.comm.all_reduce_(t, stream=wrong), "lane0"),
            (lambda: w.comm.all_reduce_(t, stream=w.device.compute_stream()), "lane0"),
            (lambda: w.comm.all_reduce_(t.to_sparse()), "sparse"),
            (lambda: w.comm.all_reduce_(torch.zeros(8, device="meta")), "meta"),
        ]
        sent = w.comm.bytes_sent
        for call, text in cases:
            with pytest.raises(UsageError, match=text):
                call()
        assert w.comm.bytes_sent == sent
        for numel in (3, 8, 1, 5):  # smaller ones at the same address, shaped otherwise
            part = t[:numel].view(1, numel)
            part.fill_(1.0)
            w.comm.all_reduce_(part, "sum").wait()
            assert part.tolist() == [[float(w.size)] * numel]
        reused_memory(w)


def reused_memory(w: World) -> None:
    """Tensors that come and go at the same few addresses, in several dtypes and sizes."""
    for k in range(60):
        dtype = (torch.float32, torch.int32, torch.float16)[k % 3]
        t = torch.full((64 + k % 2,), k % 5 + w.rank, dtype=dtype, device=w.device.torch_device)
        w.comm.all_reduce_(t, "sum", stream=w.lanes[k % 2]).wait()
        assert t.eq(k % 5 * w.size + sum(range(w.size))).all()


class Board:
    """A `bagua_rt.backend.CallBoard` that remembers what was compared."""

    is_comparing = True

    def __init__(self) -> None:
        self.operations: list[str] = []

    def telling_refusals(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compare(self, calls: Sequence[Call]) -> None:
        self.operations += [call.fields["operation"] for call in calls]

    def wait(self, wait: Callable[[float], bool], timeout_s: float, text: Any, call: Call | None) -> bool:
        return wait(timeout_s)


def every_launch_is_compared(ctx: RankContext, backend: str) -> None:
    """What was checked before is not launched by a way around the comparison between ranks."""
    with world(ctx, backend) as w:
        t = w.tensor([1.0])
        prepared = w.comm.prepare_all_reduce_(t)
        board: Any = Board()
        for k in range(4):
            if k == 2:
                w.comm.use_board(board)
            w.comm.all_reduce_(t).wait()
            prepared.launch().wait()
        assert board.operations == ["all_reduce"] * 4


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("fn", [launches, in_a_group])
def test_prepared(pools: Pools, backend: str, size: int, fn: Callable[..., None]) -> None:
    pools(size).run(fn, backend)


CARE = [
    what_moves_is_refused,
    memory_stays,
    ends,
    wrong_tensors_at_a_known_address,
    every_launch_is_compared,
]


@pytest.mark.parametrize("fn", CARE)
def test_care(pools: Pools, backend: str, fn: Callable[..., None]) -> None:
    pools(2).run(fn, backend)
