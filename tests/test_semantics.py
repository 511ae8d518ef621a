"""Beside the plain step: compiled steps, steps in the wrong place, gradient penalties, LBFGS, hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from tests.micro import One, Two, backward, caught, feed, grad, group, on, wrap
from tests.ranks import RankContext, RankPool

SIZES = (2, 3)


# ---- nested


def nested(ctx: RankContext) -> dict[str, Any]:
    with group(ctx):
        model = Two()
        wrapped = wrap("attach", model)
        inner = caught(lambda: bagua.attach(model.a))
        outer = caught(lambda: bagua.attach(nn.Sequential(model)))
        backward(wrapped, ctx)
        return {"inner": inner, "outer": outer, "grad": grad(model.a.weight)}


def test_nested_attachments_are_refused_by_name(pool: RankPool) -> None:
    for result in on(pool, 2, nested):
        assert result["inner"][0] == result["outer"][0] == "UsageError"
        assert "'weight'" in result["inner"][1]
        assert "'0.a.weight'" in result["outer"][1]
        assert result["grad"] == 1.5


# ---- steps and compilation


def step_in_a_hook(ctx: RankContext, given: bool) -> dict[str, Any]:
    with group(ctx):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        wrapped = wrap("attach", model, optimizer if given else ())
        error = caught(lambda: backward(wrapped, ctx))
        return {"error": error, "weights": [p.item() for p in model.parameters()]}


def test_a_step_inside_of_backward_is_refused_before_anything_moves(pool: RankPool) -> None:
    for result in on(pool, 2, step_in_a_hook, True):
        assert result["error"][0] == "UsageError"
        assert "inside of a backward" in result["error"][1]
        assert result["weights"] == [1.0, 1.0]


def test_a_step_inside_of_backward_is_noticed_without_the_optimizer(pool: RankPool) -> None:
    for result in on(pool, 2, step_in_a_hook, False):
        assert result["error"][0] == "UsageError"
        assert "was changed while backward ran" in result["error"][1]


def compiled(ctx: RankContext, how: str) -> list[float | None]:
    with group(ctx):
        model = Two()
        compile_ = partial(torch.compile, backend="eager")
        if how == "model, then attached":
            model.compile(backend="eager")
        wrapped = wrap("attach", model)

        def step(x: torch.Tensor) -> None:
            wrapped.forward(x).sum().backward()

        if how == "attached, then compiled":
            wrapped.forward = compile_(model)
        run = compile_(step) if how == "the whole step" else step
        for _ in range(3):
            model.zero_grad()
            run(feed(ctx))
        return [grad(model.a.weight), grad(model.b.weight)]


@pytest.mark.parametrize("how", ["model, then attached", "attached, then compiled", "the whole step"])
def test_compiled_in_any_order_is_synchronised(pool: RankPool, how: str) -> None:
    for result in on(pool, 2, compiled, how, timeout=100.0):
        assert result == [1.5, 1.5]


def gradient_penalty(ctx: RankContext) -> list[float]:
    with group(ctx):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        wrapped = wrap("attach", model)
        inputs = torch.arange(4.0).view(2, 2) + ctx.rank
        _penalised(wrapped.forward, inputs).backward()
        return [
            value for p in model.parameters() if p.grad is not None for value in p.grad.flatten().tolist()
        ]


def _penalised(forward: Any, inputs: torch.Tensor) -> torch.Tensor:
    inputs = inputs.clone().requires_grad_()
    out = forward(inputs)
    (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    penalised: torch.Tensor = out.mean() + slope.square().sum(1).mean()
    return penalised


def test_a_gradient_penalty_equals_one_process_on_the_whole_batch(pool: RankPool) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    whole = torch.cat([torch.arange(4.0).view(2, 2) + rank for rank in range(2)])
    _penalised(model, whole).backward()
    expected = [
        value for p in model.parameters() if p.grad is not None for value in p.grad.flatten().tolist()
    ]
    results = on(pool, 2, gradient_penalty)
    assert results[0] == results[1]
    assert results[0] == pytest.approx(expected, rel=1.3e-6, abs=5e-5)


def create_graph(ctx: RankContext) -> dict[str, Any]:
    with group(ctx):
        wrapped = wrap("attach", One())
        error = caught(lambda: wrapped.forward(feed(ctx)).square().sum().backward(create_graph=True))
        wrapped.module.zero_grad()
        backward(wrapped, ctx)
        return {"error": error, "next": grad(next(wrapped.module.parameters()))}


def test_create_graph_names_the_way_out_and_the_next_step_is_right(pool: RankPool) -> None:
    for result in on(pool, 2, create_graph):
        assert result["error"][0] == "UsageError"
        assert "torch.autograd.grad" in result["error"][1]
        assert result["next"] == 1.5


def _minimised(forward: Any, model: nn.Module, optimizer: Any, data: torch.Tensor) -> list[float]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (forward(data) - data.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def test_lbfgs_runs_several_backwards_inside_of_one_step(pool: RankPool) -> None:
    results = on(pool, 2, lbfgs)
    torch.manual_seed(5)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    expected = _minimised(model, model, optimizer, torch.arange(8.0).view(4, 2) / 8)
    assert results[0] == results[1]
    assert results[0] == pytest.approx(expected, rel=1e-4)


def lbfgs(ctx: RankContext) -> list[float]:
    with group(ctx):
        torch.manual_seed(5)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        wrapped = wrap("attach", model, optimizer)
        data = torch.arange(8.0).view(4, 2)[2 * ctx.rank : 2 * ctx.rank + 2] / 8
        return _minimised(wrapped.forward, model, optimizer, data)


def refused_on_one_rank(ctx: RankContext) -> dict[str, Any]:
    with group(ctx, timeout_s=20.0):
        model = One()
        if ctx.rank == 1:
            model.extra = nn.Parameter(torch.ones(1).expand(3))
        error = caught(lambda: bagua.attach(model))
        wrapped = wrap("attach", One())
        backward(wrapped, ctx)
        return {"error": error, "next": grad(next(wrapped.module.parameters()))}


def test_what_one_rank_refuses_to_attach_is_an_error_on_all(pool: RankPool) -> None:
    for result in on(pool, 3, refused_on_one_rank, timeout=15.0):
        assert result["error"][0] == "UsageError"
        assert "'extra' is expanded" in result["error"][1]
        assert result["next"] == 2.0


def with_a_users_hook(ctx: RankContext, when: str, as_view: bool) -> list[float | None]:
    with group(ctx):
        model = nn.Sequential(One(), One(), One())

        def triple(param: torch.Tensor) -> None:
            if param.grad is not None:
                param.grad.mul_(3.0)

        def listen() -> None:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(triple)

        if when == "before":
            listen()
        wrapped = wrap("attach", model, gradient_as_bucket_view=as_view, bucket_cap_mb=1e-5)
        if when == "after":
            listen()
        grads: list[float | None] = []
        for _ in range(3):
            model.zero_grad()
            backward(wrapped, ctx)
            grads += [grad(param) for param in model.parameters()]
        return grads


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_users_gradient_hook_acts_before_the_mean(pool: RankPool, when: str, as_view: bool) -> None:
    for result in on(pool, 2, with_a_users_hook, when, as_view):
        assert result == [4.5] * 9


# ---- functions that return no gradient


class NoneOnSome(torch.autograd.Function):
    """``x * w``, whose backward may say that `w` has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, gives_none: bool) -> torch.Tensor:
        ctx.gives_none = gives_none
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] * w, None if ctx.gives_none else grads[0] * x, None


