"""The seam: what the runtime needs of a machine, and nothing more.

A stream is an ordered queue of work; an event is a point in it. Everything above this module is written
against these protocols only; everything below it (``backends/``) implements them.

[Note: CPU compute stream]
    On a CPU backend the compute stream *is* the calling thread. Work that a caller has done is complete,
    so an event recorded there is complete too, and ``Device.wait(compute, event)`` can only mean: block
    this thread until the event is complete, or the device's deadline has passed.

[Note: sticky stream errors]
    Work queued behind a failed operation does not run. Every event recorded behind it carries its error,
    until the communicator that failed is aborted or closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

ReduceOp = Literal["sum", "avg", "max", "min", "prod"]


class Stream(Protocol):
    """An ordered queue of work."""

    @property
    def name(self) -> str:
        """The name that traces and error texts show."""
        ...

    @property
    def busy_us(self) -> float:
        """Microseconds that the stream has spent in operations and kernels; 0 where it isn't measured."""
        ...


class Event(Protocol):
    """A point in a stream."""

    @property
    def error(self) -> BaseException | None:
        """The error that the stream had met when it reached this point, once it has."""
        ...


class Store(Protocol):
    """The key-value store of a rendezvous; every ``torch.distributed.Store`` is one."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


class Device(Protocol):
    """Streams and events of one device."""

    @property
    def type(self) -> Literal["cpu", "cuda"]:
        """The torch device type of the tensors that this device works on."""
        ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def timeout_s(self) -> float:
        """The deadline of every host wait that names none."""
        ...

    @property
    def host_is_compute(self) -> bool:
        """Is the compute stream the calling thread itself ([Note: CPU compute stream])?"""
        ...

    def compute_stream(self) -> Stream:
        """The stream that the calling thread's torch operations run on ([Note: CPU compute stream])."""
        ...

    def new_stream(self, name: str, *, high_priority: bool = True) -> Stream:
        """A new stream; release it with `close_stream`."""
        ...

    def close_stream(self, stream: Stream) -> None:
        """Release a stream whose work is complete. Idempotent."""
        ...

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """An event that completes when all work queued on `stream` so far has."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Hold back what is queued on `stream` from now on until `event` completes."""
        ...

    def query(self, event: Event) -> bool:
        """Has `event` completed (with or without an error)? Never blocks."""
        ...

    def synchronize(self, event: Event, timeout_s: float | None = None) -> None:
        """Block the host until `event` completes.

        Raises:
            CollectiveTimeoutError: it did not within `timeout_s` (None: the device's deadline).
            BaseException: the error that the event carries.
        """
        ...

    def run(self, stream: Stream, fn: Callable[[], object]) -> None:
        """Queue the torch operations of `fn` on `stream`. They may not synchronise."""
        ...

    def time_us(self, event: Event) -> float:
        """When a completed event, recorded with ``timed=True``, completed: host clock, microseconds."""
        ...


class Views(tuple["torch.Tensor", ...]):  # noqa: SLOT001 - a tuple can't have both slots and notes
    """The views of a bucket. Their shapes, strides, dtypes and places in memory never change.

    Attributes:
        notes: What kernels have worked out about them, for as long as they live.
    """

    notes: dict[Any, Any]

    def __init__(self, views: Iterable[torch.Tensor]) -> None:
        self.notes = {}


