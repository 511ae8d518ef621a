"""Gradients on their way into the buckets, and back to the parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NoReturn

import torch

from bagua_rt.algorithms.base import AlgorithmState, Context, LaunchOn, gradient
from bagua_rt.attach.generation import Options
from bagua_rt.attach.plan import Plan
from bagua_rt.backend import Event
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError

_DENSE = torch.strided

# [Note: aliases in .grad]
# What stands in ``.grad`` is the trainer's: ``p.grad.data = ...``, as Module.to(memory_format=...) and older
# code have it, or torch.utils.swap_tensors give that very object other memory. So it is never a view that a
# bucket itself goes by, but an alias of it, made anew each time.


class Gradients:
    """Moves gradients between parameters and buckets.

    Args:
        plan: The buckets and their members.
        context: Kernels and device.
        options: ``gradient_as_bucket_view``.
    """

    def __init__(
        self,
        plan: Plan,
        context: Context,
        options: Options,
    ) -> None:
        self._buckets = plan.buckets
        self._members = plan.members
        self._context = context
        self._as_view = options.gradient_as_bucket_view
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}

    def stage(self, state: AlgorithmState, index: int, seen: Sequence[bool] | None) -> Event | None:
        """Let `state` put the contents of bucket `index` in place.

        Args:
            state: The algorithm's state.
            index: The bucket.
            seen: For each parameter whether its gradient came; None where that doesn't matter.

        Returns:
            What `AlgorithmState.stage` does.
        """
        bucket, members = self._buckets[index], self._members[index]
        if state.source == "weight":
            return state.stage(bucket, range(len(members)))
        grads = [param.grad for param in bucket.params]
        present = [i for i, grad in enumerate(grads) if grad is not None]
        for i, grad in enumerate(grads):
            if grad is not None and (grad.layout is not _DENSE or grad.requires_grad):
                _refuse(grad, bucket.plan.names[i])
        if seen is not None:
            for i in [i for i, member in enumerate(members) if grads[i] is None or not seen[member]]:
                self._keep(bucket, members[i], i, grads[i])
        if len(present) < len(members):
            state.missing(bucket, [i for i, grad in enumerate(grads) if grad is None])
        ready = state.stage(bucket, present)
        if self._as_view and state.launch_on is LaunchOn.GRADIENT_READY:
            for i in present:
                bucket.params[i].grad = bucket.views[i].detach()  # [Note: aliases in .grad]
        return ready

    def nonfinite(self, state: AlgorithmState, index: int) -> list[int]:
        """The parameters in bucket `index`, just staged, whose gradients are not finite. Waits for them."""
        if state.source == "weight":
            return []
        members = zip(self._members[index], self._buckets[index].views, strict=True)
        return [member for member, view in members if not bool(torch.isfinite(view).all())]

    def expose(self, unused: Collection[int], correction: float) -> None:
        """Let ``.grad`` be the communicated gradient, times `correction`; for `unused`, what it was."""
        if correction != 1.0:
            for bucket in self._buckets:
                bucket.flat.mul_(correction)
        if not self._as_view:
            for bucket in self._buckets:
                self._copy_out(bucket)
        for index, (param, view, before) in self._kept.items():
            if index in unused:
                param.grad = before
            elif self._as_view:
                param.grad = view.detach()
        self._kept.clear()

    def _copy_out(self, bucket: Bucket) -> None:
        for param, view in zip(bucket.params, bucket.views, strict=True):
            if param.grad is None:
                param.grad = torch.empty_like(view)
        grads = [gradient(param) for param in bucket.params]
        self._context.kernels.copy_out(bucket.views, grads, self._context.device.compute_stream())

    def are_finite(self) -> bool:
        """Are all elements of all gradients on this rank finite? Waits for the compute stream."""
        grads = [param.grad for bucket in self._buckets for param in bucket.params if param.grad is not None]
        grads = [grad for grad in grads if grad.numel()]
        return not grads or bool(torch.stack(torch._foreach_norm(grads, math.inf)).isfinite().all())

    def make_nonfinite(self) -> None:
        """Some rank's own gradients are not finite: neither are this rank's, so that a GradScaler, which
        looks at local gradients only, skips the step on all ranks or on none."""
        for bucket in self._buckets:
            for param in bucket.params:
                if param.grad is not None:
                    param.grad.fill_(math.nan)

    def _keep(self, bucket: Bucket, index: int, i: int, grad: torch.Tensor | None) -> None:
        """A gradient that no rank adds to in this generation is handed back untouched by `expose`."""
        overwritten = grad is not None and (bucket.holds(grad) or not self._as_view)
        before = grad.clone() if grad is not None and overwritten else grad
        self._kept[index] = (bucket.params[i], bucket.views[i], before)


def _refuse(grad: torch.Tensor, name: str) -> NoReturn:
    if grad.layout is not _DENSE:
        raise UsageError(
            f"the gradient of {name!r} is sparse",
            expected="a dense gradient",
            got=str(grad.layout),
            fix="build the embedding with sparse=False, or name the parameter in ignore",
        )
    raise UsageError(
        f"the gradient of {name!r} has a graph of its own (create_graph=True)",
        expected="a backward without create_graph",
        fix="take higher-order terms with torch.autograd.grad() and call backward() on the loss only",
    )
