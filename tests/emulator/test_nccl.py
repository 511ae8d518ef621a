"""NCCL: every collective against numpy, groups, management calls, checks of arguments."""

from __future__ import annotations

import time
from typing import Any

import pytest

from . import emulator
from .native import IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE
from .rank_nccl import (
    run_collectives,
    run_init,
    run_large,
    run_management,
    run_refusals,
    run_slow_enqueue,
    run_stress,
    run_threads,
)
from .ranks import run_emulated

pytestmark = pytest.mark.timeout(60, func_only=True)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives_against_numpy(world: int) -> None:
    seed = int(time.time())
    outcomes = run_emulated(run_collectives, world, emulator.unique_id(), seed)
    assert [outcome.value for outcome in outcomes] == [[]] * world, f"seed {seed}"


def test_many_operations_on_two_communicators_under_delays() -> None:
    ids, seed = [emulator.unique_id(), emulator.unique_id()], int(time.time())
    settings: dict[str, Any] = {"nccl_delay_us": 200, "delay": (0.3, 300, seed)}
    outcomes = run_emulated(run_stress, 3, ids, seed, **settings)
    assert [o.value for o in outcomes] == [[], [], []], f"seed {seed}"


def test_large_messages_under_delays() -> None:
    settings: dict[str, Any] = {"nccl_delay_us": 2000, "delay": (0.5, 1000, 3)}
    assert all(o.value for o in run_emulated(run_large, 2, emulator.unique_id(), **settings))


def test_split_shrink_revoke() -> None:
    results = [o.value for o in run_emulated(run_management, 3, emulator.unique_id())]
    assert [r["split"] for r in results] == [(1, 4.0), (0, 2.0), (0, 4.0)]
    assert [r.get("split, non-blocking") for r in results] == [None, 5.0, 5.0]
    assert [r.get("shrink") for r in results] == [(0, 2.0), None, (1, 2.0)]
    for result in results:
        assert result["parent"] == 3.0
        assert result["revoked"] == result["revoked, finalize"] == INVALID_USAGE
        assert result["destroyed twice"] == INVALID_ARGUMENT


def test_threads_as_ranks_non_blocking() -> None:
    settings: dict[str, Any] = {"ndev": 3, "race": False, "per_rank_env": [{}]}
    results = run_emulated(run_threads, 1, **settings)[0].value
    assert sorted(results) == [0, 1, 2]
    for rank, (in_call, first, early, ready, reduced, finalized) in results.items():
        assert (ready, reduced, finalized) == (0, 6.0, 0)
        if rank != 2:
            assert in_call < 0.4
            assert (first, early) == (IN_PROGRESS, INVALID_ARGUMENT)


def test_event_recorded_while_in_progress_is_a_race() -> None:
    settings: dict[str, Any] = {"expect": ["race"], "quiet": True, "enqueue_delay_us": 200_000}
    code, with_wait, without = run_emulated(run_slow_enqueue, 1, **settings)[0].value
    assert code == IN_PROGRESS
    assert with_wait == 0
    assert without > 0


def test_refusals() -> None:
    assert run_emulated(run_refusals, 1, expect=["memory"], quiet=True)[0].value == {
        "magic": INVALID_ARGUMENT,
        "size": INVALID_ARGUMENT,
        "version": INVALID_ARGUMENT,
        "blocking": INVALID_ARGUMENT,
        "CTAs": INVALID_ARGUMENT,
        "good": 0,
        "zero id": INVALID_ARGUMENT,
        "buffer too small": INVALID_ARGUMENT,
        "buffer just right": 0,
        "send to self alone": INVALID_USAGE,
        "float8 moves": 0,
    }


def test_two_ranks_on_one_device() -> None:
    one_device: dict[str, Any] = {"ndev": 1, "per_rank_env": [{}, {}]}
    for version, enabled, part in (
        (23203, False, "NCCL_MULTI_RANK_GPU_ENABLE=1"),
        (22809, False, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"),
        (22809, True, "Duplicate GPU detected"),
    ):
        settings: dict[str, Any] = {"nccl_version": version, "multi_rank_gpu": enabled}
        for outcome in run_emulated(run_init, 2, emulator.unique_id(), **one_device, **settings):
            code, text = outcome.value
            assert code == INVALID_USAGE
            assert part in text
    outcomes = run_emulated(run_init, 2, emulator.unique_id(), **one_device, multi_rank_gpu=True)
    assert [o.value for o in outcomes] == [(0, "")] * 2
