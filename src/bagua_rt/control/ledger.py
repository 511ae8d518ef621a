"""The generation ledger: what each rank says about a generation, and what all of them say together. Pure.

[Note: decisions that are equal everywhere]
    The ledger is reduced with MAX over all ranks, and every rank decides from the reduced bytes alone. Each
    byte x travels with its complement, 255 - x. The two maxima add up to 255 where x is equal on all ranks;
    a flag (0 or 1) is set somewhere where the first is 1, and everywhere where the second is 254.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch


class Place(Enum):
    """Where a rank is when it writes its entry."""

    BACKWARD = "the end of a backward"
    BEGINNING = "the beginning of a backward, with no step since the last"
    FORWARD = "a forward, with no step since the last backward"
    BUFFERS = "a forward that takes rank 0's buffers, as each outside of no_sync() does"
    OTHER_BUFFERS = "a forward with other buffers than before"
    ORDER = "the second backward, which takes the order of rank 0's gradients"
    STEP = "optimizer.step()"
    BY_HAND = "optimizer.step(), with gradients that no backward has made"
    BACKGROUND = "a round in the background"


NONE, UNSEEN = 1, 2  # of `LedgerEntry.missing`

_PLACES = {place: number for number, place in enumerate(Place)}


@dataclass(frozen=True)
class LedgerEntry:
    """What one rank says about one generation.

    Attributes:
        generation: Number of the synchronised backward.
        stage: The stage that the algorithm wants next.
        plan_digest: 8 bytes that stand for the bucket plan.
        missing: For each parameter: had it a gradient (0), did autograd say that it has none (`NONE`), or say
            nothing (`UNSEEN`)? A bytearray is the cheapest.
        aborted: Was the backward left by an exception?
        nonfinite: Was something not finite?
        finished: Has this rank no more data?
        steps: 8 bytes that stand for how far the optimizers have gone.
        place: Where this rank is.
        loaded: Has it loaded state into the model or an optimizer since it last said so?
    """

    generation: int
    stage: int = 0
    plan_digest: bytes = bytes(8)
    missing: Sequence[int] | bytes | bytearray = ()
    aborted: bool = False
    nonfinite: bool = False
    finished: bool = False
    steps: bytes = bytes(8)
    place: Place = Place.BACKWARD
    loaded: bool = False


@dataclass(frozen=True)
class LedgerResult:
    """What all ranks say together; the same on every rank.

    Attributes:
        generation_differs: The ranks are in different generations.
        stage_differs: They want different stages.
        plan_differs: They have different bucket plans.
        steps_differ: Of those that have data, the optimizers have gone differently far.
        place_differs: They are at different places.
        missing_somewhere: Parameters of which at least one rank has seen no gradient, ascending.
        missing_everywhere: Parameters without a gradient on any rank, ascending.
        any_aborted: Some rank left the backward by an exception.
        all_aborted: Every rank did.
        any_nonfinite: Some rank found something not finite.
        any_finished: Some rank has no more data.
        all_finished: No rank has any.
        any_loaded: Some rank has loaded state.
    """

    generation_differs: bool
    stage_differs: bool
    plan_differs: bool
    steps_differ: bool
    place_differs: bool
    missing_somewhere: list[int]
    missing_everywhere: list[int]
    any_aborted: bool
    all_aborted: bool
    any_nonfinite: bool
    any_finished: bool
    all_finished: bool
    any_loaded: bool


_LEDGER_HEAD = struct.Struct("<QI8s????B8s")
_STAGE, _PLAN, _FLAGS, _PLACE, _STEPS, _HEAD = 8, 12, 20, 24, 25, _LEDGER_HEAD.size


def pack(entry: LedgerEntry) -> torch.Tensor:
    """One rank's entry as bytes to be reduced with MAX.

    Returns:
        uint8: head and missing flags, then the complement of all of it.

    Raises:
        struct.error: a number is out of range.
    """
    head = _LEDGER_HEAD.pack(
        entry.generation,
        entry.stage,
        entry.plan_digest,
        entry.aborted,
        entry.nonfinite,
        entry.finished,
        entry.loaded,
        _PLACES[entry.place],
        entry.steps,
    )
    own = np.frombuffer(head + bytes(entry.missing), dtype=np.uint8)
    both = np.empty(2 * own.size, dtype=np.uint8)
    both[: own.size] = own
    np.subtract(255, own, out=both[own.size :])
    if entry.finished:  # neutral: a rank without data says nothing about who lacks a gradient, or has stepped
        both[_STEPS : own.size] = both[own.size + _STEPS :] = 0
    return torch.from_numpy(both)


def unpack(reduced: torch.Tensor) -> LedgerResult:
    """Read what `pack` made, after MAX over all ranks ([Note: decisions that are equal everywhere])."""
    both, size = reduced.numpy(), len(reduced) // 2
    largest, smallest = both[:size], 255 - both[size:]
    high, low = largest[:_HEAD].tobytes(), smallest[:_HEAD].tobytes()  # a few bytes are quicker than arrays
    aborted, nonfinite, finished, loaded = map(bool, high[_FLAGS:_PLACE])
    all_aborted, _, all_finished, _ = map(bool, low[_FLAGS:_PLACE])
    return LedgerResult(
        generation_differs=high[:_STAGE] != low[:_STAGE],
        stage_differs=high[_STAGE:_PLAN] != low[_STAGE:_PLAN],
        plan_differs=high[_PLAN:_FLAGS] != low[_PLAN:_FLAGS],
        steps_differ=not all_finished and high[_STEPS:] != low[_STEPS:],
        place_differs=high[_PLACE] != low[_PLACE],
        missing_somewhere=np.flatnonzero(largest[_HEAD:] == UNSEEN).tolist(),
        missing_everywhere=np.flatnonzero(smallest[_HEAD:]).tolist(),
        any_aborted=aborted,
        all_aborted=all_aborted,
        any_nonfinite=nonfinite,
        any_finished=finished,
        all_finished=all_finished,
        any_loaded=loaded,
    )
