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

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from bagua_rt.backend import Backend, Event, ReduceOp, Store, Stream
from bagua_rt.backends import _arguments as arguments
from bagua_rt.backends import _nccl_functions as c
from bagua_rt.backends._collectives import Copies, Pairs
from bagua_rt.backends._communicator import CheckedCommunicator
from bagua_rt.backends._cuda_torch import CudaTorch, TorchSide
from bagua_rt.backends._nccl import Nccl, NcclStatusError
from bagua_rt.backends._nccl_comm import NcclComm
from bagua_rt.backends._nvrtc import KernelCache, target_for
from bagua_rt.backends._work import LaunchedWork, fresh
from bagua_rt.backends.cuda_device import CudaDevice, CudaEvent, CudaStream, cuda_event
from bagua_rt.backends.cuda_kernels import CudaKernels
from bagua_rt.config import RuntimeConfig
from bagua_rt.errors import (
    BaguaError,
    ClosedError,
    CollectiveTimeoutError,
    InternalError,
    LibraryError,
    PeerError,
    UsageError,
)

_log = logging.getLogger(__name__)
_BYTES = c.DATATYPES["uint8"]
# The ncclDataType_t as which NCCL reduces a dtype, and how many of them an element is.
_NUMBERS = {dtype: (c.datatype(str(dtype)), 1) for dtype in arguments.REDUCIBLE["max"]} | {
    torch.complex64: (c.DATATYPES["float32"], 2),
    torch.complex128: (c.DATATYPES["float64"], 2),
}
_CLOSE_S = 10.0
_ABORT_S = 5.0
# Communicators that could not be aborted: a thread is inside a call on them for good.
_leaked: list[NcclComm] = []


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
        if not own_lanes or len(set(own_lanes)) != len(own_lanes):
            raise UsageError("a communicator needs lanes, each of them once", got=f"{len(own_lanes)} lanes")
        if not 0 <= rank < world_size:
            raise UsageError(
                f"communicator {name!r}: rank {rank} is not usable", expected=f"0 to {world_size - 1}"
            )
        self._cuda = device
        self._is_grouping = False
        self._means: dict[int, int] = {}  # PreMulSum operators by ncclDataType_t
        self._nccl: NcclComm | None = None
        device.require_open()
        device.enter()
        if world_size > 1:
            self._nccl = _meet(nccl(), store, rank, world_size, name, timeout_s)
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

    def __del__(self) -> None:
        if not getattr(self, "is_settled", True) and not self.is_forked and self.world_size > 1:
            warnings.warn(
                f"communicator {self.name!r} was never closed: NCCL's threads and memory stay",
                ResourceWarning,
                stacklevel=2,
            )

    # ---- launching and waiting

    def _queue(self, lane: Stream, work: LaunchedWork) -> Event:
        own = self._cuda.stream(lane)
        with self._cuda.issue_lock:  # [Note: who is inside NCCL]
            self._require_clear(own)
            try:
                work.primitive(own, *work.args)
            except LibraryError as error:
                raise self._given_up(error) from error
            return self._record(own, work.args, work.operation, work.sequence)

    def _queue_group(self, lane: Stream, works: Sequence[LaunchedWork]) -> Event:
        own = self._cuda.stream(lane)
        names = "+".join(work.operation for work in works[:4]) + ("…" if len(works) > 4 else "")
        with self._cuda.issue_lock:
            self._require_clear(own)
            try:
                self._issue_group(own, works)
            except LibraryError as error:
                raise self._given_up(error) from error
            holds = [work.args for work in works]
            return self._record(own, holds, f"group({names})", works[0].sequence)

    def _given_up(self, error: LibraryError) -> BaguaError:
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

    def _require_clear(self, lane: CudaStream) -> None:
        """Refuse a launch behind another communicator's failure: it would be stuck, the ranks out of step."""
        if self.refusal is not None:  # it came while this thread waited for its turn
            self.refuse()
        self._cuda.require_open(lane)
        self._cuda.enter()
        for event in lane.before():
            if event.failure is not None:
                raise PeerError(
                    f"lane {lane.name!r} of communicator {self.name!r} is behind a failed operation",
                    got=str(event.failure),
                    fix="abort() or close() the communicator that failed",
                ) from event.failure

    def _record(self, lane: CudaStream, holds: object, operation: str, sequence: int) -> CudaEvent:
        event = self._cuda.record_holding(lane, holds, owner=self, operation=(operation, sequence))
        lane.passed(event)
        if self.refusal is not None:  # it failed between the launch and here: nobody has marked this one
            event.failure = self.refusal
        return event

    def _launched(self, is_launched: bool) -> None:
        """Wait for NCCL where a call is in progress; an event may be recorded only behind it."""
        if is_launched or self._is_grouping or self._nccl is None:
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
        name, sequence = pending[0].operation if pending else ("an operation", self._sequence)
        return PeerError(
            f"{name} #{sequence} of communicator {self.name!r} failed on rank {self.rank} "
            f"of {self.world_size}",
            got=str(error),
            fix="a peer died, gave up, or launched another operation: see its output; "
            "then abort() this communicator, and shrink() it or connect anew",
        )

    def _pending(self, lane: Stream) -> list[CudaEvent]:
        return [event for event in self._cuda.stream(lane).pending() if event.owner is self]

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
        return self._cuda.await_either(point, point.is_over, timeout_s)

    def is_done(self, event: Event) -> bool:
        return cuda_event(event).is_over()

    def error_of(self, event: Event) -> BaseException | None:
        return cuda_event(event).failure

    def hold(self, stream: Stream, event: Event) -> None:
        self._cuda.wait(stream, event)

    def ahead_of(self, work: LaunchedWork) -> str:
        pending = cuda_event(work.event).stream.pending()
        return next((str(event) for event in pending if event.owner is not None), "")

    # ---- primitives; `via` is the lane

    def _all_reduce(self, via: CudaStream, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        if self._nccl is None or not inp.numel():
            self._copy(via, out, inp)
            return
        datatype, count = _numbers(inp)
        arrived = self._nccl.all_reduce(
            inp.data_ptr(), out.data_ptr(), count, datatype, self._operator(op, datatype), via.handle
        )
        self._launched(arrived)

    def _reduce(self, via: CudaStream, t: torch.Tensor, root: int, op: ReduceOp) -> None:
        if self._nccl is None or not t.numel():
            return
        (datatype, count), pointer = _numbers(t), t.data_ptr()
        operator = self._operator(op, datatype)
        self._launched(self._nccl.reduce(pointer, pointer, count, datatype, operator, root, via.handle))

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
        if self._nccl is None or not out.numel():
            self._copy(via, out, inp)
            return
        datatype, count = _numbers(out)
        self._launched(
            self._nccl.reduce_scatter(
                inp.data_ptr(), out.data_ptr(), count, datatype, self._operator(op, datatype), via.handle
            )
        )

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
            self._cuda.copy(destination.data_ptr(), source.data_ptr(), source.nbytes, via)

    def _operator(self, op: ReduceOp, datatype: int) -> int:
        """NCCL's number of `op`; an average is scaled by 1/n, and then summed."""
        if op != "avg" or self._nccl is None:
            return c.OPS[op]
        operator = self._means.get(datatype)
        if operator is None:
            scale = 1.0 / self.world_size
            operator = self._means[datatype] = self._nccl.create_pre_mul_sum(scale, datatype)
        return operator

    # ---- memory and end

    def register(self, t: torch.Tensor) -> AbstractContextManager[None]:
        """Tell NCCL that `t` will be sent often, while the context lasts, so that it copies less.

        The memory is `t`'s own part of its allocation; keep `t` until the context ends.

        Raises:
            NcclStatusError: NCCL refuses the memory.
        """
        self._enter(None)
        arguments.require_plain("register", self._device, t=t)
        return nullcontext() if self._nccl is None or not t.numel() else self._registered(self._nccl, t)

    @contextmanager
    def _registered(self, nccl: NcclComm, t: torch.Tensor) -> Iterator[None]:
        with self._cuda.issue_lock:
            self._cuda.enter()
            handle = nccl.register(t.data_ptr(), t.nbytes)
        try:
            yield
        finally:
            with self._cuda.issue_lock:
                if nccl.handle:  # an aborted communicator has no registrations left
                    nccl.deregister(handle)

    def _abort(self, error: BaguaError) -> None:
        self._mark(error)
        if self._nccl is not None:
            _end(self._nccl, self.name)

    def _close(self) -> None:
        nccl, self._nccl = self._nccl, None
        if nccl is None:
            return
        pending = any(self._pending(lane) for lane in self.lanes)
        self._mark(self.refusal or InternalError("close left no refusal"))
        if pending or not nccl.handle:
            _end(nccl, self.name)
            return
        # Finalizing waits for the other ranks of the node, and `close` for nobody.
        name = f"bagua-close-{self.name}"
        threading.Thread(target=_finalize, args=(nccl, self.name), name=name, daemon=True).start()


def _numbers(t: torch.Tensor) -> tuple[int, int]:
    """The ncclDataType_t and the count as which NCCL reduces `t`; a complex number is two numbers."""
    datatype, each = _NUMBERS[t.dtype]
    return datatype, t.numel() * each


def _meet(
    nccl: Nccl, store: Store | None, rank: int, world_size: int, name: str, timeout_s: float
) -> NcclComm:
    """Share rank 0's unique id through the store, see that all ranks are there, and connect."""
    if store is None:
        raise UsageError(
            f"communicator {name!r}: ranks can't meet without a store", expected="a Store", got="None"
        )
    deadline = time.monotonic() + timeout_s
    # The same name may be used again: the n-th connect of each rank meets the n-th of the others.
    turn = store.add(f"bagua/{name}/nccl/turn/{rank}", 1)
    keys = [f"bagua/{name}/nccl/{turn}/{other}" for other in range(world_size)]
    store.set(keys[rank], nccl.unique_id().hex() if rank == 0 else "here")
    pause_s = 1e-3
    while not store.check(keys):
        if time.monotonic() >= deadline:
            missing = [other for other in range(world_size) if not store.check([keys[other]])]
            raise CollectiveTimeoutError(
                f"communicator {name!r}: rank {rank} met not all {world_size} ranks within {timeout_s:g} s",
                expected="each of them to connect under this name",
                got=f"nothing from rank {', '.join(map(str, missing))}",
                fix="look for a rank that did not start or died, or raise timeout_s",
            )
        time.sleep(pause_s)
        pause_s = min(0.02, 2 * pause_s)
    unique_id = bytes.fromhex(store.get(keys[0]).decode())
    return nccl.init_rank(world_size, unique_id, rank, timeout_s=max(deadline - time.monotonic(), 0.1))


def _end(nccl: NcclComm, name: str) -> None:
    """Abort, or leak a communicator that can't be aborted."""
    try:
        nccl.abort(_ABORT_S)
    except BaguaError as error:
        _leaked.append(nccl)
        _log.error("the NCCL communicator of %r is left as it is: %s", name, error)


def _finalize(nccl: NcclComm, name: str) -> None:
    """Close an idle communicator, and abort it if the other ranks don't close theirs."""
    try:
        nccl.close(_CLOSE_S)
    except BaguaError as error:
        _log.debug("the NCCL communicator of %r is aborted: %s", name, error)
        _end(nccl, name)
