"""PowerSGD against a float64 simulation of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bagua_rt as bagua
from bagua_rt.algorithms import PowerSGD
from bagua_rt.algorithms.powersgd import _orthogonalise_
from tests import zoo
from tests.micro import caught, group, on
from tests.ranks import RankContext, RankPool
from tests.zoo import LR, SHAPES, Array, Trainer


def is_compressed(shape: tuple[int, ...], rank: int) -> bool:
    if len(shape) < 2 or 0 in shape:
        return False
    rows, columns = shape[0], int(np.prod(shape[1:]))
    return rows * columns > rank * (rows + columns)


def orthogonal(p: Array) -> Array:
    """By QR: the same columns as Gram-Schmidt's, but for signs."""
    q, r = np.linalg.qr(p)
    signed: Array = q * np.sign(np.diag(r))
    return signed


class Simulation:
    def __init__(self, n: int, rank: int, queries: dict[str, Array]) -> None:
        self.n, self.rank = n, rank
        self.x = {name: zoo.start(name) for name in SHAPES}
        self.q = {name: query.copy() for name, query in queries.items()}
        self.error = {name: np.zeros((n, SHAPES[name][0], query.shape[0])) for name, query in queries.items()}

    def step(self, t: int, seed: int) -> None:
        for name, shape in SHAPES.items():
            gradients = [self.x[name] - zoo.target(name, rank, t, seed) for rank in range(self.n)]
            if self.n == 1 or not is_compressed(shape, self.rank):
                g = np.mean(gradients, axis=0)
            else:
                full = [e + g.reshape(shape[0], -1) for e, g in zip(self.error[name], gradients, strict=True)]
                p = orthogonal(np.mean([m @ self.q[name] for m in full], axis=0))
                self.q[name] = np.mean([m.T @ p for m in full], axis=0)
                product = p @ self.q[name].T
                self.error[name] = np.stack([m - product for m in full])
                g = product.reshape(shape)
            self.x[name] = self.x[name] - LR * g


def trained(
    ctx: RankContext, rank: int, hierarchical: bool, cap_mb: float, how: str, seed: int
) -> list[bytes]:
    with group(ctx, **zoo.nodes(ctx)):
        trainer = Trainer(PowerSGD(rank=rank, hierarchical=hierarchical), cap_mb=cap_mb)
        first = trainer.run.state_dict()["state"]
        queries = {name: query.numpy() for name, query in first["query"].items()}
        if ctx.world_size > 1:
            assert set(queries) == {name for name in SHAPES if is_compressed(SHAPES[name], rank)}
        right = Simulation(ctx.world_size, rank, queries)
        for t in range(5):
            trainer.step(ctx.rank, t, seed, how)
            right.step(t, seed)
        state = trainer.run.state_dict()["state"]
        trainer.run.close()
        for name, ours in trainer.weights().items():
            text = f"{name} {seed=} rank {ctx.rank}"
            np.testing.assert_allclose(ours, right.x[name], rtol=1e-8, atol=1e-8, err_msg=text)
            if name in queries:
                np.testing.assert_allclose(
                    state["error"][name], right.error[name][ctx.rank], atol=1e-8, err_msg=text
                )
                np.testing.assert_allclose(state["query"][name], right.q[name], atol=1e-8, err_msg=text)
        return trainer.bits()


