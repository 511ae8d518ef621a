"""The model's buffers: made rank 0's before each forward, also those that come, go or grow meanwhile.

A module may replace a buffer by assigning to it, get one later (a pruning mask, a cache), or be replaced
itself. Where all ranks' buffers change alike, what is sent follows; where one rank's do, the ledger that goes
beside each broadcast shows it, and no rank goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bagua_rt.algorithms.base import Context
from bagua_rt.attach.accord import Accord
from bagua_rt.attach.agreement import Line, agree_on, kind_of
from bagua_rt.attach.engine import Engine
from bagua_rt.attach.names import NamedTensors, name_buffers
from bagua_rt.control import Control, Place
from bagua_rt.replicate import TensorReplicator

_Kinds = tuple[tuple[str, torch.Size, torch.dtype], ...]
_DIFFER = "the ranks' buffers differ"
_FIX = "let every rank register the same, or name it in the model's _ddp_params_and_buffers_to_ignore"


class Buffers:
    """The buffers of an attached model, as they are now.

    Args:
        model: The model.
        named: What of it was attached.
        context: The ranks.
        engine: Its ledger goes beside each broadcast, its pipeline launches it.
        control: The control lane.
    """

    def __init__(
        self, model: nn.Module, named: NamedTensors, context: Context, engine: Engine, control: Control
    ) -> None:
        self._model = model
        self._ignored = named.ignored
        self._context = context
        self._engine = engine
        self._control = control
        self._changes = -1
        self._agreed = _kinds(self._named())
        self._replicator: TensorReplicator | None = None
        engine.accord.describe_buffers = self.describe

    def current(self) -> list[torch.Tensor]:
        """The buffers, each once."""
        return [buffer for _, buffer in self._named()]

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """Modules and buffers may have come or gone since they were named."""
        changes = self._engine.layout.changes
        if changes != self._changes:
            self._changes = changes
            self._names, self._places = name_buffers(self._model, self._ignored)
        held = (getattr(module, key, None) for module, key in self._places)
        return [(name, now) for name, now in zip(self._names, held, strict=True) if now is not None]

    def describe(self) -> list[Line]:
        """What they are, for comparing with other ranks."""
        return [(f"buffer {name!r}", kind_of(now)) for name, now in self._named()]

    def broadcast(self, root: int = 0) -> None:
        """Make them those of rank `root`.

        Raises:
            LayoutMismatchError: the ranks' buffers differ, or some rank is elsewhere.
            CollectiveError: a rank did not come.
        """
        if self._engine.layout.is_borrowed:
            return
        accord, named = self._engine.accord, self._named()
        kinds, current = _kinds(named), [now for _, now in named]
        if kinds != self._agreed:
            self._agree(accord, kinds)
        elif current and self._engine.join is None:  # else all ranks have just been in one generation
            accord.launch_beside(Place.BUFFERS)
        if not current:
            return
        if self._replicator is None or self._replicator.root != root:
            self._replicator = TensorReplicator(current, self._context.world, self._context.device, root)
        replicator = self._replicator
        replicator.pack(current)
        self._engine.pipeline.call(
            "the buffers", lambda lane: replicator.queue(self._context.world, lane), accord.look_beside
        )
        replicator.unpack()
        accord.look_beside()

    def _agree(self, accord: Accord, kinds: _Kinds) -> None:
        accord.meet(Place.OTHER_BUFFERS)
        with accord.fatal():
            agree_on(self.describe(), self._control, _DIFFER, _FIX)
        self._agreed, self._replicator = kinds, None


def _kinds(named: Sequence[tuple[str, torch.Tensor]]) -> _Kinds:
    return tuple((name, now.shape, now.dtype) for name, now in named)
