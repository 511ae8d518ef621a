"""QAdam against torch's Adam, and against a float64 simulation of all ranks that codes by numpy's oracle."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.algorithms.compression import MinMaxCodec
from tests import kernel_oracles as oracles
from tests import zoo
from tests.micro import caught, group, on
from tests.ranks import RankContext, RankPool
from tests.zoo import SHAPES, Array, Trainer

FIRST = ("w", "s")  # of two groups with settings of their own
SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr": 0.03, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-3},
    {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.0, "eps": 1e-2},
)


def make_optimizer(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    named = [(k, p) for k, p in model.named_parameters() if p.requires_grad and k not in ("ignored", "spin")]
    groups = [
        {"params": [p for k, p in named if (k in FIRST) is is_first], **own}
        for is_first, own in zip((True, False), SETTINGS, strict=True)
    ]
    return bagua.optim.QAdam(groups, **settings)


class Side:
    """What one member of the compressed mean keeps."""

    def __init__(self, n: int, columns: int, feedback: bool) -> None:
        self.feedback = feedback
        self.worker = np.zeros((n, columns))
        self.server = np.zeros((1, columns))

    def code(self, which: str, values: Array, numel: int, first: int) -> Array:
        error = getattr(self, which)
        wanted = values + error
        wire = oracles.minmax_encode(wanted, numel, first)
        coded: Array = oracles.minmax_decode(wire, values.shape[1], np.float64)
        if self.feedback:
            setattr(self, which, wanted - coded)
        return coded


def mean_of(flats: list[Array], numel: int, sides: list[Side]) -> Array:
    n = len(flats)
    coded = [
        side.code("worker", flat.reshape(n, -1), numel, 0) for side, flat in zip(sides, flats, strict=True)
    ]
    columns = flats[0].size // n
    chunks = []
    for owner, side in enumerate(sides):
        mean = np.sum([rows[owner] / n for rows in coded], axis=0)
        chunks.append(side.code("server", mean[None], numel, owner * columns)[0])
    return np.concatenate(chunks)


class Simulation:
    """All ranks, by algorithms.md sections 3.5 and 10."""

    def __init__(
        self,
        n: int,
        warmup: int,
        decoupled: bool,
        feedback: bool,
        plans: Any,
        members: list[list[int]],
        is_deep: bool,
    ) -> None:
        self.n, self.warmup, self.decoupled, self.plans, self.members = n, warmup, decoupled, plans, members
        self.x = {name: zoo.start(name) for name in SHAPES}
        self.m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.is_deep = is_deep
        k = len(members)
        self.sides = [
            [Side(k, -(-plan.numel // (16 * k)) * 16, feedback) for _ in range(k)] for plan in plans
        ]

    def gradient(self, name: str, rank: int, t: int, seed: int) -> Array:
        decay = 0.0 if self.decoupled else SETTINGS[name not in FIRST]["weight_decay"]
        own: Array = self.x[name] - zoo.target(name, rank, t, seed) + decay * self.x[name]
        return own

    def step(self, t: int, seed: int) -> None:
        if t < self.warmup:
            for name in SHAPES:
                b1, b2 = SETTINGS[name not in FIRST]["betas"]
                g = sum(self.gradient(name, rank, t, seed) for rank in range(self.n)) / self.n
                self.m[name] = b1 * self.m[name] + (1 - b1) * g
                self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
        else:
            self.average_momenta(t, seed)
        for name in SHAPES:
            own = SETTINGS[name not in FIRST]
            b1, b2 = own["betas"]
            if self.decoupled:
                self.x[name] = self.x[name] * (1 - own["lr"] * own["weight_decay"])
            root = np.sqrt(self.v[name] / (1 - b2 ** min(t + 1, self.warmup))) + own["eps"]
            self.x[name] = self.x[name] - own["lr"] / (1 - b1 ** (t + 1)) * self.m[name] / root

    def average_momenta(self, t: int, seed: int) -> None:
        local = []
        for rank in range(self.n):
            momenta = {}
            for name in SHAPES:
                b1 = SETTINGS[name not in FIRST]["betas"][0]
                momenta[name] = b1 * self.m[name] + (1 - b1) * self.gradient(name, rank, t, seed)
            local.append(zoo.flats(self.plans, momenta.__getitem__))
        means = []
        for index, plan in enumerate(self.plans):
            parts, factor = [flats[index] for flats in local], 1
            if self.is_deep:  # the leaders see their nodes' sums of momenta / n
                parts = [np.sum([local[r][index] / self.n for r in node], axis=0) for node in self.members]
                factor = len(parts)
            mean = parts[0] if len(parts) == 1 else mean_of(parts, plan.numel, self.sides[index])
            means.append(mean * factor)
        self.m.update(zoo.unflat(self.plans, means))


def assert_same_but_for_ties(ours: Any, right: Array, text: str) -> None:
    """Equal up to rounding; what lies between two codes may have been given the other one.

    The owner's means of codes tie together: those of one pair of codes are one number.
    """
    off = np.abs(np.asarray(ours) - right) > 1e-8 * (1 + np.abs(right))
    if off.sum() > max(2, off.size // 100):
        np.testing.assert_allclose(ours, right, rtol=1e-8, atol=1e-8, err_msg=text)
    np.testing.assert_allclose(ours, right, atol=0.02, err_msg=text)  # a code's step, and what it moves


def trained(
    ctx: RankContext, warmup: int, decoupled: bool, feedback: bool, hierarchical: bool, how: str, seed: int
) -> list[bytes]:
    steps = warmup + 4
    settings: dict[str, Any] = {"warmup_steps": warmup, "decoupled_weight_decay": decoupled}
    with group(ctx, **zoo.nodes(ctx)):
        make = partial(make_optimizer, error_feedback=feedback, hierarchical=hierarchical, **settings)
        trainer = Trainer(None, make, cap_mb=2**-12 if how == "plain" else 1.0)
        for t in range(steps):
            trainer.step(ctx.rank, t, seed, how)
        plans = trainer.run.buckets
        errors = trainer.run.state_dict()["state"]["errors"]
        trainer.run.close()
        members = (
            zoo.members_of_nodes(ctx.world_size) if hierarchical else [[r] for r in range(ctx.world_size)]
        )
        right = Simulation(ctx.world_size, warmup, decoupled, feedback, plans, members, hierarchical)
        for t in range(steps):
            right.step(t, seed)
        for name, ours in trainer.weights().items():
            text = f"{name} {seed=} rank {ctx.rank}"
            assert_same_but_for_ties(ours, right.x[name], text)
            momentum = trainer.optimizer.state[trainer.model.get_parameter(name)]["exp_avg"]
            assert_same_but_for_ties(momentum, right.m[name], text)
        place = [node[0] for node in members]
        if len(members) == 1 or ctx.rank not in place:
            assert not errors
        for sides, found in zip(right.sides, errors, strict=False):
            mine = sides[place.index(ctx.rank)]
            assert len(found) == 2 * feedback
            for own, error in zip(found, (mine.worker, mine.server), strict=False):
                assert_same_but_for_ties(own, error, f"{seed=} rank {ctx.rank}")
        return trainer.bits()


@pytest.mark.parametrize(("decoupled", "feedback"), [(False, True), (True, False)])
@pytest.mark.parametrize(("world_size", "warmup"), [*itertools.product((1, 2, 3), (1, 3)), (4, 1), (5, 3)])
def test_both_stages_are_what_the_formulas_say(
    pool: RankPool, world_size: int, warmup: int, decoupled: bool, feedback: bool
) -> None:
    seed = zoo.seed_of_today()
    how = "plain" if warmup == 1 else "accumulated"
    answers = on(pool, world_size, trained, warmup, decoupled, feedback, False, how, seed)
    assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_the_hierarchical_form(pool: RankPool, world_size: int) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, world_size, trained, 2, False, True, True, "plain", seed)
    assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"


def odd(ctx: RankContext, seed: int) -> list[bytes]:
    with group(ctx):
        make = partial(make_optimizer, warmup_steps=2)
        model = zoo.Bowl(torch.float32, extras=True)
        model.spin.requires_grad_(False)  # complex: refused by name, see below
        optimizer = make(model)
        run = bagua.attach(
            model, optimizer, bucket_cap_mb=2**-10, first_bucket_mb=2**-10, find_unused_parameters=True
        )
        for t in range(5):
            optimizer.zero_grad()
            model(ctx.rank, t, seed).backward()
            optimizer.step()
        run.close()
        assert model.unused.tolist() == [3.0] * 4, f"{seed=}"
        kept = {k: v for k, v in model.named_parameters() if k != "ignored" and v.numel()}
        return [v.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes() for v in kept.values()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_parameters_and_mixed_dtypes(pool: RankPool, world_size: int) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, world_size, odd, seed)
    assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"


def test_complex_parameters_are_refused_by_name() -> None:
    with bagua.init("cpu"):
        model = zoo.Bowl(extras=True)
        optimizer = make_optimizer(model, warmup_steps=1)
        optimizer.add_param_group({"params": [model.spin]})
        kind, text = caught(lambda: bagua.attach(model, optimizer))
    assert kind == "UsageError"
    assert "qadam can't carry the parameter 'spin'" in text


def warm_up(ctx: RankContext, decoupled: bool, seed: int) -> bool:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    with group(ctx):
        ours = Trainer(
            None,
            lambda model: bagua.optim.QAdam(
                model.parameters(), 0.01, weight_decay=0.1, warmup_steps=9, decoupled_weight_decay=decoupled
            ),
            torch.float32,
        )
        theirs = Trainer(
            bagua.GradientAllReduce(),
            lambda model: kind(model.parameters(), 0.01, weight_decay=0.1),
            torch.float32,
        )
        for t in range(4):
            ours.step(ctx.rank, t, seed)
            theirs.step(ctx.rank, t, seed)
        same = ours.bits() == theirs.bits()
        ours.run.close()
        theirs.run.close()
        return same


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_warm_up_is_torchs_optimizer(pool: RankPool, decoupled: bool) -> None:
    assert on(pool, 2, warm_up, decoupled, zoo.seed_of_today()) == [True, True]


def make() -> Trainer:
    return Trainer(None, partial(make_optimizer, warmup_steps=2), torch.float32, cap_mb=2**-12)


def settling() -> Trainer:
    """Looks at its variance every two steps; it has settled in the second look, or later."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return bagua.optim.QAdam(
            model.parameters(), 0.01, (0.9, 0.5), 1e-2, warmup_steps=1, settled_ratio=0.1
        )

    return Trainer(None, optimizer, torch.float32, cap_mb=2**-12)


