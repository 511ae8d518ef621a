"""What trains in a soak, and on what data; all of it follows from seeds."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn

from tools.soak.plan import Plan

D = 8  # inputs


class Block(nn.Module):
    """One of the kinds of parameters that models have; takes ``[batch, D]``, gives ``[batch, 1]``.

    Args:
        kind: One of `plan.BLOCKS`, or "sparse".
        width: How wide.
        dtype: What it computes in.
    """

    def __init__(self, kind: str, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.dtype = dtype
        self.a: nn.Module = nn.Identity()
        self.b: nn.Module = nn.Identity()
        if kind == "mlp":
            self.a, self.b = nn.Sequential(nn.Linear(D, width), nn.Tanh()), nn.Linear(width, 1)
        elif kind == "conv":
            self.a = nn.Conv2d(2, 4, 3, padding=1)
            self.a.weight.data = self.a.weight.data.contiguous(memory_format=torch.channels_last)
        elif kind == "norm":
            self.a, self.b = nn.BatchNorm1d(D), nn.Linear(D, 1)
        elif kind == "giant":
            self.a, self.b = nn.Sequential(nn.Linear(D, 1500), nn.Tanh()), nn.Linear(1500, 1)
        elif kind == "tied":
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
            self.b.weight = self.a.weight
        elif kind in ("embedding", "sparse"):
            self.a = nn.Embedding(7, width, sparse=kind == "sparse")
        elif kind == "empty":
            self.w = nn.Parameter(torch.zeros(0, 4))
            self.b = nn.Linear(D, 1)
        elif kind == "scalar":
            self.w = nn.Parameter(torch.tensor(0.7))
        else:  # strided
            self.w = nn.Parameter(torch.randn(3, D).t() * 0.3)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.dtype)
        if self.kind == "conv":
            out: torch.Tensor = self.a(
                x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
            ).mean((1, 2, 3))
        elif self.kind == "tied":
            out = self.b(torch.tanh(self.a(x))).mean(1)
        elif self.kind in ("embedding", "sparse"):
            out = self.a((x[:, 0].abs() * 3).long() % 7).mean(1)
        elif self.kind == "empty":
            out = self.b(x).squeeze(1) + self.w.sum()
        elif self.kind == "scalar":
            out = self.w * x.mean(1)
        elif self.kind == "strided":
            out = (x @ self.w).mean(1)
        else:
            out = self.b(self.a(x)).squeeze(1)
        return out.unsqueeze(1)


class Net(nn.Module):
    """A stem, blocks that may be used in any order or not at all, and a head."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        base = getattr(torch, plan.dtype)
        self.stem = nn.Linear(D, D).to(base)
        self.blocks = nn.ModuleList(
            Block(kind, plan.width, getattr(torch, dtype) if dtype else base) for kind, dtype in plan.blocks
        )
        self.head = nn.Linear(1, 1).to(base)

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        outs = [self.blocks[i](h).to(x.dtype) for i in used]
        out: torch.Tensor = self.head(torch.stack(outs).sum(0) + h.mean(1, keepdim=True))
        return out


@dataclass(frozen=True)
class Batch:
    """The data of one backward of one rank, and which blocks it uses, in which order."""

    x: torch.Tensor
    y: torch.Tensor
    used: tuple[int, ...]


def batches(plan: Plan, step: int, rank: int, generation: int) -> list[Batch]:
    """What one rank feeds in one step: all but the last backward run under no_sync().

    Args:
        plan: The episode.
        step: The step.
        rank: The rank.
        generation: How many faults there were before: the ranks have other data then.
    """
    r = random.Random(f"{plan.seed}/{step}/{rank}/{generation}")
    count = r.randint(1, 3) if plan.accumulates else 1
    return [_batch(plan, r, is_last=i == count - 1) for i in range(count)]


def _batch(plan: Plan, r: random.Random, *, is_last: bool) -> Batch:
    source = torch.Generator().manual_seed(r.getrandbits(40))
    size, dtype = r.randint(2, 5), getattr(torch, plan.dtype)
    order = list(range(len(plan.blocks)))
    r.shuffle(order)
    if plan.finds_unused or not is_last:
        order = [i for i in order if r.random() < 0.7] or order[:1]
    x = torch.randn(size, D, generator=source, dtype=torch.float64).to(dtype)
    y = torch.randn(size, 1, generator=source, dtype=torch.float64).to(dtype)
    return Batch(x, y, tuple(order))


def loss_of(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A loss whose gradient is bounded, so that no training of random models runs away."""
    return (output - batch.y).square().log1p().mean()


def has_inf(plan: Plan, step: int, generation: int) -> int:
    """The rank that finds an inf in this step; -1 for none."""
    r = random.Random(f"{plan.seed}/{step}/{generation}/inf")
    return r.randrange(plan.world_size) if plan.scales and r.random() < 0.3 else -1
