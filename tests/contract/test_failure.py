"""Ranks that are late, dead or gone: deadlines, errors, abort, and going on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch

from bagua_rt.backend import Communicator, Work
from bagua_rt.errors import ClosedError, CollectiveError, CollectiveTimeoutError, PeerError
from tests.contract.world import world
from tests.ranks import RankContext, RankDiedError, RankPool

Pools = Callable[[int], RankPool]


def late_peer(ctx: RankContext, backend: str) -> None:
    """The deadline counts from the wait; once the peer comes, everything is well."""
    with world(ctx, backend, timeout_s=20) as w:
        t = w.tensor([1.0] * 4)
        w.comm.barrier().wait()
        if w.rank == 0:
            work = w.comm.all_reduce_(t, "sum")
            begin = time.monotonic()
            with pytest.raises(CollectiveTimeoutError) as caught:
                work.wait(0.3)
            assert 0.25 < time.monotonic() - begin < 3
            for part in ("all_reduce_ #2", "'world'", "rank 0 of 2", "0.3 s", "abort"):
                assert part in str(caught.value)
            assert isinstance(caught.value, TimeoutError)
            assert not work.is_done()
            work.wait()
        else:
            time.sleep(1.0)
            w.comm.all_reduce_(t, "sum").wait()
        assert t.tolist() == [2.0] * 4


def abort_goes_on(ctx: RankContext, backend: str) -> None:
    """An abort ends what is stuck; another communicator on the same lanes goes on; a shrink works."""
    with world(ctx, backend, timeout_s=20) as w:
        other = w.comm.duplicate("other", w.lanes)
        t, u = w.tensor([1.0]), w.tensor([1.0])
        if w.rank == 0:
            stuck = [w.comm.all_reduce_(w.tensor([1.0]), stream=lane) for lane in w.lanes]
            behind = w.comm.all_reduce_(t)
            queued = other.all_reduce_(u, "sum")  # behind what never ends
            untouched = w.tensor([0.0])
            w.device.run(w.lanes[0], lambda: untouched.add_(1))
            event = w.device.record(w.lanes[0])
            third = w.device.new_stream("third")
            w.device.wait(third, event)
            beyond = w.device.record(third)
            time.sleep(0.2)
            begin = time.monotonic()
            w.comm.abort()
            w.comm.abort()
            assert time.monotonic() - begin < 1
            for work in (*stuck, behind):
                with pytest.raises(CollectiveError, match="aborted"):
                    work.wait(5)
                assert work.is_done()
            queued.wait()
            for point in (event, beyond):
                with pytest.raises(CollectiveError, match="aborted"):
                    w.device.synchronize(point, 5)  # the bucket behind it is not right
            w.device.close_stream(third)
            if w.device.host_is_compute:  # a device runs it, on whatever it finds: the event says so
                assert untouched.item() == 0
            with pytest.raises(CollectiveError, match="aborted"):
                w.comm.broadcast_(t)
        else:
            other.all_reduce_(u, "sum").wait()
        assert u.item() == w.size
        for lane in w.lanes:
            other.all_reduce_(u, "avg", stream=lane).wait()
            w.device.run(lane, lambda: u.add_(1))
            w.device.synchronize(w.device.record(lane), 5)
        assert u.item() == w.size + 2
        other.close()


def until_it_fails(comm: Communicator, t: torch.Tensor) -> None:
    for _ in range(100):
        comm.all_reduce_(t).wait()


def dies(ctx: RankContext, backend: str) -> str:
    """The last rank dies; every other gets an error soon, the same at each call, and is able to go on."""
    with world(ctx, backend, timeout_s=20) as w:
        t = w.tensor([1.0] * 1000)
        w.comm.all_reduce_(t).wait()
        if w.rank == w.size - 1:
            os._exit(7)
        begin = time.monotonic()
        with pytest.raises(PeerError) as caught:
            until_it_fails(w.comm, t)
        assert time.monotonic() - begin < 5
        behind = w.tensor([0.0])
        w.device.run(w.lanes[0], lambda: behind.add_(1))
        event = w.device.record(w.lanes[0])
        with pytest.raises(PeerError):
            w.device.synchronize(event, 5)
        for call in (lambda: w.comm.all_reduce_(t), w.comm.barrier, lambda: w.comm.split(0)):
            with pytest.raises(PeerError) as again:
                call()
            assert str(again.value) == str(caught.value)
            assert again.value.__cause__ is not None
        w.comm.abort()
        rest = w.comm.shrink([w.size - 1])
        u = w.tensor([1.0])
        rest.all_reduce_(u, "sum").wait()
        assert u.item() == w.size - 1
        assert behind.item() == 0
        rest.close()
        return str(caught.value)


def connect_alone(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend, timeout_s=10) as w:
        if w.rank == 0:
            begin = time.monotonic()
            with pytest.raises(CollectiveTimeoutError, match=r"'late'.*2 ranks"):
                w.backend.connect(ctx.store(), 0, 2, "late", w.lanes, timeout_s=1)
            assert time.monotonic() - begin < 3
        w.comm.barrier().wait()


def closed(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend, timeout_s=10) as w:
        other = w.comm.duplicate("other", w.lanes)
        t = w.tensor([1.0])
        done = other.all_reduce_(t)
        done.wait()
        pending = other.all_reduce_(w.tensor([0.0] * 4)) if w.rank == 0 else None
        if w.rank == 1:  # it closes later than the other rank
            w.comm.all_reduce_(t, "sum").wait()
        other.close()
        other.close()
        if w.rank == 0:  # nothing holds up what is behind an operation that was given up
            begin = time.monotonic()
            w.comm.all_reduce_(t, "sum").wait()
            assert time.monotonic() - begin < 5
        other.abort()
        done.wait()
        if pending is not None:
            with pytest.raises(ClosedError):
                pending.wait(5)
        for call in (lambda: other.all_reduce_(t), other.barrier, lambda: other.shrink([1 - w.rank])):
            with pytest.raises(ClosedError, match="'world/other' was closed"):
                call()
        assert t.item() == 2.0


def long_wait(ctx: RankContext, backend: str) -> None:
    """An operation may take longer than the connect's deadline: nothing but our own waits has one."""
    with world(ctx, backend, timeout_s=20) as w:
        comm = w.backend.connect(ctx.store(), w.rank, w.size, "short", w.lanes, timeout_s=2)
        for k in range(5):
            w.comm.barrier().wait()
            if w.rank == 0:
                time.sleep(2.3)
            t, wide = w.tensor([1.0, 2.0]), w.tensor([0.0] * 4)
            calls: list[Callable[[], Work]] = [
                lambda t=t: comm.all_reduce_(t),  # type: ignore[misc]
                lambda t=t, wide=wide: comm.all_gather(wide, t),  # type: ignore[misc]
                lambda t=t, wide=wide: comm.reduce_scatter(t, wide),  # type: ignore[misc]
                lambda wide=wide: comm.all_to_all(torch.zeros_like(wide), wide),  # type: ignore[misc]
                lambda t=t: comm.broadcast_(t, 0),  # type: ignore[misc]
            ]
            calls[k]().wait(15)
        comm.close()


