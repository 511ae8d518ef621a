"""Communicators made from a communicator: split, shrink, duplicate; and world size 1 (B64)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bagua_rt.backend import Communicator
from bagua_rt.errors import UsageError
from tests.contract.world import World, open_for, world
from tests.ranks import RankContext, RankPool

Pools = Callable[[int], RankPool]


def total(w: World, comm: Communicator, value: float) -> float:
    t = w.tensor([value])
    comm.all_reduce_(t, "sum").wait()
    return float(t.item())


def split(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        part = w.comm.split(w.rank % 2)
        assert part is not None
        mine = [r for r in range(w.size) if r % 2 == w.rank % 2]
        assert (part.world_size, part.rank) == (len(mine), mine.index(w.rank))
        assert total(w, part, w.rank) == sum(mine)
        assert part.lanes == w.comm.lanes
        assert part.name != w.comm.name
        turned = w.comm.split(7, key=-w.rank)
        assert turned is not None
        assert turned.rank == w.size - 1 - w.rank
        assert turned.broadcast_object(w.rank) == w.size - 1
        none = w.comm.split(None if w.rank == 0 else -1)
        assert (none is None) == (w.rank == 0)
        if none is not None:
            assert total(w, none, w.rank) == sum(range(1, w.size))
            inner = none.split(0)
            assert inner is not None
            assert total(w, inner, 1) == w.size - 1
            inner.close()
            none.close()
        # B64: {0, 2} of 3, side by side with the whole
        pair = w.comm.split(0 if w.rank in (0, 2) else None)
        if pair is not None:
            t = w.tensor([float(w.rank + 1)])
            pair.all_reduce_(t, "avg").wait()
            assert t.item() == (2.0 if w.size == 3 else 1.0)
            pair.close()
        assert total(w, w.comm, 1) == w.size
        part.close()
        assert total(w, turned, 1) == w.size
        turned.close()


def shrink(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        if w.rank == 1:
            return
        rest = w.comm.shrink([1])
        assert rest.world_size == w.size - 1
        assert total(w, rest, w.rank) == sum(range(w.size)) - 1
        w.comm.abort()
        again = w.comm.shrink([1])
        assert total(w, again, 1) == w.size - 1
        rest.close()
        again.close()


def duplicate(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        lane = w.device.new_stream("control")
        other = w.comm.duplicate("control", [lane])
        assert "control" in other.name
        assert list(other.lanes) == [lane]
        with pytest.raises(UsageError, match="lane"):
            other.all_reduce_(w.tensor([1.0]), stream=w.lanes[0])
        assert total(w, other, 1) == w.size
        w.comm.close()
        assert total(w, other, 1) == w.size
        other.close()


def same_name(ctx: RankContext, backend: str) -> None:
    """A name may be used again over one store."""
    with world(ctx, backend) as w:
        for k in range(3):
            comm = w.backend.connect(ctx.store(), w.rank, w.size, "again", w.lanes, timeout_s=10)
            assert total(w, comm, k) == k * w.size
            comm.close()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("fn", [split, duplicate, same_name])
def test_children(pools: Pools, backend: str, size: int, fn: Callable[..., None]) -> None:
    pools(size).run(fn, backend)


@pytest.mark.parametrize("size", [2, 3])
def test_shrink(pools: Pools, backend: str, size: int) -> None:
    pools(size).run(shrink, backend)


def alone(ctx: RankContext, backend: str) -> None:
    opened = open_for(backend, 0, timeout_s=5)
    no_store: object = None
    lanes = [opened.device.new_stream("lane0")]
    comm = opened.connect(no_store, 0, 1, "alone", lanes, timeout_s=5)  # type: ignore[arg-type]
    w = World(ctx, opened, opened.device, lanes, comm)
    assert total(w, comm, 3) == 3
    with pytest.raises(UsageError):
        comm.send(w.tensor([0.0]), 0)
    part = comm.split(0)
    assert part is not None
    assert total(w, part, 2) == 2
    opened.close()


def test_world_size_one_needs_no_store(pools: Pools, backend: str) -> None:
    pools(1).run(alone, backend)
