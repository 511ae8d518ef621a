"""ByteGrad: the mean gradient, at one byte an element.

Both phases of the mean are compressed by the codec MinMaxUInt8, without error feedback: rounding is to the
nearest, and zero stays zero. Source: BAGUA's ByteGrad, on a codec that is exact in more places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context
from bagua_rt.algorithms.operations import (
    CODEC_DTYPES,
    CompressedMean,
    MinMaxCodec,
    hierarchical_,
    hierarchical_sum_,
    require_hierarchy,
)
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket

_ROW_UNIT = 16  # elements: the codec pads rows to as many bytes


@dataclass(frozen=True)
class ByteGrad(Algorithm):
    """The mean of the gradients over all ranks, compressed to a quarter of float32's bytes.

    Args:
        hierarchical: Sum within each node in full precision, and compress among the nodes' leaders only;
            the result is the mean over ranks also for nodes of unequal sizes.
    """

    name: ClassVar[str] = "bytegrad"
    hierarchical: bool = False

    def bind(self, context: Context) -> _State:
        if self.hierarchical:
            require_hierarchy(context)
        return _State(context, self)


class _State(AlgorithmState):
    def __init__(self, context: Context, declaration: ByteGrad) -> None:
        super().__init__(context)
        self._hierarchical = declaration.hierarchical
        self._codec = MinMaxCodec(context.kernels, context.device)
        self._means: dict[int, CompressedMean] = {}
        communicators = context.communicators
        self._meet: Communicator | None = communicators.inter_node if self._hierarchical else context.world
        self._members = len(communicators.node_sizes) if self._hierarchical else context.world_size
        # Within nodes gradients are summed, and a sum must not overflow where the mean doesn't.
        self.scale = 1.0 / context.world_size if self._hierarchical else 1.0

    @property
    def sparse_scale(self) -> float:
        return 1.0 / self.context.world_size

    def alignment(self) -> int:
        return _ROW_UNIT * self._members

    def setup(self, buckets: Sequence[Bucket]) -> None:
        meet = self._meet
        self._means = {
            b.index: CompressedMean(b.flat, b.plan.numel, meet, self._codec, feedback=False)
            for b in buckets
            if meet is not None and meet.world_size > 1 and b.plan.numel and b.plan.dtype in CODEC_DTYPES
        }

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        flat, communicators = bucket.flat, self.context.communicators
        if bucket.plan.dtype not in CODEC_DTYPES:
            if self._hierarchical:
                hierarchical_sum_(flat, communicators, stream)
            else:
                comm.all_reduce_(flat, "avg", stream=stream)
        elif self._hierarchical:
            hierarchical_(flat, communicators, stream, lambda leaders: self._sum(bucket, leaders, stream))
        elif mean := self._means.get(bucket.index):
            mean.mean_(comm, stream)

    def _sum(self, bucket: Bucket, leaders: Communicator, stream: Stream) -> None:
        if mean := self._means.get(bucket.index):
            mean.mean_(leaders, stream)
            self.context.device.run(stream, lambda: bucket.flat.mul_(leaders.world_size))
