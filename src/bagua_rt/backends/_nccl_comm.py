"""An NCCL communicator: its states, its end, and what is made from it.

Addresses, streams and handles are plain ints here; cuda.py knows tensors.

[Note: one thread in NCCL]
    A communicator is no place for two threads, and ncclCommAbort least of all: it frees what a thread inside
    another call still reads. Each call on a communicator holds its lock, so `NcclComm.abort` first refuses
    further calls, then waits for the lock with a deadline, and then aborts. A call that never comes back
    (on a blocking communicator) makes abort raise, and the communicator must be leaked. The communicators
    that `split` and `shrink` make share their parent's lock, as they may share its resources. NCCL does not
    allow two threads to issue on two communicators of one device either: one thread issues, and no lock here
    makes up for a second one.

[Note: NCCL in progress]
    A non-blocking communicator may answer ncclInProgress: the call goes on in a thread of NCCL's. Until
    ncclCommGetAsyncError says success no further call may be made on the communicator, and no CUDA work
    enqueued that is meant to come after it: an event recorded now would be complete before the collective
    has begun. Such a call returns False, everything but `poll`, `wait_ready`, `close` and `abort` is refused,
    and `wait_ready` ends that state. An error that shows up only then is raised there, and refuses what
    follows; on a non-blocking communicator even a wrong argument is such an error. In NCCL's source (2.30.7,
    group.cc) *every* launch of a non-blocking communicator goes this way, each in a new thread.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

from bagua_rt.backends import _nccl_functions as c
from bagua_rt.backends._nccl_calls import IN_PROGRESS, Operations
from bagua_rt.backends._nccl_config import make_config
from bagua_rt.errors import CollectiveTimeoutError

_CLOSED = "one that is closed"
_ABORTED = "one that was aborted"
_REVOKED = "one that was revoked"
# Where NCCL may still write after we gave up waiting; never freed.
_abandoned_outputs: list[object] = []


class NcclComm(Operations):
    """One rank's end of a communicator. `Nccl.init_rank`, `split` and `shrink` make them."""

    @property
    def handle(self) -> int:
        """The ncclComm_t; 0 once it is destroyed or aborted."""
        return self._handle

    # ── readiness ────────────────────────────────────────────────────────────────────────────────────────
    def poll(self) -> bool:
        """Ask once how the communicator is. Never waits for other ranks.

        Returns:
            True if it is ready, False if a call is still in progress.

        Raises:
            NcclStatusError: a call, or a peer, failed since; every later operation is refused.
            ClosedError: it is closed or aborted.

        **Source:** ``ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError)``.
        """
        result = ctypes.c_int(c.SUCCESS)
        with self._lock:
            self._require_handle("ncclCommGetAsyncError")
            status = self.nccl.functions.ncclCommGetAsyncError(self._handle, ctypes.byref(result))
            if status == c.SUCCESS and result.value == c.IN_PROGRESS:
                return False
            if status == result.value == c.SUCCESS:
                if self._refusal is IN_PROGRESS:
                    self._refusal = None
                return True
            name = "ncclCommGetAsyncError" if status else "a call on this communicator (asynchronously)"
            error = self.nccl.status_error(name, status or result.value)
            self._refusal = f"one that failed: {error}"
            raise error

    def wait_ready(self, timeout_s: float) -> None:
        """Block until no call is in progress ([Note: NCCL in progress]).

        Args:
            timeout_s: The deadline, from now on.

        Raises:
            CollectiveTimeoutError: it passed; `abort` is what remains.
            NcclStatusError: a call that was in progress failed.
            ClosedError: the communicator is closed or aborted.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0
        while not self.poll():
            if time.monotonic() >= deadline:
                raise CollectiveTimeoutError(
                    f"NCCL was not done within {timeout_s:g} s on rank {self.rank} of {self.nranks}",
                    expected="ncclSuccess of ncclCommGetAsyncError",
                    got="ncclInProgress",
                    fix="look for a rank that is late or gone, or allow more time",
                )
            time.sleep(pause_s)  # the first one only gives the processor up: a launch takes some 10 us
            pause_s = min(1e-3, 2 * pause_s + 1e-5)

    def _require_handle(self, name: str) -> None:
        if not self._handle:
            self._refuse(name)

    def _settle(self, name: str, status: int, timeout_s: float) -> None:
        """Wait for a call that answered `status` (the lock is not held)."""
        if status == c.IN_PROGRESS:
            self.wait_ready(timeout_s)
        else:
            self.nccl.check(name, status)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────
    def close(self, timeout_s: float) -> None:
        """Finalize and destroy. Idempotent; collective over the ranks of a node, unlike `abort`.

        Args:
            timeout_s: The deadline of finalizing.

        Raises:
            CollectiveTimeoutError: other ranks did not finalize; the communicator is still open: abort it.
            NcclStatusError: NCCL failed; likewise.

        **Source:** ``ncclResult_t ncclCommFinalize(ncclComm_t comm)``,
        ``ncclResult_t ncclCommDestroy(ncclComm_t comm)``.
        """
        if not self._handle:
            return
        if self._refusal is IN_PROGRESS:
            self.wait_ready(timeout_s)
        revoked = self._refusal is _REVOKED  # ncclCommFinalize is invalid then
        self._refusal = _CLOSED
        if not revoked:
            with self._lock:
                self._require_handle("ncclCommFinalize")
                status = self.nccl.functions.ncclCommFinalize(self._handle)
            self._settle("ncclCommFinalize", status, timeout_s)
        with self._lock:
            handle, self._handle = self._handle, 0
            status = self.nccl.functions.ncclCommDestroy(handle)
        self.nccl.check("ncclCommDestroy", status)

    def abort(self, timeout_s: float) -> None:
        """Stop what runs on the devices and free the communicator. Idempotent, any thread, any state.

        Blocks while NCCL joins its own threads, which no argument bounds.

        Args:
            timeout_s: How long to wait for a thread inside another call ([Note: one thread in NCCL]).

        Raises:
            CollectiveTimeoutError: that thread did not come back; nothing was aborted.
            NcclStatusError: NCCL could not abort.

        **Source:** ``ncclResult_t ncclCommAbort(ncclComm_t comm)``.
        """
        self._refusal = _ABORTED  # before the lock: no further call gets in
        if not self._lock.acquire(timeout=timeout_s):
            raise CollectiveTimeoutError(
                f"rank {self.rank} can't abort its NCCL communicator: a thread is inside a call on it",
                expected=f"the call to return within {timeout_s:g} s",
                fix="leak the communicator and end the process; a non-blocking one doesn't come to this",
            )
        try:
            handle, self._handle = self._handle, 0
            status = self.nccl.functions.ncclCommAbort(handle) if handle else c.SUCCESS
        finally:
            self._lock.release()
        self.nccl.check("ncclCommAbort", status)

    def revoke(self, timeout_s: float) -> None:
        """Stop the operations in flight, and leave the communicator fit for `shrink`, `split` and `close`.

        Args:
            timeout_s: The deadline for it to become quiet.

        Raises:
            BackendUnavailableError: NCCL is older than 2.28.7.
            CollectiveTimeoutError: it did not become quiet.
            NcclStatusError: NCCL could not.

        **Source:** ``ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags)``.
        """
        function = self.nccl.functions.ncclCommRevoke  # raises here, where the library lacks it
        self._refusal = _REVOKED
        with self._lock:
            self._require_handle("ncclCommRevoke")
            status = function(self._handle, c.REVOKE_DEFAULT)
        self._settle("ncclCommRevoke", status, timeout_s)

    # ── communicators from this one ──────────────────────────────────────────────────────────────────────
    def split(self, color: int | None, key: int, timeout_s: float, **options: int | str) -> NcclComm | None:
        """Make a communicator of the ranks that give the same color; collective.

        Args:
            color: The part, at least 0; None takes part in none.
            key: Orders the ranks within a part; equal keys keep this communicator's order.
            timeout_s: The deadline.
            **options: ncclConfig_t's fields; none takes this communicator's.

        Returns:
            The new communicator; None for the color None.

        Raises:
            BackendUnavailableError: the library is too old for an option.
            CollectiveTimeoutError: the deadline passed.
            NcclStatusError: NCCL could not.

        **Source:** ``ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
        ncclConfig_t* config)``.
        """
        functions = self.nccl.functions
        part = c.SPLIT_NOCOLOR if color is None else color

        def call(child: object, config: object) -> int:
            return functions.ncclCommSplit(self._handle, part, key, child, config)

        self._require_usable("ncclCommSplit")
        return self._child("ncclCommSplit", call, options, timeout_s)

    def shrink(
        self, exclude: Sequence[int], timeout_s: float, *, abort: bool = False, **options: int | str
    ) -> NcclComm:
        """Make a communicator without some ranks; called by all of the others, in whatever state this one is.

        Args:
            exclude: The ranks to leave out.
            timeout_s: The deadline.
            abort: Stop this communicator's operations first.
            **options: ncclConfig_t's fields; none takes this communicator's.

        Returns:
            The new communicator; the ranks keep their order.

        Raises:
            BackendUnavailableError: the library is too old for an option.
            CollectiveTimeoutError: the deadline passed.
            NcclStatusError: NCCL could not.

        **Source:** ``ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList,
        int excludeRanksCount, ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags)``.
        """
        ranks = (ctypes.c_int * len(exclude))(*exclude)  # NCCL sorts it in place
        flags = c.SHRINK_ABORT if abort else c.SHRINK_DEFAULT
        function = self.nccl.functions.ncclCommShrink

        def call(child: object, config: object) -> int:
            return function(self._handle, ranks, len(exclude), child, config, flags)

        shrunk = self._child("ncclCommShrink", call, options, timeout_s)
        if shrunk is None:
            raise self.nccl.status_error("ncclCommShrink (it gave no communicator)", c.SUCCESS)
        return shrunk

    def _child(
        self,
        name: str,
        call: Callable[[object, object], int],
        options: dict[str, int | str],
        timeout_s: float,
    ) -> NcclComm | None:
        """Make a communicator by `call(output, config)`, and wait until both are ready."""
        child = ctypes.c_void_p()
        options = {"blocking": int(self.blocking), **options} if options else options
        config = make_config(self.nccl.library, options) if options else None
        with self._lock:
            self._require_handle(name)
            status = call(ctypes.byref(child), None if config is None else ctypes.byref(config))
        try:
            # NCCL writes the new handle when this communicator is ready again, not before.
            self._settle(name, status, timeout_s)
        except BaseException:
            _abandoned_outputs.append(child)
            raise
        if not child.value:
            return None
        blocking = bool(options.get("blocking", self.blocking))
        made = NcclComm(self.nccl, child.value, -1, 0, blocking=blocking, lock=self._lock)
        made.wait_ready(timeout_s)
        made.rank, made.nranks = made.query("ncclCommUserRank"), made.query("ncclCommCount")
        return made

    # ── facts, memory, operators ─────────────────────────────────────────────────────────────────────────
    def query(self, name: str) -> int:
        """Ask one number: by ``ncclCommCount``, ``ncclCommUserRank`` or ``ncclCommCuDevice``.

        **Source:** ``ncclResult_t ncclCommCount(const ncclComm_t comm, int* count)`` and its two kin.
        """
        answer = ctypes.c_int(-1)
        with self._lock:
            self._require_handle(name)
            status = getattr(self.nccl.functions, name)(self._handle, ctypes.byref(answer))
        self.nccl.check(name, status)
        return answer.value

    def register(self, buffer: int, size_bytes: int) -> int:
        """Register memory for zero-copy operations; returns the handle for `deregister`.

        **Source:** ``ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size,
        void** handle)``.
        """
        handle = ctypes.c_void_p()
        with self._lock:
            self._require_usable("ncclCommRegister")
            status = self.nccl.functions.ncclCommRegister(
                self._handle, buffer, size_bytes, ctypes.byref(handle)
            )
        self.nccl.check("ncclCommRegister", status)
        return handle.value or 0

    def deregister(self, handle: int) -> None:
        """Undo `register`.

        **Source:** ``ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle)``.
        """
        with self._lock:
            self._require_handle("ncclCommDeregister")
            status = self.nccl.functions.ncclCommDeregister(self._handle, handle)
        self.nccl.check("ncclCommDeregister", status)

    def window_register(self, buffer: int, size_bytes: int, flags: int, timeout_s: float) -> int:
        """Register a memory window; collective.

        Args:
            buffer: Memory from `Nccl.mem_alloc`; for symmetric windows at the same offset on all ranks.
            size_bytes: Its size.
            flags: ``WINDOW_DEFAULT`` or ``WINDOW_SYMMETRIC``.
            timeout_s: The deadline.

        Returns:
            The window; 0 where NCCL (2.29 and newer) supports none here.

        Raises:
            CollectiveTimeoutError: the deadline passed.
            NcclStatusError: NCCL could not.

        **Source:** ``ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size,
        ncclWindow_t* win, int winFlags)``.
        """
        window = ctypes.c_void_p()
        with self._lock:
            self._require_usable("ncclCommWindowRegister")
            status = self.nccl.functions.ncclCommWindowRegister(
                self._handle, buffer, size_bytes, ctypes.byref(window), flags
            )
        try:
            self._settle("ncclCommWindowRegister", status, timeout_s)
        except BaseException:
            _abandoned_outputs.append(window)
            raise
        return window.value or 0

    def window_deregister(self, window: int) -> None:
        """Undo `window_register`.

        **Source:** ``ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win)``.
        """
        with self._lock:
            self._require_handle("ncclCommWindowDeregister")
            status = self.nccl.functions.ncclCommWindowDeregister(self._handle, window)
        self.nccl.check("ncclCommWindowDeregister", status)

    def create_pre_mul_sum(self, scalar: float, datatype: int) -> int:
        """Make an operator that multiplies by `scalar` before it sums; for this communicator and datatype.

        Returns:
            The operator, to be given up with `destroy_op`.

        Raises:
            UsageError: `scalar` can't be written in `datatype`.
            NcclStatusError: NCCL could not.

        **Source:** ``ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t
        datatype, ncclScalarResidence_t residence, ncclComm_t comm)``.
        """
        op = ctypes.c_int(-1)
        raw = ctypes.create_string_buffer(c.scalar_bytes(scalar, datatype), 8)
        with self._lock:
            self._require_usable("ncclRedOpCreatePreMulSum")
            status = self.nccl.functions.ncclRedOpCreatePreMulSum(
                ctypes.byref(op), raw, datatype, c.SCALAR_HOST_IMMEDIATE, self._handle
            )
        self.nccl.check("ncclRedOpCreatePreMulSum", status)
        return op.value

    def destroy_op(self, op: int) -> None:
        """Give up an operator; allowed as soon as the last operation that uses it has returned.

        **Source:** ``ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)``.
        """
        with self._lock:
            self._require_handle("ncclRedOpDestroy")
            status = self.nccl.functions.ncclRedOpDestroy(op, self._handle)
        self.nccl.check("ncclRedOpDestroy", status)
