"""The structure of optimizers' state, on its way without its tensors.

The root pickles keys, numbers and containers, with a reference in place of each tensor (`Sender`). Another
rank reads that, and puts a tensor of its own in place of each reference (`Receiver`): the one that it holds
at the same place, if it is of the same description, else a new one. The tensors' bytes travel by themselves.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bagua_rt.bucket import is_dense
from bagua_rt.replicate.tensors import kind_without_bytes


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in {"params", "param_names"}}


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@dataclass(frozen=True)
class _TensorSpec:
    """What a receiver must know to make a tensor, or to recognise that it has it.

    Attributes:
        index: Its place among the tensors that travel.
        on_cpu: Is it on the CPU? Otherwise it is where its parameter is.
        stride: Its strides; contiguous ones for a tensor that isn't dense.
    """

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    is_parameter: bool
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, index: int) -> _TensorSpec:
        shape = tuple(tensor.shape)
        stride = tensor.stride()
        if not is_dense(shape, stride):
            stride = torch.empty(shape, device="meta").stride()
        return cls(
            index,
            shape,
            stride,
            tensor.dtype,
            tensor.device.type == "cpu",
            isinstance(tensor, torch.nn.Parameter),
            tensor.requires_grad and tensor.is_leaf,
        )

    def fits(self, value: object, home: torch.device) -> bool:
        """Is `value` a tensor like this one, where a receiver would make it?"""
        return (
            isinstance(value, torch.Tensor)
            and kind_without_bytes(value) == ""
            and _TensorSpec.of(value, self.index) == self
            and value.stride() == self.stride
            and value.device == self.device(home)
        )

    def device(self, home: torch.device) -> torch.device:
        return torch.device("cpu") if self.on_cpu else home

    def make(self, home: torch.device) -> torch.Tensor:
        """A tensor that has no memory yet."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.device(home))
        if self.is_parameter:
            return torch.nn.Parameter(tensor, self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)

    def allocate(self, tensor: torch.Tensor) -> None:
        """Give memory to a tensor that `make` made."""
        memory = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=tensor.device)
        tensor.data = memory


@dataclass(frozen=True)
class _Skeleton:
    """One optimizer without its tensors: each part is a pickle in which references stand for tensors.

    Attributes:
        groups: The hyper-parameters of each group.
        states: The state of each parameter that has one, by its position over all groups.
        others: Key and value of what belongs to no parameter.
    """

    groups: list[bytes]
    states: dict[int, bytes]
    others: list[bytes]


