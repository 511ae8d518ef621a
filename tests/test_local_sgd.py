"""LocalSGD and DiLoCo against a float64 simulation of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bagua_rt as bagua
from bagua_rt.algorithms import LocalSGD
from tests import zoo
from tests.micro import caught, group, on
from tests.ranks import RankContext, RankPool
from tests.zoo import LR, SHAPES, Trainer

MU = 0.9  # of the inner optimizer's momentum


def simulate(n: int, steps: int, seed: int, algorithm: LocalSGD, skipped: dict[int, set[int]]) -> Any:
    """Each rank's weights and momenta, by name."""
    x = {name: np.stack([zoo.start(name)] * n) for name in SHAPES}
    inner = {name: np.zeros_like(x[name]) for name in SHAPES}
    anchor = {name: x[name].mean(0) for name in SHAPES}
    outer = {name: np.zeros_like(anchor[name]) for name in SHAPES}
    for t in range(steps):
        for name in SHAPES:
            for rank in range(n):
                if t in skipped.get(rank, set()):
                    continue
                gradient = x[name][rank] - zoo.target(name, rank, t, seed)
                inner[name][rank] = MU * inner[name][rank] + gradient
                x[name][rank] -= LR * inner[name][rank]
            if (t + 1) % algorithm.interval:
                continue
            mean = x[name].mean(0)
            if algorithm.outer_step:
                d = anchor[name] - mean
                outer[name] = algorithm.outer_momentum * outer[name] + d
                anchor[name] = anchor[name] - algorithm.outer_lr * (
                    d + algorithm.outer_momentum * outer[name]
                )
                mean = anchor[name]
            x[name][:] = mean
            if algorithm.average_state:
                inner[name][:] = inner[name].mean(0)
    return x, inner


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR, momentum=MU)


def trained(ctx: RankContext, algorithm: LocalSGD, how: str, seed: int) -> list[bytes]:
    skipped: dict[int, set[int]] = {1: {2, 3}} if how == "skipped" else {}
    steps = 7
    with group(ctx, **zoo.nodes(ctx)):
        trainer = Trainer(algorithm, sgd, cap_mb=2**-12 if how == "plain" else 1.0)
        for t in range(steps):
            if t in skipped.get(ctx.rank, set()):  # as a GradScaler skips
                trainer.model(ctx.rank, t, seed).backward()
                trainer.optimizer.zero_grad()
            else:
                trainer.step(ctx.rank, t, seed, how)
        trainer.run.close()
        x, inner = simulate(ctx.world_size, steps, seed, algorithm, skipped)
        for name, ours in trainer.weights().items():
            text = f"{name} {seed=} rank {ctx.rank}"
            np.testing.assert_allclose(ours, x[name][ctx.rank], rtol=1e-9, atol=1e-9, err_msg=text)
            state = trainer.optimizer.state[trainer.model.get_parameter(name)]
            np.testing.assert_allclose(
                state["momentum_buffer"], inner[name][ctx.rank], rtol=1e-9, atol=1e-9, err_msg=text
            )
        return trainer.bits()


ALGORITHMS = (
    LocalSGD(interval=1),
    LocalSGD(interval=3),
    LocalSGD(interval=7, average_state=("momentum_buffer", "no such entry")),
    LocalSGD(interval=2, outer_step=True),
    LocalSGD(interval=3, outer_step=True, outer_lr=0.5, outer_momentum=0.3, hierarchical=True),
)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_weights_are_those_of_the_simulation(pool: RankPool, world_size: int, algorithm: LocalSGD) -> None:
    for how in ("plain", "accumulated"):
        seed = zoo.seed_of_today()
        answers = on(pool, world_size, trained, algorithm, how, seed)
        if 7 % algorithm.interval == 0:
            assert answers == [answers[0]] * world_size, f"bit-equal after a round, {seed=}"


