"""What the algorithms' tests share: one odd model whose gradients a simulation knows, and its training.

The model is a bowl: rank r's gradient of a parameter at step t is ``mask * (x - target(r, t))``. Its
parameters are odd: at the root, in a submodule, without elements, 0-dim, tied, of several dtypes, unused,
frozen and ignored.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua_rt as bagua
from tests.micro import group
from tests.ranks import RankContext

Array = np.ndarray[Any, Any]

SHAPES: dict[str, tuple[int, ...]] = {
    "w": (5, 7),
    "b": (11,),
    "s": (),
    "e": (0, 3),
    "inner.t": (3, 2),
    "inner.wide": (9, 261),
}
LR = 0.1


def target(name: str, rank: int, step: int, seed: int) -> Array:
    """Fresh and different for each rank, step and parameter; parts of very different sizes."""
    key = int.from_bytes(name.encode()[-4:], "little")
    generator = np.random.default_rng([seed, rank, step, key])
    out = generator.standard_normal(SHAPES[name])
    return out * 10.0 ** generator.integers(-3, 1, SHAPES[name])


def start(name: str) -> Array:
    return np.linspace(-1, 1, int(np.prod(SHAPES[name]))).reshape(SHAPES[name])


class Bowl(nn.Module):
    """The model; `forward` returns the loss."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, extras: bool = False) -> None:
        super().__init__()
        self.inner = nn.Module()
        for name in SHAPES:
            owner = self.inner if "." in name else self
            value = nn.Parameter(torch.tensor(start(name), dtype=dtype))
            owner.register_parameter(name.split(".")[-1], value)
        self.extras = extras
        self.is_shuffled = False  # gradients in another order than the first plan's
        if extras:
            self.inner.twin = self.w  # tied
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.ignored = nn.Parameter(torch.full((3,), 2.0))
            self.unused = nn.Parameter(torch.full((4,), 3.0))
            self.rounded = nn.Parameter(torch.full((37,), 0.5, dtype=torch.bfloat16))
            self.shorter = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float16))
            self.spin = nn.Parameter(torch.full((5,), 1 + 1j, dtype=torch.complex64))
            self._ddp_params_and_buffers_to_ignore = ["ignored"]

    def forward(self, rank: int, step: int, seed: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name in reversed(SHAPES) if self.is_shuffled else SHAPES:
            param = self.get_parameter(name)
            aim = torch.tensor(target(name, rank, step, seed), dtype=param.dtype)
            total = total + (0.5 * (param - aim).square()).sum()
        if self.extras:
            for param in (self.rounded, self.shorter, self.ignored):
                total = total + (0.5 * (param - float(rank)).square()).sum()
            total = total + (self.spin * self.spin.conj()).real.sum() * 0.25 * (1 + rank)
        return total


class Trainer:
    """One rank's training of a bowl."""

    def __init__(
        self,
        algorithm: bagua.Algorithm | None,
        make: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        dtype: torch.dtype = torch.float64,
        *,
        extras: bool = False,
        cap_mb: float = 1.0,
        **options: Any,
    ) -> None:
        self.model = Bowl(dtype, extras=extras)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, LR) if make is None else make(self.model)
        self.run = bagua.attach(
            self.model, self.optimizer, algorithm, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb, **options
        )

    def step(self, rank: int, step: int, seed: int, how: str = "plain") -> None:
        self.optimizer.zero_grad()
        if how == "accumulated":
            with self.run.no_sync():
                (0.25 * self.model(rank, step, seed)).backward()
            (0.75 * self.model(rank, step, seed)).backward()
        elif how == "in parts":  # no forward of the model itself
            self.model.forward(rank, step, seed).backward()
        else:
            self.model(rank, step, seed).backward()
        self.optimizer.step()

    def weights(self) -> dict[str, Array]:
        return {name: self.model.get_parameter(name).detach().numpy().copy() for name in SHAPES}

    def bits(self) -> list[bytes]:
        """All parameters, as bytes."""
        return [
            p.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes() if p.numel() else b""
            for p in self.model.parameters()
        ]


def flats(plans: Sequence[Any], values: Callable[[str], Array]) -> list[Array]:
    """The contents of the buckets of `plans`, padding included."""
    found = []
    for plan in plans:
        parts = [values(name).ravel() for name in plan.names]
        found.append(np.concatenate([*parts, np.zeros(plan.padded_numel - plan.numel)]))
    return found


