"""Which ranks share a node: pure, from what every rank says about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bagua_rt.errors import UsageError


@dataclass(frozen=True)
class Seat:
    """What a rank says about itself.

    Attributes:
        rank: The rank that it claims.
        world_size: The number of ranks that it expects.
        local_rank: Its rank on its node, where known.
        local_world_size: The number of ranks on its node, where known.
        host: `host_identity`.
        device: The kind of device, "cpu" or "cuda".
        lanes: Its number of lanes.
        job: `bagua_rt.config.Launch.job`.
        token: A text that no other process has.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    host: str
    device: str
    lanes: int
    job: str
    token: str


def arrange_nodes(seats: Sequence[Seat]) -> list[list[int]]:
    """Sort ranks into nodes.

    Blocks of consecutive ranks, as the ranks' ``local_world_size`` state them, come first: they may be of
    unequal size, and may cut one machine into several nodes. Where the statements make no such blocks
    (round-robin placement), ranks with one host identity are a node.

    Args:
        seats: All seats, by rank.

    Returns:
        The ranks of each node, by local rank; nodes by their lowest rank.

    Raises:
        UsageError: the statements contradict each other; names the ranks.
    """
    hosts = _by_host(seats)
    blocks = _blocks(seats)
    if blocks is not None:
        one_host_each = all(len({seats[rank].host for rank in node}) == 1 for node in blocks)
        if one_host_each or _misfit(seats, hosts) is not None:
            return blocks
    misfit = _misfit(seats, hosts)
    if misfit is not None:
        raise misfit
    return hosts


def _blocks(seats: Sequence[Seat]) -> list[list[int]] | None:
    """Consecutive ranks as their local_world_size says; None where that does not come out even."""
    nodes: list[list[int]] = []
    first = 0
    while first < len(seats):
        size = seats[first].local_world_size
        if size is None or first + size > len(seats):
            return None
        node = list(range(first, first + size))
        for local_rank, rank in enumerate(node):
            stated = seats[rank].local_rank
            if seats[rank].local_world_size != size or stated not in (None, local_rank):
                return None
        nodes.append(node)
        first += size
    return nodes


def _by_host(seats: Sequence[Seat]) -> list[list[int]]:
    nodes: dict[str, list[int]] = {}
    for seat in seats:
        nodes.setdefault(seat.host, []).append(seat.rank)
    for node in nodes.values():
        if all(seats[rank].local_rank is not None for rank in node):
            node.sort(key=lambda rank: (seats[rank].local_rank, rank))
    return sorted(nodes.values(), key=min)


def _misfit(seats: Sequence[Seat], nodes: list[list[int]]) -> UsageError | None:
    """Why these nodes don't fit what the ranks state, if they don't."""
    for node in nodes:
        stated = [seats[rank].local_rank for rank in node]
        sizes = {seats[rank].local_world_size for rank in node} - {None}
        names = ", ".join(str(rank) for rank in sorted(node))
        local_ranks = {rank: seats[rank].local_rank for rank in sorted(node)}
        if sizes and sizes != {len(node)}:
            got = {rank: seats[rank].local_world_size for rank in sorted(node)}
            return UsageError(
                f"what is said about local_world_size can't be right on rank {names}",
                expected=f"consecutive ranks of one size each, or {len(node)}, the ranks on one machine",
                got=", ".join(f"{size} on rank {rank}" for rank, size in got.items()),
                fix="give every rank the number of ranks on its own node",
            )
        if None not in stated and stated != list(range(len(node))):
            return UsageError(
                f"what is said about local ranks can't be right on rank {names}",
                expected=f"each of 0 to {len(node) - 1} once: these ranks are on one machine",
                got=", ".join(f"{local} on rank {rank}" for rank, local in local_ranks.items()),
                fix="correct LOCAL_RANK and LOCAL_WORLD_SIZE",
            )
    return None


def within_group(nodes: list[list[int]], seats: Sequence[Seat], members: list[int]) -> list[Seat]:
    """The members' seats as a sub-group numbers them; nodes stay the parent's."""
    placed: dict[int, Seat] = {}
    for number, node in enumerate(nodes):
        present = [rank for rank in node if rank in members]
        for local_rank, rank in enumerate(present):
            placed[rank] = replace(
                seats[rank],
                rank=members.index(rank),
                world_size=len(members),
                local_rank=local_rank,
                local_world_size=len(present),
                host=f"node {number}",
            )
    return [placed[rank] for rank in members]
