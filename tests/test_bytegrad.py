"""ByteGrad against a float64 simulation of all ranks that codes by numpy's oracle of the codec."""

from __future__ import annotations

from functools import partial
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
            flats.append(zoo.flats(plans, gradients.__getitem__))
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
        assert plans == plans[:1] * 5, "a backward in registration order: the plan stays"
        members = zoo.members_of_nodes(ctx.world_size) if hierarchical else None
        trainer.run.close()
        right = simulate(ctx.world_size, len(plans), seed, plans[0], members)
        for name, ours in trainer.weights().items():
            np.testing.assert_allclose(
                ours, right[name], rtol=1e-9, atol=1e-9, err_msg=f"{name} {seed=} rank {ctx.rank}"
            )
        return trainer.bits()


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_the_mean_is_that_of_the_codec(pool: RankPool, world_size: int, hierarchical: bool) -> None:
    seed = zoo.seed_of_today()
    for cap_mb, how in ((1.0, "plain"), (2**-12, "accumulated")):
        answers = on(pool, world_size, trained, hierarchical, cap_mb, how, seed)
        assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_parameters_and_mixed_dtypes(pool: RankPool, world_size: int, hierarchical: bool) -> None:
    seed = zoo.seed_of_today()
    tolerance = 0.0 if world_size == 1 else 0.05
    algorithm = bagua.algorithms.ByteGrad(hierarchical=hierarchical)
    answers = on(pool, world_size, zoo.odd_models, algorithm, seed, tolerance)
    assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"


def half(ctx: RankContext, dtype: torch.dtype, seed: int) -> list[bytes]:
    with group(ctx):
        trainer = Trainer(bagua.algorithms.ByteGrad(), dtype=dtype)
        for t in range(3):
            trainer.step(ctx.rank, t, seed)
        right = simulate(ctx.world_size, 3, seed, trainer.run.buckets, None)
        bits = trainer.bits()
        trainer.run.close()
        for name in SHAPES:
            ours = trainer.model.get_parameter(name).detach().double().numpy()
            np.testing.assert_allclose(ours, right[name], atol=0.02, rtol=0.02, err_msg=f"{name} {seed=}")
        return bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(pool: RankPool, dtype: torch.dtype) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, 3, half, dtype, seed)
    assert answers == [answers[0]] * 3, f"not bit-equal, {seed=}"


def make() -> Trainer:
    return Trainer(bagua.algorithms.ByteGrad(), dtype=torch.float32, cap_mb=2**-12)


@pytest.mark.parametrize("save_at", [1, 2])
def test_a_checkpoint_resumes_bit_equal(pool: RankPool, save_at: int) -> None:
    seed = zoo.seed_of_today()
    assert on(pool, 3, zoo.resumed, make, save_at, 5, seed) == [True] * 3, f"{seed=}"


def test_a_gradient_scaler_skips_on_all_ranks_or_none(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    zoo.check_scaled(on(pool, 3, zoo.scaled, make, 1, seed), 1)


def test_a_backward_that_raised_moves_nothing(pool: RankPool) -> None:
    answers = on(pool, 3, zoo.lost_backward, make, zoo.seed_of_today())
    assert answers == [answers[0]] * 3


def not_finite(ctx: RankContext, value: float) -> None:
    with group(ctx):
        model = torch.nn.Linear(5000, 1)
        run = bagua.attach(model, (), bagua.algorithms.ByteGrad())
        x = torch.ones(1, 5000)
        if ctx.rank == 1:
            x[0, 7] = value
        model(x).sum().backward()
        grad = model.weight.grad
        assert grad is not None
        assert grad[0, :1024].isnan().all(), "the chunk, on every rank"
        assert grad[0, 4500:].isfinite().all(), "and no other"
        run.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_on_every_rank(pool: RankPool, value: float) -> None:
    on(pool, 2, not_finite, value)


def sparse(ctx: RankContext, names: list[str]) -> None:
    with group(ctx):
        for name in names:
            embedding, linear = torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1)
            model = torch.nn.Sequential(embedding, linear)
            run = bagua.attach(model, (), bagua.algorithms.create(name))
            torch.nn.init.ones_(linear.weight)
            model(torch.tensor([ctx.rank, 4])).sum().backward()
            assert embedding.weight.grad is not None
            grad, n = embedding.weight.grad.to_dense(), ctx.world_size
            expected = [1 / n if row < n else 1.0 if row == 4 else 0.0 for row in range(5)]
            torch.testing.assert_close(grad[:, 0], torch.tensor(expected))
            run.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sparse_gradients_beside_compressed_ones_are_averaged(pool: RankPool, world_size: int) -> None:
    on(pool, world_size, sparse, ["bytegrad", "fourbit", "powersgd", "gradient_allreduce"])


def refused(ctx: RankContext) -> list[tuple[str, str]]:
    """Algorithms that don't communicate gradients, or only for as long as they warm up."""
    with group(ctx):
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        sgd = torch.optim.SGD(embedding.parameters(), 0.1)
        slow = bagua.algorithms.AsyncModelAverage(warmup_steps=9)
        adams = [
            kind(embedding.parameters(), warmup_steps=9)
            for kind in (bagua.optim.OneBitAdam, bagua.optim.QAdam)
        ]
        return [
            caught(lambda: bagua.attach(embedding, sgd, slow)),
            *(caught(partial(bagua.attach, embedding, adam)) for adam in adams),
        ]


def test_sparse_gradients_are_refused_at_attach_not_after_the_warm_up(pool: RankPool) -> None:
    for found in on(pool, 2, refused):
        for kind, text in found:
            assert kind == "UsageError"
            assert "the gradient of 'weight' is sparse" in text


def sent(ctx: RankContext, numel: int) -> int:
    with group(ctx):
        model = torch.nn.Linear(numel, 1, bias=False)
        run = bagua.attach(model, (), bagua.algorithms.ByteGrad())
        before = run.statistics().bytes_sent
        model(torch.ones(1, numel)).sum().backward()
        bytes_ = run.statistics().bytes_sent - before
        run.close()
        return bytes_


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_on_the_wire_are_a_quarter(pool: RankPool, world_size: int) -> None:
    numel = 100_003
    columns = -(-numel // (16 * world_size)) * 16
    row = 16 + -(-columns // 2048) * 8 + columns
    for found in on(pool, world_size, sent, numel):
        assert abs(found - 2 * (world_size - 1) * row) <= 2 * (world_size - 1) * 8
        assert found <= 0.26 * 8 * (world_size - 1) / world_size * numel


def test_switches_to_and_from_others(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    flat: list[tuple[str, dict[str, Any]]] = [("bytegrad", {}), ("gradient_allreduce", {})]
    answers = on(pool, 3, zoo.switched, [*flat, ("decentralized", {})], seed)
    assert answers[0][0] == answers[1][0], f"equal until the decentralised one, {seed=}"
    deep = [("gradient_allreduce", {}), ("bytegrad", {"hierarchical": True}), *flat]
    answers = on(pool, 3, zoo.switched, deep, seed)
    assert answers == [answers[0]] * 3, f"{seed=}"
