"""Compression: codecs, and the mean over ranks in two compressed phases, with error feedback or without."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua_rt.algorithms.base import AlgorithmState, Context
from bagua_rt.algorithms.operations import CODEC_DTYPES, hierarchical_, hierarchical_sum_
from bagua_rt.backend import Communicator, Device, Kernels, Stream
from bagua_rt.bucket import Bucket, ParameterSpec, contiguous_stride

_log = logging.getLogger("bagua_rt")


class Codec(Protocol):
    """A compression of rows of a bucket to rows of bytes."""

    @property
    def unit(self) -> int:
        """Rows are a multiple of this many elements."""
        ...

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

    unit = 8

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

    unit = 16

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


class CompressedMeans:
    """The compressed means of all buckets of one attachment, flat or hierarchical.

    Hierarchical: each node sums in full precision, and the leaders take the compressed mean, times their
    number; nothing is compressed on one node. Buckets that the codec can't carry are averaged as they are.

    Args:
        context: What the algorithm may use.
        codec: The compression.
        hierarchical: Compress among the nodes' leaders only.
        feedback: Keep what was lost for the next round.
    """

    def __init__(self, context: Context, codec: Codec, *, hierarchical: bool, feedback: bool) -> None:
        self._context = context
        self._codec = codec
        self._hierarchical = hierarchical
        self._feedback = feedback
        self._buckets: tuple[Bucket, ...] = ()
        self._means: dict[int, CompressedMean] = {}
        self._former_plan: list[list[str]] = []
        self._awaits_setup: Mapping[str, Any] | None = None

    @property
    def alignment(self) -> int:
        """What flat buffers are to be padded to: each rank, or leader, owns whole units."""
        sizes = self._context.communicators.node_sizes
        return self._codec.unit * (len(sizes) if self._hierarchical else self._context.world_size)

    def setup(self, buckets: Sequence[Bucket]) -> None:
        """Make what each of `buckets` needs; errors start at zero. No buckets: let go of everything."""
        communicators = self._context.communicators
        meet = communicators.inter_node if self._hierarchical else communicators.world
        self._former_plan = self._plan()
        self._buckets = tuple(buckets)
        self._means = {
            b.index: CompressedMean(b.flat, b.plan.numel, meet, self._codec, feedback=self._feedback)
            for b in buckets
            if meet is not None and meet.world_size > 1 and b.plan.numel and b.plan.dtype in CODEC_DTYPES
        }
        if self._means and self._awaits_setup is not None:
            self.load_state_dict(self._awaits_setup)

    def mean_(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        """Replace the contents of `bucket` by their mean over all ranks of `comm`, the world.

        **Stream:** queued on `stream`.
        """
        flat, communicators, run = bucket.flat, self._context.communicators, self._context.device.run
        if comm.world_size == 1:
            return
        mean = self._means.get(bucket.index)

        def compress(members: Communicator, factor: int) -> None:
            if mean is not None:
                mean.mean_(members, stream)
                run(stream, lambda: flat.mul_(factor) if factor != 1 else None)
                # Padding shares the fate of its block, NaN too; but it must stay 0.
                run(stream, flat[bucket.plan.numel :].zero_)

        if not self._hierarchical and mean is not None:
            compress(comm, 1)
        elif not self._hierarchical:
            comm.all_reduce_(flat, "avg", stream=stream)
        else:
            # Scaled first: the sum of a node must not overflow where the mean doesn't.
            run(stream, lambda: flat.mul_(1.0 / comm.world_size))
            if bucket.plan.dtype in CODEC_DTYPES:
                hierarchical_(
                    flat, communicators, stream, lambda leaders: compress(leaders, leaders.world_size)
                )
            else:
                hierarchical_sum_(flat, communicators, stream)

    def reset(self) -> None:
        """Forget all errors."""
        for mean in self._means.values():
            mean.reset()

    def state_dict(self) -> dict[str, Any]:
        """The errors, and the plan that they belong to."""
        if self._awaits_setup is not None:
            return dict(self._awaits_setup)
        return {
            "plan": self._plan(),
            "errors": [tuple(error.clone() for error in mean.errors()) for mean in self._means.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave. Saved for another plan, errors start at zero, as at a re-plan.

        Where there are no means yet, it waits for `setup`: the optimizer, which knows the stage, may be
        loaded after this.
        """
        self._awaits_setup = None if self._means or not state["plan"] else state
        if state["plan"] != self._plan():
            self.reset()
            if self._means and self._feedback and state["plan"] not in ([], self._former_plan):
                _log.warning("the checkpoint has other buckets (bucket_cap_mb=?): the errors start at zero")
            return
        for mean, saved in zip(self._means.values(), state["errors"], strict=True):
            for error, value in zip(mean.errors(), saved, strict=True):
                error.copy_(value)

    def load_from_other_world(self) -> str:
        """Forget all errors, which belong to ranks; what that is, for the log."""
        self._awaits_setup = None
        self.reset()
        return "the errors" if self._feedback else ""

    def _plan(self) -> list[list[str]]:
        return [[_place(slot.spec) for slot in self._buckets[index].plan.slots] for index in self._means]


def _place(spec: ParameterSpec) -> str:
    """Name, and layout where it is not the usual one: errors are kept flat."""
    is_usual = spec.stride == contiguous_stride(spec.shape)
    return spec.name if is_usual else f"{spec.name} {spec.stride}"


class CompressedGradients(AlgorithmState):
    """Averages gradients in backward, by compressed means.

    Args:
        context: What the state may use.
        means: The means.
    """

    def __init__(self, context: Context, means: CompressedMeans) -> None:
        super().__init__(context)
        self._means = means

    @property
    def sparse_scale(self) -> float:
        return 1.0 / self.context.world_size

    def alignment(self) -> int:
        return self._means.alignment

    def setup(self, buckets: Sequence[Bucket]) -> None:
        self._means.setup(buckets)

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        self._means.mean_(bucket, comm, stream)

    def rollback(self) -> None:
        self._means.reset()

    def state_dict(self) -> dict[str, Any]:
        return self._means.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means.load_state_dict(state)

    def load_from_other_world(self, state: Mapping[str, Any]) -> str:
        return self._means.load_from_other_world()
