"""The CUDA backend: collectives by NCCL on streams of the device.

One communicator serves all its lanes. Each operation is issued at once by the thread that calls it, on the
lane's stream, and an event recorded behind it.

[Note: who is inside NCCL]
    NCCL wants one issuing thread per device, whatever the communicator. So a thread that issues holds the
    device's `CudaDevice.issue_lock` until the operation is enqueued and its event recorded; the record must
    not come earlier ([Note: NCCL in progress] in _nccl_comm.py). While it waits for NCCL to get ready it
    is inside no call, and `abort` needs only the communicator's own lock, which is held during calls alone:
    an abort never meets a thread inside NCCL, and never waits for the issue lock, whose holder may be
    waiting for the very peer that is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from bagua_rt.backend import Backend, Event, PreparedCall, ReduceOp, Store, Stream, Work
from bagua_rt.backends import _arguments as arguments
from bagua_rt.backends import _nccl_functions as c
from bagua_rt.backends._collectives import Copies, Pairs
from bagua_rt.backends._communicator import CheckedCommunicator
from bagua_rt.backends._cuda_calls import AllReduceCall, CudaPreparedCall
from bagua_rt.backends._cuda_torch import CudaTorch, TorchSide
from bagua_rt.backends._nccl import Nccl, NcclStatusError
from bagua_rt.backends._nccl_comm import NcclComm
from bagua_rt.backends._nccl_meeting import end, finalize, meet
from bagua_rt.backends._nvrtc import KernelCache, target_for
from bagua_rt.backends._work import BaseWork, LaunchedWork, fresh
from bagua_rt.backends.cuda_device import CudaDevice, cuda_event
from bagua_rt.backends.cuda_kernels import CudaKernels
from bagua_rt.backends.cuda_stream import CudaEvent, CudaStream
from bagua_rt.config import RuntimeConfig
from bagua_rt.errors import BaguaError, ClosedError, InternalError, LibraryError, PeerError

_BYTES = c.DATATYPES["uint8"]
# The ncclDataType_t as which NCCL reduces a dtype, and how many of them an element is.
_NUMBERS = {dtype: (c.datatype(str(dtype)), 1) for dtype in arguments.REDUCIBLE["max"]} | {
    torch.complex64: (c.DATATYPES["float32"], 2),
    torch.complex128: (c.DATATYPES["float64"], 2),
}
_REMEMBERED = 1024  # all_reduce_ calls that a communicator remembers


def open_cuda(
    index: int, *, timeout_s: float, config: RuntimeConfig, torch_side: TorchSide | None = None
) -> Backend:
    """Open the CUDA backend on one device.

    NCCL is looked for when a communicator of several ranks is made, and NVRTC when a kernel is first used.

    Args:
        index: The device.
        timeout_s: The deadline of every host wait that names none.
        config: The settings from the environment.
        torch_side: How torch is met; None is torch on this device.

    Raises:
        BackendUnavailableError: torch or cuda.core can't use the device.
        CudaError: the driver refuses.
    """
    device = CudaDevice(index, torch_side or CudaTorch(index), timeout_s)
    capability = device.raw.compute_capability
    cache = KernelCache(target_for((capability.major, capability.minor)), config.cache_dir)
    library: list[Nccl] = []

    def nccl() -> Nccl:
        if not library:
            library.append(Nccl(config.nccl_path))
        return library[0]

    def connect(
        store: Store | None,
        rank: int,
        world_size: int,
        name: str,
        lanes: Sequence[Stream],
        *,
        timeout_s: float,
    ) -> CudaCommunicator:
        """Make a communicator; see `bagua_rt.backend.Connect`."""
        return CudaCommunicator(
            device, nccl, connect, store, rank, world_size, name, lanes, timeout_s=timeout_s
        )

    kernels = CudaKernels(device, cache)
    return Backend(name="cuda", device=device, kernels=kernels, connect=connect, close=device.close)


class CudaCommunicator(CheckedCommunicator):
    """A group of ranks over NCCL. Its primitives are called by the thread that launches, and block for no
    peer that has connected."""

    backend_name = "cuda"
    reducible = arguments.REDUCIBLE
    stays = "NCCL's threads and memory stay"

    def __init__(
        self,
        device: CudaDevice,
        nccl: Callable[[], Nccl],
        connect: Callable[..., CudaCommunicator],
        store: Store | None,
        rank: int,
        world_size: int,
        name: str,
        lanes: Sequence[Stream],
        *,
        timeout_s: float,
    ) -> None:
        """Connect to the other ranks.

        Raises:
            UsageError: the arguments can't be right.
            BackendUnavailableError: no NCCL was found.
            CollectiveTimeoutError: a rank did not come within `timeout_s`.
            NcclError: NCCL could not connect.
        """
        own_lanes = [device.stream(lane) for lane in lanes]
        arguments.require_place(name, own_lanes, rank, world_size)
        self.device = device
        self._is_grouping = False
        self._reductions: dict[tuple[torch.dtype, ReduceOp], tuple[int, int, int]] = {}
        self.me = weakref.ref(self)
        self.latest: dict[CudaStream, CudaEvent] = {}
        self._index = -1 if device.torch_device.index is None else device.torch_device.index
        self._remembered: dict[tuple[object, ...], AllReduceCall] = {}
        self._nccl: NcclComm | None = None
        device.require_open()
        device.enter()
        if world_size > 1:
            self._nccl = meet(nccl(), store, rank, world_size, name, timeout_s)
        self._token = torch.empty(1, dtype=torch.uint8, device=device.torch_device)
        super().__init__(
            connect,
            store,
            rank,
            world_size,
            name,
            own_lanes,
            timeout_s=timeout_s,
            torch_device=device.torch_device,
        )

    # ---- launching and waiting

    def _enter(self, stream: Stream | None) -> Stream:
        lane: Any = super()._enter(stream)
        if stream is None:
            self.device.follow_compute(lane)
        return lane  # type: ignore[no-any-return]

    def _queue(self, lane: Stream, work: LaunchedWork) -> Event:
        own: Any = lane
        with self.device.issue_lock:  # [Note: who is inside NCCL]
            others = self.require_clear(own)
            try:
                work.primitive(own, *work.args)
            except LibraryError as error:
                raise self.given_up(error) from error
            return self._record(own, others, work.args, work.operation, work.sequence)

    def _queue_group(self, lane: Stream, works: Sequence[LaunchedWork]) -> Event:
        own: Any = lane
        names = "+".join(work.operation for work in works[:4]) + ("…" if len(works) > 4 else "")
        with self.device.issue_lock:
            others = self.require_clear(own)
            try:
                self._issue_group(own, works)
            except LibraryError as error:
                raise self.given_up(error) from error
            holds = [work.args for work in works]
            return self._record(own, others, holds, f"group({names})", works[0].sequence)

    def given_up(self, error: LibraryError) -> BaguaError:
        """Give the communicator up, for the other ranks count on the operation that a library refused."""
        failure = self._translated(error) if isinstance(error, NcclStatusError) else fresh(error)
        if not isinstance(failure, BaguaError):
            raise InternalError("a library's error has lost its type") from error
        failure.__cause__ = error
        self.fail(failure)
        return failure

    def _issue_group(self, lane: CudaStream, works: Sequence[LaunchedWork]) -> None:
        if self._nccl is None:
            for work in works:
                work.primitive(lane, *work.args)
            return
        self._is_grouping = True
        try:
            with self._nccl.prepare() as calls:
                for work in works:
                    work.primitive(lane, *work.args)
        finally:
            self._is_grouping = False
        self._launched(calls())

    def require_clear(self, lane: CudaStream) -> tuple[CudaEvent, ...]:
        """Refuse a launch behind another communicator's failure: it would be stuck, the ranks out of step.

        Returns:
            The other communicators' operations that a launch on `lane` is behind.
        """
        if self.refusal is not None:  # it came while this thread waited for its turn
            self.refuse()
        self.device.require_open(lane)
        others = lane.before_others(self)
        for event in others:
            if event.failure is not None:
                raise PeerError(
                    f"lane {lane.name!r} of communicator {self.name!r} is behind a failed operation",
                    got=str(event.failure),
                    fix="abort() or close() the communicator that failed",
                ) from event.failure
        return others

    def _record(
        self, lane: CudaStream, others: tuple[CudaEvent, ...], holds: object, operation: str, sequence: int
    ) -> CudaEvent:
        event = CudaEvent()
        event.behind = others
        event.owner = self
        event.operation = operation
        event.holds = holds
        event.queue_on(lane, sequence)
        lane.passed(event, self)
        if self.refusal is not None:  # it failed between the launch and here: nobody has marked this one
            event.failure = self.refusal
        return event

    def _launched(self, is_launched: bool) -> None:
        if not is_launched and not self._is_grouping:
            self.wait_launched()

    def wait_launched(self) -> None:
        """Wait for NCCL where a call is in progress; an event may be recorded only behind it."""
        if self._nccl is None:
            return
        try:
            self._nccl.wait_ready(self.timeout_s)
        except ClosedError:
            self.refuse()  # aborted meanwhile

    def poll(self) -> None:
        """Ask NCCL whether an operation has failed, and take note if so. Blocks for no peer."""
        if self._nccl is None or self.refusal is not None:
            return
        try:
            self._nccl.poll()
        except NcclStatusError as error:
            failure = self._translated(error)
            failure.__cause__ = error
            self.fail(failure)
        except ClosedError:
            return  # aborted or closed by another thread, which says so in `refusal`

    def _translated(self, error: NcclStatusError) -> PeerError:
        pending = [event for lane in self.lanes for event in self._pending(lane)]
        name, sequence = "an operation", self.sequence
        if pending:
            name, sequence = pending[0].operation, pending[0].sequence
        return PeerError(
            f"{name} #{sequence} of communicator {self.name!r} failed on rank {self.rank} "
            f"of {self.world_size}",
            got=str(error),
            fix="a peer died, gave up, or launched another operation: see its output; "
            "then abort() this communicator, and shrink() it or connect anew",
        )

    def _pending(self, lane: Stream) -> list[CudaEvent]:
        return [event for event in self.device.stream(lane).pending() if event.owner is self]

    def fail(self, error: BaguaError) -> None:
        """Refuse calls from now on, and mark the operations under way as failed."""
        super().fail(error)
        self._mark(error)

    def _mark(self, error: BaguaError) -> None:
        for lane in self.lanes:
            for event in self._pending(lane):
                if event.failure is None:
                    event.failure = error

    def await_event(self, event: Event, timeout_s: float) -> bool:
        point = cuda_event(event)
        return self.device.await_either(point, point.is_over, timeout_s)

    def is_done(self, event: Event) -> bool:
        return cuda_event(event).is_over()

    def error_of(self, event: Event) -> BaseException | None:
        return cuda_event(event).failure

    def hold(self, stream: Stream, event: Event) -> None:
        self.device.wait(stream, event)

    def ahead_of(self, work: BaseWork) -> str:
        pending = cuda_event(work.event).stream.pending()
        return next((str(event) for event in pending if event.owner is not None), "")

    # ---- all_reduce_ of what was reduced before: _cuda_calls.py

    def all_reduce_(self, t: torch.Tensor, op: ReduceOp = "avg", *, stream: Stream | None = None) -> Work:
        """Reduce `t` over the ranks, in place; see `Collectives.all_reduce_`.

        What a remembered call says of every tensor with its key: it is dense, real, and reducible by `op`.
        """
        try:
            call = self._remembered[t.data_ptr(), t.numel(), t.dtype, op, stream]
        except (KeyError, TypeError, AttributeError, RuntimeError):  # new, or no arguments at all
            call = None
        if call is None:
            return self._remember(t, op, stream)
        if t.get_device() != self._index or not t.is_contiguous() or t.is_neg():
            return super().all_reduce_(t, op, stream=stream)
        if self.open_groups or self.is_comparing:  # there is more to do than to launch it
            return super().all_reduce_(t, op, stream=stream)
        if stream is None:
            self.device.follow_compute(call.lane)
        return call.launch(t)

    def _remember(self, t: torch.Tensor, op: ReduceOp, stream: Stream | None) -> Work:
        """Check and launch it by the general way, and remember it for the next time."""
        work = super().all_reduce_(t, op, stream=stream)
        if self._nccl is not None and t.numel() and not t.is_complex():
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            call = self._all_reduce_call(self._nccl, t, op, self._enter(stream))
            self._remembered[t.data_ptr(), t.numel(), t.dtype, op, stream] = call
        return work

    def prepare_all_reduce_(
        self, t: torch.Tensor, op: ReduceOp = "avg", *, stream: Stream | None = None
    ) -> PreparedCall:
        """Check the arguments of an all_reduce_ that is to be launched again and again; see `Collectives`."""
        prepared = super().prepare_all_reduce_(t, op, stream=stream)
        if self._nccl is None or not t.numel():
            return prepared
        call = self._all_reduce_call(self._nccl, t, op, self._enter(stream))
        return CudaPreparedCall(call, t, prepared)

    def _all_reduce_call(self, nccl: NcclComm, t: torch.Tensor, op: ReduceOp, lane: Any) -> AllReduceCall:
        address = t.data_ptr()
        with self.device.issue_lock:
            datatype, each, operator = self._reduction(t.dtype, op)
            with nccl.prepare() as calls:
                nccl.all_reduce(address, address, t.numel() * each, datatype, operator, lane.handle)
        return AllReduceCall(self, lane, calls, self._share(t, 2))

    # ---- primitives; `via` is the lane

    def _all_reduce(self, via: CudaStream, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        nccl, count = self._nccl, inp.numel()
        if nccl is None or not count:
            self._copy(via, out, inp)
            return
        datatype, each, operator = self._reduction(inp.dtype, op)
        source, target = inp.data_ptr(), out.data_ptr()
        self._launched(nccl.all_reduce(source, target, count * each, datatype, operator, via.handle))

    def _reduce(self, via: CudaStream, t: torch.Tensor, root: int, op: ReduceOp) -> None:
        nccl, count, pointer = self._nccl, t.numel(), t.data_ptr()
        if nccl is None or not count:
            return
        datatype, each, operator = self._reduction(t.dtype, op)
        self._launched(nccl.reduce(pointer, pointer, count * each, datatype, operator, root, via.handle))

    def _broadcast(self, via: CudaStream, t: torch.Tensor, root: int) -> None:
        if self._nccl is None or not t.numel():
            return
        pointer = t.data_ptr()
        self._launched(self._nccl.broadcast(pointer, pointer, t.nbytes, _BYTES, root, via.handle))

    def _all_gather(self, via: CudaStream, out: torch.Tensor, inp: torch.Tensor) -> None:
        if self._nccl is None or not inp.numel():
            self._copy(via, out, inp)
            return
        self._launched(self._nccl.all_gather(inp.data_ptr(), out.data_ptr(), inp.nbytes, _BYTES, via.handle))

    def _reduce_scatter(self, via: CudaStream, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        nccl, count = self._nccl, out.numel()
        if nccl is None or not count:
            self._copy(via, out, inp)
            return
        datatype, each, operator = self._reduction(out.dtype, op)
        source, target = inp.data_ptr(), out.data_ptr()
        self._launched(nccl.reduce_scatter(source, target, count * each, datatype, operator, via.handle))

    def _all_to_all(self, via: CudaStream, out: torch.Tensor, inp: torch.Tensor) -> None:
        if self._nccl is None or not inp.numel():
            self._copy(via, out, inp)
            return
        part_bytes = inp.nbytes // self.world_size
        self._launched(self._nccl.all_to_all(inp.data_ptr(), out.data_ptr(), part_bytes, _BYTES, via.handle))

    def _exchange(self, via: CudaStream, sends: Pairs, receives: Pairs, copies: Copies) -> None:
        for destination, source in copies:
            self._copy(via, destination, source)
        if self._nccl is None:
            return
        with self._nccl.prepare() as calls:
            for peer, t in receives:
                if t.numel():
                    self._nccl.recv(t.data_ptr(), t.nbytes, _BYTES, peer, via.handle)
            for peer, t in sends:
                if t.numel():
                    self._nccl.send(t.data_ptr(), t.nbytes, _BYTES, peer, via.handle)
        self._launched(calls())

    def _barrier(self, via: CudaStream) -> None:
        if self._nccl is not None:
            pointer = self._token.data_ptr()
            self._launched(self._nccl.all_reduce(pointer, pointer, 1, _BYTES, c.OPS["max"], via.handle))

    def _copy(self, via: CudaStream, destination: torch.Tensor, source: torch.Tensor) -> None:
        if destination.data_ptr() != source.data_ptr() and source.numel():
            self.device.copy(destination.data_ptr(), source.data_ptr(), source.nbytes, via)

    def _reduction(self, dtype: torch.dtype, op: ReduceOp) -> tuple[int, int, int]:
        """The ncclDataType_t as which NCCL reduces `dtype`, how many of them an element is, and NCCL's `op`.

        An average is scaled by 1/n, and then summed.
        """
        known = self._reductions.get((dtype, op))
        if known is None:
            datatype, each = _NUMBERS[dtype]
            operator = c.OPS[op]
            if op == "avg" and self._nccl is not None:
                operator = self._nccl.create_pre_mul_sum(1.0 / self.world_size, datatype)
            known = self._reductions[dtype, op] = datatype, each, operator
        return known

    # ---- memory and end

    def register(self, t: torch.Tensor) -> AbstractContextManager[None]:
        """Tell NCCL that `t` will be sent often, while the context lasts, so that it copies less.

        The memory is `t`'s own part of its allocation. Wait for what uses it before the context ends.

        Raises:
            UsageError: `t` can't be sent.
            NcclStatusError: NCCL refuses the memory.
        """
        plain = super().register(t)
        return plain if self._nccl is None or not t.numel() else self._registered(self._nccl, t)

    @contextmanager
    def _registered(self, nccl: NcclComm, t: torch.Tensor) -> Iterator[None]:
        with self.device.issue_lock:
            self.device.enter()
            handle = nccl.register(t.data_ptr(), t.nbytes)
        try:
            yield
        finally:
            with self.device.issue_lock:
                if nccl.handle:  # an aborted communicator has no registrations left
                    nccl.deregister(handle)

    def _abort(self, error: BaguaError) -> None:  # `fail` has marked what is under way
        if self._nccl is not None:
            end(self._nccl, self.name)

    def _close(self) -> None:
        nccl, self._nccl = self._nccl, None
        self._remembered.clear()
        if nccl is None:
            return
        pending = any(self._pending(lane) for lane in self.lanes)
        self._mark(self.refusal or InternalError("close left no refusal"))
        if pending or not nccl.handle:
            end(nccl, self.name)
            return
        finalize(nccl, self.name)
