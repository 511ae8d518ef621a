"""Decentralized: who meets whom, and weights against a float64 simulation of all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bagua_rt as bagua
from bagua_rt.algorithms.decentralized import shift_one_peer
from tests import zoo
from tests.micro import caught, group, on
from tests.ranks import RankContext, RankPool

SIZE = 9


class Bowl(nn.Module):
    """Rank r's gradient at step t is ``x - target(r, t)``."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        self.y = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        goal = torch.tensor(target(rank, step))
        return 0.5 * (self.x - goal[:SIZE]).square().sum() + 0.5 * (self.y - goal[SIZE]).square()


def target(rank: int, step: int) -> Any:
    return np.random.default_rng([17, rank, step]).standard_normal(SIZE + 1)


def partner(rank: int, n: int, round_: int) -> int | None:
    """algorithms.md section 3.3 for even worlds; for odd ones the tournament's schedule."""
    if n % 2 == 0:
        half = n // 2
        return (round_ + rank) % half + half if rank < half else (rank - half - round_) % half
    other = (round_ - rank) % n
    return other if other != rank else None


def simulate(
    n: int, peers: str, interval: int, steps: int, skipped: set[int], lr: float, *, deep: bool = False
) -> Any:
    x = np.array([[*[0.0] * SIZE, 1.0]] * n)
    due, round_ = None, 0
    for t in range(steps):
        if due is not None:
            x, due = due, None
        gradient = x - np.array([target(rank, t) for rank in range(n)])
        if t % interval == 0:
            due = averaged_by_nodes(x, peers, round_) if deep else averaged(x, peers, round_)
            round_ += 1
        if t not in skipped:
            x = (x if due is None else due) - lr * gradient
            due = None
    return x


def averaged(x: Any, peers: str, round_: int) -> Any:
    n = len(x)
    if peers == "all":
        return np.repeat(x.mean(0, keepdims=True), n, axis=0)
    met = [partner(rank, n, round_) if n > 1 else None for rank in range(n)]
    return np.array([(x[rank] + x[rank if other is None else other]) / 2 for rank, other in enumerate(met)])


def averaged_by_nodes(x: Any, peers: str, round_: int) -> Any:
    members = zoo.members_of_nodes(len(x))
    if peers == "all":
        return averaged(x, peers, round_)
    means = [x[node].mean(0) for node in members]
    out = np.empty_like(x)
    for k, node in enumerate(members):
        other = partner(k, len(members), round_) if len(members) > 1 else None
        everyone = node if other is None else [*node, *members[other]]
        weights = sum(means[k] for _ in node) if other is None else x[everyone].sum(0)
        out[node] = weights / len(everyone)
    return out


