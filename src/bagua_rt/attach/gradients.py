"""Gradients on their way into the buckets, and back to the parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from bagua_rt.algorithms.base import AlgorithmState, Context, LaunchOn
from bagua_rt.attach.generation import Options
from bagua_rt.attach.plan import Plan
from bagua_rt.bucket import Bucket
from bagua_rt.errors import UsageError


class Gradients:
    """Moves gradients between parameters and buckets.

    Args:
        plan: The buckets and their members.
        context: Kernels and device.
        options: ``gradient_as_bucket_view`` and ``check``.
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
        self._check = options.check
        self._kept: dict[int, torch.Tensor | None] = {}

    def stage(self, state: AlgorithmState, index: int, seen: Sequence[bool] | None) -> list[int]:
        """Let `state` put the contents of bucket `index` in place.

        Args:
            state: The algorithm's state.
            index: The bucket.
            seen: For each parameter whether its gradient came; None where that doesn't matter.

        Returns:
            The parameters whose gradients are not finite (with ``check=True``).
        """
        bucket, members = self._buckets[index], self._members[index]
        if state.source == "weight":
            state.stage(bucket, range(len(members)))
            return []
        present = [i for i, param in enumerate(bucket.params) if param.grad is not None]
        if seen is not None:
            self._keep_unseen(bucket, members, seen)
        for i in present:
            _refuse_odd_gradient(bucket.params[i].grad, bucket.plan.slots[i].spec.name)
        if len(present) < len(members):
            state.missing(bucket, [i for i, param in enumerate(bucket.params) if param.grad is None])
        state.stage(bucket, present)
        if self._as_view and state.launch_on is LaunchOn.GRADIENT_READY:
            for i in present:
                bucket.params[i].grad = bucket.views[i]
        if not self._check:
            return []
        return [members[i] for i in present if not bool(torch.isfinite(bucket.views[i]).all())]

    def expose(self, unused: Collection[int], correction: float) -> None:
        """Let ``.grad`` be the communicated gradient, times `correction`; for `unused`, what it was."""
        compute = self._context.device.compute_stream()
        if correction != 1.0:
            for bucket in self._buckets:
                bucket.flat.mul_(correction)
        for bucket, members in zip(self._buckets, self._members, strict=True):
            grads: list[torch.Tensor] = []
            views: list[torch.Tensor] = []
            for i, (param, view) in enumerate(zip(bucket.params, bucket.views, strict=True)):
                if members[i] in unused:
                    param.grad = self._kept.get(members[i])
                elif self._as_view:
                    param.grad = view
                else:
                    if param.grad is None:
                        param.grad = torch.empty_like(view)
                    grads.append(param.grad)
                    views.append(view)
            if grads:
                self._context.kernels.copy_out(views, grads, compute)
        self._kept.clear()

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

    def _keep_unseen(self, bucket: Bucket, members: Sequence[int], seen: Sequence[bool]) -> None:
        """A gradient that no rank adds to in this generation is handed back untouched by `expose`."""
        for i, param in enumerate(bucket.params):
            if not seen[members[i]]:
                grad = param.grad
                in_bucket = grad is not None and bucket.holds(grad)
                self._kept[members[i]] = grad.clone() if grad is not None and in_bucket else grad


def _refuse_odd_gradient(grad: torch.Tensor | None, name: str) -> None:
    if grad is None:
        return
    if grad.layout is not torch.strided:
        raise UsageError(
            f"the gradient of {name!r} is sparse",
            expected="a dense gradient",
            got=str(grad.layout),
            fix="build the embedding with sparse=False, or name the parameter in ignore",
        )
    if grad.requires_grad:
        raise UsageError(
            f"the gradient of {name!r} has a graph of its own (create_graph=True)",
            expected="a backward without create_graph",
            fix="take higher-order terms with torch.autograd.grad() and call backward() on the loss only",
        )
