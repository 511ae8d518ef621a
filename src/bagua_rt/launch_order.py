"""The state machine "which bucket may launch now": pure, no I/O, no clock, no threads.

Buckets launch in the order of their indices, never of their readiness, since that alone is the same on
every rank. A round takes every bucket through its states once::

    pending ──mark_ready──▶ ready ──take──▶ launched ──mark_done──▶ done
       ▲                                                              │
       └──────────────────────────── begin (all done) ◀───────────────┘

Any other transition raises `IllegalTransitionError` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class BucketState(Enum):
    """Where a bucket is in the current round."""

    PENDING = "pending"
    READY = "ready"
    LAUNCHED = "launched"
    DONE = "done"


class IllegalTransitionError(Exception):
    """A transition that the machine does not have; its state is as before."""


class LaunchOrder:
    """Launch order of one attachment's buckets.

    Args:
        lanes: For each bucket, in launch order, the index of its lane.
    """

    def __init__(self, lanes: Sequence[int]) -> None:
        self._lanes = tuple(lanes)
        self._states = [BucketState.DONE] * len(self._lanes)
        self._next = len(self._lanes)

    def begin(self) -> None:
        """Open a round: every bucket becomes pending."""
        if not self.is_complete():
            raise IllegalTransitionError(f"begin() while a round is open: {self._describe()}")
        self._states = [BucketState.PENDING] * len(self._lanes)
        self._next = 0

    def mark_ready(self, bucket: int) -> None:
        """The contents of `bucket` are in place."""
        self._move(bucket, BucketState.PENDING, BucketState.READY)

    def take(self) -> list[tuple[int, int]]:
        """The ``(bucket, lane)`` pairs that may launch now, in launch order; they become launched."""
        taken: list[tuple[int, int]] = []
        while self._next < len(self._states) and self._states[self._next] is BucketState.READY:
            self._states[self._next] = BucketState.LAUNCHED
            taken.append((self._next, self._lanes[self._next]))
            self._next += 1
        return taken

    def mark_done(self, bucket: int) -> None:
        """The communication of `bucket` is complete."""
        self._move(bucket, BucketState.LAUNCHED, BucketState.DONE)

    def is_complete(self) -> bool:
        """Are all buckets done (as before the first round)?"""
        return all(state is BucketState.DONE for state in self._states)

    def state(self, bucket: int) -> BucketState:
        """The state of `bucket`."""
        return self._states[bucket]

    def _move(self, bucket: int, old: BucketState, new: BucketState) -> None:
        if not 0 <= bucket < len(self._states):
            raise IllegalTransitionError(f"there is no bucket {bucket} among {len(self._states)}")
        if self._states[bucket] is not old:
            is_ = self._states[bucket].value
            raise IllegalTransitionError(
                f"bucket {bucket} can't become {new.value}: it is {is_}, not {old.value}"
            )
        self._states[bucket] = new

    def _describe(self) -> str:
        return ", ".join(f"{index} {state.value}" for index, state in enumerate(self._states))