@pytest.mark.parametrize("algorithm", [ALGORITHMS[0], ALGORITHMS[1], ALGORITHMS[3]], ids=repr)
def test_a_rank_that_skips_steps_takes_part_in_the_rounds(pool: RankPool, algorithm: LocalSGD) -> None:
    on(pool, 3, trained, algorithm, "skipped", zoo.seed_of_today())


@pytest.mark.parametrize("algorithm", [ALGORITHMS[0], ALGORITHMS[3]], ids=repr)
def test_a_trainer_may_call_the_models_parts(pool: RankPool, algorithm: LocalSGD) -> None:
    on(pool, 3, trained, algorithm, "in parts", zoo.seed_of_today())


def held_by_some(ctx: RankContext, seed: int) -> None:
    """Rank 0 has no entries in the first round, and rank 2 has none any more in the second."""
    with group(ctx):
        trainer = Trainer(LocalSGD(interval=1, average_state=("momentum_buffer",)), sgd)
        param = trainer.model.get_parameter("w")
        x, inner = np.stack([zoo.start("w")] * 3), np.zeros((3, *SHAPES["w"]))
        for t, holders in enumerate(([1, 2], [0, 1], [0, 1, 2])):
            if ctx.rank not in holders:
                trainer.optimizer.state.clear()
                trainer.model(ctx.rank, t, seed).backward()
                trainer.optimizer.zero_grad()
            else:
                trainer.step(ctx.rank, t, seed)
            trainer.run.state_dict()  # completes the round
            for rank in range(3):
                gradient = x[rank] - zoo.target("w", rank, t, seed)
                inner[rank] = MU * inner[rank] + gradient if rank in holders else 0.0
                x[rank] -= LR * inner[rank]
            inner[holders] = inner[holders].mean(0)
            x[:] = x.mean(0)
            np.testing.assert_allclose(param.detach(), x[0], rtol=1e-9, atol=1e-9, err_msg=f"{seed=}")
            if ctx.rank in holders:
                buffer = trainer.optimizer.state[param]["momentum_buffer"]
                np.testing.assert_allclose(buffer, inner[ctx.rank], rtol=1e-9, atol=1e-9, err_msg=f"{seed=}")
        trainer.run.close()


def test_an_entry_is_averaged_over_the_ranks_that_have_it(pool: RankPool) -> None:
    on(pool, 3, held_by_some, zoo.seed_of_today())


def alone(ctx: RankContext, seed: int) -> bool:
    with group(ctx):
        trainer, plain = Trainer(LocalSGD(interval=2)), zoo.Bowl()
        optimizer = torch.optim.SGD(plain.parameters(), LR)
        for t in range(4):
            trainer.step(0, t, seed)
            optimizer.zero_grad()
            plain(0, t, seed).backward()
            optimizer.step()
        sent = trainer.run.statistics().bytes_sent
        trainer.run.close()
        pairs = zip(trainer.model.parameters(), plain.parameters(), strict=True)
        return sent == 0 and all(torch.equal(a, b) for a, b in pairs)


def test_one_rank_steps_as_if_alone(pool: RankPool) -> None:
    assert on(pool, 1, alone, zoo.seed_of_today()) == [True]


def evaluated(ctx: RankContext, seed: int) -> list[float]:
    """When is the round done? Only rank 0 evaluates, and only rank 1 saves."""
    with group(ctx):
        trainer = Trainer(LocalSGD(interval=2))
        found = []
        for t in range(4):
            trainer.step(ctx.rank, t, seed)
            if ctx.rank == 0:
                with torch.no_grad():
                    trainer.model(0, 0, seed)
                found.append(trainer.model.get_parameter("s").item())
            if ctx.rank == 1:
                trainer.run.state_dict()
                found.append(trainer.model.get_parameter("s").item())
        trainer.run.close()
        return found


def test_evaluation_and_checkpoints_see_the_mean(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    first, second = on(pool, 2, evaluated, seed)
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, True] * 2, f"{seed=}"


