"""attach(), switch(), close(), and what is refused: everything is left as it was found."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import bagua_rt as bagua
from tests.micro import KINDS, SIZES, One, Two, backward, caught, feed, grad, group, mean, on, wrap
from tests.ranks import RankContext, RankPool


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    params = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    tensors = [len(p._backward_hooks or ()) for p in model.parameters()]
    modules = [
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    ]
    steps = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    return [*params, *tensors, *modules, *steps, len(_global_optimizer_post_hooks)]


def keys_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [sorted(vars(module)) for module in model.modules()] + [sorted(vars(optimizer))]


def file_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- close ----------------------------------------------------------------------------------------------


def cycles(ctx: RankContext, kind: str, name: str, count: int) -> dict[str, Any]:
    model = Two()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.0)
    if name == "onebit_adam":
        optimizer = bagua.optim.OneBitAdam(model.parameters(), 0.0, warmup_steps=1)
    algorithm = None if name == "onebit_adam" else bagua.algorithms.create(name)
    optimizer.step()
    found: dict[str, Any] = {"grads": set()}
    with group(ctx):
        before = [hooks_of(model, optimizer), keys_of(model, optimizer), sorted(model.state_dict())]
        counts = []
        for _ in range(count):
            wrapped = wrap(kind, model, optimizer, algorithm=algorithm)
            optimizer.zero_grad()
            backward(wrapped, ctx)
            optimizer.step()
            wrapped.run.close()
            wrapped.run.close()
            found["grads"].add(grad(model.a.weight))
            del wrapped
            counts.append((file_descriptors(), threading.active_count()))
        after = [hooks_of(model, optimizer), keys_of(model, optimizer), sorted(model.state_dict())]
        found["same"] = [a == b for a, b in zip(before, after, strict=True)]
        gc.collect()
        counts.append((file_descriptors(), threading.active_count()))
    found["counts"] = counts
    found["update hook"] = getattr(optimizer, "before_update", None)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_twenty_cycles_leave_nothing_behind(pool: RankPool, world_size: int, kind: str) -> None:
    for found in on(pool, world_size, cycles, kind, "gradient_allreduce", 20):
        assert found["same"] == [True] * 3
        assert found["grads"] == {mean(world_size)}
        counts = found["counts"]
        assert counts[-1][0] <= counts[1][0], f"file descriptors: {counts}"
        assert counts[-1][1] <= counts[1][1], f"threads: {counts}"


def keys_left(ctx: RankContext) -> tuple[list[int], float | None]:
    with group(ctx) as made:
        store, counts = ctx.store(), []
        for _ in range(4):
            with bagua.attach(Two()):
                made.world.barrier().wait()
                counts.append(store.num_keys())
                made.world.barrier().wait()
        again = bagua.attach(model := Two())  # what was forgotten was not needed any more
        model(feed(ctx)).sum().backward()
        again.close()
        return [after - before for before, after in itertools.pairwise(counts)], grad(model.a.weight)


def test_the_store_does_not_grow_by_what_ranks_have_met_through(pool: RankPool) -> None:
    for grown, value in on(pool, 2, keys_left):
        assert grown[-2:] == [2, 2], "a counter for each rank"
        assert value == 1.5


@pytest.mark.parametrize("name", ["decentralized", "onebit_adam"])
def test_cycles_of_the_other_algorithms(pool: RankPool, name: str) -> None:
    for found in on(pool, 2, cycles, "attach", name, 4):
        assert found["same"] == [True] * 3
        assert found["counts"][-1] <= found["counts"][1]
        assert found["update hook"] is None


def closed(ctx: RankContext, kind: str) -> dict[str, Any]:
    with group(ctx):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = wrap(kind, model, optimizer)
        backward(wrapped, ctx)
        kept = model.a.weight.grad
        flats = [bucket.flat for bucket in wrapped.run._attachment.engine.buckets]
        wrapped.run.close()
        for flat in flats:
            flat.fill_(float("nan"))  # gradients that still lived there would show it
        found: dict[str, Any] = {"grads": [grad(p) for p in model.parameters()], "kept": kept is not None}
        optimizer.step()
        found["weight"] = model.a.weight.item()
        uses: dict[str, Callable[[], object]] = {
            "no_sync": wrapped.run.no_sync,
            "state_dict": wrapped.run.state_dict,
            "load_state_dict": lambda: wrapped.run.load_state_dict({}),
            "switch": lambda: wrapped.run.switch(bagua.Decentralized()),
        }
        found["uses"] = {name: caught(use) for name, use in uses.items()}
        found["readable"] = [
            wrapped.run.algorithm.name,
            len(wrapped.run.buckets),
            wrapped.run.statistics().generations,
        ]
        model.zero_grad()
        model(feed(ctx)).sum().backward()
        found["plain"] = grad(model.a.weight)
        again = wrap(kind, model, optimizer)
        model.zero_grad()
        backward(again, ctx)
        found["again"] = grad(model.a.weight)
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_after_close_gradients_are_readable_and_uses_are_errors(
    pool: RankPool, world_size: int, kind: str
) -> None:
    right = mean(world_size)
    for rank, found in enumerate(on(pool, world_size, closed, kind)):
        assert found["grads"] == [right, right]
        assert found["weight"] == pytest.approx(1 - 0.1 * right, rel=1e-6)
        for name, (error, text) in found["uses"].items():
            assert error == "ClosedError", name
            assert "was closed · call attach() again" in text
        assert found["readable"] == ["gradient_allreduce", 1, 1]
        assert found["plain"] == rank + 1
        assert found["again"] == right


def in_with(ctx: RankContext) -> list[Any]:
    with group(ctx):
        model = One()
        with bagua.attach(model) as run:
            model(feed(ctx)).sum().backward()
            inside = grad(model.a.weight)
        closed_after = caught(run.no_sync)[0]

        def failing() -> None:
            with bagua.attach(model):
                raise KeyError("inside")

        return [
            inside,
            closed_after,
            caught(failing)[0],
            hooks_of(model, torch.optim.SGD(model.parameters())),
        ]


def test_the_handle_is_a_context_manager(pool: RankPool) -> None:
    for inside, after, error, hooks in on(pool, 2, in_with):
        assert (inside, after, error, sum(hooks)) == (1.5, "ClosedError", "KeyError", 0)


def collected(ctx: RankContext, kind: str) -> list[Any]:
    with group(ctx), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = wrap(kind, model, optimizer, name="mine")
        backward(wrapped, ctx)
        del wrapped
        gc.collect()
        texts = [str(w.message) for w in warned if w.category is ResourceWarning]
        return [texts, sum(hooks_of(model, optimizer)), grad(model.a.weight)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_collected_handle_warns_and_detaches(pool: RankPool, kind: str) -> None:
    for texts, hooks, value in on(pool, 2, collected, kind):
        assert len(texts) == 1
        assert "the handle of attach() for mine was collected" in texts[0]
        assert (hooks, value) == (0, 1.5)


def shut_down(ctx: RankContext, kind: str) -> list[Any]:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with group(ctx):
        wrapped = wrap(kind, model, optimizer)
        backward(wrapped, ctx)
        bagua.shutdown()
        bagua.shutdown()
        hooks = sum(hooks_of(model, optimizer))
        wrapped.run.close()
    uses = [caught(wrapped.run.no_sync)[0], caught(lambda: bagua.attach(model))]
    return [hooks, grad(model.a.weight), uses]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_shutdown_closes_attachments(pool: RankPool, world_size: int, kind: str) -> None:
    for hooks, value, (use, (error, text)) in on(pool, world_size, shut_down, kind):
        assert (hooks, value, use) == (0, mean(world_size), "ClosedError")
        assert error == "UsageError"
        assert "there is no process group" in text


# ---- copies and checkpoints -----------------------------------------------------------------------------


def copied(ctx: RankContext) -> dict[str, Any]:
    with group(ctx) as made:
        model = Two()
        keys = sorted(model.state_dict())
        run = bagua.attach(model)
        model(feed(ctx)).sum().backward()
        twin = copy.deepcopy(model)
        sent = made.world.bytes_sent + run.statistics().bytes_sent
        twin.zero_grad()
        twin(feed(ctx)).sum().backward()
        found: dict[str, Any] = {
            "keys": sorted(model.state_dict()) == keys,
            "twin": grad(twin.a.weight),
            "sent": made.world.bytes_sent + run.statistics().bytes_sent - sent,
            "model": grad(model.a.weight),
        }
        other = bagua.attach(twin)  # a model of its own: the first one stays attached
        twin.zero_grad()
        twin(feed(ctx)).sum().backward()
        model.zero_grad()
        model(feed(ctx)).sum().backward()
        found["both"] = [grad(twin.a.weight), grad(model.a.weight)]
        other.close()
        run.close()
        return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_deepcopy_is_independent(pool: RankPool, world_size: int) -> None:
    for rank, found in enumerate(on(pool, world_size, copied)):
        assert found["keys"]
        assert (found["twin"], found["sent"]) == (rank + 1, 0)
        assert found["model"] == mean(world_size)
        assert found["both"] == [mean(world_size)] * 2


def ddp_keys(ctx: RankContext) -> tuple[list[str], float]:
    with group(ctx):
        inner = Two()
        model = bagua.DistributedDataParallel(inner)
        state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        return list(model.state_dict()), inner.a.weight.item()


def test_ddp_has_torchs_state_dict_keys(pool: RankPool) -> None:
    assert on(pool, 2, ddp_keys) == [(["module.a.weight", "module.b.weight"], 2.0)] * 2


def wrong_checkpoint(ctx: RankContext) -> list[tuple[str, str]]:
    with group(ctx):
        model, other = One(), Two()
        run = bagua.attach(model)
        two = bagua.attach(other)
        for _ in range(2):
            model(feed(ctx)).sum().backward()
            other(feed(ctx)).sum().backward()
        errors = [caught(lambda: run.load_state_dict(two.state_dict()))]
        two.switch(bagua.algorithms.ByteGrad())
        errors.append(caught(lambda: run.load_state_dict(two.state_dict())))
        return errors


def test_a_checkpoint_of_another_model_or_algorithm_is_refused(pool: RankPool) -> None:
    for other_model, other_algorithm in on(pool, 2, wrong_checkpoint):
        assert other_model[0] == other_algorithm[0] == "UsageError"
        assert "belongs to another model" in other_model[1]
        assert "another algorithm · expected gradient_allreduce · got bytegrad" in other_algorithm[1]


# ---- switch ---------------------------------------------------------------------------------------------


def switching(ctx: RankContext, kind: str) -> list[Any]:
    with group(ctx):
        model = Two()
        optimizer = bagua.optim.OneBitAdam(model.parameters(), 0.01, warmup_steps=2)
        wrapped = wrap(kind, model, optimizer)
        found = []
        plan = [
            bagua.GradientAllReduce(), bagua.Decentralized(), optimizer.algorithm,
            bagua.Decentralized(peers="shift_one"), bagua.GradientAllReduce(average=False),
        ]  # fmt: skip
        for algorithm in [None, *plan]:
            if algorithm is not None:
                wrapped.run.switch(algorithm)
            for _ in range(2):
                optimizer.zero_grad()
                backward(wrapped, ctx)
                found.append(grad(model.a.weight))
                optimizer.step()
        error = caught(lambda: wrapped.run.switch("decentralized"))  # type: ignore[arg-type]
        optimizer.zero_grad()
        backward(wrapped, ctx)
        return [found, error, wrapped.run.algorithm, grad(model.a.weight), model.a.weight.item() < 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_switch_goes_on_with_another_algorithm(pool: RankPool, world_size: int, kind: str) -> None:
    n, right = world_size, mean(world_size)
    for rank, (found, error, algorithm, after, moved) in enumerate(on(pool, n, switching, kind)):
        own = rank + 1.0
        wanted = [right] * 4 + [own] * 2 + [own] * 2 + [own] * 2 + [n * right] * 2
        assert found == [pytest.approx(value, rel=1e-6) for value in wanted]
        assert error[0] == "UsageError"
        assert "switch() got no algorithm" in error[1]
        assert algorithm == bagua.GradientAllReduce(average=False)
        assert after == n * right, "as before the switch that was refused"
        assert moved


def switching_apart(ctx: RankContext) -> list[Any]:
    with group(ctx):
        model = Two()
        run = bagua.attach(model)
        algorithm = bagua.Decentralized() if ctx.rank else bagua.GradientAllReduce(average=False)
        error = caught(lambda: run.switch(algorithm))
        model(feed(ctx)).sum().backward()
        return [error, grad(model.a.weight)]


def test_ranks_that_switch_apart_are_told(pool: RankPool) -> None:
    for (error, text), value in on(pool, 2, switching_apart):
        assert error == "LayoutMismatchError"
        assert "the algorithm" in text
        assert "Decentralized" in text
        assert value == 1.5


# ---- what is refused ------------------------------------------------------------------------------------


def attach_wrongly() -> dict[str, tuple[Callable[[], object], str]]:
    """Each with a part of its text."""
    two, sgd = Two(), torch.optim.SGD(Two().parameters(), 0.1)
    meta = Two().to("meta")
    lazy = nn.Sequential(nn.LazyLinear(2))
    attach: Callable[..., object] = bagua.attach
    return {
        "model": (lambda: attach("model"), "a torch.nn.Module · got str"),
        "optimizer": (lambda: attach(two, [1]), "torch.optim.Optimizer, one or several · got int"),
        "optimizer twice": (lambda: attach(two, [sgd, sgd]), "given twice"),
        "algorithm": (lambda: attach(two, sgd, "decentralized"), "bagua_rt.algorithms.create"),
        "algorithm class": (lambda: attach(two, sgd, bagua.GradientAllReduce), "algorithm is not usable"),
        "cap 0": (lambda: attach(two, bucket_cap_mb=0), "bucket_cap_mb is not usable"),
        "cap text": (lambda: attach(two, bucket_cap_mb="10"), "bucket_cap_mb is not usable"),
        "cap bool": (lambda: attach(two, bucket_cap_mb=True), "bucket_cap_mb is not usable"),
        "cap nan": (lambda: attach(two, bucket_cap_mb=float("nan")), "got nan"),
        "first": (lambda: attach(two, first_bucket_mb=-1), "first_bucket_mb is not usable"),
        "commit": (lambda: attach(two, commit="later"), "commit is not usable"),
        "ignore text": (lambda: attach(two, ignore="a.weight"), "write ['a.weight']"),
        "ignore unknown": (lambda: attach(two, ignore=["a.weight", "c"]), "got c"),
        "ignore number": (lambda: attach(two, ignore=[3]), "texts · got 3"),
        "device": (lambda: attach(meta), "'a.weight' is on another device"),
        "lazy": (lambda: attach(lazy), "'0.weight' is not initialised yet"),
        "ddp devices": (lambda: bagua.DistributedDataParallel(two, [0, 1]), "several devices"),
        "ddp cap": (lambda: bagua.DistributedDataParallel(two, bucket_cap_mb=-5), "bucket_cap_mb"),
    }


def refused(ctx: RankContext) -> dict[str, Any]:
    with group(ctx) as made:
        made.world.barrier().wait()
        sent, count = made.world.bytes_sent, file_descriptors()
        errors = {name: (*caught(call), text) for name, (call, text) in attach_wrongly().items()}
        left = [made.world.bytes_sent - sent, file_descriptors() - count]
        model = Two()
        wrapped = wrap("attach", model, name="right")
        backward(wrapped, ctx)
        return {"errors": errors, "left": left, "grad": grad(model.a.weight)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_arguments_are_refused_before_anything_is_launched(pool: RankPool, world_size: int) -> None:
    for found in on(pool, world_size, refused):
        for name, (error, text, part) in found["errors"].items():
            assert error == "UsageError", name
            assert part in text, name
        assert found["left"] == [0, 0]
        assert found["grad"] == mean(world_size)


def ignoring(ctx: RankContext, kind: str, how: str) -> dict[str, Any]:
    with group(ctx):
        model = Two()
        model.register_buffer("n", torch.tensor([ctx.rank + 1.0]))
        with torch.no_grad():
            model.b.weight.fill_(ctx.rank + 2.0)
        ignore = ["b.weight", "n"]
        options: dict[str, Any] = {}
        if how == "argument":
            options = {"ignore": ignore}
        else:
            vars(model)["_ddp_params_and_buffers_to_ignore"] = [*ignore, "gone"]
        wrapped = wrap(kind, model, **options)
        backward(wrapped, ctx)
        values = [model.b.weight.item(), model.get_buffer("n").item()]
        names = [name for plan in wrapped.run.buckets for name in plan.names]
        return {"grads": [grad(p) for p in model.parameters()], "values": values, "names": names}


@pytest.mark.parametrize("how", ["argument", "attribute"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_ignored_names_are_left_alone(pool: RankPool, world_size: int, kind: str, how: str) -> None:
    for rank, found in enumerate(on(pool, world_size, ignoring, kind, how)):
        assert found["grads"] == [mean(world_size), rank + 1]
        assert found["values"] == [rank + 2.0, rank + 1.0]
        assert found["names"] == ["a.weight"]
