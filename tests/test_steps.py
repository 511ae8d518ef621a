"""Ranks whose optimizers go apart are told with the next backward; what is alike on all is left alone."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from tests.micro import KINDS, One, Two, backward, caught, feed, grad, group, on, wrap
from tests.ranks import RankContext, RankPool

APART = {
    "skipped": "got 1 on rank 1",
    "repeated": "got 3 on rank 1",
    "lr": "got lr 0.05, momentum 0, weight_decay 0, parameters 2 on rank 1",
    "tensor lr": "got lr 0.05",
    "momentum": "got lr 0.1, momentum 0.5",
    "parameters": "weight_decay 0, parameters 1 on rank 1",
}


def apart(ctx: RankContext, how: str, kind: str, given: bool) -> dict[str, Any]:
    with group(ctx, timeout_s=20.0):
        model = Two()
        lr = torch.tensor(0.1) if how == "tensor lr" else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        wrapped = wrap(kind, model, optimizer if given else ())
        odd = ctx.rank == 1

        def step(is_odd: bool) -> None:
            optimizer.zero_grad()
            backward(wrapped, ctx)
            settings = optimizer.param_groups[0]
            if is_odd and how == "lr":
                settings["lr"] = 0.05
            elif is_odd and how == "tensor lr":
                settings["lr"].fill_(0.05)
            elif is_odd and how == "momentum":
                settings["momentum"] = 0.5
            elif is_odd and how == "parameters":
                settings["params"].pop()
            if not (is_odd and how == "skipped"):
                optimizer.step()
            if is_odd and how == "repeated":
                optimizer.step()

        step(False)
        step(odd)
        began = time.monotonic()
        error = caught(lambda: step(False))
        found: dict[str, Any] = {"error": error, "seconds": time.monotonic() - began}
        found["again"] = caught(lambda: wrapped.forward(feed(ctx)))[0]
        wrapped.run.close()
        settings = optimizer.param_groups[0]
        settings["lr"], settings["momentum"], settings["params"] = 0.1, 0.0, list(model.parameters())
        wrapped = wrap(kind, model, optimizer)
        for _ in range(2):
            step(False)
        found["weights"] = [p.item() for p in model.parameters()]
        found["grad"] = grad(model.a.weight)
        return found


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("how", "kind"), [(how, KINDS[i % 2]) for i, how in enumerate(APART)])
def test_a_rank_that_steps_otherwise_is_named_by_the_next_backward(
    pool: RankPool, how: str, kind: str, given: bool
) -> None:
    results = on(pool, 3, apart, how, kind, given)
    for found in results:
        assert found["error"] == results[0]["error"], "the same on every rank"
        error, text = found["error"]
        assert error == "LayoutMismatchError"
        assert "optimizers have gone apart" in text
        assert "optimizer 0 (SGD)" in text
        assert APART[how] in text
        assert found["seconds"] < 5.0
        assert found["again"] == "LayoutMismatchError"
        assert found["weights"] == results[0]["weights"], "attached again, the ranks are equal"
        assert found["grad"] == 2.0


def alike(ctx: RankContext) -> dict[str, float]:
    """Everything that is done by all ranks alike, or that a rank may do alone."""
    trainers = (
        scaled,
        clipped_and_skipped,
        two_optimizers,
        accumulated,
        by_closure,
        minimised,
        joined,
        foreign,
    )
    with group(ctx, timeout_s=20.0):
        return {trainer.__name__: trainer(ctx) for trainer in trainers}


def scaled(ctx: RankContext) -> float:
    """A loss scaler skips step 1: rank 0 alone has an inf, and the mean takes it to all."""
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with wrap("attach", model, optimizer).run:
        for step in range(4):
            optimizer.zero_grad()
            x = feed(ctx) * (float("inf") if step == 1 and ctx.rank == 0 else 1.0)
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return model.a.weight.item()


def clipped_and_skipped(ctx: RankContext) -> float:
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = wrap("attach", model, optimizer)
    with wrapped.run:
        for step in range(4):
            optimizer.zero_grad()
            backward(wrapped, ctx)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step % 2:
                optimizer.step()
    return model.a.weight.item()


def two_optimizers(ctx: RankContext) -> float:
    """One of them steps every other time, and one was not given to attach()."""
    model = Two()
    first = torch.optim.SGD(model.a.parameters(), lr=0.1)
    second = torch.optim.SGD(model.b.parameters(), lr=0.1)
    wrapped = wrap("attach", model, first)
    with wrapped.run:
        for step in range(4):
            model.zero_grad()
            backward(wrapped, ctx)
            first.step()
            if step % 2:
                second.step()
    return model.a.weight.item() + model.b.weight.item()


def accumulated(ctx: RankContext) -> float:
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    wrapped = wrap("attach", model, optimizer)
    with wrapped.run:
        for _ in range(2):
            optimizer.zero_grad()
            with wrapped.run.no_sync():
                for _ in range(ctx.rank + 1):
                    backward(wrapped, ctx)
            backward(wrapped, ctx)
            optimizer.step()
            scheduler.step()
    return model.a.weight.item()


def by_closure(ctx: RankContext) -> float:
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = wrap("attach", model, optimizer)

    def closure() -> float:
        optimizer.zero_grad()
        backward(wrapped, ctx)
        return 0.0

    with wrapped.run:
        for _ in range(2):
            optimizer.step(closure)
    return model.a.weight.item()


def minimised(ctx: RankContext) -> float:
    model = One()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, tolerance_change=0.0)
    wrapped = wrap("attach", model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = wrapped.forward(feed(ctx)).square().sum()
        loss.backward()
        return loss

    with wrapped.run:
        for _ in range(2):
            optimizer.step(closure)
    return model.a.weight.item()


def joined(ctx: RankContext) -> float:
    """Rank r has r + 1 batches; afterwards all go on together."""
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = wrap("attach", model, optimizer)
    with wrapped.run:
        for _ in range(2):
            with wrapped.run.join():
                for _ in range(ctx.rank + 1):
                    optimizer.zero_grad()
                    backward(wrapped, ctx)
                    optimizer.step()
            optimizer.zero_grad()
            backward(wrapped, ctx)
            optimizer.step()
    return model.a.weight.item()


def foreign(ctx: RankContext) -> float:
    """A rank may step what is not attached as it likes."""
    model, own = One(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(own.parameters(), lr=0.1)
    wrapped = wrap("attach", model, [optimizer, other])
    with wrapped.run:
        for _ in range(3):
            optimizer.zero_grad()
            backward(wrapped, ctx)
            optimizer.step()
            for _ in range(ctx.rank):
                own(feed(ctx)).sum().backward()
                other.step()
    return model.a.weight.item()


def test_what_all_ranks_do_alike_is_left_alone(pool: RankPool) -> None:
    results = on(pool, 2, alike)
    assert results[0] == results[1]
    assert results[0]["scaled"] == pytest.approx(1 - 0.1 * 3 * 1.5)
    assert results[0]["clipped_and_skipped"] == pytest.approx(1 - 0.1 * 2)
    assert results[0]["two_optimizers"] == pytest.approx(2 - 0.1 * 6 * 1.5)
    # per rank (r + 2) backwards of r + 1 each: the mean of 2 and 6 is 4
    assert results[0]["accumulated"] == pytest.approx(1 - 0.1 * 4 - 0.05 * 4)
    assert results[0]["by_closure"] == pytest.approx(1 - 0.1 * 2 * 1.5)
    assert results[0]["foreign"] == pytest.approx(1 - 0.1 * 3 * 1.5)
    assert results[0]["joined"] == pytest.approx(1 - 0.1 * (2 * (1.5 + 1.0) + 2 * 1.5))


def local_by_design(ctx: RankContext) -> dict[str, Any]:
    """With weights as source a rank may skip alone; after a switch, what it skipped before doesn't count."""
    with group(ctx, timeout_s=20.0):
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = wrap("attach", model, optimizer, algorithm=bagua.LocalSGD(interval=2))

        def steps(count: int, skipping: int) -> None:
            for step in range(count):
                optimizer.zero_grad()
                backward(wrapped, ctx)
                if ctx.rank != skipping or step != 1:
                    optimizer.step()

        errors = [caught(lambda: steps(4, skipping=1))]
        wrapped.run.switch(bagua.GradientAllReduce())
        errors.append(caught(lambda: steps(3, skipping=-1)))
        errors.append(caught(lambda: steps(3, skipping=1)))
        return {"errors": errors}


