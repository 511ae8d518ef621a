"""Operations that algorithms compose: each queues its work on one lane and returns at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua_rt.algorithms.base import Context
from bagua_rt.backend import Communicator, Device, Kernels, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError
from bagua_rt.process_group import Communicators

CODEC_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""What codecs carry; buckets of another dtype go through plain all-reduce."""


def all_reduce_sum_(flat: torch.Tensor, comm: Communicator, stream: Stream) -> None:
    """Sum `flat` over all ranks, in place.

    **Shapes:** any; equal on all ranks. **Stream:** queued on `stream`.
    """
    comm.all_reduce_(flat, "sum", stream=stream)


def require_hierarchy(context: Context) -> None:
    """Refuse a hierarchical algorithm in an attachment that has no communicators for it.

    Raises:
        UsageError: it has none.
    """
    if context.communicators.intra_node is None:
        raise UsageError(
            "the attachment has no intra-node communicator",
            expected="an attachment that was made with a hierarchical algorithm",
            got="a switch from one that is not",
            fix="attach the model again, or give a custom algorithm a field `hierarchical` that is true",
        )


def hierarchical_(
    flat: torch.Tensor,
    communicators: Communicators,
    stream: Stream,
    among_leaders: Callable[[Communicator], None],
) -> None:
    """Sum `flat` within each node, let the leaders exchange, and give each node its leader's result.

    Args:
        flat: The buffer, replaced in place.
        communicators: The attachment's.
        stream: The lane.
        among_leaders: Queues the exchange of the leaders' sums. Not called where there is only one node.

    Raises:
        UsageError: the attachment has no intra-node communicator.

    **Shapes:** any; equal on all ranks. **Stream:** queued on `stream`.
    """
    node, leaders = communicators.intra_node, communicators.inter_node
    if node is None:
        raise UsageError(
            "the attachment has no intra-node communicator",
            fix="give the algorithm a field `hierarchical` that is true",
        )
    node.reduce_(flat, 0, "sum", stream=stream)
    if leaders is not None and leaders.world_size > 1:
        among_leaders(leaders)
    node.broadcast_(flat, 0, stream=stream)


def hierarchical_sum_(flat: torch.Tensor, communicators: Communicators, stream: Stream) -> None:
    """Sum `flat` over all ranks, in place: within each node, among the leaders, and back.

    With scaled input (1/world_size) the result is the mean over *ranks*, for nodes of any sizes.

    **Shapes:** any; equal on all ranks. **Stream:** queued on `stream`.
    """
    hierarchical_(flat, communicators, stream, lambda leaders: all_reduce_sum_(flat, leaders, stream))


