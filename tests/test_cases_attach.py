"""Cases of attach() and DistributedDataParallel: which parameters take part, wrapping, world sizes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from tests.micro import KINDS, SIZES, One, Two, backward, caught, feed, grad, group, mean, on, wrap
from tests.ranks import RankContext, RankPool

VIEWS = (True, False)


# ---- A. Which parameters take part ----------------------------------------------------------------------


def b01(ctx: RankContext, kind: str, lazy_ranks: list[int]) -> dict[str, Any]:
    with group(ctx):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = wrap(kind, model, optimizer)
        use = "a" if ctx.rank in lazy_ranks else "ab"
        error = caught(lambda: backward(wrapped, ctx, use))
        step = caught(optimizer.step)
        weights = [p.item() for p in model.parameters()]
        optimizer.zero_grad()
        backward(wrapped, ctx)
        after = [grad(model.a.weight), grad(model.b.weight)]
        optimizer.step()
        return {"error": error, "step": step, "weights": weights, "after": after}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "lazy"), [(1, [0]), (2, [0, 1]), (2, [1]), (3, [0, 1, 2]), (3, [1])])
def test_b01_unused_parameter_is_an_error_of_the_same_backward_on_every_rank(
    pool: RankPool, kind: str, world_size: int, lazy: list[int]
) -> None:
    for found in on(pool, world_size, b01, kind, lazy):
        error, text = found["error"]
        assert error == "UnusedParameterError"
        assert "b.weight" in text
        assert "a.weight" not in text
        assert [rank for rank in range(world_size) if f"rank {rank}:" in text] == lazy
        assert "find_unused_parameters=True" in text
        assert found["step"] == found["error"], "the step after it is refused for the same reason"
        assert found["weights"] == [1.0, 1.0]
        assert found["after"] == [mean(world_size)] * 2, "the next step is as if nothing had happened"


class RootParameter(nn.Module):
    """A parameter at the root, one deeper, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.ModuleDict({"deep": One()})
        self.lost = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner["deep"](x) * self.scale
        return out


def b01_names(ctx: RankContext, kind: str) -> tuple[tuple[str, str], list[str]]:
    with group(ctx):
        wrapped = wrap(kind, RootParameter())
        error = caught(lambda: backward(wrapped, ctx))
        return error, [name for plan in wrapped.run.buckets for name in plan.names]


@pytest.mark.parametrize("kind", KINDS)
def test_b01_root_level_parameters_are_called_by_one_name_everywhere(pool: RankPool, kind: str) -> None:
    for (error, text), planned in on(pool, 2, b01_names, kind):
        assert (error, "parameters got no gradient: lost ·" in text) == ("UnusedParameterError", True)
        assert sorted(planned) == ["inner.deep.a.weight", "lost", "scale"]


def b02(ctx: RankContext, kind: str, users: list[int]) -> list[list[Any]]:
    with group(ctx):
        return [b02_steps(ctx, kind, users, as_view) for as_view in VIEWS]


