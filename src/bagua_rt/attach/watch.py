"""Noticing that a model's parameters are no longer what was attached.

Freezing, unfreezing and tying change which parameters take part, Module.to(memory_format=...) how their
gradients are laid out; the plan follows. A parameter that was replaced, cast or moved, and one that was
added, would train unsynchronised; that is an error.
"""

from __future__ import annotations

import sys
from operator import attrgetter, eq, is_
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from bagua_rt.attach.sparse import sparse_parameters
from bagua_rt.errors import UsageError

# One after the other: a list of thousands of torch.Size sets off the garbage collector, which costs more.
_SHAPE = attrgetter("shape")
_FUNCTIONAL_CALL = stateless._functional_call.__code__


class ParameterWatch:
    """Compares a model with what it was when it was attached, cheaply enough for every forward.

    Args:
        model: The model.
        params: What was attached, trainable and frozen, by name.
        ignored: Names that were left out.

    Attributes:
        sparse: Ids of the parameters whose gradients are sparse.
        changes: How often something was found to be different.
    """

    def __init__(self, model: nn.Module, params: dict[str, nn.Parameter], ignored: tuple[str, ...]) -> None:
        self._model = model
        self._name_of = {id(param): name for name, param in params.items()}
        self._params = list(params.values())
        self._dtypes = [param.dtype for param in self._params]
        self._devices = [param.device for param in self._params]
        self._shapes = [param.shape for param in self._params]
        self._shaped = [param for param in self._params if param.dim() > 1]  # others have one dense layout
        self._ends = sorted({0, len(self._params) - 1}) if self._params else []
        self._ignored = frozenset(ignored)
        self.sparse = sparse_parameters(model)
        self.changes = 0
        self._remember()

    def _remember(self) -> None:
        self._flags = [param.requires_grad for param in self._params]
        # What torch.utils.swap_tensors swaps, and the hooks with it.
        self._cores = [param._cdata for param in self._params]
        self._strides = list(map(torch.Tensor.stride, self._shaped))
        self._tables: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        tables = [module._buffers for module in self._model.modules()]
        self._buffers = [table for table in tables if isinstance(table, dict)]  # scripted ones don't change
        self._buffer_keys = list(map(tuple, self._buffers))
        self._empty = [(table, key) for table in self._buffers for key in table if table[key] is None]
        for module in self._model.modules():
            for table in (module._parameters, module._modules):
                self._tables.append((table, tuple(table.values())))

    def has_changed(self) -> bool:
        """Is anything different from when `trainable` was last asked?"""
        return self.takes_others() or self._are_of_another_kind()

    def takes_others(self) -> bool:
        """Do other parameters, modules or buffers take part than when `trainable` was last asked?

        A part of `has_changed`, at a third of its cost.
        """
        for table, values in self._tables:
            if len(table) != len(values) or not all(map(is_, table.values(), values)):
                return not self.is_borrowed()
        # Buffers that are there may be replaced in each forward: only those that come or go count.
        if not all(map(eq, map(tuple, self._buffers), self._buffer_keys)):
            return True
        if any(table[key] is not None for table, key in self._empty):
            return True
        return [param.requires_grad for param in self._params] != self._flags

    def _are_of_another_kind(self) -> bool:
        params = self._params
        return (
            [param.dtype for param in params] != self._dtypes
            or not all(map(eq, map(_SHAPE, params), self._shapes))
            or [param._cdata for param in params] != self._cores
            or not all(map(eq, map(torch.Tensor.stride, self._shaped), self._strides))
            or any(params[i].device != self._devices[i] for i in self._ends)  # a model moves as a whole
        )

    def is_borrowed(self) -> bool:
        """Does torch.func or torch.export run the model, with other tensors in the places of its own?

        They are gone when it returns, and their gradients are not the model's.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None or torch.compiler.is_exporting():
            return True
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not _FUNCTIONAL_CALL:
            frame = frame.f_back
        return frame is not None

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
        self.changes += 1
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
