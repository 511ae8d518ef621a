"""ByteGrad: the mean gradient, at one byte an element.

Both phases of the mean are compressed by the codec MinMaxUInt8, without error feedback: rounding is to the
nearest, and zero stays zero. Source: BAGUA's ByteGrad, on a codec that is exact in more places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua_rt.algorithms.base import Algorithm, Context
from bagua_rt.algorithms.compression import CompressedGradients, CompressedMeans, MinMaxCodec


@dataclass(frozen=True)
class ByteGrad(Algorithm):
    """The mean of the gradients over all ranks, compressed to a quarter of float32's bytes.

    Args:
        hierarchical: Sum within each node in full precision, and compress among the nodes' leaders only;
            the result is the mean over ranks also for nodes of unequal sizes.
    """

    name: ClassVar[str] = "bytegrad"
    hierarchical: bool = False

    def bind(self, context: Context) -> CompressedGradients:
        codec = MinMaxCodec(context.kernels, context.device)
        means = CompressedMeans(context, codec, hierarchical=self.hierarchical, feedback=False)
        return CompressedGradients(context, means)
