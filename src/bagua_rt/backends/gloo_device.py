"""Streams and events of the CPU: a lane is one worker thread that runs its tasks first in, first out.

[Note: who clears a poisoned lane]
    A task that fails poisons its lane ([Note: sticky stream errors]) in the name of its communicator, the
    *origin*. `abort` and `close` of that communicator queue a clearing task on every lane of the device.
    So the error reaches exactly what was queued before the abort: waits, records and kernels behind the
    failed operation carry it, whenever their turn comes. Another communicator's operation is the
    exception: once the origin is aborted it runs, because its peers run theirs.

[Note: a lane that is stuck]
    An operation whose peer never comes can't be interrupted. `Lane.abandon` completes its event with an
    error and gives the lane a new thread; the old one keeps the operation's tensors alive, and ends
    without touching the lane should the operation ever return.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
import weakref
from _thread import allocate_lock
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal, Protocol, cast

import torch

from bagua_rt import backend
from bagua_rt.backends._work import fresh
from bagua_rt.errors import BaguaError, ClosedError, CollectiveTimeoutError, UsageError


class Owner(Protocol):
    """What a lane knows of the communicator whose operation it runs."""

    name: str
    rank: int
    refusal: BaguaError | None  # why it takes no more operations
    is_settled: bool  # aborted or closed: its failure no longer holds others back
    cleared_lanes: set[Lane]  # lanes that are past its clearing task

    def fail(self, error: BaguaError) -> None: ...
    def translate(self, error: BaseException, operation: str, sequence: int) -> BaguaError: ...


class LaneEvent:
    """A point in a stream of the CPU.

    Attributes:
        done: Has the stream reached this point?
        error: The error that the stream had met by then.
        own_error: The error of the operation that ends here, whatever happened before it.
        origin: The communicator that failed; None where none did.
    """

    __slots__ = ("__weakref__", "_gate", "done", "error", "origin", "own_error", "time_ns")

    def __init__(self) -> None:
        # One raw lock, held until completion, is a tenth of the price of a threading.Event.
        self._gate = allocate_lock()
        self._gate.acquire()
        self.done = False
        self.error: BaseException | None = None
        self.own_error: BaseException | None = None
        self.origin: Owner | None = None
        self.time_ns = 0

    def complete(
        self,
        error: BaseException | None = None,
        own_error: BaseException | None = None,
        origin: Owner | None = None,
    ) -> None:
        """Reach this point. Called exactly once, by whoever took the task off its lane."""
        self.error, self.own_error, self.origin = error, own_error, origin
        self.time_ns = time.perf_counter_ns()
        self.done = True
        self._gate.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the point is reached; False if it wasn't within `timeout_s` (None: for ever)."""
        if self.done:
            return True
        limit = -1.0 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        if not self._gate.acquire(timeout=limit):
            return False
        self._gate.release()
        return True


def completed_event(error: BaseException | None = None, origin: Owner | None = None) -> LaneEvent:
    """A point that was reached just now."""
    event = LaneEvent()
    event.complete(error, error, origin)
    return event


class LaneTask:
    """One entry of a lane: a call, or an event to wait for, or the end of an origin's poison."""

    __slots__ = ("args", "awaits", "call", "clears", "event", "operation", "owner", "sequence")

    def __init__(
        self,
        call: Callable[..., object] | None = None,
        args: tuple[Any, ...] = (),
        *,
        owner: Owner | None = None,
        operation: str = "run",
        sequence: int = 0,
        awaits: LaneEvent | None = None,
        clears: Owner | None = None,
    ) -> None:
        self.call, self.args = call, args
        self.owner, self.operation, self.sequence = owner, operation, sequence
        self.awaits, self.clears = awaits, clears
        self.event = LaneEvent()

    def __str__(self) -> str:
        if self.owner is None:
            return self.operation
        return f"{self.operation} #{self.sequence} of communicator {self.owner.name!r}"


class ComputeStream:
    """The calling thread ([Note: CPU compute stream])."""

    name = "compute"
    busy_us = 0.0


