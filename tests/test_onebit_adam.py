"""OneBitAdam against torch's optimizers, and against a float64 simulation of all ranks by the formulas.

The model is a bowl: rank r's gradient at step t is ``x - target(r, t)``, so a simulation knows every rank's.
"""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.bucket import BucketPlan
from tests.micro import caught, group, on
from tests.onebit_simulation import (
    FROZEN_ELEMENTS,
    GROUPS,
    SETTINGS,
    SHAPES,
    UNUSED,
    UNUSED_HERE,
    Simulation,
    mask,
    start,
    target,
)
from tests.ranks import RankContext, RankPool


class Bowl(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in SHAPES:
            self.register_parameter(name, nn.Parameter(torch.tensor(start(name), dtype=dtype)))

    def loss(self, rank: int, step: int, seed: int, how: str = "plain") -> torch.Tensor:
        terms = []
        for name, param in self.named_parameters():
            here = UNUSED_HERE.get(name, ()) if rank == 0 else ()
            if how == "sometimes" and step in (*UNUSED.get(name, ()), *here):
                continue
            aim = torch.tensor(target(name, rank, step, seed), dtype=param.dtype)
            terms.append((0.5 * (param - aim).square() * torch.tensor(mask(name), dtype=param.dtype)).sum())
        return torch.stack(terms).sum()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [model.get_parameter(name) for name in names], **settings}
        for names, settings in zip(GROUPS, SETTINGS, strict=True)
    ]


class Trainer:
    """One rank's training of a bowl."""

    def __init__(
        self, warmup: int, dtype: torch.dtype, *, decoupled: bool = False, cap_mb: float = 1.0
    ) -> None:
        self.model = Bowl(dtype)
        self.optimizer = bagua.optim.OneBitAdam(
            groups(self.model), warmup_steps=warmup, decoupled_weight_decay=decoupled
        )
        self.run = bagua.attach(self.model, self.optimizer, bucket_cap_mb=cap_mb, find_unused_parameters=True)

    def step(self, rank: int, step: int, seed: int, how: str = "plain") -> None:
        # Where a parameter is in nobody's loss, its gradient may be a zero that was left there.
        self.optimizer.zero_grad(set_to_none=how != "sometimes" or step != 3)
        if how == "closure":

            def closure() -> float:
                self.optimizer.zero_grad()
                loss = self.model.loss(rank, step, seed)
                loss.backward()
                return loss.item()

            assert self.optimizer.step(closure) > 0
            return
        if how == "accumulated":
            with self.run.no_sync():
                (0.25 * self.model.loss(rank, step, seed)).backward()
            (0.75 * self.model.loss(rank, step, seed)).backward()
        else:
            self.model.loss(rank, step, seed, how).backward()
        self.optimizer.step()

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: param.detach().numpy().copy() for name, param in self.model.named_parameters()}

    def slot(self, key: str) -> dict[str, np.ndarray[Any, Any]]:
        state = self.optimizer.state
        return {name: state[param][key].numpy().copy() for name, param in self.model.named_parameters()}


# ---- the simulation -------------------------------------------------------------------------------------


