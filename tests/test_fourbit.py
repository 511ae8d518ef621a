"""FourBit's mean against a float64 simulation of all ranks; test_fourbit_codec.py has its codec."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

import bagua_rt as bagua
from bagua_rt.algorithms import FourBit
from tests import zoo
from tests.micro import group, on
from tests.ranks import RankContext, RankPool
from tests.zoo import LR, SHAPES, Array, Trainer


def coded(values: Array) -> Array:
    """What a row of whole blocks decodes to."""
    blocks = values.reshape(-1, 64)
    step = (np.abs(blocks).max(1, keepdims=True) / 7).astype(np.float32).astype(np.float64)
    safe = np.where(step >= np.finfo(np.float32).tiny, step, np.inf)
    levels = np.clip(np.rint(blocks / safe), -7, 7)
    out: Array = np.where(np.isinf(safe), 0.0, levels * step).reshape(values.shape)
    return out


class Side:
    """What one member of the mean keeps."""

    def __init__(self, n: int, columns: int, feedback: bool) -> None:
        self.feedback = feedback
        self.worker = np.zeros((n, columns))
        self.server = np.zeros(columns)

    def code(self, which: str, values: Array) -> Array:
        wanted = values + getattr(self, which)
        out = coded(wanted)
        if self.feedback:
            setattr(self, which, wanted - out)
        return out


def mean_of(flats: list[Array], sides: list[Side]) -> Array:
    n = len(flats)
    sent = [side.code("worker", flat.reshape(n, -1)) for side, flat in zip(sides, flats, strict=True)]
    means = [np.sum([rows[owner] / n for rows in sent], axis=0) for owner in range(n)]
    return np.concatenate([side.code("server", mean) for side, mean in zip(sides, means, strict=True)])


def simulate(
    n: int, steps: int, seed: int, plans: Any, members: list[list[int]], feedback: bool, is_deep: bool
) -> tuple[dict[str, Array], list[list[Side]]]:
    x = {name: zoo.start(name) for name in SHAPES}
    k = len(members)
    sides = [[Side(k, -(-plan.numel // (64 * k)) * 64, feedback) for _ in range(k)] for plan in plans]
    for t in range(steps):
        flats = []
        for rank in range(n):
            gradients = {name: x[name] - zoo.target(name, rank, t, seed) for name in SHAPES}
            flats.append(zoo.flats(plans, gradients.__getitem__))
        means = []
        for index in range(len(plans)):
            parts = [flat[index] for flat in flats]
            if is_deep:  # the leaders see their nodes' sums of gradients / n
                parts = [np.sum([flats[r][index] / n for r in node], axis=0) for node in members]
            mean = parts[0] if k == 1 else mean_of(parts, sides[index])
            means.append(mean * (k if is_deep else 1))
        for name, g in zoo.unflat(plans, means).items():
            x[name] = x[name] - LR * g
    return x, sides


def trained(
    ctx: RankContext, hierarchical: bool, feedback: bool, cap_mb: float, how: str, seed: int
) -> list[bytes]:
    # Steps are float32 on the wire: where float64 sums differ in their last bit, so may a step in its own.
    with group(ctx, **zoo.nodes(ctx)):
        trainer = Trainer(FourBit(error_feedback=feedback, hierarchical=hierarchical), cap_mb=cap_mb)
        plans = trainer.run.buckets
        for t in range(5):
            trainer.step(ctx.rank, t, seed, how)
        errors = trainer.run.state_dict()["state"]["errors"]
        assert trainer.run.buckets == plans, "a backward in registration order: the plan stays"
        trainer.run.close()
        members = [[rank] for rank in range(ctx.world_size)]
        if hierarchical:
            members = zoo.members_of_nodes(ctx.world_size)
        right, sides = simulate(ctx.world_size, 5, seed, plans, members, feedback, hierarchical)
        for name, ours in trainer.weights().items():
            np.testing.assert_allclose(
                ours, right[name], rtol=1e-6, atol=1e-6, err_msg=f"{name} {seed=} rank {ctx.rank}"
            )
        places = [node[0] for node in members]
        if ctx.rank in places and len(members) > 1:
            assert len(errors) == len(plans)
            for found, own in zip(errors, sides, strict=True):
                mine = own[places.index(ctx.rank)]
                assert len(found) == 2 * feedback
                for error, want in zip(found, (mine.worker, mine.server[None]), strict=False):
                    np.testing.assert_allclose(error, want, atol=1e-6, err_msg=f"{seed=} rank {ctx.rank}")
        return trainer.bits()


@pytest.mark.parametrize(("hierarchical", "feedback"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_the_mean_is_that_of_the_formulas(
    pool: RankPool, world_size: int, hierarchical: bool, feedback: bool
) -> None:
    seed = zoo.seed_of_today()
    cap_mb, how = (2**-12, "accumulated") if feedback else (1.0, "plain")
    answers = on(pool, world_size, trained, hierarchical, feedback, cap_mb, how, seed)
    assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_parameters_and_mixed_dtypes(pool: RankPool, world_size: int, hierarchical: bool) -> None:
    seed = zoo.seed_of_today()
    tolerance = 0.0 if world_size == 1 else 0.5
    answers = on(pool, world_size, zoo.odd_models, FourBit(hierarchical=hierarchical), seed, tolerance)
    assert answers == [answers[0]] * world_size, f"not bit-equal, {seed=}"


def make() -> Trainer:
    return Trainer(FourBit(), dtype=torch.float32, cap_mb=2**-12)


@pytest.mark.parametrize("save_at", [1, 2, 3])
def test_a_checkpoint_resumes_bit_equal(pool: RankPool, save_at: int) -> None:
    seed = zoo.seed_of_today()
    assert on(pool, 3, zoo.resumed, make, save_at, 6, seed) == [True] * 3, f"{seed=}"


def cut_otherwise(ctx: RankContext, seed: int) -> tuple[list[str], list[torch.dtype], bool]:
    texts: list[str] = []
    log, handler = logging.getLogger("bagua_rt"), logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    with group(ctx):
        whole, parts = (Trainer(FourBit(), dtype=torch.bfloat16, cap_mb=cap) for cap in (1.0, 2**-12))
        for trainer in (whole, parts):
            trainer.model.is_shuffled = True  # another plan after the first generation
            for t in range(2):
                trainer.step(ctx.rank, t, seed)
        saved = parts.run.state_dict()
        found = list(texts)
        whole.run.load_state_dict(saved)
        errors = [part for pair in whole.run.state_dict()["state"]["errors"] for part in pair]
        for trainer in (whole, parts):
            trainer.run.close()
    log.removeHandler(handler)
    assert not found, "a re-plan is nothing to warn of"
    return texts, [error.dtype for error in errors], any(bool(error.any()) for error in errors)


def test_errors_of_other_buckets_start_at_zero_and_the_log_says_so(pool: RankPool) -> None:
    for texts, dtypes, is_any in on(pool, 2, cut_otherwise, zoo.seed_of_today()):
        assert texts == ["the checkpoint has other buckets (bucket_cap_mb=?): the errors start at zero"]
        assert dtypes == [torch.float32] * 2, "wider than what they are the errors of"
        assert not is_any


def test_a_gradient_scaler_skips_on_all_ranks_or_none(pool: RankPool) -> None:
    zoo.check_scaled(on(pool, 3, zoo.scaled, make, 1, zoo.seed_of_today()), 1)


def test_a_backward_that_raised_moves_nothing_and_forgets_the_errors(pool: RankPool) -> None:
    answers = on(pool, 3, zoo.lost_backward, make, zoo.seed_of_today())
    assert answers == [answers[0]] * 3


def test_switches_to_and_from_others(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    settings_: list[tuple[str, dict[str, Any]]] = [
        ("fourbit", {"hierarchical": True}),
        ("bytegrad", {}),
        ("fourbit", {}),
        ("gradient_allreduce", {}),
    ]
    answers = on(pool, 3, zoo.switched, settings_, seed)
    assert answers == [answers[0]] * 3, f"{seed=}"
    on(pool, 3, zoo.switched, [("fourbit", {}), ("decentralized", {}), ("local_sgd", {"interval": 1})], seed)


def sent(ctx: RankContext, numel: int) -> int:
    with group(ctx):
        model = torch.nn.Linear(numel, 1, bias=False)
        run = bagua.attach(model, (), FourBit())
        before = run.statistics().bytes_sent
        model(torch.ones(1, numel)).sum().backward()
        bytes_ = run.statistics().bytes_sent - before
        run.close()
        return bytes_


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_on_the_wire_are_a_seventh(pool: RankPool, world_size: int) -> None:
    numel = 100_003
    row = -(-numel // (64 * world_size)) * 36
    for found in on(pool, world_size, sent, numel):
        assert found == 2 * (world_size - 1) * row
        assert found <= 0.145 * 8 * (world_size - 1) / world_size * numel
