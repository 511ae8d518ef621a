"""Process groups: init, sub-groups, shutdown, the end of a process. Real processes and ports."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bagua_rt import process_group
from bagua_rt.errors import (
    BackendUnavailableError,
    ClosedError,
    CollectiveTimeoutError,
    PeerError,
    UsageError,
)
from tests.ranks import RankContext, RankPool, rank_environment, run_scripts
from tests.starting import attempt, environment, start, total

Pools = Callable[[int], "RankPool"]


# ------------------------------------------------------------------------------------------ one rank


def sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed again
            found += str(link.readlink()).startswith("socket:")
    return found


def test_a_world_of_one_needs_no_port(caplog: pytest.LogCaptureFixture) -> None:
    before = sockets()
    with environment(), caplog.at_level(logging.INFO, "bagua_rt"), process_group.init() as group:
        assert sockets() == before
        assert (group.rank, group.world_size, group.local_rank, group.local_world_size) == (0, 1, 0, 1)
        assert (group.node_rank, group.node_count, group.node_sizes) == (0, 1, (1,))
        assert group.intra_node is group.world
        assert group.inter_node is not None
        assert group.inter_node.world_size == 1
        assert total(group.world, 1.5) == 1.5
        assert process_group.default_group() is group
        alone = group.new_group([0])
        assert alone is not None
        assert total(alone.world, 2.0) == 2.0
    said = [record.getMessage() for record in caplog.records if record.name == "bagua_rt"]
    assert len(said) == 1
    assert said[0].startswith(f"rank 0 of 1 on {group.device}")
    assert alone.is_closed, "closing a group closes its sub-groups"


def test_after_close_every_call_raises_closed_error() -> None:
    with environment():
        group = process_group.init("cpu")
    group.close()
    group.close()
    for call in (lambda: group.new_group([0]), lambda: group.connect("x", 1), lambda: group.control("x")):
        with pytest.raises(ClosedError, match="this process group is closed"):
            call()
    assert "closed" in repr(group)


def test_default_group_is_the_first_made_and_still_open() -> None:
    with pytest.raises(UsageError, match=r"there is no process group .* call init\(\) first"):
        process_group.default_group()
    with environment():
        first, second = process_group.init("cpu"), process_group.init("cpu")
    assert process_group.default_group() is first
    first.close()
    assert process_group.default_group() is second
    process_group.shutdown()
    process_group.shutdown()
    assert second.is_closed
    with pytest.raises(UsageError):
        process_group.default_group()


def test_attachments_close_first_and_the_last_made_first() -> None:
    with environment():
        group = process_group.init("cpu")
    order: list[str] = []

    def note(name: str) -> Callable[[], None]:
        def close() -> None:
            order.append(name)
            assert total(group.world, 1.0) == 1.0, "the communicators are still open"

        return close

    group.on_close(note("first"))
    forget = group.on_close(note("taken back"))
    group.on_close(note("last"))
    forget()
    forget()
    process_group.shutdown()
    assert order == ["last", "first"]


def test_an_error_in_a_close_callback_is_raised_and_the_rest_closed() -> None:
    with environment():
        group = process_group.init("cpu")
    order: list[str] = []

    def fail() -> None:
        raise PeerError("the attachment can't close")

    group.on_close(lambda: order.append("other"))
    group.on_close(fail)
    with pytest.raises(PeerError, match="the attachment can't close"):
        process_group.shutdown()
    assert order == ["other"]
    assert group.is_closed
    process_group.shutdown()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "make no group"),
        ([0, 0], "make no group"),
        (0, "a list of ranks"),
        ("0", "a list of ranks"),
        ([1], "from 0 to 0"),
        ([0.0], "got 0.0"),
        ([np.int64(-1)], "from 0 to 0"),
    ],
)
def test_ranks_of_a_sub_group_are_checked(ranks: list[Any], text: str) -> None:
    with environment(), process_group.init("cpu") as group, pytest.raises(UsageError) as caught:
        group.new_group(ranks)
    assert text in str(caught.value)


def test_unusable_arguments_are_refused_before_anything_is_opened() -> None:
    arguments: list[dict[str, Any]] = [
        {"rank": 0},
        {"rank": 2, "world_size": 2},
        {"rank": 0, "world_size": 2},
        {"timeout_s": 0},
        {"lanes": 0},
        {"local_world_size": 2},
        {"device": "tpu"},
    ]
    for each in arguments:
        with environment(), pytest.raises(UsageError):
            process_group.init(**{"device": "cpu", **each})


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_never_a_silent_cpu() -> None:
    with environment(), pytest.raises(BackendUnavailableError, match=r"libcuda\.so\.1"):
        process_group.init("cuda")


def test_a_forked_child_can_not_use_the_group_and_the_parent_goes_on() -> None:
    with environment():
        group = process_group.init("cpu")
    lane = group.control("x")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (lambda: group.new_group([0]), process_group.default_group, lambda: lane.agree("x")):
            try:
                call()
                said.append("went on")
            except ClosedError as error:
                said.append("forked" if "forked this one" in str(error) else str(error))
        group.close()
        process_group.shutdown()
        os.write(write, ",".join(said).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 1000) == b"forked,forked,forked"
    assert lane.agree("x", b"1") == [b"1"]
    assert total(group.world, 1.0) == 1.0
    lane.close()
    process_group.shutdown()
    os.close(read)
    os.close(write)


# ------------------------------------------------------------------------------------------ several ranks


def where_everybody_is(ctx: RankContext, port: int, sizes: list[int]) -> dict[str, Any]:
    mine = [size for size in sizes for _ in range(size)][ctx.rank]
    with start(port, ctx.rank, ctx.world_size, local_world_size=mine) as group:
        return {
            "place": (
                group.rank,
                group.node_rank,
                group.local_rank,
                group.local_world_size,
                group.node_count,
            ),
            "sizes": group.node_sizes,
            "world": total(group.world, group.rank + 1.0),
            "intra": total(group.intra_node, group.rank + 1.0),
            "inter": None if group.inter_node is None else total(group.inter_node, group.rank + 1.0),
            "same": group.intra_node is group.world,
        }


@pytest.mark.parametrize("sizes", [[2], [1, 1], [3], [2, 1], [1, 2], [1, 1, 1]])
def test_world_intra_node_and_inter_node(pools: Pools, port: int, sizes: list[int]) -> None:
    n = sum(sizes)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    for rank, found in enumerate(pools(n).run(where_everybody_is, port, sizes, timeout=100.0)):
        node = max(i for i, first in enumerate(firsts) if first <= rank)
        members = range(firsts[node], firsts[node] + sizes[node])
        assert found["place"] == (rank, node, rank - firsts[node], sizes[node], len(sizes))
        assert found["sizes"] == tuple(sizes)
        assert found["world"] == n * (n + 1) / 2
        assert found["intra"] == sum(member + 1 for member in members)
        assert found["inter"] == (sum(first + 1 for first in firsts) if rank == firsts[node] else None)
        assert found["same"] == (len(sizes) == 1)


def sub_groups(ctx: RankContext, port: int) -> list[Any]:
    with start(port, ctx.rank, ctx.world_size) as group:
        outer = group.new_group([2, 0])  # rank 1 is no member, and need not call
        found: list[Any] = [outer is None]
        if outer is not None:
            again = group.new_group([0, 2])
            found += [outer.rank, outer.world_size, total(outer.world, ctx.rank + 1.0)]
            found += [total(again.world, 1.0), again is not outer, outer.node_sizes]
            outer.close()
            found += [total(again.world, 3.0)]
            inner = again.new_group([1])
            found += [None if inner is None else total(inner.world, ctx.rank)]
            found += [again.control("x").agree("who", str(ctx.rank).encode())]
        found.append(total(group.world, 1.0))
        return found


def test_sub_groups_of_any_shape(pools: Pools, port: int) -> None:
    answers = pools(3).run(sub_groups, port, timeout=100.0)
    assert answers[0] == [False, 0, 2, 4.0, 2.0, True, (2,), 6.0, None, [b"0", b"2"], 3.0]
    assert answers[1] == [True, 3.0]
    assert answers[2] == [False, 1, 2, 4.0, 2.0, True, (2,), 6.0, 2.0, [b"0", b"2"], 3.0]


def attachments(ctx: RankContext, port: int) -> list[Any]:
    with start(port, ctx.rank, ctx.world_size, local_world_size=1, lanes=1) as group:
        one = group.connect("model", 2, hierarchical=True)
        two = group.connect("model", 1)
        shared = group.connect("shared", one.lanes)
        first, second = (one, two) if ctx.rank == 0 else (two, one)
        a, b = torch.ones(2), torch.ones(2)
        # Issued in opposite order on the two ranks: lanes of their own never wait for each other.
        work = {id(each): each.world.all_reduce_(t, "sum") for each, t in ((first, a), (second, b))}
        for each in work.values():
            each.wait()
        found = [a.tolist(), b.tolist(), len(one.lanes), len(two.lanes), shared.lanes == one.lanes]
        found += [len(one.each()), len(two.each()), two.intra_node, one.node_sizes]
        found += [total(shared.world, 1.0)]
        for each in (shared, one, two, two):
            each.close()
        with pytest.raises(UsageError, match="communicators need a lane"):
            group.connect("model", 0)
        return found


def test_attachments_have_lanes_of_their_own(pools: Pools, port: int) -> None:
    for rank, found in enumerate(pools(2).run(attachments, port, timeout=100.0)):
        # Nodes of one rank: on each of them intra-node and world are two communicators.
        assert found == [[2.0, 2.0], [2.0, 2.0], 2, 1, True, 3, 1, None, (1, 1), 2.0], rank


def init_again(ctx: RankContext, port: int) -> list[float]:
    found = []
    for world_size in (3, 3, 2):  # on one address, with no pause; a smaller world too
        if ctx.rank < world_size:
            group = start(port, ctx.rank, world_size)
            found.append(total(group.world, 1.0))
            process_group.shutdown()
    return found


def test_init_again_on_the_same_address(pools: Pools, port: int) -> None:
    assert pools(3).run(init_again, port, timeout=100.0) == [[3.0, 3.0, 2.0], [3.0, 3.0, 2.0], [3.0, 3.0]]


def init_twice(ctx: RankContext, port: int) -> tuple[str, float]:
    group = start(port, ctx.rank, ctx.world_size)
    text = attempt(port, ctx.rank, ctx.world_size)[1]
    found = total(group.world, 1.0)
    process_group.shutdown()
    return text, found


def test_init_before_shutdown_is_refused_on_every_rank_and_the_job_goes_on(pools: Pools, port: int) -> None:
    for rank, (text, found) in enumerate(pools(2).run(init_twice, port, timeout=60.0)):
        assert text.startswith(f"rank {rank} is in the job at 127.0.0.1:{port} already")
        assert found == 2.0


def a_store_of_the_caller(ctx: RankContext, port: int) -> list[float]:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", port, None, ctx.rank == 0, wait_for_workers=False)
    found = []
    for _ in range(3):
        with process_group.init(
            "cpu", store=store, rank=ctx.rank, world_size=ctx.world_size, timeout_s=10.0
        ) as group:
            found.append(total(group.world, 1.0))
    if ctx.rank == 0:
        time.sleep(0.5)  # the store is this process's: others may still be closing
    return found


def test_a_store_of_the_caller_serves_several_inits(pools: Pools, port: int) -> None:
    assert pools(2).run(a_store_of_the_caller, port, timeout=100.0) == [[2.0] * 3] * 2


# ------------------------------------------------------------------------------------------ whole processes

TORCHRUN = """
import os, torch
from bagua_rt import process_group
for _ in range(2):
    with process_group.init("cpu", timeout_s=20) as group:
        t = torch.ones(1) * (group.rank + 1)
        group.world.all_reduce_(t, "sum").wait()
        line = f"sum {t.item()} {group.local_rank} {group.local_world_size} {group.node_sizes}\\n"
        os.write(1, line.encode())  # in one piece: the ranks share a pipe
