"""The micro-models of the cases, and what tests on ranks share: groups, both ways to wrap, runs of any size.

**Two**: `a`, `b`, weights 1, output ``a(x) + b(x)``; rank r feeds ``x = r + 1``, so each local gradient is
r + 1 and the right mean is 1.0, 1.5, 2.0 for 1, 2, 3 ranks. **One** is `a` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.attach import Attached
from tests.ranks import RankContext, RankPool

KINDS = ("attach", "ddp")
SIZES = (1, 2, 3)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = ones_linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x)
        return out


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = ones_linear()
        self.b = ones_linear()

    def forward(self, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
        outputs: list[torch.Tensor] = [getattr(self, name)(x) for name in use]
        return torch.stack(outputs).sum(0)


def ones_linear() -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    return linear


def feed(ctx: RankContext) -> torch.Tensor:
    return torch.full((1, 1), ctx.rank + 1.0)


def mean(world_size: int) -> float:
    """The mean of r + 1 over all ranks."""
    return (world_size + 1) / 2


def grad(param: torch.Tensor) -> float | None:
    return None if param.grad is None else param.grad.item()


@contextmanager
def group(ctx: RankContext, **options: Any) -> Iterator[bagua.ProcessGroup]:
    """The group of all ranks of a run; a world of one rank goes without a store."""
    if ctx.world_size > 1:
        options.update(store=ctx.store(), rank=ctx.rank, world_size=ctx.world_size)
    with bagua.init("cpu", **{"timeout_s": 40.0, **options}) as made:
        yield made


@dataclass
class Wrapped:
    """A model that was attached, in one way or the other.

    Attributes:
        module: The model itself.
        forward: What the trainer calls.
        run: The handle.
    """

    module: nn.Module
    forward: Callable[..., Any]
    run: Attached
    _wrapper: object = field(default=None, repr=False)


def wrap(kind: str, model: nn.Module, optimizers: Any = (), **options: Any) -> Wrapped:
    """Attach `model` by attach() or by DistributedDataParallel()."""
    if kind == "attach":
        return Wrapped(model, model, bagua.attach(model, optimizers, **options))
    wrapper = bagua.DistributedDataParallel(model, optimizers=optimizers, **options)
    return Wrapped(model, wrapper, wrapper.attached, wrapper)


def caught(fn: Callable[[], object]) -> tuple[str, str]:
    """The kind and text of what `fn` raises; two empty texts if nothing."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def on(
    pool: RankPool, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Run `fn` on the first `world_size` ranks of a pool that may be larger."""
    return pool.first(world_size).run(fn, *args, timeout=timeout)


def backward(wrapped: Wrapped, ctx: RankContext, *args: Any) -> None:
    wrapped.forward(feed(ctx), *args).sum().backward()