@pytest.mark.parametrize("save_at", [1, 2, 3, 4])
def test_a_checkpoint_resumes_bit_equal_in_both_stages(pool: RankPool, save_at: int) -> None:
    seed = zoo.seed_of_today()
    assert on(pool, 3, zoo.resumed, make, save_at, 6, seed) == [True] * 3, f"{seed=}"
    assert on(pool, 3, zoo.resumed, settling, save_at, 6, seed) == [True] * 3, f"{seed=}"


@pytest.mark.parametrize("broken_step", [1, 3])
def test_a_gradient_scaler_skips_on_all_ranks_or_none(pool: RankPool, broken_step: int) -> None:
    zoo.check_scaled(on(pool, 3, zoo.scaled, make, broken_step, zoo.seed_of_today()), broken_step)


def joined(ctx: RankContext, counts: tuple[int, int], seed: int) -> tuple[str, str]:
    with group(ctx):
        trainer = make()

        def train() -> None:
            with trainer.run.join():
                for t in range(counts[ctx.rank]):
                    trainer.step(ctx.rank, t, seed)

        found = caught(train)
        trainer.run.close()
        return found


@pytest.mark.parametrize(
    ("counts", "text"), [((3, 5), "join() can't go on"), ((1, 5), "the stage of the algorithm")]
)
def test_join_ends_with_the_warm_up(pool: RankPool, counts: tuple[int, int], text: str) -> None:
    for kind, found in on(pool, 2, joined, counts, zoo.seed_of_today(), timeout=20.0):
        assert kind in ("UsageError", "LayoutMismatchError")
        assert text in found