def first_sends(ctx: RankContext, backend: str) -> None:
    """Two ranks that both send first on one lane wait for each other until the deadline."""
    with world(ctx, backend, timeout_s=10) as w:
        big = torch.zeros(1 << 20, device=w.device.torch_device)
        sent = w.comm.send(big, 1 - w.rank)
        received = w.comm.recv(torch.zeros_like(big), 1 - w.rank)
        with pytest.raises(CollectiveTimeoutError, match=r"recv #2.*send #1"):
            received.wait(0.5)
        assert not sent.is_done()
        ctx.store().set(f"waited/{w.rank}", "")
        ctx.store().get(f"waited/{1 - w.rank}")  # an abort would be the other's error
        w.comm.abort()


@pytest.mark.parametrize("fn", [late_peer, abort_goes_on, connect_alone, closed, long_wait, first_sends])
def test_failure(pools: Pools, backend: str, fn: Callable[..., None]) -> None:
    pools(2).run(fn, backend)


def test_abort_among_three(pools: Pools, backend: str) -> None:
    pools(3).run(abort_goes_on, backend)


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_peer_is_an_error_on_the_others(pools: Pools, backend: str, size: int) -> None:
    *texts, dead = pools(size).run(dies, backend, expect_errors=True)
    assert isinstance(dead, RankDiedError)
    assert dead.exit_code == 7
    for rank, text in enumerate(texts):
        assert isinstance(text, str), text
        assert "all_reduce_ #" in text
        assert f"rank {rank} of {size}" in text
