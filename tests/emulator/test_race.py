"""The race check: against brute force on random programs, and on planted ordering bugs."""

from __future__ import annotations

from typing import Any

import pytest

from .helpers import KERNELS, on_emulator
from .rank_race import RACY, SILENT, compare_with_oracle, run_kernel_race, run_steps

pytestmark = pytest.mark.timeout(60, func_only=True)


def test_agrees_with_brute_force() -> None:
    count = 4000
    settings: dict[str, Any] = {"expect": ["race"], "quiet": True, "timeout_s": 50}
    result = on_emulator(compare_with_oracle, 0, count, **settings)
    assert result["wrong"] == []
    # Both verdicts must be frequent, or the comparison shows little.
    assert count // 5 < result["racy"] < count * 4 // 5


def test_agrees_with_brute_force_under_delays() -> None:
    delay = (0.5, 300, 1)
    settings: dict[str, Any] = {"expect": ["race"], "quiet": True, "delay": delay}
    assert on_emulator(compare_with_oracle, 10_000, 500, **settings)["wrong"] == []


@pytest.fixture(scope="module")
def steps() -> dict[str, tuple[bool, list[str]]]:
    result = on_emulator(run_steps, expect=["race"], quiet=True)
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("name", SILENT)
def test_correct_program_is_silent(name: str, steps: dict[str, tuple[bool, list[str]]]) -> None:
    assert steps[name] == (True, [])


@pytest.mark.parametrize("name", RACY)
def test_planted_bug_is_reported(name: str, steps: dict[str, tuple[bool, list[str]]]) -> None:
    right, races = steps[name]
    assert right, "the bug is meant to be hidden by timing"
    assert races


def test_kernel_accesses_are_exact() -> None:
    settings: dict[str, Any] = {"expect": ["race"], "quiet": True, "kernels": [KERNELS]}
    same, halves = on_emulator(run_kernel_race, **settings)
    assert same > 0
    assert halves == 0
