"""Work objects, prepared calls and open groups, shared by every backend.

[Note: made without __init__]
    An ``__init__`` in Python costs 0.2 us, as much as ten stores. So what every operation needs anew
    (`LaunchedWork`, a CudaEvent) has none, and is filled in by the function that makes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bagua_rt.backend import Call, Event, Stream, Work
from bagua_rt.backends._arguments import refuse_moved
from bagua_rt.errors import BaguaError, CollectiveTimeoutError, UsageError

if TYPE_CHECKING:
    from bagua_rt.backends._communicator import CheckedCommunicator


def fresh(error: BaseException) -> BaseException:
    """A new exception of the same type and text for one more raise: tracebacks don't pile up."""
    return type(error)(*error.args) if isinstance(error, BaguaError) else error


class BaseWork(ABC):
    """An operation of a communicator, as `bagua_rt.backend.Work` describes it.

    Attributes:
        operation: The name of the call, as texts show it.
        sequence: Its number among the communicator's operations, from 1; 0 before it is launched.
    """

    __slots__ = ()
    operation: str
    sequence: int

    @property
    @abstractmethod
    def communicator(self) -> CheckedCommunicator:
        """Whose operation it is."""

    @property
    @abstractmethod
    def lane(self) -> Stream:
        """Where it runs."""

    @property
    @abstractmethod
    def sent(self) -> int:
        """The bytes that it puts on the wire."""

    @property
    @abstractmethod
    def event(self) -> Event:
        """The point in the lane behind the operation.

        Raises:
            UsageError: it is not launched.
        """

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until the operation is complete.

        A deadline that passes leaves the operation under way: wait again, or abort the communicator.

        Args:
            timeout_s: The deadline from now on; None takes the communicator's.

        Raises:
            UsageError: `timeout_s` is no time.
            CollectiveTimeoutError: the deadline passed.
            CollectiveError: the operation failed, or its communicator was aborted meanwhile.
            ClosedError: its communicator was closed meanwhile, or this is the child of a fork.
        """
        event, communicator = self.event, self.communicator
        if communicator.is_forked:
            communicator.refuse()
        limit = communicator.timeout_s if timeout_s is None else timeout_s
        if not isinstance(limit, (int, float)) or not limit >= 0:
            raise UsageError(
                f"{self.operation}: wait's timeout_s is not usable",
                expected="seconds, 0 or more",
                got=repr(timeout_s),
            )
        if not communicator.wait_for(self, limit):
            self._raise_timeout(limit)
        error = communicator.error_of(event)
        if error is not None:
            raise fresh(error) from error

    def wait_stream(self, stream: Stream) -> None:
        """Hold `stream` back until the operation is complete ([Note: CPU compute stream])."""
        self.communicator.hold(stream, self.event)

    def is_done(self) -> bool:
        """Has the operation ended (with or without an error)? Never blocks."""
        return self.communicator.is_done(self.event)

    def _raise_timeout(self, limit: float) -> None:
        communicator = self.communicator
        behind, others = communicator.ahead_of(self), communicator.told()
        raise CollectiveTimeoutError(
            f"{self.operation} #{self.sequence} of communicator {communicator.name!r} "
            f"did not complete on rank {communicator.rank} of {communicator.world_size} within {limit:g} s",
            expected="every rank to launch the same operations in the same order, within the deadline",
            got="; ".join([f"its lane still in {behind}"] * bool(behind) + [others] * bool(others)),
            fix="look for a rank that died, is slow or took another way; abort() the communicator to go on",
        )


class LaunchedWork(BaseWork):
    """A collective that was launched, or that its group will launch. `CheckedCommunicator._launch` makes it.

    Attributes:
        primitive: What runs it.
        args: The checked arguments of `primitive`, until it is launched; then the backend keeps them.
    """

    __slots__ = (
        "_event",
        "_given_up",
        "args",
        "call",
        "communicator",
        "lane",
        "operation",
        "primitive",
        "sent",
        "sequence",
    )
    _event: Event | None
    _given_up: bool
    args: tuple[Any, ...]
    call: Call  # set while calls are compared
    communicator: CheckedCommunicator
    lane: Stream
    primitive: Callable[..., None]
    sent: int

    def launched(self, event: Event) -> None:
        """Note the event behind the operation, and let its tensors go: the backend keeps them now."""
        self._event = event
        self.args = ()

    def give_up(self) -> None:
        """Note that the group raised before it launched anything."""
        self._given_up = True
        self.args = ()

    @property
    def event(self) -> Event:
        """The point in the lane behind the operation.

        Raises:
            UsageError: the operation is part of a group that is still open, or that raised.
        """
        if self._event is None:
            state = "was never launched: its group raised" if self._given_up else "is not launched yet"
            raise UsageError(
                f"{self.operation} of communicator {self.communicator.name!r} {state}",
                fix="wait after the group has ended",
            )
        return self._event

    def is_done(self) -> bool:
        """Has the operation ended (with or without an error)? Never blocks."""
        return self._event is not None and super().is_done()


class LaunchedAgain:
    """`bagua_rt.backend.PreparedCall` by a function that launches.

    Args:
        operation: The name of the call.
        t: Its tensor, which is checked.
        launch: Launches it, on the memory that `t` has now.
    """

    def __init__(self, operation: str, t: torch.Tensor, launch: Callable[[], Work]) -> None:
        self._operation, self._tensor, self._launch = operation, t, launch
        self._address = t.data_ptr()

    def launch(self) -> Work:
        """Launch it once more."""
        if self._tensor.data_ptr() != self._address:
            refuse_moved(self._operation)
        return self._launch()


class OpenGroup:
    """The operations of one thread between the begin and the end of ``group()``."""

    def __init__(self) -> None:
        self._members: dict[Stream, list[LaunchedWork]] = {}

    def add(self, work: LaunchedWork) -> LaunchedWork:
        """Keep `work` for the end of the group."""
        self._members.setdefault(work.lane, []).append(work)
        return work

    def by_lane(self) -> list[tuple[Stream, list[LaunchedWork]]]:
        """The members in the order of their calls, lane by lane."""
        return list(self._members.items())

    def give_up(self) -> None:
        """Launch nothing."""
        for members in self._members.values():
            for work in members:
                work.give_up()
