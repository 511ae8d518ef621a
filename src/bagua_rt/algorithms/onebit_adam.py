"""OneBitAdam's communication: averaged gradients first, then sign-compressed momenta with error feedback.

Source: Tang et al. 2021, "1-bit Adam: communication efficient large-scale training with Adam's convergence
speed", algorithm 1. The optimizer is bagua_rt.optim.OneBitAdam; its two stages are in momentum.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua_rt.algorithms.base import Algorithm, Context
from bagua_rt.algorithms.compression import CompressedMeans, SignCodec
from bagua_rt.algorithms.momentum import MomentumState


@dataclass(frozen=True)
class OneBitAdamAlgorithm(Algorithm):
    """Made by ``bagua_rt.optim.OneBitAdam(...).algorithm``; its settings are the optimizer's."""

    name: ClassVar[str] = "onebit_adam"

    def bind(self, context: Context) -> MomentumState:
        means = CompressedMeans(context, SignCodec(context.kernels), hierarchical=False, feedback=True)
        return MomentumState(context, self.name, "OneBitAdam", means, hierarchical=False)
