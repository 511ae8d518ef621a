# ruff: noqa: N802 - the functions keep NCCL's own names
"""NCCL's C API for ctypes: its enumerations, its prototypes, and a table bound on first use.

Each row of `ROWS` stands under its C prototype. `NcclFunctions` says the same to the type checker; the tests
compare the rows, and the prototypes above them, with nccl.h.

[Note: the GIL in NCCL calls]
    Every function is called through ctypes.CDLL, which releases the GIL: any of them may block (a first
    collective connects, ncclCommAbort waits for kernels, even ncclCommGetAsyncError joins a thread), and a
    blocked call that holds the GIL stops the thread that would abort it. Holding it would save 0.05 us.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Final, NamedTuple, Protocol, cast

from bagua_rt.backends._nccl_library import NcclLibrary
from bagua_rt.errors import UsageError

UNIQUE_ID_BYTES: Final = 128

# ncclResult_t
SUCCESS: Final = 0
REMOTE_ERROR: Final = 6
IN_PROGRESS: Final = 7
STATUS_NAMES: Final = (
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
)

SPLIT_NOCOLOR: Final = -1
SHRINK_DEFAULT: Final = 0
SHRINK_ABORT: Final = 1
REVOKE_DEFAULT: Final = 0
WINDOW_DEFAULT: Final = 0
WINDOW_SYMMETRIC: Final = 1  # NCCL_WIN_COLL_SYMMETRIC
SCALAR_HOST_IMMEDIATE: Final = 1

# ncclRedOp_t
OPS: Final = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}

# ncclDataType_t by the name of the torch dtype. bool moves and takes max and min as bytes do; a sum of bytes
# is not a sum of bools, and a complex number travels as two floats: both are the caller's business.
DATATYPES: Final = {
    "int8": 0,
    "uint8": 1,
    "bool": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
ITEM_BYTES: Final = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)  # by ncclDataType_t


def datatype(name: str) -> int:
    """The ncclDataType_t of a torch dtype.

    Args:
        name: The dtype's name, with or without ``torch.`` before it.

    Raises:
        UsageError: NCCL has no such type.
    """
    code = DATATYPES.get(name.removeprefix("torch."))
    if code is None:
        raise UsageError(
            f"NCCL carries no {name}",
            expected=f"one of {', '.join(DATATYPES)}",
            fix="view it as bytes to move it",
        )
    return code


_SCALAR_FORMATS: Final = ("b", "B", "i", "I", "q", "Q", "e", "f", "d")  # by ncclDataType_t, for struct.pack


def scalar_bytes(value: float, datatype: int) -> bytes:
    """A number as NCCL reads a scalar of `datatype`: in that type, in the host's byte order.

    Raises:
        UsageError: the type can't hold the number, or NCCL takes no scalar of it (fp8).
    """
    try:
        if datatype == DATATYPES["bfloat16"]:
            (bits,) = struct.unpack("=I", struct.pack("=f", value))
            return struct.pack("=H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)  # to the nearest, ties to even
        form = _SCALAR_FORMATS[datatype]
        return struct.pack("=" + form, value if form in "efd" else _whole(value))
    except (struct.error, OverflowError, ValueError, IndexError) as error:
        raise UsageError(
            f"the scalar {value!r} can't be written in ncclDataType_t {datatype}", got=str(error)
        ) from error


def _whole(value: float) -> int:
    if value != int(value):
        raise ValueError("it is no whole number")
    return int(value)


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which ncclCommInitRankConfig takes by value."""

    # typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId;
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class Row(NamedTuple):
    """One function: the version code of the release that brought it, and its C types."""

    since: int
    arguments: tuple[Any, ...]
    result: Any = ctypes.c_int  # ncclResult_t


_INT = ctypes.c_int  # also ncclDataType_t, ncclRedOp_t, ncclScalarResidence_t
_SIZE = ctypes.c_size_t  # counts are 64 bits wide in every operation
_PTR = ctypes.c_void_p  # also ncclComm_t, cudaStream_t, ncclWindow_t, and structs whose layout varies
_INT_OUT = ctypes.POINTER(ctypes.c_int)
_PTR_OUT = ctypes.POINTER(ctypes.c_void_p)