def simulated(
    ctx: RankContext, warmup: int, decoupled: bool, how: str, cap_mb: float, seed: int
) -> dict[str, Any]:
    steps = warmup + 5
    with group(ctx):
        trainer = Trainer(warmup, torch.float64, decoupled=decoupled, cap_mb=cap_mb)
        for t in range(steps):
            trainer.step(ctx.rank, t, seed, how)
        plans = trainer.run.buckets
        errors = trainer.run.state_dict()["state"]["errors"]
        simulation = Simulation(ctx.world_size, warmup, decoupled=decoupled, plans=plans, how=how)
        for _ in range(steps):
            simulation.step(seed)
        for name, ours in trainer.weights().items():
            np.testing.assert_allclose(
                ours, simulation.x[name], rtol=1e-6, atol=1e-6, err_msg=f"{name} {seed=}"
            )
            np.testing.assert_allclose(
                trainer.slot("exp_avg")[name], simulation.m[name], rtol=1e-6, atol=1e-6, err_msg=name
            )
        assert len(errors) == (0 if ctx.world_size == 1 else len(plans))
        for index, (worker, server) in enumerate(errors):
            np.testing.assert_allclose(worker, simulation.worker[index][ctx.rank], atol=1e-6)
            np.testing.assert_allclose(server[0], simulation.server[index][ctx.rank], atol=1e-6)
        still = trainer.weights()["b"][:FROZEN_ELEMENTS]
        if decoupled or not SETTINGS[1]["weight_decay"]:
            assert still.tolist() == start("b")[:FROZEN_ELEMENTS].tolist(), "no gradient, no motion"
        return {"bytes": [w.tobytes() for w in trainer.weights().values()], "buckets": len(plans)}


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(("world_size", "warmup"), [*itertools.product((1, 2, 3), (1, 2, 5)), (4, 1), (5, 2)])
def test_both_stages_are_what_the_formulas_say(
    pool: RankPool, world_size: int, warmup: int, decoupled: bool
) -> None:
    cap_mb = 150 / 2**20 if decoupled else 1.0  # several buckets, or one
    answers = on(pool, world_size, simulated, warmup, decoupled, "plain", cap_mb, 7 + warmup)
    assert all(found == answers[0] for found in answers)
    assert (answers[0]["buckets"] > 1) is decoupled


@pytest.mark.parametrize("how", ["closure", "accumulated", "sometimes"])
def test_closures_accumulation_and_unused_parameters(pool: RankPool, how: str) -> None:
    answers = on(pool, 3, simulated, 2, False, how, 1.0, 3)
    assert answers == [answers[0]] * 3


# ---- torch's optimizers ---------------------------------------------------------------------------------


