"""AsyncModelAverage: how rounds end, ranks that freeze, leave, die or are elsewhere, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import bagua_rt as bagua
from bagua_rt.algorithms import AsyncModelAverage
from tests import zoo
from tests.micro import caught, group, on
from tests.ranks import RankContext, RankPool, run_scripts
from tests.zoo import Trainer


def refrozen(ctx: RankContext, frozen: list[str], seed: int) -> Any:
    """Each rank freezes a parameter (or none) at a step of its own, and thaws it later."""
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(0.0), cap_mb=2**-12)
        name = frozen[ctx.rank]

        def train() -> None:
            for t in range(9):
                if name and t in (2 + ctx.rank, 6 + ctx.rank):
                    param = trainer.model.get_parameter(name)
                    param.requires_grad_(not param.requires_grad)
                trainer.step(ctx.rank, t, seed)
            trainer.run.close()

        return caught(train), trainer.bits()


def test_the_plan_changes_on_all_ranks_together(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, 3, refrozen, ["w"] * 3, seed)
    assert answers == [(("", ""), answers[0][1])] * 3, f"{seed=}"


def test_ranks_that_freeze_different_parameters_are_told(pool: RankPool) -> None:
    for (kind, text), _ in on(pool, 2, refrozen, ["w", "b"], zoo.seed_of_today()):
        assert kind == "LayoutMismatchError"
        assert "the part that parameter 'w' takes" in text or "'b'" in text


def test_a_rank_that_freezes_alone_waits_for_the_others_end(pool: RankPool) -> None:
    on(pool, 2, refrozen, ["w", ""], zoo.seed_of_today())


# ---- ends -----------------------------------------------------------------------------------------------


def left(ctx: RankContext, how: str, seed: int) -> list[Any]:
    """Rank 0 goes without close() while the others train; they go on until they have noticed."""
    found: list[Any] = []
    error = caught(lambda: _left(ctx, how, seed, found))
    return [*found, error]


def _left(ctx: RankContext, how: str, seed: int, found: list[Any]) -> None:
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(0.0))
        for t in range(3):
            trainer.step(ctx.rank, t, seed)
        if ctx.rank == 0:
            if how == "raises":
                raise KeyError("planted")
            return
        rounds: Any = trainer.run._attachment.engine.background
        while rounds._departure is None:
            trainer.step(ctx.rank, 3, seed)
        before = trainer.bits()
        trainer.step(ctx.rank, 4, seed)
        found += [trainer.bits() != before, caught(trainer.run.pause), caught(trainer.run.resume)]
        found.append(caught(trainer.run.state_dict))
        trainer.run.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_leaves_in_good_order_ends_the_rounds_only(pool: RankPool, world_size: int) -> None:
    first, *others = on(pool, world_size, left, "returns", zoo.seed_of_today())
    assert first == [("", "")]
    for moved, pause, resume, saved, error in others:
        assert (moved, saved, error) == (True, ("", ""), ("", ""))
        assert pause[0] == resume[0] == "PeerError"
        assert "rank 0 has left" in pause[1]


def test_a_rank_that_leaves_by_an_exception_is_an_error_on_the_others(pool: RankPool) -> None:
    first, second = on(pool, 2, left, "raises", zoo.seed_of_today())
    assert first[-1][0] == "KeyError"
    assert second[-1][0] == "PeerError"
    assert "rank 0: KeyError" in second[-1][1]


def posted(ctx: RankContext, closes: bool, seed: int) -> list[str]:
    """What a rank says when it goes."""
    posts: list[str] = []
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(0.0))
        trainer.step(ctx.rank, 0, seed)
        board: Any = trainer.run._attachment.resources.control.departures
        board.post = posts.append
        if closes:
            trainer.run.close()
    return posts


def test_a_rank_that_has_stopped_with_all_others_takes_no_leave(pool: RankPool) -> None:
    """A slower one would give the last round up, though it is complete but for its own part."""
    assert on(pool, 2, posted, True, zoo.seed_of_today()) == [[], []]
    assert on(pool, 2, posted, False, zoo.seed_of_today()) == [["rank 0 has left"], ["rank 1 has left"]]


ENDING = """
import sys, torch
import torch.distributed as dist
import bagua_rt as bagua

rank, folder = {rank}, {folder!r}
bagua.init("cpu", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2, timeout_s=30.0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = bagua.attach(model, optimizer, bagua.AsyncModelAverage(0.0))


def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()


for _ in range(3):
    step()
if rank == 1:
    sys.exit(7)  # without close() or shutdown()
try:
    while True:
        step()
except bagua.errors.PeerError:
    before = [p.clone() for p in model.parameters()]
    for use in (lambda: model(torch.ones(2, 4)), optimizer.step, run.pause):
        try:
            use()
        except bagua.errors.PeerError:
            print("AGAIN")
    print("SAME", all(torch.equal(a, b) for a, b in zip(before, model.parameters())))
sys.exit(5)
"""


def test_a_rank_that_just_ends_is_an_error_on_the_others_and_exit_is_clean(tmp_path: Any) -> None:
    sources = [ENDING.format(rank=rank, folder=str(tmp_path)) for rank in range(2)]
    flight = {"BAGUA_RT_FLIGHT_DIR": str(tmp_path / "flight")}
    survivor, victim = run_scripts(sources, timeout=60.0, env=flight)
    assert (survivor.exit_code, victim.exit_code) == (5, 7), survivor.stderr
    assert survivor.stdout.count("AGAIN") == 3, survivor.stdout + survivor.stderr
    assert "SAME True" in survivor.stdout


# ---- settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"interval_s": -1.0}, "interval_s"),
        ({"interval_s": float("inf")}, "interval_s"),
        ({"interval_s": float("nan")}, "interval_s"),
        ({"interval_s": True}, "interval_s"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_steps": 1.5}, "warmup_steps"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(bagua.errors.UsageError, match=text):
        bagua.algorithms.create("async_model_average", **settings)


def test_it_needs_the_optimizer() -> None:
    with bagua.init("cpu"), pytest.raises(bagua.errors.UsageError, match="knows no optimizer"):
        bagua.attach(zoo.Bowl(), (), AsyncModelAverage())


@pytest.mark.parametrize("call", ["pause", "resume"])
def test_other_algorithms_have_nothing_to_pause(call: str) -> None:
    with bagua.init("cpu"):
        run = bagua.attach(zoo.Bowl())
        use: Callable[[], None] = getattr(run, call)
        with pytest.raises(bagua.errors.UsageError, match="no rounds in the background"):
            use()
        run.close()
