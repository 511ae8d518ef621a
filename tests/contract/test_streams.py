"""Streams and events: order, waits, times, and errors that stick to a stream."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from bagua_rt.backend import Work
from bagua_rt.errors import CollectiveTimeoutError, UsageError
from tests.contract.world import World, world
from tests.ranks import RankContext, RankPool

Pools = Callable[[int], RankPool]


def double_and_add(t: torch.Tensor, value: int) -> None:
    t.mul_(2).add_(value)


def order(ctx: RankContext, backend: str) -> None:
    """What is queued on a stream runs in order, and after what it waits for."""
    with world(ctx, backend) as w:
        d, (a, b) = w.device, w.lanes
        t = w.tensor([0.0])
        for k in range(200):
            d.run(a, partial(double_and_add, t, k % 3))
        last = d.record(a)
        d.wait(b, last)
        out = w.tensor([-1.0])
        d.run(b, lambda: out.copy_(t))
        d.synchronize(d.record(b))
        right = torch.tensor([0.0])
        for k in range(200):
            right.mul_(2).add_(k % 3)
        assert torch.equal(out.cpu(), right)
        assert torch.equal(t.cpu(), right)
        assert d.query(last)
        assert last.error is None
        w.device.wait(d.compute_stream(), d.record(b))
        joined = d.record(d.compute_stream())
        if not d.host_is_compute:
            d.synchronize(joined)
        assert d.query(joined)


def alive_until_run(ctx: RankContext, backend: str) -> None:
    """What is queued lives, with the tensors that it holds, until it has run, and no longer."""
    with world(ctx, backend) as w:
        d, lane, gate = w.device, w.lanes[0], threading.Event()
        w.hold(lane, gate)
        fn = partial(w.tensor([1.0]).add_, 1)
        given = weakref.ref(fn)
        d.run(lane, fn)
        event = d.record(lane)
        del fn
        assert given() is not None
        gate.set()
        d.synchronize(event)
        d.synchronize(d.record(lane))
        deadline = time.monotonic() + 5
        while given() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert given() is None


def times(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        d, lane = w.device, w.lanes[0]
        before = time.perf_counter_ns() / 1000
        first = d.record(lane, timed=True)
        d.synchronize(first)
        d.run(lane, lambda: time.sleep(0.05))
        second = d.record(lane, timed=True)
        d.synchronize(second)
        after = time.perf_counter_ns() / 1000
        assert before - 500 <= d.time_us(first) <= d.time_us(second) <= after + 500
        assert d.time_us(second) - d.time_us(first) >= 45_000
        on_compute = d.record(d.compute_stream(), timed=True)
        d.synchronize(on_compute)
        assert abs(d.time_us(on_compute) - time.perf_counter_ns() / 1000) < 50_000
        late = d.record(lane, timed=True)
        d.synchronize(late)
        assert d.time_us(late) >= d.time_us(second)


def deadlines(ctx: RankContext, backend: str) -> None:
    """A host wait ends at its deadline, whatever the stream does; the stream goes on."""
    with world(ctx, backend, timeout_s=0.3) as w:
        d, lane = w.device, w.lanes[0]
        gate = threading.Event()
        w.hold(lane, gate)
        event = d.record(lane)
        assert not d.query(event)
        waits: list[Callable[[], object]] = [
            lambda: d.synchronize(event, 0.1),
            lambda: d.synchronize(event),
        ]
        if d.host_is_compute:
            waits.append(lambda: d.wait(d.compute_stream(), event))
        for wait in waits:
            begin = time.monotonic()
            with pytest.raises(CollectiveTimeoutError):
                wait()
            assert 0.09 <= time.monotonic() - begin < 2
        gate.set()
        d.synchronize(event, 5)


def new_streams(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        before = threading.active_count()
        for k in range(20):
            stream = w.device.new_stream(f"extra{k}")
            assert stream.name == f"extra{k}"
            t = w.tensor([0.0])
            w.device.run(stream, partial(t.add_, 1))
            w.device.synchronize(w.device.record(stream))
            assert t.item() == 1
            w.device.close_stream(stream)
            w.device.close_stream(stream)
        deadline = time.monotonic() + 5
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() <= before


class BrokenKernelError(Exception):
    pass


def broken() -> None:
    raise BrokenKernelError


def sticky_kernel(ctx: RankContext, backend: str) -> None:
    """What is queued behind a failure does not run, and carries its error, until an abort on that lane."""
    with world(ctx, backend) as w:
        if not w.device.host_is_compute:
            raises_at_once(w)
            return
        d, lane = w.device, w.lanes[0]
        extra = w.comm.duplicate("extra", w.lanes)
        t = w.tensor([0.0])
        d.run(lane, broken)
        d.run(lane, lambda: t.add_(1))
        event = d.record(lane)
        with pytest.raises(BrokenKernelError):
            d.synchronize(event, 5)
        assert isinstance(event.error, BrokenKernelError)
        assert t.item() == 0
        d.run(w.lanes[1], lambda: t.add_(2))  # the other lane is not concerned
        d.synchronize(d.record(w.lanes[1]))
        assert t.item() == 2
        extra.close()
        d.run(lane, lambda: t.add_(4))
        d.synchronize(d.record(lane), 5)
        assert t.item() == 6
        w.comm.all_reduce_(t, "avg").wait()


def raises_at_once(w: World) -> None:
    """Where torch itself queues what is run, an exception on the way is the caller's; the lane goes on."""
    d, lane = w.device, w.lanes[0]
    t = w.tensor([0.0])
    with pytest.raises(BrokenKernelError):
        d.run(lane, broken)
    d.run(lane, lambda: t.add_(1))
    d.synchronize(d.record(lane), 5)
    assert t.item() == 1
    w.comm.all_reduce_(t, "avg").wait()