def test_a_skip_counts_only_where_ranks_are_to_stay_equal(pool: RankPool) -> None:
    for found in on(pool, 2, local_by_design):
        assert found["errors"][0] == found["errors"][1] == ("", "")
        assert found["errors"][2][0] == "LayoutMismatchError"


def before_the_step(ctx: RankContext, has_buffers: bool) -> dict[str, Any]:
    """A compressed momentum is communicated in step(), so a skip leaves the others waiting there."""
    with group(ctx, timeout_s=30.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if has_buffers else nn.Identity())
        optimizer = bagua.optim.OneBitAdam(model.parameters(), 0.01, warmup_steps=1)
        wrapped = wrap("attach", model, optimizer)
        torch.manual_seed(ctx.rank)

        def step(times: int) -> None:
            optimizer.zero_grad()
            wrapped.forward(torch.randn(3, 4)).sum().backward()
            for _ in range(times):
                optimizer.step()

        for times in (1, 1, 0, 1):
            step(times)
        began = time.monotonic()

        def apart() -> None:
            step(int(ctx.rank == 0))
            step(1)

        error = caught(apart)
        return {"error": error, "seconds": time.monotonic() - began}


@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_skip_before_a_collective_step_is_told_at_once(pool: RankPool, has_buffers: bool) -> None:
    results = on(pool, 2, before_the_step, has_buffers)
    for found in results:
        assert found["error"][0] == "LayoutMismatchError"
        assert "the place" in found["error"][1]
        assert "expected optimizer.step() on every rank, as on rank 0" in found["error"][1]
        assert "no step since the last" in found["error"][1]
        assert found["seconds"] < 5.0


