"""The life of a communicator, written once for every backend: launching, groups, children, failure, end.

A backend subclasses `CheckedCommunicator` and implements its primitives, whose arguments are checked.
Where they run is the backend's choice: gloo calls them on the lane's thread, CUDA at once.

[Note: refusal]
    ``refusal`` is the one field that says whether a communicator takes calls: None, the failure that it met,
    or the ClosedError of `close` or fork. Each call raises a fresh copy of it, chained to the first.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import warnings
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from typing import Any, ClassVar, NoReturn

import torch

from bagua_rt.backend import CallBoard, Connect, Event, Store, Stream, Work
from bagua_rt.backends import _arguments as arguments
from bagua_rt.backends._calls import (
    COLLECTIVES,
    MESSAGES,
    call_of,
    telling_refusals,
    telling_refused_messages,
)
from bagua_rt.backends._collectives import Collectives
from bagua_rt.backends._work import BaseWork, LaunchedWork, OpenGroup, fresh
from bagua_rt.errors import BaguaError, ClosedError, CollectiveError, InternalError, UsageError

FLIGHT_LENGTH = 256  # operations that a communicator remembers


class CheckedCommunicator(Collectives):
    """The `bagua_rt.backend.Communicator` protocol over a handful of primitives.

    Attributes:
        bytes_sent: Payload that this rank has put on the wire ([Note: bytes on the wire]).
        refusal: Why it takes no more operations ([Note: refusal]).
        is_settled: It was aborted or closed.
        is_comparing: Are calls compared between the ranks before they are launched?
        open_groups: The groups that threads have open, by thread.
        stays: What a communicator that is never closed leaves behind, for the warning about it.
        sequence: How many operations were launched.
        flight: The latest operations, each with its number and when it was launched, in ns.
    """

    stays: ClassVar[str]

    def __init__(
        self,
        connect: Connect,
        store: Store | None,
        rank: int,
        world_size: int,
        name: str,
        lanes: Sequence[Stream],
        *,
        timeout_s: float,
        torch_device: torch.device,
    ) -> None:
        self.rank, self.world_size, self.name = rank, world_size, name
        self._peers = world_size - 1
        self.lanes, self.timeout_s = tuple(lanes), timeout_s
        self.bytes_sent = 0
        self.refusal: BaguaError | None = None
        self.is_settled = self.is_forked = False
        self._connect, self._store, self._device = connect, store, torch_device
        self._lane0 = self.lanes[0]
        self._board: CallBoard | None = None
        self.is_comparing = False
        self._launching = threading.Lock()
        self._latest: dict[Stream, tuple[int, BaseWork]] = {}  # with a board: by lane, whose and what
        self._made: list[weakref.ref[CheckedCommunicator]] = []
        self.sequence = 0
        self.flight: deque[tuple[BaseWork, int, int]] = deque(maxlen=FLIGHT_LENGTH)
        self.open_groups: dict[int, OpenGroup] = {}
        self._children = itertools.count()
        _LIVE.add(self)

    def __del__(self) -> None:
        if not getattr(self, "is_settled", True) and not self.is_forked and self.world_size > 1:
            text = f"communicator {self.name!r} was never closed: {self.stays}"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    # ---- what a backend implements beside the primitives of Collectives

    @abstractmethod
    def _queue(self, lane: Stream, work: LaunchedWork) -> Event:
        """Launch one operation on `lane`; keep its tensors alive until it is complete."""

    @abstractmethod
    def _queue_group(self, lane: Stream, works: Sequence[LaunchedWork]) -> Event:
        """Launch several operations as one that can't deadlock by their order."""

    @abstractmethod
    def await_event(self, event: Event, timeout_s: float) -> bool:
        """Block the host until `event` completes; False if it did not in time."""

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """Has `event` completed? Never blocks."""

    @abstractmethod
    def error_of(self, event: Event) -> BaseException | None:
        """The error of the operation that ended at `event`."""

    @abstractmethod
    def hold(self, stream: Stream, event: Event) -> None:
        """Hold `stream` back until `event` completes."""

    @abstractmethod
    def ahead_of(self, work: BaseWork) -> str:
        """What holds up the lane of `work`, for error texts; "" where that isn't known."""

    @abstractmethod
    def _abort(self, error: BaguaError) -> None:
        """Make every operation under way end, with `error`; other communicators on its lanes go on."""

    @abstractmethod
    def _close(self) -> None:
        """Release what an idle communicator holds, leak it where operations are under way."""

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return root's `obj` on every rank; blocks the host.

        The object travels pickled, and unpickling runs code: the ranks of a communicator trust each other.

        Raises:
            UsageError: root could not pickle it (on every rank), or `root` is no rank.
            CollectiveError: the communicator has failed, or the deadline passed.
        """
        self._enter(None)
        arguments.require_rank("broadcast_object", "root", root, self.world_size)
        if get_ident() in self.open_groups:
            raise UsageError("broadcast_object: it waits, so it can't be part of a group()")
        payload, failed = b"", None
        if self.rank == root:
            try:
                payload = pickle.dumps(obj)
            except Exception as error:  # pickling runs the object's own code; peers wait for an answer
                failed, payload = error, f"{type(error).__name__}: {error}".encode()
        # The size goes first; a negative one announces an error text instead of the object.
        size = torch.tensor([-len(payload) if failed else len(payload)], device="cpu")
        count = int(self._host_broadcast(size, root).item())
        data = torch.empty(abs(count), dtype=torch.uint8, device="cpu")
        if payload:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        raw = self._host_broadcast(data, root).numpy().tobytes()
        if count < 0:
            raise UsageError(
                f"broadcast_object: rank {root} could not pickle its object", got=raw.decode(errors="replace")
            ) from failed
        return obj if self.rank == root else pickle.loads(raw)

    def _host_broadcast(self, t: torch.Tensor, root: int) -> torch.Tensor:
        staged = t.to(self._device)
        self.broadcast_(staged, root).wait()
        return staged.cpu()

    # ---- groups and children

    @contextmanager
    def group(self) -> Iterator[None]:
        """Launch the operations of the body together at its end, so that their order can't deadlock.

        Operations of this thread only. Nothing is launched if the body raises; a nested group joins
        the outer.
        """
        self._enter(None)
        thread = get_ident()
        if thread in self.open_groups:
            yield
            return
        group = self.open_groups[thread] = OpenGroup()
        try:
            yield
        except BaseException:
            group.give_up()
            raise
        finally:
            del self.open_groups[thread]
        self._enter(None)
        if self.is_comparing:
            self._compare([work for _, members in group.by_lane() for work in members])
        by_lane = group.by_lane()
        with self._one_thread([work for _, members in by_lane for work in members]):
            for lane, members in by_lane:
                for work in members:
                    self.sequence = work.sequence = self.sequence + 1
                    self.bytes_sent += work.sent
                event = self._queue_group(lane, members)
                now_ns = perf_counter_ns()
                for work in members:
                    work.launched(event)
                    self.flight.append((work, work.sequence, now_ns))

    def split(self, color: int | None, key: int = 0) -> CheckedCommunicator | None:
        """Make a communicator for each colour; collective over all ranks, blocks the host.

        Args:
            color: Ranks that give the same colour form a communicator; None takes part in none.
            key: Orders the ranks within a colour; equal keys keep their order here.

        Returns:
            The new communicator, on the same lanes; None for the colour None.

        Raises:
            CollectiveTimeoutError: a rank did not come.
        """
        self._enter(None)
        if get_ident() in self.open_groups:
            raise UsageError("split: it waits, so it can't be part of a group()")
        if color is not None:
            arguments.require_integer("split", "color", color)
        arguments.require_integer("split", "key", key)
        number = next(self._children)
        mine = torch.tensor([int(color is not None), color or 0, key], device=self._device)
        everyone = torch.empty(3 * self.world_size, dtype=mine.dtype, device=self._device)
        self.all_gather(everyone, mine).wait()
        if color is None:
            return None
        rows = everyone.view(-1, 3).tolist()
        ranks = sorted((k, r) for r, (takes_part, c, k) in enumerate(rows) if takes_part and c == color)
        part = self._child([r for _, r in ranks], f"split{number}.{color}")
        self._made.append(weakref.ref(part))  # ends with this one, as its lanes do
        return part

    def shrink(self, exclude: Sequence[int]) -> CheckedCommunicator:
        """Make a communicator of the ranks that are left; collective over these, blocks the host.

        Works on a communicator that has failed or was aborted.

        Args:
            exclude: Ranks to leave out, the same on every rank that is left.

        Raises:
            UsageError: this rank, or no rank of the communicator, is to be left out.
            CollectiveTimeoutError: a rank did not come.
            ClosedError: the communicator was closed.
        """
        if isinstance(self.refusal, ClosedError):
            self.refuse()
        if not isinstance(exclude, Iterable) or isinstance(exclude, str):
            raise UsageError(
                "shrink: exclude is not usable", expected="a list of ranks to leave out", got=repr(exclude)
            )
        excluded = list(exclude)
        for rank in excluded:
            arguments.require_rank("shrink", "exclude", rank, self.world_size, self.rank)
        gone = sorted({int(rank) for rank in excluded})
        if not gone:
            raise UsageError("shrink: no rank is to be left out", fix="use duplicate")
        left = [rank for rank in range(self.world_size) if rank not in gone]
        return self._child(left, "without" + "_".join(map(str, gone)))

    def duplicate(self, name: str, lanes: Sequence[Stream]) -> CheckedCommunicator:
        """Make a communicator of the same ranks on other lanes, called ``{this name}/{name}``; collective,
        blocks the host.

        Raises:
            CollectiveTimeoutError: a rank did not come.
        """
        self._enter(None)
        return self._child(list(range(self.world_size)), name, lanes)

    def register(self, t: torch.Tensor) -> AbstractContextManager[None]:
        """Tell the library that `t` will be sent often, while the context lasts; here it needs no telling.

        Raises:
            UsageError: `t` can't be sent.
        """
        self._enter(None)
        arguments.require_plain("register", self._device, t=t)
        return nullcontext()

    def _child(
        self, ranks: list[int], name: str, lanes: Sequence[Stream] | None = None
    ) -> CheckedCommunicator:
        child = self._connect(
            self._store,  # type: ignore[arg-type]  # None only where one rank connects to nobody
            ranks.index(self.rank),
            len(ranks),
            f"{self.name}/{name}",
            self.lanes if lanes is None else lanes,
            timeout_s=self.timeout_s,
        )
        if not isinstance(child, CheckedCommunicator):
            raise InternalError("connect made a communicator of another kind")
        if self._board is not None and len(ranks) > 1:
            child.use_board(self._board.child(name, child.rank, child.world_size))
        return child

    # ---- what the ranks tell one another

    def use_board(self, board: CallBoard) -> None:
        """Tell the other ranks there what this one waits for; compare every call first if the board does."""
        self._board, self.is_comparing = board, board.is_comparing
        if self.is_comparing:
            for name in COLLECTIVES:
                setattr(self, name, telling_refusals(board, getattr(self, name)))
            for name in MESSAGES:
                method = getattr(self, name)
                setattr(self, name, telling_refused_messages(board, self.rank, name, method))

    def _compare(self, works: Sequence[LaunchedWork]) -> None:
        for work in works:
            work.call = call_of(work, self.rank, self.lanes.index(work.lane))
        if self._board is not None:
            self._board.compare([work.call for work in works])

    def wait_for(self, work: BaseWork, timeout_s: float) -> bool:
        """Block the host until `work` is complete; False if it was not in time.

        Raises:
            UsageError: calls were compared, and differ between ranks.
        """
        event = work.event
        if self._board is None:
            return self.await_event(event, timeout_s)
        call = getattr(work, "call", None)
        is_complete = self._board.wait(partial(self.await_event, event), timeout_s, self._queued, call)
        if self.is_comparing and is_complete and self.error_of(event) is not None:
            self._board.look()  # a peer that found a difference may have given up already
        return is_complete

    def _queued(self) -> str:
        """What this rank has launched that is not complete."""
        under_way = [w for w, *_ in list(self.flight) if not w.is_done()]
        texts = [f"{w.operation} #{w.sequence}" for w in under_way[:4]]
        return ", ".join(texts) + (f" and {len(under_way) - 4} more" if len(under_way) > 4 else "")

    def told(self) -> str:
        """What the other ranks wait for, as far as they have said so."""
        return "" if self._board is None else self._board.told()

    # ---- failure and end

    def fail(self, error: BaguaError) -> None:
        """Refuse calls from now on because of `error`; the first failure stays."""
        if self.refusal is None:
            self.refusal = error

    def abort(self) -> None:
        """End every operation under way with an error and refuse calls from now on. Idempotent, local.

        Memory that such an operation uses may still be written by it: don't use it again.
        """
        if self.is_settled or self.is_forked:
            return
        self.fail(
            CollectiveError(
                f"communicator {self.name!r} was aborted on rank {self.rank}",
                fix="shrink() it, or connect anew",
            )
        )
        self.is_settled = True
        self._abort(self.refusal or InternalError("abort left no failure"))

    def close(self) -> None:
        """Release the communicator and those split off it, and refuse calls from now on.

        Idempotent, local; waits for nothing.

        Operations that are under way end with an error, as by `abort`.
        """
        if self.is_forked or (self.is_settled and isinstance(self.refusal, ClosedError)):
            return
        for made in self._made:
            if (child := made()) is not None:
                child.close()
        self.refusal = ClosedError(f"communicator {self.name!r} was closed on rank {self.rank}")
        self.is_settled = True
        self._close()

    # ---- launching

    def _enter(self, stream: Stream | None) -> Stream:
        if self.refusal is not None:
            self.refuse()
        if stream is None:
            return self._lane0
        if stream not in self.lanes:
            raise UsageError(
                f"this stream is not a lane of communicator {self.name!r}",
                expected=", ".join(lane.name for lane in self.lanes),
                got=getattr(stream, "name", repr(stream)),
            )
        return stream

    def refuse(self) -> NoReturn:
        """Raise a fresh copy of `refusal`."""
        error = self.refusal or InternalError("a communicator refused a call without a reason")
        raise fresh(error) from error

    def _launch(
        self, lane: Stream, operation: str, primitive: Callable[..., None], args: tuple[Any, ...], sent: int
    ) -> Work:
        work = LaunchedWork()  # [Note: made without __init__]
        work.communicator = self
        work.lane = lane
        work.operation = operation
        work.primitive = primitive
        work.args = args
        work.sent = sent
        work.sequence = 0
        work._event = None
        work._given_up = False
        if self.open_groups and (group := self.open_groups.get(get_ident())) is not None:
            return group.add(work)
        if self.is_comparing:
            self._compare([work])
        with nullcontext() if self._board is None else self._one_thread([work]):
            self.sequence = work.sequence = self.sequence + 1
            self.bytes_sent += sent
            work.launched(self._queue(lane, work))
            self.flight.append((work, work.sequence, perf_counter_ns()))
        return work

    @contextmanager
    def _one_thread(self, works: Sequence[LaunchedWork]) -> Iterator[None]:
        """Around launches of calls that trainers make themselves, on any thread.

        Raises:
            UsageError: another thread's operation is under way on the lane of one of them.
        """
        thread = get_ident()
        with self._launching:
            for work in works:
                owner, latest = self._latest.get(work.lane, (thread, work))
                if owner != thread and not latest.is_done():
                    raise UsageError(
                        f"{work.operation}: two threads use {work.lane.name} of {self.name!r} at once",
                        expected="one order of operations, the same on every rank",
                        got=f"{latest.operation} #{latest.sequence} of another thread, under way",
                        fix="give each thread a lane (stream=) or a group (new_group) of its own",
                    )
            yield
            self._latest.update((work.lane, (thread, work)) for work in works)

    def flight_record(self) -> list[dict[str, Any]]:
        """The last operations that this rank launched, oldest first: a dictionary of plain values each.

        The launches of one prepared call have the state of the latest, which is behind the others.
        """
        return [
            {
                "sequence": sequence,
                "operation": work.operation,
                "lane": work.lane.name,
                "bytes_sent": work.sent,
                "launched_us": launched_ns // 1000,
                "state": self._state_of(work),
            }
            for work, sequence, launched_ns in list(self.flight)
        ]

    def _state_of(self, work: BaseWork) -> str:
        if not work.is_done():
            return "under way"
        return "complete" if self.error_of(work.event) is None else "failed"


_LIVE: weakref.WeakSet[CheckedCommunicator] = weakref.WeakSet()


def _disown() -> None:
    """Refuse everything in the child of a fork: the library's threads and sockets are the parent's."""
    for communicator in list(_LIVE):
        communicator.is_forked = True
        communicator.refusal = ClosedError(
            f"communicator {communicator.name!r} belongs to the process that forked this one",
            fix="init in this process, or start it with the spawn method",
        )


os.register_at_fork(after_in_child=_disown)
