"""The end of a backward, seen from inside it.

Autograd's ``queue_callback`` fires at the end of the graph task in which it was called. A reentrant
activation checkpoint runs a nested task, whose end is not the end of the backward. While a nested task ends,
the node of the outer task that started it is still being evaluated: `EndOfBackward` then moves on to the
outer task, through a hook on that node, until no outer task is left.

An exception in backward destroys the graph task, and with it the callback: `EndOfBackward.callback` is dead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from bagua_rt.attach.untraced import untraced

_queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def is_running() -> bool:
    """Is the calling thread inside a backward?"""
    return bool(torch._C._current_graph_task_id() != -1)


class EndOfBackward:
    """Call `on_end` once, when the backward that runs now has computed all its gradients.

    Must be made inside a backward (in a gradient hook).

    Args:
        on_end: What to call, on the thread that ends the backward.

    Attributes:
        callback: Weak: ``callback() is None`` once the backward is over, with or without an exception.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        callback = _Callback(on_end)
        self.callback = weakref.ref(callback)  # the graph task alone keeps it alive
        _queue_callback(callback)


class _Callback:
    """What is queued in graph tasks; alive as long as one of them is."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._has_run = False

    @untraced
    def __call__(self) -> None:
        if self._has_run:
            return
        outer = torch._C._current_autograd_node()
        if outer is not None:
            outer.register_hook(lambda *_: _queue_callback(self))
            return
        self._has_run = True
        self._on_end()
