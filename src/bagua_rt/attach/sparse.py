"""Sparse gradients (``nn.Embedding(sparse=True)``): gathered, not reduced.

They are not part of any bucket: how many rows a rank has is known only when its backward ends. Then all ranks
say how many, and gather each other's rows; every rank adds them up in rank order, so all get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from bagua_rt.algorithms.base import Context
from bagua_rt.backend import Stream
from bagua_rt.control import Control
from bagua_rt.errors import UsageError
from bagua_rt.scheduler import Pipeline


def sparse_parameters(model: nn.Module) -> set[int]:
    """The ids of parameters whose gradients are sparse."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in model.modules() if isinstance(module, kinds) and module.sparse}


class SparseGradients:
    """Adds up the sparse gradients of some parameters over all ranks.

    Args:
        names: The parameters' names.
        params: The parameters.
        context: The ranks.
        control: The control lane.
        pipeline: Launches and waits.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        context: Context,
        control: Control,
        pipeline: Pipeline,
    ) -> None:
        self._names = names
        self._params = params
        self._context = context
        self._control = control
        self._pipeline = pipeline

    def add_up(self, scale: float) -> None:
        """Let every parameter's gradient be ``scale`` times the sum over ranks; None where no rank has one.

        Raises:
            UsageError: a gradient is not sparse, or has a graph of its own.
            CollectiveError: a rank did not take part.
        """
        mine = [self._local(name, param) for name, param in zip(self._names, self._params, strict=True)]
        counts = np.asarray([-1 if grad is None else grad._nnz() for grad in mine], dtype=np.int64)
        answers = self._control.agree("sparse gradients", counts.tobytes())
        of_rank = np.stack([np.frombuffer(answer, dtype=np.int64) for answer in answers])
        for i, (param, grad) in enumerate(zip(self._params, mine, strict=True)):
            rows = of_rank[:, i]
            if rows.max() >= 0:
                param.grad = self._gathered(param, grad, np.maximum(rows, 0).tolist(), scale)

    def add_nothing(self) -> None:
        """Take part in `add_up` of the other ranks; gradients stay what they are."""
        before = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        self.add_up(1.0)
        for param, grad in zip(self._params, before, strict=True):
            param.grad = grad

    def _local(self, name: str, param: nn.Parameter) -> torch.Tensor | None:
        grad = param.grad
        if grad is None:
            return None
        if grad.layout is not torch.sparse_coo or grad.requires_grad:
            raise UsageError(
                f"the gradient of {name!r} is not what its embedding promised",
                expected="a sparse gradient without a graph (sparse=True)",
                got=f"layout {grad.layout}",
                fix="build the embedding with sparse=False if its weight is also used otherwise",
            )
        return grad.coalesce()

    def _gathered(
        self, param: nn.Parameter, grad: torch.Tensor | None, rows: Sequence[int], scale: float
    ) -> torch.Tensor:
        most, row_shape = max(rows), tuple(param.shape[1:])
        world_size = self._context.world_size
        indices = torch.zeros(most, dtype=torch.int64, device=param.device)
        values = torch.zeros(most, *row_shape, dtype=param.dtype, device=param.device)
        if grad is not None:
            indices[: grad._nnz()] = grad.indices()[0]
            torch.mul(grad.values(), scale, out=values[: grad._nnz()])
        all_indices = indices.new_empty(world_size * most)
        all_values = values.new_empty(world_size * most, *row_shape)

        def gather(lane: Stream) -> None:
            self._context.world.all_gather(all_indices, indices, stream=lane)
            self._context.world.all_gather(all_values, values, stream=lane)

        self._pipeline.call("sparse gradients", gather)
        ranges = [(r * most, r * most + count) for r, count in enumerate(rows)]
        kept = torch.cat([torch.arange(*each, device="cpu") for each in ranges]).to(param.device)
        total = torch.sparse_coo_tensor(
            all_indices[kept].unsqueeze(0), all_values[kept], param.shape, check_invariants=False
        )
        return total.coalesce()
