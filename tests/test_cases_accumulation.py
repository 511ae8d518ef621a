"""Cases of attach() and DistributedDataParallel: accumulation, several backwards, checkpointing."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_rt as bagua
from bagua_rt.algorithms.base import AlgorithmState, Context
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket
from tests.micro import KINDS, SIZES, One, Two, backward, caught, feed, grad, group, mean, on, wrap
from tests.ranks import RankContext, RankPool

VIEWS = (True, False)


# ---- B. Accumulation, several backwards, checkpointing --------------------------------------------------


def b09(ctx: RankContext, kind: str) -> dict[str, Any]:
    with group(ctx):
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = wrap(kind, model, optimizer)
        found: dict[str, Any] = {}
        with wrapped.run.no_sync():
            loss = wrapped.forward(feed(ctx)).sum()
        loss.backward()
        found["forward inside"] = grad(model.a.weight)
        optimizer.zero_grad()

        loss = wrapped.forward(feed(ctx)).sum()
        with wrapped.run.no_sync():
            loss.backward()
        found["backward inside"] = grad(model.a.weight)
        found["step"] = caught(optimizer.step)
        found["weight"] = model.a.weight.item()
        optimizer.zero_grad()
        found["step after zero_grad"] = caught(optimizer.step)

        with wrapped.run.no_sync():
            backward(wrapped, ctx)
        backward(wrapped, ctx)
        found["both inside, then one outside"] = grad(model.a.weight)
        optimizer.step()
        found["weight at the end"] = model.a.weight.item()
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_b09_the_backwards_place_decides(pool: RankPool, kind: str, world_size: int) -> None:
    right = mean(world_size)
    for rank, found in enumerate(on(pool, world_size, b09, kind)):
        assert found["forward inside"] == right
        assert found["backward inside"] == rank + 1
        error, text = found["step"]
        assert error == "UsageError"
        assert "no_sync()" in text
        assert "a.weight" in text
        assert found["weight"] == 1.0
        assert found["step after zero_grad"] == ("", "")
        assert found["both inside, then one outside"] == 2 * right
        assert found["weight at the end"] == pytest.approx(1 - 0.2 * right, rel=1e-6)


def b10(ctx: RankContext, kind: str) -> list[dict[str, Any]]:
    with group(ctx):
        return [b10_steps(ctx, kind, as_view) for as_view in VIEWS]


def b10_steps(ctx: RankContext, kind: str, as_view: bool) -> dict[str, Any]:
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = wrap(kind, model, optimizer, gradient_as_bucket_view=as_view)
    found: dict[str, Any] = {}

    def accumulated(local: int) -> float | None:
        optimizer.zero_grad()
        with wrapped.run.no_sync():
            for _ in range(local):
                backward(wrapped, ctx)
        backward(wrapped, ctx)
        return grad(model.a.weight)

    found["3 micro-steps"] = accumulated(2)

    def interrupted() -> None:
        with wrapped.run.no_sync():
            backward(wrapped, ctx)
            raise KeyError("in no_sync")

    found["error"] = caught(interrupted)[0]
    found["after the error"] = accumulated(0)

    optimizer.zero_grad()
    with wrapped.run.no_sync():
        with wrapped.run.no_sync():
            backward(wrapped, ctx)
        backward(wrapped, ctx)  # still in the outer one
        found["nested"] = grad(model.a.weight)
        found["step inside"] = caught(optimizer.step)[0]
    backward(wrapped, ctx)
    found["after nested"] = grad(model.a.weight)
    optimizer.step()
    backward(wrapped, ctx)  # not zeroed: adds to what is there, on all ranks alike
    found["on top"] = grad(model.a.weight)
    found["weight"] = model.a.weight.item()

    def locally() -> Generator[None, None, None]:
        with wrapped.run.no_sync():
            yield

    optimizer.zero_grad()
    first = locally()
    next(first)
    with wrapped.run.no_sync():
        first.close()  # before the one inside of it
        backward(wrapped, ctx)
    found["crossed"] = grad(model.a.weight)
    backward(wrapped, ctx)
    found["after crossed"] = grad(model.a.weight)
    wrapped.run.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_b10_accumulation_sums_and_survives_misuse(pool: RankPool, kind: str, world_size: int) -> None:
    right = mean(world_size)
    for rank, answers in enumerate(on(pool, world_size, b10, kind)):
        for found in answers:
            assert found["3 micro-steps"] == 3 * right
            assert found["error"] == "KeyError"
            assert found["after the error"] == right
            assert found["nested"] == 2 * (rank + 1)
            assert found["step inside"] == "UsageError"
            assert found["after nested"] == 3 * right
            assert found["on top"] == 4 * right
            assert found["weight"] == pytest.approx(1 - 0.3 * right, rel=1e-6)
            assert found["crossed"] == rank + 1
            assert found["after crossed"] == 2 * right


def b12(ctx: RankContext, kind: str) -> list[float | None]:
    found = []
    with group(ctx):
        for as_view in VIEWS:
            model = One()
            wrapped = wrap(kind, model, gradient_as_bucket_view=as_view)
            first, second = wrapped.forward(feed(ctx)).sum(), wrapped.forward(feed(ctx)).sum()
            first.backward()
            second.backward()
            found.append(grad(model.a.weight))
            model.zero_grad()
            loss = wrapped.forward(feed(ctx)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            found.append(grad(model.a.weight))
            model.zero_grad()
            (wrapped.forward(feed(ctx)) + wrapped.forward(feed(ctx))).sum().backward()
            found.append(grad(model.a.weight))
            wrapped.run.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_b12_every_backward_is_reduced(pool: RankPool, kind: str, world_size: int) -> None:
    assert on(pool, world_size, b12, kind) == [[2 * mean(world_size)] * 6] * world_size


class Checkpointed(nn.Module):
    """``w ** times * x``, each factor in a reentrant checkpoint of its own, then a last factor `b`."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.inner = Two()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = checkpoint(self.inner.a, x, use_reentrant=True)
        out: torch.Tensor = self.inner.b(x)
        return out


