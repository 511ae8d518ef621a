"""AsyncModelAverage: every rank trains on its own, while the weights are averaged in the background.

    y_r <- x_r                         a snapshot, when rank r opens a round
    x_r <- x_r + mean over ranks of y - y_r      at a step of its own, once the mean is there

What a rank has learned since its snapshot is kept. Source: BAGUA's asynchronous model average (Gan et al.
2021, "BAGUA: scaling up distributed learning with system relaxations").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context, LaunchOn
from bagua_rt.algorithms.operations import refuse_unknown_steps, sum_, views_in
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError


@dataclass(frozen=True)
class AsyncModelAverage(Algorithm):
    """Average the weights in the background; no step waits for another rank.

    Args:
        interval_s: Time from the end of a round to the beginning of the next; 0 is as soon as possible.
        warmup_steps: Average gradients in this many generations first, as GradientAllReduce does.
        hierarchical: Sum within each node first, then among the nodes' leaders.

    Raises:
        UsageError: a setting is out of range.
    """

    name: ClassVar[str] = "async_model_average"
    interval_s: float = 0.5
    warmup_steps: int = 0
    hierarchical: bool = False

    def __post_init__(self) -> None:
        interval, steps = self.interval_s, self.warmup_steps
        if (
            not isinstance(interval, (int, float))
            or isinstance(interval, bool)
            or not 0 <= interval < math.inf
        ):
            raise UsageError("interval_s is not usable", expected="seconds, 0 or more", got=repr(interval))
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise UsageError("warmup_steps is not usable", expected="a whole number >= 0", got=repr(steps))

    def bind(self, context: Context) -> _State:
        return _State(context, self)


class _State(AlgorithmState):
    bit_equal = False
    takes_sparse = False

    def __init__(self, context: Context, declaration: AsyncModelAverage) -> None:
        super().__init__(context)
        self._declaration = declaration
        self._generations = 0
        self._buckets: tuple[Bucket, ...] = ()
        self._means: dict[int, torch.Tensor] = {}
        self.interval_s = float(declaration.interval_s)

    def stage_wanted(self) -> int:
        return int(self._generations >= self._declaration.warmup_steps)

    def setup(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        refuse_unknown_steps(self._declaration.name, buckets, self.context)
        if not self.stage_wanted():
            self.source, self.launch_on = "gradient", LaunchOn.GRADIENT_READY
            self.scale = 1.0 / self.context.world_size
            return
        self.source, self.launch_on, self.scale = "weight", LaunchOn.TIMER, 1.0
        # Wider than 16 bits: else the rounding of a mean would move ranks that have equal weights.
        self._means = {
            b.index: torch.zeros_like(b.flat, dtype=torch.promote_types(b.flat.dtype, torch.float32))
            for b in buckets
        }

    def begin_generation(self, generation: int) -> bool:
        self._generations += 1
        return True

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        flat = bucket.flat
        if self.launch_on is LaunchOn.TIMER:
            flat, y, n = self._means[bucket.index], flat, comm.world_size
            self.context.device.run(stream, lambda: flat.copy_(y).div_(n))
        sum_(flat, self.context, stream, hierarchical=self._declaration.hierarchical)

    @torch.no_grad()
    def commit(self) -> None:
        if self.launch_on is not LaunchOn.TIMER:
            return
        kernels, compute = self.context.kernels, self.context.device.compute_stream()
        for bucket in self._buckets:
            weights = [param.detach() for param in bucket.params]
            y, mean = bucket.flat, self._means[bucket.index]
            x = torch.empty_like(y)
            kernels.copy_in(weights, views_in(x, bucket), 1.0, compute)
            # What has not moved takes the mean as it is: those ranks are bit-equal there.
            kernels.add_difference(_real(x), _real(mean), _real(y), compute)
            kernels.copy_out(views_in(x, bucket), weights, compute)

    def state_dict(self) -> dict[str, Any]:
        return {"generations": self._generations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generations = int(state["generations"])

    def load_from_other_world(self, state: Mapping[str, Any]) -> str:
        # After the warm-up ranks count for themselves, but then the warm-up is over in every file.
        self.load_state_dict(state)
        return ""


def _real(t: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(t) if t.is_complex() else t