def work_semantics(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        d, t = w.device, w.tensor([float(w.rank)] * 1000)
        work = w.comm.all_reduce_(t, "sum")
        work.wait_stream(w.lanes[1])
        out = torch.zeros_like(t)
        d.run(w.lanes[1], lambda: out.copy_(t))
        d.synchronize(d.record(w.lanes[1]))
        assert out[0].item() == sum(range(w.size))
        work.wait()
        work.wait(0.0)
        assert work.is_done()
        assert work.event.error is None
        d.synchronize(work.event)
        second = w.comm.all_reduce_(t, "avg")
        second.wait_stream(d.compute_stream())
        d.synchronize(d.record(d.compute_stream()))
        assert t[0].item() == sum(range(w.size))


def after_torch(ctx: RankContext, backend: str) -> None:
    """Without a stream, a collective comes after what the caller's compute stream holds; else not."""
    with world(ctx, backend) as w:
        d, compute, n = w.device, w.device.compute_stream(), w.size
        t, out = w.tensor([0.0] * n), w.tensor([0.0] * n)
        calls: dict[str, tuple[Callable[[], Work], torch.Tensor, float]] = {
            "all_reduce_": (lambda: w.comm.all_reduce_(t, "sum"), t, n * (n + 1) / 2),
            "all_reduce_ again": (lambda: w.comm.all_reduce_(t, "sum"), t, n * (n + 1) / 2),
            "broadcast_": (lambda: w.comm.broadcast_(t), t, 1.0),
            "all_to_all": (lambda: w.comm.all_to_all(out, t), out[:1], 1.0),
            "send_recv": (lambda: w.comm.send_recv(t, (w.rank + 1) % n, out, (w.rank - 1) % n), out, -1.0),
        }
        for name, (call, changed, right) in calls.items():
            call().wait()  # a library may set itself up in a first call, which is nothing to hold up
            gate = threading.Event()
            if not d.host_is_compute:
                w.hold(compute, gate)
            d.run(compute, lambda: t.fill_(w.rank + 1))
            work = call()
            assert d.host_is_compute or not work.is_done(), name
            gate.set()
            work.wait()
            wanted = (w.rank - 1) % n + 1.0 if right < 0 else right
            assert changed[0].item() == wanted, name
        if not d.host_is_compute:
            gate = threading.Event()
            w.hold(compute, gate)
            w.comm.all_reduce_(t, "sum", stream=w.lanes[1]).wait()
            gate.set()


def foreign(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        with pytest.raises(UsageError, match="stream"):
            w.device.run("lane0", broken)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="event"):
            w.device.query(None)  # type: ignore[arg-type]


def lanes_do_not_mix(ctx: RankContext, backend: str) -> None:
    """Operations of two lanes run side by side, and never cross.

    In any order between lanes on the CPU; NCCL wants one order, for one communicator serves all lanes.
    """
    with world(ctx, backend) as w:
        for _ in range(60):
            ts = [w.tensor([float(k + w.rank)] * 501) for k in range(8)]
            in_order = w.rank % 2 == 0 or not w.device.host_is_compute
            order = range(8) if in_order else (1, 0, 3, 2, 5, 4, 7, 6)
            works = [w.comm.all_reduce_(ts[k], "sum", stream=w.lanes[k % 2]) for k in order]
            for work in works:
                work.wait()
            for k, t in enumerate(ts):
                assert t.eq(k * w.size + sum(range(w.size))).all()


@pytest.mark.parametrize("fn", [order, alive_until_run, times, deadlines, new_streams, foreign])
def test_streams(pools: Pools, backend: str, fn: Callable[..., None]) -> None:
    pools(1).run(fn, backend)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("fn", [sticky_kernel, work_semantics, lanes_do_not_mix, after_torch])
def test_streams_of_several_ranks(pools: Pools, backend: str, size: int, fn: Callable[..., None]) -> None:
    pools(size).run(fn, backend)
