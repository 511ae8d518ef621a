"""Exceptions in backward: no rank hangs, no step is taken, and the next step is right on all ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_rt as bagua
from tests.micro import KINDS, Two, backward, caught, feed, grad, group, mean, on, ones_linear, wrap
from tests.ranks import RankContext, RankPool

DEPTHS = ("first", "middle", "last")


class BoomError(Exception):
    """What a backward raises."""


class Bomb(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise BoomError("in backward")


def bomb_in(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = Bomb.apply(x)  # type: ignore[no-untyped-call]
    return out


class Chain(nn.Module):
    """Three factors one after the other, in buckets of their own; the gradient of the last comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = ones_linear(), ones_linear(), ones_linear()

    def forward(self, x: torch.Tensor, bomb: str = "") -> torch.Tensor:
        x = x.clone().requires_grad_()
        for name, layer in (("last", self.one), ("middle", self.two), ("first", self.three)):
            if bomb == name:  # raises before the gradients of the layers above, after those below
                x = bomb_in(x)
            x = layer(x)
        return bomb_in(x) if bomb == "before" else x


def exploding(
    ctx: RankContext, kind: str, ranks: list[int], depths: list[str], gated: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {"errors": [], "steps": [], "grads": []}
    with group(ctx):
        model = Chain()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        wrapped = wrap(kind, model, optimizer if gated else (), bucket_cap_mb=1e-6)
        for depth in depths:
            for _ in range(2):  # the first generation, and later ones with the plan by ready order
                optimizer.zero_grad()
                bomb = depth if ctx.rank in ranks else ""
                found["errors"].append(caught(partial(backward, wrapped, ctx, bomb)))
                if gated:
                    found["steps"].append(caught(optimizer.step))
                optimizer.zero_grad()
                wrapped.forward(feed(ctx)).sum().backward()
                optimizer.step()
                found["grads"] += [grad(p) for p in model.parameters()]
        return found


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "ranks"), [(1, [0]), (2, [0, 1]), (2, [0]), (3, [1]), (3, [0, 2])])
def test_the_next_step_is_right_and_the_others_hear_of_it(
    pool: RankPool, kind: str, world_size: int, ranks: list[int], gated: bool
) -> None:
    for rank, found in enumerate(on(pool, world_size, exploding, kind, ranks, list(DEPTHS), gated)):
        assert found["grads"] == [mean(world_size)] * 18
        for error, text in found["errors"]:
            if rank in ranks:
                assert (error, text) == ("BoomError", "in backward")
            else:
                assert error == "PeerError"
                named = ", ".join(map(str, ranks))
                assert f"an exception in the backward of rank{'s' if len(ranks) > 1 else ''} {named}" in text
        for error, text in found["steps"]:
            assert error == ("UsageError" if rank in ranks else "PeerError")
            assert rank not in ranks or "optimizer.step() after a backward that raised" in text


def other_algorithms(ctx: RankContext, name: str) -> dict[str, Any]:
    with group(ctx):
        model = Chain()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.01)
        algorithm = None
        if name == "onebit_adam":
            optimizer = bagua.optim.OneBitAdam(model.parameters(), 0.01, warmup_steps=1)
        else:
            algorithm = bagua.Decentralized(peers=name)  # type: ignore[arg-type]
        run = bagua.attach(model, optimizer, algorithm)
        found: dict[str, Any] = {"errors": [], "steps": [], "weights": []}
        for step in range(6):
            optimizer.zero_grad()
            bomb = "middle" if (ctx.rank, step) == (0, 3) else ""
            found["errors"].append(caught(lambda bomb=bomb: model(feed(ctx), bomb).sum().backward())[0])  # type: ignore[misc]
            found["steps"].append(caught(optimizer.step)[0])
            found["weights"].append([p.item() for p in model.parameters()])
        run.close()
        return found