def gradients_of_none(ctx: RankContext, nones: list[int], finds_unused: bool, as_view: bool) -> list[Any]:
    with group(ctx):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
        wrapped = wrap(
            "attach",
            model,
            optimizer,
            find_unused_parameters=finds_unused,
            gradient_as_bucket_view=as_view,
        )
        x = model.a.weight * feed(ctx)
        NoneOnSome.apply(x, model.b.weight, ctx.rank in nones).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found = [grad(model.a.weight), grad(model.b.weight), model.b.weight.item()]
        optimizer.zero_grad()
        backward(wrapped, ctx)
        return [*found, grad(model.b.weight)]


@pytest.mark.parametrize(("finds_unused", "as_view"), [(False, True), (True, True), (False, False)])
def test_a_function_that_returns_no_gradient_counts_as_zero(
    pool: RankPool, finds_unused: bool, as_view: bool
) -> None:
    for nones in ([], [1], [0, 1]):
        # rank r gives r + 1, unless it gives None; where all do, the weight stays
        value = None if len(nones) == 2 else (1.0 + 2.0 * (1 not in nones)) / 2
        weight = 1.0 if value is None else 1 - 0.1 * (value + 0.5)
        answers = on(pool, 2, gradients_of_none, nones, finds_unused, as_view)
        assert answers == [[1.5, value, pytest.approx(weight, rel=1e-6), 1.5]] * 2
