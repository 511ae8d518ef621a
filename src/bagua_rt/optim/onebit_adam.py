"""OneBitAdam: Adam (or AdamW) whose momentum is communicated in one bit per element after a warm-up.

Source: Tang et al. 2021, "1-bit Adam", algorithm 1. Its communication is algorithms/onebit_adam.py.
"""

from __future__ import annotations

from bagua_rt.algorithms.onebit_adam import OneBitAdamAlgorithm
from bagua_rt.optim.frozen_variance import FrozenVarianceAdam


class OneBitAdam(FrozenVarianceAdam):
    """Adam for `warmup_steps` steps; then the momentum travels as signs, with error feedback.

    Arguments and the rule of both stages are FrozenVarianceAdam's.
    """

    @property
    def algorithm(self) -> OneBitAdamAlgorithm:
        """Its communication."""
        return OneBitAdamAlgorithm()
