"""Operations that only move data carry every dtype, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from bagua_rt.backend import Work
from bagua_rt.errors import CollectiveTimeoutError, UsageError
from tests.contract.world import MOVED, World, inputs, poisoned, same_bits, world
from tests.ranks import RankContext, RankPool

Pools = Callable[[int], RankPool]
SIZES = (0, 1, 5, 300)


def each(w: World, label: str) -> list[tuple[list[torch.Tensor], int]]:
    return [(inputs(w, dtype, numel, label), numel) for dtype in MOVED for numel in SIZES]


def broadcast(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for index, (ts, _) in enumerate(each(w, "broadcast")):
            root = index % w.size
            t = ts[root].clone() if w.rank == root else poisoned(ts[root])
            w.comm.broadcast_(t, root, stream=w.lanes[index % 2]).wait()
            assert same_bits(t, ts[root])


def all_gather(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for index, (ts, numel) in enumerate(each(w, "all_gather")):
            out = poisoned(ts[0], numel * w.size)
            w.comm.all_gather(out, ts[w.rank], stream=w.lanes[index % 2]).wait()
            assert same_bits(out, torch.cat(ts))
            inside = poisoned(ts[0], numel * w.size)
            part = inside[w.rank * numel : (w.rank + 1) * numel]
            part.copy_(ts[w.rank])
            w.comm.all_gather(inside, part).wait()
            assert same_bits(inside, out)
        shaped = torch.zeros(w.size, 2, 2, device=w.device.torch_device)
        w.comm.all_gather(shaped, torch.full((2, 2), float(w.rank), device=w.device.torch_device)).wait()
        assert shaped[:, 1, 1].tolist() == list(range(w.size))


def all_to_all(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for dtype in MOVED:
            for numel in SIZES:
                ts = inputs(w, dtype, numel * w.size, "all_to_all")
                here = slice(w.rank * numel, (w.rank + 1) * numel)
                out, kept = poisoned(ts[0]), ts[w.rank].clone()
                w.comm.all_to_all(out, ts[w.rank]).wait()
                assert same_bits(out, torch.cat([t[here] for t in ts]))
                assert same_bits(ts[w.rank], kept)


def all_to_all_v(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for dtype in MOVED:
            # Rank s sends (s + 2k) % 3 elements to rank k: some pairs move nothing.
            sizes = [[(s + 2 * k) % 3 for k in range(w.size)] for s in range(w.size)]
            ts = inputs(w, dtype, 3 * w.size, "all_to_all_v")
            inps = [ts[w.rank][3 * k : 3 * k + sizes[w.rank][k]] for k in range(w.size)]
            outs = [poisoned(ts[0], sizes[s][w.rank]) for s in range(w.size)]
            w.comm.all_to_all_v(outs, inps, stream=w.lanes[1]).wait()
            for s in range(w.size):
                assert same_bits(outs[s], ts[s][3 * w.rank : 3 * w.rank + sizes[s][w.rank]])


def gather(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for index, (ts, _) in enumerate(each(w, "gather")):
            root = index % w.size
            outs = [poisoned(t) for t in ts] if w.rank == root else None
            w.comm.gather(outs, ts[w.rank], root).wait()
            assert all(same_bits(o, t) for o, t in zip(outs or [], ts, strict=False))


def scatter(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for index, (ts, _) in enumerate(each(w, "scatter")):
            root, t = index % w.size, poisoned(ts[0])
            w.comm.scatter(t, ts if w.rank == root else None, root).wait()
            assert same_bits(t, ts[w.rank])


def ring(ctx: RankContext, backend: str) -> None:
    """Send to the next, receive from the one before: send_recv, and the same as a group."""
    with world(ctx, backend) as w:
        after, before = (w.rank + 1) % w.size, (w.rank - 1) % w.size
        for index, (ts, _) in enumerate(each(w, "ring")):
            lane = w.lanes[index % 2]
            t = poisoned(ts[0])
            w.comm.send_recv(ts[w.rank], after, t, before, stream=lane).wait()
            assert same_bits(t, ts[before])
            if w.size > 1:
                t = poisoned(ts[0])
                with w.comm.group():
                    sent = w.comm.send(ts[w.rank], after, stream=lane)
                    received = w.comm.recv(t, before, stream=lane)
                sent.wait()
                received.wait()
                assert same_bits(t, ts[before])
        if w.size == 2:  # two sends and two receives of one pair keep their order
            a, b = w.tensor([1.0 + w.rank]), w.tensor([10.0 + w.rank])
            x, y = w.tensor([0.0]), w.tensor([0.0])
            with w.comm.group():
                works = [
                    w.comm.send(a, after),
                    w.comm.send(b, after),
                    w.comm.recv(x, after),
                    w.comm.recv(y, after),
                ]
            works[-1].wait()
            assert (x.item(), y.item()) == (2.0 - w.rank, 11.0 - w.rank)


def one_way(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for ts, _ in each(w, "send"):
            if w.rank == 0:
                w.comm.send(ts[0], w.size - 1).wait()
            elif w.rank == w.size - 1:
                t = poisoned(ts[0])
                w.comm.recv(t, 0).wait()
                assert same_bits(t, ts[0])


def objects(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for root in range(w.size):
            assert w.comm.broadcast_object({"from": w.rank, "many": list(range(5000))}, root)["from"] == root
            assert w.comm.broadcast_object(None, root) is None
        with pytest.raises(UsageError, match="rank 0 could not pickle"):
            w.comm.broadcast_object(threading.Lock() if w.rank == 0 else None, 0)
        assert w.comm.broadcast_object(w.rank, w.size - 1) == w.size - 1


def abandoned_group(w: World, t: torch.Tensor) -> Work:
    works = []
    try:
        with w.comm.group():
            works.append(w.comm.all_reduce_(t, "sum"))
            raise KeyError
    except KeyError:
        return works[0]


def grouped_collectives(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        a, b = w.tensor([1.0]), w.tensor([2.0])
        with w.comm.group():
            first = w.comm.all_reduce_(a, "sum")
            with w.comm.group():
                second = w.comm.all_reduce_(b, "sum", stream=w.lanes[1])
            assert not first.is_done()
            with pytest.raises(UsageError, match="not launched yet"):
                first.wait()
        first.wait()
        second.wait()
        assert (a.item(), b.item()) == (w.size, 2 * w.size)
        sent = w.comm.bytes_sent
        lost = abandoned_group(w, a)
        with pytest.raises(UsageError, match="never launched"):
            lost.wait()
        with w.comm.group():
            pass
        assert w.comm.bytes_sent == sent
        w.comm.all_reduce_(a, "avg").wait()
        assert a.item() == w.size


def barriers(ctx: RankContext, backend: str) -> None:
    with world(ctx, backend) as w:
        for _ in range(20):
            w.comm.barrier().wait()
        with w.comm.register(w.tensor([1.0])):
            w.comm.barrier().wait()
        for late in range(w.size):  # nobody is through before the one that comes last
            others = [rank for rank in range(w.size) if rank != late]
            if w.rank == late:
                ctx.store().wait([f"waits/{late}/{rank}" for rank in others], timedelta(seconds=20))
                w.comm.barrier().wait()
            else:
                work = w.comm.barrier()
                with pytest.raises(CollectiveTimeoutError):
                    work.wait(0.05)
                ctx.store().set(f"waits/{late}/{w.rank}", "")
                work.wait()


ALL = [
    *(broadcast, all_gather, all_to_all, all_to_all_v, gather, scatter, ring, objects),
    *(grouped_collectives, barriers),
]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("fn", ALL)
def test_movement(pools: Pools, backend: str, size: int, fn: Callable[..., None]) -> None:
    pools(size).run(fn, backend, timeout=100)


@pytest.mark.parametrize("size", [2, 3])
def test_send_and_receive(pools: Pools, backend: str, size: int) -> None:
    pools(size).run(one_way, backend)


@pytest.mark.parametrize("fn", [all_to_all, ring])
def test_four_ranks(pools: Pools, backend: str, fn: Callable[..., None]) -> None:
    pools(4).run(fn, backend, timeout=100)