class Sender:
    """The root's side.

    Attributes:
        tensors: What has to travel, in the order of the references to it.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._params = {
            param: (number, position)
            for number, optimizer in enumerate(optimizers)
            for position, param in enumerate(_params(optimizer))
        }
        self._indices: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def skeleton(self) -> tuple[bytes, str]:
        """All optimizers' skeletons, or what can't be sent: names optimizer, parameter and key."""
        try:
            return pickle.dumps([self._of(number, each) for number, each in enumerate(self._optimizers)]), ""
        except pickle.PicklingError as error:
            return b"", str(error)

    def _of(self, number: int, optimizer: torch.optim.Optimizer) -> _Skeleton:
        state: dict[Any, Any] = optimizer.state
        where = f"optimizer {number} ({type(optimizer).__name__})"
        groups = [
            self._dumps(_hyperparameters(group), f"{where}, group {index}")
            for index, group in enumerate(optimizer.param_groups)
        ]
        states = {
            position: self._dumps(state[param], f"{where}, state of parameter {position}")
            for position, param in enumerate(_params(optimizer))
            if param in state
        }
        others = [
            self._dumps({key: value}, f"{where}, state of no parameter")
            for key, value in state.items()
            if not isinstance(key, torch.Tensor)
        ]
        return _Skeleton(groups, states, others)

    def _dumps(self, value: Any, where: str) -> bytes:
        try:
            return self._pickled(value)
        except Exception as error:  # pickle raises what it likes
            raise pickle.PicklingError(f"{where}, {self._odd_key(value)}: {error}") from error

    def _odd_key(self, value: Any) -> str:
        for key, part in value.items() if isinstance(value, dict) else ():
            try:
                self._pickled(part)
            except Exception:
                return f"the {type(part).__name__} at {key!r}"
        return f"a {type(value).__name__}"

    def _pickled(self, value: Any) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self._reference).dump(value)
        return file.getvalue()

    def _reference(self, tensor: torch.Tensor) -> tuple[int, int] | _TensorSpec:
        if tensor in self._params:
            return self._params[tensor]
        if kind := kind_without_bytes(tensor):
            raise pickle.PicklingError(f"a tensor that is {kind}")
        index = self._indices.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return _TensorSpec.of(tensor, index)


class _Pickler(pickle.Pickler):
    """Pickles a structure, with `reference(tensor)` in place of each tensor."""

    def __init__(self, file: io.BytesIO, reference: Callable[[torch.Tensor], object]) -> None:
        super().__init__(file, protocol=5)
        self._reference = reference

    def persistent_id(self, obj: Any) -> object:
        return self._reference(obj) if isinstance(obj, torch.Tensor) else None


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote, with `tensor(reference)` for each tensor."""

    def __init__(self, data: bytes, tensor: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor = tensor

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._tensor(pid)


class Receiver:
    """Another rank's side: makes the root's structure out of this rank's tensors and of new ones.

    Nothing changes before `commit`, but what is written into `tensors`.

    Args:
        optimizers: This rank's.
        home: Where hyper-parameters go that are not on the CPU.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], home: torch.device) -> None:
        self._optimizers = optimizers
        self._home = home
        self._targets: dict[int, torch.Tensor] = {}  # by index
        self._made: dict[int, tuple[torch.Tensor, _TensorSpec]] = {}  # by identity
        # Each memory is written to once, and the weights' never, whatever else refers to them.
        self._taken = {param.data_ptr() for each in optimizers for param in _params(each)}
        self._commits: list[Callable[[], None]] = []

    def take_up(self, skeleton: bytes) -> str:
        """Prepare `tensors` and `commit`.

        Returns:
            What is wrong with the skeleton or with this rank; empty if nothing is.
        """
        try:
            for optimizer, each in zip(self._optimizers, pickle.loads(skeleton), strict=True):
                self._take_up(optimizer, each)
            for made, spec in self._made.values():
                if self._targets[spec.index] is made:
                    spec.allocate(made)
                else:  # an object that _merged can't look into may still refer to it
                    made.data = self._targets[spec.index].data
        except Exception as error:
            # Of any kind (a class that is missing here, no memory): all ranks must hear of it.
            return f"{type(error).__name__}: {error}"
        return ""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Where each tensor that travels is to be written."""
        return [self._targets[index] for index in range(len(self._targets))]

    def commit(self) -> None:
        """Put the structure into the optimizers."""
        for commit in self._commits:
            commit()

    def _take_up(self, optimizer: torch.optim.Optimizer, skeleton: _Skeleton) -> None:
        for group, data in zip(optimizer.param_groups, skeleton.groups, strict=True):
            own = _hyperparameters(group)
            self._commits.append(partial(_replace, group, own, self._loaded(data, own, self._home)))
        state: dict[Any, Any] = optimizer.state
        old = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        new: dict[Any, Any] = {}
        for data in skeleton.others:
            new |= self._loaded(data, old, self._home)
        for position, param in enumerate(_params(optimizer)):
            if param in state:
                old[param] = state[param]
            if position in skeleton.states:
                new[param] = self._loaded(skeleton.states[position], old.get(param), param.device)
        self._commits.append(partial(_replace_state, state, old, new))

    def _loaded(self, data: bytes, existing: Any, home: torch.device) -> Any:
        incoming = _Unpickler(data, lambda reference: self._tensor(reference, home)).load()
        return self._merged(existing, incoming, home)

    def _tensor(self, reference: tuple[int, int] | _TensorSpec, home: torch.device) -> torch.Tensor:
        if not isinstance(reference, _TensorSpec):
            number, position = reference
            return _params(self._optimizers[number])[position]
        if reference.index not in self._targets:
            made = self._targets[reference.index] = reference.make(home)
            self._made[id(made)] = made, reference
        return self._targets[reference.index]

    def _merged(self, existing: Any, incoming: Any, home: torch.device) -> Any:
        """`incoming`, with the tensors of `existing` at the same places where they fit."""
        if isinstance(incoming, torch.Tensor):
            return self._fitting(existing, incoming, home)
        if isinstance(incoming, dict):
            own = existing if isinstance(existing, dict) else {}
            for key, value in incoming.items():
                incoming[key] = self._merged(own.get(key), value, home)
        elif isinstance(incoming, list | deque | tuple):
            parts = list(existing) if isinstance(existing, list | deque | tuple) else []
            parts += [None] * (len(incoming) - len(parts))
            merged = [self._merged(own, value, home) for own, value in zip(parts, incoming, strict=False)]
            return _refilled(incoming, merged)
        return incoming

    def _fitting(self, existing: Any, incoming: torch.Tensor, home: torch.device) -> torch.Tensor:
        if id(incoming) not in self._made:
            return incoming  # a parameter
        made, spec = self._made[id(incoming)]
        if self._targets[spec.index] is made and spec.fits(existing, home) and self._take(existing):
            self._targets[spec.index] = existing
        return self._targets[spec.index]

    def _take(self, tensor: torch.Tensor) -> bool:
        if tensor.numel() > 0 and tensor.data_ptr() in self._taken:
            return False
        self._taken.add(tensor.data_ptr())
        return True


def _refilled(container: Any, values: list[Any]) -> Any:
    """A list, deque or tuple with other values."""
    if all(own is value for own, value in zip(container, values, strict=True)):
        return container
    if not isinstance(container, tuple):
        for index, value in enumerate(values):
            container[index] = value
        return container
    return container._make(values) if hasattr(container, "_make") else tuple(values)


def _replace(target: dict[Any, Any], old: Mapping[Any, Any], new: Mapping[Any, Any]) -> None:
    """Bring what `target` holds of `old` to `new`, in the same dict."""
    for key in old:
        if key not in new:
            del target[key]
    target.update(new)


def _replace_state(target: dict[Any, Any], old: Mapping[Any, Any], new: Mapping[Any, Any]) -> None:
    """The same for the state of an optimizer, where each parameter's own dict stays the same, too."""
    kept = dict(new)
    for key, value in old.items():
        if type(value) is type(new.get(key)) is dict:
            _replace(value, dict(value), new[key])
            kept[key] = value
    _replace(target, old, kept)
