"""Thin ctypes views of libcuda and libnccl for the emulator's own tests and conformance.py.

They load by name, so they run on whatever the process has: the emulator, or the real libraries.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Pointer = ctypes.c_void_p
Array = npt.NDArray[Any]

SUCCESS, INVALID_VALUE, NOT_INITIALIZED, INVALID_CONTEXT, NO_BINARY = 0, 1, 3, 201, 209
INVALID_IMAGE, INVALID_HANDLE, NOT_FOUND, NOT_READY = 200, 400, 500, 600
NON_BLOCKING, DISABLE_TIMING = 1, 2

NCCL_TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9, "float8e4m3": 10, "float8e5m2": 11,
}  # fmt: skip
SUM, PROD, MAX, MIN, AVG = range(5)
UNHANDLED_CUDA, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS = range(1, 8)
UNDEF = -(2**31)

# Names that cuda.h maps to versioned ones.
_VERSIONED = {
    name: f"{name}_v2"
    for name in [
        "cuMemAlloc",
        "cuMemFree",
        "cuMemcpyHtoD",
        "cuMemcpyDtoH",
        "cuMemcpyDtoD",
        "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync",
        "cuMemcpyDtoDAsync",
        "cuMemsetD8",
        "cuMemsetD32",
        "cuStreamDestroy",
        "cuEventDestroy",
        "cuMemGetInfo",
        "cuDevicePrimaryCtxRelease",
        "cuMemAllocHost",
    ]
}


class CudaError(RuntimeError):
    """A driver call failed."""


class NcclError(RuntimeError):
    """An NCCL call failed; `code` is its ncclResult_t."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.32."""

    _fields_ = (
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int), ("cgaClusterSize", ctypes.c_int), ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int), ("netName", ctypes.c_char_p), ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int), ("commName", ctypes.c_char_p),
        ("collnetEnable", ctypes.c_int), ("CTAPolicy", ctypes.c_int), ("shrinkShare", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int), ("nChannelsPerNetPeer", ctypes.c_int),
        ("nvlinkCentricSched", ctypes.c_int), ("graphUsageMode", ctypes.c_int),
        ("numRmaCtx", ctypes.c_int), ("maxP2pPeers", ctypes.c_int),
        ("graphStreamOrdering", ctypes.c_int), ("launchOrderImplicit", ctypes.c_int),
        ("numRmaSig", ctypes.c_int), ("rmaEagerInit", ctypes.c_int), ("hostCftMode", ctypes.c_int),
        ("nvlsHostMode", ctypes.c_int),
    )  # fmt: skip

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        for name, kind in self._fields_[3:]:
            setattr(self, name, None if kind is ctypes.c_char_p else UNDEF)
        self.size, self.magic, self.version = ctypes.sizeof(self), 0xCAFEBEEF, 23203
        for name, value in fields.items():
            setattr(self, name, value)


class SimInfo(ctypes.Structure):
    """ncclSimInfo_t."""

    _fields_ = (
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
        ("estimatedTime", ctypes.c_float),
    )  # fmt: skip


class Cuda:
    """The driver: call(name, ...) checks the result, code(name, ...) returns it."""

    def __init__(self, device: int = 0) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.context = Pointer()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.call("cuCtxSetCurrent", self.context)

    def code(self, name: str, *args: Any) -> int:
        function = getattr(self.lib, _VERSIONED.get(name, name))
        return int(function(*(_as_argument(a) for a in args)))

    def call(self, name: str, *args: Any) -> None:
        if code := self.code(name, *args):
            text = ctypes.c_char_p()
            self.lib.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'?').decode()}")

    def _make(self, name: str, *args: Any) -> int:
        out = Pointer()
        self.call(name, ctypes.byref(out), *args)
        assert out.value
        return out.value

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self._make("cuStreamCreate", ctypes.c_uint(flags))

    def event(self, flags: int = DISABLE_TIMING) -> int:
        return self._make("cuEventCreate", ctypes.c_uint(flags))

    def alloc(self, size_bytes: int) -> int:
        return self._make("cuMemAlloc", size_bytes)

    def upload(self, array: Array, extra_bytes: int = 0) -> int:
        """A device copy of an array."""
        pointer = self.alloc(array.nbytes + extra_bytes)
        self.call("cuMemcpyHtoD", pointer, array.ctypes.data, array.nbytes)
        return pointer

    def download(self, pointer: int, like: Array) -> Array:
        out = np.empty_like(like)
        self.call("cuMemcpyDtoH", out.ctypes.data, pointer, out.nbytes)
        return out

    def sync(self, stream: int) -> None:
        self.call("cuStreamSynchronize", stream)

    def hold(self, stream: int, ms: int) -> None:
        """Keeps a stream busy for some time, without the GIL."""
        usleep = ctypes.cast(ctypes.CDLL(None).usleep, Pointer)
        self.call("cuLaunchHostFunc", stream, usleep, ms * 1000)


class Nccl:
    """NCCL: call(name, ...) checks the result, code(name, ...) returns it."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(os.environ.get("BAGUA_RT_NCCL", "libnccl.so.2"))
        self.lib.ncclGetErrorString.restype = ctypes.c_char_p
        self.lib.ncclGetLastError.restype = ctypes.c_char_p
        self.lib.ncclGetLastError.argtypes = [Pointer]

    def code(self, name: str, *args: Any) -> int:
        return int(getattr(self.lib, name)(*(_as_argument(a) for a in args)))

    def call(self, name: str, *args: Any) -> None:
        if code := self.code(name, *args):
            raise NcclError(code, f"{name}: {self.last_error()}")

    def last_error(self, comm: int | None = None) -> str:
        return str(self.lib.ncclGetLastError(comm).decode())

    def unique_id(self) -> bytes:
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def init(self, world: int, unique_id: bytes, rank: int, config: Config | None = None) -> int:
        """A communicator; with a non-blocking config, possibly not ready yet."""
        out = Pointer()
        code = self.code(
            "ncclCommInitRankConfig",
            *(ctypes.byref(out), world, UniqueId.from_buffer_copy(unique_id), rank),
            None if config is None else ctypes.byref(config),
        )
        if code not in (0, IN_PROGRESS):
            raise NcclError(code, self.last_error())
        assert out.value
        return out.value

    def async_error(self, comm: int) -> int:
        out = ctypes.c_int(-1)
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(out))
        return out.value

    def number(self, name: str, comm: int) -> int:
        out = ctypes.c_int(-1)
        self.call(name, comm, ctypes.byref(out))
        return out.value

    def all_reduce(
        self, comm: int, stream: int, pointer: int, count: int, kind: str = "float32", op: int = SUM
    ) -> int:
        """An in-place all-reduce; returns the code."""
        return self.code(
            "ncclAllReduce",
            *(pointer, pointer, ctypes.c_size_t(count), NCCL_TYPES[kind], op, comm, stream),
        )


def _as_argument(value: Any) -> Any:
    """Python integers as 64 bits: pointers, sizes, and (little-endian registers) smaller ones."""
    return ctypes.c_uint64(value & 2**64 - 1) if isinstance(value, int) else value


def launch_parameters(arguments: Iterable[Any]) -> tuple[Array, list[Any]]:
    """cuLaunchKernel's array of pointers to arguments, and what must stay alive meanwhile."""
    kept = list(arguments)
    return np.array([ctypes.addressof(a) for a in kept], np.uint64), kept
