"""An operation as the ranks must agree on it; see `bagua_rt.backend.CallBoard`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from bagua_rt.backend import Call, CallBoard, Message
from bagua_rt.backends._collectives import Copies, Pairs
from bagua_rt.backends._work import LaunchedWork
from bagua_rt.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

COLLECTIVES = (  # methods of a communicator that all ranks call, or none
    "all_reduce_",
    "all_reduce",
    "reduce_",
    "broadcast_",
    "broadcast_object",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "gather",
    "scatter",
    "barrier",
    "split",
)
# Methods that meet the call of another rank or two; the names of their arguments for destination and source.
MESSAGES: dict[str, tuple[str, str]] = {
    "send": ("peer", ""),
    "recv": ("", "peer"),
    "send_recv": ("dst", "src"),
}


def telling_refusals(board: CallBoard, collective: Callable[P, T]) -> Callable[P, T]:
    """`collective`, with the other ranks told if this rank refuses its arguments."""

    def call(*args: P.args, **options: P.kwargs) -> T:
        with board.telling_refusals():
            return collective(*args, **options)

    return call


def telling_refused_messages(
    board: CallBoard, rank: int, name: str, method: Callable[P, T]
) -> Callable[P, T]:
    """`method`, called `name` in ``MESSAGES``, with the peers told if this rank refuses its arguments."""
    destination, source = MESSAGES[name]
    places = inspect.signature(method)

    def call(*args: P.args, **options: P.kwargs) -> T:
        try:
            return method(*args, **options)
        except UsageError as error:
            given = places.bind(*args, **options).arguments
            pairs = [(rank, given[destination])] if destination else []
            pairs += [(given[source], rank)] if source else []
            board.refuse_messages(pairs, str(error))
            raise

    return call


def call_of(work: LaunchedWork, rank: int, lane: int) -> Call:
    """What the other ranks' calls must fit.

    Args:
        work: Not launched yet: it still has its arguments.
        rank: This rank.
        lane: The number of its lane.
    """
    # In place or not is a rank's own business.
    fields: dict[str, object] = {"operation": work.operation.rstrip("_"), "lane": lane}
    if work.operation in MESSAGES:
        sends, receives, _ = work.args
        messages = [Message(rank, peer, t.numel(), str(t.dtype), lane) for peer, t in sends]
        messages += [Message(peer, rank, t.numel(), str(t.dtype), lane) for peer, t in receives]
        return Call(fields, is_collective=False, messages=messages)
    if work.operation in ("gather", "scatter", "all_to_all_v"):
        return Call(fields | _exchanged(work.operation, rank, *work.args))
    if tensors := [a for a in work.args if isinstance(a, torch.Tensor)]:
        fields |= _shape(tensors[-1])  # the input, where there are two
    for argument in work.args:
        if isinstance(argument, str):
            fields["reduction"] = argument
        elif isinstance(argument, int):
            fields["root"] = argument
    return Call(fields)


def _exchanged(operation: str, rank: int, sends: Pairs, receives: Pairs, copies: Copies) -> dict[str, object]:
    if operation == "all_to_all_v":
        ((own_out, own_in),) = copies
        return {
            "dtype": str(own_in.dtype),
            "sends": _counts([*sends, (rank, own_in)]),
            "receives": _counts([*receives, (rank, own_out)]),
        }
    to_root = sends if operation == "gather" else receives  # empty on root itself
    root, t = to_root[0] if to_root else (rank, copies[0][0])
    return _shape(t) | {"root": root}


def _shape(t: torch.Tensor) -> dict[str, object]:
    return {"numel": t.numel(), "dtype": str(t.dtype)}


def _counts(pairs: Sequence[tuple[int, torch.Tensor]]) -> list[int]:
    return [t.numel() for _, t in sorted(pairs, key=lambda pair: pair[0])]