class Lane:
    """A FIFO of tasks and the daemon thread that runs them, started with the first task.

    Attributes:
        name: The name that traces and error texts show.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[LaneTask | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards what follows; never held while a task runs
        self._thread: threading.Thread | None = None
        self._current: LaneTask | None = None
        self._poison: dict[Owner | None, BaseException] = {}
        self._tail: LaneEvent | None = None
        self._busy_ns = self._busy_since_ns = 0
        self._refusal: ClosedError | None = None
        _LIVE_LANES.add(self)

    @property
    def busy_us(self) -> float:
        """Microseconds spent inside operations and kernels so far (waits for events don't count)."""
        since = self._busy_since_ns
        return (self._busy_ns + (time.perf_counter_ns() - since if since else 0)) / 1000

    @property
    def poison(self) -> tuple[Owner | None, BaseException] | None:
        """Whose failure the lane is under now, and the failure."""
        for item in tuple(self._poison.items()):
            return item
        return None

    @property
    def doing(self) -> str:
        """What the lane's thread is in now, for error texts; "" when idle."""
        task = self._current
        return "" if task is None else str(task)

    def submit(self, task: LaneTask) -> LaneEvent:
        """Queue `task`.

        Raises:
            ClosedError: the lane was closed, or belongs to the process that forked this one.
        """
        with self._lock:
            if self._refusal is not None:
                raise fresh(self._refusal) from self._refusal
            if self._thread is None:
                self._start()
            self._tail = task.event
            self._queue.put(task)
        return task.event

    def tail(self) -> LaneEvent | None:
        """The event behind everything queued so far; None when nothing ever was."""
        return self._tail

    def abandon(self, owner: Owner, error: BaguaError) -> bool:
        """Give up the operation of `owner` that is running here, if one is ([Note: a lane that is stuck])."""
        with self._lock:
            task = self._current
            if task is None or task.owner is not owner:
                return False
            self._current = None
            self._poison[owner] = error
            if self._thread is not None:
                _ABANDONED[:] = [thread for thread in (*_ABANDONED, self._thread) if thread.is_alive()]
            self._start()
        task.event.complete(error, error, owner)
        return True

    def clear(self, origin: Owner) -> None:
        """Queue the end of `origin`'s poison ([Note: who clears a poisoned lane])."""
        with self._lock:
            if (self._tail is None or self._tail.done) and not self._poison:
                origin.cleared_lanes.add(self)  # nothing queued here depends on it
                return
        with contextlib.suppress(ClosedError):
            self.submit(LaneTask(operation="clear", clears=origin))

    def close(self) -> None:
        """End the thread once its queue is empty. Idempotent."""
        with self._lock:
            if self._refusal is not None:
                return
            self._refusal = ClosedError(f"the stream {self.name!r} was closed")
            self._queue.put(None)

    def disown(self) -> None:
        """Refuse everything: this is the child of a fork, which has no lane threads.

        Takes no lock: a thread that is not here may hold it.
        """
        self._lock = threading.Lock()
        self._refusal = ClosedError(
            f"the stream {self.name!r} belongs to the process that forked this one",
            fix="open a backend in this process",
        )

    def join(self, timeout_s: float) -> None:
        """Wait a little for a closed lane to end, unless an operation holds it."""
        task, thread = self._current, self._thread
        if thread is not None and (task is None or task.owner is None):
            thread.join(timeout_s)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name=f"bagua-{self.name}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        torch.set_grad_enabled(False)  # leaves that require grad are written in place here
        me = threading.current_thread()
        while True:
            task = self._queue.get()
            if task is None or not self._perform(task, me):
                return
            del task  # or the last operation's tensors live until the next one comes

    def _perform(self, task: LaneTask, me: threading.Thread) -> bool:
        """Run one task and complete its event; False if the lane was given to another thread meanwhile."""
        event, owner = task.event, task.owner
        with self._lock:
            origin, error = self._verdict(task)
            if error is None:
                self._current = task
        ran = error is None
        if ran:
            origin, error = self._run(task)
            with self._lock:
                if self._thread is not me:
                    return False
                self._current = None
        if error is not None and (origin is None or self not in origin.cleared_lanes):
            self._poison.setdefault(origin, error)
            if owner is not None and isinstance(error, BaguaError):
                owner.fail(error)
        task.call, task.args, task.awaits = None, (), None  # before the event: see B66
        poison = self.poison if error is None else None
        if poison is None:
            event.complete(error, error, origin)
        else:
            event.complete(poison[1], None, poison[0])
        return True

    def _verdict(self, task: LaneTask) -> tuple[Owner | None, BaseException | None]:
        """Why `task` may not run, and through whom."""
        owner = task.owner
        if task.clears is not None:
            return None, None
        if owner is not None and owner.refusal is not None:
            return owner, owner.refusal
        for origin, error in self._poison.items():
            if owner is None or origin is None or not origin.is_settled:
                return origin, error
        return None, None

    def _run(self, task: LaneTask) -> tuple[Owner | None, BaseException | None]:
        if task.awaits is not None:
            task.awaits.wait(None)
            return task.awaits.origin, task.awaits.error
        if task.clears is not None:
            self._poison.pop(task.clears, None)
            self._poison.pop(None, None)  # a failed kernel has no communicator of its own
            task.clears.cleared_lanes.add(self)
            return None, None
        begin = self._busy_since_ns = time.perf_counter_ns()
        try:
            cast(Callable[..., object], task.call)(*task.args)
        except BaseException as caught:  # whatever it is, the event carries it
            caught.__traceback__ = None  # its frames hold the operation's tensors
            owner = task.owner
            return owner, caught if owner is None else owner.translate(caught, task.operation, task.sequence)
        finally:
            self._busy_since_ns = 0
            self._busy_ns += time.perf_counter_ns() - begin
        return None, None


class CpuDevice:
    """The CPU as `bagua_rt.backend.Device` describes it."""

    type: Literal["cpu"] = "cpu"
    torch_device = torch.device("cpu")
    host_is_compute = True

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._compute = ComputeStream()
        self._complete = completed_event()
        self.all_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()

    def compute_stream(self) -> ComputeStream:
        return self._compute

    def new_stream(self, name: str, *, high_priority: bool = True) -> Lane:
        lane = Lane(name)
        self.all_lanes.add(lane)
        return lane

    def close_stream(self, stream: backend.Stream) -> None:
        if isinstance(stream, Lane):
            stream.close()
            self.all_lanes.discard(stream)

    def record(self, stream: backend.Stream, *, timed: bool = False) -> LaneEvent:
        if isinstance(stream, ComputeStream):
            return completed_event() if timed else self._complete
        lane = self.lane(stream)
        tail = lane.tail()
        if tail is None or (timed and tail.done):  # the tail's time is too early
            origin, error = lane.poison or (None, None)
            return completed_event(error, origin)
        return tail

    def wait(self, stream: backend.Stream, event: backend.Event) -> None:
        if isinstance(stream, ComputeStream):
            self.synchronize(event)
            return
        lane, point = self.lane(stream), lane_event(event)
        if point.done and point.error is None:
            return
        if point.done and point.error is not None and point.origin is not None and point.origin.is_settled:
            # Its lane would stay poisoned: nobody aborts that communicator a second time.
            raise fresh(point.error) from point.error
        lane.submit(LaneTask(operation="wait", awaits=point))

    def query(self, event: backend.Event) -> bool:
        return lane_event(event).done

    def synchronize(self, event: backend.Event, timeout_s: float | None = None) -> None:
        point, limit = lane_event(event), self.timeout_s if timeout_s is None else timeout_s
        if not point.wait(limit):
            busy = "; ".join(f"{lane.name}: {lane.doing}" for lane in self.all_lanes if lane.doing)
            raise CollectiveTimeoutError(
                f"an event did not complete within {limit:g} s",
                got=f"these operations under way: {busy or 'none'}",
                fix="see whether every rank launches the same operations in the same order",
            )
        if point.error is not None:
            raise fresh(point.error) from point.error

    def run(self, stream: backend.Stream, fn: Callable[[], object]) -> None:
        if isinstance(stream, ComputeStream):
            fn()
        else:
            self.lane(stream).submit(LaneTask(fn))

    def time_us(self, event: backend.Event) -> float:
        point = lane_event(event)
        if not point.done:
            raise UsageError("this event has not completed: it has no time yet", fix="synchronize it first")
        return point.time_ns / 1000

    def lane(self, stream: backend.Stream) -> Lane:
        """The lane behind a stream.

        Raises:
            UsageError: it is not a stream of this device.
        """
        if not isinstance(stream, Lane):
            raise UsageError(
                "this is not a stream of the CPU device",
                expected="compute_stream() or a stream made by new_stream()",
                got=repr(stream),
            )
        return stream

    def close(self) -> None:
        """Close every stream. Idempotent."""
        for lane in list(self.all_lanes):
            self.close_stream(lane)


def lane_event(event: backend.Event) -> LaneEvent:
    """The CPU event behind the protocol.

    Raises:
        UsageError: it is not an event of the CPU device.
    """
    if not isinstance(event, LaneEvent):
        raise UsageError("this is not an event of the CPU device", got=repr(event))
    return event


_LIVE_LANES: weakref.WeakSet[Lane] = weakref.WeakSet()
_ABANDONED: list[threading.Thread] = []


def _disown_lanes() -> None:
    for lane in list(_LIVE_LANES):
        lane.disown()


def _let_stuck_threads_sleep() -> None:
    """Keep the exit code when an operation ends while the interpreter is being torn down.

    [Note: exit with an operation pending]
        When both ranks exit, the first one's sockets close while the other is in Py_Finalize. The lane's
        thread there comes back from gloo, asks for the GIL, and is ended by CPython (before 3.14) with
        pthread_exit, whose unwinding meets torch's C++ frames: std::terminate, SIGABRT, and the exit code
        is lost. A terminate handler that sleeps lets that thread hang instead, until the process is gone.
        It is installed only here, at the very end, and only when a lane's thread is still there.
    """
    threads = [lane._thread for lane in list(_LIVE_LANES)] + list(_ABANDONED)
    if not any(thread is not None and thread.is_alive() for thread in threads):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C++ runtime: nothing to be done
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
        set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


os.register_at_fork(after_in_child=_disown_lanes)
atexit.register(_let_stuck_threads_sleep)
