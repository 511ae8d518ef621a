"""All ranks of OneBitAdam in float64, from the formulas (docs/algorithms.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from bagua_rt.bucket import BucketPlan

SHAPES: dict[str, tuple[int, ...]] = {"w": (5, 7), "b": (11,), "s": (), "e": (0, 3), "t": (3, 2)}
GROUPS = (("w", "s"), ("b", "e", "t"))  # each with settings of its own
SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr": 0.03, "betas": (0.8, 0.95), "weight_decay": 0.1},
    {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.0, "eps": 1e-6, "variance_floor": 0.4},
)
FROZEN_ELEMENTS = 4  # of "b": they never have a gradient
# With "sometimes": in which steps a parameter is in no rank's loss, and in which it isn't in rank 0's.
UNUSED = {"t": (1, 3, 4), "w": (3,), "s": (0, 1)}
UNUSED_HERE = {"w": (1, 4, 5)}


def target(name: str, rank: int, step: int, seed: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng([seed, rank, step, sorted(SHAPES).index(name)])
    return generator.standard_normal(SHAPES[name])


def mask(name: str) -> np.ndarray[Any, Any]:
    keep = np.ones(SHAPES[name])
    if name == "b":
        keep[:FROZEN_ELEMENTS] = 0
    return keep


def start(name: str) -> np.ndarray[Any, Any]:
    return np.linspace(-1, 1, int(np.prod(SHAPES[name]))).reshape(SHAPES[name])


class Simulation:
    """All ranks in float64, by algorithms.md section 10 alone."""

    def __init__(
        self,
        world_size: int,
        warmup: int,
        *,
        decoupled: bool,
        plans: tuple[BucketPlan, ...],
        how: str = "plain",
    ) -> None:
        self.n, self.warmup, self.decoupled, self.plans = world_size, warmup, decoupled, plans
        self.x = {name: start(name) for name in SHAPES}
        self.m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.t = 0
        self.how = how
        self.steps = dict.fromkeys(SHAPES, 0)
        self.variance_steps = dict.fromkeys(SHAPES, 0)
        sizes = [-(-plan.numel // (8 * world_size)) * 8 for plan in plans]
        self.worker = [np.zeros((world_size, world_size, size)) for size in sizes]
        self.server = [np.zeros((world_size, size)) for size in sizes]

    def is_used(self, name: str) -> bool:
        return self.how != "sometimes" or self.t not in UNUSED.get(name, ())

    def settings(self, name: str) -> dict[str, Any]:
        own = next(s for names, s in zip(GROUPS, SETTINGS, strict=True) if name in names)
        return {"eps": 1e-8, "variance_floor": 0.0, **own}

    def gradient(self, name: str, rank: int, seed: int) -> np.ndarray[Any, Any]:
        """With L2 weight decay, which is part of the gradient."""
        own: np.ndarray[Any, Any] = (self.x[name] - target(name, rank, self.t, seed)) * mask(name)
        if self.how == "sometimes" and rank == 0 and self.t in UNUSED_HERE.get(name, ()):
            own = np.zeros_like(own)
        decay = 0.0 if self.decoupled else self.settings(name)["weight_decay"]
        return own + decay * self.x[name]

    def step(self, seed: int) -> None:
        used = [name for name in SHAPES if self.is_used(name)]
        for name in used:
            self.steps[name] += 1
        if self.t < self.warmup:
            for name in used:
                self.variance_steps[name] += 1
                b1, b2 = self.settings(name)["betas"]
                g = sum(self.gradient(name, rank, seed) for rank in range(self.n)) / self.n
                self.m[name] = b1 * self.m[name] + (1 - b1) * g
                self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
        else:
            self.momentum_by_compression(seed)
        self.t += 1
        for name in used:
            own, v_steps = self.settings(name), self.variance_steps[name]
            b1, b2 = own["betas"]
            if self.decoupled:
                self.x[name] = self.x[name] * (1 - own["lr"] * own["weight_decay"])
            if not v_steps:  # its first gradient came after the warm-up
                continue
            root = np.sqrt(self.v[name] / (1 - b2**v_steps)) + own["eps"]
            self.x[name] = self.x[name] - own["lr"] / (1 - b1 ** self.steps[name]) * self.m[name] / root
        for name, v in self.v.items():
            if self.t == self.warmup and (v > 0).any():
                floor = self.settings(name)["variance_floor"] * v[v > 0].mean()
                self.v[name] = np.where(v > 0, np.maximum(v, floor), 0.0)

    def momentum_by_compression(self, seed: int) -> None:
        local = [{name: self.local_momentum(name, rank, seed) for name in SHAPES} for rank in range(self.n)]
        for index, plan in enumerate(self.plans):
            size = self.worker[index].shape[2]
            flats = []
            for momenta in local:
                parts = [momenta[name].ravel() for name in plan.names]
                flats.append(np.concatenate([*parts, np.zeros(size * self.n - plan.numel)]))
            flat = flats[0] if self.n == 1 else self.compressed_mean(index, plan.numel, flats)
            for slot in plan.slots:
                part = flat[slot.offset : slot.offset + slot.spec.numel].reshape(slot.spec.shape)
                if self.is_used(slot.spec.name):
                    self.m[slot.spec.name] = np.where(self.v[slot.spec.name] > 0, part, 0.0)

    def local_momentum(self, name: str, rank: int, seed: int) -> np.ndarray[Any, Any]:
        if not self.is_used(name):
            return np.zeros(SHAPES[name])
        b1: float = self.settings(name)["betas"][0]
        return b1 * self.m[name] + (1 - b1) * self.gradient(name, rank, seed)

    def compressed_mean(
        self, index: int, numel: int, flats: list[np.ndarray[Any, Any]]
    ) -> np.ndarray[Any, Any]:
        size = self.worker[index].shape[2]
        chunks = []
        for owner in range(self.n):
            valid = min(max(numel - owner * size, 0), size)
            coded = []
            for rank, flat in enumerate(flats):
                u = flat[owner * size : (owner + 1) * size] + self.worker[index][rank, owner]
                coded.append(signs(u, valid))
                self.worker[index][rank, owner] = np.where(np.arange(size) < valid, u - coded[-1], 0.0)
            y = sum(coded) / self.n + self.server[index][owner]
            chunks.append(signs(y, valid))
            self.server[index][owner] = np.where(np.arange(size) < valid, y - chunks[-1], 0.0)
        return np.concatenate(chunks)


def signs(u: np.ndarray[Any, Any], valid: int) -> np.ndarray[Any, Any]:
    """mean|u| (a float32, as on the wire) times sign(u)."""
    scale = float(np.float32(np.abs(u[:valid]).mean())) if valid else 0.0
    return np.where(u >= 0, scale, -scale)