"""

EXITS = """
import gc, os, sys, torch
from bagua_rt import process_group
how = sys.argv[1]
group = process_group.init("cpu", timeout_s=20)
rank = group.rank
t = torch.ones(1)
group.world.all_reduce_(t, "sum").wait()
lane = group.control("x")
lane.agree("start")
print("sum", t.item(), flush=True)
if how == "exit":
    sys.exit(3)
if how == "raise" and rank == 1:
    raise ValueError("mine")
if how == "twice":
    group.close(); group.close(); process_group.shutdown()
if how == "uneven" and rank == 0:
    process_group.shutdown()
if how == "pending" and rank == 0:
    pending = lane.launch_max(torch.zeros(8, dtype=torch.uint8))
if how == "cycle":
    cycle = [group.connect("y", 1)]
    cycle.append(cycle)
    del cycle
    gc.collect()
"""


def test_torchrun_serves_its_own_store(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(TORCHRUN)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(program),
        ],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("sum")]
    assert sorted(lines) == [f"sum 3.0 {r} 2 (2,)" for r in (0, 0, 1, 1)]


@pytest.mark.parametrize(
    ("how", "codes"),
    [
        ("return", (0, 0)),
        ("exit", (3, 3)),
        ("raise", (0, 1)),
        ("twice", (0, 0)),
        ("uneven", (0, 0)),
        ("pending", (0, 0)),
        ("cycle", (0, 0)),
    ],
)
def test_b58_the_end_of_a_process_keeps_its_exit_code(port: int, how: str, codes: tuple[int, int]) -> None:
    env = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in (0, 1)
    ]
    found = run_scripts([EXITS, EXITS], env=env, args=[how], timeout=100.0)
    assert tuple(each.exit_code for each in found) == codes, [each.stderr for each in found]
    for rank, each in enumerate(found):
        assert each.stdout == "sum 2.0\n"
        assert ("ValueError: mine" in each.stderr) == (how == "raise" and rank == 1)
        assert "Exception ignored" not in each.stderr
        assert "terminate called" not in each.stderr


def test_a_timeout_is_a_timeout_error() -> None:
    assert issubclass(CollectiveTimeoutError, TimeoutError)
