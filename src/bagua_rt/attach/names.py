"""One name for each parameter and buffer: used by plans, hooks, digests and messages alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from bagua_rt.errors import UsageError


@dataclass(frozen=True)
class NamedTensors:
    """What of a model takes part.

    Attributes:
        parameters: Parameters by name, in registration order, frozen ones too.
        buffers: Buffers, by name.
        ignored: Names that were left out.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    ignored: tuple[str, ...]

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that require gradients."""
        return {name: param for name, param in self.parameters.items() if param.requires_grad}


def name_tensors(model: nn.Module, ignore: Iterable[str] = ()) -> NamedTensors:
    """Name what of `model` takes part; a tensor with several names (tied) takes part once, by its first.

    Args:
        model: The model.
        ignore: Names to leave out, beside those in the model's ``_ddp_params_and_buffers_to_ignore``. A
            tied tensor is left out if any of its names is.

    Raises:
        UsageError: a name in `ignore` is none of the model's.
    """
    own = _names(ignore)
    of_model = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    params = list(model.named_parameters(remove_duplicate=False))
    buffers = list(model.named_buffers(remove_duplicate=False))
    known = {name for name, _ in params} | {name for name, _ in buffers}
    if unknown := sorted(own - known):
        raise UsageError(
            "ignore names what the model doesn't have",
            expected="names of named_parameters() or named_buffers()",
            got=", ".join(unknown),
        )
    left_out = (own | of_model) & known
    ignored_ids = {id(tensor) for name, tensor in [*params, *buffers] if name in left_out}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in params:
        if id(param) not in ignored_ids:
            first.setdefault(id(param), (name, param))
    first_buffer: dict[int, tuple[str, torch.Tensor]] = {}
    for name, buffer in buffers:
        if id(buffer) not in ignored_ids:
            first_buffer.setdefault(id(buffer), (name, buffer))
    return NamedTensors(
        parameters=dict(first.values()),
        buffers=dict(first_buffer.values()),
        ignored=tuple(sorted(left_out)),
    )


def name_buffers(
    model: nn.Module, ignored: Iterable[str]
) -> tuple[tuple[str, ...], tuple[tuple[nn.Module, str], ...]]:
    """The buffers that `model` has now, as `name_tensors` has named those of before.

    Args:
        model: The model.
        ignored: Names to leave out, beside those in the model's ``_ddp_params_and_buffers_to_ignore``.

    Returns:
        The names, and for each the module that has the buffer and its key there.
    """
    left_out = {*ignored, *getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
    buffers = list(model.named_buffers(remove_duplicate=False))
    seen = {id(buffer) for name, buffer in buffers if name in left_out}
    names: list[str] = []
    for name, buffer in buffers:
        if id(buffer) not in seen:
            seen.add(id(buffer))
            names.append(name)
    return tuple(names), tuple(_place(model, name) for name in names)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _names(ignore: Iterable[str]) -> set[str]:
    if isinstance(ignore, str):
        raise UsageError(
            "ignore is one text",
            expected="a collection of names",
            got=repr(ignore),
            fix=f"write [{ignore!r}]",
        )
    try:
        names = set(ignore)
    except TypeError:
        raise UsageError("ignore is no collection", expected="a list of names", got=repr(ignore)) from None
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise UsageError("ignore holds what is not a name", expected="texts", got=repr(wrong[0]))
    return names