@pytest.mark.parametrize("name", ["onebit_adam", "all", "shift_one"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_other_algorithms_go_on_too(pool: RankPool, world_size: int, name: str) -> None:
    answers = on(pool, world_size, other_algorithms, name)
    for rank, found in enumerate(answers):
        assert found["errors"] == ["", "", "", "PeerError" if rank else "BoomError", "", ""]
        assert found["steps"] == ["", "", "", "PeerError" if rank else "UsageError", "", ""]
        before, after = found["weights"][2], found["weights"][3]
        assert before == after, "the step that was given up moved nothing"
        assert found["weights"][5] != after
        assert all(0 < weight < 1 for weight in found["weights"][5])
        if name == "onebit_adam":
            assert found["weights"] == answers[0]["weights"]


def before_any_gradient(ctx: RankContext, kind: str) -> list[Any]:
    with group(ctx):
        model = Chain()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = wrap(kind, model, optimizer)
        error = caught(lambda: wrapped.forward(feed(ctx), "before").sum().backward())
        optimizer.zero_grad()
        wrapped.forward(feed(ctx)).sum().backward()
        return [error[0], [grad(p) for p in model.parameters()]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_exception_before_the_first_gradient_opens_no_generation(
    pool: RankPool, kind: str, world_size: int
) -> None:
    for error, grads in on(pool, world_size, before_any_gradient, kind):
        assert error == "BoomError"
        assert grads == [mean(world_size)] * 3


def in_no_sync(ctx: RankContext, kind: str) -> list[Any]:
    """It raises where nothing is synchronised: nobody else needs to hear of it."""
    with group(ctx):
        model = Chain()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        wrapped = wrap(kind, model, optimizer)

        def local() -> None:
            with wrapped.run.no_sync():
                wrapped.forward(feed(ctx), "middle" if ctx.rank == 0 else "").sum().backward()

        error = caught(local)
        optimizer.zero_grad()
        wrapped.forward(feed(ctx)).sum().backward()
        optimizer.step()
        return [error[0], [grad(p) for p in model.parameters()]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_under_no_sync_stays_local(pool: RankPool, kind: str) -> None:
    first, second = on(pool, 2, in_no_sync, kind)
    assert first == ["BoomError", [1.5] * 3]
    assert second == ["", [1.5] * 3]


class Hooked(nn.Module):
    """`a` in a reentrant checkpoint, `times` in a row; a bomb in the outer graph if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = ones_linear(), ones_linear()

    def forward(self, x: torch.Tensor, times: int, bomb: bool) -> torch.Tensor:
        x = self.b(x)
        if bomb:
            x = bomb_in(x)
        for _ in range(times):
            x = checkpoint(self.a, x, use_reentrant=True)
        return x


def reentrant(ctx: RankContext, kind: str) -> dict[str, Any]:
    with group(ctx):
        model = Hooked()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        wrapped = wrap(kind, model, optimizer)

        def step(times: int, bomb: bool) -> tuple[tuple[str, str], list[float | None]]:
            optimizer.zero_grad()
            error = caught(lambda: wrapped.forward(feed(ctx).requires_grad_(), times, bomb).sum().backward())
            return error, [grad(p) for p in model.parameters()]

        return {
            "once": step(1, False),
            "once, exploding": step(1, True)[0],
            "twice": step(2, False)[0],
            "once again": step(1, False),
        }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_reentrant_checkpoints(pool: RankPool, kind: str, world_size: int) -> None:
    right = (("", ""), [mean(world_size)] * 2)
    for found in on(pool, world_size, reentrant, kind):
        assert found["once"] == right
        assert found["once, exploding"] == ("BoomError", "in backward")
        error, text = found["twice"]
        assert error == "UsageError"
        assert "'a.weight' came twice" in text
        assert found["once again"] == right


# ---- exceptions of signal handlers, while a rank waits


class AlarmError(TimeoutError):
    """What a handler raises; often just this."""


@contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise AlarmError("it rang")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def rung(ctx: RankContext, where: str) -> dict[str, Any]:
    """One rank comes when the other has left its wait for it, by an exception of no part of the step."""
    victim = 1 if where == "forward" else 0  # rank 0 sends its buffers, and waits for nobody
    with group(ctx, timeout_s=30.0) as made:
        model = Two()
        model.register_buffer("own", torch.zeros(1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = wrap("attach", model, optimizer, broadcast_buffers=where == "forward")
        backward(wrapped, ctx)
        optimizer.step()
        optimizer.zero_grad()
        tag = torch.zeros(1)
        if ctx.rank == victim:
            with alarm_after(0.3):
                first = caught(lambda: backward(wrapped, ctx))
            made.world.send(tag, 1 - victim).wait()
        else:
            made.world.recv(tag, victim).wait()
            first = caught(lambda: backward(wrapped, ctx))
        again = caught(lambda: backward(wrapped, ctx))
        found: dict[str, Any] = {"first": first, "again": again, "step": caught(optimizer.step)}
        found["weight"] = model.a.weight.item()
        wrapped.run.close()
        wrapped = wrap("attach", model, optimizer)
        optimizer.zero_grad()
        backward(wrapped, ctx)
        return {**found, "attached again": grad(model.a.weight)}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_wait_that_is_left_ends_the_attachment_on_all_ranks(pool: RankPool, where: str) -> None:
    results = on(pool, 2, rung, where)
    firsts = sorted(found["first"] for found in results)
    assert firsts[0] == ("AlarmError", "it rang")
    assert firsts[1][0] == "PeerError"
    for found in results:
        for kind, text in (found["again"], found["step"]):
            assert kind in ("CollectiveError", "PeerError")
            assert "AlarmError: it rang" in text
        assert found["weight"] == pytest.approx(0.85)
        assert found["attached again"] == 1.5


def gone_ahead(ctx: RankContext) -> dict[str, Any]:
    """The last rank closes one step too early, and waits for the others in attach()."""
    with group(ctx, timeout_s=60.0):
        model = Two()
        wrapped = wrap("attach", model)
        backward(wrapped, ctx)
        began = time.monotonic()
        if ctx.rank == ctx.world_size - 1:
            wrapped.run.close()
            error = caught(lambda: bagua.attach(model))
            ctx.store("told").set("told", "1")
        else:
            error = caught(lambda: backward(wrapped, ctx))
        found = {"error": error, "seconds": time.monotonic() - began}
        wrapped.run.close()
        if ctx.rank < ctx.world_size - 1:  # the last rank was there, and has left
            ctx.store("told").wait(["told"], timedelta(seconds=20))
            found["then"] = caught(lambda: bagua.attach(model))
        found["seconds"] = time.monotonic() - began
        return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_waits_in_attach_hears_of_the_others_failure(pool: RankPool, world_size: int) -> None:
    results = on(pool, world_size, gone_ahead)
    for found in results:
        assert found["error"][0] == "PeerError"
        assert found["seconds"] < 10.0
    assert "the control lane job/attach#2: another rank has failed meanwhile" in results[-1]["error"][1]
    for found in results[:-1]:
        kind, text = found["then"]
        assert kind == "PeerError"
        assert "the control lane job/attach#2: another rank came, and did not stay" in text


def left_and_attached_again(ctx: RankContext) -> list[Any]:
    """An exception leaves the attachment on one rank, which goes on at once; the others do as they hear."""
    with group(ctx, timeout_s=60.0):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train() -> None:
            with bagua.attach(model, optimizer):
                for step in range(4):
                    if step == 2 and ctx.rank == 1:
                        raise MemoryError
                    optimizer.zero_grad()
                    model(feed(ctx)).sum().backward()
                    optimizer.step()

        began = time.monotonic()
        found = [caught(train)[0] for _ in range(3)]
        return [found, time.monotonic() - began, model.a.weight.item()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_left_by_an_exception_may_attach_again_at_once(pool: RankPool, world_size: int) -> None:
    for rank, (found, seconds, weight) in enumerate(on(pool, world_size, left_and_attached_again)):
        assert found == ["MemoryError" if rank == 1 else "PeerError"] * 3
        assert seconds < 30.0
        assert weight == pytest.approx(1 - 6 * 0.1 * mean(world_size))
