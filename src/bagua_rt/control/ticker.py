"""A thread that looks around a few times a second, whatever this rank's other threads are busy with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("bagua_rt")
_TICK_S = 0.2
_JOIN_S = 5.0


class Ticker:
    """Calls a function now and then, on a daemon thread of its own: it may wait for the store.

    Args:
        name: The thread's name.
        call: What to call. It reports its own errors; one that it raises is logged.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._call = call
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_over.set()
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        while not self._is_over.wait(_TICK_S):
            try:
                self._call()
            except Exception:
                _log.exception("what is called now and then raised")
