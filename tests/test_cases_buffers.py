"""Cases of attach() and DistributedDataParallel: buffers, and ranks that differ."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from tests.micro import KINDS, SIZES, One, Two, backward, caught, feed, grad, group, mean, on, wrap
from tests.ranks import RankContext, RankPool

# ---- F. Buffers -----------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """Buffers of many kinds, which differ between ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.a = One()
        self.register_buffer("scale", torch.ones(1) + rank)
        self.register_buffer("flag", torch.tensor([rank == 0, True]))
        self.register_buffer("count", torch.tensor(7 + rank))
        self.register_buffer("byte", torch.tensor([200 + rank], dtype=torch.uint8))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("small", torch.tensor([0.5 + rank], dtype=torch.bfloat16))
        self.register_buffer("hidden", torch.tensor([3.0 + rank], dtype=torch.float64), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x) * self.scale
        return out

    def values(self) -> list[Any]:
        return [buffer.tolist() for buffer in self.buffers()]


def b45(ctx: RankContext, kind: str, broadcast: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with group(ctx):
        model = Buffered(ctx.rank)
        wrapped = wrap(kind, model, broadcast_buffers=broadcast)
        found["start"] = model.values()
        (wrapped.forward(feed(ctx)) + wrapped.forward(feed(ctx))).sum().backward()
        found["grad"] = grad(model.a.a.weight)

        def spoil() -> None:
            for i, buffer in enumerate(model.buffers()):
                buffer.copy_(torch.full(buffer.shape, (ctx.rank + i) % 2))

        spoil()
        found["spoilt"] = model.values()
        with torch.no_grad():
            wrapped.forward(feed(ctx))
        found["no_grad"] = model.values()
        spoil()
        model.eval()
        wrapped.forward(feed(ctx))
        found["eval"] = model.values()
        model.train()
        spoil()
        with wrapped.run.no_sync():
            wrapped.forward(feed(ctx))
        found["no_sync"] = model.values()
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_b45_buffers_of_every_kind_become_rank_0s(pool: RankPool, kind: str, world_size: int) -> None:
    answers = on(pool, world_size, b45, kind, True)
    for found in answers:
        assert found["start"] == [[1.0], [True, True], 7, [200], [], [0.5], [3.0]]
        assert found["grad"] == 2 * mean(world_size)
        assert found["no_grad"] == found["eval"] == answers[0]["spoilt"]
        assert found["no_sync"] == found["spoilt"], "no_sync() sends nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_b45_broadcast_buffers_false_leaves_them_alone(pool: RankPool, kind: str) -> None:
    for found in on(pool, 2, b45, kind, False):
        assert found["start"] == [[1.0], [True, True], 7, [200], [], [0.5], [3.0]], "equal once, at attach"
        assert found["no_grad"] == found["eval"] == found["spoilt"]


def b45_batch_norm(ctx: RankContext, kind: str) -> dict[str, Any]:
    with group(ctx):
        norm = nn.BatchNorm1d(1)
        wrapped = wrap(kind, norm)
        x = ctx.rank + torch.arange(4.0).unsqueeze(1)
        first = wrapped.forward(x)
        (first + wrapped.forward(x)).sum().backward()
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        after = norm.running_mean.item()
        wrapped.forward(x)
        return {"after": after, "count": norm.num_batches_tracked.item(), "third": norm.running_mean.item()}


@pytest.mark.parametrize("kind", KINDS)
def test_b45_batch_norm_differs_until_the_next_forward(pool: RankPool, kind: str) -> None:
    first, second = on(pool, 2, b45_batch_norm, kind)
    assert first["after"] == pytest.approx(0.285, abs=1e-6)
    assert second["after"] == pytest.approx(0.385, abs=1e-6)
    assert first["count"] == second["count"] == 3
    assert first["third"] == pytest.approx(0.9 * 0.285 + 0.15, abs=1e-6)
    assert second["third"] == pytest.approx(0.9 * 0.285 + 0.25, abs=1e-6)


# ---- G. Ranks out of step -------------------------------------------------------------------------------

DIFFERENCES: dict[str, tuple[str, str]] = {
    "one more": ("first in parameter 'c.weight'", "nothing of that name"),
    "shape": ("'b.weight'", "shape (2, 1)"),
    "dtype": ("'b.weight'", "torch.float64"),
    "order": ("'b.weight'", "'a.weight'"),
    "frozen": ("'b.weight'", "no gradient"),
    "ignored": ("'b.weight'", ""),
    "stride": ("'b.weight'", "strides (1, 3)"),
    "buffer": ("buffer 'n'", ""),
    "algorithm": ("the setting algorithm", "average=False"),
    "find_unused": ("the setting", "find_unused_parameters=True"),
}


def b51(ctx: RankContext, kind: str, what: str, odd: int) -> dict[str, Any]:
    with group(ctx):
        model, options, is_odd = Two(), {}, ctx.rank == odd
        if what == "stride":
            model.b.weight = nn.Parameter(torch.ones(2, 3).t() if is_odd else torch.ones(3, 2))
        elif what == "order" and is_odd:
            model = Two()
            model._modules["b"], model._modules["a"] = model._modules.pop("b"), model._modules.pop("a")
        elif what == "buffer" and is_odd:
            model.register_buffer("n", torch.zeros(1))
        elif is_odd:
            options = make_odd(model, what)
        began = time.monotonic()
        error, text = caught(lambda: wrap(kind, model, **options))
        seconds = time.monotonic() - began
        right = Two()
        wrapped = wrap(kind, right)
        backward(wrapped, ctx)
        return {"error": error, "text": text, "seconds": seconds, "after": grad(right.a.weight)}


def make_odd(model: Two, what: str) -> dict[str, Any]:
    if what == "one more":
        model.c = nn.Linear(1, 1, bias=False)
    elif what == "shape":
        model.b.weight = nn.Parameter(torch.ones(2, 1))
    elif what == "dtype":
        model.b.double()
    elif what == "frozen":
        model.b.weight.requires_grad_(False)
    elif what == "ignored":
        return {"ignore": ["b.weight"]}
    elif what == "algorithm":
        return {"algorithm": bagua.GradientAllReduce(average=False)}
    elif what == "find_unused":
        return {"find_unused_parameters": True}
    return {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.parametrize(("world_size", "odd"), [(2, 1), (3, 1), (3, 0)])
def test_b51_a_rank_that_differs_is_named_on_every_rank(
    pool: RankPool, kind: str, what: str, world_size: int, odd: int
) -> None:
    if kind == "ddp" and odd == 0:
        return
    answers = on(pool, world_size, b51, kind, what, odd)
    for found in answers:
        assert found["error"] == "LayoutMismatchError"
        assert found["text"] == answers[0]["text"]
        name, value = DIFFERENCES[what]
        assert name in found["text"]
        assert value in found["text"]
        assert f"on rank {odd}" in found["text"]
        assert found["seconds"] < 20, "two on an idle machine"
        assert found["after"] == mean(world_size), "a right model attaches afterwards"
