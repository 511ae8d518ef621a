"""What the NCCL tests run in the ranks."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from . import emulator
from .native import (
    AVG,
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    MAX,
    MIN,
    NCCL_TYPES,
    PROD,
    SUM,
    Array,
    Config,
    Cuda,
    Nccl,
    NcclError,
    Pointer,
    SimInfo,
)

COUNT = 1000
NUMPY_TYPES: dict[str, Any] = {
    **{name: np.dtype(name) for name in NCCL_TYPES if not name.startswith(("bf", "float8"))},
    "bfloat16": np.dtype(np.uint16),
}


def to_type(values: Array, kind: str) -> Array:
    """Small integers in an NCCL type (bfloat16 as bits)."""
    if kind == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(NUMPY_TYPES[kind])


def from_type(values: Array, kind: str) -> Array:
    if kind == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


class Rank:
    """One rank of a communicator, with a stream."""

    def __init__(self, rank: int, world: int, unique_id: bytes) -> None:
        self.rank, self.world = rank, world
        self.cuda, self.nccl = Cuda(), Nccl()
        self.stream = self.cuda.stream()
        self.comm = self.nccl.init(world, unique_id, rank)

    def collective(self, name: str, *args: Any) -> int:
        return self.nccl.code(name, *args, self.comm, self.stream)

    def done(self) -> None:
        self.cuda.sync(self.stream)

    def destroy(self) -> None:
        self.nccl.call("ncclCommDestroy", self.comm)


def inputs(seed: int, world: int, count: int) -> list[Array]:
    """What each rank sends: small integers, exact in every type and reduction."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 4, count).astype(np.int64) for _ in range(world)]


# ---- collectives -------------------------------------------------------------------------------

REDUCTIONS: dict[int, Callable[[Array], Array]] = {
    SUM: lambda x: np.asarray(x.sum(0)),
    PROD: lambda x: np.asarray(x.prod(0)),
    MAX: lambda x: np.asarray(x.max(0)),
    MIN: lambda x: np.asarray(x.min(0)),
}


def reduce_every_type(me: Rank, seed: int) -> list[str]:
    wrong = []
    for kind in NUMPY_TYPES:
        values = inputs(seed, me.world, COUNT)
        data = to_type(values[me.rank], kind)
        send, recv = me.cuda.upload(data), me.cuda.alloc(data.nbytes)
        for op, numpy_op in REDUCTIONS.items():
            me.cuda.call("cuMemsetD8Async", recv, 0xFF, data.nbytes, me.stream)
            code = me.collective("ncclAllReduce", send, recv, COUNT, NCCL_TYPES[kind], op)
            me.done()
            got = from_type(me.cuda.download(recv, data), kind)
            if code or not (got == numpy_op(np.stack(values))).all():
                wrong.append(f"{kind}, op {op}: {code}")
    return wrong