@pytest.mark.parametrize("algorithm", [LocalSGD(interval=1), LocalSGD(interval=1, outer_step=True)], ids=repr)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_parameters_and_mixed_dtypes(pool: RankPool, world_size: int, algorithm: LocalSGD) -> None:
    seed = zoo.seed_of_today()
    if algorithm.outer_step:
        answers = on(pool, world_size, odd_outer, algorithm, seed)
    else:  # the mean of the weights after one SGD step is the step with the mean gradient
        answers = on(pool, world_size, zoo.odd_models, algorithm, seed, 0.01)
    assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"


def odd_outer(ctx: RankContext, algorithm: LocalSGD, seed: int) -> list[bytes]:
    with group(ctx):
        trainer = Trainer(algorithm, dtype=torch.float32, extras=True, cap_mb=2**-10)
        for t in range(4):
            trainer.step(ctx.rank, t, seed)
        state = trainer.run.state_dict()["state"]
        assert state["anchor"]["rounded"].dtype is state["momentum"]["rounded"].dtype is torch.float32
        trainer.run.close()
        assert trainer.model.unused.tolist() == [3.0] * 4, f"{seed=}"
        kept = {k: v for k, v in trainer.model.named_parameters() if k != "ignored" and v.numel()}
        assert all(
            torch.isfinite(torch.view_as_real(v) if v.is_complex() else v).all() for v in kept.values()
        )
        return [v.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes() for v in kept.values()]


def make() -> Trainer:
    return Trainer(LocalSGD(interval=2, outer_step=True), sgd, torch.float32, cap_mb=2**-12)


@pytest.mark.parametrize("save_at", [1, 2, 3])
def test_a_checkpoint_resumes_bit_equal(pool: RankPool, save_at: int) -> None:
    seed = zoo.seed_of_today()
    assert on(pool, 3, zoo.resumed, make, save_at, 7, seed) == [True] * 3, f"{seed=}"


def test_a_backward_that_raised_moves_nothing(pool: RankPool) -> None:
    on(pool, 3, zoo.lost_backward, make, zoo.seed_of_today())


def test_switches_to_and_from_others(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    settings: list[tuple[str, dict[str, Any]]] = [
        ("local_sgd", {"interval": 1, "outer_step": True}),
        ("decentralized", {}),
        ("gradient_allreduce", {}),
        ("local_sgd", {"interval": 1}),
        ("bytegrad", {}),
    ]
    answers = on(pool, 3, zoo.switched, settings, seed)
    assert answers[0][2] != answers[1][2], (
        f"they differ after decentralized: no switch evens them out, {seed=}"
    )


def differing(ctx: RankContext, seed: int) -> list[bytes]:
    with group(ctx):
        trainer = Trainer(bagua.Decentralized())
        trainer.step(ctx.rank, 0, seed)
        late = trainer.model.get_parameter("b")
        late.requires_grad_(False)
        trainer.run.switch(LocalSGD(interval=1, outer_step=True))
        for t in (1, 2):
            trainer.step(ctx.rank, t, seed)
            late.requires_grad_(True)
        trainer.run.close()
        return trainer.bits()


def test_after_a_switch_from_ranks_that_differ_the_outer_step_makes_them_equal(pool: RankPool) -> None:
    answers = on(pool, 3, differing, zoo.seed_of_today())
    assert answers == [answers[0]] * 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"interval": 0}, "interval"),
        ({"interval": True}, "interval"),
        ({"outer_lr": 0.0}, "outer_lr"),
        ({"outer_momentum": 1.0}, "outer_momentum"),
        ({"average_state": ["exp_avg"]}, "average_state"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], text: str) -> None:
    assert caught(lambda: bagua.algorithms.create("local_sgd", **settings))[0] == "UsageError"
    with pytest.raises(bagua.errors.UsageError, match=text):
        LocalSGD(**settings)


def test_it_needs_the_optimizer() -> None:
    with bagua.init("cpu"), pytest.raises(bagua.errors.UsageError, match="knows no optimizer"):
        bagua.attach(zoo.Bowl(), (), LocalSGD())
