"""join(): uneven inputs, forwards that come to nothing, buffers, exceptions, and arguments that differ."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from tests.micro import KINDS, One, Wrapped, backward, caught, feed, grad, group, mean, on, wrap
from tests.ranks import RankContext, RankPool

SIZES = (2, 3)


def joined(ctx: RankContext, divide_by_initial: bool) -> dict[str, Any]:
    """Rank r has r + 1 batches."""
    with group(ctx):
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapped, grads = wrap("attach", model, optimizer), []
        with wrapped.run.join(divide_by_initial=divide_by_initial):
            for _ in range(ctx.rank + 1):
                optimizer.zero_grad()
                backward(wrapped, ctx)
                grads.append(grad(model.a.weight))
                optimizer.step()
        momentum = optimizer.state[model.a.weight]["momentum_buffer"].item()
        optimizer.zero_grad()
        backward(wrapped, ctx)
        return {
            "grads": grads,
            "weight": model.a.weight.item(),
            "momentum": momentum,
            "after": grad(model.a.weight),
        }


@pytest.mark.parametrize("divide_by_initial", [True, False])
@pytest.mark.parametrize("world_size", SIZES)
def test_join_goes_on_until_the_last_rank_is_done(
    pool: RankPool, world_size: int, divide_by_initial: bool
) -> None:
    results = on(pool, world_size, joined, divide_by_initial)
    expected, weight, momentum = [], 1.0, 0.0
    for step in range(world_size):
        active = [rank + 1 for rank in range(world_size) if rank >= step]
        expected.append(sum(active) / (world_size if divide_by_initial else len(active)))
        momentum = 0.9 * momentum + expected[-1]
        weight -= 0.1 * momentum
    for rank, result in enumerate(results):
        assert result["grads"] == pytest.approx(expected[: rank + 1], rel=1e-6)
        assert result["weight"] == pytest.approx(weight, rel=1e-6)
        assert result["momentum"] == pytest.approx(momentum, rel=1e-6)
        assert result["after"] == pytest.approx(mean(world_size))
        assert result["weight"] == results[0]["weight"]


def thrown(ctx: RankContext) -> list[Any]:
    with group(ctx):
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, steps = wrap("attach", model, optimizer), 0

        def loop() -> None:
            nonlocal steps
            with wrapped.run.join(throw_on_early_termination=True):
                for _ in range(2 + 2 * ctx.rank):
                    optimizer.zero_grad()
                    backward(wrapped, ctx)
                    optimizer.step()
                    steps += 1

        error = caught(loop)
        optimizer.zero_grad()
        backward(wrapped, ctx)
        return [*error, steps, grad(model.a.weight)]


@pytest.mark.parametrize("world_size", SIZES)
def test_join_can_throw_on_every_rank(pool: RankPool, world_size: int) -> None:
    for kind, text, steps, after in on(pool, world_size, thrown):
        assert kind == "PeerError"
        assert "no more data" in text
        assert "ranks without data: 0" in text
        assert steps == 2
        assert after == mean(world_size)


def nested(ctx: RankContext, leaves: bool) -> list[Any]:
    """Two models, rank r with r + 1 batches; then once more, the inner join within the outer one's loop."""
    with group(ctx, timeout_s=15.0):
        models = [One(), One()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        outer, inner = [
            wrap("attach", model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)
        ]

        def step(each: Wrapped, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            backward(each, ctx)
            optimizer.step()

        def together() -> None:
            with outer.run.join(), inner.run.join():
                for batch in range(ctx.rank + 1):
                    step(outer, optimizers[0])
                    if leaves and batch == 1:
                        raise KeyError("left")
                    step(inner, optimizers[1])

        error = caught(together)
        if not leaves:
            with outer.run.join():
                for _ in range(2):
                    with inner.run.join():
                        for _ in range(ctx.rank + 1):
                            step(inner, optimizers[1])
        return [error, *(model.a.weight.item() for model in models)]


@pytest.mark.parametrize("world_size", SIZES)
def test_nested_joins_of_two_models_end_together(pool: RankPool, world_size: int) -> None:
    weight = inner = 1.0  # the k-th step has the gradients of ranks k and up, over all ranks
    for k in range(world_size):
        weight -= 0.1 * sum(range(k + 1, world_size + 1)) / world_size
    inner -= 3 * (1.0 - weight)
    for answer in on(pool, world_size, nested, False):
        assert answer == [("", ""), pytest.approx(weight), pytest.approx(inner)]


def test_nested_joins_are_left_together_by_an_exception(pool: RankPool) -> None:
    began = time.monotonic()
    first, second, third = on(pool, 3, nested, True)
    assert time.monotonic() - began < 12.0, "nobody waits for the deadline"
    assert [first[0][0], second[0][0], third[0][0]] == ["PeerError", "KeyError", "KeyError"]


def join_with_buffers_and_accumulation(ctx: RankContext) -> list[float]:
    with group(ctx):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = wrap("attach", model, optimizer)
        torch.manual_seed(ctx.rank)
        with wrapped.run.join():
            for _ in range(1 + ctx.rank):
                with wrapped.run.no_sync():
                    wrapped.forward(torch.randn(4, 2)).sum().backward()
                wrapped.forward(torch.randn(4, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [value for t in model.state_dict().values() for value in t.double().flatten().tolist()]


def test_join_broadcasts_buffers_and_lets_ranks_accumulate(pool: RankPool) -> None:
    results = on(pool, 3, join_with_buffers_and_accumulation)
    assert results[0] == results[1] == results[2]


def join_refused(ctx: RankContext) -> tuple[str, str]:
    with group(ctx):
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = wrap("attach", model, optimizer, algorithm=bagua.Decentralized())
        return caught(lambda: wrapped.run.join().__enter__())


def test_join_refuses_an_algorithm_that_communicates_weights(pool: RankPool) -> None:
    for kind, text in on(pool, 2, join_refused):
        assert kind == "UsageError"
        assert "decentralized can't be joined" in text


class Scaled(One):
    """``a(x) * scale``, where the buffer `scale` is each rank's own at first."""

    scale: torch.Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x) * self.scale
        return out


def extra_forwards(ctx: RankContext, kind: str) -> dict[str, Any]:
    """Rank r has 2 r + 1 batches, and every rank runs forwards whose loss is thrown away, also at the end."""
    with group(ctx, timeout_s=15.0):
        model = Scaled(float(ctx.rank + 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, grads = wrap(kind, model, optimizer), []
        with wrapped.run.join():
            for step in range(2 * ctx.rank + 1):
                if step % 2 == ctx.rank % 2:
                    wrapped.forward(feed(ctx)).sum()  # a batch that is thrown away
                optimizer.zero_grad()
                (wrapped.forward(feed(ctx)) + wrapped.forward(feed(ctx))).sum().backward()
                wrapped.forward(feed(ctx))
                grads.append(grad(model.a.weight))
                optimizer.step()
        with torch.no_grad():
            model.scale.fill_(ctx.rank + 5.0)
        optimizer.zero_grad()
        backward(wrapped, ctx)
        return {"grads": grads, "weight": model.a.weight.item(), "after": grad(model.a.weight)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_forwards_without_a_backward_are_nobodys_business(pool: RankPool, kind: str, world_size: int) -> None:
    results = on(pool, world_size, extra_forwards, kind)
    expected = [
        2 * sum(rank + 1 for rank in range(world_size) if step <= 2 * rank) / world_size
        for step in range(2 * world_size - 1)
    ]
    for rank, found in enumerate(results):
        assert found["grads"] == pytest.approx(expected[: 2 * rank + 1], rel=1e-6)
        assert found["weight"] == pytest.approx(1 - 0.1 * sum(expected), rel=1e-6)
        assert found["weight"] == results[0]["weight"]
        assert found["after"] == pytest.approx(5.0 * (world_size + 1) / 2), (
            "buffers are rank 0's at each forward again"
        )


def buffers_of_the_living(ctx: RankContext) -> list[float]:
    """Rank 0 is the first without data: the others' buffers are theirs from then on."""
    with group(ctx, timeout_s=15.0):
        model = Scaled(1.0)
        wrapped, seen = wrap("attach", model), []
        with wrapped.run.join():
            for step in range(1 if ctx.rank == 0 else 3):
                backward(wrapped, ctx)
                with torch.no_grad():
                    model.scale.fill_(10.0 * step + ctx.rank)
                    wrapped.forward(feed(ctx))
                seen.append(model.scale.item())
        return [*seen, model.scale.item()]


def test_buffers_come_from_a_rank_that_still_has_data(pool: RankPool) -> None:
    results = on(pool, 3, buffers_of_the_living)
    assert results[0] == [0.0, 22.0]
    assert results[1] == [1.0, 11.0, 21.0, 22.0]
    assert results[2] == [2.0, 12.0, 22.0, 22.0]


def raising_inside(ctx: RankContext, where: str) -> dict[str, Any]:
    with group(ctx, timeout_s=15.0):
        model = nn.Sequential(Scaled(1.0), One(), One())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = wrap("attach", model, optimizer)
        fails = False

        def fail(grad: torch.Tensor) -> None:
            if fails and ctx.rank == 1:
                raise KeyError("the user's own")

        def listen(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            out.register_hook(fail)

        if where != "outside":
            (model if where == "before the first gradient" else model[0]).register_forward_hook(listen)

        def loop() -> None:
            nonlocal fails
            with wrapped.run.join():
                for step in range(3):
                    fails = step == 1
                    optimizer.zero_grad()
                    if where == "outside":
                        fail(torch.ones(1))
                    backward(wrapped, ctx)
                    optimizer.step()

        error = caught(loop)[0]
        fails = False
        optimizer.zero_grad()
        backward(wrapped, ctx)
        return {"error": error, "after": [grad(p) for p in model.parameters()]}


@pytest.mark.parametrize("where", ["outside", "before the first gradient", "in the midst"])
def test_an_exception_leaves_the_join_on_all_ranks(pool: RankPool, where: str) -> None:
    results = on(pool, 2, raising_inside, where)
    assert [found["error"] for found in results] == ["PeerError", "KeyError"]
    assert results[0]["after"] == results[1]["after"]


def joined_apart(ctx: RankContext, options: dict[str, bool]) -> dict[str, Any]:
    with group(ctx, timeout_s=15.0):
        wrapped = wrap("attach", One())
        began = time.monotonic()
        error = caught(lambda: wrapped.run.join(**options if ctx.rank == 1 else {}).__enter__())
        found: dict[str, Any] = {"error": error, "seconds": time.monotonic() - began}
        with wrapped.run.join():
            backward(wrapped, ctx)
        found["next"] = grad(next(wrapped.module.parameters()))
        return found


@pytest.mark.parametrize("options", [{"divide_by_initial": False}, {"throw_on_early_termination": True}])
def test_arguments_that_differ_are_told_at_once(pool: RankPool, options: dict[str, bool]) -> None:
    for found in on(pool, 3, joined_apart, options):
        kind, text = found["error"]
        assert kind == "LayoutMismatchError"
        assert f"the argument {next(iter(options))} of join()" in text
        assert "on rank 1" in text
        assert found["seconds"] < 5.0
        assert found["next"] == 2.0


def torchs_join(ctx: RankContext, enable: bool) -> list[float | None]:
    with group(ctx, timeout_s=15.0):
        model = bagua.DistributedDataParallel(module := One())
        grads = []
        with model.join(divide_by_initial_world_size=False, enable=enable):
            for _ in range(1 + ctx.rank if enable else 1):
                module.zero_grad()
                model(feed(ctx)).sum().backward()
                grads.append(grad(module.a.weight))
        return grads


def test_the_wrapper_joins_with_torchs_arguments(pool: RankPool) -> None:
    assert on(pool, 2, torchs_join, True) == [[1.5], [1.5, 2.0]]
    assert on(pool, 2, torchs_join, False) == [[1.5], [1.5]]