def trained_by_nodes(ctx: RankContext, peers: Any, interval: int) -> list[float]:
    with group(ctx, **zoo.nodes(ctx)):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        algorithm = bagua.Decentralized(peers=peers, interval=interval, hierarchical=True)
        run = bagua.attach(model, optimizer, algorithm)
        for t in range(6):
            optimizer.zero_grad()
            model(ctx.rank, t).backward()
            optimizer.step()
        run.close()
        ours = np.concatenate([model.x.detach().numpy(), [model.y.item()]])
        right = simulate(ctx.world_size, peers, interval, 6, set(), 0.1, deep=True)
        np.testing.assert_allclose(ours, right[ctx.rank], rtol=1e-12, atol=1e-12)
        found: list[float] = ours.tolist()
        return found


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("peers", ["all", "shift_one"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_the_hierarchical_form_weighs_nodes_by_their_sizes(
    pool: RankPool, world_size: int, peers: str, interval: int
) -> None:
    on(pool, world_size, trained_by_nodes, peers, interval)


def trained(ctx: RankContext, peers: Any, interval: int, skipped: set[int], direct: bool) -> Any:
    steps = 8
    with group(ctx):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = bagua.attach(model, optimizer, bagua.Decentralized(peers=peers, interval=interval))
        for t in range(steps):
            optimizer.zero_grad()
            # `direct` goes around the module's hooks, as a trainer that calls a submodule does
            (model.forward(ctx.rank, t) if direct else model(ctx.rank, t)).backward()
            if t not in skipped:
                optimizer.step()
        run.close()
        ours = np.concatenate([model.x.detach().numpy(), [model.y.item()]])
        right = simulate(ctx.world_size, peers, interval, steps, skipped, 0.1)
        np.testing.assert_allclose(ours, right[ctx.rank], rtol=1e-12, atol=1e-12)
        return ours


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("peers", ["all", "shift_one"])
@pytest.mark.parametrize(
    ("world_size", "direct"),
    [(1, False), (2, False), (2, True), (3, False), (3, True), (4, False), (5, False)],
)
def test_weights_are_those_of_the_simulation(
    pool: RankPool, world_size: int, peers: str, interval: int, direct: bool
) -> None:
    answers = on(pool, world_size, trained, peers, interval, set(), direct)
    if world_size > 1:
        assert not np.array_equal(answers[0], answers[1]), "they differ: gradients stay each rank's own"


@pytest.mark.parametrize("peers", ["all", "shift_one"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_that_is_skipped_loses_no_average(pool: RankPool, world_size: int, peers: str) -> None:
    on(pool, world_size, trained, peers, 1, {2, 3, 6}, False)
    on(pool, world_size, trained, peers, 2, {2, 5}, False)


def resumed(ctx: RankContext, peers: Any, save_at: int) -> bool:
    def make() -> tuple[Bowl, torch.optim.Optimizer, bagua.Attached]:
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return model, optimizer, bagua.attach(model, optimizer, bagua.Decentralized(peers=peers, interval=2))

    def go_on(model: Bowl, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for t in range(first, last):
            optimizer.zero_grad()
            model(ctx.rank, t).backward()
            if t != 4:  # as a GradScaler skips, with an average that the next step takes
                optimizer.step()

    with group(ctx):
        model, optimizer, run = make()
        go_on(model, optimizer, 0, save_at)
        saved = [
            {k: v.clone() for k, v in model.state_dict().items()},
            optimizer.state_dict(),
            run.state_dict(),
        ]
        weights, moments, state = saved
        moments = torch.utils._pytree.tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, moments)
        go_on(model, optimizer, save_at, 9)
        run.close()
        again, other, run = make()
        again.load_state_dict(weights)
        other.load_state_dict(moments)
        run.load_state_dict(state)
        go_on(again, other, save_at, 9)
        run.close()
        return torch.equal(model.x, again.x) and torch.equal(model.y, again.y)


@pytest.mark.parametrize("peers", ["all", "shift_one"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_checkpoint_goes_on_with_the_same_rounds(pool: RankPool, world_size: int, peers: str) -> None:
    for save_at in (3, 4, 5):
        assert on(pool, world_size, resumed, peers, save_at) == [True] * world_size


def thawed(ctx: RankContext) -> tuple[float, float, float]:
    """An average waits for a step, while a parameter that isn't in it comes back into the plan."""
    with group(ctx):
        model = Bowl()
        optimizer, y = torch.optim.SGD(model.parameters(), 0.1), 0.0
        run = bagua.attach(model, optimizer, bagua.Decentralized())
        for t in range(3):
            model.y.requires_grad_(t != 1)
            optimizer.zero_grad()
            y = model.y.item()
            model(ctx.rank, t).backward()
            if t != 1:
                optimizer.step()
        run.close()
        return y, y - target(ctx.rank, 2)[SIZE], model.y.item()


def test_a_parameter_that_thaws_beside_an_average_keeps_its_weights(pool: RankPool) -> None:
    answers = on(pool, 3, thawed)
    mean = np.mean([before for before, _, _ in answers])
    for _, gradient, after in answers:
        np.testing.assert_allclose(after, mean - 0.1 * gradient, rtol=1e-12)


WEIGHTS: tuple[bagua.Algorithm, ...] = (
    bagua.Decentralized(),
    bagua.algorithms.LowPrecisionDecentralized(),
    bagua.algorithms.LocalSGD(),
    bagua.algorithms.AsyncModelAverage(warmup_steps=9),
)


def of_another_optimizer(ctx: RankContext) -> list[tuple[str, str]]:
    """Weights that an optimizer moves which isn't known: they would be overwritten."""
    errors = []
    with group(ctx):
        for algorithm in WEIGHTS:
            model = Bowl()
            optimizer = torch.optim.SGD([model.x], 0.1)
            errors.append(caught(partial(bagua.attach, model, optimizer, algorithm)))
            errors.append(caught(partial(bagua.attach, model, (), algorithm)))
            model.y.requires_grad_(False)
            run = bagua.attach(model, optimizer, algorithm)
            model(ctx.rank, 0).backward()
            optimizer.step()
            model.y.requires_grad_(True)
            errors.append(caught(lambda: model(ctx.rank, 1).backward()))  # noqa: B023
            errors.append(caught(optimizer.step))
            run.close()
    return errors


def test_weights_that_an_unknown_optimizer_moves_are_refused_by_name(pool: RankPool) -> None:
    for errors in on(pool, 2, of_another_optimizer):
        for i, (kind, text) in enumerate(errors):
            assert kind == "UsageError"
            assert "knows no optimizer of 'y'" in text, (WEIGHTS[i // 4], i % 4)


# ---- who meets whom -------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 33), st.integers(0, 1000))
def test_meeting_is_mutual_and_leaves_out_at_most_one(n: int, round_: int) -> None:
    peers = [shift_one_peer(rank, n, round_) for rank in range(n)]
    for rank, peer in enumerate(peers):
        if peer is not None:
            assert 0 <= peer < n
            assert peer != rank
            assert peers[peer] == rank
    assert peers.count(None) == n % 2
    period = n if n % 2 else n // 2
    assert peers == [shift_one_peer(rank, n, round_ + period) for rank in range(n)]


@pytest.mark.parametrize("n", range(2, 12))
def test_in_a_period_everyone_meets_whom_it_can(n: int) -> None:
    period = n if n % 2 else n // 2
    for rank in range(n):
        met = [shift_one_peer(rank, n, round_) for round_ in range(period)]
        others = [peer for peer in met if peer is not None]
        assert len(others) == len(set(others)), "nobody twice"
        if n % 2:
            assert met.count(None) == 1
            assert set(others) == set(range(n)) - {rank}
        else:
            half = n // 2
            assert set(others) == set(range(half, n) if rank < half else range(half))
        assert met == [partner(rank, n, round_) for round_ in range(period)]


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        ({"peers": "ring"}, "unknown peers.*'all' or 'shift_one'.*'ring'"),
        ({"interval": 0}, "interval is not usable.*whole number >= 1.*0"),
        ({"interval": 1.5}, "interval is not usable"),
    ],
)
def test_settings_that_cant_be_are_refused(settings_: dict[str, Any], text: str) -> None:
    with pytest.raises(bagua.errors.UsageError, match=text):
        bagua.Decentralized(**settings_)
    assert caught(lambda: bagua.algorithms.create("decentralized", **settings_))[0] == "UsageError"
