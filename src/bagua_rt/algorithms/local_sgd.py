"""LocalSGD: some local steps, then the mean of the weights; with an outer step, DiLoCo.

    x <- mean over ranks of x                                      after every `interval` generations
    or, with an outer step:  d <- x_0 - mean(x);  m <- mu m + d;  x, x_0 <- x_0 - lr (d + mu m)

where x_0 are the weights after the round before. Sources: Stich 2019, "Local SGD converges fast and
communicates little"; Douillard et al. 2023, "DiLoCo", whose outer optimizer is SGD with Nesterov momentum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context, LaunchOn
from bagua_rt.algorithms.operations import load_by_name, refuse_unknown_steps, save_by_name, sum_, views_in
from bagua_rt.backend import Communicator, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Average the weights after every `interval` generations, with an outer step or without.

    Args:
        interval: H, counted in generations: in synchronised backwards, whether or not a step followed.
        outer_step: Take the mean as an outer gradient (DiLoCo). On one rank too, where it is Lookahead.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Its Nesterov momentum.
        average_state: Entries of the optimizers' states that are averaged along with the weights, as
            ``("exp_avg", "exp_avg_sq")``; all others stay each rank's own.
        hierarchical: Sum within each node first, then among the nodes' leaders.

    Raises:
        UsageError: a setting is out of range.
    """

    name: ClassVar[str] = "local_sgd"
    interval: int = 8
    outer_step: bool = False
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    average_state: tuple[str, ...] = ()
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.interval, int) or isinstance(self.interval, bool) or self.interval < 1:
            raise UsageError(
                "interval is not usable", expected="a whole number >= 1", got=repr(self.interval)
            )
        if not self.outer_lr > 0:
            raise UsageError("outer_lr is out of range", expected="> 0", got=repr(self.outer_lr))
        if not 0 <= self.outer_momentum < 1:
            raise UsageError(
                "outer_momentum is out of range", expected="0 <= momentum < 1", got=repr(self.outer_momentum)
            )
        names = self.average_state
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise UsageError("average_state is not usable", expected="a tuple of names", got=repr(names))

    def bind(self, context: Context) -> _State:
        return _State(context, self)


class _Outer:
    """The outer step of one bucket: x_0 and its momentum, in float32 at least."""

    def __init__(self, bucket: Bucket) -> None:
        wide = torch.promote_types(bucket.flat.dtype, torch.float32)
        self.anchor = torch.zeros_like(bucket.flat, dtype=wide)
        self.momentum = torch.zeros_like(self.anchor)
        for view, param in zip(views_in(self.anchor, bucket), bucket.params, strict=True):
            view.copy_(param.detach())

    def step(self, mean: torch.Tensor, lr: float, momentum: float) -> None:
        """Move `mean`, which becomes the new weights."""
        difference = self.anchor - mean
        self.momentum.mul_(momentum).add_(difference)
        self.anchor.sub_(difference.add_(self.momentum, alpha=momentum), alpha=lr)
        mean.copy_(self.anchor)


class _Moments:
    """Entries of the optimizers' states of one bucket's parameters, and on how many ranks each is there."""

    def __init__(self, bucket: Bucket, keys: Sequence[str]) -> None:
        wide = torch.promote_types(bucket.flat.dtype, torch.float32)
        self._keys = keys
        self._params = bucket.params
        self.flats = [torch.zeros_like(bucket.flat, dtype=wide) for _ in keys]
        self._views = [views_in(flat, bucket) for flat in self.flats]
        self.holders = torch.zeros(len(keys), len(bucket.params), device=bucket.flat.device)

    def _entries(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[int, int, torch.Tensor]]:
        found = []
        for i, param in enumerate(self._params):
            states = (opt.state[param] for opt in optimizers if param in opt.state)
            own: Mapping[str, Any] = next(states, {})
            for k, key in enumerate(self._keys):
                value = own.get(key)
                if isinstance(value, torch.Tensor) and value.shape == param.shape:
                    found.append((k, i, value))
        return found

    def stage(self, optimizers: Sequence[torch.optim.Optimizer], scale: float) -> None:
        """Copy in what is there."""
        self.holders.zero_()
        for flat in self.flats:
            flat.zero_()
        for k, i, value in self._entries(optimizers):
            torch.mul(value, scale, out=self._views[k][i])
            self.holders[k, i] = 1.0

    def take(self, optimizers: Sequence[torch.optim.Optimizer], world_size: int) -> None:
        """Copy the means over those ranks that have an entry back into the entries."""
        shares = (world_size / self.holders.clamp(min=1)).tolist()
        for k, i, value in self._entries(optimizers):
            value.copy_(self._views[k][i] * shares[k][i])


