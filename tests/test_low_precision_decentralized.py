"""LowPrecisionDecentralized against a float64 simulation of all ranks that codes by numpy's oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bagua_rt as bagua
from bagua_rt.algorithms import LowPrecisionDecentralized
from tests import kernel_oracles as oracles
from tests import zoo
from tests.micro import caught, group, on
from tests.ranks import RankContext, RankPool
from tests.zoo import LR, SHAPES, Array, Trainer


def coded(difference: Array, numel: int) -> Array:
    wire = oracles.minmax_encode(difference[None], numel, 0)
    decoded: Array = oracles.minmax_decode(wire, difference.size, np.float64)[0]
    return decoded


def ring_step(agreed: list[Array], moved: list[Array], sizes: list[int], numel: int) -> list[Array]:
    """The ring among members whose models are `agreed`, and became `moved` by their steps."""
    n = len(agreed)
    if n == 1:
        return moved
    out = []
    for k in range(n):
        difference = moved[k] - agreed[k]
        for neighbour in ((k - 1) % n, (k + 1) % n):
            difference = difference + min(1, sizes[neighbour] / sizes[k]) / 3 * (
                agreed[neighbour] - agreed[k]
            )
        out.append(agreed[k] + coded(difference, numel))
    return out


def simulate(
    n: int, steps: int, seed: int, plans: Any, interval: int, members: list[list[int]]
) -> list[dict[str, Array]]:
    x = [{name: zoo.start(name) for name in SHAPES} for _ in range(n)]
    agreed = [zoo.flats(plans, zoo.start) for _ in members]
    for t in range(steps):
        for rank in range(n):
            for name in SHAPES:
                x[rank][name] = x[rank][name] - LR * (x[rank][name] - zoo.target(name, rank, t, seed))
        if (t + 1) % interval:
            continue
        if t + 1 == interval:  # the replicas are made before the step of the first round
            before = simulate(n, t, seed, plans, interval, members)
            agreed = [zoo.flats(plans, before[node[0]].__getitem__) for node in members]
        flats = [zoo.flats(plans, x[rank].__getitem__) for rank in range(n)]
        for index, plan in enumerate(plans):
            moved = [np.mean([flats[rank][index] for rank in node], axis=0) for node in members]
            sizes = [len(node) for node in members]
            now = ring_step([mine[index] for mine in agreed], moved, sizes, plan.numel)
            for k, value in enumerate(now):
                agreed[k][index] = value
        for k, node in enumerate(members):
            for rank in node:
                x[rank].update(zoo.unflat(plans, agreed[k]))
    return x


def trained(ctx: RankContext, interval: int, hierarchical: bool, how: str, seed: int) -> None:
    steps = 3 * interval + 1
    with group(ctx, **zoo.nodes(ctx)):
        algorithm = LowPrecisionDecentralized(interval=interval, hierarchical=hierarchical)
        trainer = Trainer(algorithm, cap_mb=2**-12 if how == "plain" else 1.0)
        for t in range(steps):
            trainer.step(ctx.rank, t, seed, how)
        plans = trainer.run.buckets
        trainer.run.close()
        members = (
            zoo.members_of_nodes(ctx.world_size) if hierarchical else [[r] for r in range(ctx.world_size)]
        )
        right = simulate(ctx.world_size, steps, seed, plans, interval, members)[ctx.rank]
        for name, ours in trainer.weights().items():
            np.testing.assert_allclose(
                ours, right[name], rtol=1e-8, atol=1e-8, err_msg=f"{name} {seed=} rank {ctx.rank}"
            )


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_weights_are_those_of_the_simulation(
    pool: RankPool, world_size: int, interval: int, hierarchical: bool
) -> None:
    how = "plain" if interval == 1 else "accumulated"
    on(pool, world_size, trained, interval, hierarchical, how, zoo.seed_of_today())


def test_a_trainer_may_call_the_models_parts(pool: RankPool) -> None:
    on(pool, 2, trained, 1, False, "in parts", zoo.seed_of_today())


def replicas(ctx: RankContext, dtype: torch.dtype, start: str, seed: int) -> dict[str, list[bytes]]:
    """After a re-plan in the middle, and a start from ranks that differ."""
    with group(ctx):
        trainer = Trainer(bagua.Decentralized(), dtype=dtype, cap_mb=2**-10)
        if start == "differ":
            trainer.step(ctx.rank, 0, seed)
        trainer.run.switch(LowPrecisionDecentralized())
        sent = []
        for t in range(1, 6):
            if t == 3:
                trainer.model.get_parameter("b").requires_grad_(False)
            if t == 5:
                trainer.model.get_parameter("b").requires_grad_(True)
            before = trainer.run.statistics().bytes_sent
            trainer.step(ctx.rank, t, seed)
            trainer.run.state_dict()  # completes the round
            sent.append(trainer.run.statistics().bytes_sent - before)
        once = sum(p.nbytes for p in trainer.model.parameters()) * (1 if ctx.world_size == 2 else 2)
        assert sent[0] > once > sent[1], "replicas are made in the first round"
        assert sent[4] > once > sent[2], "and anew, with one that was frozen until now"
        state = trainer.run.state_dict()["state"]
        weights = dict(trainer.model.named_parameters())
        trainer.run.close()
        found = {part: {k: v.double().numpy() for k, v in state[part].items()} for part in ("left", "right")}
        found["own"] = {k: v.detach().double().numpy() for k, v in weights.items()}
        assert set(found["own"]) == set(SHAPES)
        return {part: [found[part][name].tobytes() for name in sorted(SHAPES)] for part in found}


@pytest.mark.parametrize("start", ["equal", "differ"])
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(n, torch.float32) for n in (2, 3, 4)]
    + [(3, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)],
)
def test_replicas_are_the_neighbours_weights_bit_for_bit(
    pool: RankPool, world_size: int, dtype: torch.dtype, start: str
) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, world_size, replicas, dtype, start, seed)
    for rank, found in enumerate(answers):
        assert found["left"] == answers[(rank - 1) % world_size]["own"], f"{seed=}"
        assert found["right"] == answers[(rank + 1) % world_size]["own"], f"{seed=}"
        assert found["own"] != answers[(rank + 1) % world_size]["own"], f"they differ, {seed=}"


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_parameters_and_mixed_dtypes(pool: RankPool, world_size: int, hierarchical: bool) -> None:
    algorithm = LowPrecisionDecentralized(hierarchical=hierarchical)
    tolerance = 0.02 if world_size == 1 else 1.0  # one rank's mix is not the mean; the simulation is exact
    on(pool, world_size, zoo.odd_models, algorithm, zoo.seed_of_today(), tolerance)


def make() -> Trainer:
    return Trainer(LowPrecisionDecentralized(interval=2), dtype=torch.float32, cap_mb=2**-12)


@pytest.mark.parametrize("save_at", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_checkpoint_resumes_bit_equal(pool: RankPool, world_size: int, save_at: int) -> None:
    seed = zoo.seed_of_today()
    assert on(pool, world_size, zoo.resumed, make, save_at, 7, seed) == [True] * world_size, f"{seed=}"


def test_a_backward_that_raised_moves_nothing(pool: RankPool) -> None:
    on(pool, 3, zoo.lost_backward, make, zoo.seed_of_today())


def test_switches_to_and_from_others(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    settings: list[tuple[str, dict[str, Any]]] = [
        ("low_precision_decentralized", {"hierarchical": True}),
        ("decentralized", {"peers": "shift_one"}),
        ("low_precision_decentralized", {}),
        ("bytegrad", {}),
        ("local_sgd", {"interval": 1}),
    ]
    on(pool, 3, zoo.switched, settings, seed)


def sent(ctx: RankContext) -> tuple[int, int]:
    with group(ctx):
        model = torch.nn.Linear(100_003, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = bagua.attach(model, optimizer, LowPrecisionDecentralized())
        counts = [run.statistics().bytes_sent]
        for _ in range(2):
            model(torch.ones(1, 100_003)).sum().backward()
            optimizer.step()
            run.state_dict()
            counts.append(run.statistics().bytes_sent)
        run.close()
        return counts[1] - counts[0], counts[2] - counts[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bytes_on_the_wire(pool: RankPool, world_size: int) -> None:
    neighbours = (0, 1, 2)[world_size - 1]
    row = 16 + -(-(-(-100_003 // 2048) * 8) // 16) * 16 + -(-100_003 // 16) * 16
    for first, second in on(pool, world_size, sent):
        assert second == neighbours * row
        assert first == neighbours * (row + 4 * 100_003), "and the replicas once"
        assert second <= 0.26 * 4 * 100_003 * 2


@pytest.mark.parametrize("interval", [0, 1.5, True])
def test_settings_out_of_range_are_refused(interval: Any) -> None:
    kind, text = caught(lambda: bagua.algorithms.create("low_precision_decentralized", interval=interval))
    assert kind == "UsageError"
    assert "interval" in text


def test_it_needs_the_optimizer() -> None:
    with bagua.init("cpu"), pytest.raises(bagua.errors.UsageError, match="knows no optimizer"):
        bagua.attach(zoo.Bowl(), (), LowPrecisionDecentralized())
