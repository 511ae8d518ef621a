"""all_reduce_ on CUDA without what is the same in each call.

A trainer reduces the same memory in every step. So whatever an address, a size, a dtype, an operator and a
lane determine is worked out once, as an `AllReduceCall`: NCCL's arguments as ctypes passes them, and the
bytes on the wire. Whether a tensor may be reduced is not such a thing: `CudaCommunicator.all_reduce_` asks
that at each call.

[Note: launched again]
    A `CudaPreparedCall` has one work, whose driver's event each launch records anew: it stands for the latest
    launch. Another thread may be asking meanwhile whether the one before has landed, and may then take the
    work out of its stream's events. So the number of a launch is set behind its record, an answer counts for
    the number that was read before it, and `CudaStream.prune` asks once more when it has taken the work out.
    The work lets its memory go when it has landed and nobody can launch it any more.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from bagua_rt.backend import PreparedCall, Stream, Work
from bagua_rt.backends._arguments import refuse_moved
from bagua_rt.backends._nccl_calls import PreparedCalls
from bagua_rt.backends._work import BaseWork
from bagua_rt.backends.cuda_stream import CudaEvent, CudaStream
from bagua_rt.errors import LibraryError

if TYPE_CHECKING:
    from bagua_rt.backends.cuda import CudaCommunicator

_OPERATION = "all_reduce_"


class CudaWork(CudaEvent, BaseWork):
    """An operation that is itself the event behind it.

    Attributes:
        origin: What was launched.
    """

    __slots__ = ("origin",)
    origin: AllReduceCall

    @property
    def communicator(self) -> CudaCommunicator:
        """Whose operation it is."""
        return self.origin.communicator

    @property
    def lane(self) -> Stream:
        """Where it runs."""
        return self.origin.lane

    @property
    def sent(self) -> int:
        """The bytes that it puts on the wire."""
        return self.origin.sent

    @property
    def event(self) -> CudaEvent:
        """The point in the lane behind the operation."""
        return self


class AllReduceCall:
    """An all_reduce_ of certain memory on a lane, to be launched as often as wanted.

    Args:
        communicator: Whose.
        lane: Where.
        calls: NCCL's part.
        sent: The bytes on the wire.
    """

    __slots__ = ("_entered", "_lock", "_make", "communicator", "lane", "sent")

    def __init__(
        self, communicator: CudaCommunicator, lane: CudaStream, calls: PreparedCalls, sent: int
    ) -> None:
        self.communicator, self.lane, self.sent = communicator, lane, sent
        self._make = calls.make
        self._lock = communicator.device.issue_lock
        self._entered = communicator.device.entered

    def launch(self, holds: object, standing: StandingWork | None = None) -> CudaWork:
        """Launch it. Hot: written flat, for a frame costs as much as a check.

        Args:
            holds: What is to live until it is complete.
            standing: The work of a prepared call, which holds its memory itself; None makes a work.

        Raises:
            CollectiveError: the communicator has failed, or another one before it on the lane.
            ClosedError: the communicator, or the lane, was closed.
        """
        comm, lane, lock = self.communicator, self.lane, self._lock
        work = standing or CudaWork()  # [Note: made without __init__]
        if standing is None:
            work.origin = self
            work.operation = _OPERATION
            work.holds = holds
        work.owner = comm
        lock.acquire()  # [Note: who is inside NCCL]; `with` would cost twice as much
        try:
            is_clear = comm.refusal is None and lane.solo is comm.me and self._entered.once
            work.behind = () if is_clear else comm.require_clear(lane)
            try:
                if not self._make():
                    comm.wait_launched()
            except LibraryError as error:
                raise comm.given_up(error) from error
            comm.sequence = sequence = comm.sequence + 1
            work.queue_on(lane, sequence)
            if is_clear:
                comm.latest[lane] = work
            else:
                lane.passed(work, comm)
            if comm.refusal is not None:  # it failed between the launch and here: nobody has marked this one
                work.failure = comm.refusal
            comm.bytes_sent += self.sent
            comm.flight.append((work, sequence, perf_counter_ns()))
        finally:
            lock.release()
        return work


class StandingWork(CudaWork):
    """The work of a prepared call: [Note: launched again].

    Args:
        call: What is launched.
        holds: What lives until the last launch is complete.
    """

    __slots__ = ("_is_retired", "_landed_sequence")
    keeps_raw = True

    def __init__(self, call: AllReduceCall, holds: object) -> None:
        self.origin, self.operation, self.holds = call, _OPERATION, holds
        self.owner, self.stream, self.raw = call.communicator, call.lane, call.communicator.device.new_event()
        self.behind, self.failure, self._landed = (), None, False
        self.sequence = self._landed_sequence = 0
        self._is_retired = False

    def queue_on(self, stream: CudaStream, sequence: int = 0) -> None:
        """Queue this point anew."""
        stream.record(self.raw)
        self.sequence = sequence
        kept = stream.kept
        if not kept or kept[-1] is not self:
            kept.append(self)

    def has_landed(self) -> bool:
        """Has the device reached the end of the latest launch?"""
        sequence = self.sequence
        if self._landed_sequence != sequence:
            if not self.is_reached():
                return False
            self._landed_sequence = sequence
        if self._is_retired:
            self.holds = None
        return True

    def retire(self) -> None:
        """Nobody can launch it any more."""
        self._is_retired = True
        if self._landed_sequence == self.sequence:
            self.holds = None


class CudaPreparedCall:
    """`bagua_rt.backend.PreparedCall` over an `AllReduceCall`.

    Args:
        call: The call.
        t: Its tensor.
        otherwise: The same for launches that are part of a group, or are compared between the ranks.
    """

    def __init__(self, call: AllReduceCall, t: torch.Tensor, otherwise: PreparedCall) -> None:
        self._tensor, self._address, self._otherwise = t, t.data_ptr(), otherwise
        self._launch, self._communicator = call.launch, call.communicator
        self._work = StandingWork(call, t.detach())  # the memory of now, whatever becomes of `t`

    def __del__(self) -> None:
        self._work.retire()

    def launch(self) -> Work:
        """Launch it once more."""
        if self._tensor.data_ptr() != self._address:
            refuse_moved(_OPERATION)
        if self._communicator.open_groups or self._communicator.is_comparing:
            return self._otherwise.launch()
        return self._launch(None, self._work)
