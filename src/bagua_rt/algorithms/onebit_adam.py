"""OneBitAdam's communication: averaged gradients first, then sign-compressed momenta with error feedback.

Stage 0 (the first ``warmup_steps`` steps): gradients are averaged in backward, and the optimizer is Adam.
Stage 1: each rank forms its momentum from its local gradient, just before the step; the momenta are averaged
by sign compression, and the optimizer moves by them, with its variance frozen.

Source: Tang et al. 2021, "1-bit Adam: communication efficient large-scale training with Adam's convergence
speed", algorithm 1. The optimizer is bagua_rt.optim.OneBitAdam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from bagua_rt.algorithms.base import Algorithm, AlgorithmState, Context, LaunchOn
from bagua_rt.algorithms.operations import (
    CompressedMean,
    SignCodec,
    all_reduce_sum_,
    load_errors,
    save_errors,
)
from bagua_rt.backend import Communicator, Stream
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


@dataclass(frozen=True)
class OneBitAdamAlgorithm(Algorithm):
    """Made by ``bagua_rt.optim.OneBitAdam(...).algorithm``; its settings are the optimizer's."""

    name: ClassVar[str] = "onebit_adam"

    def bind(self, context: Context) -> _State:
        paired = [opt for opt in context.optimizers if isinstance(opt, MomentumOptimizer)]
        if len(paired) != 1:
            raise UsageError(
                "onebit_adam needs its own optimizer",
                expected="one bagua_rt.optim.OneBitAdam among the optimizers",
                got=", ".join(type(opt).__name__ for opt in context.optimizers) or "no optimizer",
            )
        return _State(context, paired[0])


class _State(AlgorithmState):
    def __init__(self, context: Context, optimizer: MomentumOptimizer) -> None:
        super().__init__(context)
        self._optimizer = optimizer
        self._buckets: tuple[Bucket, ...] = ()
        self._compression: dict[int, CompressedMean] = {}
        self._unused: frozenset[torch.Tensor] = frozenset()

    def stage_wanted(self) -> int:
        return int(self._optimizer.variance_is_frozen)

    def alignment(self) -> int:
        return 8 * self.context.world_size if self.stage_wanted() else 1

    def setup(self, buckets: Sequence[Bucket]) -> None:
        compresses = bool(self.stage_wanted())
        self.launch_on = LaunchOn.STEP_PRE if compresses else LaunchOn.GRADIENT_READY
        self.scale = 1.0 if compresses else 1.0 / self.context.world_size
        self._buckets = tuple(buckets)
        self._refuse_foreign_parameters()
        world, codec = self.context.world, SignCodec(self.context.kernels)
        self._compression = {
            b.index: CompressedMean(b.flat, b.plan.numel, world, codec, feedback=True)
            for b in buckets
            if compresses and world.world_size > 1
        }

    def _refuse_foreign_parameters(self) -> None:
        held = {id(param) for group in self._optimizer.param_groups for param in group["params"]}
        for param in (param for bucket in self._buckets for param in bucket.params):
            if id(param) not in held or not param.is_floating_point():
                raise UsageError(
                    f"onebit_adam can't carry the parameter {self.context.names[param]!r}",
                    expected="real floating-point parameters, all of them in the OneBitAdam optimizer",
                    got=f"{param.dtype}, {'in' if id(param) in held else 'not in'} the optimizer",
                    fix="add it to the optimizer, freeze it, or name it in ignore",
                )

    def stage(self, bucket: Bucket, present: Sequence[int]) -> None:
        if self.launch_on is LaunchOn.GRADIENT_READY:
            super().stage(bucket, present)
            return
        used = [i for i, param in enumerate(bucket.params) if param not in self._unused]
        self._optimizer.form_momentum([bucket.params[i] for i in used], [bucket.views[i] for i in used])

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        if self.launch_on is LaunchOn.GRADIENT_READY:
            all_reduce_sum_(bucket.flat, comm, stream)
        elif compression := self._compression.get(bucket.index):
            compression.mean_(comm, stream)

    def after_backward(self, unused: frozenset[torch.Tensor]) -> None:
        self._unused = unused

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, MomentumOptimizer) and self.launch_on is LaunchOn.STEP_PRE:
            pairs = [pair for b in self._buckets for pair in zip(b.params, b.views, strict=True)]
            self._optimizer.use_momentum({p: view for p, view in pairs if p not in self._unused})

    def rollback(self) -> None:
        for compression in self._compression.values():
            compression.reset()

    def state_dict(self) -> dict[str, Any]:
        return save_errors(self._buckets, self._compression)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_errors(state, self._buckets, self._compression)
