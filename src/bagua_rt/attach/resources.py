"""What an attachment owns outside of the model: lanes, communicators, a control lane and an event loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from bagua_rt.algorithms.base import Algorithm
from bagua_rt.attach.agreement import agree_on
from bagua_rt.control import Control
from bagua_rt.process_group import Communicators, ProcessGroup
from bagua_rt.scheduler import EventLoop, Pipeline


class Resources:
    """Made at attach, collectively; closed by each rank on its own.

    Every attachment has lanes, groups and a loop of its own, so that two models in one process never wait
    for each other's order of launches.

    Args:
        group: The process group.
        name: The attachment's name.

    Raises:
        UsageError: a rank refused to attach; tells why.
        CollectiveError: a rank did not come.
    """

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self.group = group
        self.name = name
        self.describe: Callable[[], str] = lambda: "attaching a model"
        self._undo = ExitStack()
        with ExitStack() as undo:
            self.control: Control = group.control(name)
            undo.callback(self.control.close)
            self.communicators: Communicators = group.connect(name, group.lanes, hierarchical=True)
            undo.callback(self.communicators.close)
            self.loop = EventLoop(f"bagua_rt/{name}", self._answer)
            undo.callback(self.loop.close)
            self._undo = undo.pop_all()
        self.pipeline = Pipeline(
            self.loop,
            group.backend.device,
            self.communicators,
            self.control,
            name,
        )

    def _answer(self) -> None:
        """On the loop thread: tell a rank that waits what this one is doing."""
        self.control.roll_call.answer(self.describe)

    def agree_on_algorithm(self, algorithm: Algorithm) -> None:
        """Compare an algorithm with all ranks.

        Raises:
            LayoutMismatchError: they have different ones.
        """
        agree_on([("the algorithm", repr(algorithm))], self.control)

    def on_close(self, fn: Callable[[], None]) -> None:
        """Call `fn` when these are closed, before anything else."""
        self._undo.callback(fn)

    def close(self) -> None:
        """Close everything, the loop first. Idempotent."""
        self._undo.close()