class _State(AlgorithmState):
    source = "weight"
    launch_on = LaunchOn.STEP_POST
    bit_equal = False

    def __init__(self, context: Context, declaration: LocalSGD) -> None:
        super().__init__(context)
        self._declaration = declaration
        self.scale = 1.0 / context.world_size
        self._buckets: tuple[Bucket, ...] = ()
        self._outer: dict[int, _Outer] = {}
        self._moments: dict[int, _Moments] = {}
        # Ranks may differ when an attachment switches to this algorithm: then they agree on x_0 first.
        self._has_agreed = False

    def setup(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        refuse_unknown_steps(self._declaration.name, buckets, self.context)
        declaration = self._declaration
        self._outer = {b.index: _Outer(b) for b in buckets} if declaration.outer_step else {}
        keys = declaration.average_state if self.context.world_size > 1 else ()
        self._moments = {b.index: _Moments(b, keys) for b in buckets} if keys else {}
        self._has_agreed = False

    def begin_generation(self, generation: int) -> bool:
        has_work = self.context.world_size > 1 or self._declaration.outer_step
        return has_work and (generation + 1) % self._declaration.interval == 0

    def stage(self, bucket: Bucket, present: Sequence[int]) -> None:
        super().stage(bucket, present)
        if bucket.index in self._outer and not self._has_agreed:
            self._outer[bucket.index].anchor.mul_(self.scale)
        if moments := self._moments.get(bucket.index):
            moments.stage(self.context.optimizers, self.scale)

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        if comm.world_size == 1:
            return
        self._sum(bucket.flat, stream)
        if bucket.index in self._outer and not self._has_agreed:
            self._sum(self._outer[bucket.index].anchor, stream)
        if moments := self._moments.get(bucket.index):
            for flat in (*moments.flats, moments.holders):
                self._sum(flat, stream)

    def _sum(self, flat: torch.Tensor, stream: Stream) -> None:
        sum_(flat, self.context, stream, hierarchical=self._declaration.hierarchical)

    def commit(self) -> None:
        declaration, device = self._declaration, self.context.device
        compute = device.compute_stream()
        self._has_agreed = True
        for bucket in self._buckets:
            if outer := self._outer.get(bucket.index):
                outer.step(bucket.flat, declaration.outer_lr, declaration.outer_momentum)
            weights = [param.detach() for param in bucket.params]
            self.context.kernels.copy_out(bucket.views, weights, compute)
            if moments := self._moments.get(bucket.index):
                moments.take(self.context.optimizers, self.context.world_size)

    def state_dict(self) -> dict[str, Any]:
        anchors = {index: outer.anchor for index, outer in self._outer.items()}
        momenta = {index: outer.momentum for index, outer in self._outer.items()}
        return {
            "has_agreed": self._has_agreed,
            "anchor": save_by_name(self._buckets, anchors),
            "momentum": save_by_name(self._buckets, momenta),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = {name for bucket in self._buckets for name in bucket.plan.names}
        # A parameter that was frozen until now may differ between ranks.
        self._has_agreed = bool(state["has_agreed"]) and names <= set(state["anchor"])
        anchors = {index: outer.anchor for index, outer in self._outer.items()}
        momenta = {index: outer.momentum for index, outer in self._outer.items()}
        load_by_name(state["anchor"], self._buckets, anchors)
        load_by_name(state["momentum"], self._buckets, momenta)

    def load_from_other_world(self, state: Mapping[str, Any]) -> str:
        self.load_state_dict(state)
        return ""  # x_0 and its momentum are equal on all ranks, once they have agreed
