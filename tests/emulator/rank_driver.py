"""What the driver tests run in a process on the emulator."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import emulator
from .native import NOT_INITIALIZED, UNHANDLED_CUDA, Cuda, Nccl, Pointer


def run_memory(_rank: int, _world: int) -> dict[str, Any]:
    cuda = Cuda()
    stream = cuda.stream()
    result: dict[str, Any] = {}
    pointer = cuda.alloc(100)
    fresh = cuda.download(pointer, np.empty(25, np.float32))
    result["fresh memory is NaN"] = bool(np.isnan(fresh).all())
    result["set past the end"] = cuda.code("cuMemsetD8Async", pointer, 0, 101, stream)
    ctypes.memset(pointer + 100, 0, 1)
    cuda.call("cuMemFree", pointer)
    result["overrun is found at the free"] = any("beyond" in t for t in emulator.reports("memory"))
    freed = (ctypes.c_ubyte * 4).from_address(pointer)
    result["freed memory is overwritten"] = bytes(freed) == b"\xfe" * 4
    result["use after free"] = cuda.code("cuMemsetD8Async", pointer, 0, 1, stream)
    result["free twice"] = cuda.code("cuMemFree", pointer)
    async_pointer = Pointer()
    cuda.call("cuMemAllocAsync", ctypes.byref(async_pointer), 100, stream)
    other = cuda.stream()
    emulator.reset()
    cuda.call("cuMemsetD8Async", async_pointer.value, 0, 100, stream)
    cuda.call("cuMemsetD8Async", async_pointer.value, 0, 100, other)
    result["pool memory used on another stream"] = emulator.race_reports().count > 0
    return result


def run_fork(_rank: int, _world: int) -> tuple[int, int]:
    cuda, nccl = Cuda(), Nccl()
    stream = cuda.stream()
    comm = nccl.init(1, nccl.unique_id(), 0)
    cuda.hold(stream, 50)
    pid = os.fork()
    if pid == 0:
        codes = [
            cuda.code("cuStreamSynchronize", stream),
            cuda.code("cuMemAlloc", ctypes.byref(Pointer()), 4),
            cuda.code("cuInit", 0),
        ]
        nccl_code = nccl.all_reduce(comm, stream, 4096, 1)
        good = codes == [NOT_INITIALIZED] * 3 and nccl_code == UNHANDLED_CUDA
        os._exit(0 if good else 1)
    _, status = os.waitpid(pid, 0)
    cuda.sync(stream)
    return os.waitstatus_to_exitcode(status), cuda.code("cuStreamQuery", stream)


def run_unknown(_rank: int, _world: int) -> dict[str, Any]:
    cuda = Cuda()
    function, version_9, version_12 = Pointer(), Pointer(), Pointer()
    get = "cuGetProcAddress_v2"

    def find(name: bytes, out: ctypes.c_void_p, version: int) -> None:
        cuda.call(get, name, ctypes.byref(out), version, 0, None)

    find(b"cuGraphLaunch", function, 10000)
    find(b"cuStreamGetCtx", version_9, 9020)
    find(b"cuStreamGetCtx", version_12, 12050)
    before = emulator.unknown_functions()
    assert function.value
    code = ctypes.CFUNCTYPE(ctypes.c_int)(function.value)()
    return {
        "before": before,
        "code": code,
        "names": emulator.unknown_functions(),
        "versions differ": version_9.value != version_12.value,
    }


def run_noop(_rank: int, _world: int) -> tuple[int, int, bool]:
    cuda, nccl = Cuda(), Nccl()
    stream, event = cuda.stream(), cuda.event()
    comm = nccl.init(1, nccl.unique_id(), 0)
    data = cuda.upload(np.ones(4, np.float32))
    wrong_type = nccl.all_reduce(comm, stream, data, 4, "float64", 99)
    code = nccl.all_reduce(comm, stream, data, 1 << 40)  # nothing looks at the memory
    cuda.call("cuEventRecord", event, stream)
    return wrong_type, code, cuda.code("cuEventQuery", event) == 0


def run_delayed(_rank: int, _world: int) -> float:
    cuda = Cuda()
    stream = cuda.stream()
    pointer = cuda.alloc(4)
    started = time.monotonic()
    for _ in range(20):
        cuda.call("cuMemsetD8Async", pointer, 0, 4, stream)
    cuda.sync(stream)
    return time.monotonic() - started


def run_callback(_rank: int, _world: int) -> tuple[bool, str, list[str]]:
    cuda = Cuda()
    stream = cuda.stream()
    good = emulator.run_on_stream(stream, lambda: None)
    bad = emulator.run_on_stream(stream, lambda: 1 // 0, label="division")
    inside: list[int] = []
    emulator.run_on_stream(stream, lambda: inside.append(cuda.code("cuStreamSynchronize", stream)))
    cuda.sync(stream)
    assert inside == [800], "CUDA_ERROR_NOT_PERMITTED"
    return good.done, repr(bad.exception), emulator.reports("callback")


def run_nothing_loaded(_rank: int, _world: int) -> list[bool]:
    """In a plain process: preload() is enough, and assert_loaded() can tell."""
    plain = "libcuda" not in Path("/proc/self/maps").read_text()
    emulator.preload(emulator.environment(ndev=3))
    emulator.assert_loaded()
    count = ctypes.c_int()
    Cuda().call("cuDeviceGetCount", ctypes.byref(count))
    return [plain, count.value == 3, os.environ["EMU_CUDA_NDEV"] == "3"]


def run_wrong_library(_rank: int, _world: int, impostor: str) -> str:
    ctypes.CDLL(impostor)
    try:
        emulator.assert_loaded()
    except AssertionError as error:
        return str(error)
    return "not noticed"
