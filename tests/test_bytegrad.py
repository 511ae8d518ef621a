"""ByteGrad against a float64 simulation of all ranks that codes by numpy's oracle of the codec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bagua_rt as bagua
from tests import kernel_oracles as oracles
from tests import zoo
from tests.micro import caught, group, on
from tests.ranks import RankContext, RankPool
from tests.zoo import LR, SHAPES, Array, Trainer


def compressed_mean(rows_of: list[Array], numel: int) -> Array:
    """Both phases; ``rows_of[r]`` is rank r's padded buffer."""
    n = len(rows_of)
    coded = [oracles.minmax_encode(flat.reshape(n, -1), numel, 0) for flat in rows_of]
    columns = rows_of[0].size // n
    chunks = []
    for owner in range(n):
        mine = [oracles.minmax_decode(wire[owner : owner + 1], columns, np.float64)[0] for wire in coded]
        mean = sum(row / n for row in mine)
        wire = oracles.minmax_encode(np.asarray(mean)[None], numel, owner * columns)
        chunks.append(oracles.minmax_decode(wire, columns, np.float64)[0])
    return np.concatenate(chunks)


def simulate(n: int, steps: int, seed: int, plans: Any, members: list[list[int]] | None) -> dict[str, Array]:
    x = {name: zoo.start(name) for name in SHAPES}
    for t in range(steps):
        flats = []
        for rank in range(n):
            gradients = {name: x[name] - zoo.target(name, rank, t, seed) for name in SHAPES}
            flats.append(zoo.flats(plans, lambda name, g=gradients: g[name]))
        means = []
        for index, plan in enumerate(plans):
            if members is None:
                parts, factor = [flat[index] for flat in flats], 1
            else:
                parts = [np.sum([flats[r][index] / n for r in node], axis=0) for node in members]
                factor = len(members)
            coded = parts[0] if len(parts) == 1 else compressed_mean(parts, plan.numel) * factor
            means.append(coded)
        for name, g in zoo.unflat(plans, means).items():
            x[name] = x[name] - LR * g
    return x


def trained(ctx: RankContext, hierarchical: bool, cap_mb: float, how: str, seed: int) -> list[bytes]:
    with group(ctx, **zoo.nodes(ctx)):
        trainer = Trainer(bagua.algorithms.ByteGrad(hierarchical=hierarchical), cap_mb=cap_mb)
        plans = []
        for t in range(5):
            trainer.step(ctx.rank, t, seed, how)
            plans.append(trainer.run.buckets)
        assert plans[1] == plans[4]
        members = zoo.members_of_nodes(ctx.world_size) if hierarchical else None
        trainer.run.close()
        # The first plan is another one, so the simulation takes the first step with it.
        right = simulated_with_replan(ctx.world_size, seed, plans, members)
        for name, ours in trainer.weights().items():
            np.testing.assert_allclose(
                ours, right[name], rtol=1e-9, atol=1e-9, err_msg=f"{name} {seed=} rank {ctx.rank}"
            )
        return trainer.bits()


def simulated_with_replan(
    n: int, seed: int, plans: list[Any], members: list[list[int]] | None
) -> dict[str, Array]:
    assert plans[0] == plans[1], "a backward in registration order: the plan stays"
    return simulate(n, len(plans), seed, plans[0], members)


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_the_mean_is_that_of_the_codec(pool: RankPool, world_size: int, hierarchical: bool) -> None:
    seed = zoo.seed_of_today()
    for cap_mb, how in ((1.0, "plain"), (2**-12, "accumulated")):
        answers = on(pool, world_size, trained, hierarchical, cap_mb, how, seed)
        assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"