def unflat(plans: Sequence[Any], contents: Sequence[Array]) -> dict[str, Array]:
    """The parameters in the buckets of `plans`."""
    return {
        slot.spec.name: flat[slot.offset : slot.offset + slot.spec.numel].reshape(slot.spec.shape)
        for plan, flat in zip(plans, contents, strict=True)
        for slot in plan.slots
    }


def resumed(
    ctx: RankContext,
    make: Callable[[], Trainer],
    save_at: int,
    steps: int,
    seed: int,
    options: dict[str, Any] | None = None,
) -> bool:
    """Is a run that was saved and loaded bit-equal to one that never stopped, in weights and state?"""
    with group(ctx, **(options or {})):
        trainer = make()
        trainer.model.is_shuffled = True
        for t in range(save_at):
            trainer.step(ctx.rank, t, seed)
        # Before the model's own state: it may have to complete a round that moves the weights.
        run = trainer.run.state_dict()
        file = io.BytesIO()
        torch.save([trainer.model.state_dict(), trainer.optimizer.state_dict(), run], file)
        right = _finish(trainer, ctx, save_at, steps, seed)
        kept = repr(_bytes_of(run))
        file.seek(0)
        weights, optimizer, run = torch.load(file, weights_only=False)
        assert kept == repr(_bytes_of(run)), "what was given out changes no more"
        again = make()
        again.model.is_shuffled = True
        again.model.load_state_dict(weights)
        if save_at % 2:  # in either order
            again.run.load_state_dict(run)
        again.optimizer.load_state_dict(optimizer)
        if not save_at % 2:
            again.run.load_state_dict(run)
        return bool(_finish(again, ctx, save_at, steps, seed) == right)


def _finish(trainer: Trainer, ctx: RankContext, first: int, steps: int, seed: int) -> Any:
    for t in range(first, steps):
        trainer.step(ctx.rank, t, seed)
    state = copy.deepcopy(trainer.run.state_dict()["state"])
    found = [trainer.bits(), repr(_bytes_of(state))]
    trainer.run.close()
    return found


def _bytes_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    if isinstance(value, dict):
        return {key: _bytes_of(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_bytes_of(v) for v in value]
    return value


def seed_of_today() -> int:
    """Another one each time; it belongs into the failure's text."""
    return int(np.random.default_rng().integers(1, 10**6))


NODES: dict[int, tuple[int, ...]] = {1: (1,), 2: (1, 1), 3: (2, 1), 4: (1, 3), 5: (2, 1, 2)}


def nodes(ctx: RankContext) -> dict[str, int]:
    """What init() must be told for the ranks to be on nodes of unequal sizes."""
    sizes = [size for size in NODES[ctx.world_size] for _ in range(size)]
    return {"local_world_size": sizes[ctx.rank]}


def members_of_nodes(world_size: int) -> list[list[int]]:
    """The ranks of each node."""
    ranks = iter(range(world_size))
    return [[next(ranks) for _ in range(size)] for size in NODES[world_size]]


def odd_models(ctx: RankContext, algorithm: bagua.Algorithm, seed: int, tolerance: float) -> list[bytes]:
    """Train the model with everything odd in it; compare with plain averaging within `tolerance`.

    Two ranks are one node here, three are nodes of unequal sizes.
    """
    with group(ctx, **(nodes(ctx) if ctx.world_size > 2 else {})):
        found = []
        for chosen in (algorithm, bagua.GradientAllReduce()):
            trainer = Trainer(
                chosen,
                dtype=torch.float32,
                extras=True,
                cap_mb=2**-10,
                find_unused_parameters=True,
            )
            for t in range(3):
                trainer.step(ctx.rank, t, seed, "accumulated" if t == 1 else "plain")
            model = trainer.model
            assert model.unused.grad is None, f"{seed=}"
            assert model.unused.tolist() == [3.0] * 4, f"{seed=}"
            assert model.frozen.tolist() == [1.0] * 3, f"{seed=}"
            assert model.inner.twin is model.w
            trainer.run.close()
            found.append(trainer)
        mine, plain = found
        for (name, a), b in zip(mine.model.named_parameters(), plain.model.parameters(), strict=True):
            text = f"{name} {seed=}: " + "{}"
            off = min(tolerance, 1e-5) if a.is_complex() else tolerance  # what no codec carries is averaged
            torch.testing.assert_close(a, b, rtol=off, atol=off, msg=text.format)
        own = dict(mine.model.named_parameters())
        return [
            p.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, p in own.items()
            if p.numel() and name != "ignored"
        ]


def scaled(ctx: RankContext, make: Callable[[], Trainer], broken_step: int, seed: int) -> dict[str, Any]:
    """A GradScaler meets an infinity on the last rank in one step."""
    with group(ctx):
        trainer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        found: dict[str, Any] = {"scales": [], "weights": []}
        for t in range(5):
            trainer.optimizer.zero_grad()
            loss = trainer.model(ctx.rank, t, seed)
            if (ctx.rank, t) == (ctx.world_size - 1, broken_step):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(trainer.optimizer)
            scaler.update()
            found["scales"].append(scaler.get_scale())
            found["weights"].append(trainer.bits())
        trainer.run.close()
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters()), f"{seed=}"
        return found


