"""How far this rank's optimizers have gone, for comparing with the other ranks.

Replicas stay equal only while every rank steps as often as every other, and with the same settings. A rank
that skips or repeats a step alone, or whose learning rate goes its own way (a scheduler that was fed with the
rank's own loss), diverges without a sound; so each generation's ledger carries a digest of this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from bagua_rt.attach.agreement import Line

_SETTINGS = ("lr", "momentum", "betas", "weight_decay")  # what schedulers change
_LINE_SEARCH = ("t", "func_evals")  # where LBFGS's line search ended, and after how many losses
_Group = tuple[tuple[str, object], ...]
_Sizes = tuple[int, ...]  # of each group


@dataclass
class _Progress:
    """How far one optimizer has gone: its steps, and each group's settings in the last of them."""

    label: str
    steps: int = 0
    groups: tuple[_Group, ...] = ()


class Steps:
    """Counts the steps of every optimizer that holds one of an attachment's parameters, given to it or not.

    Args:
        optimizers: Those that were given to attach.
        params: The parameters that were attached.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], params: Iterable[torch.nn.Parameter]
    ) -> None:
        self._given = tuple(optimizers)
        self._params = {id(param) for param in params}
        self._looked_at: WeakKeyDictionary[torch.optim.Optimizer, tuple[_Sizes, _Sizes]] = WeakKeyDictionary()
        self.forget()

    def forget(self) -> None:
        """The ranks are as good as equal from here on: count anew. Called at one point on all ranks."""
        self._progress: list[_Progress] = []
        self._of: WeakKeyDictionary[torch.optim.Optimizer, _Progress] = WeakKeyDictionary()
        self._digest = bytes(8)
        for optimizer in self._given:
            self._enter(optimizer)

    def _enter(self, optimizer: torch.optim.Optimizer) -> _Progress:
        label = f"optimizer {len(self._progress)} ({type(optimizer).__name__})"
        progress = _Progress(label)
        self._progress.append(progress)
        self._of[optimizer] = progress
        return progress

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` has stepped; nothing, if it holds none of the parameters."""
        held = self._held(optimizer)
        if not any(held):
            return
        progress = self._of.get(optimizer) or self._enter(optimizer)
        progress.steps += 1
        progress.groups = tuple(
            (*_values(group, _SETTINGS), ("parameters", count))
            for group, count in zip(optimizer.param_groups, held, strict=True)
        )
        if isinstance(optimizer, torch.optim.LBFGS):
            states = (optimizer.state[param] for param in optimizer.param_groups[0]["params"])
            progress.groups += tuple(_values(state, _LINE_SEARCH) for state in states if "t" in state)
        self._digest = b""

    def _held(self, optimizer: torch.optim.Optimizer) -> _Sizes:
        """How many of the parameters each group of `optimizer` holds."""
        groups = [group["params"] for group in optimizer.param_groups]
        sizes = tuple(map(len, groups))
        looked_at = self._looked_at.get(optimizer)
        if looked_at is None or looked_at[0] != sizes:
            looked_at = sizes, tuple(sum(id(param) in self._params for param in group) for group in groups)
            self._looked_at[optimizer] = looked_at
        return looked_at[1]

    def digest(self) -> bytes:
        """Eight bytes that differ where two ranks' optimizers have gone differently far."""
        if not self._digest:
            text = repr([(progress.steps, progress.groups) for progress in self._progress])
            self._digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return self._digest

    def describe(self) -> list[Line]:
        """The same in words, for telling which rank is the odd one."""
        lines: list[Line] = []
        for progress in self._progress:
            lines.append((f"the steps of {progress.label}", str(progress.steps)))
            for number, group in enumerate(progress.groups):
                text = ", ".join(f"{key} {value}" for key, value in group)
                lines.append((f"group {number} of {progress.label} in its last step", text))
        return lines


def _values(entries: Mapping[str, Any], keys: Sequence[str]) -> _Group:
    plain = ((key, _plain(entries.get(key))) for key in keys)
    return tuple((key, value) for key, value in plain if value is not None)


def _plain(value: Any) -> object:
    """`value` as a plain one; None for what only the device knows."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return tuple(_plain(each) for each in value)
    return value