class Kernels(Protocol):
    """Fused operations on buckets, one per file in ``kernels/``; each takes its stream last.

    All of them are asynchronous to the host on the stream that they are given, and every tensor is kept
    alive until they have run.
    """

    def copy_in(
        self, tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor], scale: float, stream: Stream
    ) -> Event:
        """``views[i] = tensors[i] * scale``; a tensor that already is its view is scaled in place.

        Returns:
            The point in `stream` behind it.

        **Shapes:** ``tensors[i]`` and ``views[i]`` have one shape; strides and dtypes may differ.
        """
        ...

    def copy_out(
        self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        """``tensors[i] = views[i]``."""
        ...

    def sign_encode(
        self,
        values: torch.Tensor,
        error: torch.Tensor,
        numel: int,
        first: int,
        wire: torch.Tensor,
        stream: Stream,
    ) -> None:
        """Compress each row of ``values + error`` to its signs and its mean magnitude.

        Row k of `wire` becomes ``scale (float32, 4 bytes) · 4 zero bytes · columns/8 bytes of signs``
        (bit j%8 of byte j/8, set for u >= 0), where ``u = values + error`` and ``scale = mean |u|`` over the
        row's valid elements. `error` becomes ``u - scale * sign(u)``; on padding it stays 0.

        **Shapes:** `values` and `error` are ``[rows, columns]``, ``columns % 8 == 0``; `wire` is uint8
        ``[rows, 8 + columns/8]``. The rows lie one after the other in a bucket, at element `first` of it;
        elements at or past `numel` are padding.
        **Source:** Tang et al. 2021, "1-bit Adam", algorithm 1; u >= 0 counts as positive.
        """
        ...

    def sign_decode(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """``out[k] = scale[k] * sign[k]`` for each row k.

        **Shapes:** `wire` uint8 ``[rows, 8 + columns/8]``, `out` ``[rows, columns]``.
        """
        ...

    def sign_decode_mean(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """``out = mean over k of scale[k] * sign[k]``, in row order (the same bits on every rank).

        **Shapes:** `wire` uint8 ``[rows, 8 + columns/8]``, `out` ``[columns]``.
        """
        ...

    def minmax_row_bytes(self, columns: int, dtype: torch.dtype) -> int:
        """How many bytes a row of `columns` elements has in the codec MinMaxUInt8; launches nothing.

        Raises:
            UsageError: the codec can't carry this dtype.
        """
        ...

    def minmax_encode(
        self, values: torch.Tensor, numel: int, first: int, wire: torch.Tensor, stream: Stream
    ) -> None:
        """Compress each row of `values` to one byte an element, with a range for every 2,048 elements.

        Zero stays exact where it lies in a range; a range that holds NaN or an infinity decodes to NaN.
        Padding enters no range. Every byte of `wire` is written.

        **Shapes:** `values` ``[rows, columns]``, in float32, float16, bfloat16 or float64; `wire` uint8
        ``[rows, minmax_row_bytes(columns, dtype)]``. The rows lie one after the other in a bucket, at
        element `first` of it; elements at or past `numel` are padding.
        **Source:** docs/algorithms.md, the codec MinMaxUInt8; kernels/README.md has the wire format.
        """
        ...

    def minmax_decode(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """The values of rows that `minmax_encode` made; padding becomes 0.

        **Shapes:** `wire` uint8 ``[rows, minmax_row_bytes(columns, dtype)]``, `out` ``[rows, columns]``.
        """
        ...

    def minmax_decode_mean(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """``out = mean over k of row k``, in row order (the same bits on every rank).

        Each term is scaled before it is added, so nothing overflows that the mean itself does not.

        **Shapes:** `wire` uint8 ``[rows, minmax_row_bytes(columns, dtype)]``, `out` ``[columns]``.
        """
        ...

    def ring_difference(
        self,
        x: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        agreed: torch.Tensor,
        shares: tuple[float, float],
        stream: Stream,
    ) -> None:
        """``x = (x - agreed) + (left - agreed) * shares[0] + (right - agreed) * shares[1]``.

        Every operation is rounded, in float32 at least; so it is 0 where all four are equal.

        **Shapes:** all ``[n]`` and contiguous, in one dtype: float32, float16, bfloat16 or float64.
        **Source:** Tang et al. 2018, "Communication Compression for Decentralized Training", DCD-PSGD.
        """
        ...

    def add_difference(self, x: torch.Tensor, mean: torch.Tensor, y: torch.Tensor, stream: Stream) -> None:
        """``x += mean - y``; `mean` itself, bit for bit, where x is still y.

        **Shapes:** all contiguous and of one shape, in one dtype: float32, float16, bfloat16 or float64.
        """
        ...


class Work(Protocol):
    """A collective that was launched."""

    @property
    def event(self) -> Event: ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until the operation is complete.

        Args:
            timeout_s: The deadline from now on; None takes the communicator's.

        Raises:
            CollectiveTimeoutError: the deadline passed.
            CollectiveError: the operation failed.
        """
        ...

    def wait_stream(self, stream: Stream) -> None:
        """Hold `stream` back until the operation is complete, without blocking the host (but see
        [Note: CPU compute stream])."""
        ...

    def is_done(self) -> bool:
        """Has the operation ended (with or without an error)? Never blocks."""
        ...


class Message(NamedTuple):
    """One send, or the receive that it must meet."""

    source: int
    destination: int
    numel: int
    dtype: str
    lane: int


@dataclass
class Call:
    """What the ranks must agree on before one of them launches an operation.

    Attributes:
        fields: Of a collective, what must be equal on all ranks; "operation" is one of them.
        is_collective: Do all ranks make it?
        messages: The sends and receives of a call that is none.
        numbers: The number of each message, among those from its source to its destination.
    """

    fields: dict[str, Any]
    is_collective: bool = True
    messages: Sequence[Message] = ()
    numbers: list[int] = field(default_factory=list)


class CallBoard(Protocol):
    """Where the ranks of a communicator tell one another what they call and wait for."""

    @property
    def is_comparing(self) -> bool:
        """Are calls compared between ranks before they are launched?"""
        ...

    def compare(self, calls: Sequence[Call]) -> None:
        """Compare what this rank is about to launch with the other ranks' calls; number the messages."""
        ...

    def telling_refusals(self) -> AbstractContextManager[None]:
        """Around a collective: if this rank refuses its arguments, the others hear of it."""
        ...

    def refuse_messages(self, pairs: Sequence[tuple[int, int]], text: str) -> None:
        """Tell the other sides that this rank refuses messages of these sources and destinations."""
        ...

    def look(self) -> None:
        """Raise what another rank found by comparing."""
        ...

    def wait(
        self, wait: Callable[[float], bool], timeout_s: float, text: Callable[[], str], call: Call | None
    ) -> bool:
        """Wait for an operation by `wait`, telling the other ranks about it if it takes long."""
        ...

    def told(self) -> str:
        """What the other ranks wait for."""
        ...

    def child(self, name: str, rank: int, world_size: int) -> CallBoard:
        """The board of a communicator that is made of this one's ranks."""


class PreparedCall(Protocol):
    """A collective whose arguments were checked once, to be launched again and again.

    It keeps to the memory, size and dtype that its tensor had, and keeps that memory alive. A launch is an
    operation like any other: every rank makes it, in the same order among its others. A trainer whose buffers
    stay where they are saves the price of checking them in each step.
    """

    def launch(self) -> Work:
        """Launch it once more, on the lane that it was prepared for.

        Returns:
            The operation under way. It may be the same object each time, and then stands for the latest
            launch: wait for one launch before the next where you need to know about that one.

        Raises:
            UsageError: the tensor has moved since (it was resized, or set to other memory).
            CollectiveError: the communicator has failed.
            ClosedError: it was closed, or belongs to the process that forked this one.
        """
        ...


class Communicator(Protocol):
    """A group of ranks and its collectives: the low-level communication API.

    Every collective is called by all ranks of the communicator in the same order on the same lane; on CUDA,
    in the same order over all lanes, for one NCCL communicator serves them. It is queued on `stream`, which
    must be one of `lanes`, after everything queued there before; with None on lane 0, and also after what the
    calling thread has queued on its compute stream (a prepared call is not: it has a lane). Tensors are read
    and written there, and kept alive until the operation is complete. Arguments are checked before anything
    is launched: tensors must be contiguous, on the communicator's device, of the stated sizes and of one
    dtype, and must not overlap unless the operation is in place.
    Averages are formed by scaling before the sum, so they overflow only where their result does.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def lanes(self) -> Sequence[Stream]: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has put on the wire, by each operation's usual formula."""
        ...

    def all_reduce_(self, t: torch.Tensor, op: ReduceOp = "avg", *, stream: Stream | None = None) -> Work: ...
    def prepare_all_reduce_(
        self, t: torch.Tensor, op: ReduceOp = "avg", *, stream: Stream | None = None
    ) -> PreparedCall: ...
    def all_reduce(
        self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp = "avg", *, stream: Stream | None = None
    ) -> Work: ...
    def reduce_(
        self, t: torch.Tensor, root: int, op: ReduceOp = "avg", *, stream: Stream | None = None
    ) -> Work: ...
    def broadcast_(self, t: torch.Tensor, root: int = 0, *, stream: Stream | None = None) -> Work: ...
    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, *, stream: Stream | None = None) -> Work: ...
    def reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp = "avg", *, stream: Stream | None = None
    ) -> Work: ...
    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, *, stream: Stream | None = None) -> Work: ...
    def all_to_all_v(
        self,
        outs: Sequence[torch.Tensor],
        inps: Sequence[torch.Tensor],
        *,
        stream: Stream | None = None,
    ) -> Work: ...
    def gather(
        self,
        outs: Sequence[torch.Tensor] | None,
        t: torch.Tensor,
        root: int = 0,
        *,
        stream: Stream | None = None,
    ) -> Work: ...
    def scatter(
        self,
        t: torch.Tensor,
        ins: Sequence[torch.Tensor] | None,
        root: int = 0,
        *,
        stream: Stream | None = None,
    ) -> Work: ...
    def send(self, t: torch.Tensor, peer: int, *, stream: Stream | None = None) -> Work: ...
    def recv(self, t: torch.Tensor, peer: int, *, stream: Stream | None = None) -> Work: ...
    def send_recv(
        self,
        out_t: torch.Tensor,
        dst: int,
        in_t: torch.Tensor,
        src: int,
        *,
        stream: Stream | None = None,
    ) -> Work:
        """Send `out_t` to `dst` and receive `in_t` from `src` at once."""
        ...

    def barrier(self) -> Work: ...
    def broadcast_object(self, obj: Any, root: int = 0) -> Any: ...
    def group(self) -> AbstractContextManager[None]: ...
    def split(self, color: int | None, key: int = 0) -> Communicator | None: ...
    def shrink(self, exclude: Sequence[int]) -> Communicator: ...
    def duplicate(self, name: str, lanes: Sequence[Stream]) -> Communicator: ...
    def flight_record(self) -> list[dict[str, Any]]: ...
    def register(self, t: torch.Tensor) -> AbstractContextManager[None]: ...
    def use_board(self, board: CallBoard) -> None:
        """Tell the other ranks there what this one waits for; compare every call first if the board does."""
        ...

    def abort(self) -> None: ...
    def close(self) -> None: ...


class Connect(Protocol):
    """Make the communicator of a group of ranks; collective over them."""

    def __call__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        name: str,
        lanes: Sequence[Stream],
        *,
        timeout_s: float,
    ) -> Communicator: ...


@dataclass(frozen=True)
class Backend:
    """One machine's implementation of the seam."""

    name: Literal["gloo", "cuda"]
    device: Device
    kernels: Kernels
    connect: Connect
    close: Callable[[], None]