def check_scaled(answers: Sequence[dict[str, Any]], broken_step: int) -> None:
    """All ranks skipped that step and no other, and went on alike."""
    for found in answers:
        assert found == answers[0], "bit-equal, skips and scales too"
        assert found["scales"] == [1024.0 if t < broken_step else 512.0 for t in range(5)]
        assert found["weights"][broken_step] == found["weights"][broken_step - 1]
        assert found["weights"][4] != found["weights"][3]


def switched(
    ctx: RankContext, settings: Sequence[tuple[str, dict[str, Any]]], seed: int
) -> list[list[bytes]]:
    """Go through algorithms by name, one step of each, and back; weights are moved by no switch."""
    with group(ctx, **nodes(ctx)):
        algorithms = [bagua.algorithms.create(name, **given) for name, given in settings]
        trainer = Trainer(algorithms[0], dtype=torch.float32)
        bits = []
        for t, algorithm in enumerate([*algorithms[1:], algorithms[0], *algorithms[1:]]):
            trainer.step(ctx.rank, t, seed)
            trainer.run.state_dict()  # completes a round that follows the step
            before = trainer.bits()
            trainer.run.switch(algorithm)
            assert trainer.bits() == before, f"{algorithm} {seed=}"
            trainer.step(ctx.rank, t, seed)
            assert trainer.bits() != before, f"{algorithm} {seed=}"
            bits.append(trainer.bits())
        trainer.run.close()
        return bits


def _errors_of(trainer: Trainer) -> list[torch.Tensor]:
    """What the algorithm's compression has lost; also completes a round that follows the step."""
    state = trainer.run.state_dict()["state"]
    return [part for pair in state.get("errors", ()) for part in pair] + [*state.get("error", {}).values()]


def lost_backward(ctx: RankContext, make: Callable[[], Trainer], seed: int) -> list[bytes]:
    """One rank's backward raises; all ranks hear of it, nothing moves, and the next steps are right."""
    with group(ctx):
        trainer = make()
        queries = trainer.run.state_dict()["state"].get("query", {})
        for t in range(2):
            trainer.step(ctx.rank, t, seed)
        kept = _errors_of(trainer)
        assert not kept or any(error.any() for error in kept), f"{seed=}"
        before = trainer.bits()

        def fail(_: torch.Tensor) -> None:
            raise KeyError("planted")

        trainer.optimizer.zero_grad()
        loss = trainer.model(ctx.rank, 1, seed)
        if ctx.rank == ctx.world_size - 1:
            handle = trainer.model.get_parameter("w").register_hook(fail)
            with pytest.raises(KeyError, match="planted"):
                loss.backward()
            handle.remove()
            with pytest.raises(bagua.errors.BaguaError):
                trainer.optimizer.step()
        else:
            with pytest.raises(bagua.errors.PeerError):
                loss.backward()
        assert trainer.bits() == before, f"{seed=}"
        assert not any(error.any() for error in _errors_of(trainer)), f"an error was kept, {seed=}"
        for name, query in queries.items():
            assert torch.equal(trainer.run.state_dict()["state"]["query"][name], query), f"{name} {seed=}"
        for t in range(1, 4):
            trainer.step(ctx.rank, t, seed)
        bits = trainer.bits()
        trainer.run.close()
        return bits
