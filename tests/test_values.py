"""Values: n ranks with batch b are one process with batch n*b, and torch's own DDP; all ranks bit-equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_rt as bagua
from tests.micro import KINDS, group, on, wrap
from tests.ranks import RankContext, RankPool

STEPS, BATCH = 5, 4
Maker = Callable[[nn.Module], torch.optim.Optimizer]

# Adam turns rounding into steps where a gradient is of the size of eps, hence an eps that is not tiny.
OPTIMIZERS: dict[str, Maker] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 3e-3, eps=1e-6),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-6, weight_decay=0.1),
}


class Net(nn.Module):
    """Linear layers, a norm, a convolution, a parameter at the root."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.ones(()))
        self.conv = nn.Conv1d(2, 3, 3, padding=1)
        self.norm = nn.GroupNorm(1, 3)
        self.head = nn.Sequential(nn.Linear(18, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.conv(x)).flatten(1)) * self.scale
        return out


def batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 10_000 + step * 100 + rank)
    return torch.randn(BATCH, 2, 6, generator=generator), torch.randn(BATCH, 2, generator=generator)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def single(seed: int, name: str, world_size: int) -> nn.Module:
    """One process with the batches of all ranks."""
    model = Net(seed)
    optimizer = OPTIMIZERS[name](model)
    for step in range(STEPS):
        parts = [batch(seed, step, rank) for rank in range(world_size)]
        optimizer.zero_grad()
        loss_of(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
        optimizer.step()
    return model


def close(model: nn.Module, other: nn.Module, seed: int, what: object) -> list[bytes]:
    """Compare parameters by the bar; give their bytes."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        text = f"{name}, {seed=}, {what}"
        torch.testing.assert_close(p, q, rtol=1.3e-6, atol=5e-5, msg=partial("{}: {}".format, text))
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def values(ctx: RankContext, kind: str, name: str, seed: int) -> list[list[bytes]]:
    right = single(seed, name, ctx.world_size)
    found = []
    with group(ctx):
        for as_view, to_none in itertools.product((True, False), repeat=2):
            model = Net(seed + ctx.rank)  # the ranks start differently: rank 0's weights count
            optimizer = OPTIMIZERS[name](model)
            wrapped = wrap(kind, model, optimizer, gradient_as_bucket_view=as_view)
            for step in range(STEPS):
                optimizer.zero_grad(set_to_none=to_none)
                loss_of(wrapped.forward, *batch(seed, step, ctx.rank)).backward()
                optimizer.step()
            wrapped.run.close()
            found.append(close(model, right, seed, (name, as_view, to_none)))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_n_ranks_are_one_process_with_n_batches(
    pool: RankPool, world_size: int, name: str, kind: str
) -> None:
    seed = int(torch.randint(1, 1000, ()))
    answers = on(pool, world_size, values, kind, name, seed)
    for found in answers:
        assert found == [answers[0][0]] * 4, f"not bit-equal, {seed=}"


# ---- torch's DDP ----------------------------------------------------------------------------------------


@contextmanager
def torch_group(ctx: RankContext) -> Iterator[None]:
    store = dist.PrefixStore("torch", ctx.store())
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def like_ddp(ctx: RankContext, kind: str, seed: int) -> dict[str, list[bytes]]:
    found = {}
    with group(ctx), torch_group(ctx):
        for name, make in OPTIMIZERS.items():
            ours, theirs = Net(seed), Net(seed)
            ours_step, theirs_step = make(ours), make(theirs)
            wrapped, ddp = wrap(kind, ours, ours_step), nn.parallel.DistributedDataParallel(theirs)
            for step in range(STEPS):
                x, y = batch(seed, step, ctx.rank)
                for forward, optimizer in ((wrapped.forward, ours_step), (ddp, theirs_step)):
                    optimizer.zero_grad()
                    loss_of(forward, x, y).backward()
                    optimizer.step()
            wrapped.run.close()
            found[name] = close(ours, theirs, seed, name)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_those_of_torchs_ddp(pool: RankPool, world_size: int, kind: str) -> None:
    seed = int(torch.randint(1, 1000, ()))
    answers = on(pool, world_size, like_ddp, kind, seed)
    assert answers == [answers[0]] * world_size


# ---- bucket sizes, accumulation, several models ---------------------------------------------------------


def capped(ctx: RankContext, caps: list[tuple[float, float]], seed: int) -> list[tuple[int, list[bytes]]]:
    right = single(seed, "adam", ctx.world_size)
    found = []
    with group(ctx):
        for cap_mb, first_mb in caps:
            model = Net(seed)
            optimizer = OPTIMIZERS["adam"](model)
            run = bagua.attach(model, optimizer, bucket_cap_mb=cap_mb, first_bucket_mb=first_mb)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, *batch(seed, step, ctx.rank)).backward()
                optimizer.step()
            found.append((len(run.buckets), close(model, right, seed, (cap_mb, first_mb))))
            run.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_bucket_sizes_change_nothing(pool: RankPool, world_size: int) -> None:
    seed = int(torch.randint(1, 1000, ()))
    answers = on(pool, world_size, capped, [(1e-6, 1e-6), (3e-4, 1e-4), (1e-3, 1e-3), (900.0, 900.0)], seed)
    assert answers == [answers[0]] * world_size
    parameters = len(list(Net(0).parameters()))
    counts = [count for count, _ in answers[0]]
    assert counts[0] == parameters
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1


def accumulated(ctx: RankContext, kind: str, micro: int, seed: int) -> list[bytes]:
    right = Net(seed)
    right_step = OPTIMIZERS["momentum"](right)
    model = Net(seed)
    optimizer = OPTIMIZERS["momentum"](model)
    with group(ctx):
        wrapped = wrap(kind, model, optimizer)
        for step in range(3):
            right_step.zero_grad()
            for part, rank in itertools.product(range(micro), range(ctx.world_size)):
                loss = loss_of(right, *batch(seed, step * 10 + part, rank))
                (loss / ctx.world_size / micro).backward()
            right_step.step()
            optimizer.zero_grad()
            with wrapped.run.no_sync():
                for part in range(micro - 1):
                    (loss_of(wrapped.forward, *batch(seed, step * 10 + part, ctx.rank)) / micro).backward()
            (loss_of(wrapped.forward, *batch(seed, step * 10 + micro - 1, ctx.rank)) / micro).backward()
            optimizer.step()
        wrapped.run.close()
    return close(model, right, seed, f"{micro} micro-batches")


@pytest.mark.parametrize("micro", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulation_is_one_larger_batch(pool: RankPool, world_size: int, kind: str, micro: int) -> None:
    seed = int(torch.randint(1, 1000, ()))
    answers = on(pool, world_size, accumulated, kind, micro, seed)
    assert answers == [answers[0]] * world_size


def two_models(ctx: RankContext, kind: str, together: bool, seed: int) -> list[list[bytes]]:
    right = [single(seed, "adam", ctx.world_size), single(seed + 1, "adam", ctx.world_size)]
    models = [Net(seed), Net(seed + 1)]
    optimizers = [OPTIMIZERS["adam"](model) for model in models]
    with group(ctx):
        wrapped = [wrap(kind, m, o, bucket_cap_mb=1e-3) for m, o in zip(models, optimizers, strict=True)]
        for step in range(STEPS):
            losses = []
            for i in range(2):
                optimizers[i].zero_grad()
                losses.append(loss_of(wrapped[i].forward, *batch(seed + i, step, ctx.rank)))
            if together:
                torch.stack(losses).sum().backward()
            else:
                for loss in reversed(losses):
                    loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        for each in wrapped:
            each.run.close()
    return [close(model, other, seed, together) for model, other in zip(models, right, strict=True)]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_models_in_one_process(pool: RankPool, world_size: int, kind: str, together: bool) -> None:
    seed = int(torch.randint(1, 1000, ()))
    answers = on(pool, world_size, two_models, kind, together, seed)
    assert answers == [answers[0]] * world_size
