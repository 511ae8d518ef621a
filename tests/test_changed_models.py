"""Models that change after attach(): the plan follows, or every rank hears of it at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils import parametrize, prune

import bagua_rt as bagua
from tests.micro import SIZES, One, Two, backward, caught, feed, grad, group, mean, on, wrap
from tests.ranks import RankContext, RankPool


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


# ---- parameters and modules


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def change(model: Two, how: str, rank: int) -> None:
    if how == "replaced":
        model.b.weight = nn.Parameter(torch.full((1, 1), 5.0 + rank))
    elif how == "added":
        model.c = nn.Linear(1, 1)
    elif how == "cast":
        model.double()
    elif how == "module":  # as many modules as before
        model.b = nn.Linear(1, 1, bias=False)
    elif how == "assigned":
        model.load_state_dict({"a.weight": torch.ones(1, 1), "b.weight": torch.ones(1, 1)}, assign=True)


def changed(ctx: RankContext, how: str, finds_unused: bool) -> dict[str, Any]:
    with group(ctx, timeout_s=15.0):
        model = Two()
        optimizer = sgd(model)
        wrapped = wrap("attach", model, optimizer, find_unused_parameters=finds_unused)
        backward(wrapped, ctx)
        optimizer.step()
        optimizer.zero_grad()
        change(model, how, ctx.rank)
        x = feed(ctx).double() if how == "cast" else feed(ctx)
        error = caught(lambda: wrapped.forward(x).sum().backward())
        return {"error": error, "again": caught(lambda: wrapped.forward(x)), "step": caught(optimizer.step)}


@pytest.mark.parametrize("finds_unused", [False, True])
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("replaced", "b.weight"),
        ("added", "c.weight"),
        ("cast", "a.weight"),
        ("module", "b.weight"),
        ("assigned", "a.weight"),
    ],
)
def test_parameters_that_no_rank_knows_are_an_error_by_name(
    pool: RankPool, how: str, name: str, finds_unused: bool
) -> None:
    for result in on(pool, 2, changed, how, finds_unused):
        for kind, text in result.values():
            assert kind in ("UsageError", "PeerError")
            assert repr(name) in text


def followed(ctx: RankContext) -> list[Any]:
    """What leaves the parameters the objects that they were."""
    found = []
    with group(ctx):
        model = Two()
        optimizer = sgd(model)
        wrapped = wrap("attach", model, optimizer, find_unused_parameters=True)

        def step() -> None:
            optimizer.zero_grad()
            backward(wrapped, ctx)
            found.append((grad(model.a.weight), grad(next(model.b.parameters()))))

        step()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.load_state_dict(Two().state_dict())  # swaps the tensors, and takes their hooks away
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        step()
        parametrize.register_parametrization(model.b, "weight", Doubled())
        step()
        return found


@pytest.mark.parametrize("world_size", SIZES)
def test_swapped_and_parametrized_weights_go_on(pool: RankPool, world_size: int) -> None:
    right = mean(world_size)
    wanted = [(right, right), (right, right), (right, 2 * right)]
    assert on(pool, world_size, followed) == [wanted] * world_size


def of_torch_func(ctx: RankContext) -> dict[str, Any]:
    with group(ctx):
        model = Two()
        model.register_buffer("own", torch.full((1,), float(ctx.rank)))
        wrapped = wrap("attach", model, sgd(model))
        weights: dict[str, torch.Tensor] = dict(model.named_parameters())

        def meta_loss() -> torch.Tensor:
            """One step of an inner loop, then the loss there."""
            loss = functional_call(model, weights, (feed(ctx),)).square().sum()
            steps = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), steps, strict=True)}
            out: torch.Tensor = functional_call(model, fast, (feed(ctx),)).sum()
            return out

        meta_loss().backward()
        found: dict[str, Any] = {"meta": grad(model.a.weight)}
        others = {name: torch.full((1, 1), 3.0, requires_grad=True) for name in weights}
        functional_call(model, others, (feed(ctx),)).sum().backward()
        found["others"] = grad(others["a.weight"])
        found["vmap"] = vmap(model)(torch.ones(3, 1, 1)).flatten().tolist()
        detached = {name: param.detach() for name, param in weights.items()}
        jacobian = jacrev(lambda ps: functional_call(model, ps, (feed(ctx),)))(detached)
        found["jacobian"] = jacobian["a.weight"].item()
        model.zero_grad()
        backward(wrapped, ctx)
        return {**found, "after": grad(model.a.weight)}


@pytest.mark.parametrize("world_size", SIZES)
def test_torch_func_runs_an_attached_model_with_other_weights(pool: RankPool, world_size: int) -> None:
    # out = (a + b)x; a' = a - 0.1 · 2x²(a + b), so d(a' + b')x/da = x - 0.4x³
    feeds = [rank + 1.0 for rank in range(world_size)]
    meta = sum(x - 0.4 * x**3 for x in feeds) / world_size
    for x, found in zip(feeds, on(pool, world_size, of_torch_func), strict=True):
        assert found["meta"] == pytest.approx(meta, rel=1e-5)
        assert found["others"] == found["jacobian"] == x, "weights of its own, gradients of its own"
        assert found["vmap"] == [2.0] * 3
        assert found["after"] == mean(world_size)


# ---- buffers


class Masked(nn.Module):
    """``a(x) * mask``, where the mask may come later."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.a.weight)
        self.norm = nn.BatchNorm1d(1, affine=False).eval()
        self.register_buffer("late", None)
        self.register_buffer("size", torch.full((2,), float(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x)
        return out


def buffers_that_change(ctx: RankContext) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with group(ctx):
        model = Masked(ctx.rank)
        wrapped = wrap("attach", model)
        number = float(ctx.rank + 1)

        def forward(what: str, buffer: Callable[[], Any]) -> None:
            backward(wrapped, ctx)
            found[what] = buffer().flatten().tolist()

        forward("as attached", lambda: model.size)
        model.register_buffer("added", torch.full((3,), number))
        forward("added", lambda: model.added)
        model.late = torch.full((1,), number)
        forward("where None was", lambda: model.late)
        model.size = torch.full((4,), number)
        forward("of another size", lambda: model.size)
        model.norm = nn.BatchNorm1d(1, affine=False).eval()
        model.norm.running_mean.fill_(number)  # type: ignore[union-attr]
        forward("in another module", lambda: model.norm.running_mean)
        torch.manual_seed(ctx.rank)
        prune.random_unstructured(model.a, "weight", 1)
        forward("a pruning mask", lambda: model.a.weight_mask)
        del model.added
        model.size = torch.full((4,), number)
        forward("the rest, one being gone", lambda: model.size)
        return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buffers_that_come_go_or_grow_are_rank_0s_from_then_on(pool: RankPool, world_size: int) -> None:
    answers = on(pool, world_size, buffers_that_change)
    assert answers == [answers[0]] * world_size
    assert answers[0] == {
        "as attached": [0.0] * 2,
        "added": [1.0] * 3,
        "where None was": [1.0],
        "of another size": [1.0] * 4,
        "in another module": [1.0],
        "a pruning mask": [0.0],
        "the rest, one being gone": [1.0] * 4,
    }


def buffer_of_one_rank(ctx: RankContext, how: str) -> list[tuple[str, str]]:
    with group(ctx, timeout_s=30.0):
        model = One()
        if how != "the only one":
            model.register_buffer("seen", torch.zeros(3))
        wrapped = wrap("attach", model)
        backward(wrapped, ctx)
        if ctx.rank == 1:
            if how == "resized":
                model.seen = torch.zeros(2)
            elif how == "gone":
                del model.seen
            else:
                model.register_buffer("late", torch.zeros(2))
        return [caught(lambda: backward(wrapped, ctx))]


@pytest.mark.parametrize(
    ("how", "name"), [("resized", "seen"), ("gone", "seen"), ("added", "late"), ("the only one", "late")]
)
def test_a_buffer_that_one_rank_changes_is_an_error_on_all(pool: RankPool, how: str, name: str) -> None:
    for [(kind, text)] in on(pool, 2, buffer_of_one_rank, how):
        assert kind == "LayoutMismatchError"
        assert f"first in buffer {name!r}" in text
        assert "on rank 1" in text


def forward_of_one_rank(ctx: RankContext, step: int) -> dict[str, Any]:
    """Rank 0 evaluates alone, or rank 1's forward raises and is repeated: buffers have been sent by then."""
    with group(ctx, timeout_s=30.0):
        model = nn.Sequential(One(), nn.BatchNorm1d(1))
        optimizer = sgd(model)
        wrapped = wrap("attach", model, optimizer)
        x = torch.arange(4.0).unsqueeze(1) + ctx.rank
        found: dict[str, Any] = {}

        def train(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                wrapped.forward(x).sum().backward()
                optimizer.step()

        train(step)
        if ctx.rank == 0:
            with torch.no_grad(), wrapped.run.no_sync():  # the way to do it
                found["alone"] = wrapped.forward(x).shape[0]
            with torch.no_grad():
                found["error"] = caught(lambda: (wrapped.forward(x), train(2)))  # type: ignore[func-returns-value]
        else:
            found["error"] = caught(lambda: train(3))
        return found


@pytest.mark.parametrize("step", [1, 3])
def test_a_forward_on_one_rank_is_told_where_it_takes_buffers(pool: RankPool, step: int) -> None:
    results = on(pool, 2, forward_of_one_rank, step)
    assert results[0]["alone"] == 4
    for found in results:
        kind, text = found["error"]
        assert kind == "LayoutMismatchError"
        assert "first in the place" in text
        assert "a forward that takes rank 0's buffers, as each outside of no_sync() does" in text


# ---- state that is loaded, and gradients that no backward has made


def loading(ctx: RankContext, what: str, by: list[int]) -> dict[str, Any]:
    with group(ctx, timeout_s=30.0):
        model = Two()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        wrapped = wrap("attach", model, optimizer)

        def step() -> None:
            optimizer.zero_grad()
            backward(wrapped, ctx)
            optimizer.step()

        step()
        if ctx.rank in by:
            state = optimizer.state_dict()
            if what == "optimizer":
                state["state"][0]["exp_avg"] = torch.full((1, 1), 0.5)
                optimizer.load_state_dict(state)
            elif what == "part":
                model.b.load_state_dict({"weight": torch.full((1, 1), 5.0)})
            else:  # the same again
                model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})
                optimizer.load_state_dict(state)
        error = caught(step)
        return {"error": error, "weights": [p.item() for p in model.parameters()]}


@pytest.mark.parametrize(
    ("what", "part"),
    [("optimizer", "the state 'exp_avg' of 'a.weight' in optimizer 0"), ("part", "the bits of 'b.weight'")],
)
def test_state_that_one_rank_loads_is_told_by_the_next_backward(pool: RankPool, what: str, part: str) -> None:
    for found in on(pool, 2, loading, what, [1]):
        assert found["error"][0] == "LayoutMismatchError"
        assert f"different state since load_state_dict(), first in {part}" in found["error"][1]


@pytest.mark.parametrize(
    ("what", "by"), [("optimizer", [0, 1, 2]), ("part", [0, 1, 2]), ("the same", [1]), ("the same", [0, 2])]
)
def test_state_that_all_ranks_hold_alike_passes(pool: RankPool, what: str, by: list[int]) -> None:
    results = on(pool, 3, loading, what, by)
    assert results == [results[0]] * 3
    assert results[0]["error"] == ("", "")


def by_hand(ctx: RankContext, as_view: bool) -> dict[str, Any]:
    with group(ctx, timeout_s=30.0) as made:
        model = Two()
        optimizer = sgd(model)
        wrapped = wrap("attach", model, optimizer, gradient_as_bucket_view=as_view)
        params = list(model.parameters())

        def assign(value: float | None) -> None:
            if value is None:
                grads = torch.autograd.grad(wrapped.forward(feed(ctx)).sum(), params)
            else:
                grads = tuple(torch.full((1, 1), value) for _ in params)
            for param, each in zip(params, grads, strict=True):
                param.grad = each

        found: dict[str, Any] = {}
        assign(None)
        found["local"] = caught(optimizer.step)
        found["weights"] = [p.item() for p in params]
        for param in params:
            if param.grad is not None:
                made.world.all_reduce_(param.grad).wait()
        found["averaged"] = caught(optimizer.step)
        backward(wrapped, ctx)  # on top of what is there
        optimizer.step()
        optimizer.step()  # once more by the same
        optimizer.zero_grad()
        optimizer.step()
        found["weight"] = model.a.weight.item()
        assign(float(ctx.rank == 1) or None)
        found["elsewhere"] = caught(optimizer.step if ctx.rank == 1 else lambda: backward(wrapped, ctx))
        return found


@pytest.mark.parametrize("as_view", [True, False])
def test_a_step_by_gradients_that_nobody_averaged_is_refused(pool: RankPool, as_view: bool) -> None:
    for found in on(pool, 2, by_hand, as_view):
        kind, text = found["local"]
        assert kind == "LayoutMismatchError"
        assert "gradients that no backward has averaged, first in the gradient of 'a.weight'" in text
        assert found["weights"] == [1.0, 1.0]
        assert found["averaged"] == ("", "")
        assert found["weight"] == pytest.approx(1 - 0.1 * (1.5 + 3.0 + 3.0), rel=1e-6)
        kind, text = found["elsewhere"]
        assert kind == "LayoutMismatchError"
        assert "optimizer.step(), with gradients that no backward has made" in text


def renormalised(ctx: RankContext) -> list[tuple[str, str]]:
    with group(ctx):
        frozen = nn.Embedding(4, 2, max_norm=1.0).requires_grad_(False)
        bagua.attach(nn.Sequential(frozen, nn.Linear(2, 1))).close()
        return [caught(lambda: bagua.attach(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))))]


