"""Optimizers that come with a communication algorithm of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch

from bagua_rt.algorithms.base import Algorithm


class PairedOptimizer(torch.optim.Optimizer):
    """An optimizer and its algorithm: ``attach(model, optimizer)`` takes both.

    `step` evaluates the closure, then lets the attachment do its part (`before_update`), then updates. So
    what is communicated comes from the gradients that the step really uses, closures, clipping, gradient
    scaling and accumulation included. Not attached, it is an ordinary optimizer.
    """

    before_update: Callable[[], None] | None = None
    """Installed by attach(): communicates, and raises rather than let a broken step go on."""

    @property
    @abstractmethod
    def algorithm(self) -> Algorithm:
        """The declaration that attach() takes when none is given."""

    @abstractmethod
    def update(self) -> None:
        """Move the parameters; gradients and momenta are as they shall be used."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do one step.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Returns:
            The closure's loss; None without one.

        Raises:
            BaguaError: the step's communication failed; nothing was moved.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self.before_update is not None:
                self.before_update()
            self.update()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.pop("before_update", None)
        return state
