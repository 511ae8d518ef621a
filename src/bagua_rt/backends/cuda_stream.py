"""Streams of a CUDA device, and points in them.

[Note: alive until its event]
    The host runs ahead of the device, so whatever queues work on a stream keeps the work's tensors alive by
    reference, in the event recorded behind it (`CudaEvent.holds`), and the stream keeps the event
    (`CudaStream.kept`) until somebody has seen it complete. Torch's allocator may hand the memory on
    only then, so it needs no ``record_stream``.

[Note: errors behind an operation]
    A stream of the device knows no errors: what is queued behind a collective that failed stays stuck with
    it, and runs, on what it finds, once the communicator is aborted. So an event carries on the host which
    collectives were before it in its stream (`CudaEvent.roots`), over waits between streams too, and its
    error is theirs. A collective that the driver had completed before its communicator failed is good.
    Once the communicator is aborted or closed, events recorded from then on no longer carry its error.

[Note: the driver's events are used again]
    To make one takes longer than to record it. So `CudaStream.prune` takes the driver's event from a
    `CudaEvent` that has landed, to be recorded for another. A thread that is about to queue a wait for it
    must not meet that: it puts an entry into `SpareEvents.waits` before it looks at ``raw``, and ``raw`` is
    None before prune looks there. One of the two sees the other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import torch

from bagua_rt.errors import BaguaError, CudaError


class Owner(Protocol):
    """What streams and events know of the communicator whose operations they carry.

    Attributes:
        is_settled: It was aborted or closed: its failure no longer holds others back.
        me: A reference to it that doesn't keep it alive, always the same one.
        latest: For each stream, the latest of its operations there.
    """

    name: str
    is_settled: bool
    latest: dict[CudaStream, CudaEvent]

    @property
    def me(self) -> weakref.ref[Any]: ...
    def poll(self) -> None: ...


class SpareEvents:
    """The driver's events that are to be used again ([Note: the driver's events are used again]).

    Args:
        make: Makes a new one.

    Attributes:
        waits: As many entries as there are threads that are about to queue a wait.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.spare: list[Any] = []
        self.waits: list[None] = []


class CudaEvent:
    """A point in a stream. Whoever makes one sets ``behind``, ``owner``, ``operation``, ``holds`` and, where
    the event keeps it, ``raw``; then `queue_on` puts it into the stream ([Note: made without __init__]).

    Attributes:
        raw: The driver's event; None once it was taken away ([Note: the driver's events are used again]).
        keeps_raw: Is ``raw`` never taken away?
        stream: Where it was recorded.
        behind: Operations of communicators that were before it, as far as their end was not known.
        owner: The communicator whose operation ends here, if one does; None once it has ended well.
        operation: The operation's name, for error texts.
        sequence: The operation's number.
        holds: What lives until the event is complete ([Note: alive until its event]).
        failure: The error of the operation that ends here.
    """

    __slots__ = (
        "__weakref__",
        "_landed",
        "behind",
        "failure",
        "holds",
        "operation",
        "owner",
        "raw",
        "sequence",
        "stream",
    )
    keeps_raw: ClassVar[bool] = False
    raw: Any
    stream: CudaStream
    behind: tuple[CudaEvent, ...]
    owner: Owner | None
    operation: str
    sequence: int
    holds: object
    failure: BaseException | None
    _landed: bool

    def queue_on(self, stream: CudaStream, sequence: int = 0) -> None:
        """Queue this point on `stream`, which keeps it until it has landed.

        Raises:
            CudaError: the driver refuses.
        """
        if not self.keeps_raw:
            try:
                self.raw = stream.events.spare.pop()
            except IndexError:
                self.raw = stream.events.make()
        try:
            stream.raw.record(self.raw)
        except Exception as error:
            raise cuda_error("cuEventRecord", error) from error
        self.stream = stream
        self.sequence = sequence
        self.failure = None
        self._landed = False
        stream.kept.append(self)
        stream.prune()

    @property
    def error(self) -> BaseException | None:
        """The error that the stream had met by then ([Note: errors behind an operation])."""
        if self.failure is not None:
            return self.failure
        for root in self.behind:
            if root.failure is not None:
                return root.failure
        return None

    def has_landed(self) -> bool:
        """Has the device reached this point? Lets go of what it held if so.

        Raises:
            CudaError: the device has failed.
        """
        if self._landed:
            return True
        if not self.is_reached():
            return False
        self._landed = True
        self.holds = None
        if self.failure is None and (not self.behind or self.error is None):
            self.behind = ()  # or each operation would keep all the earlier ones
            self.owner = None
        return True

    def is_reached(self) -> bool:
        """Ask the driver whether the device has reached this point.

        Raises:
            CudaError: the device has failed.
        """
        raw = self.raw
        try:
            return raw is None or bool(raw.is_done)
        except Exception as error:  # cuda.core's own type is private
            raise cuda_error("cuEventQuery", error) from error

    def is_known(self) -> bool:
        """Is the outcome known: reached, or behind an operation that failed?"""
        return self.error is not None or self.has_landed()

    def is_over(self) -> bool:
        """Has the operation that ends here ended, or failed, whatever became of those before it?"""
        return self.failure is not None or self.has_landed()

    def roots(self) -> tuple[CudaEvent, ...]:
        """The operations whose errors what comes behind this point carries."""
        return self.behind if self.owner is None else (*self.behind, self)

    def matters(self) -> bool:
        """Must what is recorded behind this operation carry it along?"""
        if self.failure is not None:
            return self.owner is not None and not self.owner.is_settled
        return not self.has_landed()

    def __str__(self) -> str:
        if self.owner is None:
            return self.operation
        return f"{self.operation} #{self.sequence} of communicator {self.owner.name!r}"


