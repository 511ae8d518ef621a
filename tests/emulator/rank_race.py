"""What the tests of the race check run in a process on the emulator."""

from __future__ import annotations

import ctypes
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import emulator
from .native import SUM, Cuda, Nccl

STREAMS, EVENTS, BLOCKS, BLOCK_BYTES = 4, 3, 6, 256


# ---- random programs ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """Bytes [begin, end) that an operation reads or writes."""

    begin: int
    end: int
    write: bool

    def conflicts(self, other: Access) -> bool:
        overlap = self.begin < other.end and other.begin < self.end
        return overlap and (self.write or other.write)


@dataclass
class Oracle:
    """Order by brute force: of each operation, the set of all operations before it."""

    before: list[set[int]] = field(default_factory=list)
    accesses: list[tuple[Access, ...]] = field(default_factory=list)
    stream: list[set[int]] = field(default_factory=lambda: [set() for _ in range(STREAMS)])
    event: list[set[int] | None] = field(default_factory=lambda: [None] * EVENTS)
    host: set[int] = field(default_factory=set)

    def operation(self, stream: int, *accesses: Access) -> None:
        self.before.append(self.stream[stream] | self.host)
        self.accesses.append(accesses)
        self.stream[stream] = self.before[-1] | {len(self.before) - 1}

    def host_access(self, access: Access) -> None:
        self.before.append(set(self.host))
        self.accesses.append((access,))
        self.host = self.host | {len(self.before) - 1}

    def racy(self) -> bool:
        return any(
            one not in self.before[other]
            and any(a.conflicts(b) for a in self.accesses[one] for b in self.accesses[other])
            for other in range(len(self.before))
            for one in range(other)
        )


class Program:
    """One random program, run on the emulator and on the oracle at once."""

    def __init__(self, cuda: Cuda, memory: int, streams: list[int], events: list[int]) -> None:
        self.cuda, self.memory, self.streams, self.events = cuda, memory, streams, events

    def run(self, seed: int) -> Oracle:
        oracle = Oracle()
        choose = random.Random(seed)
        steps = (self._copy, self._fill, self._record, self._wait, self._sync, self._host)
        weights = (40, 12, 20, 20, 4, 4)
        for _ in range(choose.randint(3, 16)):
            choose.choices(steps, weights)[0](choose, oracle)
        return oracle

    def _piece(self, choose: random.Random) -> tuple[int, int]:
        half = BLOCK_BYTES // 2
        offset, size = choose.choice([(0, half), (half, half), (0, BLOCK_BYTES)])
        return choose.randrange(BLOCKS) * BLOCK_BYTES + offset, size

    def _copy(self, choose: random.Random, oracle: Oracle) -> None:
        stream = choose.randrange(STREAMS)
        (source, size), (target, _) = self._piece(choose), self._piece(choose)
        if target % BLOCK_BYTES or target // BLOCK_BYTES == source // BLOCK_BYTES:
            size = BLOCK_BYTES // 2
        if abs(target - source) < size:
            return
        handle = self.streams[stream]
        pointers = self.memory + target, self.memory + source
        self.cuda.call("cuMemcpyDtoDAsync", *pointers, size, handle)
        read, write = Access(source, source + size, False), Access(target, target + size, True)
        oracle.operation(stream, read, write)

    def _fill(self, choose: random.Random, oracle: Oracle) -> None:
        stream, (target, size) = choose.randrange(STREAMS), self._piece(choose)
        self.cuda.call("cuMemsetD8Async", self.memory + target, 1, size, self.streams[stream])
        oracle.operation(stream, Access(target, target + size, True))

    def _record(self, choose: random.Random, oracle: Oracle) -> None:
        stream, event = choose.randrange(STREAMS), choose.randrange(EVENTS)
        self.cuda.call("cuEventRecord", self.events[event], self.streams[stream])
        oracle.event[event] = oracle.stream[stream] | oracle.host

    def _wait(self, choose: random.Random, oracle: Oracle) -> None:
        stream, event = choose.randrange(STREAMS), choose.randrange(EVENTS)
        if (recorded := oracle.event[event]) is None:
            return
        self.cuda.call("cuStreamWaitEvent", self.streams[stream], self.events[event], 0)
        oracle.stream[stream] |= recorded | oracle.host

    def _sync(self, choose: random.Random, oracle: Oracle) -> None:
        if choose.random() < 0.5:
            stream = choose.randrange(STREAMS)
            self.cuda.sync(self.streams[stream])
            oracle.host |= oracle.stream[stream]
        elif (recorded := oracle.event[event := choose.randrange(EVENTS)]) is not None:
            self.cuda.call("cuEventSynchronize", self.events[event])
            oracle.host |= recorded

    def _host(self, choose: random.Random, oracle: Oracle) -> None:
        (begin, size), write = self._piece(choose), choose.random() < 0.5
        emulator.declare_host_access(self.memory + begin, size, write)
        oracle.host_access(Access(begin, begin + size, write))