def warm_up(ctx: RankContext, decoupled: bool, seed: int) -> list[bytes]:
    with group(ctx):
        ours = Trainer(100, torch.float32, decoupled=decoupled)
        model = Bowl(torch.float32)
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        theirs = kind(groups(model))
        run = bagua.attach(model, theirs)
        alone = Bowl(torch.float32)
        single = kind(groups(alone))
        for t in range(6):
            ours.step(ctx.rank, t, seed)
            theirs.zero_grad()
            model.loss(ctx.rank, t, seed).backward()
            theirs.step()
            single.zero_grad()
            losses = [alone.loss(rank, t, seed) for rank in range(ctx.world_size)]
            (torch.stack(losses).sum() / ctx.world_size).backward()
            single.step()
        for a, b, c in zip(ours.model.parameters(), model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(a, b), "torch's own optimizer on the same averaged gradients: the same bits"
            torch.testing.assert_close(a, c, rtol=1.3e-6, atol=5e-5)
        run.close()
        return [p.detach().numpy().tobytes() for p in ours.model.parameters()]


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_warm_up_is_torchs_optimizer(pool: RankPool, world_size: int, decoupled: bool) -> None:
    answers = on(pool, world_size, warm_up, decoupled, 11)
    assert answers == [answers[0]] * world_size


# ---- checkpoints ----------------------------------------------------------------------------------------


def resumed(ctx: RankContext, save_at: int, cap_mb: float) -> dict[str, Any]:
    def finish(trainer: Trainer, first: int) -> dict[str, Any]:
        for t in range(first, 9):
            trainer.step(ctx.rank, t, 5)
        state = trainer.run.state_dict()
        errors = [part.numpy().tobytes() for pair in state["state"]["errors"] for part in pair]
        found = {"weights": [w.tobytes() for w in trainer.weights().values()], "errors": errors}
        found["moments"] = [
            m.tobytes() for key in ("exp_avg", "exp_avg_sq") for m in trainer.slot(key).values()
        ]
        trainer.run.close()
        return found

    with group(ctx):
        trainer = Trainer(4, torch.float32, cap_mb=cap_mb)
        for t in range(save_at):
            trainer.step(ctx.rank, t, 5)
        file = io.BytesIO()
        saved = [trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.run.state_dict()]
        torch.save(saved, file)
        right = finish(trainer, save_at)
        file.seek(0)
        weights, optimizer, run = torch.load(file, weights_only=False)
        again = Trainer(4, torch.float32, cap_mb=cap_mb)
        again.model.load_state_dict(weights)
        again.optimizer.load_state_dict(optimizer)
        again.run.load_state_dict(run)
        return {"same": finish(again, save_at) == right, "errors": len(right["errors"])}


@pytest.mark.parametrize("save_at", [1, 3, 4, 5, 7])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_checkpoint_resumes_bit_equal_in_both_stages(pool: RankPool, world_size: int, save_at: int) -> None:
    for cap_mb in (1.0, 80 / 2**20):
        for found in on(pool, world_size, resumed, save_at, cap_mb):
            assert found["same"]
            assert (found["errors"] > 0) is (world_size > 1)


# ---- gradient scaling -----------------------------------------------------------------------------------


def scaled(ctx: RankContext, broken_rank: int, broken_step: int) -> dict[str, Any]:
    with group(ctx):
        trainer = Trainer(2, torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        found: dict[str, Any] = {"scales": [], "weights": [], "completed": []}
        for t in range(7):
            trainer.optimizer.zero_grad()
            loss = trainer.model.loss(ctx.rank, t, 1)
            if (ctx.rank, t) == (broken_rank, broken_step):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(trainer.optimizer)
            scaler.update()
            found["scales"].append(scaler.get_scale())
            found["weights"].append([w.tobytes() for w in trainer.weights().values()])
            found["completed"].append(trainer.optimizer.completed_steps)
        return found


@pytest.mark.parametrize("broken_step", [1, 4])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_scaler_skips_on_all_ranks_or_none(
    pool: RankPool, world_size: int, broken_step: int
) -> None:
    answers = on(pool, world_size, scaled, 1, broken_step)
    for found in answers:
        assert found == answers[0], "bit-equal, skips and scales too"
        assert found["scales"] == [1024.0 if t < broken_step else 512.0 for t in range(7)]
        assert found["weights"][broken_step] == found["weights"][broken_step - 1]
        assert found["completed"] == [t + 1 if t < broken_step else t for t in range(7)]
        assert found["weights"][6] != found["weights"][5]


# ---- arguments, and life without ranks ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"warmup_steps": 0}, "warmup_steps"),
        ({"warmup_steps": 1.5}, "warmup_steps"),
        ({"warmup_steps": True}, "warmup_steps"),
        ({"warmup_steps": 1, "lr": -1.0}, "lr is out of range"),
        ({"warmup_steps": 1, "betas": (1.0, 0.9)}, "betas is out of range"),
        ({"warmup_steps": 1, "betas": (0.9, -0.1)}, "betas is out of range"),
        ({"warmup_steps": 1, "eps": -1e-9}, "eps is out of range"),
        ({"warmup_steps": 1, "weight_decay": -0.1}, "weight_decay is out of range"),
        ({"warmup_steps": 1, "variance_floor": 1.5}, "variance_floor is out of range"),
        ({"warmup_steps": 1, "settled_ratio": 1.0}, "settled_ratio is out of range"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(bagua.errors.UsageError, match=text):
        bagua.optim.OneBitAdam([torch.zeros(1, requires_grad=True)], **settings)


def test_without_attach_it_is_the_world_of_one_rank() -> None:
    model = Bowl(torch.float64)
    optimizer = bagua.optim.OneBitAdam(groups(model), warmup_steps=2)
    plans = bagua_plan(model)
    simulation = Simulation(1, 2, decoupled=False, plans=plans)
    for t in range(5):
        assert optimizer.completed_steps == t
        assert optimizer.variance_is_frozen is (t >= 2)
        optimizer.zero_grad()
        model.loss(0, t, 1).backward()
        optimizer.step()
        simulation.step(1)
    for name, param in model.named_parameters():
        np.testing.assert_allclose(param.detach(), simulation.x[name], rtol=1e-9)
    twin = copy.deepcopy(optimizer)
    assert twin.completed_steps == 5


@pytest.mark.parametrize(("first", "warmup", "frozen_after"), [((), 1, 8), ((), 14, 16), ((2.0, 1.0), 1, 16)])
def test_the_warm_up_goes_on_until_the_variance_has_settled(
    first: tuple[float, ...], warmup: int, frozen_after: int
) -> None:
    sizes = [*first, *[0.5] * 24]
    params = [torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)]
    groups = [{"params": params[:1], "betas": (0.9, 0.75)}, {"params": params[1:], "betas": (0.9, 0.5)}]
    optimizer = bagua.optim.OneBitAdam(groups, warmup_steps=warmup, settled_ratio=0.9)
    v, looks, right = [0.0, 0.0], [0.0], False
    for t, size in enumerate(sizes, 1):
        assert optimizer.variance_is_frozen is right, t
        for k, (beta2, count) in enumerate(((0.75, 3), (0.5, 2))):
            v[k] = beta2 * v[k] + (1 - beta2) * size**2 * count
        if t % 4 == 0 and not right:  # 1/(1 - 0.75)
            looks.append(v[0] / (1 - 0.75**t) + v[1] / (1 - 0.5**t))
            right = t >= warmup and min(looks[-2:]) >= 0.9 * max(looks[-2:])
        for param in params:
            param.grad = torch.full_like(param, size)
        optimizer.step()
        if t == 9:  # what it has seen is in a checkpoint
            state = optimizer.state_dict()
            optimizer = copy.deepcopy(optimizer)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(state)
    assert optimizer.variance_is_frozen
    assert len(looks) - 1 == frozen_after // 4


def bagua_plan(model: nn.Module) -> tuple[BucketPlan, ...]:
    with bagua.init("cpu"), bagua.attach(model) as run:
        return run.buckets


def left(ctx: RankContext) -> bool:
    """After close() the momentum is formed from the local gradient, as if never attached."""
    with group(ctx):
        trainer = Trainer(1, torch.float32)
        for t in range(3):
            trainer.step(ctx.rank, t, 5)
        trainer.run.close()
        model, optimizer = copy.deepcopy((trainer.model, trainer.optimizer))
        for each, step in ((trainer.model, trainer.optimizer.step), (model, optimizer.step)):
            each.zero_grad()
            each.loss(ctx.rank, 3, 5).backward()
            step()
        return all(
            torch.equal(a, b) for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True)
        )


def test_after_close_no_momentum_of_others_is_left(pool: RankPool) -> None:
    assert on(pool, 2, left) == [True, True]


def foreign(ctx: RankContext) -> list[tuple[str, str]]:
    with group(ctx):
        model = Bowl(torch.float32)
        partial = bagua.optim.OneBitAdam([model.get_parameter("w")], warmup_steps=1)
        other = torch.optim.SGD(model.parameters(), 0.1)
        algorithm = partial.algorithm
        return [
            caught(lambda: bagua.attach(model, partial)),
            caught(lambda: bagua.attach(model, other, algorithm)),
            caught(lambda: bagua.attach(model, (), algorithm)),
            caught(lambda: bagua.attach(model, [partial, copy.deepcopy(partial)])),
            caught(lambda: bagua.attach(model, [partial, copy.deepcopy(partial)], algorithm)),
        ]


def test_parameters_outside_of_the_optimizer_are_refused_by_name(pool: RankPool) -> None:
    for partial, other, nothing, two, named in on(pool, 2, foreign):
        assert partial[0] == other[0] == nothing[0] == two[0] == named[0] == "UsageError"
        assert "got OneBitAdam, OneBitAdam" in named[1]
        assert "not in the optimizer" in partial[1]
        assert "got SGD" in other[1]
        assert "got no optimizer" in nothing[1]
        assert "several optimizers bring an algorithm" in two[1]