def late() -> Trainer:
    return Trainer(None, partial(make_optimizer, warmup_steps=1), torch.float32)


@pytest.mark.parametrize("maker", [make, late])
def test_a_backward_that_raised_moves_nothing(pool: RankPool, maker: Any) -> None:
    answers = on(pool, 3, zoo.lost_backward, maker, zoo.seed_of_today())
    assert answers == [answers[0]] * 3


def changed(ctx: RankContext, seed: int) -> list[list[bytes]]:
    """From averaged gradients to qadam, to onebit_adam with the same optimizer, and back."""
    with group(ctx):
        trainer = late()
        found = []
        names = ("gradient_allreduce", "qadam", "onebit_adam", "qadam")
        for t, name in enumerate(names):
            before = trainer.bits()
            trainer.run.switch(bagua.algorithms.create(name))
            assert trainer.bits() == before
            trainer.step(ctx.rank, t, seed)
            found.append(trainer.bits())
        trainer.run.close()
        return found


def test_switches_to_and_from_others(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, 3, changed, seed)
    assert answers[0] == answers[1] == answers[2], f"{seed=}"


def sent(ctx: RankContext, numel: int) -> list[int]:
    with group(ctx):
        model = nn.Linear(numel, 1, bias=False)
        optimizer = bagua.optim.QAdam(model.parameters(), warmup_steps=1)
        run = bagua.attach(model, optimizer)
        counts = []
        for _ in range(2):
            before = run.statistics().bytes_sent
            optimizer.zero_grad()
            model(torch.ones(1, numel)).sum().backward()
            optimizer.step()
            counts.append(run.statistics().bytes_sent - before)
        run.close()
        return counts


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bytes_on_the_wire_are_a_quarter_after_the_warm_up(pool: RankPool, world_size: int) -> None:
    for first, second in on(pool, world_size, sent, 100_003):
        assert second <= 0.26 * first
        assert (second == 0) is (world_size == 1)


