"""The rendezvous: its errors, and a second job at the same port. Real processes and ports."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bagua_rt import process_group
from bagua_rt.errors import BaguaError, PeerError, UsageError
from tests.ranks import RankContext, RankPool, run_scripts
from tests.starting import attempt, environment, start, total

Pools = Callable[[int], "RankPool"]


# ------------------------------------------------------------------------ errors of the rendezvous


def test_b56_a_port_in_use_is_said_at_once(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        kind, text, took_s = attempt(port, 0, 2)
    assert kind == "UsageError"
    assert f"rank 0 can't serve the rendezvous at 127.0.0.1:{port}: the port is in use" in text
    assert "another program listens there" in text
    assert took_s < 5


def test_b56_a_name_that_does_not_resolve_is_said_at_once() -> None:
    variables = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": 29500}
    begin = time.monotonic()
    with environment(**variables), pytest.raises(UsageError) as caught:
        process_group.init("cpu")
    assert "no-such-host.invalid:29500" in str(caught.value)
    assert "does not resolve" in str(caught.value)
    assert time.monotonic() - begin < 9.5


NOBODY = """
import time
from bagua_rt import errors, process_group
begin = time.monotonic()
try:
    process_group.init("cpu", timeout_s=20)
except errors.CollectiveTimeoutError as error:
    print(time.monotonic() - begin, error)
