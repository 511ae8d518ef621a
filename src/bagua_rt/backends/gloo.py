"""The CPU backend: collectives by torch's ProcessGroupGloo, one group per communicator and lane.

Two threads on one gloo group give wrong data, so each lane's thread has a group of its own. torch's
default group is never touched, so torch DDP can live in the same process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp as GlooOp

from bagua_rt.backend import Backend, Event, ReduceOp, Store, Stream
from bagua_rt.backends import _arguments as arguments
from bagua_rt.backends._collectives import Copies, Pairs
from bagua_rt.backends._communicator import CheckedCommunicator
from bagua_rt.backends._gloo_meeting import OUT_OF_REACH, GlooGroup, make_mortal, meet
from bagua_rt.backends._work import BaseWork, LaunchedWork
from bagua_rt.backends.gloo_device import CpuDevice, Lane, LaneTask, lane_event
from bagua_rt.backends.gloo_kernels import CpuKernels
from bagua_rt.errors import BaguaError, InternalError, PeerError

_GLOO_OPS = {
    "sum": GlooOp.SUM,
    "avg": GlooOp.SUM,
    "max": GlooOp.MAX,
    "min": GlooOp.MIN,
    "prod": GlooOp.PRODUCT,
}
_SMALL_BYTES = 1 << 18
_SCRATCH = threading.local()


def open_gloo(*, timeout_s: float) -> Backend:
    """Open the CPU backend.

    Args:
        timeout_s: The deadline of every host wait that names none.
    """
    device = CpuDevice(timeout_s)

    def connect(
        store: Store | None,
        rank: int,
        world_size: int,
        name: str,
        lanes: Sequence[Stream],
        *,
        timeout_s: float,
    ) -> GlooCommunicator:
        """Make a communicator; see `bagua_rt.backend.Connect`."""
        return GlooCommunicator(device, connect, store, rank, world_size, name, lanes, timeout_s=timeout_s)

    return Backend(
        name="gloo", device=device, kernels=CpuKernels(device), connect=connect, close=device.close
    )


class GlooCommunicator(CheckedCommunicator):
    """A group of ranks over gloo. Its primitives run on the threads of its lanes."""

    backend_name = "gloo"
    reducible = arguments.REDUCIBLE
    stays = "its sockets stay open"

    def __init__(
        self,
        device: CpuDevice,
        connect: Callable[..., GlooCommunicator],
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
            CollectiveTimeoutError: a rank did not come within `timeout_s`.
            PeerError: a rank, or the store, broke the connection.
        """
        own_lanes = [device.lane(lane) for lane in lanes]
        arguments.require_place(name, own_lanes, rank, world_size)
        self._groups_of_lanes: dict[Lane, GlooGroup | None] = dict.fromkeys(own_lanes)
        if world_size > 1:
            groups = meet(store, rank, world_size, name, len(own_lanes), timeout_s)
            self._groups_of_lanes = dict(zip(own_lanes, groups, strict=True))
        self.cleared_lanes: set[Lane] = set()
        self._last: dict[Lane, Event] = {}
        self._stuck: set[Lane] = set()  # lanes whose thread was given up inside an operation of ours
        self._cpu = device
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

    def _queue(self, lane: Stream, work: LaunchedWork) -> Event:
        own: Any = lane
        task = LaneTask(
            work.primitive,
            (self._groups_of_lanes[own], *work.args),
            owner=self,
            operation=work.operation,
            sequence=work.sequence,
        )
        return self._submit(own, task)

    def _queue_group(self, lane: Stream, works: Sequence[LaunchedWork]) -> Event:
        own: Any = lane
        calls = [(work.primitive, work.args) for work in works]
        names = "+".join(work.operation for work in works[:4]) + ("…" if len(works) > 4 else "")
        task = LaneTask(
            self._run_group,
            (self._groups_of_lanes[own], calls),
            owner=self,
            operation=f"group({names})",
            sequence=works[0].sequence,
        )
        return self._submit(own, task)

    def _submit(self, lane: Lane, task: LaneTask) -> Event:
        poison = lane.poison
        if poison is not None and (poison[0] is None or not poison[0].is_settled):
            # Refused before peers count on it: queued, it would be skipped, and the ranks out of step.
            raise PeerError(
                f"lane {lane.name!r} of communicator {self.name!r} is behind a failed operation",
                got=str(poison[1]),
                fix="abort() or close() the communicator that failed",
            ) from poison[1]
        event = self._last[lane] = lane.submit(task)
        return event

    def await_event(self, event: Event, timeout_s: float) -> bool:
        return lane_event(event).wait(timeout_s)

    def is_done(self, event: Event) -> bool:
        return lane_event(event).done

    def error_of(self, event: Event) -> BaseException | None:
        return lane_event(event).own_error

    def hold(self, stream: Stream, event: Event) -> None:
        self._cpu.wait(stream, event)

    def ahead_of(self, work: BaseWork) -> str:
        point = work.event
        return ", ".join(
            lane.doing
            for lane, last in self._last.items()
            if lane.doing and (last is point or not lane_event(last).done)
        )

    def translate(self, error: BaseException, operation: str, sequence: int) -> BaguaError:
        """Turn what gloo raised into an error of ours. The one place that does."""
        if isinstance(error, BaguaError):
            return error
        failure = PeerError(
            f"{operation} #{sequence} of communicator {self.name!r} failed on rank {self.rank} "
            f"of {self.world_size}",
            got=_first_sentence(error),
            fix="a peer died, gave up, or launched another operation: see its output; "
            "then abort() this communicator, and shrink() it or connect anew",
        )
        failure.__cause__ = error
        return failure

    # ---- primitives

    def _run_group(
        self, via: GlooGroup | None, calls: list[tuple[Callable[..., None], tuple[Any, ...]]]
    ) -> None:
        """Start every send and receive of the group, run its other operations, then wait for all."""
        started: list[Any] = []
        for primitive, args in calls:
            if primitive == self._exchange:
                started += self._start(via, *args)
        for primitive, args in calls:
            if primitive != self._exchange:
                primitive(via, *args)
        for pending in started:
            pending.wait(OUT_OF_REACH)

    def _all_reduce(self, via: GlooGroup | None, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        self._place(out, inp, op)
        if via is not None and out.numel():
            via.allreduce(_numbers(out), _gloo_op(out, op), OUT_OF_REACH).wait(OUT_OF_REACH)

    def _place(self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        """``out = inp``, scaled for an average: 1/n comes before the sum (fp16 60000 stays finite)."""
        if op == "avg" and self.world_size > 1:
            torch.mul(inp, 1.0 / self.world_size, out=out)
        elif out.data_ptr() != inp.data_ptr():
            _flat(out).copy_(_flat(inp))

    def _reduce(self, via: GlooGroup | None, t: torch.Tensor, root: int, op: ReduceOp) -> None:
        if via is None or not t.numel():
            return
        # gloo uses the tensors of ranks other than root as scratch.
        mine = t if self.rank == root else torch.empty_like(t)
        self._place(mine, t, op)
        via.reduce(_numbers(mine), root, _gloo_op(t, op), OUT_OF_REACH).wait(OUT_OF_REACH)

    def _broadcast(self, via: GlooGroup | None, t: torch.Tensor, root: int) -> None:
        if via is not None and t.numel():
            via.broadcast(_bytes(t), root, OUT_OF_REACH).wait(OUT_OF_REACH)

    def _all_gather(self, via: GlooGroup | None, out: torch.Tensor, inp: torch.Tensor) -> None:
        if not out.numel():
            return
        if via is not None and out.numel() * out.element_size() <= _SMALL_BYTES:
            via._allgather_base(_bytes(out), _bytes(inp)).wait(OUT_OF_REACH)
            return
        # For big tensors sends to everyone are 4 to 8 times faster than gloo's ring.
        parts = _flat(out).chunk(self.world_size)
        sends = [(k, inp) for k in range(self.world_size) if k != self.rank]
        self._exchange(via, sends, self._others(parts), [(parts[self.rank], inp)])

    def _reduce_scatter(
        self, via: GlooGroup | None, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp
    ) -> None:
        """Fetch the other ranks' parts and reduce them here: this rank's first, then in the order of ranks.

        gloo's own reduces everything everywhere and throws most of it away.
        """
        if not out.numel():
            return
        if via is None:
            self._place(out, inp, op)
            return
        parts = _flat(inp).chunk(self.world_size)
        fetched = list(_scratch(inp, self.world_size - 1, self.world_size).chunk(self.world_size - 1))
        fetched.insert(self.rank, parts[self.rank])
        self._exchange(via, self._others(parts), self._others(fetched), [])
        scale = 1.0 / self.world_size if op == "avg" else 1
        total = _flat(out)  # in place it is this rank's own part already
        if total.data_ptr() != fetched[self.rank].data_ptr():
            total.copy_(fetched[self.rank])
        if op == "avg":
            total.mul_(scale)
        for _, part in self._others(fetched):
            if op in ("sum", "avg"):
                total.add_(part, alpha=scale)
            elif op == "prod":
                total.mul_(part)
            else:
                (torch.maximum if op == "max" else torch.minimum)(total, part, out=total)

    def _all_to_all(self, via: GlooGroup | None, out: torch.Tensor, inp: torch.Tensor) -> None:
        if via is None:
            self._place(out, inp, "sum")
        elif inp.numel():
            via.alltoall_base(_bytes(out), _bytes(inp), [], [], OUT_OF_REACH).wait(OUT_OF_REACH)

    def _exchange(self, via: GlooGroup | None, sends: Pairs, receives: Pairs, copies: Copies) -> None:
        for pending in self._start(via, sends, receives, copies):
            pending.wait(OUT_OF_REACH)

    def _start(self, via: GlooGroup | None, sends: Pairs, receives: Pairs, copies: Copies) -> list[Any]:
        started: list[Any] = []
        if via is not None:
            started += [via.recv([_bytes(t)], peer, 0) for peer, t in receives if t.numel()]
            started += [via.send([_bytes(t)], peer, 0) for peer, t in sends if t.numel()]
        for destination, source in copies:
            if destination.data_ptr() != source.data_ptr():
                _flat(destination).copy_(_flat(source))
        return started

    def _barrier(self, via: GlooGroup | None) -> None:
        if via is not None:
            via.allreduce(torch.zeros(1, dtype=torch.uint8), GlooOp.SUM, OUT_OF_REACH).wait(OUT_OF_REACH)

    # ---- end

    def _abort(self, error: BaguaError) -> None:
        for lane in self._groups_of_lanes:
            if lane.abandon(self, error):
                self._stuck.add(lane)
        for lane in list(self._cpu.all_lanes):
            lane.clear(self)

    def _close(self) -> None:
        self._abort(self.refusal or InternalError("close left no refusal"))
        for lane, group in self._groups_of_lanes.items():
            if group is not None and lane not in self._stuck:
                make_mortal(group)
        self._groups_of_lanes = dict.fromkeys(self._groups_of_lanes)


def _flat(t: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dimension of stride 1.

    Not ``view(-1)``: a tensor of one element is contiguous whatever its stride, and view keeps the stride.
    """
    return t.detach().as_strided((t.numel(),), (1,))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as what gloo carries without knowing its dtype."""
    return _flat(t).view(torch.uint8)


def _numbers(t: torch.Tensor) -> torch.Tensor:
    """A flat view of `t` in a dtype that gloo reduces."""
    flat = _flat(t)
    if flat.is_complex():
        return torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


def _scratch(like: torch.Tensor, parts: int, world_size: int) -> torch.Tensor:
    """Room for `parts` parts of `like`, the same memory each time: it belongs to the lane's thread.

    A lane that was given another thread has another scratch: the operation that is stuck may still write.
    """
    count = like.numel() // world_size * parts * like.element_size()
    room: torch.Tensor | None = getattr(_SCRATCH, "room", None)
    if room is None or room.numel() < count:
        room = _SCRATCH.room = torch.empty(count, dtype=torch.uint8)
    return room[:count].view(like.dtype)


def _first_sentence(error: BaseException) -> str:
    """What gloo found, without its guesses and its source file."""
    text = str(error).split(" This is typically")[0].split("\n")[0]
    return f"gloo: {text.rpartition('] ')[2] if text.startswith('[/') else text}"


def _gloo_op(t: torch.Tensor, op: ReduceOp) -> Any:
    # The product of booleans is their minimum.
    return GlooOp.MIN if t.dtype is torch.bool and op == "prod" else _GLOO_OPS[op]