def test_weights_that_each_forward_changes_are_refused_by_name(pool: RankPool) -> None:
    for [(kind, text)] in on(pool, 2, renormalised):
        assert kind == "UsageError"
        assert "each forward changes '0.weight'" in text
    assert on(pool, 1, renormalised) == [[("", "")]]


def sync_batch_norm(ctx: RankContext) -> dict[str, Any]:
    """torch's SyncBatchNorm, without a group of torch's and beside one."""
    found: dict[str, Any] = {}
    with group(ctx):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(One(), nn.BatchNorm1d(1)))
        found["alone"] = caught(lambda: bagua.attach(model).close())
        torch.distributed.init_process_group(
            "gloo", store=ctx.store(), rank=ctx.rank, world_size=ctx.world_size
        )
        try:
            with bagua.attach(model):
                found["training"] = caught(lambda: model(torch.ones(2, 1)))
                out = model.eval()(feed(ctx))
                out.sum().backward()
                found["out"] = out.item()
                found["grads"] = [grad(model[0].a.weight), grad(model[1].bias)]
        finally:
            torch.distributed.destroy_process_group()
    return found


def test_sync_batch_norm_without_a_group_of_torchs_is_refused(pool: RankPool) -> None:
    scale = (1 + 1e-5) ** -0.5  # of running statistics that are new
    for rank, found in enumerate(on(pool, 2, sync_batch_norm)):
        kind, text = found["alone"]
        assert kind == "UsageError"
        assert "SyncBatchNorm '1' would take the statistics of this rank alone" in text
        assert found["training"][0] == "ValueError", "torch has none for the CPU"
        assert found["out"] == pytest.approx((rank + 1) * scale)
        assert found["grads"] == pytest.approx([1.5 * scale, 1.0])


