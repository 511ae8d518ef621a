"""NCCL when things go wrong: mismatches, dead and absent peers, aborts, crossed communicators."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from . import emulator
from .native import IN_PROGRESS, INTERNAL, REMOTE
from .rank_nccl_failures import (
    run_absent_peer,
    run_crossed,
    run_exit_while_stuck,
    run_init_without_peer,
    run_mismatch,
    run_peer_death,
)
from .ranks import run_emulated

pytestmark = pytest.mark.timeout(60, func_only=True)


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("count", ["AllReduce(count 1000, type float32, op sum)", "count 1001"]),
        ("type", ["type float32", "type float64"]),
        ("op", ["op sum", "op prod"]),
        ("root", ["root 0", "root 1"]),
        ("collective", ["AllReduce(count 1000", "AllGather(count 1000"]),
    ],
)
def test_mismatch_names_both_calls(what: str, parts: list[str]) -> None:
    settings: dict[str, Any] = {"expect": ["mismatch"], "quiet": True, "race": False}
    for rank, outcome in enumerate(run_emulated(run_mismatch, 2, emulator.unique_id(), what, **settings)):
        result = outcome.value
        assert result["code"] == INTERNAL
        assert result["stuck"]
        assert result["abort_s"] < 1
        assert f"rank {rank} calls" in result["text"]
        for part in parts:
            assert part in result["text"]


@pytest.mark.parametrize(("mode", "code"), [("error", REMOTE), ("hang", 0)])
def test_peer_death_and_shrink(mode: str, code: int) -> None:
    settings: dict[str, Any] = {"peer_death": mode, "check": False}
    outcomes = run_emulated(run_peer_death, 3, emulator.unique_id(), mode == "hang", **settings)
    assert [o.exit_status for o in outcomes] == [0, 0, -signal.SIGKILL], outcomes
    for outcome in outcomes[:2]:
        assert outcome.value["code"] == code
        assert outcome.value["stuck"]
        assert outcome.value["sum"] == 3.0
        assert outcome.value["recovery_s"] < 5


def test_abort_releases_a_stream_that_waits_for_a_late_peer() -> None:
    result = run_emulated(run_absent_peer, 2, emulator.unique_id())[0].value
    assert result["code"] == 0
    assert result["stuck"]
    assert result["abort_s"] < 1


def test_abort_during_initialisation() -> None:
    code, abort_s = run_emulated(run_init_without_peer)[0].value
    assert code == IN_PROGRESS
    assert abort_s < 0.5


@pytest.mark.parametrize("serial", [False, True])
def test_crossed_communicators_hang_only_one_at_a_time(serial: bool) -> None:
    ids = [emulator.unique_id(), emulator.unique_id()]
    outcomes = run_emulated(run_crossed, 2, ids, serial, serial=serial)
    assert [o.value for o in outcomes] == [not serial] * 2


def test_exit_with_stuck_streams_is_clean() -> None:
    started = time.monotonic()
    settings: dict[str, Any] = {"peer_death": "hang"}
    assert [o.value for o in run_emulated(run_exit_while_stuck, 2, emulator.unique_id(), **settings)] == [
        "left"
    ] * 2
    assert time.monotonic() - started < 15