ROWS: Final[dict[str, Row]] = {
    # ncclResult_t ncclGetVersion(int* version);
    "ncclGetVersion": Row(2_000, (_INT_OUT,)),
    # const char* ncclGetErrorString(ncclResult_t result);
    "ncclGetErrorString": Row(2_000, (_INT,), ctypes.c_char_p),
    # const char* ncclGetLastError(ncclComm_t comm);
    "ncclGetLastError": Row(21_300, (_PTR,), ctypes.c_char_p),
    # ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId);
    "ncclGetUniqueId": Row(2_000, (ctypes.POINTER(UniqueId),)),
    # ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
    #     ncclConfig_t* config);
    "ncclCommInitRankConfig": Row(21_400, (_PTR_OUT, _INT, UniqueId, _INT, _PTR)),
    # ncclResult_t ncclCommFinalize(ncclComm_t comm);
    "ncclCommFinalize": Row(21_400, (_PTR,)),
    # ncclResult_t ncclCommDestroy(ncclComm_t comm);
    "ncclCommDestroy": Row(2_000, (_PTR,)),
    # ncclResult_t ncclCommAbort(ncclComm_t comm);
    "ncclCommAbort": Row(2_400, (_PTR,)),
    # ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
    "ncclCommRevoke": Row(22_807, (_PTR, _INT)),
    # ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);
    "ncclCommGetAsyncError": Row(2_400, (_PTR, _INT_OUT)),
    # ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
    "ncclCommCount": Row(2_000, (_PTR, _INT_OUT)),
    # ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device);
    "ncclCommCuDevice": Row(2_000, (_PTR, _INT_OUT)),
    # ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);
    "ncclCommUserRank": Row(2_000, (_PTR, _INT_OUT)),
    # ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
    #     ncclConfig_t* config);
    "ncclCommSplit": Row(21_800, (_PTR, _INT, _INT, _PTR_OUT, _PTR)),
    # ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
    #     ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags);
    "ncclCommShrink": Row(22_700, (_PTR, _INT_OUT, _INT, _PTR_OUT, _PTR, _INT)),
    # ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    #     ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
    "ncclAllReduce": Row(2_000, (_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR)),
    # ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    #     ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
    "ncclReduce": Row(2_000, (_PTR, _PTR, _SIZE, _INT, _INT, _INT, _PTR, _PTR)),
    # ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    #     int root, ncclComm_t comm, cudaStream_t stream);
    "ncclBroadcast": Row(2_000, (_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR)),
    # ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
    #     ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
    "ncclAllGather": Row(2_000, (_PTR, _PTR, _SIZE, _INT, _PTR, _PTR)),
    # ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
    #     ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
    "ncclReduceScatter": Row(2_000, (_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR)),
    # ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    #     ncclComm_t comm, cudaStream_t stream);
    "ncclAlltoAll": Row(22_800, (_PTR, _PTR, _SIZE, _INT, _PTR, _PTR)),
    # ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    #     int root, ncclComm_t comm, cudaStream_t stream);
    "ncclGather": Row(22_800, (_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR)),
    # ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    #     int root, ncclComm_t comm, cudaStream_t stream);
    "ncclScatter": Row(22_800, (_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR)),
    # ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
    #     ncclComm_t comm, cudaStream_t stream);
    "ncclSend": Row(2_700, (_PTR, _SIZE, _INT, _INT, _PTR, _PTR)),
    # ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    #     cudaStream_t stream);
    "ncclRecv": Row(2_700, (_PTR, _SIZE, _INT, _INT, _PTR, _PTR)),
    # ncclResult_t ncclGroupStart();
    "ncclGroupStart": Row(2_000, ()),
    # ncclResult_t ncclGroupEnd();
    "ncclGroupEnd": Row(2_000, ()),
    # ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simInfo);
    "ncclGroupSimulateEnd": Row(22_200, (_PTR,)),
    # ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle);
    "ncclCommRegister": Row(21_900, (_PTR, _PTR, _SIZE, _PTR_OUT)),
    # ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle);
    "ncclCommDeregister": Row(21_900, (_PTR, _PTR)),
    # ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
    #     int winFlags);
    "ncclCommWindowRegister": Row(22_700, (_PTR, _PTR, _SIZE, _PTR_OUT, _INT)),
    # ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);
    "ncclCommWindowDeregister": Row(22_700, (_PTR, _PTR)),
    # ncclResult_t ncclMemAlloc(void** ptr, size_t size);
    "ncclMemAlloc": Row(21_900, (_PTR_OUT, _SIZE)),
    # ncclResult_t ncclMemFree(void* ptr);
    "ncclMemFree": Row(21_900, (_PTR,)),
    # ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
    #     ncclScalarResidence_t residence, ncclComm_t comm);
    "ncclRedOpCreatePreMulSum": Row(21_100, (_INT_OUT, _PTR, _INT, _INT, _PTR)),
    # ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
    "ncclRedOpDestroy": Row(21_100, (_INT, _PTR)),
}


