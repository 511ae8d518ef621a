"""Rounds in the background, of an algorithm that communicates beside the training and not in step with it.

[Note: rounds without steps]
    Each rank opens round k at a safe point of its own, and takes its result at a later one. So a round lasts
    until the slowest rank has opened it, and meanwhile all of them train on. A ledger goes with each round,
    as with a generation. The first round after a stop or a change of plan launches its data only when that
    ledger has shown that all ranks have the same plan.

    A rank stops together with all others: it says so in the ledger of a round, and goes on taking part in
    rounds, without training, until one in which all ranks say so. Nobody has moved since that round opened.
    A rank that left in good order (`DepartureBoard`) ends the rounds of the others, which train on alone.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from bagua_rt.algorithms.base import LaunchOn
from bagua_rt.attach import verdict
from bagua_rt.attach.layout import Layout
from bagua_rt.control import Control, LedgerEntry, LedgerResult, Patience, PendingMax, Place, pack, unpack
from bagua_rt.errors import BaguaError, PeerError
from bagua_rt.rendezvous import Pace
from bagua_rt.scheduler import Pipeline

_log = logging.getLogger("bagua_rt")
_LOOK_S = 0.2  # how often news of other ranks is looked for while a round is open


@dataclass
class _Open:
    """The round that is open."""

    ledger: PendingMax
    patience: Patience
    is_launched: bool = False
    result: LedgerResult | None = None
    looked_s: float = 0.0


class BackgroundRounds:
    """Opens and completes rounds of `LaunchOn.TIMER`. All but `listen` runs on the training thread.

    Args:
        layout: The plan in force, and the algorithm's state on it.
        pipeline: Launches.
        control: The control lane.

    Attributes:
        is_paused: Do no rounds run, because all ranks have paused them?
    """

    def __init__(self, layout: Layout, pipeline: Pipeline, control: Control) -> None:
        self.is_paused = False
        self._layout = layout
        self._pipeline = pipeline
        self._control = control
        self._number = 0
        self._due_s = 0.0
        self._runs = self._have_stopped_together = False
        self._is_confirmed = False
        self._open: _Open | None = None
        self._departure: str | None = None

    @property
    def are_in_force(self) -> bool:
        """Does the algorithm, as it is now, communicate in the background only?"""
        return self._layout.state.launch_on is LaunchOn.TIMER

    def listen(self) -> None:
        """On the ticker's thread: a departure must be heard of while the store is still there."""
        if self._layout.state.interval_s is not None:
            self._control.departures.poll()

    # ---- safe points ------------------------------------------------------------------------------------

    def at_safe_point(self) -> None:
        """The weights may move now: take the round that is complete, follow the model, open what is due.

        Raises:
            BaguaError: a round failed.
        """
        if not self._has_peers():
            return
        if self._open is not None and self._advance():
            self._complete(takes=True)
        self._layout.follow_the_model(before_change=lambda: self.stop(takes=True))
        if self._open is None and not self.is_paused and self._has_peers():
            self._start()
            if time.monotonic() >= self._due_s:
                self._begin(stops=False)

    def look(self) -> None:
        """Raise what has become of other ranks, before this one moves on its own again.

        Raises:
            PeerError: a rank died or failed.
            CollectiveTimeoutError: a rank has come to no safe point for too long.
            LayoutMismatchError: the ranks have different plans.
        """
        open_ = self._open
        if open_ is not None and not self._read(open_) and self._open is not None:
            self._look(open_)

    def pause(self) -> None:
        """Begin no more rounds, after `stop`.

        Raises:
            PeerError: a rank has left, so the ranks have not stopped together.
        """
        self._refuse_departed("pause()")
        self.is_paused = True

    def resume(self) -> None:
        """Let rounds run again. Collective.

        Raises:
            BaguaError: a rank did not come.
        """
        self._refuse_departed("resume()")
        if not self.is_paused:
            return
        try:
            self._control.agree("resume the rounds")
        except BaguaError as error:
            self._pipeline.fail(error)
            raise
        self.is_paused = False

    def stop(self, *, takes: bool) -> None:
        """Complete rounds until one in which all ranks stop. Collective; rounds go on at the next safe point.

        Waits as long as the other ranks train, but for no single round longer than its deadline.

        Args:
            takes: Let the rounds' results move the weights; else they are dropped.

        Raises:
            BaguaError: a round failed.
        """
        if not self._has_peers() or self.is_paused:
            return
        self._start()
        while self._runs:
            if self._open is None:
                self._begin(stops=True)
            pace = Pace(math.inf)  # the round's own patience has the deadline
            while not self._advance():
                pace.pause()
            self._complete(takes=takes)

    def leave(self, error: BaseException | None) -> None:
        """Tell the other ranks that this one goes, so that they need not wait for it.

        Args:
            error: What it goes because of; to the others it has failed then.
        """
        if self._layout.state.interval_s is None or self._pipeline.failure is not None:
            return
        rank = self._control.rank
        if error is None:
            if self._have_stopped_together:  # a slower rank must not take this for a reason to give up early
                return
            self._control.departures.post(f"rank {rank} has left")
        else:
            self._control.failures.post(f"rank {rank}: {type(error).__name__}: {error}")

    # ---- a round ----------------------------------------------------------------------------------------

    def _has_peers(self) -> bool:
        return self.are_in_force and self._control.world_size > 1 and self._departure is None

    def _start(self) -> None:
        if not self._runs:
            self._runs, self._is_confirmed, self._have_stopped_together = True, False, False
            self._due_s = time.monotonic() + self._interval_s

    @property
    def _interval_s(self) -> float:
        return self._layout.state.interval_s or 0.0

    def _begin(self, *, stops: bool) -> None:
        number, control = self._number, self._control
        entry = LedgerEntry(
            generation=number,
            stage=self._layout.stage,
            plan_digest=self._layout.plan.digest,
            finished=stops,
            place=Place.BACKGROUND,
        )
        where = f"rank {control.rank} of {control.world_size} waited for the others in round {number} in the"
        where += f" background of {control.name}"
        # A rank that stops opens its rounds early: the others have their interval before that.
        patience = control.patience(lambda: where, control.timeout_s + self._interval_s)
        try:
            self._open = _Open(control.launch_max(pack(entry)), patience)
        except BaguaError as error:
            self._fail(error)
            return
        if self._is_confirmed:
            self._launch(self._open)

    def _launch(self, open_: _Open) -> None:
        open_.is_launched = True
        self._pipeline.begin()
        for bucket in self._layout.plan.buckets:
            ready = self._layout.gradients.stage(self._layout.state, bucket.index, None)
            self._pipeline.ready(bucket.index, ready)

    def _advance(self) -> bool:
        """Take the open round as far as it goes now; whether it is over, in whatever way."""
        open_ = self._open
        if open_ is None:
            return True
        if self._read(open_) and self._open is not None:
            if not open_.is_launched:
                self._launch(open_)
            if self._pipeline.is_over():
                return True
        if self._open is not None:
            self._look(open_)
        return self._open is None

    def _read(self, open_: _Open) -> bool:
        """Read the round's ledger, if it is there."""
        if open_.result is None and open_.ledger.is_done():
            try:
                result = unpack(open_.ledger.wait())
                verdict.raise_if_out_of_step(result, self._control, self._place)
                open_.result, self._is_confirmed = result, True
            except BaguaError as error:
                self._fail(error)
        return open_.result is not None

    def _look(self, open_: _Open) -> None:
        now = time.monotonic()
        if now < open_.looked_s + _LOOK_S:
            return
        open_.looked_s = now
        if not self._has_ended():
            try:
                open_.patience.look()
            except BaguaError as error:
                self._fail(error)

    def _complete(self, *, takes: bool) -> None:
        open_ = self._open
        if open_ is None or (self._pipeline.has_failed() and self._has_ended()):
            return
        self._pipeline.wait()
        self._pipeline.confirm()
        if takes:
            self._layout.state.commit()
        else:
            self._layout.state.rollback()
        self._open = None
        self._number += 1
        self._due_s = time.monotonic() + self._interval_s
        if open_.result is not None and open_.result.all_finished:
            self._runs, self._have_stopped_together = False, True

    def _fail(self, error: BaguaError) -> None:
        """A rank that left in good order looks like one that died, to the libraries."""
        if not self._has_ended():
            self._pipeline.fail(error)
            raise error

    def _has_ended(self) -> bool:
        """Has a rank left, and so ended the rounds for good?"""
        if self._departure is None and (news := self._control.departures.poll()) is not None:
            self._departure = news
            self._runs, self._open = False, None
            self._pipeline.abandon()
            _log.warning(
                "%s: no more rounds on %s, this rank trains on alone; close() on every rank waits for all",
                news,
                self._control.name,
            )
        return self._departure is not None

    def _refuse_departed(self, what: str) -> None:
        if self.are_in_force and self._departure is not None:
            raise PeerError(
                f"{what} after the rounds have ended",
                expected="all ranks to take part",
                got=self._departure,
                fix="close() the attachment on every rank when it is done; that waits for the others",
            )

    def _place(self) -> list[tuple[str, str]]:
        mine = {"the round in the background": self._number, "the stage of the algorithm": self._layout.stage}
        return [*((what, str(value)) for what, value in mine.items()), *self._layout.describe()]