def b15(ctx: RankContext, kind: str, times: int, find_unused: bool) -> list[Any]:
    with group(ctx):
        model = Checkpointed(times)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        wrapped = wrap(kind, model, optimizer, find_unused_parameters=find_unused)

        def step() -> None:
            wrapped.forward(feed(ctx).requires_grad_()).sum().backward()
            optimizer.step()

        error = caught(step)
        model.times = 1
        optimizer.zero_grad()
        step()
        return [error, grad(model.inner.a.weight), grad(model.inner.b.weight)]


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "times"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)])
def test_b15_reentrant_checkpoint_once_is_right_and_twice_is_a_clear_error(
    pool: RankPool, kind: str, world_size: int, times: int, find_unused: bool
) -> None:
    for (error, text), *grads in on(pool, world_size, b15, kind, times, find_unused):
        if times == 1:
            assert (error, text) == ("", "")
        else:
            assert error == "UsageError"
            assert "'inner.a.weight' came twice in one backward" in text
            assert "use_reentrant=False" in text
        assert grads == [mean(world_size)] * 2, "the step after an error is right, too"


def b17(ctx: RankContext, kind: str) -> dict[Any, Any]:
    choices = itertools.product(VIEWS, (True, False), ("", "none", "other", "detach"))
    with group(ctx):
        return {choice: b17_steps(ctx, kind, *choice) for choice in choices}


def b17_steps(ctx: RankContext, kind: str, as_view: bool, set_to_none: bool, by_hand: str) -> list[Any]:
    model = Two()
    wrapped = wrap(kind, model, gradient_as_bucket_view=as_view)
    seen = []
    for step in range(4):
        weight = model.a.weight
        if step and by_hand == "detach" and weight.grad is not None:
            weight.grad.detach_()
        elif by_hand:
            weight.grad = None if by_hand == "none" else torch.zeros(1, 1)
        model.zero_grad(set_to_none=set_to_none)
        backward(wrapped, ctx)
        seen.append((grad(model.a.weight), grad(model.b.weight)))
    wrapped.run.close()
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_b17_zero_grad_in_every_way(pool: RankPool, kind: str, world_size: int) -> None:
    for found in on(pool, world_size, b17, kind):
        assert len(found) == 16
        for choice, seen in found.items():
            assert seen == [(mean(world_size), mean(world_size))] * 4, choice


@dataclass(frozen=True)
class Elsewhere(bagua.GradientAllReduce):
    """Reduces into a new tensor, as a communication hook does; and what can go wrong with it."""

    name: ClassVar[str] = "elsewhere"
    then: str = "copied"

    def bind(self, context: Context) -> Any:
        return ElsewhereState(context, self.then)


class ElsewhereState(AlgorithmState):
    def __init__(self, context: Context, then: str) -> None:
        super().__init__(context)
        self.scale = 1.0 / context.world_size
        self.then = then

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        result = torch.empty_like(bucket.flat)
        comm.all_reduce(result, bucket.flat, "sum", stream=stream)
        if self.then == "assigned":
            bucket.flat = result
        elif self.then == "of another shape":
            self.context.device.run(stream, lambda: bucket.flat.copy_(result.repeat(2)))
        elif self.then == "of another dtype":
            self.context.device.run(stream, lambda: torch.add(result, 0, out=bucket.flat.view(torch.int32)))
        else:
            self.context.device.run(stream, lambda: bucket.flat.copy_(result))


def b18(ctx: RankContext, kind: str, then: str, as_view: bool) -> dict[str, Any]:
    with group(ctx, timeout_s=20.0):
        model = Two()
        wrapped = wrap(kind, model, algorithm=Elsewhere(then=then), gradient_as_bucket_view=as_view)
        seen: list[float | None] = []

        def steps() -> None:
            for _ in range(3):
                model.zero_grad()
                backward(wrapped, ctx)
                seen.extend([grad(model.a.weight), grad(model.b.weight)])

        return {"error": caught(steps), "seen": seen}


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("kind", KINDS)
def test_b18_a_result_in_a_new_tensor_is_copied_back(pool: RankPool, kind: str, as_view: bool) -> None:
    for found in on(pool, 2, b18, kind, "copied", as_view):
        assert found == {"error": ("", ""), "seen": [1.5] * 6}


@pytest.mark.parametrize(
    ("then", "part"),
    [
        ("assigned", "the buffer of bucket 0 can't be replaced"),
        ("of another shape", "must match"),
        ("of another dtype", "can't be cast"),
    ],
)
def test_b18_a_result_that_does_not_fit_is_an_error_with_the_bucket(
    pool: RankPool, then: str, part: str
) -> None:
    for found in on(pool, 2, b18, "attach", then, True):
        kind, text = found["error"]
        assert kind in ("UsageError", "CollectiveError", "PeerError")
        assert "bucket 0 (b.weight, a.weight)" in text
        assert part in text
        assert found["seen"] == []
