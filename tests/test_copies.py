"""Copies, pickles and state_dicts of models that train: independent, plain, and of use on one rank alone."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim.swa_utils import AveragedModel

import bagua_rt as bagua
from tests.micro import One, Two, caught, feed, grad, group, mean, on
from tests.ranks import RankContext, RankPool


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


class Keeper(Two):
    """A model that keeps its own handle, as trainers' modules do."""

    run: bagua.Attached | None = None


def plain(ctx: RankContext, way: str) -> dict[str, Any]:
    with group(ctx):
        model = Keeper()
        fresh = [sorted(vars(module)) for module in model.modules()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = bagua.attach(model, optimizer)
        model.run = run

        def step(model: Two) -> None:
            model.zero_grad()
            model(feed(ctx)).sum().backward()

        step(model)
        optimizer.step()
        found: dict[str, Any] = {"alone": True}
        if ctx.rank == 0:  # a copy asks nothing of the other ranks
            WAYS[way](model)
        twin = WAYS[way](model)
        sent, threads = run.statistics().bytes_sent, threading.active_count()
        step(twin)
        found["twin"] = [grad(twin.a.weight), run.statistics().bytes_sent - sent]
        found["threads"] = threading.active_count() - threads
        found["model"] = grad(model.a.weight)
        found["weights"] = [twin.a.weight.item() == model.a.weight.item(), twin.a.weight is model.a.weight]
        found["hooks"] = [hook for module in twin.modules() for hook in module._forward_pre_hooks]
        found["handle"] = [
            caught(use) for use in (twin.run.no_sync, twin.run.statistics, twin.run.join().__enter__)
        ]
        found["closed"] = [twin.run.is_closed, run.is_closed]
        twin.run.close()
        del twin.run
        found["same names"] = [sorted(vars(module)) for module in twin.modules()] == fresh
        pair = copy.deepcopy((model, optimizer))
        step(pair[0])
        pair[1].step()
        found["pair"] = pair[0].a.weight.item() - model.a.weight.item()
        twin.load_state_dict(model.state_dict())
        again = bagua.attach(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
        step(twin)
        step(model)
        found["both"] = [grad(twin.a.weight), grad(model.a.weight)]
        again.close()
        run.close()
        return found


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_an_attached_model_is_a_plain_one(pool: RankPool, way: str) -> None:
    for rank, found in enumerate(on(pool, 2, plain, way)):
        assert found["twin"] == [rank + 1, 0], "local gradients, and nothing sent"
        assert found["threads"] == 0
        assert found["model"] == 1.5
        assert found["weights"] == [True, False]
        assert found["hooks"] == [], "the first forward takes the last trace out"
        for kind, text in found["handle"]:
            assert kind == "ClosedError"
            assert "copy of the handle" in text
        assert found["closed"] == [True, False]
        assert found["same names"]
        assert found["pair"] == pytest.approx(-0.1 * (rank + 1))
        assert found["both"] == [1.5, 1.5]


def wrapped_copies(ctx: RankContext, way: str) -> dict[str, Any]:
    with group(ctx):
        optimizer_of = torch.optim.SGD
        inner = Two()
        optimizer = optimizer_of(inner.parameters(), lr=0.1)
        model = bagua.DistributedDataParallel(inner, optimizers=optimizer, find_unused_parameters=True)

        def step(model: nn.Module, use: str = "ab") -> None:
            model.zero_grad()
            model(feed(ctx), use).sum().backward()

        step(model)
        optimizer.step()
        twin = WAYS[way](model)
        found: dict[str, Any] = {"keys": list(twin.state_dict()) == list(model.state_dict())}
        found["before"] = caught(lambda: twin.attached)
        if ctx.rank == 0:  # evaluation and moving averages are one rank's own business
            average = AveragedModel(model)
            average.update_parameters(model)
            found["average"] = average.eval()(feed(ctx)).item()
            with torch.no_grad():
                twin(feed(ctx))
        inner.zero_grad()
        step(twin, "a")
        found["twin"] = [grad(twin.module.a.weight), grad(twin.module.b.weight)]
        found["original"] = grad(inner.a.weight)
        own = optimizer_of(twin.parameters(), lr=0.1)
        own.step()
        found["weights"] = [twin.module.a.weight.item(), inner.a.weight.item()]
        step(model)
        found["both"] = [grad(twin.module.a.weight), grad(inner.a.weight)]
        shallow = copy.copy(model)
        found["shallow"] = shallow.attached is model.attached
        with WAYS[way](twin).no_sync():  # a copy of a copy
            pass
        model.attached.close()
        late = WAYS[way](model)
        step(late)
        found["copy of a closed one"] = grad(late.module.a.weight)
        return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_of_a_wrapper_reduces_on_its_own(pool: RankPool, way: str, world_size: int) -> None:
    right = mean(world_size)
    for rank, found in enumerate(on(pool, world_size, wrapped_copies, way)):
        assert found["keys"]
        kind, text = found["before"]
        assert kind == "UsageError"
        assert "not attached" in text
        if rank == 0:
            assert found["average"] == pytest.approx(2 * (1 - 0.1 * right))
        assert found["twin"] == [right, None], "with the arguments of the original"
        assert found["original"] is None
        assert found["weights"] == pytest.approx([1 - 0.2 * right, 1 - 0.1 * right])
        assert found["both"] == [right, right]
        assert found["shallow"]
        assert found["copy of a closed one"] == rank + 1


def pickled_apart(ctx: RankContext) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with group(ctx) as everyone:
        pair = everyone.new_group([0, 1])
        assert pair is not None
        model = bagua.DistributedDataParallel(Two(), process_group=pair)
        found["own group"] = caught(lambda: pickle.dumps(model))
        copied: Any = copy.deepcopy(model)
        copied(feed(ctx)).sum().backward()
        found["copied"] = grad(copied.module.a.weight)
        text = pickle.dumps(bagua.DistributedDataParallel(Two()))
        adam = bagua.optim.OneBitAdam((module := Two()).parameters(), warmup_steps=2)
        of_adam = bagua.DistributedDataParallel(module, optimizers=adam)
        found["paired"] = caught(lambda: copy.deepcopy(of_adam)(feed(ctx)))
    loaded = pickle.loads(text)
    found["evaluated"] = loaded.eval()(feed(ctx)).item()
    found["trained"] = caught(lambda: loaded.train()(feed(ctx)))
    with group(ctx):
        loaded(feed(ctx)).sum().backward()
        found["grad"] = grad(loaded.module.a.weight)
    return found


def test_a_pickle_needs_the_default_group_and_finds_it_again(pool: RankPool) -> None:
    for rank, found in enumerate(on(pool, 2, pickled_apart)):
        kind, text = found["own group"]
        assert kind == "UsageError"
        assert "process group of its own" in text
        assert "state_dict()" in text
        assert found["copied"] == 1.5
        kind, text = found["paired"]
        assert kind == "UsageError"
        assert "needs its own optimizer" in text
        assert found["evaluated"] == 2.0 * (rank + 1)
        kind, text = found["trained"]
        assert kind == "UsageError"
        assert "no process group" in text
        assert found["grad"] == 1.5


def round_trips(ctx: RankContext) -> list[list[float]]:
    """Weights go from a wrapper to an attached model, to a plain one, and back."""
    with group(ctx):
        wrapper: Any = bagua.DistributedDataParallel(One())
        with torch.no_grad():
            wrapper.module.a.weight.fill_(7.0)
        state = wrapper.state_dict()
        bare = dict(state)
        consume_prefix_in_state_dict_if_present(bare, "module.")
        attached = One()
        with bagua.attach(attached):
            attached.load_state_dict(bare)
            attached(feed(ctx)).sum().backward()
            file = io.BytesIO()
            torch.save(attached.state_dict(), file)
        file.seek(0)
        fresh = One()
        fresh.load_state_dict(torch.load(file))
        again: Any = bagua.DistributedDataParallel(One())
        again.load_state_dict(state)
        again(feed(ctx)).sum().backward()
        models = (attached, fresh, again.module)
        return [[model.a.weight.item() for model in models], [grad(again.module.a.weight) or 0.0]]


def test_state_dicts_go_everywhere(pool: RankPool) -> None:
    assert on(pool, 2, round_trips) == [[[7.0, 7.0, 7.0], [1.5]]] * 2
