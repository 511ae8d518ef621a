"""What a checkpoint of an attachment holds, besides the model's and the optimizers' states."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bagua_rt.attach.agreement import agree_on, on_all_ranks
from bagua_rt.attach.layout import Layout
from bagua_rt.errors import UsageError

if TYPE_CHECKING:
    from bagua_rt.attach.attached import Attachment

_log = logging.getLogger("bagua_rt")
_KEYS = {"algorithm", "world_size", "generations", "order", "state"}


@dataclass(frozen=True)
class _Checkpoint:
    """A state_dict whose entries were checked; parameters are known by their indices."""

    world_size: int
    generations: int
    order: list[int] | None
    ready_order: list[int]
    tuned_cap_bytes: int | None
    state: Mapping[str, Any]


def save(attachment: Attachment) -> dict[str, Any]:
    """This rank's part of a checkpoint; no round is outstanding."""
    engine, layout = attachment.engine, attachment.engine.layout
    return {
        "algorithm": attachment.algorithm.name,
        "world_size": attachment.context.world_size,
        "generations": engine.accord.generation,
        "order": [layout.names[i] for i in layout.plan.order] if layout.has_ready_order else None,
        "ready_order": [layout.names[i] for i in engine.ready_order],
        "tuned_cap_bytes": layout.found_cap_bytes,
        "state": layout.state.state_dict(),
    }


def load(attachment: Attachment, state: Mapping[str, Any]) -> None:
    """Take up what `save` gave, on all ranks or on none. Collective.

    Raises:
        UsageError: it belongs to another algorithm or model; on every rank, if on one.
        LayoutMismatchError: the ranks' checkpoints are not of one moment.
        Exception: what the algorithm's state met on this rank.
    """
    control, call = attachment.resources.control, "load_state_dict()"
    found = on_all_ranks(call, control, lambda: _checked(attachment, state))
    lines = [
        ("the checkpoint's world size", str(found.world_size)),
        ("the checkpoint's generation", str(found.generations)),
        ("the checkpoint's order of parameters", str(found.order)),
        ("the checkpoint's bucket size", str(found.tuned_cap_bytes)),
    ]
    agree_on(lines, control)
    before, had_order = save(attachment), attachment.engine.layout.has_ready_order
    try:
        on_all_ranks(call, control, lambda: _take_up(attachment, found))
    except Exception:
        _take_up(attachment, _checked(attachment, before))
        attachment.engine.layout.has_ready_order = had_order
        raise


def _checked(attachment: Attachment, state: Mapping[str, Any]) -> _Checkpoint:
    if not isinstance(state, Mapping) or not set(state) >= _KEYS:
        raise UsageError(
            "this is no checkpoint of an attachment", expected="what state_dict() gave", got=repr(state)[:80]
        )
    if state["algorithm"] != attachment.algorithm.name:
        raise UsageError(
            "this checkpoint belongs to another algorithm",
            expected=attachment.algorithm.name,
            got=str(state["algorithm"]),
        )
    layout = attachment.engine.layout
    index_of = {name: i for i, name in enumerate(layout.names)}
    ready_order = [index_of[name] for name in state.get("ready_order", ()) if name in index_of]
    return _Checkpoint(
        int(state["world_size"]),
        int(state["generations"]),
        None if state["order"] is None else _indices(layout, index_of, state["order"]),
        ready_order or list(layout.plan.order),
        state.get("tuned_cap_bytes"),
        state["state"],
    )


def _indices(layout: Layout, index_of: Mapping[str, int], order: Sequence[str]) -> list[int]:
    present = [layout.names[i] for i in layout.plan.order]
    if sorted(order) != sorted(present):
        raise UsageError(
            "this checkpoint belongs to another model, or to one with other parameters frozen",
            expected=f"the parameters {', '.join(present[:5])} …",
            got=f"{', '.join(order[:5])} …",
        )
    return [index_of[name] for name in order]


def _take_up(attachment: Attachment, found: _Checkpoint) -> None:
    engine, layout = attachment.engine, attachment.engine.layout
    if found.tuned_cap_bytes is not None:
        layout.use_cap(found.tuned_cap_bytes)
    if found.order is not None:
        layout.has_ready_order = True
        layout.use_order(found.order)
    engine.ready_order = found.ready_order
    engine.accord.go_on_at(found.generations)
    if found.world_size == attachment.context.world_size:
        layout.load_algorithm_state(found.state)
    else:
        anew = layout.state.load_from_other_world(found.state)
        _log.warning(
            "the checkpoint is of a world of %d ranks, and this is one of %d: %s of %s starts anew",
            found.world_size,
            attachment.context.world_size,
            anew or "nothing",
            attachment.algorithm.name,
        )
