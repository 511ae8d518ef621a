"""What tests/test_cuda_attach.py runs on a rank: training, on gloo or on CUDA with emulated libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import bagua_rt as bagua
from tests.ranks import RankContext

STEPS = 5
Planted = Callable[[], None]


class Net(nn.Module):
    """Three layers with biases; several buckets at the cap that the tests use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def _sgd(model: nn.Module) -> tuple[Any, Any]:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), bagua.algorithms.create("gradient_allreduce")


def _adam(model: nn.Module) -> tuple[Any, Any]:
    optimizer = bagua.optim.OneBitAdam(model.parameters(), lr=0.01, warmup_steps=2)
    return optimizer, optimizer.algorithm


def _peers(model: nn.Module) -> tuple[Any, Any]:
    return torch.optim.SGD(model.parameters(), lr=0.1), bagua.algorithms.create("decentralized")


ALGORITHMS: dict[str, Callable[[nn.Module], tuple[Any, Any]]] = {
    "gradient_allreduce": _sgd,
    "onebit_adam": _adam,
    "decentralized": _peers,
}


@contextmanager
def compute_stream(backend: str, device: Any) -> Iterator[None]:
    """On the emulator, run the body's torch operations on the emulated compute stream."""
    if backend == "gloo":
        yield
        return
    with device.torch_side.on_compute_stream():
        yield


def train(ctx: RankContext, backend: str, algorithm: str, planted: str = "") -> dict[str, Any]:
    """Train a few steps; the weights, and what the emulator has reported."""
    if backend != "gloo":
        from tests.emulator import emulator, product

        product.install()
        emulator.reset()
    options: dict[str, Any] = {"timeout_s": 20.0}
    if ctx.world_size > 1:
        options.update(store=ctx.store(), rank=ctx.rank, world_size=ctx.world_size)
    with (
        plant(planted),
        bagua.init("cpu" if backend == "gloo" else f"cuda:{ctx.rank}", **options) as group,
        compute_stream(backend, group._job.backend.device),
    ):
        torch.manual_seed(3)
        model = Net()
        optimizer, chosen = ALGORITHMS[algorithm](model)
        run = bagua.attach(
            model, optimizer, chosen, process_group=group, bucket_cap_mb=0.004, first_bucket_mb=0.002
        )
        source = torch.Generator().manual_seed(100 + ctx.rank)
        for _ in range(STEPS):
            inputs = torch.randn(8, 24, generator=source)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        buckets = len(run.buckets)
        run.close()
        weights = [p.detach().clone() for p in model.parameters()]
    found: list[str] = []
    if backend != "gloo":
        emulator.drain()
        found = emulator.reports()
        emulator.reset()
    return {"weights": [w.tolist() for w in weights], "reports": found, "buckets": buckets}


@contextmanager
def plant(bug: str) -> Iterator[None]:
    """Break the backend in one way while the body runs."""
    yield
