"""Calls that are wrong on one rank only: every rank is told at once, and all go on as before."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.algorithms.base import AlgorithmState, Context
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError
from tests.micro import One, Two, backward, caught, feed, grad, group, on, wrap
from tests.ranks import RankContext, RankPool

DEADLINE_S = 30.0
SOON_S = 5.0
ODD = 1


def attached_wrongly(ctx: RankContext) -> dict[str, tuple[str, str, float]]:
    """Each call differs on rank 1; a good one follows each."""
    is_odd = ctx.rank == ODD
    with group(ctx, timeout_s=DEADLINE_S):
        model, other = Two(), One()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        attach: Callable[..., Any] = bagua.attach
        wrapper: Callable[..., Any] = bagua.DistributedDataParallel
        calls: dict[str, Callable[[], Any]] = {
            "names": lambda: attach(model, name="b" if is_odd else "a"),
            "a name and none": lambda: attach(model, name="b" if is_odd else None),
            "no name": lambda: attach(model, name=3 if is_odd else None),
            "cap": lambda: attach(model, bucket_cap_mb=-1 if is_odd else 1.0),
            "ignore": lambda: attach(model, ignore=["c"] if is_odd else []),
            "algorithm": lambda: attach(model, sgd, "sgd" if is_odd else None),
            "its optimizer": lambda: attach(model, sgd, OneBit() if is_odd else bagua.GradientAllReduce()),
            "bound": lambda: attach(model, algorithm=Picky()),
            "setup": lambda: attach(model, algorithm=Picky(at="setup")),
            "broken setup": lambda: attach(model, algorithm=Picky(at="broken")),
            "nested": lambda: attach(nn.Sequential(other) if is_odd else model),
            "devices": lambda: wrapper(model, [0, 1] if is_odd else None),
            "init_sync": lambda: wrapper(model, init_sync=not is_odd),
            "unknown": lambda: wrapper(model, **({"device_mesh": 1} if is_odd else {})),
        }
        found = {}
        with bagua.attach(other):
            for name, call in calls.items():
                began = time.monotonic()
                error = caught(call)
                found[name] = (*error, time.monotonic() - began)
        with bagua.attach(model):
            model(feed(ctx)).sum().backward()
            found["grad"] = ("", str(grad(model.a.weight)), 0.0)
        return found


def OneBit() -> bagua.algorithms.Algorithm:  # noqa: N802  # stands for a class
    return bagua.algorithms.create("onebit_adam")


@dataclass(frozen=True)
class Picky(bagua.GradientAllReduce):
    """Refuses to be bound, or set up, on one rank: as an algorithm may that looks at what only a rank has."""

    name: ClassVar[str] = "picky"
    at: str = "bind"

    def bind(self, context: Context) -> Any:
        state = super().bind(context)
        if context.world.rank == ODD and self.at == "bind":
            raise UsageError("picky doesn't like this rank")
        if context.world.rank == ODD:
            return PickyState(context, self.at)
        return state


class PickyState(AlgorithmState):
    def __init__(self, context: Context, at: str) -> None:
        super().__init__(context)
        self._at = at

    def setup(self, buckets: Any) -> None:
        raise UsageError("picky doesn't like these") if self._at == "setup" else KeyError("a defect")

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        raise AssertionError("never comes to it")


PARTS = {
    "names": "the attachment's name · expected 'a' on every rank, as on rank 0 · got 'b' on rank 1",
    "a name and none": "got 'b' on rank 1",
    "no name": "name is not usable",
    "cap": "bucket_cap_mb is not usable",
    "ignore": "ignore names what the model doesn't have",
    "algorithm": "algorithm is not usable",
    "its optimizer": "the setting algorithm",
    "bound": "picky doesn't like this rank",
    "setup": "picky doesn't like these",
    "broken setup": "a defect",
    "nested": "belongs to a model that is attached",
    "devices": "device_ids names several devices",
    "init_sync": "init_sync=False is not supported",
    "unknown": "takes no argument 'device_mesh'",
}


def test_what_one_rank_attaches_wrongly_is_told_to_all_at_once(pool: RankPool) -> None:
    results = on(pool, 3, attached_wrongly, timeout=100.0)
    for rank, found in enumerate(results):
        assert found.pop("grad")[1] == "2.0"
        assert set(found) == set(PARTS)
        for name, (kind, text, seconds) in found.items():
            assert seconds < SOON_S, name
            assert PARTS[name] in text, name
            if name == "broken setup" and rank == ODD:
                assert kind == "KeyError", "the defect itself"
            else:
                assert kind in ("UsageError", "LayoutMismatchError"), name
            if kind == "UsageError" and rank != ODD:
                assert "rank 1" in text, name


def switched_wrongly(ctx: RankContext) -> dict[str, Any]:
    is_odd = ctx.rank == ODD
    with group(ctx, timeout_s=DEADLINE_S):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = bagua.optim.OneBitAdam(model.parameters(), 0.01, warmup_steps=1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        run = bagua.attach(model, [optimizer, sgd])

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 3) * torch.tensor([[1.0], [2.0 + ctx.rank]])).square().sum().backward()
            optimizer.step()

        step()
        step()
        older = run.state_dict()
        step()
        before = run.state_dict()
        of_other = {**before, "algorithm": "bytegrad"}
        broken = {**older, "state": {"errors": 3}}
        late = {**before, "generations": 17}
        switch: Callable[..., Any] = run.switch
        load: Callable[..., Any] = run.load_state_dict
        calls: dict[str, Callable[[], Any]] = {
            "none": lambda: switch(None if is_odd else bagua.GradientAllReduce()),
            "class": lambda: switch(bagua.GradientAllReduce if is_odd else bagua.GradientAllReduce()),
            "other": lambda: switch(bagua.Decentralized() if is_odd else bagua.GradientAllReduce()),
            "bound": lambda: switch(Picky()),
            "setup": lambda: switch(Picky(at="setup")),
            "no checkpoint": lambda: load({} if is_odd else before),
            "of another": lambda: load(of_other if is_odd else before),
            "broken": lambda: load(broken if is_odd else older),
            "late": lambda: load(late if is_odd else before),
            "order": lambda: load({**before, "order": ["x"]} if is_odd else before),
        }
        found: dict[str, Any] = {"calls": {}}
        for name, call in calls.items():
            began = time.monotonic()
            found["calls"][name] = (*caught(call), time.monotonic() - began)
        after = run.state_dict()
        found["same"] = repr(before) == repr(after)
        found["algorithm"] = run.algorithm.name
        step()
        found["weights"] = [v for p in model.parameters() for v in p.flatten().tolist()]
        load(run.state_dict())
        switch(bagua.GradientAllReduce())
        step()
        found["grads"] = [
            v for p in model.parameters() if p.grad is not None for v in p.grad.flatten().tolist()
        ]
        return found


def test_what_one_rank_switches_or_loads_wrongly_is_told_to_all_and_changes_nothing(pool: RankPool) -> None:
    results = on(pool, 3, switched_wrongly, timeout=100.0)
    for rank, found in enumerate(results):
        for name, (kind, text, seconds) in found["calls"].items():
            assert seconds < SOON_S, name
            assert kind, name
            if rank != ODD or name in ("late", "other"):
                assert kind in ("UsageError", "LayoutMismatchError"), (name, text)
                assert "rank 1" in text, (name, text)
        assert found["same"], "what was refused changed nothing"
        assert found["algorithm"] == "onebit_adam"
        assert found["weights"] == results[0]["weights"]
        assert found["grads"] == results[0]["grads"]


def cleared(ctx: RankContext, kind: str) -> dict[str, Any]:
    """no_sync(), then gradients that are cleared without being set to None."""
    with group(ctx, timeout_s=DEADLINE_S):
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        wrapped = wrap(kind, model, optimizer)
        found: dict[str, Any] = {}

        def accumulate(use: str = "ab") -> None:
            with wrapped.run.no_sync():
                backward(wrapped, ctx, use)

        accumulate()
        found["local"] = caught(optimizer.step)
        accumulate()
        optimizer.zero_grad(set_to_none=False)
        found["step"] = caught(optimizer.step)
        accumulate()
        model.zero_grad(set_to_none=False)
        accumulate("a")
        found["local again"] = caught(optimizer.step)
        optimizer.zero_grad(set_to_none=False)
        backward(wrapped, ctx)
        found["grads"] = [grad(model.a.weight), grad(model.b.weight)]
        optimizer.step()
        found["weight"] = model.a.weight.item()
        accumulate()
        optimizer.zero_grad(set_to_none=False)
        found["unused"] = caught(lambda: backward(wrapped, ctx, "a"))
        accumulate("b")
        backward(wrapped, ctx, "a")  # accumulated, so not unused
        found["accumulated"] = grad(model.b.weight)
        return found


@pytest.mark.parametrize("kind", ["attach", "ddp"])
def test_gradients_that_were_cleared_are_no_local_ones(pool: RankPool, kind: str) -> None:
    for found in on(pool, 2, cleared, kind):
        assert found["local"][0] == found["local again"][0] == "UsageError"
        assert "local gradients of a.weight, b.weight" in found["local"][1]
        assert "local gradients of a.weight ·" in found["local again"][1]
        assert found["step"] == ("", "")
        assert found["grads"] == [1.5, 1.5]
        assert found["weight"] == pytest.approx(1 - 0.15)
        kind_, text = found["unused"]
        assert kind_ == "UnusedParameterError"
        assert "b.weight" in text
        assert found["accumulated"] == 1.5
