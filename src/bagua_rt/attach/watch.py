"""Noticing that a model's parameters are no longer what was attached.

Freezing, unfreezing and tying change which parameters take part; the plan follows. A parameter that was
replaced, cast or moved, and one that was added, would train unsynchronised; that is an error.
"""

from __future__ import annotations

from operator import attrgetter, eq, is_

import torch
from torch import nn

from bagua_rt.attach.sparse import sparse_parameters
from bagua_rt.errors import UsageError

# One after the other: a list of thousands of torch.Size sets off the garbage collector, which costs more.
_SHAPE = attrgetter("shape")


class ParameterWatch:
    """Compares a model with what it was when it was attached, cheaply enough for every forward.

    Args:
        model: The model.
        params: What was attached, trainable and frozen, by name.
        ignored: Names that were left out.

    Attributes:
        sparse: Ids of the parameters whose gradients are sparse.
    """

    def __init__(self, model: nn.Module, params: dict[str, nn.Parameter], ignored: tuple[str, ...]) -> None:
        self._model = model
        self._name_of = {id(param): name for name, param in params.items()}
        self._params = list(params.values())
        self._dtypes = [param.dtype for param in self._params]
        self._devices = [param.device for param in self._params]
        self._shapes = [param.shape for param in self._params]
        self._ends = sorted({0, len(self._params) - 1}) if self._params else []
        self._ignored = frozenset(ignored)
        self.sparse = sparse_parameters(model)
        self._remember()

    def _remember(self) -> None:
        self._flags = [param.requires_grad for param in self._params]
        self._tables = [
            (module._parameters, tuple(module._parameters.values()), module._modules, len(module._modules))
            for module in self._model.modules()
        ]

    def has_changed(self) -> bool:
        """Is anything different from when `trainable` was last asked?"""
        for table, values, modules, module_count in self._tables:
            if len(modules) != module_count or len(table) != len(values):
                return True
            if not all(map(is_, table.values(), values)):
                return True
        params = self._params
        return (
            [param.requires_grad for param in params] != self._flags
            or [param.dtype for param in params] != self._dtypes
            or not all(map(eq, map(_SHAPE, params), self._shapes))
            or any(params[i].device != self._devices[i] for i in self._ends)  # a model moves as a whole
        )

    def trainable(self) -> list[int]:
        """Indices of the attached parameters that take part from now on.

        Raises:
            UsageError: a parameter was replaced, cast, moved or added; names it.
        """
        present: set[int] = set()
        for name, param in self._model.named_parameters(remove_duplicate=False):
            if name in self._ignored:
                continue
            if id(param) not in self._name_of and param.requires_grad:
                raise UsageError(
                    f"the parameter {name!r} was replaced or added after attach()",
                    expected="the parameters that were attached",
                    got="another parameter, which no other rank knows of",
                    fix="close() the attachment and attach() again, on every rank",
                )
            present.add(id(param))
        kinds = zip(self._dtypes, self._devices, self._shapes, strict=True)
        for param, (dtype, device, shape) in zip(self._params, kinds, strict=True):
            self._refuse_other_kind(param, dtype, device, shape)
        self._remember()
        return [i for i, param in enumerate(self._params) if id(param) in present and param.requires_grad]

    def _refuse_other_kind(
        self, param: nn.Parameter, dtype: torch.dtype, device: torch.device, shape: torch.Size
    ) -> None:
        if param.dtype is not dtype or param.device != device or param.shape != shape:
            raise UsageError(
                f"the parameter {self._name_of[id(param)]!r} was cast, moved or reshaped after attach()",
                expected=f"{tuple(shape)}, {dtype} on {device}, as it was attached",
                got=f"{tuple(param.shape)}, {param.dtype} on {param.device}",
                fix="change the model first, then attach() it",
            )