def b02_steps(ctx: RankContext, kind: str, users: list[int], as_view: bool) -> list[Any]:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.5)
    wrapped = wrap(kind, model, optimizer, find_unused_parameters=True, gradient_as_bucket_view=as_view)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        backward(wrapped, ctx, "ab" if ctx.rank in users else "a")
        seen.append((grad(model.a.weight), grad(model.b.weight)))
        optimizer.step()
    wrapped.run.close()
    return [seen, model.b.weight.item()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_b02_unused_everywhere_stays_untouched(pool: RankPool, kind: str, world_size: int) -> None:
    for found in on(pool, world_size, b02, kind, []):
        for seen, weight in found:
            assert seen == [(mean(world_size), None)] * 2
            assert weight == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_b02_used_on_one_rank_counts_as_zero_on_the_others(
    pool: RankPool, kind: str, world_size: int
) -> None:
    answers = on(pool, world_size, b02, kind, [0])
    assert answers == [answers[0]] * world_size
    for seen, weight in answers[0]:
        assert seen == [(mean(world_size), pytest.approx(1 / world_size, rel=1e-7))] * 2
        # two steps of momentum 0.9, decay 0.5, gradient 1/n: the same on every rank
        first = 1 / world_size + 0.5
        velocity = 0.9 * first + 1 / world_size + 0.5 * (1 - 0.1 * first)
        assert weight == pytest.approx(1 - 0.1 * first - 0.1 * velocity, rel=1e-6)


def b02_stale(ctx: RankContext, kind: str) -> list[list[float | None]]:
    """`b` is used in the first step, by nobody in the second, without zeroing between."""
    found = []
    with group(ctx):
        for as_view in VIEWS:
            model = Two()
            wrapped = wrap(kind, model, find_unused_parameters=True, gradient_as_bucket_view=as_view)
            backward(wrapped, ctx)
            backward(wrapped, ctx, "a")
            kept = [grad(model.a.weight), grad(model.b.weight)]
            model.zero_grad(set_to_none=False)
            backward(wrapped, ctx, "a")
            found.append([*kept, grad(model.a.weight), grad(model.b.weight)])
            wrapped.run.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_b02_a_gradient_that_nobody_adds_to_is_kept(pool: RankPool, kind: str) -> None:
    for found in on(pool, 2, b02_stale, kind):
        assert found == [[3.0, 1.5, 1.5, 0.0]] * 2


def b04(ctx: RankContext, kind: str, plan: list[bool], find_unused: bool) -> list[Any]:
    with group(ctx):
        model = Two()
        model.b.weight.requires_grad_(plan[0])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = wrap(kind, model, optimizer, find_unused_parameters=find_unused)
        seen: list[Any] = []
        for is_trained in plan:
            model.b.weight.requires_grad_(is_trained)
            optimizer.zero_grad()
            backward(wrapped, ctx)
            seen.append((grad(model.a.weight), grad(model.b.weight)))
            optimizer.step()
        return [seen, model.b.weight.item()]


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("plan", [[True, False, True], [False, True, True], [False, False, True]])
@pytest.mark.parametrize("kind", KINDS)
def test_b04_frozen_and_unfrozen_between_steps(
    pool: RankPool, kind: str, plan: list[bool], find_unused: bool
) -> None:
    for world_size in SIZES if not find_unused else (2,):
        right = mean(world_size)
        for seen, weight in on(pool, world_size, b04, kind, plan, find_unused):
            assert seen == [(right, right if is_trained else None) for is_trained in plan]
            assert weight == pytest.approx(1 - 0.1 * right * sum(plan), rel=1e-6)


def b04_differs(ctx: RankContext, kind: str) -> list[tuple[str, str]]:
    """Frozen on rank 1 only: that can't be what anybody wanted."""
    with group(ctx):
        model = Two()
        wrapped = wrap(kind, model)
        model.b.weight.requires_grad_(ctx.rank != 1)
        return [caught(lambda: backward(wrapped, ctx))]


@pytest.mark.parametrize("kind", KINDS)
def test_b04_frozen_on_one_rank_only_is_an_error_on_all(pool: RankPool, kind: str) -> None:
    answers = [answer for [answer] in on(pool, 2, b04_differs, kind)]
    assert "LayoutMismatchError" in {error for error, _ in answers}
    for error, text in answers:  # the rank that finds it first may tell the other
        assert error in ("LayoutMismatchError", "PeerError")
        assert "b.weight" in text


def b07(ctx: RankContext, kind: str, when: str, find_unused: bool = False) -> dict[str, Any]:
    with group(ctx):
        model = Two()
        if when == "before":
            model.b.weight = model.a.weight
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = wrap(kind, model, optimizer, find_unused_parameters=find_unused)
        sent = wrapped.run.statistics().bytes_sent
        if when == "after":
            model.b.weight = model.a.weight
        grads = []
        for _ in range(2):
            optimizer.zero_grad()
            backward(wrapped, ctx)
            grads.append(grad(model.a.weight))
            optimizer.step()
        return {
            "grads": grads,
            "weights": [model.a.weight.item(), model.b.weight.item()],
            "names": [plan.names for plan in wrapped.run.buckets],
            "keys": sorted(model.state_dict()),
            "bytes": wrapped.run.statistics().bytes_sent - sent,
        }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_b07_tied_parameters_are_one(pool: RankPool, kind: str, world_size: int) -> None:
    right = 2 * mean(world_size)
    for found in on(pool, world_size, b07, kind, "before"):
        assert found["grads"] == [right, right]
        assert found["weights"] == [pytest.approx(1 - 0.2 * right, abs=1e-6)] * 2
        assert found["names"] == [("a.weight",)]
        assert found["keys"] == ["a.weight", "b.weight"]
        assert found["bytes"] == 2 * bytes_of_all_reduce(world_size, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_b07_tied_after_wrapping(pool: RankPool, kind: str) -> None:
    for find_unused in (False, True):
        for found in on(pool, 2, b07, kind, "after", find_unused):
            assert found["grads"] == [3.0, 3.0]
            assert found["weights"] == [pytest.approx(0.4, abs=1e-6)] * 2


def bytes_of_all_reduce(world_size: int, nbytes: int) -> int:
    """What a ring all-reduce sends per rank; the runtime's statistics count by this formula."""
    return 2 * (world_size - 1) * nbytes // world_size


# ---- C. Hooks and wrapping ------------------------------------------------------------------------------


def b20(ctx: RankContext, kind: str) -> list[float | None]:
    with group(ctx):
        model = Two()
        wrapped = wrap(kind, model)
        seen = []
        for _ in range(2):
            gc.collect()
            model.zero_grad()
            backward(wrapped, ctx)
            seen += [grad(model.a.weight), grad(model.b.weight)]
        return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_b20_hooks_outlive_garbage_collection(pool: RankPool, kind: str, world_size: int) -> None:
    assert on(pool, world_size, b20, kind) == [[mean(world_size)] * 4] * world_size


def hook_count(param: torch.Tensor) -> int:
    return len(param._post_accumulate_grad_hooks or ())


def b23(ctx: RankContext, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with group(ctx) as made, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = Two()
        first = wrap(kind, model)
        second = wrap(kind, model)
        backward(second, ctx)
        found["twice"] = [grad(model.a.weight), hook_count(model.a.weight)]
        found["first is closed"] = caught(first.run.no_sync)[0]
        del first, second
        gc.collect()
        found["warned"] = [str(w.message) for w in warned if w.category is ResourceWarning]
        before = made.world.bytes_sent
        model.zero_grad()
        model(feed(ctx)).sum().backward()
        found["plain"] = [grad(model.a.weight), hook_count(model.a.weight), made.world.bytes_sent - before]
        counts = set()
        again = wrap(kind, model)
        for _ in range(8):
            again = wrap(kind, model)
            model.zero_grad()
            backward(again, ctx)
            counts.add((grad(model.a.weight), hook_count(model.a.weight), len(model._forward_pre_hooks)))
        found["again"] = counts
        again.run.close()
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_b23_wrapping_again_replaces(pool: RankPool, kind: str, world_size: int) -> None:
    for rank, found in enumerate(on(pool, world_size, b23, kind)):
        assert found["twice"] == [mean(world_size), 1]
        assert found["first is closed"] == "ClosedError"
        assert len(found["warned"]) == 1
        assert "collected" in found["warned"][0]
        assert found["plain"] == [rank + 1, 0, 0]
        assert found["again"] == {(mean(world_size), 1, 1)}


# ---- H. World sizes and sub-groups ----------------------------------------------------------------------


def algorithms(model: nn.Module) -> dict[str, Callable[[], tuple[torch.optim.Optimizer, Any]]]:
    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1)

    def onebit() -> torch.optim.Optimizer:
        return bagua.optim.OneBitAdam(model.parameters(), 0.1, warmup_steps=1)

    return {
        "gradient_allreduce": lambda: (sgd(), bagua.GradientAllReduce()),
        "sum": lambda: (sgd(), bagua.GradientAllReduce(average=False)),
        "hierarchical": lambda: (sgd(), bagua.GradientAllReduce(hierarchical=True)),
        "all": lambda: (sgd(), bagua.Decentralized()),
        "shift_one": lambda: (sgd(), bagua.Decentralized(peers="shift_one")),
        "onebit_adam": lambda: (onebit(), None),
    }


ALGORITHMS = tuple(algorithms(nn.Identity()))


def b64(ctx: RankContext, kind: str, ranks: list[int] | None) -> dict[str, Any] | None:
    with group(ctx) as everyone:
        made = everyone if ranks is None else everyone.new_group(ranks)
        return None if made is None else {name: b64_steps(ctx, kind, made, name) for name in ALGORITHMS}


def b64_steps(ctx: RankContext, kind: str, made: bagua.ProcessGroup, name: str) -> dict[str, Any]:
    model = Two()
    optimizer, algorithm = algorithms(model)[name]()
    wrapped = wrap(kind, model, optimizer, algorithm=algorithm, process_group=made)
    grads = []
    for _ in range(3):
        optimizer.zero_grad()
        backward(wrapped, ctx)
        grads.append(grad(model.a.weight))
        optimizer.step()
    weights = [p.item() for p in model.parameters()]
    sent = wrapped.run.statistics().bytes_sent
    wrapped.run.close()
    return {"grads": grads, "weights": weights, "bytes": sent}


def check_b64(name: str, answers: list[Any], feeds: list[int]) -> None:
    right = sum(feeds) / len(feeds)
    for rank, found in enumerate(answers):
        grads, weights = found["grads"], found["weights"]
        assert weights[0] == weights[1]
        if len(feeds) == 1:
            assert found["bytes"] == 0
        if name in ("all", "shift_one"):
            assert grads == [feeds[rank]] * 3, "gradients stay each rank's own"
        elif name == "onebit_adam":
            assert grads == [pytest.approx(right, rel=1e-6), feeds[rank], feeds[rank]]
            assert weights[0] == pytest.approx(1 - 0.3, abs=0.2)
        else:
            assert grads == [pytest.approx(sum(feeds) if name == "sum" else right, rel=1e-6)] * 3
            assert weights[0] == pytest.approx(1 - 0.3 * grads[0], rel=1e-5)
        if name not in ("all", "shift_one"):
            assert weights == answers[0]["weights"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_b64_every_algorithm_at_every_world_size(pool: RankPool, kind: str, world_size: int) -> None:
    answers = on(pool, world_size, b64, kind, None)
    for name in ALGORITHMS:
        check_b64(name, [found[name] for found in answers], list(range(1, world_size + 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_b64_sub_group(pool: RankPool, kind: str) -> None:
    answers = on(pool, 3, b64, kind, [0, 2])
    assert answers[1] is None
    for name in ALGORITHMS:
        check_b64(name, [answers[0][name], answers[2][name]], [1, 3])