def average(me: Rank, seed: int) -> list[str]:
    wrong = []
    rng = np.random.default_rng(seed)
    floats = rng.standard_normal((me.world, COUNT)).astype(np.float32)
    pointer = me.cuda.upload(floats[me.rank])
    me.collective("ncclAllReduce", pointer, pointer, COUNT, NCCL_TYPES["float32"], AVG)
    me.done()
    got = me.cuda.download(pointer, floats[0])
    if not np.allclose(got, floats.mean(0), rtol=1e-5, atol=1e-6):
        wrong.append("average of floats")
    numbers = rng.integers(0, 1000, (me.world, COUNT)).astype(np.int32)
    pointer = me.cuda.upload(numbers[me.rank])
    me.collective("ncclAllReduce", pointer, pointer, COUNT, NCCL_TYPES["int32"], AVG)
    me.done()
    if not (me.cuda.download(pointer, numbers[0]) == numbers.sum(0) // me.world).all():
        wrong.append("average of integers")
    return wrong


def move_data(me: Rank, seed: int) -> list[str]:
    """The other collectives, from and into poisoned memory, at every root."""
    world, rank, cuda = me.world, me.rank, me.cuda
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((world, world, COUNT)).astype(np.float32)  # rank, part, element
    part, whole = COUNT * 4, COUNT * 4 * world
    kind = NCCL_TYPES["float32"]
    wrong = []

    def expect(name: str, want: Array | None, send: int, recv: int, *args: Any) -> None:
        cuda.call("cuMemsetD8Async", recv, 0xFF, whole, me.stream)
        if code := me.collective(name, send, recv, COUNT, *args):
            wrong.append(f"{name}: code {code}")
        me.done()
        got = cuda.download(recv, np.empty((world, COUNT), np.float32))
        length = 0 if want is None else len(want)
        exact = want is None or want.dtype == np.float32
        same = want is None or (got[:length] == want).all()
        if not exact and want is not None:
            same = np.allclose(got[:length], want, rtol=1e-5, atol=1e-6)
        if not same or not np.isnan(got[length:]).all():
            wrong.append(f"{name}{args}")

    send, recv = cuda.upload(x[rank]), cuda.alloc(whole)
    reduced = x.astype(np.float64).sum(0)
    expect("ncclAllGather", x[:, 0], send, recv, kind)
    expect("ncclReduceScatter", reduced[rank : rank + 1], send, recv, kind, SUM)
    expect("ncclAlltoAll", x[:, rank], send, recv, kind)
    for root in range(world):
        at_root = rank == root
        expect("ncclBroadcast", x[root, :1], send, recv, kind, root)
        expect("ncclReduce", reduced[:1] if at_root else None, send, recv, kind, SUM, root)
        expect("ncclGather", x[:, 0] if at_root else None, send, recv, kind, root)
        expect("ncclScatter", x[root, rank : rank + 1], send, recv, kind, root)
    # In place: the receive buffer is a part of the send buffer, or the other way round.
    gathered = cuda.upload(x[rank])
    own = gathered + rank * part
    me.collective("ncclAllGather", own, gathered, COUNT, kind)
    me.done()
    diagonal = np.stack([x[r, r] for r in range(world)])
    if not (cuda.download(gathered, x[rank]) == diagonal).all():
        wrong.append("all-gather in place")
    cuda.call("cuMemcpyHtoD", gathered, x[rank].ctypes.data, whole)
    me.collective("ncclReduceScatter", gathered, own, COUNT, kind, SUM)
    me.done()
    got = cuda.download(own, np.empty(COUNT, np.float32))
    if not np.allclose(got, reduced[rank], rtol=1e-5, atol=1e-6):
        wrong.append("reduce-scatter in place")
    return wrong


def premultiplied(me: Rank) -> list[str]:
    """PreMulSum: a factor of each rank's own, from the host and from the device."""
    data = np.full(COUNT, 2, np.float32)
    factor = np.array([me.rank + 1], np.float32)
    want = sum(2 * (r + 1) for r in range(me.world))
    wrong = []
    for residence, at in ((1, factor.ctypes.data), (0, me.cuda.upload(factor))):
        op = ctypes.c_int()
        create = "ncclRedOpCreatePreMulSum"
        me.nccl.call(create, ctypes.byref(op), at, NCCL_TYPES["float32"], residence, me.comm)
        pointer = me.cuda.upload(data)
        code = me.collective("ncclAllReduce", pointer, pointer, COUNT, 7, op.value)
        me.nccl.call("ncclRedOpDestroy", op.value, me.comm)
        me.done()
        if code or not (me.cuda.download(pointer, data) == want).all():
            wrong.append(f"PreMulSum, residence {residence}")
    if me.nccl.code("ncclRedOpDestroy", SUM, me.comm) != INVALID_ARGUMENT:
        wrong.append("a builtin destroyed")
    return wrong


def grouped(me: Rank, seed: int) -> list[str]:
    """Send and recv in a ring and to oneself, collectives in one group, a simulated group."""
    cuda, nccl, world, rank = me.cuda, me.nccl, me.world, me.rank
    wrong = []
    x = np.random.default_rng(seed).standard_normal((world, COUNT)).astype(np.float32)
    send, recv = cuda.upload(x[rank]), cuda.alloc(x[rank].nbytes)
    nccl.call("ncclGroupStart")
    me.collective("ncclSend", send, COUNT, 7, (rank + 1) % world)
    me.collective("ncclRecv", recv, COUNT, 7, (rank - 1) % world)
    nccl.call("ncclGroupEnd")
    me.done()
    if not (cuda.download(recv, x[0]) == x[(rank - 1) % world]).all():
        wrong.append("ring")
    first, second = cuda.upload(x[rank]), cuda.upload(x[rank])
    other = cuda.stream()
    nccl.call("ncclGroupStart")
    me.collective("ncclAllReduce", first, first, COUNT, 7, MAX)
    nccl.call("ncclAllReduce", second, second, COUNT, 7, MIN, me.comm, other)
    nccl.call("ncclGroupEnd")
    cuda.sync(me.stream)
    cuda.sync(other)
    if not (cuda.download(first, x[0]) == x.max(0)).all():
        wrong.append("first of a group")
    if not (cuda.download(second, x[0]) == x.min(0)).all():
        wrong.append("second of a group, other stream")
    info = SimInfo(ctypes.sizeof(SimInfo), 0x74685283, 23203, -1.0)
    nccl.call("ncclGroupStart")
    me.collective("ncclAllReduce", first, first, COUNT, 7, SUM)
    nccl.call("ncclGroupSimulateEnd", ctypes.byref(info))
    me.done()
    if info.estimatedTime < 0 or not (cuda.download(first, x[0]) == x.max(0)).all():
        wrong.append("simulated group")
    return wrong


def registered(me: Rank) -> list[str]:
    memory, handle, window = Pointer(), Pointer(), Pointer()
    nccl = me.nccl
    nccl.call("ncclMemAlloc", ctypes.byref(memory), 8192)
    assert memory.value
    nccl.call("ncclCommRegister", me.comm, memory.value, 8192, ctypes.byref(handle))
    nccl.call("ncclCommDeregister", me.comm, handle)
    wrong = []
    if nccl.code("ncclCommDeregister", me.comm, handle) != INVALID_USAGE:
        wrong.append("deregistered twice")
    register = "ncclCommWindowRegister"
    nccl.call(register, me.comm, memory.value, 4096, ctypes.byref(window), 1)
    odd = nccl.code(register, me.comm, memory.value + 512, 512, ctypes.byref(window), 1)
    if odd != INVALID_ARGUMENT:
        wrong.append("window that is not aligned")
    nccl.call("ncclCommWindowDeregister", me.comm, window)
    nccl.call("ncclMemFree", memory.value)
    return wrong


def run_collectives(rank: int, world: int, unique_id: bytes, seed: int) -> list[str]:
    emulator.assert_loaded()
    me = Rank(rank, world, unique_id)
    wrong = [
        *reduce_every_type(me, seed),
        *average(me, seed),
        *move_data(me, seed),
        *premultiplied(me),
        *grouped(me, seed),
        *registered(me),
    ]
    if me.nccl.number("ncclCommCount", me.comm) != world:
        wrong.append("count")
    if me.nccl.number("ncclCommUserRank", me.comm) != rank:
        wrong.append("rank")
    me.nccl.call("ncclCommFinalize", me.comm)
    me.destroy()
    return wrong


def run_large(rank: int, world: int, unique_id: bytes) -> bool:
    me = Rank(rank, world, unique_id)
    data = np.full(2 << 20, rank + 1, np.float32)
    pointer = me.cuda.upload(data)
    me.collective("ncclAllReduce", pointer, pointer, data.size, 7, SUM)
    me.done()
    right = (me.cuda.download(pointer, data) == sum(range(1, world + 1))).all()
    me.destroy()
    return bool(right)


def run_stress(rank: int, world: int, ids: list[bytes], seed: int) -> list[int]:
    """Many operations on two communicators, each buffer's ordered by events: which went wrong."""
    me = Rank(rank, world, ids[0])
    cuda, choose = me.cuda, random.Random(seed)
    comms = [(me.comm, me.stream), (me.nccl.init(world, ids[1], rank), cuda.stream())]
    sizes = [choose.randint(1, 20_000) for _ in range(12)]
    buffers = [cuda.upload(np.ones(size, np.float32)) for size in sizes]
    events, expected = [cuda.event() for _ in sizes], [1.0] * len(sizes)
    for _ in range(200):
        index = choose.randrange(len(sizes))
        comm, stream = choose.choice(comms)
        cuda.call("cuStreamWaitEvent", stream, events[index], 0)
        op = MAX if expected[index] > 2**20 else SUM
        expected[index] *= 1 if op == MAX else world
        code = me.nccl.all_reduce(comm, stream, buffers[index], sizes[index], "float32", op)
        assert code == 0
        cuda.call("cuEventRecord", events[index], stream)
    cuda.call("cuCtxSynchronize")
    results = [
        cuda.download(buffer, np.empty(size, np.float32)) for buffer, size in zip(buffers, sizes, strict=True)
    ]
    for comm, _ in comms:
        me.nccl.call("ncclCommDestroy", comm)
    return [i for i, got in enumerate(results) if not (got == expected[i]).all()]


# ---- management calls --------------------------------------------------------------------------


def wait_ready(nccl: Nccl, comm: int) -> int:
    """Polls a non-blocking communicator until it is not in progress."""
    until = time.monotonic() + 20
    while (code := nccl.async_error(comm)) == IN_PROGRESS and time.monotonic() < until:
        time.sleep(0.001)
    return code


def split(me: Rank, color: int, key: int, config: Config | None = None) -> int | None:
    out = Pointer()
    argument = None if config is None else ctypes.byref(config)
    code = me.nccl.code("ncclCommSplit", me.comm, color, key, ctypes.byref(out), argument)
    assert code in (0, IN_PROGRESS)
    return out.value


def total(me: Rank, comm: int, value: float) -> float:
    data = np.full(4, value, np.float32)
    pointer = me.cuda.upload(data)
    assert me.nccl.all_reduce(comm, me.stream, pointer, 4) == 0
    me.done()
    return float(me.cuda.download(pointer, data)[0])


def run_management(rank: int, world: int, unique_id: bytes) -> dict[str, Any]:
    me = Rank(rank, world, unique_id)
    nccl = me.nccl
    result: dict[str, Any] = {}
    # Ranks 0 and 2 together, in reverse order; rank 1 alone; then without rank 0.
    child = split(me, rank % 2, -rank)
    assert child
    result["split"] = nccl.number("ncclCommUserRank", child), total(me, child, rank + 1)
    child = split(me, -1 if rank == 0 else 5, 0, Config(blocking=0))
    assert (child is None) == (rank == 0)
    if child:
        assert wait_ready(nccl, child) == 0
        result["split, non-blocking"] = total(me, child, rank + 1)
    if rank != 1:
        out = Pointer()
        excluded = (ctypes.c_int * 1)(1)
        nccl.call("ncclCommShrink", me.comm, excluded, 1, ctypes.byref(out), None, 0)
        assert out.value
        result["shrink"] = nccl.number("ncclCommUserRank", out.value), total(me, out.value, 1)
    # The parent is as good as before.
    result["parent"] = total(me, me.comm, 1)
    nccl.call("ncclCommRevoke", me.comm, 0)
    result["revoked"] = nccl.all_reduce(me.comm, me.stream, me.cuda.alloc(4), 1)
    result["revoked, finalize"] = nccl.code("ncclCommFinalize", me.comm)
    me.destroy()
    result["destroyed twice"] = nccl.code("ncclCommDestroy", me.comm)
    return result


def run_threads(_rank: int, _world: int) -> dict[int, Any]:
    """Ranks that are threads of one process, each on its device, non-blocking, in groups."""
    nccl = Nccl()
    unique_id = nccl.unique_id()
    results: dict[int, Any] = {}
    world = 3

    def body(rank: int) -> None:
        cuda = Cuda(rank)
        stream = cuda.stream()
        started = time.monotonic()
        if rank == 2:
            time.sleep(0.5)  # the others must not be held up in the call
        comm = nccl.init(world, unique_id, rank, Config(blocking=0))
        in_call = time.monotonic() - started
        first = nccl.async_error(comm)
        early = nccl.all_reduce(comm, stream, cuda.alloc(4), 1) if first == IN_PROGRESS else None
        ready = wait_ready(nccl, comm)
        data = cuda.upload(np.full(8, rank + 1, np.float64))
        everyone = cuda.alloc(8 * 8 * world)
        nccl.call("ncclGroupStart")
        nccl.call("ncclAllReduce", data, data, 8, NCCL_TYPES["float64"], SUM, comm, stream)
        for peer in range(world):
            nccl.call("ncclSend", data, 8, NCCL_TYPES["float64"], peer, comm, stream)
            nccl.call("ncclRecv", everyone + 64 * peer, 8, NCCL_TYPES["float64"], peer, comm, stream)
        nccl.call("ncclGroupEnd")
        cuda.sync(stream)
        assert nccl.code("ncclCommFinalize", comm) == IN_PROGRESS
        finalized = wait_ready(nccl, comm)
        nccl.call("ncclCommDestroy", comm)
        reduced = float(cuda.download(data, np.empty(8))[0])
        results[rank] = in_call, first, early, ready, reduced, finalized

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def run_slow_enqueue(_rank: int, _world: int) -> tuple[int, int, int]:
    """A non-blocking communicator that returns before its work is on the stream."""
    cuda, nccl = Cuda(), Nccl()
    compute, comms, event = cuda.stream(), cuda.stream(), cuda.event()
    comm = nccl.init(1, nccl.unique_id(), 0, Config(blocking=0))
    assert wait_ready(nccl, comm) == 0
    pointer = cuda.alloc(16)

    def step(wait: bool) -> tuple[int, int]:
        emulator.reset()
        code = nccl.all_reduce(comm, comms, pointer, 4)
        if wait:
            wait_ready(nccl, comm)
        cuda.call("cuEventRecord", event, comms)
        cuda.call("cuStreamWaitEvent", compute, event, 0)
        cuda.call("cuMemsetD8Async", pointer, 0, 16, compute)
        wait_ready(nccl, comm)
        count = emulator.race_reports().count
        cuda.call("cuCtxSynchronize")
        return code, count

    code, races_with_wait = step(True)
    return code, races_with_wait, step(False)[1]


# ---- what is refused ---------------------------------------------------------------------------


def run_refusals(rank: int, world: int) -> dict[str, Any]:
    cuda, nccl = Cuda(), Nccl()
    result: dict[str, Any] = {}
    for name, fields in {
        "magic": {"magic": 1},
        "size": {"size": 40},
        "version": {"version": 100},
        "blocking": {"blocking": 7},
        "CTAs": {"minCTAs": 8, "maxCTAs": 4},
        "good": {"maxCTAs": 4, "splitShare": 1},
    }.items():
        try:
            comm = nccl.init(1, nccl.unique_id(), 0, Config(**fields))
            nccl.call("ncclCommDestroy", comm)
            result[name] = 0
        except NcclError as error:
            result[name] = error.code
    try:
        nccl.init(1, bytes(128), 0)
    except NcclError as error:
        result["zero id"] = error.code
    comm = nccl.init(1, nccl.unique_id(), 0)
    stream = cuda.stream()
    small = cuda.alloc(64)
    result["buffer too small"] = nccl.all_reduce(comm, stream, small, 17)
    result["buffer just right"] = nccl.all_reduce(comm, stream, small, 16)
    nccl.call("ncclGroupStart")
    nccl.code("ncclSend", small, 1, 7, 0, comm, stream)
    result["send to self alone"] = nccl.code("ncclGroupEnd")
    result["float8 moves"] = nccl.code("ncclAllGather", small, small, 4, 10, comm, stream)
    cuda.sync(stream)
    nccl.call("ncclCommDestroy", comm)
    return result


def run_init(rank: int, world: int, unique_id: bytes) -> tuple[int, str]:
    Cuda()
    nccl = Nccl()
    try:
        nccl.call("ncclCommDestroy", nccl.init(world, unique_id, rank))
    except NcclError as error:
        return error.code, str(error)
    return 0, ""
