"""run.autotune(): the search by a clock of our own, and in trainings whose weights must not depend on it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.autotune import BucketSizeSearch, Tuned
from bagua_rt.errors import UsageError
from tests.micro import caught, group, on
from tests.ranks import RankContext, RankPool

MIB = 2**20
STEPS = 2


# ---- the search alone -----------------------------------------------------------------------------------


def search(
    seconds_of: Callable[[int], float],
    theirs: Callable[[int], float] | None = None,
    *,
    present_mb: float = 10.0,
    candidates_mb: Sequence[float] = (1.0, 5.0),
    tensors: Sequence[int] = (4 * MIB,) * 8,
) -> tuple[Tuned, list[int]]:
    """Run a search to its end: a step with buckets of a size takes so long here, so long on another rank.

    Returns:
        What it has found, and the size of each step.
    """
    now, size = 0.0, int(present_mb * MIB)
    sizes: list[int] = []

    def use(wanted: int) -> None:
        nonlocal size
        size = wanted

    def agree(mine: bytes) -> list[bytes]:
        return [mine, struct.pack("<d", theirs(size))] if theirs else [mine]

    made = BucketSizeSearch(tensors, size, candidates_mb, STEPS, use=use, agree=agree, clock_s=lambda: now)
    while not made.step():
        sizes.append(size)
        is_new = sizes[-2:-1] != [size]
        now += 100.0 if is_new else seconds_of(size)  # new buckets are expensive once
    sizes.append(size)
    assert made.found is not None
    return made.found, sizes


def test_the_fastest_size_stays() -> None:
    found, sizes = search(lambda size: 0.5 if size == MIB else 1.0)
    assert found == Tuned(1.0, {1.0: 500.0, 5.0: 1000.0, 10.0: 1000.0})
    tried = [1, 5, 10, 10, 5, 1]
    assert sizes == [mib * MIB for mib in tried for _ in range(STEPS + 1)] + [MIB]


def test_the_slowest_rank_decides() -> None:
    found, _ = search(lambda size: size / MIB, lambda size: 20.0 - size / MIB)
    assert found == Tuned(10.0, {1.0: 19_000.0, 5.0: 15_000.0, 10.0: 10_000.0})


def test_the_present_size_stays_unless_another_is_clearly_faster() -> None:
    assert search(lambda size: 1.0 if size == 10 * MIB else 0.99)[0].bucket_cap_mb == 10.0
    assert search(lambda size: 1.0 if size == 10 * MIB else 0.97)[0].bucket_cap_mb != 10.0


def test_sizes_that_hold_everything_are_one() -> None:
    found, _ = search(lambda size: 1.0, candidates_mb=[50, 2, 100, 10], tensors=[MIB] * 4)
    assert list(found.step_ms) == [2.0, 10.0], "10 is the present one, and holds everything"
    found, _ = search(lambda size: 1.0, candidates_mb=[50, 2], tensors=[MIB] * 4)
    assert list(found.step_ms) == [2.0, 10.0]
    found, _ = search(lambda size: 1.0, candidates_mb=[50, 100], present_mb=1, tensors=[MIB] * 4)
    assert list(found.step_ms) == [1.0, 100.0]
    found, _ = search(lambda size: 1.0, candidates_mb=[0.02, 0.3], tensors=[MIB] * 4)
    assert list(found.step_ms) == [0.02, 0.3, 10.0], "as they were given"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"candidates_mb": ()}, "nothing to tune"),
        ({"candidates_mb": (50.0, 100.0)}, "nothing to tune"),
        ({"tensors": (MIB,)}, "nothing to tune"),
        ({"tensors": ()}, "nothing to tune"),
        ({"candidates_mb": (0.0,)}, "candidates_mb is not usable"),
        ({"candidates_mb": (float("nan"),)}, "candidates_mb is not usable"),
        ({"candidates_mb": 5.0}, "candidates_mb is not usable"),
        ({"candidates_mb": (True,)}, "candidates_mb is not usable"),
    ],
)
def test_what_can_not_be_searched_is_refused(arguments: dict[str, Any], text: str) -> None:
    tensors = {"tensors": (MIB,) * 8, **arguments}
    with pytest.raises(UsageError, match=text):
        search(lambda size: 1.0, **tensors)


# ---- in a training --------------------------------------------------------------------------------------

WIDTH, LAYERS, CANDIDATES_MB = 8, 6, (0.0002, 0.0005, 1.0)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(model: nn.Module, x: Callable[[int], torch.Tensor], steps: range, lr: float = 0.05) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in steps:
        optimizer.zero_grad()
        model(x(step)).square().mean().backward()
        optimizer.step()


def tuned(ctx: RankContext) -> dict[str, Any]:
    """Train through a whole search and beyond it; the plan of each step is kept."""
    plans: list[tuple[tuple[str, ...], ...]] = []
    with group(ctx):
        model, alone = make(), make()
        run = bagua.attach(model, bucket_cap_mb=0.0003)

        def x(step: int) -> torch.Tensor:
            plans.append(tuple(plan.names for plan in run.buckets))
            return batch(ctx.rank, step)

        train(model, x, range(2))
        run.autotune(CANDIDATES_MB, steps=2)
        again = caught(lambda: run.autotune(CANDIDATES_MB, steps=2))
        before = run.tuned
        train(model, x, range(2, 30))
        found = run.tuned
        run.autotune((0.0001, 0.0004), steps=1)
        run.close()
        train(alone, lambda step: torch.cat([batch(rank, step) for rank in range(ctx.world_size)]), range(30))
        off = max(
            (a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True)
        )
        return {"plans": plans, "found": found, "before": before, "off": off, "again": again}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_training_goes_through_the_sizes_and_learns_the_same(pool: RankPool, world_size: int) -> None:
    answers = on(pool, world_size, tuned)
    for found in answers:
        assert found["off"] < 1e-6, "as one process on the whole batch"
        assert found["before"] is None
        assert found["again"][0] == "UsageError"
        assert "under way" in found["again"][1]
        assert found["found"] == answers[0]["found"], "all ranks decide alike"
        assert found["plans"] == answers[0]["plans"]
        assert len(found["found"].step_ms) == 4
        assert all(ms > 0 for ms in found["found"].step_ms.values())
    plans = answers[0]["plans"]
    # Step 2 is the first of the search: 3 steps for each of the sizes, in both orders. A plan is seen here
    # when the forward begins; it changes at the first gradient.
    tried = list(plans[3:27:3])
    assert tried[:4] == tried[:3:-1]
    assert len(set(tried[:4])) == 4
    assert len(set(plans[27:])) == 1


def resumed(ctx: RankContext) -> dict[str, Any]:
    """A run that was tuned, saved and taken up elsewhere, beside one that went on."""
    with group(ctx):
        found: dict[str, Any] = {}
        model, other = make(), make()
        run = bagua.attach(model, bucket_cap_mb=0.0003)
        train(model, lambda step: batch(ctx.rank, step), range(2))
        run._attachment.engine.layout.use_cap(1000)  # as a search that has found it
        train(model, lambda step: batch(ctx.rank, step), range(2, 5))
        saved, weights = run.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        train(model, lambda step: batch(ctx.rank, step), range(5, 8))
        found["plan"] = [plan.names for plan in run.buckets]
        again = bagua.attach(other, bucket_cap_mb=0.0003)
        other.load_state_dict(weights)
        again.load_state_dict(saved)
        found["loaded"] = [plan.names for plan in again.buckets]
        train(other, lambda step: batch(ctx.rank, step), range(5, 8))
        found["off"] = max(
            (a - b).abs().max().item() for a, b in zip(model.parameters(), other.parameters(), strict=True)
        )
        found["generations"] = [each.statistics().generations for each in (run, again)]
        found["texts"] = [repr(again)]
        again.close()
        found["texts"].append(repr(again))
        return found


def test_a_checkpoint_keeps_the_size_that_was_found(pool: RankPool) -> None:
    for rank, found in enumerate(on(pool, 3, resumed)):
        assert found["plan"] == found["loaded"]
        assert len(found["plan"]) < 6, "that attach() was asked for has one for each layer"
        assert found["off"] == 0.0
        assert found["generations"] == [8, 3], "those of the checkpoint were another attachment's"
        assert f"rank {rank} of 3, {len(found['plan'])} buckets, GradientAllReduce" in found["texts"][0]
        assert "model1, closed" in found["texts"][1]


def ended(ctx: RankContext) -> dict[str, Any]:
    """What ends a search, or never begins one."""
    with group(ctx):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = bagua.attach(model, optimizer, bucket_cap_mb=0.0003)
        train(model, lambda step: batch(ctx.rank, step), range(2))
        plan = [each.names for each in run.buckets]
        refused = {
            "odd": caught(lambda: run.autotune(CANDIDATES_MB if ctx.rank else (0.0,))),
            "differ": caught(lambda: run.autotune(CANDIDATES_MB, steps=2 + ctx.rank)),
            "steps": caught(lambda: run.autotune(CANDIDATES_MB, steps=0)),
        }
        run.autotune(CANDIDATES_MB, steps=3)
        train(model, lambda step: batch(ctx.rank, step), range(2))
        moved = [each.names for each in run.buckets] != plan
        assert run.state_dict()["tuned_cap_bytes"] is None, "nothing is found yet"
        run.switch(bagua.ByteGrad())
        back = [each.names for each in run.buckets] == plan
        train(model, lambda step: batch(ctx.rank, step), range(2))
        refused["bytegrad"] = caught(lambda: run.autotune(CANDIDATES_MB))
        run.close()
        refused["closed"] = caught(lambda: run.autotune(CANDIDATES_MB))
        return {"refused": refused, "moved": moved, "back": back, "tuned": run.tuned}


def test_a_switch_ends_it_and_what_can_not_be_is_refused_on_all_ranks(pool: RankPool) -> None:
    for found in on(pool, 2, ended):
        refused = found["refused"]
        assert (found["moved"], found["back"], found["tuned"]) == (True, True, None)
        assert refused["odd"][0] == refused["steps"][0] == refused["bytegrad"][0] == "UsageError"
        assert "candidates_mb is not usable" in refused["odd"][1]
        assert refused["differ"][0] == "LayoutMismatchError"
        assert "depend on how they are cut" in refused["bytegrad"][1]
        assert refused["closed"][0] == "ClosedError"