def test_an_overflow_leaves_no_error_behind() -> None:
    with bagua.init("cpu") as made:
        backend = made._job.backend
        codec, stream = MinMaxCodec(backend.kernels, backend.device), backend.device.compute_stream()
        values, error = torch.ones(1, 4096), torch.full((1, 4096), 0.25)
        values[0, 7] = error[0, 7] = 3e38
        wire = torch.empty(1, codec.row_bytes(4096, torch.float32), dtype=torch.uint8)
        codec.encode(values, error, 4096, 0, wire, stream)
    assert not error[0, :2048].any(), "its chunk is NaN on all ranks, once"
    assert error[0, 2048:].isfinite().all()


def test_a_copy_knows_its_warm_up() -> None:
    settings: dict[str, Any] = {"warmup_steps": 3, "error_feedback": False, "variance_floor": 0.1}
    settings["settled_ratio"] = 0.96
    optimizer = bagua.optim.QAdam([torch.zeros(2, requires_grad=True)], **settings)
    twin = copy.deepcopy(optimizer)
    assert twin.warmup_steps == 3
    assert twin.algorithm == optimizer.algorithm
    assert not twin.variance_is_frozen
    assert twin.param_groups[0]["variance_floor"] == 0.1
    assert twin.settled_ratio == 0.96


@pytest.mark.parametrize("settings", [{"warmup_steps": 0}, {"warmup_steps": 1, "lr": -1.0}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(bagua.errors.UsageError):
        bagua.optim.QAdam([torch.zeros(1, requires_grad=True)], **settings)
