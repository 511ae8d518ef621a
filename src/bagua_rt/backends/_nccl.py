"""NCCL by ctypes: one loaded library, and how to talk to it.

- `_nccl_library.py` finds and loads it;
- `_nccl_functions.py` is its C API, a prototype above each row;
- `_nccl_config.py` lays ncclConfig_t out for its version;
- `_nccl_calls.py` has the operations, groups and prepared calls;
- `_nccl_comm.py` has the communicator.

`Nccl` is what the rest of the package starts from. Nothing is loaded when this module is imported.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NoReturn

from bagua_rt.backends import _nccl_functions as c
from bagua_rt.backends._nccl_comm import NcclComm
from bagua_rt.backends._nccl_config import make_config
from bagua_rt.backends._nccl_functions import NcclFunctions, bind
from bagua_rt.backends._nccl_library import NcclLibrary, find_nccl
from bagua_rt.errors import NcclError, UsageError


class NcclStatusError(NcclError):
    """An NCCL function, or a call of one that went on asynchronously, ended in a status that is not success.

    Attributes:
        function: The function, by NCCL's name.
        status: The ncclResult_t; ``_nccl_functions.REMOTE_ERROR`` means that a peer is gone.
    """

    function: str = ""
    status: int = -1


class Nccl:
    """A loaded NCCL.

    Args:
        library: The library, or the path of one; None searches ([Note: NCCL search]).

    Raises:
        BackendUnavailableError: none was found; the error lists what was tried.

    Attributes:
        library: Its path and version.
        functions: The raw functions, each bound when first used.
    """

    def __init__(self, library: NcclLibrary | str | Path | None = None) -> None:
        self.library = library if isinstance(library, NcclLibrary) else find_nccl(library)
        self.functions: NcclFunctions = bind(self.library)
        self._untyped: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<Nccl: {self.library}>"

    def untyped(self, name: str) -> Any:
        """The function `name`, for arguments that `_nccl_functions.convert` made."""
        function = self._untyped.get(name)
        if function is None:
            function = self._untyped[name] = c.untyped(self.library, name)
        return function

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────
    def check(self, function: str, status: int) -> None:
        """Raise unless `status` is ncclSuccess.

        Args:
            function: The function that gave it.
            status: An ncclResult_t.

        Raises:
            NcclStatusError: it is not.
        """
        if status != c.SUCCESS:
            self._fail(function, status)

    def _fail(self, function: str, status: int) -> NoReturn:
        raise self.status_error(function, status)

    def status_error(self, function: str, status: int) -> NcclStatusError:
        """The error for a status: the one place where NCCL's statuses become exceptions.

        Args:
            function: The function that gave it.
            status: An ncclResult_t.

        **Source:** ``const char* ncclGetErrorString(ncclResult_t result)``,
        ``const char* ncclGetLastError(ncclComm_t comm)``; the latter ignores its communicator.
        """
        known = 0 <= status < len(c.STATUS_NAMES)
        name = c.STATUS_NAMES[status] if known else "an unknown ncclResult_t"
        text = _decoded(self.functions.ncclGetErrorString(status))
        last = _decoded(self.functions.ncclGetLastError(0))
        error = NcclStatusError(
            f"{function} failed with {name} ({status}): {text}",
            got=f"NCCL's last error: {last}" if last else "",
            fix="NCCL_DEBUG=WARN makes NCCL print what led to it",
        )
        error.function, error.status = function, status
        return error

    # ── communicators ────────────────────────────────────────────────────────────────────────────────────
    def unique_id(self) -> bytes:
        """Make the id that the ranks of one new communicator share; good for one communicator.

        Returns:
            128 bytes, zero bytes among them.

        Raises:
            NcclStatusError: NCCL could not (no network interface, say).

        **Source:** ``ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId)``.
        """
        made = c.UniqueId()
        self.check("ncclGetUniqueId", self.functions.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def init_rank(
        self,
        nranks: int,
        unique_id: bytes,
        rank: int,
        *,
        timeout_s: float,
        blocking: bool = False,
        **options: int | str,
    ) -> NcclComm:
        """Make this rank's end of a new communicator on the calling thread's current device; collective.

        Args:
            nranks: Number of ranks.
            unique_id: The id that one rank made and all were given.
            rank: This rank.
            timeout_s: The deadline, for all ranks to arrive and connect.
            blocking: Make a communicator whose calls block; then no deadline applies, not even here.
            **options: Further fields of ncclConfig_t, by NCCL's names.

        Returns:
            The communicator, ready.

        Raises:
            UsageError: an argument is out of range, or no such option exists.
            BackendUnavailableError: the library is too old for an option.
            CollectiveTimeoutError: not all ranks arrived in time; nothing is left behind.
            NcclStatusError: NCCL failed; nothing is left behind.

        **Source:** ``ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId,
        int rank, ncclConfig_t* config)``.
        """
        if len(unique_id) != c.UNIQUE_ID_BYTES:
            raise UsageError(
                "this is no NCCL unique id",
                expected=f"{c.UNIQUE_ID_BYTES} bytes",
                got=f"{len(unique_id)} bytes",
            )
        if not 0 <= rank < nranks:
            raise UsageError("rank is out of range", expected=f"0 <= rank < {nranks}", got=str(rank))
        config = make_config(self.library, {**options, "blocking": int(blocking)})
        handle = ctypes.c_void_p()
        status = self.functions.ncclCommInitRankConfig(
            ctypes.byref(handle), nranks, c.UniqueId.from_buffer_copy(unique_id), rank, ctypes.byref(config)
        )
        if status != c.IN_PROGRESS:
            self.check("ncclCommInitRankConfig", status)
        comm = NcclComm(self, handle.value or 0, rank, nranks, blocking=blocking)
        try:
            comm.wait_ready(timeout_s)
        except BaseException:
            comm.abort(timeout_s)
            raise
        return comm

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────
    def mem_alloc(self, size_bytes: int) -> int:
        """Allocate device memory fit for registration and windows; returns its address.

        **Source:** ``ncclResult_t ncclMemAlloc(void** ptr, size_t size)``.
        """
        pointer = ctypes.c_void_p()
        self.check("ncclMemAlloc", self.functions.ncclMemAlloc(ctypes.byref(pointer), size_bytes))
        return pointer.value or 0

    def mem_free(self, pointer: int) -> None:
        """Free memory of `mem_alloc`.

        **Source:** ``ncclResult_t ncclMemFree(void* ptr)``.
        """
        self.check("ncclMemFree", self.functions.ncclMemFree(pointer))


def _decoded(text: bytes | None) -> str:
    return "" if text is None else text.decode(errors="replace").strip()
