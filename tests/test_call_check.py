"""Calls that differ between ranks: with `init(check=True)` an error on all; without, told at the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from bagua_rt.backend import Communicator
from bagua_rt.errors import BaguaError
from tests.micro import caught, group, on
from tests.ranks import RankContext, RankPool

Call = Callable[[Communicator], Any]


def floats(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def lists(*counts: int) -> list[torch.Tensor]:
    return [floats(count) for count in counts]


def grouped(*calls: Call) -> Call:
    def launch(comm: Communicator) -> None:
        with comm.group():
            for call in calls:
                call(comm)

    return launch


# What rank 0 calls, what the others call, and what the text must name.
DIFFERENCES: dict[str, tuple[Call, Call, str]] = {
    "operation": (lambda c: c.all_reduce_(floats(4)), lambda c: c.broadcast_(floats(4)), "operation"),
    "count": (lambda c: c.all_reduce_(floats(4)), lambda c: c.all_reduce_(floats(5)), "numel"),
    "dtype": (
        lambda c: c.all_reduce_(floats(4)),
        lambda c: c.all_reduce_(floats(4, torch.float64)),
        "dtype",
    ),
    "reduction": (lambda c: c.all_reduce_(floats(4), "sum"), lambda c: c.all_reduce_(floats(4)), "reduction"),
    "root": (lambda c: c.broadcast_(floats(4), 0), lambda c: c.broadcast_(floats(4), 1), "root"),
    "root of reduce": (lambda c: c.reduce_(floats(4), 0), lambda c: c.reduce_(floats(4), 1), "root"),
    "root of gather": (
        lambda c: c.gather(lists(*[2] * c.world_size), floats(2), 0),
        lambda c: c.gather(lists(*[2] * c.world_size) if c.rank == 1 else None, floats(2), 1),
        "root",
    ),
    "gather's size": (
        lambda c: c.gather(lists(*[2] * c.world_size), floats(2), 0),
        lambda c: c.gather(None, floats(3), 0),
        "numel",
    ),
    "scatter's size": (
        lambda c: c.scatter(floats(2), lists(*[2] * c.world_size), 0),
        lambda c: c.scatter(floats(3), None, 0),
        "numel",
    ),
    "all_gather's size": (
        lambda c: c.all_gather(floats(2 * c.world_size), floats(2)),
        lambda c: c.all_gather(floats(3 * c.world_size), floats(3)),
        "numel",
    ),
    "all_to_all_v's sizes": (
        lambda c: c.all_to_all_v(lists(*[2] * c.world_size), lists(*[2] * c.world_size)),
        lambda c: c.all_to_all_v(
            lists(*(2 if k == c.rank else 3 for k in range(c.world_size))), lists(*[2] * c.world_size)
        ),
        "numel",
    ),
    "lane": (
        lambda c: c.all_reduce_(floats(4)),
        lambda c: c.all_reduce_(floats(4), stream=c.lanes[1]),
        "lane",
    ),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_reduce_(floats(1)), "operation"),
    "within a group": (
        grouped(lambda c: c.all_reduce_(floats(4)), lambda c: c.all_reduce_(floats(5))),
        grouped(lambda c: c.all_reduce_(floats(4)), lambda c: c.all_reduce_(floats(6))),
        "numel",
    ),
}


def tried(ctx: RankContext, calls: dict[str, Call]) -> dict[str, tuple[str, str, float, float]]:
    """For each call the error's kind and text, the seconds until then, and a sum of (rank + 1) afterwards:
    nothing was launched, so the ranks are in step."""
    found = {}
    with group(ctx, check=True) as pg:
        for name, call in calls.items():
            pg.world.barrier().wait()
            begin = time.monotonic()
            kind, text = caught(lambda: call(pg.world))  # noqa: B023
            seconds = time.monotonic() - begin
            after = torch.full((3,), float(ctx.rank + 1))
            pg.world.all_reduce_(after, "sum").wait()
            found[name] = (kind, text, seconds, after[0].item())
    return found


def differing(ctx: RankContext) -> dict[str, tuple[str, str, float, float]]:
    return tried(
        ctx, {k: first if ctx.rank == 0 else others for k, (first, others, _) in DIFFERENCES.items()}
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_differs_is_named_on_every_rank_and_nothing_launched(pool: RankPool, world_size: int) -> None:
    answers = on(pool, world_size, differing)
    for name, (_, _, field) in DIFFERENCES.items():
        for kind, text, seconds, after in (answer[name] for answer in answers):
            assert kind == "UsageError", name
            assert f"differs between ranks: {field}" in text, name
            assert "collective #" in text
            assert seconds < 2.0, name
            assert after == world_size * (world_size + 1) / 2
        assert len({answer[name][1] for answer in answers}) == 1, "the same text everywhere"


WRONG: Any = 0.5
# What rank 1 calls, which is refused there, where the others make the call beside it.
REFUSED: dict[str, tuple[Call, Call]] = {
    "reduction": (lambda c: c.all_reduce_(floats(4), WRONG), lambda c: c.all_reduce_(floats(4), "sum")),
    "root": (lambda c: c.broadcast_(floats(4), c.world_size), lambda c: c.broadcast_(floats(4), 0)),
    "can't be sent": (lambda c: c.all_reduce_(floats(8)[::2]), lambda c: c.all_reduce_(floats(4))),
    "out": (
        lambda c: c.all_gather(floats(4 * c.world_size - 1), floats(4)),
        lambda c: c.all_gather(floats(4 * c.world_size), floats(4)),
    ),
    "broadcast_object": (lambda c: c.broadcast_object(1, -1), lambda c: c.broadcast_object(1, 0)),
    "split": (lambda c: c.split(WRONG), lambda c: c.split(0)),
    "not a lane": (lambda c: c.all_reduce_(floats(4), stream=WRONG), lambda c: c.all_reduce_(floats(4))),
    "all_reduce_": (
        grouped(lambda c: c.broadcast_(floats(4)), lambda c: c.all_reduce_(WRONG)),
        grouped(lambda c: c.broadcast_(floats(4)), lambda c: c.all_reduce_(floats(4))),
    ),
}


def refused(ctx: RankContext) -> dict[str, tuple[str, str, float, float]]:
    return tried(ctx, {name: wrong if ctx.rank == 1 else right for name, (wrong, right) in REFUSED.items()})


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_call_that_one_rank_refuses_is_told_to_the_others(pool: RankPool, world_size: int) -> None:
    answers = on(pool, world_size, refused)
    for name in REFUSED:
        for rank, (kind, text, seconds, after) in enumerate(answer[name] for answer in answers):
            assert kind == "UsageError", name
            assert name in text
            assert rank == 1 or "was refused on rank 1" in text, name
            assert seconds < 2.0, name
            assert after == world_size * (world_size + 1) / 2


# What rank 1 calls, which is refused there; what it calls instead; and what rank 0 waits for meanwhile.
REFUSED_MESSAGES: dict[str, tuple[Call, Call, Call]] = {
    "send": (
        lambda c: c.send(floats(8)[::2], 0),
        lambda c: c.send(floats(4), 0),
        lambda c: c.recv(floats(4), 1),
    ),
    "recv": (  # as much as no socket takes before somebody receives it
        lambda c: c.recv(WRONG, peer=0),
        lambda c: c.recv(floats(1 << 22), peer=0),
        lambda c: c.send(floats(1 << 22), 1),
    ),
    "send_recv": (
        lambda c: c.send_recv(floats(4), 0, WRONG, 0),
        lambda c: c.send_recv(floats(4), 0, floats(4), 0),
        lambda c: c.send_recv(floats(4), 1, floats(4), 1),
    ),
}


def refused_messages(ctx: RankContext) -> dict[str, tuple[str, str, float]]:
    found = {}
    with group(ctx, check=True) as pg:
        for name, (wrong, right, other) in REFUSED_MESSAGES.items():
            pg.world.barrier().wait()
            begin = time.monotonic()
            if ctx.rank == 1:
                found[name] = (*caught(lambda: wrong(pg.world)), time.monotonic() - begin)  # noqa: B023
                if ctx.world_size > 2:  # messages are numbered by pair
                    pg.world.send(floats(1), 2).wait()
                ctx.store().wait([name], timedelta(seconds=20))
                right(pg.world).wait()
            elif ctx.rank == 0:
                work = other(pg.world)
                found[name] = (*caught(work.wait), time.monotonic() - begin)
                ctx.store().set(name, "heard")
                work.wait()
            else:
                pg.world.recv(floats(1), 1).wait()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_message_that_one_rank_refuses_is_told_to_its_peer(pool: RankPool, world_size: int) -> None:
    first, second, *_ = on(pool, world_size, refused_messages)
    for name in REFUSED_MESSAGES:
        (kind, text, seconds), (own_kind, own_text, _) = first[name], second[name]
        assert kind == own_kind == "UsageError", name
        assert "was refused on rank 1" in text, name
        assert own_text.splitlines()[0] in text, name
        assert seconds < 2.0, name


def out_of_step(ctx: RankContext, how: str) -> tuple[str, str, float]:
    """Sends and receives that don't fit; every rank waits in the end."""
    with group(ctx, check=True) as pg:
        comm = pg.world
        comm.barrier().wait()
        begin = time.monotonic()
        try:
            if how == "sizes":
                if ctx.rank == 0:
                    comm.send(floats(4), 1).wait()
                elif ctx.rank == 1:
                    comm.recv(floats(5), 0).wait()
            elif how == "dtypes":
                if ctx.rank == 0:
                    comm.recv(floats(4, torch.int32), 1).wait()
                elif ctx.rank == 1:
                    comm.send(floats(4), 0).wait()
            elif ctx.rank == 1:
                comm.recv(floats(4), 0).wait()
            comm.all_reduce_(floats(2)).wait()
        except BaguaError as error:
            return type(error).__name__, str(error), time.monotonic() - begin
        finally:
            comm.abort()
    return "", "", 0.0