# ---- a line search, which decides by the loss


def searched(model: nn.Module, forward: Any, optimizer: Any, data: torch.Tensor, agreed: Any) -> list[float]:
    """docs/what-happens-when.md, "An optimizer that looks at the loss"."""
    target = data.sum(1, keepdim=True).sin()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (forward(data) - target).square().mean()
        loss.backward()
        return agreed(loss.detach())  # type: ignore[no-any-return]

    for _ in range(4):
        optimizer.step(closure)
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def search_model() -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")


SEARCH_DATA = torch.linspace(-2, 2, 36, dtype=torch.float64).view(12, 3)


def line_search(ctx: RankContext, agrees: bool) -> tuple[list[float], tuple[str, str]]:
    with group(ctx, timeout_s=20.0) as pg:
        model, optimizer = search_model()
        wrapped = wrap("attach", model, optimizer)
        mine = SEARCH_DATA[ctx.rank :: ctx.world_size]

        def agreed(loss: torch.Tensor) -> torch.Tensor:
            if agrees:
                pg.world.all_reduce_(loss, "avg").wait()
            return loss

        found: list[float] = []
        error = caught(lambda: found.extend(searched(model, wrapped.forward, optimizer, mine, agreed)))
        return found, error


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_line_search_over_an_agreed_loss_is_that_of_one_process(pool: RankPool, world_size: int) -> None:
    results = on(pool, world_size, line_search, True)
    model, optimizer = search_model()
    expected = searched(model, model, optimizer, SEARCH_DATA, lambda loss: loss)
    for weights, error in results:
        assert error == ("", "")
        assert weights == results[0][0], "bit-equal"
        assert weights == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_a_line_search_over_local_losses_is_told(pool: RankPool) -> None:
    for _, (kind, text) in on(pool, 2, line_search, False, timeout=100.0):
        assert kind in ("LayoutMismatchError", "PeerError", "CollectiveTimeoutError"), text
