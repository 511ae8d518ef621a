"""A CUDA device: streams and events, on cuda.core: the driver's API and nothing else.

No call here waits for the device, except `CudaDevice.synchronize`, which asks an event until its deadline:
the driver's own waits have none. cuda.core's ``Device.sync()`` and everything of cudart are not used.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

from bagua_rt import backend
from bagua_rt.backends._cuda_torch import TorchSide
from bagua_rt.backends._nvrtc import _cuda as import_cuda
from bagua_rt.backends._work import fresh
from bagua_rt.backends.cuda_stream import CudaEvent, CudaStream, SpareEvents, TimedEvent, cuda_error
from bagua_rt.errors import ClosedError, CollectiveTimeoutError, CudaError, UsageError

# A float32 of milliseconds, which is what the driver gives, has 4 us left at this distance from its base.
_BASE_IS_OLD_MS = 60_000.0
_CLOCK_TRIES = 5
_PAUSE_S = 1e-3
_ASK_NCCL_EVERY_S = 2e-3
_HIGH_PRIORITY = -1
# Events whose stream was closed while work was under way: the device may still write to what they hold.
_quarantine: list[CudaEvent] = []


class _Entered(threading.local):
    """Has the thread made the device's context its own? And a driver's event, once it needs one."""

    once = False
    event: Any = None


class CudaDevice:
    """A CUDA device as `bagua_rt.backend.Device` describes it.

    Attributes:
        raw: cuda.core's device.
        issue_lock: Held while NCCL is called to launch on this device, up to the record behind it.
        entered: Whether the calling thread has entered the device's context.
    """

    type: Literal["cuda"] = "cuda"
    host_is_compute = False

    def __init__(self, index: int, torch_side: TorchSide, timeout_s: float) -> None:
        """Take up the device's primary context, the one that torch works in.

        Raises:
            BackendUnavailableError: cuda.core is not installed.
            CudaError: the driver refuses.
        """
        core = import_cuda("core")
        self.timeout_s, self.torch_side = timeout_s, torch_side
        self.torch_device = torch_side.torch_device
        self.issue_lock = _issue_locks.setdefault(index, threading.RLock())
        self._core, self._driver = core, import_cuda("bindings.driver")
        self.raw = core.Device(index)
        self.enter()
        kinds = core.EventOptions
        name = "timing_enabled" if hasattr(kinds(), "timing_enabled") else "enable_timing"  # before 1.0
        self._event_options = [kinds(**{name: timed}) for timed in (False, True)]
        self._spare_events = SpareEvents(self.new_event)
        self._compute: dict[int, CudaStream] = {}
        self._streams: set[CudaStream] = set()
        self.entered = _Entered()
        self._refusal: ClosedError | None = None
        self._base: tuple[CudaEvent, float] | None = None
        _live_devices.add(self)

    # ---- streams

    def compute_stream(self) -> CudaStream:
        """The calling thread's current torch stream.

        Raises:
            UsageError: it is being captured into a CUDA graph.
        """
        if self.torch_side.is_capturing():
            raise _captured()
        handle = self.torch_side.current_stream()
        stream = self._compute.get(handle)
        if stream is None:
            stream = CudaStream("compute", self._wrapped(handle), self._spare_events, is_ours=False)
            stream.handle = handle  # of the default stream, cuda.core has another one
            self._compute[handle] = stream
        return stream

    def _wrapped(self, handle: int) -> Any:
        self.enter()
        # Torch's 0 is the legacy stream, whatever cuda.core is told to take for the default one.
        return self._core.Stream.from_handle(handle) if handle else self._core.LEGACY_DEFAULT_STREAM

    def new_stream(self, name: str, *, high_priority: bool = True) -> CudaStream:
        """A new stream that doesn't synchronise with the legacy one; release it with `close_stream`."""
        self.require_open()
        self.enter()
        options = self._core.StreamOptions(nonblocking=True, priority=_HIGH_PRIORITY if high_priority else 0)
        try:
            raw = self.raw.create_stream(options=options)
        except Exception as error:
            raise cuda_error("cuStreamCreateWithPriority", error) from error
        stream = CudaStream(name, raw, self._spare_events, is_ours=True)
        self._streams.add(stream)
        return stream

    def close_stream(self, stream: backend.Stream) -> None:
        """Release a stream. Idempotent."""
        own = self.stream(stream)
        if own.is_closed or not own.is_ours or self._refusal is not None:
            return
        own.is_closed = True
        own.solo = None
        self._streams.discard(own)
        _quarantine[:] = [event for event in (*_quarantine, *own.pending()) if not event.has_landed()]
        own.raw.close()

    def stream(self, stream: backend.Stream) -> CudaStream:
        """The CUDA stream behind the protocol.

        Raises:
            UsageError: it is not a stream of a CUDA device.
        """
        if not isinstance(stream, CudaStream):
            raise UsageError(
                "this is not a stream of the CUDA device",
                expected="compute_stream() or a stream made by new_stream()",
                got=repr(stream),
            )
        return stream

    # ---- events

    def record(self, stream: backend.Stream, *, timed: bool = False) -> CudaEvent:
        """An event that completes when all work queued on `stream` so far has."""
        return self.record_holding(self.stream(stream), None, timed=timed)

    def record_holding(self, stream: CudaStream, holds: object, *, timed: bool = False) -> CudaEvent:
        """Record an event that keeps `holds` alive until it completes ([Note: alive until its event])."""
        if stream.is_closed or self._refusal is not None or not self.entered.once:
            self.require_open(stream)
        event = TimedEvent() if timed else CudaEvent()  # [Note: made without __init__]
        event.behind = stream.before()
        event.owner = None
        event.operation = ""
        event.holds = holds
        if timed:
            event.raw = self.new_event(timed=True)
        event.queue_on(stream)
        return event

    def new_event(self, *, timed: bool = False) -> Any:
        self.enter()
        return self.raw.create_event(options=self._event_options[timed])

    def wait(self, stream: backend.Stream, event: backend.Event) -> None:
        """Hold back what is queued on `stream` from now on until `event` completes.

        Raises:
            CollectiveError: an operation before `event` is known to have failed.
        """
        target, point = self.stream(stream), cuda_event(event)
        self.require_open(target)
        if point.error is not None:
            raise fresh(point.error) from point.error
        waits = point.stream.events.waits
        waits.append(None)  # [Note: the driver's events are used again]
        try:
            if (raw := point.raw) is not None:
                target.raw.wait(raw)
        except Exception as error:
            raise cuda_error("cuStreamWaitEvent", error) from error
        finally:
            waits.pop()
        target.behind(point.roots())

    def follow_compute(self, lane: CudaStream) -> None:
        """Hold `lane` back until what the calling thread has queued on its compute stream is complete.

        Does what ``wait(lane, record(compute_stream()))`` does. Hot: part of a collective without a stream.
        """
        entered = self.entered
        raw = entered.event
        if raw is None or lane.is_closed or self._refusal is not None:
            self.require_open(lane)
            raw = entered.event = self.new_event()
        side = self.torch_side
        if side.is_capturing():
            raise _captured()
        compute = self._compute.get(side.current_stream()) or self.compute_stream()
        try:
            compute.raw.record(raw)
            lane.raw.wait(raw)  # takes the record of now: the event may be recorded anew at once
        except Exception as error:
            raise cuda_error("cuStreamWaitEvent", error) from error
        if roots := compute.before():
            lane.behind(roots)

    def query(self, event: backend.Event) -> bool:
        """Has `event` completed (with or without an error)?"""
        return cuda_event(event).is_known()

    def synchronize(self, event: backend.Event, timeout_s: float | None = None) -> None:
        """Block the host until `event` completes; asks it, and NCCL, again and again until the deadline."""
        point, limit = cuda_event(event), self.timeout_s if timeout_s is None else timeout_s
        self.require_open()
        if not self.await_either(point, point.is_known, limit):
            busy = "; ".join(f"{point.stream.name}: {root}" for root in point.roots() if root.matters())
            raise CollectiveTimeoutError(
                f"an event did not complete within {limit:g} s",
                got=f"these operations under way: {busy or 'none'}",
                fix="see whether every rank launches the same operations in the same order",
            )
        if point.error is not None:
            raise fresh(point.error) from point.error

    def await_either(self, event: CudaEvent, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Block the host until `is_done`, an answer of `event`, or the deadline; whether it was the former.

        Asks NCCL, meanwhile, how the operations before `event` are.
        """
        if is_done():
            return True
        now = time.monotonic()
        deadline, ask_nccl_at, pause_s = now + timeout_s, now + _ASK_NCCL_EVERY_S, 0.0
        owners = {root.owner for root in event.roots()}
        while not is_done():
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= ask_nccl_at:
                for owner in owners:
                    if owner is not None:
                        owner.poll()
                ask_nccl_at = now + _ASK_NCCL_EVERY_S
            time.sleep(pause_s)  # the first one only gives the processor up
            pause_s = min(_PAUSE_S, 2 * pause_s + 1e-5)
        return True

    # ---- torch, time, end

    def run(self, stream: backend.Stream, fn: Callable[[], object]) -> None:
        """Call `fn` now, its torch operations queued on `stream`, and keep it alive until they have run."""
        own = self.stream(stream)
        self.require_open(own)
        if any(event.failure is not None for event in own.before()):
            return  # what it would read is undefined, and every event behind carries the error
        self.torch_side.run(own.handle, fn)
        self.record_holding(own, fn)

    def copy(self, destination: int, source: int, size_bytes: int, stream: CudaStream) -> None:
        """Queue a copy between two addresses; the caller keeps the memory alive."""
        (status,) = self._driver.cuMemcpyAsync(destination, source, size_bytes, stream.handle)
        if int(status):
            raise CudaError(f"cuMemcpyAsync failed: {status}")

    def time_us(self, event: backend.Event) -> float:
        """When a completed event, recorded with ``timed=True``, completed: host clock, microseconds."""
        point = cuda_event(event)
        if not point.has_landed():
            raise UsageError("this event has not completed: it has no time yet", fix="synchronize it first")
        base, base_us = self._base or self._new_base()
        try:
            distance_ms = float(point.raw - base.raw)
        except Exception as error:
            raise cuda_error("cuEventElapsedTime", error) from error
        if distance_ms > _BASE_IS_OLD_MS:
            self._new_base()
        return base_us + distance_ms * 1e3

    def _new_base(self) -> tuple[CudaEvent, float]:
        """Record a timed event on an idle stream of its own and see on the host clock when it completes.

        The host may be held up in between: of some tries, the one that took least is taken.
        """
        stream = self.new_stream("clock")
        tries = []
        for _ in range(_CLOCK_TRIES):
            begin_us = time.perf_counter_ns() / 1000
            event = self.record(stream, timed=True)
            while not event.has_landed():
                time.sleep(0)
            end_us = time.perf_counter_ns() / 1000
            tries.append((end_us - begin_us, (begin_us + end_us) / 2, event))
        _, at_us, event = min(tries, key=lambda each: each[0])
        self._base = event, at_us
        self.close_stream(stream)
        return self._base

    def enter(self) -> None:
        """Make the device's context the calling thread's."""
        try:
            self.raw.set_current()
        except Exception as error:
            raise cuda_error("cuCtxSetCurrent", error) from error

    def require_open(self, stream: CudaStream | None = None) -> None:
        """Refuse in the child of a fork, and on a stream that was closed; let a new thread enter.

        Raises:
            ClosedError: it is so.
        """
        if self._refusal is not None:
            raise fresh(self._refusal) from self._refusal
        if stream is not None and stream.is_closed:
            raise ClosedError(f"the stream {stream.name!r} was closed")
        if not self.entered.once:  # a thread begins without a context
            self.enter()
            self.entered.once = True

    def disown(self) -> None:
        """Refuse everything: this is the child of a fork, where CUDA does not work."""
        self._refusal = ClosedError(
            "the CUDA device belongs to the process that forked this one",
            fix="open a backend in a process that was started with the spawn method",
        )

    def close(self) -> None:
        """Close every stream. Idempotent."""
        for stream in list(self._streams):
            self.close_stream(stream)


def cuda_event(event: backend.Event) -> CudaEvent:
    """The CUDA event behind the protocol.

    Raises:
        UsageError: it is not an event of a CUDA device.
    """
    if not isinstance(event, CudaEvent):
        raise UsageError("this is not an event of the CUDA device", got=repr(event))
    return event


def _captured() -> UsageError:
    """The host takes part in each operation: it asks events, notes errors and keeps memory for one launch."""
    return UsageError(
        "the compute stream is being captured into a CUDA graph, and communication can't be part of one",
        expected="collectives, and backwards of an attached model, outside of torch.cuda.graph()",
        got="a call between the begin and the end of a capture",
        fix="capture the parts of the model that communicate nothing: torch.cuda.make_graphed_callables()",
    )


# NCCL calls on one device come from one thread at a time, whatever backends are open in this process.
_issue_locks: dict[int, threading.RLock] = {}
_live_devices: weakref.WeakSet[CudaDevice] = weakref.WeakSet()


def _disown_devices() -> None:
    for device in list(_live_devices):
        device.disown()


os.register_at_fork(after_in_child=_disown_devices)
