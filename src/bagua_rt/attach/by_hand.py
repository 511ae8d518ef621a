"""Gradients that no backward has made: assigned by the trainer, or taken from torch.autograd.grad().

No hook sees them, so nobody averages them. A step that follows no generation, but finds gradients, is either
one more step by the last ones, or a step by such gradients; the second is right only if they are equal on all
ranks.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from bagua_rt.algorithms.base import LaunchOn
from bagua_rt.attach.accord import Accord
from bagua_rt.attach.agreement import agree_on
from bagua_rt.attach.fingerprint import fingerprint
from bagua_rt.attach.layout import Layout
from bagua_rt.control import Control, Place


class GradientsByHand:
    """Compares such gradients between the ranks, before a step by them.

    Args:
        layout: The plan in force.
        accord: Tells the other ranks that this one compares.
        control: The control lane.
    """

    def __init__(self, layout: Layout, accord: Accord, control: Control) -> None:
        self._layout = layout
        self._accord = accord
        self._control = control
        self._stepped_at: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()

    def compare(self, optimizer: torch.optim.Optimizer, generations: int) -> None:
        """`optimizer` is about to step, after so many generations.

        Raises:
            LayoutMismatchError: the ranks' gradients differ, or only some ranks are here.
            CollectiveError: a rank did not come.
        """
        before = self._stepped_at.get(optimizer, 0)
        self._stepped_at[optimizer] = generations
        if before != generations or not self._applies() or not self._finds_some(optimizer):
            return
        self._accord.meet(Place.BY_HAND)
        named = zip(self._layout.names, self._layout.params, strict=True)
        agree_on(
            [(f"the gradient of {name!r}", fingerprint(param.grad)) for name, param in named],
            self._control,
            "optimizer.step() with gradients that no backward has averaged",
            "call backward(), or average what torch.autograd.grad() gives with pg.world.all_reduce_",
        )

    def _applies(self) -> bool:
        state = self._layout.state
        return (
            state.bit_equal
            and state.source == "gradient"
            and state.launch_on is LaunchOn.GRADIENT_READY
            and self._control.world_size > 1
        )

    def _finds_some(self, optimizer: torch.optim.Optimizer) -> bool:
        """Has a parameter of `optimizer` a gradient that isn't the last generation's, nor zero?"""
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        averaged = {view.data_ptr() for bucket in self._layout.plan.buckets for view in bucket.views}
        grads = [param.grad for param in self._layout.params if id(param) in mine]
        return any(
            grad is not None and not _is_at(grad, averaged) and bool(grad.detach().any()) for grad in grads
        )


def _is_at(grad: torch.Tensor, places: set[int]) -> bool:
    return grad.layout is torch.strided and grad.data_ptr() in places