@pytest.mark.parametrize(("rank", "hierarchical"), [(1, False), (2, False), (2, True), (3, False)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_gradient_is_that_of_the_formulas(
    pool: RankPool, world_size: int, rank: int, hierarchical: bool
) -> None:
    seed = zoo.seed_of_today()
    cap_mb, how = (2**-12, "plain") if rank == 1 else (1.0, "accumulated")
    answers = on(pool, world_size, trained, rank, hierarchical, cap_mb, how, seed)
    assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_parameters_and_mixed_dtypes(pool: RankPool, world_size: int, hierarchical: bool) -> None:
    seed = zoo.seed_of_today()
    tolerance = 0.0 if world_size == 1 else 2.0  # low rank is far from the mean; the simulation is exact
    answers = on(pool, world_size, zoo.odd_models, PowerSGD(hierarchical=hierarchical), seed, tolerance)
    assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"


def test_columns_that_are_nearly_the_same_become_orthogonal() -> None:
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(200, 1, generator=generator) + 1e-3 * torch.randn(200, 3, generator=generator)
    _orthogonalise_(columns)
    torch.testing.assert_close(columns.t() @ columns, torch.eye(3), rtol=0, atol=1e-5)


def low_rank(ctx: RankContext, dtype: torch.dtype, seed: int) -> None:
    with group(ctx):
        torch.manual_seed(seed)
        conv = torch.nn.Conv2d(6, 8, 3, bias=False).to(dtype)
        conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
        other = torch.nn.Linear(20, 30, bias=False).to(dtype)
        model = torch.nn.ModuleList([conv, other])
        run = bagua.attach(model, (), PowerSGD(rank=2))
        wanted = torch.randn(8, 1, 1, 1, dtype=dtype) * torch.randn(1, 6, 3, 3, dtype=dtype)
        for _ in range(2):
            model.zero_grad()
            ((conv.weight * wanted).sum() * (1 + ctx.rank) + 0.0 * other.weight.sum()).backward()
            mean = wanted * (1 + ctx.world_size) / 2
            tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 0.03
            assert conv.weight.grad is not None
            assert other.weight.grad is not None
            torch.testing.assert_close(
                conv.weight.grad, mean, rtol=tolerance, atol=tolerance, msg=lambda s: f"{seed=}: {s}"
            )
            assert not other.weight.grad.any(), "zero stays zero"
        run.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_mean_of_low_rank_arrives_whole(pool: RankPool, dtype: torch.dtype) -> None:
    on(pool, 3, low_rank, dtype, zoo.seed_of_today())


def make() -> Trainer:
    return Trainer(PowerSGD(), dtype=torch.float32, cap_mb=2**-12)


@pytest.mark.parametrize("save_at", [1, 2, 3])
def test_a_checkpoint_resumes_bit_equal(pool: RankPool, save_at: int) -> None:
    seed = zoo.seed_of_today()
    assert on(pool, 3, zoo.resumed, make, save_at, 6, seed) == [True] * 3, f"{seed=}"


def test_a_gradient_scaler_skips_on_all_ranks_or_none(pool: RankPool) -> None:
    zoo.check_scaled(on(pool, 3, zoo.scaled, make, 1, zoo.seed_of_today()), 1)


def test_a_backward_that_raised_moves_nothing(pool: RankPool) -> None:
    answers = on(pool, 3, zoo.lost_backward, make, zoo.seed_of_today())
    assert answers == [answers[0]] * 3


def not_finite(ctx: RankContext, value: float) -> None:
    with group(ctx):
        model = torch.nn.Linear(20, 30)
        run = bagua.attach(model, (), PowerSGD())
        start = run.state_dict()["state"]
        model(torch.ones(1, 20)).sum().backward()
        model.zero_grad()
        x = torch.ones(1, 20)
        if ctx.rank == 1:
            x[0, 7] = value
        model(x).sum().backward()
        assert model.weight.grad is not None
        assert not model.weight.grad.isfinite().any(), "the matrix, on every rank"
        state = run.state_dict()["state"]
        assert not state["error"]["weight"].any()
        assert torch.equal(state["query"]["weight"], start["query"]["weight"])
        model.zero_grad()
        model(torch.ones(1, 20)).sum().backward()
        assert torch.allclose(model.weight.grad, torch.ones(30, 20), atol=1e-4), "it recovers"
        run.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_on_every_rank_once(pool: RankPool, value: float) -> None:
    on(pool, 2, not_finite, value)


def test_switches_to_and_from_others(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    settings: list[tuple[str, dict[str, Any]]] = [
        ("powersgd", {"hierarchical": True}),
        ("bytegrad", {}),
        ("powersgd", {"rank": 1}),
        ("fourbit", {}),
    ]
    answers = on(pool, 3, zoo.switched, settings, seed)
    assert answers == [answers[0]] * 3, f"{seed=}"
    on(pool, 3, zoo.switched, [("powersgd", {}), ("decentralized", {}), ("local_sgd", {"interval": 1})], seed)


def sent(ctx: RankContext) -> int:
    with group(ctx):
        model = torch.nn.Linear(300, 400)
        run = bagua.attach(model, (), PowerSGD(rank=2))
        before = run.statistics().bytes_sent
        model(torch.ones(1, 300)).sum().backward()
        bytes_ = run.statistics().bytes_sent - before
        run.close()
        return bytes_


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bytes_on_the_wire(pool: RankPool, world_size: int) -> None:
    elements = 2 * (300 + 400) + 400
    for found in on(pool, world_size, sent):
        assert found == pytest.approx(8 * (world_size - 1) / world_size * elements, abs=64)


@pytest.mark.parametrize("rank", [0, 1.5, True])
def test_settings_out_of_range_are_refused(rank: Any) -> None:
    kind, text = caught(lambda: bagua.algorithms.create("powersgd", rank=rank))
    assert kind == "UsageError"
    assert "rank is not usable" in text
