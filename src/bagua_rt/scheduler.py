"""The event loop, and the pipeline that takes one attachment's buckets through it.

The training thread stages buckets and says which are ready; the loop thread alone launches communication, in
bucket order; the training thread waits for it. Messages go one way, through the loop's inbox::

    training thread                    loop thread                        lanes
    ready(bucket) ──── inbox ────▶     LaunchOrder.take()
                                       state.communicate(bucket) ─────▶   collectives, in queue order
    wait() ◀─────────────────── done events, deadline, failures of other ranks
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue

from bagua_rt.algorithms.base import AlgorithmState
from bagua_rt.backend import Device, Event, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.control import Control, Patience
from bagua_rt.errors import (
    BaguaError,
    ClosedError,
    CollectiveError,
    CollectiveTimeoutError,
    InternalError,
    interrupted,
)
from bagua_rt.launch_order import LaunchOrder
from bagua_rt.process_group import Communicators

_log = logging.getLogger("bagua_rt")

_POLL_S = 0.2
"""How often a waiting rank looks whether another rank has failed."""

_quarantine: list[object] = []
"""Memory that an abandoned collective may still write to: never reused, so never freed."""


class EventLoop:
    """One daemon thread that runs short callbacks in the order in which they were submitted.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_closed = False
        self._thread.start()

    def submit(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop thread, after those submitted before. It must not raise or block.

        Raises:
            ClosedError: the loop was closed.
        """
        if self._is_closed:
            raise ClosedError("the event loop was closed", fix="attach again after bagua_rt.init()")
        self._inbox.put(callback)

    def close(self) -> None:
        """Run what was submitted, then end the thread. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(None)
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (callback := self._inbox.get()) is not None:
            try:
                callback()
            except Exception:
                # Callbacks report their own errors to whoever waits for them; one that doesn't is a defect.
                _log.exception("a callback on the event loop raised")
            del callback  # nothing lives on because the loop is idle


class Round:
    """One communication of all buckets.

    Attributes:
        number: Which one, counted from 0.
        purpose: What is communicated, where that isn't the buckets.
        launched: Set when every bucket was launched, or launching failed.
        error: What stopped the launches.
        ready: For each bucket, the event at which its contents are in place.
        done: For each bucket, the event at which its communication is complete.
        last: The last bucket of each lane: its event is behind those of all others there.
        launched_us: For each bucket, when it was launched: host clock, microseconds.
        is_timed: Do the events of its buckets have a time?
        sent: For each bucket, the bytes that this rank puts on the wire for it, where the round is timed.
    """

    def __init__(
        self, number: int, lanes: Sequence[int], purpose: str = "", *, is_timed: bool = False
    ) -> None:
        bucket_count = len(lanes)
        self.number = number
        self.purpose = purpose
        self.is_timed = is_timed
        self.launched = threading.Event()
        self.error: Exception | None = None
        self.ready: list[Event | None] = [None] * bucket_count
        self.done: list[Event | None] = [None] * bucket_count
        self.last = tuple({lane: index for index, lane in enumerate(lanes)}.values())
        self.launched_us = [0.0] * bucket_count
        self.sent = [0] * bucket_count
        if bucket_count == 0:
            self.launched.set()

    def ends(self) -> Iterator[Event]:
        """The last event of each lane: the round is complete when these are.

        Raises:
            InternalError: a bucket was not launched.
        """
        for index in self.last:
            event = self.done[index]
            if event is None:
                raise InternalError("a bucket was not launched though its round was complete")
            yield event


class Pipeline:
    """Takes the buckets of one attachment through the loop, round by round.

    All methods but the callbacks on the loop run on the training thread.

    Args:
        loop: The event loop.
        device: Streams and events.
        communicators: The attachment's own.
        control: The attachment's control lane: deadlines, and failures of other ranks.
        name: The attachment's name, for error texts.
    """

    def __init__(
        self,
        loop: EventLoop,
        device: Device,
        communicators: Communicators,
        control: Control,
        name: str,
    ) -> None:
        self._loop = loop
        self._device = device
        self._communicators = communicators
        self._control = control
        self._name = name
        self._state: AlgorithmState | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._lanes: tuple[int, ...] = ()
        self._order = LaunchOrder(())
        self._round: Round | None = None
        self._unconfirmed: tuple[Round, float, float] | None = None
        self._next_number = 0
        self.failure: BaguaError | None = None
        self.exposed_us = 0.0
        self.busy_while_exposed_us = 0.0
        self.is_timed = False
        self.on_failure: Callable[[BaguaError], None] | None = None
        self.on_round_complete: Callable[[Round, float, float], None] | None = None

    def install(self, state: AlgorithmState, buckets: Sequence[Bucket]) -> None:
        """Take up a state and its buckets; no round may be open."""
        if self._round is not None:
            raise InternalError("buckets were changed while a round was open")
        self._state = state
        self._buckets = tuple(buckets)
        self._lanes = tuple(bucket.plan.lane for bucket in buckets)
        self._order = LaunchOrder(self._lanes)

    @property
    def busy_us(self) -> float:
        """Time that the lanes were busy so far, summed over them."""
        return sum(lane.busy_us for lane in self._communicators.lanes)

    @property
    def is_open(self) -> bool:
        """Is a round open?"""
        return self._round is not None

    def begin(self) -> None:
        """Open a round."""
        self.confirm()
        self._round = Round(self._next_number, self._lanes, is_timed=self.is_timed)
        self._next_number += 1
        self._order.begin()

    def ready(self, bucket: int, event: Event | None = None) -> None:
        """The contents of `bucket` are in place behind `event`; without, behind what the calling thread has
        queued on its compute stream."""
        round_ = self._open_round()
        if event is None or round_.is_timed:
            event = self._device.record(self._device.compute_stream(), timed=round_.is_timed)
        self._loop.submit(lambda: self._launch(round_, bucket, event))

    def _launch(self, round_: Round, bucket: int, ready: Event) -> None:
        if round_.error is not None or self.failure is not None or self._state is None:
            return
        try:
            round_.ready[bucket] = ready
            self._order.mark_ready(bucket)
            for index, lane in self._order.take():
                self._launch_one(self._state, round_, index, lane)
        except Exception as error:
            round_.error = error
            round_.launched.set()

    def _launch_one(self, state: AlgorithmState, round_: Round, index: int, lane: int) -> None:
        stream = self._communicators.lanes[lane]
        ready = round_.ready[index]
        if ready is not None and not self._device.query(ready):
            self._device.wait(stream, ready)
        round_.launched_us[index] = time.perf_counter_ns() / 1000
        before = self._communicators.bytes_sent if round_.is_timed else 0
        state.communicate(self._buckets[index], self._communicators.world, stream)
        if round_.is_timed:
            round_.sent[index] = self._communicators.bytes_sent - before
        round_.done[index] = self._device.record(stream, timed=round_.is_timed)
        self._order.mark_done(index)
        if index == len(self._buckets) - 1:
            round_.launched.set()

    def is_over(self) -> bool:
        """Has the open round ended on the device, complete or failed? Never blocks."""
        round_ = self._open_round()
        if not round_.launched.is_set():
            return False
        return round_.error is not None or all(map(self._device.query, filter(None, round_.done)))

    def has_failed(self) -> bool:
        """Has something of the open round failed?"""
        round_ = self._open_round()
        return round_.error is not None or any(done.error is not None for done in filter(None, round_.done))

    def abandon(self) -> None:
        """Leave the open round, if there is one, where it is, and abort the communicators: no failure, but a
        rank that it needs has left."""
        self._round = None
        self._give_up_memory()

    def wait(self, while_waiting: Callable[[], None] | None = None) -> None:
        """Block until the open round is complete, and close it.

        On a device whose compute stream is not the host, the compute stream waits for the communication,
        and the host only for the launches; `confirm` is for the host.

        Args:
            while_waiting: Called now and then; what it raises ends the wait, and fails the pipeline.

        Raises:
            CollectiveTimeoutError: the deadline passed; the text names buckets and parameters.
            PeerError: another rank died or failed.
        """
        round_ = self._open_round()
        began, busy_us = time.perf_counter_ns() / 1000, self.busy_us
        try:
            self._wait_for(round_, while_waiting)
        except BaseException as error:
            self.fail(interrupted(error))
            raise
        finally:
            self._round = None
        ended = time.perf_counter_ns() / 1000
        self.exposed_us += ended - began
        self.busy_while_exposed_us += self.busy_us - busy_us
        self._unconfirmed = (round_, began, ended)
        if self._device.host_is_compute:
            self.confirm()

    def confirm(self) -> None:
        """The host's part of the commit gate: block until the last round is complete on the device too.

        Raises:
            CollectiveTimeoutError: the deadline passed; the text names buckets and parameters.
            PeerError: another rank died or failed.
        """
        self.raise_failure()
        if self._unconfirmed is None:
            return
        (round_, began, ended), self._unconfirmed = self._unconfirmed, None
        patience = self._control.patience(lambda: self._where(round_))
        try:
            for done in round_.ends():
                if not self._is_good(done):
                    self._until(partial(self._is_complete, round_, done, patience), patience)
        except BaseException as error:
            self.fail(interrupted(error))
            raise
        if self.on_round_complete is not None and round_.is_timed:
            self.on_round_complete(round_, began, ended)

    def _wait_for(self, round_: Round, while_waiting: Callable[[], None] | None) -> None:
        patience = self._control.patience(lambda: self._where(round_))
        self._until(round_.launched.wait, patience, while_waiting)
        if round_.error is not None:
            raise self._described(round_, round_.error, patience) from round_.error
        compute = self._device.compute_stream()
        for done in round_.ends():
            if self._device.host_is_compute:
                is_complete = partial(self._is_complete, round_, done, patience)
                self._until(is_complete, patience, while_waiting)
            self._device.wait(compute, done)

    def _until(
        self,
        wait: Callable[[float], bool],
        patience: Patience,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        """Call `wait` with a slice of time until it says that it is over; look around in between."""
        while not wait(min(_POLL_S, patience.left_s)):
            patience.look()
            if while_waiting is not None:
                while_waiting()

    def _is_complete(self, round_: Round, event: Event, patience: Patience, slice_s: float) -> bool:
        try:
            self._device.synchronize(event, slice_s)
        except Exception as error:
            if self._device.query(event) and event.error is not None:
                raise self._described(round_, error, patience) from error
            if isinstance(error, CollectiveTimeoutError):  # of this slice of time
                return False
            raise  # a signal handler's
        return True

    def _described(self, round_: Round, error: Exception, patience: Patience) -> BaguaError:
        if not isinstance(error, BaguaError):  # raised by the algorithm's own code
            return CollectiveError(self._where(round_), got=f"{type(error).__name__}: {error}")
        kind = type(error)
        if not isinstance(error, CollectiveError):
            return kind(f"{self._where(round_)}: {error}")
        news = self._control.failures.poll()  # why the other rank went, if it could say so
        self._post(error)  # the others need not wait until this rank has asked around
        return kind(
            self._where(round_), got="; ".join(filter(None, [news, patience.who_is_there(), str(error)]))
        )

    def _where(self, round_: Round) -> str:
        buckets = () if round_.purpose else zip(self._buckets, round_.done, strict=True)
        pending = [bucket for bucket, done in buckets if done is None or not self._is_good(done)]
        texts = [f"bucket {bucket.index} ({_some(bucket.plan.names)})" for bucket in pending[:4]]
        texts += [f"{len(pending) - 4} more"] if len(pending) > 4 else []
        rank, world_size = self._communicators.world.rank, self._communicators.world.world_size
        what = round_.purpose or ", ".join(texts) or "no bucket"
        return f"rank {rank} of {world_size} waited in round {round_.number} of {self._name} for {what}"

    def _is_good(self, event: Event) -> bool:
        return self._device.query(event) and event.error is None

    def call(
        self,
        purpose: str,
        queue: Callable[[Stream], object],
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        """Let the loop call `queue` with lane 0, and wait until what it queued there is complete.

        Args:
            purpose: What is communicated, for error texts.
            queue: Queues collectives on the stream that it is given.
            while_waiting: Called now and then; what it raises ends the wait, and fails the pipeline.

        Raises:
            CollectiveTimeoutError: the deadline passed.
            PeerError: another rank died or failed.

        **Stream:** on the lane, behind what the calling thread has queued on its compute stream.
        """
        self.raise_failure()
        round_ = Round(self._next_number, (0,), purpose)
        lane = self._communicators.lanes[0]
        ready = self._device.record(self._device.compute_stream())

        def launch() -> None:
            try:
                if not self._device.query(ready):
                    self._device.wait(lane, ready)
                queue(lane)
                round_.done[0] = self._device.record(lane)
            except Exception as error:
                round_.error = error
            round_.launched.set()

        self._loop.submit(launch)
        try:
            self._wait_for(round_, while_waiting)
        except BaseException as error:
            self.fail(interrupted(error))
            raise

    def synchronize(self) -> None:
        """Block the host until the compute stream is through: a slower rank may still need what it waits for.

        Raises:
            CollectiveTimeoutError: the deadline passed.
        """
        self._device.synchronize(self._device.record(self._device.compute_stream()))

    def fail(self, error: BaguaError) -> None:
        """Give the attachment up: tell the other ranks, abort, and quarantine the buckets. Idempotent."""
        if self.failure is not None:
            return
        self.failure = error
        self._post(error)
        if self.on_failure is not None:
            self.on_failure(error)
        self._give_up_memory()
        if self._state is not None:
            self._state.rollback()

    def _give_up_memory(self) -> None:
        for communicator in self._communicators.each():
            communicator.abort()
        _quarantine.append((self._buckets, self._state))

    def _post(self, error: BaseException) -> None:
        text = f"rank {self._communicators.world.rank}: {type(error).__name__}: {error}"
        self._control.failures.post(text)

    def raise_failure(self) -> None:
        """Raise the error that ended this attachment, if one did."""
        if self.failure is not None:
            raise self.failure

    def _open_round(self) -> Round:
        self.raise_failure()
        if self._round is None:
            raise InternalError("no round is open")
        return self._round


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
