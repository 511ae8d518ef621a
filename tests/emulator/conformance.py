"""Statements about CUDA and NCCL that the emulator makes true, and that a GPU can refute.

    python -m tests.emulator.conformance          on whatever libcuda.so.1 and libnccl.so.2 are found

On the emulator every statement holds, which shows only that it does what its authors meant. On a
real GPU (leave LD_LIBRARY_PATH alone; BAGUA_RT_NCCL may give libnccl's path) every FAIL is a fault
of the emulator. It takes seconds, needs one device, numpy and NVRTC through cuda.core.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .native import (
    AVG,
    INVALID_ARGUMENT,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_USAGE,
    INVALID_VALUE,
    NCCL_TYPES,
    NO_BINARY,
    NON_BLOCKING,
    NOT_FOUND,
    NOT_READY,
    SUM,
    Cuda,
    Nccl,
    Pointer,
    launch_parameters,
)

HOLD_MS = 100  # how long a stream is kept busy
BLOCKING, WITH_TIMING = 0, 0
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # CUdevice_attribute
MEMORY_TYPE, DEVICE_MEMORY = 2, 2  # CUpointer_attribute, CUmemorytype

KERNEL = """
extern "C" __global__ void add_scalar(float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += a;
}
"""


@dataclass(frozen=True)
class Result:
    """One statement, and whether it held."""

    statement: str
    held: bool
    observed: str


Check = Callable[["World"], object]
STATEMENTS: list[tuple[str, Check]] = []


def states(text: str) -> Callable[[Check], Check]:
    """Registers a check: it returns True if the statement holds, else what was observed."""

    def register(check: Check) -> Check:
        STATEMENTS.append((text, check))
        return check

    return register


class World:
    """A device, two non-blocking streams, and a communicator of one rank."""

    def __init__(self) -> None:
        self.cuda, self.nccl = Cuda(), Nccl()
        self.a, self.b = self.cuda.stream(), self.cuda.stream()
        self.memory = self.cuda.upload(np.zeros(1024, np.float32))
        self.comm = self.nccl.init(1, self.nccl.unique_id(), 0)

    def query(self, stream: int | None) -> int:
        return self.cuda.code("cuStreamQuery", stream)

    def record(self, event: int, stream: int) -> None:
        self.cuda.call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        self.cuda.call("cuStreamWaitEvent", stream, event, 0)

    def attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self.cuda.call("cuDeviceGetAttribute", ctypes.byref(value), which, 0)
        return value.value

    def image(self, arch: str) -> bytes:
        from cuda.core import Program, ProgramOptions

        code = Program(KERNEL, "c++", ProgramOptions(arch=arch, std="c++17")).compile("cubin").code
        assert isinstance(code, bytes)
        return code

    def kernel(self) -> tuple[Pointer, Pointer]:
        """The module and its function add_scalar."""
        module, function = Pointer(), Pointer()
        arch = f"sm_{self.attribute(COMPUTE_MAJOR)}{self.attribute(COMPUTE_MINOR)}"
        self.cuda.call("cuModuleLoadData", ctypes.byref(module), self.image(arch))
        self.cuda.call("cuModuleGetFunction", ctypes.byref(function), module, b"add_scalar")
        return module, function

    def launch(self, function: Pointer, grid: int, block: int, shared: int = 0) -> int:
        args = (ctypes.c_void_p(self.memory), ctypes.c_float(1), ctypes.c_int(1024))
        params, _kept = launch_parameters(args)
        shape = (grid, 1, 1, block, 1, 1, shared)
        launch = "cuLaunchKernel"
        return self.cuda.code(launch, function, *shape, self.a, params.ctypes.data, None)

    def all_reduce(self, count: int = 1, kind: int = 7, op: int = SUM, comm: int | None = 0) -> int:
        comm = self.comm if comm == 0 else comm
        arguments = (self.memory, self.memory, ctypes.c_size_t(count), kind, op, comm, self.a)
        return self.nccl.code("ncclAllReduce", *arguments)


def same(observed: object, expected: object) -> object:
    """True, or what was observed."""
    return True if observed == expected else f"observed {observed}, stated {expected}"


# ---- streams and events ------------------------------------------------------------------------


@states("a busy stream's query is NOT_READY, another stream's is not, and after a sync none is")
def _(w: World) -> object:
    w.cuda.hold(w.a, HOLD_MS)
    busy = w.query(w.a), w.query(w.b)
    w.cuda.sync(w.a)
    return same((*busy, w.query(w.a)), (NOT_READY, 0, 0))


@states("an event that was never recorded is ready, and waiting for it waits for nothing")
def _(w: World) -> object:
    event = w.cuda.event()
    w.cuda.hold(w.a, HOLD_MS)
    w.wait(w.b, event)
    return same((w.cuda.code("cuEventQuery", event), w.query(w.b)), (0, 0))


@states("a wait takes the record made before it, not a later one")
def _(w: World) -> object:
    event = w.cuda.event()
    w.record(event, w.a)
    w.wait(w.b, event)
    w.cuda.hold(w.a, 5 * HOLD_MS)
    w.record(event, w.a)
    started = time.monotonic()
    w.cuda.sync(w.b)
    early = time.monotonic() - started < 4 * HOLD_MS / 1000
    return same((early, w.cuda.code("cuEventQuery", event)), (True, NOT_READY))


@states("an event may be destroyed while a stream waits for it, and the wait still holds")
def _(w: World) -> object:
    event = w.cuda.event()
    w.cuda.hold(w.a, HOLD_MS)
    w.record(event, w.a)
    w.wait(w.b, event)
    code = w.cuda.code("cuEventDestroy", event)
    return same((code, w.query(w.b)), (0, NOT_READY))


@states("elapsed time: of events never recorded INVALID_HANDLE, of pending ones NOT_READY")
def _(w: World) -> object:
    first, second = w.cuda.event(WITH_TIMING), w.cuda.event(WITH_TIMING)
    ms = ctypes.c_float()

    def elapsed() -> int:
        return w.cuda.code("cuEventElapsedTime", ctypes.byref(ms), first, second)

    codes = [elapsed()]
    w.record(first, w.a)
    w.cuda.hold(w.a, HOLD_MS)
    w.record(second, w.a)
    codes.append(elapsed())
    w.cuda.sync(w.a)
    codes.append(elapsed())
    return same((codes, ms.value >= HOLD_MS * 0.8), ([INVALID_HANDLE, NOT_READY, 0], True))


@states("elapsed time of an event without timing is INVALID_HANDLE")
def _(w: World) -> object:
    first, second = w.cuda.event(), w.cuda.event(WITH_TIMING)
    w.record(first, w.a)
    w.record(second, w.a)
    w.cuda.sync(w.a)
    code = w.cuda.code("cuEventElapsedTime", ctypes.byref(ctypes.c_float()), first, second)
    return same(code, INVALID_HANDLE)


@states("work in the default stream waits for blocking streams, not for non-blocking ones")
def _(w: World) -> object:
    blocking = w.cuda.stream(BLOCKING)
    w.cuda.hold(blocking, HOLD_MS)
    w.cuda.hold(0, 0)
    behind_blocking = w.query(None)
    w.cuda.call("cuCtxSynchronize")
    w.cuda.hold(w.a, 3 * HOLD_MS)
    w.cuda.hold(0, 0)
    time.sleep(HOLD_MS / 1000)
    return same((behind_blocking, w.query(None)), (NOT_READY, 0))


@states("a blocking stream waits for the default stream, a non-blocking one does not")
def _(w: World) -> object:
    blocking = w.cuda.stream(BLOCKING)
    w.cuda.hold(0, 3 * HOLD_MS)
    w.cuda.hold(blocking, 0)
    w.cuda.hold(w.a, 0)
    time.sleep(HOLD_MS / 1000)
    return same((w.query(blocking), w.query(w.a)), (NOT_READY, 0))


@states("a stream may be destroyed with work pending, which is still done")
def _(w: World) -> object:
    stream, pointer = w.cuda.stream(NON_BLOCKING), w.cuda.upload(np.zeros(64, np.uint8))
    w.cuda.hold(stream, HOLD_MS)
    w.cuda.call("cuMemsetD8Async", pointer, 7, 64, stream)
    code = w.cuda.code("cuStreamDestroy", stream)
    w.cuda.call("cuCtxSynchronize")
    done = bool((w.cuda.download(pointer, np.zeros(64, np.uint8)) == 7).all())
    return same((code, done), (0, True))


@states("cuMemsetD8 does not wait for non-blocking streams")
def _(w: World) -> object:
    w.cuda.hold(w.a, HOLD_MS)
    w.cuda.call("cuMemsetD8", w.memory, 0, 4)
    return same(w.query(w.a), NOT_READY)


@states("a new thread has no current context")
def _(w: World) -> object:
    codes = []

    def body() -> None:
        out = Pointer()
        codes.append(w.cuda.code("cuStreamCreate", ctypes.byref(out), NON_BLOCKING))
        w.cuda.call("cuCtxSetCurrent", w.cuda.context)
        codes.append(w.cuda.code("cuStreamCreate", ctypes.byref(out), NON_BLOCKING))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return same(codes, [INVALID_CONTEXT, 0])


# ---- memory ------------------------------------------------------------------------------------


@states("freeing what was not allocated, and allocating nothing, are INVALID_VALUE")
def _(w: World) -> object:
    free = w.cuda.code("cuMemFree", 0x1234)
    nothing = w.cuda.code("cuMemAlloc", ctypes.byref(Pointer()), 0)
    return same((free, nothing), (INVALID_VALUE, INVALID_VALUE))


@states("plain host memory has no pointer attributes, device memory has")
def _(w: World) -> object:
    value = ctypes.c_uint()
    host = np.zeros(64, np.uint8)

    def memory_type(pointer: int) -> int:
        get = "cuPointerGetAttribute"
        return w.cuda.code(get, ctypes.byref(value), MEMORY_TYPE, pointer)

    codes = memory_type(host.ctypes.data), memory_type(w.memory)
    return same((*codes, value.value), (INVALID_VALUE, 0, DEVICE_MEMORY))


# ---- kernels -----------------------------------------------------------------------------------


@states("a function that the image does not hold is NOT_FOUND")
def _(w: World) -> object:
    module, _function = w.kernel()
    get = "cuModuleGetFunction"
    return same(w.cuda.code(get, ctypes.byref(Pointer()), module, b"nope"), NOT_FOUND)


@states("a cubin of another major architecture is NO_BINARY_FOR_GPU")
def _(w: World) -> object:
    other = "sm_80" if w.attribute(COMPUTE_MAJOR) != 8 else "sm_90"
    load = "cuModuleLoadData"
    return same(w.cuda.code(load, ctypes.byref(Pointer()), w.image(other)), NO_BINARY)


@states("arguments are taken at the launch: they may be overwritten at once")
def _(w: World) -> object:
    _module, function = w.kernel()
    amount = ctypes.c_float(1)
    args = (ctypes.c_void_p(w.memory), amount, ctypes.c_int(1024))
    params, _kept = launch_parameters(args)
    w.cuda.call("cuMemsetD32Async", w.memory, 0, 1024, w.a)
    w.cuda.hold(w.a, HOLD_MS)
    shape = (4, 1, 1, 256, 1, 1, 0)
    w.cuda.call("cuLaunchKernel", function, *shape, w.a, params.ctypes.data, None)
    amount.value = 100
    w.cuda.sync(w.a)
    return same(float(w.cuda.download(w.memory, np.zeros(1024, np.float32)).max()), 1.0)


@states("an empty grid or block, 2,048 threads, and 64 KiB unasked for are INVALID_VALUE")
def _(w: World) -> object:
    _module, function = w.kernel()
    shapes = ((0, 1, 0), (1, 0, 0), (1, 2048, 0), (1, 32, 65536))
    codes = [w.launch(function, *shape) for shape in shapes]
    after = w.cuda.code("cuCtxSynchronize")
    return same((codes, after), ([INVALID_VALUE] * 4, 0))


# ---- NCCL --------------------------------------------------------------------------------------


@states("NCCL: a rank out of range is an invalid argument")
def _(w: World) -> object:
    from .native import NcclError

    try:
        w.nccl.init(2, w.nccl.unique_id(), 5)
    except NcclError as error:
        return same(error.code, INVALID_ARGUMENT)
    return "no error"


@states("NCCL: no communicator, an unknown type, operation or root are invalid arguments")
def _(w: World) -> object:
    root = w.nccl.code("ncclBcast", w.memory, 1, 7, 3, w.comm, w.a)
    codes = [w.all_reduce(comm=None), w.all_reduce(kind=99), w.all_reduce(op=99), root]
    return same(codes, [INVALID_ARGUMENT] * 4)


@states("NCCL: a count of 0 is no error")
def _(w: World) -> object:
    return same(w.all_reduce(count=0), 0)


@states("NCCL: ncclGroupEnd alone is an invalid usage")
def _(w: World) -> object:
    return same(w.nccl.code("ncclGroupEnd"), INVALID_USAGE)


@states("NCCL: an error inside a group is returned by ncclGroupEnd, and the communicator goes on")
def _(w: World) -> object:
    w.nccl.call("ncclGroupStart")
    inside = w.all_reduce(op=99)
    codes = inside, w.nccl.code("ncclGroupEnd"), w.all_reduce()
    w.cuda.sync(w.a)
    return same(codes, (INVALID_ARGUMENT, INVALID_ARGUMENT, 0))


@states("NCCL: a collective returns before its stream gets to it")
def _(w: World) -> object:
    w.all_reduce()  # whatever the first call sets up
    w.cuda.sync(w.a)
    w.cuda.hold(w.a, 3 * HOLD_MS)
    started = time.monotonic()
    code = w.all_reduce(1024)
    fast = time.monotonic() - started < HOLD_MS / 1000
    return same((code, fast, w.query(w.a)), (0, True, NOT_READY))


@states("NCCL: alone, a sum and an average leave the values as they are; no asynchronous error")
def _(w: World) -> object:
    values = np.arange(1024, dtype=np.float32)
    for op in (SUM, AVG):
        w.cuda.call("cuMemcpyHtoD", w.memory, values.ctypes.data, values.nbytes)
        w.nccl.all_reduce(w.comm, w.a, w.memory, 1024, "float32", op)
        w.cuda.sync(w.a)
        if not (w.cuda.download(w.memory, values) == values).all():
            return f"operation {op}"
    return same(w.nccl.async_error(w.comm), 0)


@states("NCCL: a send to oneself needs its recv in the same group")
def _(w: World) -> object:
    w.nccl.call("ncclGroupStart")
    w.nccl.code("ncclSend", w.memory, 4, NCCL_TYPES["float32"], 0, w.comm, w.a)
    return same(w.nccl.code("ncclGroupEnd"), INVALID_USAGE)


@states("NCCL: destroying no communicator is no error")
def _(w: World) -> object:
    return same((w.nccl.code("ncclCommDestroy", None), w.nccl.code("ncclCommAbort", None)), (0, 0))


def put(world: World, statement: str, check: Check) -> Result:
    """Checks one statement, from an idle device, and leaves it idle."""
    try:
        observed = check(world)
    except Exception as error:
        observed = f"{type(error).__name__}: {error}"
    world.cuda.call("cuCtxSynchronize")
    return Result(statement, observed is True, "" if observed is True else str(observed))


def run_all() -> list[Result]:
    """Checks every statement."""
    world = World()
    results = [put(world, statement, check) for statement, check in STATEMENTS]
    world.nccl.call("ncclCommDestroy", world.comm)
    return results


def main() -> int:
    """Prints PASS or FAIL for each statement; the exit status is 1 if any failed."""
    results = run_all()
    for result in results:
        detail = f" ({result.observed})" if result.observed else ""
        print(("PASS " if result.held else "FAIL ") + result.statement + detail)
    failed = sum(not result.held for result in results)
    print(f"{len(results) - failed} of {len(results)} statements hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
