"""What algorithms share whose momentum is communicated: their state, and what it needs of the optimizer.

Stage 0 (the first ``warmup_steps`` steps): gradients are averaged in backward, and the optimizer is Adam.
Stage 1: each rank forms its momentum from its local gradient, just before the step; the momenta are averaged
with compression, and the optimizer moves by them, with its variance frozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from bagua_rt.algorithms.base import AlgorithmState, Context, LaunchOn
from bagua_rt.algorithms.compression import CompressedMeans
from bagua_rt.algorithms.operations import sum_
from bagua_rt.backend import Communicator, Event, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError


@runtime_checkable
class MomentumOptimizer(Protocol):
    """What the algorithm needs of its optimizer."""

    param_groups: list[dict[str, Any]]

    @property
    def variance_is_frozen(self) -> bool:
        """Is the warm-up over?"""
        ...

    def form_momentum(self, params: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
        """``out[i] = beta1 * m + (1 - beta1) * gradient`` of ``params[i]``; its state stays as it is."""
        ...

    def use_momentum(self, momentum: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Let the next update move these parameters by these momenta, and no others."""
        ...


class MomentumState(AlgorithmState):
    """Averages gradients, then momenta.

    Args:
        context: What the state may use.
        name: The algorithm's name, for error texts.
        optimizer: What its optimizer is called, for error texts.
        means: The compressed means of the momenta.
        hierarchical: Average gradients within each node first, too.

    Raises:
        UsageError: there isn't exactly one optimizer of the kind.
    """

    takes_sparse = False

    def __init__(
        self, context: Context, name: str, optimizer: str, means: CompressedMeans, *, hierarchical: bool
    ) -> None:
        super().__init__(context)
        paired = [opt for opt in context.optimizers if isinstance(opt, MomentumOptimizer)]
        if len(paired) != 1:
            raise UsageError(
                f"{name} needs its own optimizer",
                expected=f"one bagua_rt.optim.{optimizer} among the optimizers",
                got=", ".join(type(opt).__name__ for opt in context.optimizers) or "no optimizer",
            )
        self._name = name
        self._optimizer: MomentumOptimizer = paired[0]
        self._means = means
        self._hierarchical = hierarchical
        self._buckets: tuple[Bucket, ...] = ()
        self._unused: frozenset[torch.Tensor] = frozenset()

    def stage_wanted(self) -> int:
        return int(self._optimizer.variance_is_frozen)

    def alignment(self) -> int:
        return self._means.alignment if self.stage_wanted() else 1

    def setup(self, buckets: Sequence[Bucket]) -> None:
        compresses = bool(self.stage_wanted())
        self.launch_on = LaunchOn.STEP_PRE if compresses else LaunchOn.GRADIENT_READY
        self.scale = 1.0 if compresses else 1.0 / self.context.world_size
        self._buckets = tuple(buckets)
        self._refuse_foreign_parameters()
        self._means.setup(buckets if compresses else ())

    def _refuse_foreign_parameters(self) -> None:
        held = {id(param) for group in self._optimizer.param_groups for param in group["params"]}
        for param in (param for bucket in self._buckets for param in bucket.params):
            if id(param) not in held or not param.is_floating_point():
                raise UsageError(
                    f"{self._name} can't carry the parameter {self.context.names[param]!r}",
                    expected="real floating-point parameters, all of them in its optimizer",
                    got=f"{param.dtype}, {'in' if id(param) in held else 'not in'} the optimizer",
                    fix="add it to the optimizer, freeze it, or name it in ignore",
                )

    def stage(self, bucket: Bucket, present: Sequence[int]) -> Event | None:
        if self.launch_on is LaunchOn.GRADIENT_READY:
            return super().stage(bucket, present)
        used = [i for i, param in enumerate(bucket.params) if param not in self._unused]
        self.missing(bucket, [i for i, param in enumerate(bucket.params) if param in self._unused])
        self._optimizer.form_momentum([bucket.params[i] for i in used], [bucket.views[i] for i in used])
        return None

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        if self.launch_on is not LaunchOn.GRADIENT_READY:
            self._means.mean_(bucket, comm, stream)
        else:
            sum_(bucket.flat, self.context, stream, hierarchical=self._hierarchical)

    def after_backward(self, unused: frozenset[torch.Tensor]) -> None:
        self._unused = unused

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, MomentumOptimizer) and self.launch_on is LaunchOn.STEP_PRE:
            pairs = [pair for b in self._buckets for pair in zip(b.params, b.views, strict=True)]
            self._optimizer.use_momentum({p: view for p, view in pairs if p not in self._unused})

    def rollback(self) -> None:
        self._means.reset()

    def state_dict(self) -> dict[str, Any]:
        return self._means.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means.load_state_dict(state)

    def load_from_other_world(self, state: Mapping[str, Any]) -> str:
        return self._means.load_from_other_world()