class NcclFunctions(Protocol):
    """The rows, typed: addresses and handles are ints (0 is NULL), an output is what ctypes.byref gives."""

    def ncclGetVersion(self, version: object, /) -> int: ...
    def ncclGetErrorString(self, result: int, /) -> bytes | None: ...
    def ncclGetLastError(self, comm: int, /) -> bytes | None: ...
    def ncclGetUniqueId(self, unique_id: object, /) -> int: ...
    def ncclCommInitRankConfig(
        self, comm: object, nranks: int, unique_id: UniqueId, rank: int, config: object, /
    ) -> int: ...
    def ncclCommFinalize(self, comm: int, /) -> int: ...
    def ncclCommDestroy(self, comm: int, /) -> int: ...
    def ncclCommAbort(self, comm: int, /) -> int: ...
    def ncclCommRevoke(self, comm: int, flags: int, /) -> int: ...
    def ncclCommGetAsyncError(self, comm: int, status: object, /) -> int: ...
    def ncclCommCount(self, comm: int, count: object, /) -> int: ...
    def ncclCommCuDevice(self, comm: int, device: object, /) -> int: ...
    def ncclCommUserRank(self, comm: int, rank: object, /) -> int: ...
    def ncclCommSplit(self, comm: int, color: int, key: int, child: object, config: object, /) -> int: ...
    def ncclCommShrink(
        self, comm: int, excluded: object, count: int, child: object, config: object, flags: int, /
    ) -> int: ...
    def ncclAllReduce(
        self, send: int, recv: int, count: int, datatype: int, op: int, comm: int, stream: int, /
    ) -> int: ...
    def ncclGroupStart(self) -> int: ...
    def ncclGroupEnd(self) -> int: ...
    def ncclGroupSimulateEnd(self, info: object, /) -> int: ...
    def ncclCommRegister(self, comm: int, buffer: int, size: int, handle: object, /) -> int: ...
    def ncclCommDeregister(self, comm: int, handle: int, /) -> int: ...
    def ncclCommWindowRegister(
        self, comm: int, buffer: int, size: int, window: object, flags: int, /
    ) -> int: ...
    def ncclCommWindowDeregister(self, comm: int, window: int, /) -> int: ...
    def ncclMemAlloc(self, pointer: object, size: int, /) -> int: ...
    def ncclMemFree(self, pointer: int, /) -> int: ...
    def ncclRedOpCreatePreMulSum(
        self, op: object, scalar: object, datatype: int, residence: int, comm: int, /
    ) -> int: ...
    def ncclRedOpDestroy(self, op: int, comm: int, /) -> int: ...


class _Bound:
    """Functions of one library, bound and typed when first asked for."""

    def __init__(self, library: NcclLibrary) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        row = ROWS.get(name)
        if row is None:
            raise AttributeError(name)
        function = untyped(self._library, name)
        function.argtypes = row.arguments
        function.restype = row.result
        setattr(self, name, function)  # from now on no __getattr__ for this name
        return function


def bind(library: NcclLibrary) -> NcclFunctions:
    """The functions of `library`, bound late: one that it lacks raises at its first use, by name."""
    return cast("NcclFunctions", _Bound(library))


def untyped(library: NcclLibrary, name: str) -> Any:
    """A function pointer of its own, without argument types, for arguments that are converted already.

    Raises:
        BackendUnavailableError: the library does not export `name`.
    """
    try:
        return library.cdll[name]
    except AttributeError:
        raise library.lacks(name, ROWS[name].since) from None


def exports(library: NcclLibrary, name: str) -> bool:
    """Does `library` have the function `name`?"""
    return hasattr(library.cdll, name)


def convert(name: str, values: tuple[int, ...]) -> tuple[Any, ...]:
    """Convert arguments to what ctypes passes without looking at them again.

    ``from_param`` gives ctypes' own argument objects, which a call copies from; an instance of c_void_p would
    be turned into one in each call (0.39 against 0.67 us for the seven of ncclAllReduce).
    """
    return tuple(kind.from_param(value) for kind, value in zip(ROWS[name].arguments, values, strict=True))