@pytest.mark.parametrize("how", ["sizes", "dtypes", "instead of a collective"])
def test_messages_that_do_not_fit_are_an_error_on_every_rank(pool: RankPool, how: str) -> None:
    answers = on(pool, 3, out_of_step, how)
    expected = {"sizes": "differs between them: numel", "dtypes": "differs between them: dtype"}
    for kind, text, seconds in answers:
        assert kind == "UsageError"
        assert expected.get(how, "rank 1 waits for recv #") in text
        assert seconds < 2.0


def ring(comm: Communicator, mine: torch.Tensor, into: torch.Tensor) -> None:
    """Every rank sends to its right neighbour, by way of a group: no order is the right one for all."""
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    with comm.group():
        works = [comm.send(mine, right), comm.recv(into, left)]
    for work in works:
        work.wait()


def random_program(ctx: RankContext, seed: int) -> int:
    """The same random calls on every rank, each right: nothing to complain about, and the right values."""
    draw, n = np.random.default_rng(seed), ctx.world_size
    with group(ctx, check=True) as pg:
        comms: list[Communicator] = [pg.world]
        for _ in range(60):
            what, size = int(draw.integers(7)), int(draw.integers(1, 50))
            comm, root = comms[int(draw.integers(len(comms)))], int(draw.integers(n))
            lane = comm.lanes[int(draw.integers(2))]
            mine = torch.full((size,), ctx.rank + 1.0)
            if what == 0:
                comm.all_reduce_(mine, "sum", stream=lane).wait()
                assert mine.eq(n * (n + 1) / 2).all()
            elif what == 1:
                comm.broadcast_(mine, root, stream=lane).wait()
                assert mine.eq(root + 1).all()
            elif what == 2:
                outs = [torch.zeros(size) for _ in range(n)] if ctx.rank == root else None
                comm.gather(outs, mine, root, stream=lane).wait()
            elif what == 3 and n > 1:
                into = torch.zeros(size)
                ring(comm, mine, into)
                assert into.eq((ctx.rank - 1) % n + 1).all()
            elif what == 4:
                with comm.group():
                    if n > 1:
                        comm.send(mine, (ctx.rank + 1) % n, stream=lane)
                        comm.recv(torch.zeros(size), (ctx.rank - 1) % n, stream=lane)
                    work = comm.all_reduce_(mine.clone(), "max", stream=lane)
                work.wait()
            elif what == 5 and len(comms) < 4:
                comms.append(comm.split(0, key=0))  # type: ignore[arg-type]
            elif what == 6:
                sizes = [[(a * 3 + b + size) % 4 for b in range(n)] for a in range(n)]
                outs_v = [torch.zeros(sizes[k][ctx.rank]) for k in range(n)]
                comm.all_to_all_v(outs_v, [mine.new_ones(c) for c in sizes[ctx.rank]], stream=lane).wait()
                assert all(out.eq(1).all() for out in outs_v)
        return len(comms)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_agrees_passes(pool: RankPool, world_size: int) -> None:
    seed = int(np.random.default_rng().integers(1 << 30))
    answers = on(pool, world_size, random_program, seed)
    assert answers == [answers[0]] * world_size, f"{seed=}"