# ---- modes of torch


def under_modes(ctx: RankContext) -> list[Any]:
    found: list[Any] = []
    with group(ctx):
        model = Two()
        model.register_buffer("own", torch.full((2,), float(ctx.rank)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with torch.inference_mode():
            wrapped = wrap("attach", model, optimizer)

        def step() -> None:
            backward(wrapped, ctx)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            backward(wrapped, ctx)
            found.append((grad(model.a.weight), grad(model.b.weight)))
            optimizer.zero_grad()

        step()
        model.b.weight.requires_grad_(False)
        with torch.inference_mode():
            wrapped.forward(feed(ctx))  # the first to see it: the plan follows in here
        step()
        x = feed(ctx)
        with torch.device(
            "meta"
        ):  # as torch.set_default_device("cuda") does where the ranks meet on the host
            wrapped.run.close()
            wrapped = wrap("attach", model, optimizer)
            wrapped.forward(x).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        step()
        return found


@pytest.mark.parametrize("world_size", SIZES)
def test_inference_mode_and_a_default_device_do_not_matter(pool: RankPool, world_size: int) -> None:
    right = mean(world_size)
    assert on(pool, world_size, under_modes) == [[(right, right), (right, None), (right, None)]] * world_size


# ---- other forms of a model


def exported(ctx: RankContext) -> list[Any]:
    with group(ctx):
        model = Two()
        wrapped = wrap("attach", model)
        backward(wrapped, ctx)
        torch.jit.trace(model, feed(ctx))
        torch.export.export(model, (feed(ctx),))
        model.zero_grad()
        backward(wrapped, ctx)
        found = [grad(model.a.weight)]
        scripted = torch.jit.script(One())
        refused = caught(lambda: bagua.attach(scripted))
        around = nn.Sequential(scripted)
        run = bagua.attach(around)
        around(feed(ctx)).sum().backward()
        run.close()
        return [*found, refused, *(grad(p) for p in around.parameters())]


def test_exported_and_scripted_models(pool: RankPool) -> None:
    for after, (kind, text), scripted in on(pool, 2, exported):
        assert after == scripted == 1.5
        assert kind == "UsageError"
        assert "model is scripted" in text
