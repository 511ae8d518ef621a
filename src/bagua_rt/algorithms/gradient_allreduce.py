"""GradientAllReduce: every rank steps with the mean gradient. The default, and what torch's DDP does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context
from bagua_rt.algorithms.operations import sum_
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket


@dataclass(frozen=True)
class GradientAllReduce(Algorithm):
    """The mean (or sum) of the gradients over all ranks.

    Args:
        average: Mean if true, else sum. The mean scales before it sums, so it overflows only where the
            mean itself does.
        hierarchical: Reduce within each node first, then among the nodes' leaders; the result is the mean
            over ranks also for nodes of unequal sizes.
    """

    name: ClassVar[str] = "gradient_allreduce"
    average: bool = True
    hierarchical: bool = False

    def bind(self, context: Context) -> _State:
        return _State(context, self)


class _State(AlgorithmState):
    cuts_freely = True

    def __init__(self, context: Context, declaration: GradientAllReduce) -> None:
        super().__init__(context)
        self.scale = 1.0 / context.world_size if declaration.average else 1.0
        self._hierarchical = declaration.hierarchical

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        sum_(bucket.flat, self.context, stream, hierarchical=self._hierarchical)
