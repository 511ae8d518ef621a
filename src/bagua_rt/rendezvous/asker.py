"""Questions to a store that may never answer.

[Note: a store that is silent]
    The process that serves the store can be stopped, or its machine hang, with every connection open. torch's
    client then waits for ever, whatever its timeout. So each client asks in a thread of its own, and whoever
    waits for the answer gives up in time: what is only looked at counts as not there, what must be written is
    a CollectiveTimeoutError. The question stays; the next one is asked when it has been answered.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")
_JOIN_S = 0.5
_askers: weakref.WeakSet[Asker] = weakref.WeakSet()
_ending = threading.Event()


class NoAnswerError(TimeoutError):
    """There was no answer in time. Of its own kind: signal handlers raise TimeoutError in whatever waits."""


class _Question:
    """Something to ask, and what came of it."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self._answer: Any = None
        self._error: BaseException | None = None
        self.is_answered = threading.Event()

    def run(self) -> None:
        try:
            self._answer = self._ask()
        except BaseException as error:  # raised where the answer is waited for
            self._error = error
        finally:
            self.is_answered.set()

    def answer(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer


class Asker:
    """Asks one client's questions in a thread of its own ([Note: a store that is silent]).

    Args:
        interrupt: Ends the question that is open, with an error; for the end, or it would never come.
    """

    def __init__(self, interrupt: Callable[[], None] = lambda: None) -> None:
        self._interrupt = interrupt
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open: _Question | None = None
        self._lock = threading.Lock()
        _askers.add(self)

    def ask(self, question: Callable[[], _T], timeout_s: float, *, late_too: bool = False) -> _T:
        """The answer to `question`. Any thread may ask; they take turns.

        Args:
            question: What to ask.
            timeout_s: How long to wait for the answer.
            late_too: Ask it behind the one that is open, though nobody waits any more.

        Raises:
            NoAnswerError: there was none in time, or not even one to an earlier question.
            Exception: what the question met.
        """
        deadline = time.monotonic() + timeout_s
        asked = _Question(question)
        if _ending.is_set():
            raise NoAnswerError
        if not self._lock.acquire(timeout=timeout_s):
            if late_too:
                self._questions.put(asked)
            raise NoAnswerError
        try:
            if self._open is not None:
                try:
                    self._await(self._open, deadline)
                except NoAnswerError:
                    if late_too:
                        self._put(asked)
                    raise
            self._put(asked)
            self._await(asked, deadline)
        finally:
            self._lock.release()
        answer: _T = asked.answer()
        return answer

    def _await(self, asked: _Question, deadline: float) -> None:
        self._open = asked
        if not asked.is_answered.wait(max(0.0, deadline - time.monotonic())):
            raise NoAnswerError
        self._open = None

    @property
    def is_stuck(self) -> bool:
        """Is a question open that was not answered in time?"""
        asked = self._open
        return asked is not None and not asked.is_answered.is_set() and not self._lock.locked()

    def _put(self, question: _Question) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_serve, args=(self._questions,), name="bagua_rt-store", daemon=True
            )
            self._thread.start()
        self._questions.put(question)

    def close(self) -> None:
        """End the thread, as soon as it is through."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._questions.put(None)
            if self.is_stuck:
                self._interrupt()
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def __del__(self) -> None:
        self._questions.put(None)


@atexit.register
def _end() -> None:
    """A thread that comes back from C++ while the interpreter ends would abort the process."""
    _ending.set()
    for asker in list(_askers):
        asker.close()


def _serve(questions: SimpleQueue[_Question | None]) -> None:
    while (question := questions.get()) is not None:
        question.run()
        del question  # nothing lives on because nobody asks
