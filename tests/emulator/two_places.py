"""Host and device memory told apart, where the emulator has only one kind.

Tests that run on a GPU too must say ``device=``, and ``.cpu()`` before numpy. On the emulator all tensors are
the CPU's, and nothing would notice that they don't. Inside of `TwoPlaces` each tensor has a place: the host's
if it was made without a device, the device's if on `DEVICE`; what is computed is where its operands are.
Operands of both, numpy of a device tensor, and a host tensor that meets the backend fail as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .torch_side import EmulatedTorch

HOST = torch.device("cpu")
DEVICE = torch.device("cpu", 0)  # unlike HOST to everyone who compares; the same to torch's own code

_MAY_MIX = frozenset({"copy_", "_foreach_copy_", "to", "is_set_to", "__get__"})
_OF_HOST = frozenset({"numpy", "__array__"})
_of_memory: dict[int, torch.device] = {}


class TwoPlaces(TorchFunctionMode):
    """Within it tensors have places, on this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is Tensor.device:
            return _place(args[0]) or func(*args)
        name = getattr(func, "__name__", "")
        if name == "get_device" and _place(args[0]) is not None:
            return 0 if _place(args[0]) == DEVICE else -1
        operands = [*_tensors(args), *_tensors(kwargs.values())] if kwargs else list(_tensors(args))
        places = {_place(t) for t in operands if t.dim()} - {None}  # 0-dim tensors of the host go with any
        if len(places) > 1 and name not in _MAY_MIX:
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
        if name in _OF_HOST and places == {DEVICE}:
            raise TypeError("can't convert cuda device type tensor to numpy: use Tensor.cpu() first")
        result = func(*args, **kwargs)
        if not isinstance(result, (Tensor, tuple, list)):
            return result
        target = _named(name, args, kwargs)
        if target is None:
            known = [place for t in operands if (place := _place(t)) is not None]
            target = next(iter(places or known), None if operands else HOST)
        return result if target is None else _settled(result, target, operands, name in ("to", "cpu"))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Backends that are opened in the body are on `DEVICE`, and its tensors have places."""
    with TwoPlaces(), mock.patch.object(EmulatedTorch, "torch_device", DEVICE):
        yield


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            yield from (each for each in value if isinstance(each, Tensor))


def _place(t: Tensor) -> torch.device | None:
    place: torch.device | None = t.__dict__.get("_place")
    # A parameter is made of a tensor by no call that could be seen.
    if place is None and isinstance(t, torch.nn.Parameter):
        place = _of_memory.get(t.untyped_storage().data_ptr())
    return place


def _named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The place that a call asks for."""
    if name == "cpu":
        return HOST
    given = kwargs.get("device")
    if given is None and name == "to":
        given = next((a for a in args[1:] if isinstance(a, (torch.device, str))), None)
        if given is None:
            given = next((_place(a) for a in args[1:] if isinstance(a, Tensor)), None)
    if given is None:
        return None
    given = torch.device(given)
    return given if given in (HOST, DEVICE) else None


def _settled(result: Any, place: torch.device, operands: list[Tensor], moves: bool) -> Any:
    """The result, with its place; a tensor that moves becomes another one."""
    if moves and _place(result) not in (None, place):
        with torch._C.DisableTorchFunction():
            result = result.clone()
    for t in _tensors((result,)):
        is_new = not any(t is operand for operand in operands)
        if is_new and t.device.type == HOST.type and t.layout is torch.strided:
            t.__dict__["_place"] = place
            _of_memory[t.untyped_storage().data_ptr()] = place
    return result
