"""Cases of attach() and DistributedDataParallel: layouts, dtypes, sizes, numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from tests.micro import KINDS, SIZES, Two, backward, caught, feed, grad, group, mean, on, wrap
from tests.ranks import RankContext, RankPool


class Product(nn.Module):
    """Parameters of any kind; the output is the sum of all their elements, in float64, times x."""

    def __init__(self, **params: torch.Tensor) -> None:
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.double().sum() for p in self.parameters()]).sum() * x.double()


# ---- D. Layout, dtype, size -----------------------------------------------------------------------------


def b26(ctx: RankContext, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout in ("contiguous", "channels_last"):
        with group(ctx), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.manual_seed(5)
            model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3))
            if layout == "channels_last":
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            strides = [p.stride() for p in model.parameters()]
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            wrapped = wrap(kind, model, optimizer)
            for step in range(2):
                optimizer.zero_grad()
                torch.manual_seed(10 * step + ctx.rank)
                wrapped.forward(torch.randn(2, 4, 5, 5)).square().mean().backward()
                grads = [p.grad for p in model.parameters()]
                assert [g.stride() for g in grads if g is not None] == strides
                optimizer.step()
            assert [p.stride() for p in model.parameters()] == strides
            found[layout] = [p.detach().contiguous().clone() for p in model.parameters()]
            found[f"{layout} warned"] = [str(w.message) for w in warned if w.category is UserWarning]
            found[f"{layout} strides"] = strides
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_b26_channels_last_keeps_its_layout(pool: RankPool, kind: str, world_size: int) -> None:
    answers = on(pool, world_size, b26, kind)
    for found in answers:
        assert found["channels_last strides"] != found["contiguous strides"]
        assert found["channels_last warned"] == found["contiguous warned"] == []
        for ours, contiguous in zip(found["channels_last"], found["contiguous"], strict=True):
            torch.testing.assert_close(ours, contiguous)
        for ours, first in zip(found["channels_last"], answers[0]["channels_last"], strict=True):
            assert torch.equal(ours, first)


def b26_strides(ctx: RankContext, kind: str) -> dict[str, Any]:
    """A transposed view, gaps, one element per row, a permuted cube: values by element, strides kept."""
    with group(ctx):
        model = Product(
            transposed=torch.zeros(3, 2).t(),
            gaps=torch.zeros(2, 4)[:, ::2],
            column=torch.zeros(3, 2)[:, :1],
            cube=torch.zeros(2, 3, 4).permute(2, 0, 1),
            plain=torch.zeros(5),
        )
        strides = {name: p.stride() for name, p in model.named_parameters()}
        wrapped = wrap(kind, model)
        weights = {name: torch.arange(p.numel()).view(p.shape) for name, p in model.named_parameters()}
        loss = sum((p * weights[name]).sum() for name, p in model.named_parameters()) * feed(ctx).sum()
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        right = {n: torch.allclose(g, weights[n] * mean(ctx.world_size), rtol=1e-6) for n, g in grads.items()}
        kept = {name: p.stride() == strides[name] for name, p in model.named_parameters()}
        same = {name: grads[name].stride() == strides[name] for name in ("transposed", "cube", "plain")}
        wrapped.run.close()
        return {"right": right, "kept": kept, "same": same}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_b26_odd_strides_keep_their_values(pool: RankPool, kind: str, world_size: int) -> None:
    for found in on(pool, world_size, b26_strides, kind):
        for check, answers in found.items():
            assert all(answers.values()), (check, answers)


def b26_expanded(ctx: RankContext, kind: str) -> list[Any]:
    with group(ctx):
        model = Two()
        model.b.weight = nn.Parameter(torch.ones(1).expand(3, 1))
        refused = caught(lambda: wrap(kind, model))
        model.b.weight = nn.Parameter(torch.ones(1, 1))
        wrapped = wrap(kind, model)
        backward(wrapped, ctx)
        return [refused, grad(model.b.weight)]


@pytest.mark.parametrize("kind", KINDS)
def test_b26_expanded_parameter_is_refused_by_name(pool: RankPool, kind: str) -> None:
    for (error, text), after in on(pool, 2, b26_expanded, kind):
        assert error == "UsageError"
        assert "'b.weight' is expanded" in text
        assert after == 1.5


def b28(ctx: RankContext, kind: str, as_view: bool) -> dict[str, Any]:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    with group(ctx):
        model = Product(**{f"p{i}": torch.ones(1, dtype=dtypes[i % 4]) for i in range(8)})
        wrapped = wrap(kind, model, gradient_as_bucket_view=as_view)
        backward(wrapped, ctx)
        grads = [p.grad for p in model.parameters()]
        return {
            "grads": [None if g is None else g.item() for g in grads],
            "dtypes": [
                g is not None and g.dtype == p.dtype for g, p in zip(grads, model.parameters(), strict=True)
            ],
            "buckets": [(str(plan.dtype), len(plan.names)) for plan in wrapped.run.buckets],
        }


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_b28_dtypes_mix_in_a_model_never_in_a_bucket(pool: RankPool, kind: str, as_view: bool) -> None:
    for world_size in SIZES:
        for found in on(pool, world_size, b28, kind, as_view):
            assert found["grads"] == [
                pytest.approx(mean(world_size), rel=1e-2 if i % 4 > 1 else 1e-6) for i in range(8)
            ]
            if world_size < 3:
                assert found["grads"] == [mean(world_size)] * 8
            assert all(found["dtypes"])
            assert sorted(found["buckets"]) == [
                ("torch.bfloat16", 2), ("torch.float16", 2), ("torch.float32", 2), ("torch.float64", 2)
            ]  # fmt: skip


ALGORITHMS = {
    "gradient_allreduce": bagua.GradientAllReduce(),
    "hierarchical": bagua.GradientAllReduce(hierarchical=True),
    "all": bagua.Decentralized(),
    "shift_one": bagua.Decentralized(peers="shift_one"),
    "onebit_adam": None,
}


def b29(ctx: RankContext, kind: str, only_empty: bool) -> dict[str, Any]:
    with group(ctx):
        return {name: b29_steps(ctx, kind, name, only_empty) for name in ALGORITHMS}


def b29_steps(ctx: RankContext, kind: str, name: str, only_empty: bool) -> dict[str, Any]:
    solid = {} if only_empty else {"s": torch.ones(()), "v": torch.ones(1)}
    model = Product(e=torch.zeros(0, 4), **solid, f=torch.zeros(2, 0))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if name == "onebit_adam":
        optimizer = bagua.optim.OneBitAdam(model.parameters(), 0.1, warmup_steps=1)
    wrapped = wrap(kind, model, optimizer, algorithm=ALGORITHMS[name])
    grads = []
    for _ in range(3):
        optimizer.zero_grad()
        backward(wrapped, ctx)
        grads.append(
            {
                n: (tuple(p.grad.shape), p.grad.tolist())
                for n, p in model.named_parameters()
                if p.grad is not None
            }
        )
        optimizer.step()
    wrapped.run.close()
    return {"grads": grads, "weights": [w for p in model.parameters() for w in p.flatten().tolist()]}


@pytest.mark.parametrize("only_empty", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_b29_empty_and_0_dim_parameters(pool: RankPool, kind: str, world_size: int, only_empty: bool) -> None:
    answers = on(pool, world_size, b29, kind, only_empty)
    for rank, found in enumerate(answers):
        for name, each in found.items():
            for step, grads in enumerate(each["grads"]):
                local = name in ("all", "shift_one") or (name == "onebit_adam" and step > 0)
                right = rank + 1.0 if local else mean(world_size)
                assert grads["e"] == ((0, 4), [])
                assert grads["f"] == ((2, 0), [[], []])
                if not only_empty:
                    assert grads["s"] == ((), right)
                    assert grads["v"] == ((1,), [right])
            assert all(abs(w) < 10 for w in each["weights"]), "no nan"
            assert len(each["weights"]) == (0 if only_empty else 2)


class Counted:
    """A function that counts its calls."""

    def __init__(self, body: Any) -> None:
        self.body = body
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.body(*args, **kwargs)


def b32(ctx: RankContext, kind: str) -> dict[str, Any]:
    with group(ctx):
        model = nn.ParameterList([torch.ones(1) for _ in range(5000)])
        wrapped = wrap(kind, model)
        sends, copies = Counted(None), Counted(torch._foreach_copy_)
        world = wrapped.run._attachment.context.world
        sends.body = world.all_reduce_
        torch._foreach_copy_ = copies
        world.all_reduce_ = sends  # type: ignore[method-assign]
        first = (0, 0)
        try:
            for step in range(3):
                for p in model:
                    p.grad = None
                (torch.cat(list(model)).sum() * feed(ctx).sum()).backward()
                if step == 0:
                    first = (sends.calls, copies.calls)
        finally:
            torch._foreach_copy_ = copies.body
            del world.all_reduce_
        grads = {p.grad.item() for p in model if p.grad is not None}
        return {
            "grads": grads,
            "first": first,
            "calls": (sends.calls - first[0], copies.calls - first[1]),
            "buckets": [(plan.nbytes, len(plan.names)) for plan in wrapped.run.buckets],
        }


@pytest.mark.parametrize("kind", KINDS)
def test_b32_5000_parameters_are_one_collective_and_batched_copies(pool: RankPool, kind: str) -> None:
    for found in on(pool, 2, b32, kind):
        assert found["grads"] == {1.5}
        assert found["buckets"] == [(20_000, 5000)]
        sends, copies = found["calls"]
        assert sends == 2, "one for each of the two backwards"
        assert copies <= 2 * 2


def b33(ctx: RankContext, kind: str, sizes: list[int], as_view: bool) -> dict[str, Any]:
    with group(ctx):
        model = Product(**{f"p{i}": torch.ones(size) for i, size in enumerate(sizes)})
        wrapped = wrap(kind, model, bucket_cap_mb=1.0, gradient_as_bucket_view=as_view)
        backward(wrapped, ctx)
        plans = wrapped.run.buckets
        return {
            "grads": [p.grad.unique().tolist() for p in model.parameters() if p.grad is not None],
            "plan": [(plan.names, plan.nbytes) for plan in plans],
        }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[10, 10, 3_000_000], [10, 3_000_000, 10], [3_000_000, 10, 10]])
def test_b33_giant_parameter_is_alone_and_holds_nobody_up(
    pool: RankPool, kind: str, sizes: list[int]
) -> None:
    for found in on(pool, 2, b33, kind, sizes, kind == "attach"):
        assert found["grads"] == [[1.5]] * 3
        giant = f"p{sizes.index(3_000_000)}"
        plan = found["plan"]
        assert ((giant,), 12_000_000) in plan, "its real size, though the cap is 1 MiB"
        assert sorted(name for names, _ in plan for name in names) == ["p0", "p1", "p2"]
        launched = [names for names, _ in plan]
        if giant == "p0":  # gradients come last to first: the small ones are there before it
            assert launched == [("p2", "p1"), ("p0",)]


# ---- E. Numbers -----------------------------------------------------------------------------------------


def b36(ctx: RankContext, kind: str, as_view: bool) -> dict[str, float]:
    big = {"fp16": (torch.float16, 60000.0), "bf16": (torch.bfloat16, 3e38), "fp32": (torch.float32, 3e38)}
    with group(ctx):
        model = Product(**{name: torch.zeros(2, dtype=dtype) for name, (dtype, _) in big.items()})
        wrapped = wrap(kind, model, gradient_as_bucket_view=as_view)
        values = [(p * big[name][1]).sum() for name, p in model.named_parameters()]
        torch.autograd.backward(values)
        found = {name: p.grad.max().item() for name, p in model.named_parameters() if p.grad is not None}
        wrapped.run.close()
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_b36_averages_overflow_only_where_the_average_does(
    pool: RankPool, kind: str, world_size: int
) -> None:
    for found in on(pool, world_size, b36, kind, kind == "ddp"):
        nearest = torch.tensor(3e38, dtype=torch.bfloat16).item()
        if world_size < 3:
            assert found == {"fp16": 60000.0, "bf16": nearest, "fp32": torch.tensor(3e38).item()}
        else:  # a third is not exact: one unit in the last place
            assert found["fp16"] == pytest.approx(60000, abs=32)
            assert found["bf16"] == pytest.approx(3e38, rel=2**-7)
            assert found["fp32"] == pytest.approx(3e38, rel=2**-23)


def b43(ctx: RankContext, kind: str, value: str, check: bool) -> dict[str, Any]:
    with group(ctx):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = wrap(kind, model, optimizer, check=check)
        x = torch.full((1, 1), float(value) if ctx.rank == 1 else ctx.rank + 1.0)
        error = caught(lambda: wrapped.forward(x, "ab").sum().backward())
        step = caught(optimizer.step)
        weights = [p.item() for p in model.parameters()]
        grads = [grad(p) for p in model.parameters()]
        if not check:
            return {"grads": grads, "error": error}
        optimizer.zero_grad()
        backward(wrapped, ctx)
        return {"error": error, "step": step, "weights": weights, "after": grad(model.a.weight)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_b43_check_names_the_rank_and_the_parameter(pool: RankPool, kind: str, world_size: int) -> None:
    for value in ("nan", "inf", "-inf"):
        for found in on(pool, world_size, b43, kind, value, True):
            error, text = found["error"]
            assert error == "UsageError"
            assert "rank 1: " in text
            assert "rank 0: " not in text
            assert "a.weight" in text
            assert found["step"] == found["error"]
            assert found["weights"] == [1.0, 1.0]
            assert found["after"] == mean(world_size)


@pytest.mark.parametrize("kind", KINDS)
def test_b43_without_check_it_reaches_every_rank(pool: RankPool, kind: str) -> None:
    for found in on(pool, 2, b43, kind, "nan", False):
        assert found["error"] == ("", "")
        assert all(value != value for value in found["grads"])


def b43_scaler(ctx: RankContext, kind: str) -> dict[str, Any]:
    with group(ctx):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = wrap(kind, model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        weights, scales = [], []
        for step in range(3):
            optimizer.zero_grad()
            broken = float("inf") if (ctx.rank, step) == (1, 1) else 1.0
            scaler.scale(wrapped.forward(feed(ctx)).sum() * broken).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
            weights.append(model.a.weight.item())
            scales.append(scaler.get_scale())
        return {"weights": weights, "scales": scales}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_b43_a_loss_scaler_skips_together(pool: RankPool, kind: str, world_size: int) -> None:
    answers = on(pool, world_size, b43_scaler, kind)
    assert answers == [answers[0]] * world_size
    first, second, third = answers[0]["weights"]
    assert first == second == pytest.approx(1 - 0.1 * mean(world_size), rel=1e-6)
    assert third == pytest.approx(1 - 0.2 * mean(world_size), rel=1e-6)
    assert answers[0]["scales"] == [256.0, 128.0, 128.0]
