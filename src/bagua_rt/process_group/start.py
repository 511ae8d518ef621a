"""`init` and `shutdown`: from a launcher's variables to the group of all ranks, and back."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from bagua_rt import rendezvous
from bagua_rt.backend import Backend
from bagua_rt.backends import open_backend
from bagua_rt.config import Launch, RuntimeConfig
from bagua_rt.errors import ClosedError, UsageError
from bagua_rt.process_group.group import Job, ProcessGroup, open_groups
from bagua_rt.rendezvous import Seat, arrange_nodes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_log = logging.getLogger("bagua_rt")
_jobs: WeakKeyDictionary[ProcessGroup, Launch] = WeakKeyDictionary()  # by their first groups
_inherited: list[ProcessGroup] = []  # open in the process that forked this one: kept, so never destroyed here


def init(
    device: str | torch.device | None = None,
    *,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_world_size: int | None = None,
    timeout_s: float = 300.0,
    lanes: int = 2,
    check: bool = False,
) -> ProcessGroup:
    """Meet the other ranks and make the group of all of them. Collective over the job.

    What is not given comes from the launcher: torchrun, Slurm's srun and Open MPI's mpirun are understood.
    With none of them the world has one rank, and needs no port, store or library.

    Args:
        device: "cpu", "cuda", "cuda:1"; None takes a CUDA device where one is visible, else the CPU.
        store: A ``torch.distributed`` store to meet through, in place of MASTER_ADDR and MASTER_PORT.
        rank: This process's rank; together with `world_size`.
        world_size: Number of ranks; together with `rank`.
        local_world_size: Number of ranks on this node.
        timeout_s: The deadline of every wait that names none.
        lanes: Number of communication streams.
        check: Compare each call of the low-level communication API between the ranks before it is launched:
            for finding out which rank takes another way. Costs some store round trips per call.

    Returns:
        The group; use it as a context manager, or `shutdown` at the end.

    Raises:
        UsageError: an argument or a variable is not usable, the port is in use, MASTER_ADDR does not
            resolve, or the ranks contradict each other.
        CollectiveTimeoutError: nobody listens at MASTER_ADDR:MASTER_PORT, or ranks are missing.
        BackendUnavailableError: the device is not there.
        PeerError: rank 0 died during the rendezvous.
    """
    rendezvous.check_numbers(rank, world_size, local_world_size, timeout_s, lanes)
    config = RuntimeConfig.from_environment()
    launch = rendezvous.overridden(Launch.from_environment(), rank, world_size, local_world_size)
    rendezvous.check_launch(launch, has_store=store is not None)
    if store is None:
        _refuse_twice(launch)
    local_rank = launch.local_rank
    if local_rank is None:  # consecutive ranks of one node still get a device each
        local_rank = launch.rank % (launch.local_world_size or launch.world_size)
    backend = open_backend(device, timeout_s=timeout_s, config=config, local_rank=local_rank)
    _log.info(
        "rank %d of %d on %s%s",
        launch.rank,
        launch.world_size,
        backend.device.torch_device,
        " (chosen: no device was asked for)" if device is None else "",
    )
    with contextlib.ExitStack() as undo:
        undo.callback(backend.close)
        seat = _seat(launch, backend, lanes)
        job = _meet(seat, launch, backend, store, timeout_s, config.rendezvous_timeout_s, bool(check))
        undo.pop_all()
        undo.callback(job.close)
        seats = (seat,) if job.meeting is None else job.meeting.seats
        group = ProcessGroup(job, seats, seat.rank, "job", lanes, owns_job=True)
        undo.pop_all()
    if store is None:
        _jobs[group] = launch
    return group


def _refuse_twice(launch: Launch) -> None:
    """Where rank 0 serves the store, one job at a time meets there."""
    if launch.world_size == 1 or launch.store_is_served:
        return
    seats = [
        (job.master_addr, job.master_port, job.rank) for group, job in _jobs.items() if not group.is_closed
    ]
    if (launch.master_addr, launch.master_port, launch.rank) in seats:
        raise UsageError(
            f"rank {launch.rank} is in the job at {launch.master_addr}:{launch.master_port} already",
            expected="one init() in each process, until shutdown()",
            fix="default_group() gives its group, new_group() makes others; shutdown() before another init()",
        )


def default_group() -> ProcessGroup:
    """The first group made and still open.

    Raises:
        UsageError: there is none.
        ClosedError: there is one, but in the process that forked this one.
    """
    if open_groups:
        return open_groups[0]
    if _inherited:
        raise ClosedError(
            "the process group belongs to the process that forked this one", fix="call init() in this process"
        )
    raise UsageError(
        "there is no process group", expected="init() to have been called", fix="call init() first"
    )


def shutdown() -> None:
    """Close every group of this process, the last made first. Idempotent.

    Raises:
        BaseException: the first error of a callback registered with `ProcessGroup.on_close`.
    """
    with contextlib.ExitStack() as steps:
        for group in open_groups:
            steps.callback(group.close)


def _seat(launch: Launch, backend: Backend, lanes: int) -> Seat:
    return Seat(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        host=rendezvous.host_identity(),
        device=backend.device.type,
        lanes=lanes,
        job=launch.job,
        token=rendezvous.process_token(),
    )


def _meet(
    seat: Seat,
    launch: Launch,
    backend: Backend,
    store: Store | None,
    timeout_s: float,
    search_s: float,
    check: bool,
) -> Job:
    if seat.world_size == 1:
        return Job(backend, None, None, None, store or rendezvous.lone_store(), timeout_s, check)
    meeting = rendezvous.join(
        seat,
        host=launch.master_addr or "",
        port=launch.master_port or 0,
        store=store,
        is_served=launch.store_is_served,
        timeout_s=timeout_s,
        search_s=search_s,
        check=_check_nodes,
    )
    wiring, boards = meeting.client.clone(), meeting.client.clone()
    return Job(backend, meeting, wiring, boards, meeting.client.prefixed("user"), timeout_s, check)


def _check_nodes(seats: Sequence[Seat]) -> None:
    arrange_nodes(seats)


def _after_fork() -> None:
    """In a forked child: the parent's groups are not ours, and must not be destroyed here either."""
    _inherited.extend(open_groups)
    open_groups.clear()
    rendezvous.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)


def torch_has_a_group() -> bool:
    """Has torch.distributed a default group in this process, which torch's own modules use?"""
    return dist.is_available() and dist.is_initialized()
