"""ByteGrad: the mean gradient, at one byte an element.

Both phases of the mean are compressed by the codec MinMaxUInt8, without error feedback: rounding is to the
nearest, and zero stays zero. Source: BAGUA's ByteGrad, on a codec that is exact in more places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context
from bagua_rt.algorithms.compression import CompressedMeans, MinMaxCodec
from bagua_rt.algorithms.operations import require_hierarchy
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket


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
        codec = MinMaxCodec(context.kernels, context.device)
        self._means = CompressedMeans(context, codec, hierarchical=declaration.hierarchical, feedback=False)

    @property
    def sparse_scale(self) -> float:
        return 1.0 / self.context.world_size

    def alignment(self) -> int:
        return self._means.alignment

    def setup(self, buckets: Sequence[Bucket]) -> None:
        self._means.setup(buckets)

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        self._means.mean_(bucket, comm, stream)