"""


def test_nobody_listening_is_a_timeout_without_noise(port: int) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (found,) = run_scripts([NOBODY], env={**env, "BAGUA_RT_RENDEZVOUS_TIMEOUT_S": "1"}, timeout=60.0)
    seconds, text = found.stdout.split(" ", 1)
    assert f"the rendezvous at 127.0.0.1:{port} can't be reached" in text
    assert "refused" in text
    assert 1.0 <= float(seconds) < 6.0
    assert found.stderr == ""


def test_a_program_that_does_not_answer_is_not_waited_for(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        kind, text, took_s = attempt(port, 1, 2, search_s=1.0)
    assert kind == "CollectiveTimeoutError"
    assert "got a program that does not answer as a store" in text
    assert took_s < 6.0


def claims(
    ctx: RankContext, port: int, ranks: list[int], sizes: list[int], **arguments: Any
) -> tuple[str, str, float]:
    return attempt(port, ranks[ctx.rank], sizes[ctx.rank], **arguments)


def test_b56_two_ranks_that_claim_one_rank_all_hear_of_it(pools: Pools, port: int) -> None:
    for kind, text, took_s in pools(3).run(claims, port, [0, 1, 1], [3, 3, 3], timeout=100.0):
        assert kind == "UsageError"
        assert f"rank 1 is claimed by two processes at 127.0.0.1:{port}" in text
        assert took_s < 10


def test_b56_two_ranks_that_claim_rank_0_all_hear_of_it(pools: Pools, port: int) -> None:
    answers = pools(3).run(claims, port, [0, 0, 1], [3, 3, 3], timeout=100.0)
    assert [kind for kind, _, _ in answers] == ["UsageError"] * 3
    texts = sorted(text for _, text, _ in answers)
    assert f"rank 0 can't serve the rendezvous at 127.0.0.1:{port}: the port is in use" in texts[0]
    assert "rank 0 is claimed by two processes" in texts[0]
    for text in texts[1:]:
        assert f"rank 0 is claimed by two processes at 127.0.0.1:{port}" in text
    assert all(took_s < 10 for _, _, took_s in answers)


def late_claims(ctx: RankContext, port: int, ranks: list[int], sizes: list[int]) -> tuple[str, str, float]:
    """The last one comes when one of the others has raised already."""
    if ctx.rank == 2:
        ctx.store().wait([f"told {ranks} {sizes}"], timedelta(seconds=20))
    found = attempt(port, ranks[ctx.rank], sizes[ctx.rank])
    ctx.store().set(f"told {ranks} {sizes}", "1")
    return found


def test_b56_a_rank_that_comes_later_hears_of_it_too(pools: Pools, port: int) -> None:
    kind, text, _ = pools(3).run(late_claims, port, [0, 0, 1], [3, 3, 3], timeout=100.0)[2]
    assert kind == "UsageError"
    assert f"rank 0 is claimed by two processes at 127.0.0.1:{port}" in text


def test_a_rank_that_comes_later_hears_of_different_world_sizes_too(pools: Pools, port: int) -> None:
    for kind, text, _ in pools(3).run(late_claims, port, [0, 2, 1], [2, 3, 3], timeout=100.0):
        assert kind == "UsageError"
        assert "rank 0 and rank 2 state different world sizes" in text


@pytest.mark.parametrize("sizes", [[2, 3, 3], [3, 2, 3], [3, 3, 4]])
def test_different_world_sizes_are_told_apart(pools: Pools, port: int, sizes: list[int]) -> None:
    answers = pools(3).run(claims, port, [0, 1, 2], sizes, timeout=100.0)
    assert [kind for kind, _, _ in answers] == ["UsageError"] * 3
    for _, text, took_s in answers:
        assert "state different world sizes" in text
        assert took_s < 10


def different_lanes(ctx: RankContext, port: int) -> tuple[str, str, float]:
    return attempt(port, ctx.rank, ctx.world_size, lanes=1 + ctx.rank)


def different_places(ctx: RankContext, port: int) -> tuple[str, str, float]:
    return attempt(port, ctx.rank, ctx.world_size, local_world_size=1 + ctx.rank)


def test_arguments_that_contradict_each_other_are_an_error_on_every_rank(pools: Pools, port: int) -> None:
    for kind, text, _ in pools(2).run(different_lanes, port, timeout=100.0):
        assert (kind, "got 1 on rank 0, 2 on rank 1" in text) == ("UsageError", True), text
    for kind, text, _ in pools(2).run(different_places, port, timeout=100.0):
        assert (kind, "local_world_size can't be right on rank 0, 1" in text) == ("UsageError", True), text


def one_rank_stays_away(ctx: RankContext, port: int) -> tuple[str, str, float]:
    if ctx.rank == 1:
        return "", "", 0.0
    return attempt(port, ctx.rank, 4, timeout_s=2.0)


def test_ranks_that_never_come_are_named(pools: Pools, port: int) -> None:
    answers = pools(3).run(one_rank_stays_away, port, timeout=100.0)
    for rank in (0, 2):
        kind, text, took_s = answers[rank]
        assert kind == "CollectiveTimeoutError"
        assert f"rank 1, 3 did not come to the rendezvous at 127.0.0.1:{port}" in text
        assert "all 4 ranks within 2 s · got 2" in text
        assert took_s < 5


def rank_0_dies(ctx: RankContext, port: int) -> tuple[str, str]:
    group = start(port, ctx.rank, ctx.world_size)
    lane = group.control("x")
    lane.agree("start")
    if ctx.rank == 0:
        os._exit(4)
    with pytest.raises(PeerError) as first:
        lane.agree("x")
    deadline = time.monotonic() + 5
    while lane.failures.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(PeerError) as second:
        group.connect("more", 1)
    group.close()
    return str(lane.failures.poll()), str(first.value) + str(second.value)


def test_death_of_rank_0_is_said(pools: Pools, port: int) -> None:
    answers = pools(2).run(rank_0_dies, port, expect_errors=True, timeout=100.0)
    assert answers[0].exit_code == 4
    assert f"the store at 127.0.0.1:{port} is gone (rank 0 died?)" in answers[1][1]


# ------------------------------------------------------------------------------------------ a second job


def two_jobs(ctx: RankContext, port: int, names: list[str]) -> tuple[str, str, float]:
    """Ranks 0 and 1 are the first job; 2 and 3 come to its port once it runs."""
    job, rank = divmod(ctx.rank, 2)
    running = Path(ctx.folder, f"running-{ctx.run}")
    ended = [Path(ctx.folder, f"ended-{ctx.run}-{other}") for other in (0, 1)]
    if job == 1:
        await_files([running])
        found = attempt(port, rank, 2, job=names[1], search_s=3.0)
        ended[rank].touch()
        return found
    with start(port, rank, 2, job=names[0], timeout_s=60.0) as group:
        assert total(group.world, 1.0) == 2.0
        running.touch()
        await_files(ended)
        more = group.connect("more", 1)
        return "", str(total(more.world, 2.0)), 0.0


def await_files(paths: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("names", [["", ""], ["one", "two"], ["one", ""]])
def test_b56_a_second_job_on_the_port_of_a_running_one(pools: Pools, port: int, names: list[str]) -> None:
    answers = pools(4).run(two_jobs, port, names, timeout=100.0)
    assert answers[0][:2] == ("", "4.0"), "the running job goes on"
    assert answers[1][:2] == ("", "4.0")
    for rank, (kind, text, took_s) in enumerate(answers[2:]):
        assert kind == "UsageError"
        assert f"127.0.0.1:{port}" in text
        assert took_s < 10
        if rank == 0:
            assert "the port is in use" in text
        elif names[0] == names[1]:
            assert "rank 1 is claimed by two processes" in text
            assert "the running job goes on" in text
        else:
            ours = f"torchrun/{names[1]}/0" if names[1] else "(no name)"
            assert f"expected job {ours} · got job torchrun/one/0" in text


def jobs_at_once(ctx: RankContext, port: int) -> tuple[int, str, float]:
    job, rank = ctx.rank % 2, ctx.rank // 2
    if rank == 1:  # before the other rank 0 has found the port taken, nobody could tell whose it is
        ctx.store().wait(["lost"], timedelta(seconds=20))
    try:
        with start(port, rank, 2, search_s=6.0, timeout_s=8.0) as group:
            return job, "", total(group.world, 1.0 + 10.0 * job)
    except BaguaError as error:
        ctx.store().set("lost", "1")
        return job, f"{type(error).__name__} {error}", 0.0


def test_b56_two_jobs_that_start_at_once_never_mix(pools: Pools, port: int) -> None:
    # Two nameless jobs of two ranks. Either one of them runs alone, or every process gets an error.
    for job, text, value in pools(4).run(jobs_at_once, port, timeout=100.0):
        assert text or value == 2.0 + 20.0 * job, "a rank of one job was joined with a rank of the other"
        assert not text or f"127.0.0.1:{port}" in text
