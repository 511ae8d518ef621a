"""QAdam's communication: averaged gradients first, then momenta at one byte an element.

Source: BAGUA's QAdam, whose faults are repaired: no gradient is lost at the switch, the variance keeps the
bias correction that it was frozen with, each group has its own betas, weight decay holds in both stages, and
what the codec loses comes back (Tang et al. 2021, "1-bit Adam"). The optimizer is bagua_rt.optim.QAdam; its
two stages are in momentum.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua_rt.algorithms.base import Algorithm, Context
from bagua_rt.algorithms.compression import CompressedMeans, MinMaxCodec
from bagua_rt.algorithms.momentum import MomentumState


@dataclass(frozen=True)
class QAdamAlgorithm(Algorithm):
    """Made by ``bagua_rt.optim.QAdam(...).algorithm``.

    Args:
        error_feedback: Add what the codec lost to the next momentum.
        hierarchical: Average within each node in full precision; compress among the leaders only.
    """

    name: ClassVar[str] = "qadam"
    error_feedback: bool = True
    hierarchical: bool = False

    def bind(self, context: Context) -> MomentumState:
        codec = MinMaxCodec(context.kernels, context.device)
        means = CompressedMeans(context, codec, hierarchical=self.hierarchical, feedback=self.error_feedback)
        return MomentumState(context, self.name, "QAdam", means, hierarchical=self.hierarchical)