def stuck(ctx: RankContext) -> str:
    """Rank 0 waits for the other's all_reduce, which waits for a broadcast on the other lane."""
    text = ""
    with group(ctx, timeout_s=3.0) as pg:
        comm = pg.world
        try:
            if ctx.rank == 0:
                comm.all_reduce_(floats(4), stream=comm.lanes[0]).wait()
            else:
                comm.broadcast_(floats(4), 0, stream=comm.lanes[1]).wait()
        except BaguaError as error:
            text = f"{type(error).__name__}: {error}"
        ctx.store().set(f"late/{ctx.rank}", "1")  # an abort would end the other's wait
        ctx.store().wait(["late/0", "late/1"], timedelta(seconds=20))
        comm.abort()
    return text


def test_without_a_check_the_deadline_shows_both_queues(pool: RankPool) -> None:
    first, second = on(pool, 2, stuck)
    assert first.startswith("CollectiveTimeoutError: all_reduce_ #1")
    assert "rank 1 waits for broadcast_ #1" in first
    assert second.startswith("CollectiveTimeoutError: broadcast_ #1")
    assert "rank 0 waits for all_reduce_ #1" in second


def absent(ctx: RankContext) -> str:
    with group(ctx, check=True, timeout_s=2.0) as pg:
        if ctx.rank == 1:
            return ""
        try:
            pg.world.all_reduce_(floats(4))
        except BaguaError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_does_not_call_is_named(pool: RankPool) -> None:
    text, _ = on(pool, 2, absent)
    assert text.startswith("CollectiveTimeoutError: collective #1")
    assert "rank 1 did not call it" in text
