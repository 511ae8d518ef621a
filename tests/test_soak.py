"""A short soak of its own kinds, and what makes it worth running: that it replays, and that it fails."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tools.soak import driver
from tools.soak.driver import Soak, WrongError
from tools.soak.plan import BY_WEIGHT, Fault, Plan, draw
from tools.soak.reference import Reference
from tools.soak.trainee import Answer

KINDS: dict[str, Callable[[Plan], bool]] = {
    "a kill": lambda plan: [fault.kind for fault in plan.faults] == ["kill"] and plan.world_size == 3,
    "a pause": lambda plan: bool(plan.faults) and plan.faults[0].kind == "pause",
    "join": lambda plan: plan.joins and plan.accumulates,
    "exceptions": lambda plan: len(plan.raises) > 1 and not plan.faults,
    "weights": lambda plan: {name for _, name in plan.algorithms} <= set(BY_WEIGHT) and not plan.faults,
    "switches": lambda plan: len(plan.algorithms) > 1 and bool(plan.toggles) and not plan.faults,
    "a loss scaler": lambda plan: plan.scales and plan.world_size > 1 and not plan.faults,
}


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    made = Soak(tmp_path_factory.mktemp("soak"), is_loud=False)
    yield made
    made.close()


def first_seed(wanted: Callable[[Plan], bool]) -> int:
    return next(seed for seed in range(10_000) if wanted(draw(seed)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_of_each_kind(soak: Soak, kind: str) -> None:
    steps = soak.totals.steps
    soak.episode(first_seed(KINDS[kind]))
    assert soak.totals.steps > steps


def test_a_seed_is_one_plan_and_seeds_are_many() -> None:
    plans = [draw(seed) for seed in range(200)]
    assert plans == [draw(seed) for seed in range(200)]
    assert len({str(plan) for plan in plans}) > 150
    assert {plan.world_size for plan in plans} == {1, 2, 3, 4}
    assert {fault.kind for plan in plans for fault in plan.faults} == {"kill", "kill early", "stop", "pause"}


def test_a_wrong_value_is_found() -> None:
    plan = draw(first_seed(KINDS["exceptions"]))
    reference = Reference(plan)
    model = Reference(plan).replicas[0]
    reference.compare(model, 0, "mean")
    with torch.no_grad():
        model.stem.weight[0, 0] += 1e-3
    with pytest.raises(AssertionError, match=r"stem\.weight .* is off by 0\.00"):
        reference.compare(model, 0, "mean")


def test_an_error_that_no_fault_explains_is_found(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal that is to pause a rank kills it."""
    monkeypatch.setattr(signal, "SIGSTOP", signal.SIGKILL)
    seed = first_seed(
        lambda plan: KINDS["a pause"](plan) and plan.faults[0].after_s < 0.02 and plan.steps > 8
    )
    with pytest.raises(WrongError, match=r"ended by itself|no fault explains"):
        soak.episode(seed)


def test_a_rank_that_is_stopped_after_its_answer_goes_on(tmp_path: Path) -> None:
    """Or it would still be stopped in the next episode, and count as hanging there."""
    crew: list[Any] = [mock.Mock(), mock.Mock()]
    said = iter([[(0, "trains"), (1, "trains")], [(0, Answer("done")), (1, Answer("done"))]])
    fault = Fault("pause", victim=1, after_s=0.0, for_s=50.0)
    life = driver._Life(Soak(tmp_path, is_loud=False), draw(0), 0, crew, fault)
    with mock.patch.object(driver, "heard", side_effect=said):
        life.run()
    assert crew[1].signal.mock_calls == [mock.call(signal.SIGSTOP), mock.call(signal.SIGCONT)]
