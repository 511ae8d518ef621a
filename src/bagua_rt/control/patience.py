"""Waiting for other ranks: with a deadline, an eye on their failures, and a word at half time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bagua_rt.control.failure_board import FailureBoard
from bagua_rt.control.roll_call import RollCall, told
from bagua_rt.errors import CollectiveTimeoutError, PeerError

_log = logging.getLogger("bagua_rt")
_ANSWER_S = 0.5  # how long the other ranks have to answer a roll call


class Patience:
    """One wait of one rank. It begins when this is made.

    Args:
        board: Where failures of other ranks are read.
        roll_call: Asks them what they are doing.
        timeout_s: The deadline.
        where: Says what is waited for, as "rank 0 waited for …".
    """

    def __init__(
        self, board: FailureBoard, roll_call: RollCall, timeout_s: float, where: Callable[[], str]
    ) -> None:
        self._board = board
        self._roll_call = roll_call
        self._timeout_s = timeout_s
        self._where = where
        self._began = time.monotonic()
        self._has_warned = False

    @property
    def left_s(self) -> float:
        """Time until the deadline; 0 when it has passed."""
        return max(0.0, self._began + self._timeout_s - time.monotonic())

    def look(self) -> None:
        """Nothing has come yet: go on waiting, or not. Logs who is missing once half the time has passed.

        Raises:
            PeerError: another rank posted a failure, or the store is gone.
            CollectiveTimeoutError: the deadline has passed; tells what the other ranks are doing.
        """
        if (news := self._board.poll()) is not None:
            raise PeerError(f"{self._where()}, but another rank failed", got=news)
        left_s = self.left_s
        if left_s == 0.0:
            raise CollectiveTimeoutError(
                f"{self._where()}, and the deadline of {self._timeout_s:g} s passed",
                expected="all ranks to take part",
                got=self.who_is_there() or "no word from the others",
                fix="look at the ranks that are late or silent; timeout_s of init() is the deadline",
            )
        if not self._has_warned and left_s < self._timeout_s / 2:
            self._has_warned = True
            _log.warning("%s for %g s: %s", self._where(), self._timeout_s / 2, self.who_is_there())

    def who_is_there(self) -> str:
        """What the other ranks are doing, the silent ones first. Takes at most half a second."""
        return told(self._roll_call.ask(_ANSWER_S)) or self._roll_call.problem
