"""What the caller says, checked and put over what the launcher says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bagua_rt.config import Launch
from bagua_rt.errors import UsageError


def check_numbers(
    rank: int | None, world_size: int | None, local_world_size: int | None, timeout_s: float, lanes: int
) -> None:
    """Are the numbers given to ``init`` of the right kind and range?

    Raises:
        UsageError: one is not; names it.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(
            "rank and world_size go together",
            expected="both or neither",
            got=f"rank={rank}, world_size={world_size}",
        )
    least: dict[str, tuple[Any, int]] = {
        "rank": (rank, 0),
        "world_size": (world_size, 1),
        "local_world_size": (local_world_size, 1),
        "lanes": (lanes, 1),
    }
    for name, (value, low) in least.items():
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise UsageError(
                f"{name} is not usable", expected=f"a whole number from {low} up", got=repr(value)
            )
    seconds: Any = timeout_s
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < 10**7:
        raise UsageError(
            "timeout_s is not usable", expected="a number of seconds above 0", got=repr(timeout_s)
        )


def overridden(
    launch: Launch, rank: int | None, world_size: int | None, local_world_size: int | None
) -> Launch:
    """The launcher's word with the caller's over it."""
    if rank is not None and world_size is not None and (rank, world_size) != (launch.rank, launch.world_size):
        # The launcher's local ranks belong to its own numbering.
        launch = replace(launch, rank=rank, world_size=world_size, local_rank=None, local_world_size=None)
    if local_world_size is not None and local_world_size != launch.local_world_size:
        launch = replace(launch, local_rank=None, local_world_size=local_world_size)
    return launch


def check_launch(launch: Launch, *, has_store: bool) -> None:
    """Can this rank meet the others?

    Raises:
        UsageError: a number is out of range, or there is no place to meet.
    """
    if not launch.rank < launch.world_size:
        raise UsageError(
            "rank is not usable",
            expected=f"a rank below world_size, {launch.world_size}",
            got=f"{launch.rank}",
            fix="ranks count from 0",
        )
    size = launch.local_world_size
    if size is not None and not 0 < size <= launch.world_size:
        raise UsageError(
            "local_world_size is not usable", expected=f"1 to world_size, {launch.world_size}", got=f"{size}"
        )
    if launch.world_size == 1 or has_store:
        return
    if not launch.master_addr or launch.master_port is None or not 0 < launch.master_port < 65536:
        raise UsageError(
            f"rank {launch.rank} of {launch.world_size} doesn't know where to meet the others",
            expected="MASTER_ADDR and MASTER_PORT (1 to 65535) in the environment, or a store",
            got=f"MASTER_ADDR={launch.master_addr}, MASTER_PORT={launch.master_port}",
            fix="start with torchrun, set the two variables, or pass store=",
        )
