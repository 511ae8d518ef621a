"""What the tests of NCCL failures run in the ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import numpy as np

from .native import SUM, Config, Cuda, Nccl, Pointer
from .rank_nccl import Rank, total

COUNT = 1000


def poll_error(me: Rank, seconds: float) -> int:
    """The asynchronous error that shows within some time; 0 if none."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if code := me.nccl.async_error(me.comm):
            return code
        time.sleep(0.005)
    return 0


def abort(me: Rank) -> dict[str, Any]:
    """Aborts while the stream is stuck, and tells how it went."""
    stuck = me.cuda.code("cuStreamQuery", me.stream) != 0
    started = time.monotonic()
    me.nccl.call("ncclCommAbort", me.comm)
    me.cuda.sync(me.stream)
    return {"stuck": stuck, "abort_s": time.monotonic() - started}


def run_mismatch(rank: int, world: int, unique_id: bytes, what: str) -> dict[str, Any]:
    me = Rank(rank, world, unique_id)
    buffer = me.cuda.alloc(8 * COUNT * world)
    odd = rank == 1
    if what == "count":
        me.collective("ncclAllReduce", buffer, buffer, COUNT + odd, 7, SUM)
    elif what == "type":
        me.collective("ncclAllReduce", buffer, buffer, COUNT, 7 + odd, SUM)
    elif what == "op":
        me.collective("ncclAllReduce", buffer, buffer, COUNT, 7, int(odd))
    elif what == "root":
        me.collective("ncclBroadcast", buffer, buffer, COUNT, 7, int(odd))
    elif odd:
        me.collective("ncclAllGather", buffer, buffer + 4 * COUNT * world, COUNT, 7)
    else:
        me.collective("ncclAllReduce", buffer, buffer, COUNT, 7, SUM)
    code = poll_error(me, 10)
    return {"code": code, "text": me.nccl.last_error(me.comm), **abort(me)}


def run_peer_death(rank: int, world: int, unique_id: bytes, hangs: bool) -> dict[str, Any]:
    """The last rank is killed; the others go on with a shrunken communicator."""
    me = Rank(rank, world, unique_id)
    assert total(me, me.comm, 1) == world
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    buffer = me.cuda.alloc(4 * COUNT)
    me.collective("ncclAllReduce", buffer, buffer, COUNT, 7, SUM)
    code = poll_error(me, 0.5 if hangs else 10)
    stuck = me.cuda.code("cuStreamQuery", me.stream) != 0
    out = Pointer()
    excluded = (ctypes.c_int * 1)(world - 1)
    started = time.monotonic()
    me.nccl.call("ncclCommShrink", me.comm, excluded, 1, ctypes.byref(out), None, 1)
    me.nccl.call("ncclCommAbort", me.comm)
    me.cuda.sync(me.stream)
    assert out.value
    shrunk = total(me, out.value, rank + 1)
    me.nccl.call("ncclCommDestroy", out.value)
    elapsed = time.monotonic() - started
    return {"code": code, "stuck": stuck, "sum": shrunk, "recovery_s": elapsed}


def run_absent_peer(rank: int, world: int, unique_id: bytes) -> dict[str, Any]:
    me = Rank(rank, world, unique_id)
    if rank == 1:
        time.sleep(0.6)
        me.nccl.call("ncclCommAbort", me.comm)
        return {}
    buffer = me.cuda.alloc(4 * COUNT)
    me.collective("ncclAllReduce", buffer, buffer, COUNT, 7, SUM)
    code = poll_error(me, 0.3)
    return {"code": code, **abort(me)}


def run_init_without_peer(_rank: int, _world: int) -> tuple[int, float]:
    Cuda()
    nccl = Nccl()
    comm = nccl.init(2, nccl.unique_id(), 0, Config(blocking=0))
    time.sleep(0.1)
    code = nccl.async_error(comm)
    started = time.monotonic()
    nccl.call("ncclCommAbort", comm)
    return code, time.monotonic() - started


def run_crossed(rank: int, world: int, ids: list[bytes], serial: bool) -> bool:
    """Two communicators, used in opposite orders by two ranks: true if both operations finish."""
    me = Rank(rank, world, ids[0])
    other, other_stream = me.nccl.init(world, ids[1], rank), me.cuda.stream()
    buffers = [me.cuda.upload(np.ones(4, np.float32)) for _ in range(2)]
    calls = [(me.comm, me.stream, buffers[0]), (other, other_stream, buffers[1])]
    for comm, stream, buffer in calls if rank == 0 else calls[::-1]:
        assert me.nccl.all_reduce(comm, stream, buffer, 4) == 0
        time.sleep(0.1)
    until = time.monotonic() + (1.0 if serial else 10.0)
    finished = False
    while not finished and time.monotonic() < until:
        finished = all(me.cuda.code("cuStreamQuery", stream) == 0 for _, stream, _ in calls)
        time.sleep(0.01)
    for comm, _, _ in calls:
        me.nccl.call("ncclCommAbort", comm)
    return finished


def run_exit_while_stuck(rank: int, world: int, unique_id: bytes) -> str:
    me = Rank(rank, world, unique_id)
    if rank == 0:
        buffer = me.cuda.alloc(4 * COUNT)
        me.collective("ncclAllReduce", buffer, buffer, COUNT, 7, SUM)
        me.cuda.hold(me.cuda.stream(), 20_000)
    else:
        time.sleep(0.3)
    return "left"