def compare_with_oracle(_rank: int, _world: int, first: int, count: int) -> dict[str, Any]:
    cuda = Cuda()
    memory = cuda.alloc(BLOCKS * BLOCK_BYTES)
    streams = [cuda.stream() for _ in range(STREAMS)]
    wrong, racy = [], 0
    for seed in range(first, first + count):
        events = [cuda.event() for _ in range(EVENTS)]
        expected = Program(cuda, memory, streams, events).run(seed).racy()
        found = emulator.race_reports().count > 0
        racy += expected
        if expected != found:
            wrong.append(seed)
        cuda.call("cuCtxSynchronize")
        emulator.reset()
        for event in events:
            cuda.call("cuEventDestroy", event)
    return {"wrong": wrong, "racy": racy}


# ---- planted bugs, each with a right answer (a sleep hides it) ----------------------------------

COUNT = 4096
NAP_S = 0.1


class Floats:
    """Device memory that looks like a tensor."""

    def __init__(self, pointer: int, count: int) -> None:
        self.pointer, self.count = pointer, count

    def data_ptr(self) -> int:
        return self.pointer

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 4


class Step:
    """A training step in small: compute on one stream, all-reduce on another."""

    def __init__(self) -> None:
        self.cuda, self.nccl = Cuda(), Nccl()
        self.compute, self.comms = self.cuda.stream(), self.cuda.stream()
        self.comm = self.nccl.init(1, self.nccl.unique_id(), 0)
        self.event = self.cuda.event()
        self.gradient, self.other = self.cuda.alloc(COUNT * 4), self.cuda.alloc(COUNT * 4)
        self.host = np.zeros(COUNT, np.float32)

    def fill(self, pointer: int, count: int = COUNT) -> None:
        self.cuda.call("cuMemsetD32Async", pointer, 0x3F800000, count, self.compute)

    def reduce(self, send: int, recv: int, count: int = COUNT) -> None:
        size = ctypes.c_size_t(count)
        self.nccl.call("ncclAllReduce", send, recv, size, 7, SUM, self.comm, self.comms)

    def order(self, earlier: int, later: int) -> None:
        self.cuda.call("cuEventRecord", self.event, earlier)
        self.cuda.call("cuStreamWaitEvent", later, self.event, 0)

    def read_back(self, pointer: int, stream: int) -> None:
        size = self.host.nbytes
        self.cuda.call("cuMemcpyDtoHAsync", self.host.ctypes.data, pointer, size, stream)

    def host_reads(self) -> None:
        emulator.declare_host_access(self.host.ctypes.data, self.host.nbytes, False, "python")

    # Each ends with the answer in self.host.
    def correct(self) -> None:
        self.fill(self.gradient)
        self.order(self.compute, self.comms)
        self.reduce(self.gradient, self.gradient)
        self.order(self.comms, self.compute)
        self.read_back(self.gradient, self.compute)
        self.cuda.sync(self.compute)
        self.host_reads()

    def disjoint_halves(self) -> None:
        self.fill(self.gradient)
        self.order(self.compute, self.comms)
        half = self.gradient + COUNT * 2
        self.reduce(half, half, COUNT // 2)
        self.fill(self.gradient, COUNT // 2)
        self.order(self.comms, self.compute)
        self.read_back(self.gradient, self.compute)
        self.cuda.sync(self.compute)

    def no_wait_before(self) -> None:
        self.fill(self.gradient)
        time.sleep(NAP_S)
        self.reduce(self.gradient, self.gradient)
        self.order(self.comms, self.compute)
        self.read_back(self.gradient, self.compute)
        self.cuda.sync(self.compute)

    def no_wait_after(self) -> None:
        self.fill(self.gradient)
        self.order(self.compute, self.comms)
        self.reduce(self.gradient, self.gradient)
        time.sleep(NAP_S)
        self.read_back(self.gradient, self.compute)
        self.cuda.sync(self.compute)

    def event_recorded_too_early(self) -> None:
        self.cuda.call("cuEventRecord", self.event, self.compute)
        self.fill(self.gradient)
        time.sleep(NAP_S)
        self.cuda.call("cuStreamWaitEvent", self.comms, self.event, 0)
        self.reduce(self.gradient, self.gradient)
        self.order(self.comms, self.compute)
        self.read_back(self.gradient, self.compute)
        self.cuda.sync(self.compute)

    def send_buffer_reused(self) -> None:
        self.fill(self.gradient)
        self.order(self.compute, self.comms)
        self.reduce(self.gradient, self.other)
        time.sleep(NAP_S)
        self.fill(self.gradient)
        self.read_back(self.other, self.comms)
        self.cuda.sync(self.comms)

    def freed_while_in_flight(self) -> None:
        block = ctypes.c_void_p()
        size = ctypes.c_size_t(COUNT * 4)
        self.cuda.call("cuMemAllocAsync", ctypes.byref(block), size, self.compute)
        assert block.value
        self.fill(block.value)
        self.order(self.compute, self.comms)
        self.reduce(block.value, self.other)
        time.sleep(NAP_S)
        self.cuda.call("cuMemFreeAsync", block.value, self.compute)
        self.read_back(self.other, self.comms)
        self.cuda.sync(self.comms)

    def host_reads_before_sync(self) -> None:
        self.fill(self.gradient)
        self.read_back(self.gradient, self.compute)
        time.sleep(NAP_S)
        self.host_reads()
        self.cuda.sync(self.compute)

    def callback_not_waited_for(self) -> None:
        memory = Floats(self.gradient, COUNT)
        view = (ctypes.c_float * COUNT).from_address(self.gradient)

        def backward() -> None:
            view[:] = [1.0] * COUNT

        emulator.run_on_stream(self.compute, backward, writes=[memory], label="backward")
        time.sleep(NAP_S)
        self.reduce(self.gradient, self.gradient)
        self.read_back(self.gradient, self.comms)
        self.cuda.sync(self.comms)


SILENT = ("correct", "disjoint_halves")
RACY = (
    "no_wait_before",
    "no_wait_after",
    "event_recorded_too_early",
    "send_buffer_reused",
    "freed_while_in_flight",
    "host_reads_before_sync",
    "callback_not_waited_for",
)


def run_steps(_rank: int, _world: int) -> dict[str, tuple[bool, list[str]]]:
    step = Step()
    results = {}
    for name in (*SILENT, *RACY):
        step.cuda.call("cuCtxSynchronize")
        emulator.reset()
        getattr(step, name)()
        right = bool((step.host == 1).all())
        step.host[:] = 0
        results[name] = right, emulator.race_reports().texts
    return results


def run_kernel_race(_rank: int, _world: int) -> list[int]:
    """Two kernels on two streams: on one buffer, and on halves of it."""
    from .rank_kernels import Kernels

    kernels = Kernels("sample.cu")
    cuda = kernels.cuda
    pointer = cuda.upload(np.zeros(512, np.float32))
    one, two = cuda.stream(), cuda.stream()
    counts = []
    for begin in (pointer, pointer + 1024):
        emulator.reset()
        for stream, at in ((one, pointer), (two, begin)):
            args = (ctypes.c_void_p(at), ctypes.c_float(1), ctypes.c_int(256))
            kernels.launch("add_scalar", 1, 256, args, stream=stream)
        counts.append(emulator.race_reports().count)
        cuda.call("cuCtxSynchronize")
    return counts
