"""NCCL's operations on addresses; groups of them, and calls prepared once and made often.

[Note: NCCL groups]
    ncclGroupStart can't be taken back: ncclGroupEnd submits what was called between. So the calls of a group
    are collected here, arguments converted, and made only when its body has ended without an exception.
    NCCL drops a group of which one call failed; where an interrupt cuts the making of the calls short, a
    call that is bound to fail (no communicator) cancels the rest in the same way. (NCCL's user guide has a
    group go on after ncclInvalidArgument. Its source, 2.27 to 2.30, does not, nor does the installed library:
    tests/test_nccl_binding.py.)

[Note: converted once]
    ctypes takes longer to convert seven arguments (0.7 us) than to call (0.35 us), and a trainer calls with
    the same addresses in each step. So a converted call is remembered by the numbers that it is made of. It
    says nothing about the memory at these addresses.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bagua_rt.backends import _nccl_functions as c
from bagua_rt.backends._nccl_config import make_sim_info
from bagua_rt.errors import ClosedError, UsageError

if TYPE_CHECKING:
    from bagua_rt.backends._nccl import Nccl

IN_PROGRESS = "one whose last call is still in progress"
_REMEMBERED = 1024  # converted calls of a communicator, 1 KB each


class PreparedCalls:
    """Calls on one communicator with converted arguments, to be made again and again.

    Made by `Operations.prepare`. Several calls are made as one group. The addresses are those of the time of
    preparation: whoever prepares keeps the memory alive, and prepares anew when it moves.
    """

    __slots__ = ("_call", "_calls", "_comm", "_name", "_thread")

    def __init__(self, comm: Operations) -> None:
        self._comm = comm
        self._calls: list[tuple[str, Callable[[], int]]] = []
        self._call: Callable[[], int] = self._not_ready
        self._name = "prepare()"
        self._thread = threading.get_ident()

    def make(self) -> bool:
        """Make the calls; ``calls()`` does the same.

        Returns:
            True if they are launched; False if not yet: in progress ([Note: NCCL in progress] in
            _nccl_comm.py), or collected by a group that this thread has open.

        Raises:
            NcclStatusError: NCCL refused one of the calls; none of a group was submitted then.
            ClosedError: the communicator is closed, aborted, failed or still in progress.
            UsageError: the body that prepares them has not ended.
        """
        comm = self._comm
        collecting = comm._collecting
        if collecting is not None and collecting._thread == threading.get_ident():
            if collecting is self:
                self._not_ready()
            collecting._calls += self._calls
            return False
        lock = comm._lock
        lock.acquire()  # `with` would cost twice as much
        try:
            if comm._refusal is not None:
                comm._refuse(self._name)
            status = self._call()
            return not status or comm._not_success(self._name, status)
        finally:
            lock.release()

    __call__ = make

    def simulate(self) -> float:
        """NCCL's estimate of how long the calls would take; nothing is launched.

        Returns:
            The estimate, in microseconds.

        Raises:
            UsageError: the communicator is non-blocking: NCCL launches a simulated group of such a one.
            NcclStatusError: NCCL refused the calls.

        **Source:** ``ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simInfo)``.
        """
        comm = self._comm
        if not comm.blocking:
            raise UsageError(
                "NCCL can't simulate on a non-blocking communicator",
                expected="a communicator made with blocking=True",
                got="a non-blocking one, on which ncclGroupSimulateEnd launches",
            )
        info = make_sim_info(comm.nccl.library)
        end = functools.partial(comm.nccl.functions.ncclGroupSimulateEnd, ctypes.byref(info))
        with comm._lock:
            comm._require_usable("ncclGroupSimulateEnd")
            status = self._in_group(end)
        comm.nccl.check("ncclGroupSimulateEnd", status)
        return info.estimatedTime

    def _add(self, name: str, arguments: tuple[int, ...]) -> None:
        comm = self._comm
        call = comm._remembered.get((name, arguments)) or comm._converted(name, arguments)
        self._calls.append((name, call))

    def _finish(self) -> None:
        if len(self._calls) == 1:
            self._name, self._call = self._calls[0]
        elif self._calls:
            self._name = "ncclGroupEnd"
            self._call = functools.partial(self._in_group, self._comm.nccl.functions.ncclGroupEnd)
        else:
            self._call = _nothing

    def _not_ready(self) -> int:
        raise UsageError("prepared calls are made after the with block that prepares them has ended")

    def _in_group(self, end: Callable[[], int]) -> int:
        """Make the calls between ncclGroupStart and `end`; returns what `end` does ([Note: NCCL groups])."""
        nccl = self._comm.nccl
        nccl.check("ncclGroupStart", nccl.functions.ncclGroupStart())
        failed = ""
        status = c.SUCCESS
        try:
            for name, call in self._calls:
                status = call()
                if status not in (c.SUCCESS, c.IN_PROGRESS):
                    failed = name
                    break
        except BaseException:
            nccl.functions.ncclAllReduce(0, 0, 0, 0, 0, 0, 0)  # fails, and so cancels the group
            nccl.functions.ncclGroupEnd()
            raise
        if failed:
            error = nccl.status_error(failed, status)  # before ncclGroupEnd overwrites NCCL's last error
            nccl.functions.ncclGroupEnd()
            raise error
        return end()


def _nothing() -> int:
    return c.SUCCESS


class Operations:
    """The operations of one rank's end of a communicator; `NcclComm` adds its states and its end.

    Every operation returns True if it is launched, False if it is not yet: in progress ([Note: NCCL in
    progress] in _nccl_comm.py), or collected by an open `group` or `prepare` of this thread. All of them
    raise NcclStatusError when NCCL refuses them, BackendUnavailableError where the library has no such
    function, and ClosedError on a communicator that can't be used. Counts are numbers of elements, up to
    2**64 - 1; buffers and streams are addresses; `datatype` and `op` are NCCL's numbers
    (`_nccl_functions.datatype`, ``OPS``). Nothing here keeps memory alive. The C prototypes stand in
    `_nccl_functions.ROWS`.

    Attributes:
        nccl: The library.
        rank: This rank.
        nranks: Number of ranks.
        blocking: Does a call return only when it has launched?
    """

    def __init__(
        self,
        nccl: Nccl,
        handle: int,
        rank: int,
        nranks: int,
        *,
        blocking: bool,
        lock: threading.Lock | None = None,
    ) -> None:
        self.nccl = nccl
        self.rank = rank
        self.nranks = nranks
        self.blocking = blocking
        self._handle = handle
        # Held in every call: [Note: one thread in NCCL] in _nccl_comm.py.
        self._lock = threading.Lock() if lock is None else lock
        self._refusal: str | None = None if blocking else IN_PROGRESS  # why no operation is taken
        self._collecting: PreparedCalls | None = None
        self._remembered: dict[tuple[str, tuple[int, ...]], Callable[[], int]] = {}

    def all_reduce(self, send: int, recv: int, count: int, datatype: int, op: int, stream: int) -> bool:
        """Reduce `count` elements of all ranks into `recv` of each; in place where `send` is `recv`."""
        return self._issue("ncclAllReduce", (send, recv, count, datatype, op, self._handle, stream))

    def reduce(
        self, send: int, recv: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> bool:
        """Reduce `count` elements of all ranks into `recv` of `root`; elsewhere `recv` is not used."""
        return self._issue("ncclReduce", (send, recv, count, datatype, op, root, self._handle, stream))

    def broadcast(self, send: int, recv: int, count: int, datatype: int, root: int, stream: int) -> bool:
        """Copy `count` elements of `send` on `root` to `recv` of every rank."""
        return self._issue("ncclBroadcast", (send, recv, count, datatype, root, self._handle, stream))

    def all_gather(self, send: int, recv: int, count: int, datatype: int, stream: int) -> bool:
        """Put `count` elements of rank i at ``recv + i * count`` of every rank."""
        return self._issue("ncclAllGather", (send, recv, count, datatype, self._handle, stream))

    def reduce_scatter(self, send: int, recv: int, count: int, datatype: int, op: int, stream: int) -> bool:
        """Reduce ``nranks * count`` elements of all ranks; block i of `count` goes to `recv` of rank i."""
        return self._issue("ncclReduceScatter", (send, recv, count, datatype, op, self._handle, stream))

    def all_to_all(self, send: int, recv: int, count: int, datatype: int, stream: int) -> bool:
        """Send ``send + i * count`` to rank i, which puts it at ``recv + rank * count``; not in place."""
        if c.exports(self.nccl.library, "ncclAlltoAll"):
            return self._issue("ncclAlltoAll", (send, recv, count, datatype, self._handle, stream))
        block = count * c.ITEM_BYTES[datatype]
        with self.prepare() as calls:  # NCCL before 2.28
            for peer in range(self.nranks):
                self.send(send + peer * block, count, datatype, peer, stream)
                self.recv(recv + peer * block, count, datatype, peer, stream)
        return calls()

    def gather(self, send: int, recv: int, count: int, datatype: int, root: int, stream: int) -> bool:
        """Put `count` elements of rank i at ``recv + i * count`` of `root`; elsewhere `recv` is not used."""
        if c.exports(self.nccl.library, "ncclGather"):
            return self._issue("ncclGather", (send, recv, count, datatype, root, self._handle, stream))
        block = count * c.ITEM_BYTES[datatype]
        with self.prepare() as calls:  # NCCL before 2.28
            self.send(send, count, datatype, root, stream)
            for peer in range(self.nranks if self.rank == root else 0):
                self.recv(recv + peer * block, count, datatype, peer, stream)
        return calls()

    def scatter(self, send: int, recv: int, count: int, datatype: int, root: int, stream: int) -> bool:
        """Put ``send + i * count`` of `root` into `recv` of rank i; elsewhere `send` is not used."""
        if c.exports(self.nccl.library, "ncclScatter"):
            return self._issue("ncclScatter", (send, recv, count, datatype, root, self._handle, stream))
        block = count * c.ITEM_BYTES[datatype]
        with self.prepare() as calls:  # NCCL before 2.28
            for peer in range(self.nranks if self.rank == root else 0):
                self.send(send + peer * block, count, datatype, peer, stream)
            self.recv(recv, count, datatype, root, stream)
        return calls()

    def send(self, buffer: int, count: int, datatype: int, peer: int, stream: int) -> bool:
        """Send `count` elements to rank `peer`, which must receive as many."""
        return self._issue("ncclSend", (buffer, count, datatype, peer, self._handle, stream))

    def recv(self, buffer: int, count: int, datatype: int, peer: int, stream: int) -> bool:
        """Receive `count` elements of rank `peer`, which must send as many."""
        return self._issue("ncclRecv", (buffer, count, datatype, peer, self._handle, stream))

    # ── groups and prepared calls ────────────────────────────────────────────────────────────────────────
    @contextmanager
    def prepare(self) -> Iterator[PreparedCalls]:
        """Collect this thread's operations of the body, and launch none of them.

        Yields:
            The calls, to be made after the body, as often as wanted.

        Raises:
            UsageError: another thread is collecting on this communicator.
        """
        outer = self._collecting
        calls = PreparedCalls(self)
        if outer is not None and outer._thread != calls._thread:
            raise UsageError(
                "two threads have a group open on one NCCL communicator",
                expected="one thread that issues",
                fix="close the other group first, or give each thread a communicator",
            )
        self._collecting = calls
        try:
            yield calls
        finally:
            self._collecting = outer
        calls._finish()

    @contextmanager
    def group(self) -> Iterator[None]:
        """Launch the body's operations as one group at its end, and none if it raises ([Note: NCCL groups]).

        A group within a group joins the outer one. On a non-blocking communicator the group may be in
        progress afterwards: call `wait_ready`.

        Raises:
            NcclStatusError: NCCL refused one of the operations; none was submitted then.

        **Source:** ``ncclResult_t ncclGroupStart()``, ``ncclResult_t ncclGroupEnd()``.
        """
        with self.prepare() as calls:
            yield
        calls()

    def _issue(self, name: str, arguments: tuple[int, ...]) -> bool:
        collecting = self._collecting
        if collecting is not None and collecting._thread == threading.get_ident():
            collecting._add(name, arguments)
            return False
        call = self._remembered.get((name, arguments)) or self._converted(name, arguments)
        self._lock.acquire()  # `with` would cost twice as much
        try:
            if self._refusal is not None:
                self._refuse(name)
            status = call()
            return not status or self._not_success(name, status)
        finally:
            self._lock.release()

    def _converted(self, name: str, arguments: tuple[int, ...]) -> Callable[[], int]:
        """The call, with its arguments converted; remembered ([Note: converted once])."""
        if len(self._remembered) >= _REMEMBERED:
            self._remembered.clear()
        call = functools.partial(self.nccl.untyped(name), *c.convert(name, arguments))
        self._remembered[name, arguments] = call
        return call

    def _not_success(self, name: str, status: int) -> bool:
        """Note that a call is in progress, or raise its error (the lock is held)."""
        if status != c.IN_PROGRESS:
            raise self.nccl.status_error(name, status)
        self._refusal = IN_PROGRESS
        return False

    def _refuse(self, name: str) -> None:
        raise ClosedError(
            f"{name} was not called on an NCCL communicator that can't take it",
            expected="a communicator that is open and ready",
            got=self._refusal or "one that is closed",
            fix="call wait_ready() first" if self._refusal is IN_PROGRESS else "make a new communicator",
        )

    def _require_usable(self, name: str) -> None:
        if self._refusal is not None:
            self._refuse(name)
