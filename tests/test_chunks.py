"""chunk_mb and commit: the same values, in pieces or by the stream; wrong or differing ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.algorithms.operations import all_reduce_sum_
from tests.micro import KINDS, Two, caught, feed, grad, group, on, wrap
from tests.ranks import RankContext, RankPool

MIB = 1024 * 1024
CHUNK_BYTES = 4000  # of 1,000 floats: the model's 6,500 in one bucket are 7 pieces

ALGORITHMS: dict[str, Callable[[], bagua.algorithms.Algorithm | None]] = {
    "gradient_allreduce": bagua.GradientAllReduce,
    "sum": lambda: bagua.GradientAllReduce(average=False),
    "hierarchical": lambda: bagua.GradientAllReduce(hierarchical=True),
    "decentralized": bagua.Decentralized,
    "local_sgd": lambda: bagua.LocalSGD(interval=1),
    "powersgd": lambda: bagua.algorithms.create("powersgd"),
    "onebit_adam": lambda: None,
}


def trained(ctx: RankContext, kind: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    with group(ctx):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(63, 100), nn.Tanh(), nn.Linear(100, 1, bias=False), nn.Flatten(0))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if name == "onebit_adam":
            optimizer = bagua.optim.OneBitAdam(model.parameters(), 0.01, warmup_steps=8)
        wrapped = wrap(kind, model, optimizer, algorithm=ALGORITHMS[name](), first_bucket_mb=10.0, **options)
        source = torch.Generator().manual_seed(ctx.rank)
        sizes = []
        for _ in range(3):
            optimizer.zero_grad()
            wrapped.forward(torch.randn(4, 63, generator=source)).square().sum().backward()
            optimizer.step()
        wrapped.run.state_dict()  # what follows a step is over
        for operations in wrapped.run.flight_record()["communicators"].values():
            reduced = [op["bytes_sent"] for op in operations if op["operation"].startswith("all_reduce")]
            sizes += [sent * ctx.world_size / (2 * ctx.world_size - 2) for sent in reduced]
        return {"weights": [p.detach().numpy() for p in model.parameters()], "sizes": sizes}


RUNS = [(2, KINDS[i % 2], name) for i, name in enumerate(ALGORITHMS)]


@pytest.mark.parametrize(("world_size", "kind", "name"), [*RUNS, (3, "attach", "gradient_allreduce")])
def test_pieces_give_the_same_weights(pool: RankPool, world_size: int, kind: str, name: str) -> None:
    whole = on(pool, world_size, trained, kind, name, {})
    cut = on(pool, world_size, trained, kind, name, {"chunk_mb": CHUNK_BYTES / MIB})
    for one, other in zip(whole, cut, strict=True):
        for mine, its in zip(one["weights"], other["weights"], strict=True):
            if world_size == 2:
                assert (mine == its).all(), "the sum of two is the same in any pieces"
            else:
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-5, atol=1e-6)
    if name not in ("powersgd", "hierarchical"):  # small already; or reduced and broadcast within the node
        assert max(max(found["sizes"]) for found in whole) > CHUNK_BYTES
    assert all(size <= CHUNK_BYTES for found in cut for size in found["sizes"])


def in_pieces(ctx: RankContext) -> list[Any]:
    """Every element once, whatever the sizes: the last piece is shorter, and one may be all there is."""
    found = []
    with group(ctx) as made:
        stream = made.world.lanes[0]
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for numel in (0, 1, 8, 9, 60):
                for chunk_bytes in (1, 8, 64):
                    values = torch.arange(numel, dtype=dtype)
                    all_reduce_sum_(values, made.world, stream, chunk_bytes)
                    made.world.barrier().wait()
                    found.append(torch.equal(values, torch.arange(numel, dtype=dtype) * ctx.world_size))
    return found


def test_every_element_is_summed_once(pool: RankPool) -> None:
    for found in on(pool, 2, in_pieces):
        assert found == [True] * 45


def by_stream(ctx: RankContext, kind: str) -> list[float]:
    with group(ctx):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = wrap(kind, model, optimizer, commit="stream")
        for _ in range(2):
            optimizer.zero_grad()
            wrapped.forward(feed(ctx)).sum().backward()
            optimizer.step()
        return [p.item() for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_cpu_the_stream_is_the_host(pool: RankPool, kind: str) -> None:
    assert on(pool, 2, by_stream, kind) == [pytest.approx([0.7, 0.7])] * 2


def refused(ctx: RankContext) -> list[tuple[str, str]]:
    attach: Callable[..., Any] = bagua.attach
    is_odd = ctx.rank == 1
    with group(ctx, timeout_s=20.0):
        calls: list[Callable[[], Any]] = [
            lambda: attach(Two(), chunk_mb=0),
            lambda: attach(Two(), chunk_mb="4"),
            lambda: attach(Two(), chunk_mb=True),
            lambda: attach(Two(), commit="later"),
            lambda: bagua.DistributedDataParallel(Two(), chunk_mb=-1.0),
            lambda: attach(Two(), chunk_mb=2.0 if is_odd else 4.0),
            lambda: attach(Two(), chunk_mb=2.0 if is_odd else None),
            lambda: attach(Two(), commit="stream" if is_odd else "host"),
        ]
        errors = [caught(call) for call in calls]
        model = Two()
        with attach(model, chunk_mb=1, commit="stream"):
            model(feed(ctx)).sum().backward()
        return [*errors, ("", str(grad(model.a.weight)))]


def test_what_can_not_be_and_what_differs_is_refused(pool: RankPool) -> None:
    for found in on(pool, 2, refused):
        assert [kind for kind, _ in found] == ["UsageError"] * 5 + ["LayoutMismatchError"] * 3 + [""]
        for i, part in enumerate(["chunk_mb"] * 3 + ["commit", "chunk_mb"]):
            assert f"{part} is not usable" in found[i][1]
        assert "chunk_bytes=2097152" in found[5][1]
        assert "on rank 1" in found[7][1]
        assert found[-1][1] == "1.5"
