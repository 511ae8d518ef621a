"""Gradients that were accumulated under no_sync() and have not been synchronised yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from bagua_rt.attach.refusals import step_without_synchronising
from bagua_rt.attach.untraced import untraced_frame


class LocalGradients:
    """Knows which parameters have a gradient that is this rank's own, until it is synchronised or cleared.

    `zero_grad(set_to_none=False)` leaves zeros behind; whether what is there was cleared since shows in its
    version, and only then its content is looked at.

    Args:
        params: The parameters that were attached.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._accumulated: dict[int, tuple[int, int]] = {}

    @untraced_frame
    def add(self, index: int) -> None:
        """A backward under no_sync() has added to the gradient of parameter `index`."""
        grad = self._params[index].grad
        self._accumulated[index] = (id(grad), -1 if grad is None else grad._version)

    def holds(self, index: int) -> bool:
        """Is what was accumulated for parameter `index` still there?"""
        grad = self._params[index].grad
        if index not in self._accumulated or grad is None:
            return False
        return self._accumulated[index] == (id(grad), grad._version) or not _is_zero(grad)

    def refuse_step(self, names: Sequence[str]) -> None:
        """Raise if any is left: a step would move this rank's weights by its own gradients.

        Raises:
            UsageError: names them.
        """
        if left := [names[index] for index in sorted(self._accumulated) if self.holds(index)]:
            raise step_without_synchronising(left)

    def clear(self, indices: Iterable[int]) -> None:
        """The gradients of these parameters have been synchronised; those of others, frozen by now, not."""
        if self._accumulated:
            for index in indices:
                self._accumulated.pop(index, None)


def _is_zero(grad: torch.Tensor) -> bool:
    """Waits for the compute stream."""
    values = grad._values() if grad.layout is torch.sparse_coo else grad
    return not bool(values.any())