class Codec(Protocol):
    """A compression of rows of a bucket to rows of bytes."""

    def row_bytes(self, columns: int, dtype: torch.dtype) -> int:
        """How many bytes a row of `columns` elements becomes."""
        ...

    def encode(
        self,
        values: torch.Tensor,
        error: torch.Tensor | None,
        numel: int,
        first: int,
        wire: torch.Tensor,
        stream: Stream,
    ) -> None:
        """Compress each row of ``values + error``; `error` becomes what the compression lost.

        **Shapes:** `values` and `error` ``[rows, columns]``, at element `first` of a bucket whose elements
        at or past `numel` are padding; `wire` uint8 ``[rows, row_bytes]``. **Stream:** queued on `stream`.
        """
        ...

    def decode(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """The values of the rows of `wire`; 0 on padding. **Stream:** queued on `stream`."""
        ...

    def decode_mean(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """The mean of the rows of `wire`, in row order. **Stream:** queued on `stream`."""
        ...


class SignCodec:
    """Signs, and one magnitude for each row; ``numel/8 + 8`` bytes."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.decode = kernels.sign_decode
        self.decode_mean = kernels.sign_decode_mean

    def row_bytes(self, columns: int, dtype: torch.dtype) -> int:
        """How many bytes a row of `columns` elements becomes."""
        return 8 + columns // 8

    def encode(
        self,
        values: torch.Tensor,
        error: torch.Tensor | None,
        numel: int,
        first: int,
        wire: torch.Tensor,
        stream: Stream,
    ) -> None:
        """Compress each row of ``values + error``; `error` becomes what the compression lost."""
        kept = torch.zeros_like(values) if error is None else error
        self._kernels.sign_encode(values, kept, numel, first, wire, stream)


class MinMaxCodec:
    """One byte an element, and a range for every 2,048: the codec MinMaxUInt8 of docs/algorithms.md."""

    def __init__(self, kernels: Kernels, device: Device) -> None:
        self._kernels = kernels
        self._device = device
        self.row_bytes = kernels.minmax_row_bytes
        self.decode = kernels.minmax_decode
        self.decode_mean = kernels.minmax_decode_mean

    def encode(
        self,
        values: torch.Tensor,
        error: torch.Tensor | None,
        numel: int,
        first: int,
        wire: torch.Tensor,
        stream: Stream,
    ) -> None:
        """Compress each row of ``values + error``; `error` becomes what the compression lost."""
        if error is None:
            self._kernels.minmax_encode(values, numel, first, wire, stream)
            return
        decoded = torch.empty_like(error)
        self._device.run(stream, lambda: error.add_(values))
        self._kernels.minmax_encode(error, numel, first, wire, stream)
        self._kernels.minmax_decode(wire, decoded, stream)
        self._device.run(stream, lambda: keep_error_(error, decoded))


def keep_error_(wanted: torch.Tensor, sent: torch.Tensor) -> None:
    """``wanted -= sent``, and 0 where that is not finite: an overflow must not live on as an error."""
    torch.nan_to_num(wanted.sub_(sent), nan=0.0, posinf=0.0, neginf=0.0, out=wanted)


class CompressedMean:
    """Mean over ranks by compression in two phases, with or without error feedback.

    Rank r owns chunk r of the buffer. Phase 1: every rank compresses its buffer (worker error), and sends
    each owner its chunk. Phase 2: the owner averages, compresses the average (server error), and sends it
    to all. Every rank decodes the same bytes, so all end with the same bits.

    Bytes each way and rank: ``(n-1) * row_bytes`` per phase, n ranks, rows of numel/n elements.

    Args:
        flat: The buffer; a multiple of n elements, and of what the codec needs in each row.
        numel: Its elements that are not padding.
        comm: The ranks.
        codec: The compression.
        feedback: Add what was lost to what is compressed next.

    Attributes:
        worker_error: What phase 1 lost, ``[n, chunk]``; None without feedback.
        server_error: What phase 2 lost, ``[1, chunk]``; None without feedback.

    **Source:** Tang et al. 2021, "1-bit Adam", algorithm 1, with the codec left open.
    """

    worker_error: torch.Tensor | None = None
    server_error: torch.Tensor | None = None

    def __init__(
        self, flat: torch.Tensor, numel: int, comm: Communicator, codec: Codec, *, feedback: bool
    ) -> None:
        n = comm.world_size
        chunk = flat.numel() // n
        self._rows = flat.view(n, chunk)
        self._numel = numel
        self._codec = codec
        self._first_owned = comm.rank * chunk
        self._owned = torch.zeros(1, chunk, dtype=flat.dtype, device=flat.device)
        row_bytes = codec.row_bytes(chunk, flat.dtype)
        self._sent = torch.zeros(n, row_bytes, dtype=torch.uint8, device=flat.device)
        self._received = torch.zeros_like(self._sent)
        self._answer = torch.zeros_like(self._sent[:1])
        if feedback:
            error_dtype = torch.promote_types(flat.dtype, torch.float32)
            self.worker_error = torch.zeros(n, chunk, dtype=error_dtype, device=flat.device)
            self.server_error = torch.zeros(1, chunk, dtype=error_dtype, device=flat.device)

    def mean_(self, comm: Communicator, stream: Stream) -> None:
        """Replace the buffer by the compressed mean over all ranks.

        **Stream:** queued on `stream`.
        """
        codec = self._codec
        codec.encode(self._rows, self.worker_error, self._numel, 0, self._sent, stream)
        comm.all_to_all(self._received, self._sent, stream=stream)
        codec.decode_mean(self._received, self._owned[0], stream)
        codec.encode(self._owned, self.server_error, self._numel, self._first_owned, self._answer, stream)
        comm.all_gather(self._received, self._answer[0], stream=stream)
        codec.decode(self._received, self._rows, stream)

    def errors(self) -> tuple[torch.Tensor, ...]:
        """Both errors; none without feedback."""
        return tuple(error for error in (self.worker_error, self.server_error) if error is not None)

    def reset(self) -> None:
        """Forget both errors."""
        for error in self.errors():
            error.zero_()


def save_errors(buckets: Sequence[Bucket], means: Mapping[int, CompressedMean]) -> dict[str, Any]:
    """What a checkpoint must hold of the means of some buckets."""
    return {
        "plan": [list(buckets[index].plan.names) for index in means],
        "errors": [tuple(error.clone() for error in mean.errors()) for mean in means.values()],
    }


def load_errors(
    state: Mapping[str, Any], buckets: Sequence[Bucket], means: Mapping[int, CompressedMean]
) -> None:
    """Take up what `save_errors` gave. Saved for another plan or stage, errors start at zero."""
    if state["plan"] != [list(buckets[index].plan.names) for index in means]:
        return
    for mean, saved in zip(means.values(), state["errors"], strict=True):
        for error, value in zip(mean.errors(), saved, strict=True):
            error.copy_(value)


def views_in(flat: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
    """For each parameter of `bucket`, its part of `flat`, a buffer with the bucket's places."""
    slots = bucket.plan.slots
    return [torch.as_strided(flat, slot.spec.shape, slot.spec.stride, slot.offset) for slot in slots]


def save_by_name(buckets: Sequence[Bucket], flats: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What buffers with the places of some buckets hold for each parameter; survives a re-plan."""
    return {
        name: view.clone()
        for bucket in buckets
        if bucket.index in flats
        for name, view in zip(bucket.plan.names, views_in(flats[bucket.index], bucket), strict=True)
    }


def load_by_name(
    saved: Mapping[str, torch.Tensor], buckets: Sequence[Bucket], flats: Mapping[int, torch.Tensor]
) -> None:
    """Take up what `save_by_name` gave; parameters that are not in it keep what they have."""
    for bucket in buckets:
        if bucket.index in flats:
            for name, view in zip(bucket.plan.names, views_in(flats[bucket.index], bucket), strict=True):
                if name in saved:
                    view.copy_(saved[name])