class TimedEvent(CudaEvent):
    """A point that knows when it was reached."""

    __slots__ = ()
    keeps_raw = True


class CudaStream:
    """A stream of the device.

    Args:
        name: The name that traces and error texts show.
        raw: cuda.core's stream.
        events: Where its points take the driver's events from.
        is_ours: Was it made here?

    Attributes:
        handle: The driver's handle.
        busy_us: 0; the device is not asked.
        scratch: Memory that kernels on this stream share, one after the other.
        kept: The points in it that nobody has seen landed.
        solo: The communicator whose operations alone are before what is queued now, by its `Owner.me`; None
            where there may be others, or the stream was closed.
    """

    busy_us = 0.0

    def __init__(self, name: str, raw: Any, events: SpareEvents, *, is_ours: bool) -> None:
        self.name, self.raw, self.events, self.is_ours = name, raw, events, is_ours
        self.handle = int(raw.handle)
        self.is_closed = False
        self.scratch: torch.Tensor | None = None
        self.kept: deque[CudaEvent] = deque()
        self.solo: weakref.ref[Owner] | None = None
        self._owner: weakref.ref[Owner] | None = None  # whose operation is the latest
        self._others: tuple[CudaEvent, ...] = ()  # operations of other streams and communicators

    def before(self) -> tuple[CudaEvent, ...]:
        """The operations that what is queued now is behind, as far as it matters."""
        if self._others:
            self._others = tuple([event for event in self._others if event.matters()])
        if self._owner is None:
            return self._others
        owner = self._owner()
        latest = None if owner is None else owner.latest[self]
        return self._others if latest is None or not latest.matters() else (*self._others, latest)

    def before_others(self, owner: Owner) -> tuple[CudaEvent, ...]:
        """The same without the operations of `owner`: those that are under way fail together."""
        if self.solo is owner.me:
            return ()
        return tuple([event for event in self.before() if event.owner is not owner])

    def behind(self, roots: Iterable[CudaEvent]) -> None:
        """Note that what is queued from now on is behind these operations too."""
        new = {event: None for event in roots if event.matters()}
        if new:
            self.solo = None
            self._others = (*(event for event in self._others if event not in new), *new)

    def passed(self, event: CudaEvent, owner: Owner) -> None:
        """Note an operation of `owner` on this stream: it stands for all earlier ones of `owner`."""
        owner.latest[self] = event
        self._owner, self._others = owner.me, event.behind
        self.solo = None if event.behind else owner.me

    def record(self, raw: Any) -> None:
        """Queue the driver's event `raw`.

        Raises:
            CudaError: the driver refuses.
        """
        try:
            self.raw.record(raw)
        except Exception as error:
            raise cuda_error("cuEventRecord", error) from error

    def prune(self) -> None:
        """Let go of the points that have landed."""
        kept = self.kept
        try:
            while kept:
                oldest = kept[0]
                if not oldest.has_landed():
                    return
                kept.remove(oldest)  # by one thread alone: another one gets a ValueError
                if not oldest.keeps_raw:
                    raw, oldest.raw = oldest.raw, None
                    if not self.events.waits:  # [Note: the driver's events are used again]
                        self.events.spare.append(raw)
                elif not oldest.has_landed():  # [Note: launched again]
                    kept.append(oldest)
        except (IndexError, ValueError):
            pass  # another thread has removed it

    def pending(self) -> list[CudaEvent]:
        """The events that have not landed, in order."""
        return [event for event in list(self.kept) if not event.has_landed()]


def cuda_error(function: str, error: Exception) -> BaguaError:
    """The error for what cuda.core raised: the one place where the driver's statuses become exceptions."""
    if isinstance(error, BaguaError):
        return error
    return CudaError(
        f"{function} failed: {type(error).__name__}: {str(error).strip()}",
        fix="an error of an earlier launch may show only now: CUDA_LAUNCH_BLOCKING=1 finds it",
    )
