"""What launchers say, what callers put over it, and which ranks share a node. No processes here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_rt.config import Launch, RuntimeConfig, first_host, tasks_per_node
from bagua_rt.errors import UsageError
from bagua_rt.rendezvous import Seat, arrange_nodes, check_launch, check_numbers, overridden, within_group

# ------------------------------------------------------------------------------------------ launchers


def test_nothing_set_is_a_world_of_one() -> None:
    launch = Launch.from_environment({})
    assert (launch.launcher, launch.rank, launch.world_size) == ("none", 0, 1)
    assert (launch.master_addr, launch.master_port, launch.store_is_served) == (None, None, False)


def test_an_address_alone_is_kept_for_a_caller_that_passes_rank_and_world_size() -> None:
    launch = Launch.from_environment({"MASTER_ADDR": "host", "MASTER_PORT": "29500"})
    assert (launch.launcher, launch.world_size) == ("none", 1)
    assert (launch.master_addr, launch.master_port) == ("host", 29500)


def test_torchrun() -> None:
    launch = Launch.from_environment(
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29400",
            "TORCHELASTIC_RUN_ID": "abc",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )
    assert launch == Launch("torchrun", 3, 4, 1, 2, "node0", 29400, True, "torchrun/abc/2")


def test_plain_rank_variables_have_no_job_name_and_no_served_store() -> None:
    launch = Launch.from_environment(
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1234"}
    )
    assert (launch.job, launch.store_is_served, launch.local_rank) == ("", False, None)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not usable · expected a whole number, 1 or more · got nothing"),
        ({"WORLD_SIZE": "2"}, "RANK is not usable"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is not usable · expected a whole number · got 'one'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "got '-1'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is not usable · expected a whole number, 1 or more"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT is not usable"),
    ],
)
def test_unusable_variables_are_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Launch.from_environment(environ)
    assert text in str(caught.value)


def test_slurm() -> None:
    environ = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "2",
        "SLURM_PROCID": "4",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_NTASKS": "9",  # the job's, not the step's
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_STEP_NODELIST": "gpu[07-09]",
    }
    launch = Launch.from_environment(environ)
    assert (launch.launcher, launch.rank, launch.world_size) == ("slurm", 4, 5)
    assert (launch.local_rank, launch.local_world_size) == (0, 1)
    assert (launch.master_addr, launch.job) == ("gpu07", "slurm/4711/2")
    assert launch.master_port is not None
    assert 20_000 <= launch.master_port < 40_000
    assert Launch.from_environment({**environ, "SLURM_STEP_ID": "3"}).master_port != launch.master_port


def test_a_slurm_allocation_without_a_step_is_not_a_launch() -> None:
    assert Launch.from_environment({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}).world_size == 1


def test_torchrun_inside_a_slurm_step_is_torchrun() -> None:
    environ = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "RANK": "1", "WORLD_SIZE": "2"}
    assert Launch.from_environment(environ).launcher == "torchrun"


def test_openmpi_on_one_node_needs_no_address() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-host-123@1",
    }
    launch = Launch.from_environment(environ)
    assert (launch.launcher, launch.rank, launch.local_world_size) == ("openmpi", 1, 2)
    assert (launch.master_addr, launch.job) == ("127.0.0.1", "openmpi/prterun-host-123@1")
    assert launch.master_port is not None
    two_nodes = Launch.from_environment({**environ, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert two_nodes.master_addr is None


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("a,b", "a"),
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("n[5,7]-ib,m1", "n5-ib"),
        ("", ""),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(("text", "sizes"), [("2(x3),1", [2, 2, 2, 1]), ("8", [8]), ("", [])])
def test_tasks_per_node(text: str, sizes: list[int]) -> None:
    assert tasks_per_node(text) == sizes


def test_rendezvous_timeout_comes_from_the_environment() -> None:
    assert RuntimeConfig.from_environment({}).rendezvous_timeout_s == 8.0
    environ = {"BAGUA_RT_RENDEZVOUS_TIMEOUT_S": "1.5"}
    assert RuntimeConfig.from_environment(environ).rendezvous_timeout_s == 1.5
    for text in ("soon", "0", "-3", "nan", "inf"):
        with pytest.raises(UsageError, match="BAGUA_RT_RENDEZVOUS_TIMEOUT_S is not usable"):
            RuntimeConfig.from_environment({"BAGUA_RT_RENDEZVOUS_TIMEOUT_S": text})


# ------------------------------------------------------------------------------------------ the caller's word


def test_the_caller_wins_over_the_launcher() -> None:
    launch = Launch("torchrun", 1, 4, 1, 2, "h", 1, True, "j")
    other = overridden(launch, 0, 2, None)
    assert (other.rank, other.world_size) == (0, 2)
    assert (other.local_rank, other.local_world_size) == (None, None), (
        "they belong to the launcher's numbering"
    )
    assert overridden(launch, 1, 4, None) == launch
    assert overridden(launch, None, None, 4).local_world_size == 4
    assert overridden(launch, None, None, 4).local_rank is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"rank": 0},
            "rank and world_size go together · expected both or neither · got rank=0, world_size=None",
        ),
        ({"world_size": 2}, "rank and world_size go together"),
        ({"rank": -1, "world_size": 2}, "rank is not usable · expected a whole number from 0 up · got -1"),
        (
            {"rank": 0, "world_size": 0},
            "world_size is not usable · expected a whole number from 1 up · got 0",
        ),
        ({"rank": 0.0, "world_size": 1}, "rank is not usable"),
        ({"rank": True, "world_size": 2}, "rank is not usable"),
        ({"rank": "0", "world_size": 2}, "got '0'"),
        ({"local_world_size": 0}, "local_world_size is not usable"),
        ({"lanes": 0}, "lanes is not usable"),
        ({"timeout_s": 0}, "timeout_s is not usable"),
        ({"timeout_s": float("nan")}, "timeout_s is not usable"),
        ({"timeout_s": float("inf")}, "timeout_s is not usable"),
        ({"timeout_s": "300"}, "timeout_s is not usable"),
    ],
)
def test_unusable_arguments_are_named(arguments: dict[str, Any], text: str) -> None:
    given_: dict[str, Any] = {"rank": None, "world_size": None, "local_world_size": None}
    with pytest.raises(UsageError) as caught:
        check_numbers(**{**given_, "timeout_s": 300.0, "lanes": 2, **arguments})
    assert text in str(caught.value)


def test_a_rank_must_be_below_the_world_size() -> None:
    with pytest.raises(UsageError, match="a rank below world_size, 2 · got 2"):
        check_launch(Launch(rank=2, world_size=2), has_store=True)


def test_more_than_one_rank_needs_a_place_to_meet() -> None:
    with pytest.raises(UsageError, match=r"rank 1 of 2 doesn't know where to meet the others .* MASTER_ADDR"):
        check_launch(Launch(rank=1, world_size=2), has_store=False)
    with pytest.raises(UsageError, match="MASTER_PORT=0"):
        check_launch(Launch(rank=1, world_size=2, master_addr="h", master_port=0), has_store=False)
    check_launch(Launch(rank=1, world_size=2), has_store=True)
    check_launch(Launch(), has_store=False)


# ------------------------------------------------------------------------------------------ who is where


def seats(
    hosts: str, local_ranks: Sequence[int | None] | None = None, sizes: Sequence[int | None] | None = None
) -> list[Seat]:
    n = len(hosts)
    return [
        Seat(r, n, (local_ranks or [None] * n)[r], (sizes or [None] * n)[r], hosts[r], "cpu", 2, "", f"{r}")
        for r in range(n)
    ]


@pytest.mark.parametrize(
    ("given_", "nodes"),
    [
        (seats("a"), [[0]]),
        (seats("aab"), [[0, 1], [2]]),
        (seats("aab", [0, 1, 0], [2, 2, 1]), [[0, 1], [2]]),
        (seats("abbb", [0, 0, 1, 2], [1, 3, 3, 3]), [[0], [1, 2, 3]]),
        # one machine cut into nodes by the caller's word
        (seats("aaaaa", None, [2, 2, 2, 2, 1]), [[0, 1], [2, 3], [4]]),
        (seats("aaa", None, [1, 2, 2]), [[0], [1, 2]]),
        # round-robin: Open MPI's --map-by node
        (seats("abab", [0, 0, 1, 1], [2, 2, 2, 2]), [[0, 2], [1, 3]]),
        (seats("abab", None, [2, 2, 2, 2]), [[0, 2], [1, 3]]),
        (seats("aba", [0, 0, 1], [2, 1, 2]), [[0, 2], [1]]),
        (seats("aba"), [[0, 2], [1]]),
        # a container per rank: each has a host identity of its own, and the launcher knows better
        (seats("abcd", [0, 1, 0, 1], [2, 2, 2, 2]), [[0, 1], [2, 3]]),
        # local ranks against the grain of the ranks
        (seats("aabb", [1, 0, 0, 1]), [[1, 0], [2, 3]]),
    ],
)
def test_arrange_nodes(given_: list[Seat], nodes: list[list[int]]) -> None:
    assert arrange_nodes(given_) == nodes


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        (seats("aab", None, [2, 2, 2]), "what is said about local_world_size can't be right on rank 2 · "),
        (seats("aa", None, [1, 2]), "got 1 on rank 0, 2 on rank 1"),
        (seats("aaa", None, [2, 2, 3]), "local_world_size can't be right on rank 0, 1, 2 · "),
        (
            seats("aa", [0, 0], [2, 2]),
            "about local ranks can't be right on rank 0, 1 · expected each of 0 to 1 once",
        ),
        (seats("aa", [0, 0], [2, 2]), "got 0 on rank 0, 0 on rank 1"),
    ],
)
def test_contradictions_name_the_ranks(given_: list[Seat], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        arrange_nodes(given_)
    assert text in str(caught.value)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_blocks_of_any_sizes_come_out_as_stated(sizes: list[int]) -> None:
    each = [size for size in sizes for _ in range(size)]
    found = arrange_nodes(seats("a" * len(each), None, each))
    assert [len(node) for node in found] == sizes
    assert [rank for node in found for rank in node] == list(range(len(each)))


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.data())
def test_every_rank_is_on_one_node_and_sub_groups_keep_the_nodes(
    hosts: list[str], data: st.DataObject
) -> None:
    given_ = seats("".join(hosts))
    nodes = arrange_nodes(given_)
    assert sorted(rank for node in nodes for rank in node) == list(range(len(hosts)))
    assert all(len({hosts[rank] for rank in node}) == 1 for node in nodes)
    members = sorted(data.draw(st.sets(st.sampled_from(range(len(hosts))), min_size=1)))
    inner = arrange_nodes(within_group(nodes, given_, members))
    assert [[members[rank] for rank in node] for node in inner] == sorted(
        ([rank for rank in node if rank in members] for node in nodes if set(node) & set(members)), key=min
    )
