"""QAdam: Adam (or AdamW) whose momentum is communicated at one byte an element after a warm-up.

Its communication is algorithms/qadam.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bagua_rt.algorithms.qadam import QAdamAlgorithm
from bagua_rt.optim.frozen_variance import FrozenVarianceAdam


class QAdam(FrozenVarianceAdam):
    """Adam for `warmup_steps` steps; then the momentum travels at one byte an element.

    Arguments and the rule of both stages are FrozenVarianceAdam's, and these two:

    Args:
        error_feedback: Add what the codec lost to the next momentum.
        hierarchical: Average within each node in full precision; compress among the leaders only.

    Raises:
        UsageError: a setting is out of range.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        decoupled_weight_decay: bool = False,
        variance_floor: float = 0.0,
        settled_ratio: float | None = None,
        error_feedback: bool = True,
        hierarchical: bool = False,
    ) -> None:
        self._algorithm = QAdamAlgorithm(error_feedback=error_feedback, hierarchical=hierarchical)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            warmup_steps=warmup_steps,
            decoupled_weight_decay=decoupled_weight_decay,
            variance_floor=variance_floor,
            settled_ratio=settled_ratio,
        )

    @property
    def algorithm(self) -> QAdamAlgorithm:
        """Its communication."""
        return self._algorithm

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_algorithm": self._algorithm}
