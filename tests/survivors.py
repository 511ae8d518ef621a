"""A rank dies in the middle of a backward; the others shrink the group or init again, go on, and end right.

Run by tests/test_survivors.py on gloo and on the emulated libraries, and by tools/gpu_check on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.backend import Backend
from bagua_rt.errors import CollectiveError
from tests.ranks import RankContext

Way = Literal["shrink", "init again"]
WAYS: tuple[Way, ...] = ("shrink", "init again")
BEFORE, AFTER = 3, 3  # steps of all ranks, and of the survivors
EXIT_CODE = 7
LR, MOMENTUM = 0.1, 0.9


@dataclass(frozen=True)
class Survived:
    """What a survivor saw.

    Attributes:
        error: Type of what the step raised in which the rank died.
        moved: Had that step moved a weight?
        weights: At the end.
    """

    error: str
    moved: bool
    weights: list[float]


def network() -> nn.Module:
    """The model: four layers, a bucket each at the size used here."""
    torch.manual_seed(5)
    sizes = (6, 16, 16, 16, 2)
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers)


def batch(rank: int, step: int) -> torch.Tensor:
    """A rank's samples in a step."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def flat(model: nn.Module, backend: Backend | None = None) -> list[float]:
    """The weights, once the compute stream of `backend` is through: the emulator sees no ``.tolist()``."""
    if backend is not None:
        backend.device.synchronize(backend.device.record(backend.device.compute_stream()))
    return [float(x) for p in model.parameters() for x in p.detach().cpu().flatten().tolist()]


def by_one_process(world_size: int) -> list[float]:
    """The right weights: of one process on all batches, those of the dead rank left out once it is dead."""
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for step in range(BEFORE + AFTER):
        ranks = range(world_size if step < BEFORE else world_size - 1)
        train(model, optimizer, torch.cat([batch(rank, step) for rank in ranks]).double())
    return flat(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def die(_: torch.Tensor) -> None:
    os._exit(EXIT_CODE)


def lose_a_rank(
    ctx: RankContext,
    device: str,
    way: Way,
    computing: Callable[[Backend], AbstractContextManager[object]],
) -> Survived:
    """Train; the last rank dies; train on without it.

    Args:
        ctx: The rank.
        device: Its device.
        way: Go on in a new group of the survivors, or close everything and init again.
        computing: Context in which torch's operations run on a backend's compute stream.
    """
    survivors = ctx.world_size - 1
    options: dict[str, Any] = {"timeout_s": 20.0}
    group = bagua.init(device, store=ctx.store(), rank=ctx.rank, world_size=ctx.world_size, **options)
    with computing(group.backend):
        model = network().to(group.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        run = attached(model, optimizer, group)
        for step in range(BEFORE):
            train(model, optimizer, batch(ctx.rank, step).to(group.device))
        before = flat(model, group.backend)
        if ctx.rank == survivors:  # its last buckets are launched, its first ones never will be
            next(iter(model.parameters())).register_post_accumulate_grad_hook(die)
        error = ""
        try:
            train(model, optimizer, batch(ctx.rank, BEFORE).to(group.device))
        except CollectiveError as caught:
            error = type(caught).__name__
        run.close()
        moved = flat(model, group.backend) != before
        if way == "shrink":
            smaller = group.new_group(range(survivors))
            assert smaller is not None
            go_on(ctx, model, optimizer, smaller)
        weights = flat(model, group.backend)
    group.close()
    if way == "init again":
        group = bagua.init(
            device, store=ctx.store("again", survivors), rank=ctx.rank, world_size=survivors, **options
        )
        with computing(group.backend):
            go_on(ctx, model, optimizer, group)
            weights = flat(model, group.backend)
        group.close()
    return Survived(error, moved, weights)


def attached(model: nn.Module, optimizer: torch.optim.Optimizer, group: bagua.ProcessGroup) -> bagua.Attached:
    return bagua.attach(model, optimizer, process_group=group, bucket_cap_mb=0.001, first_bucket_mb=0.0005)


def go_on(
    ctx: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, group: bagua.ProcessGroup
) -> None:
    with attached(model, optimizer, group):
        for step in range(BEFORE, BEFORE + AFTER):
            train(model, optimizer, batch(ctx.rank, step).to(group.device))


def worst(found: Sequence[float], right: Sequence[float]) -> float:
    """The largest distance."""
    return max(abs(a - b) for a, b in zip(found, right, strict=True))
