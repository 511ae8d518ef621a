"""What is known of the generation that is open, and what attach() was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bagua_rt.algorithms.base import LaunchOn
from bagua_rt.attach.backward import EndOfBackward

if TYPE_CHECKING:
    from bagua_rt.attach.layout import Layout


@dataclass(frozen=True)
class Options:
    """What attach() was asked for, as far as generations depend on it."""

    cap_bytes: int
    first_cap_bytes: int
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    check: bool
    commit: Literal["host", "stream"]
    chunk_bytes: int | None


class Generation:
    """What has happened so far in the generation that is open.

    Attributes:
        launch_on: When its buckets are launched.
        communicates: Whether they are.
        launches_in_backward: Whether they are as their gradients come.
        stages_early: Whether the launches begin before the ledger has been read; not where this rank's plan
            is one that the others may not have.
        full: The bucket whose last gradient has just come, to be staged with the next one; -1 if none.
        seen: For each parameter, whether its gradient came.
        none: Parameters of which autograd said that they have no gradient (a Function that returned None).
        order: The parameters in the order in which their gradients came.
        pending: For each bucket, how many of its gradients are still to come.
        staged: For each bucket, whether its contents are in place.
        end: The end of its backward; None before the first gradient.
        nonfinite: Parameters whose local gradient is not finite (with ``check=True``).
        versions: For each parameter in the plan's order, its version counter when the generation opened.
    """

    def __init__(self, layout: Layout, *, communicates: bool) -> None:
        self.launch_on = layout.state.launch_on
        self.communicates = communicates
        self.launches_in_backward = communicates and self.launch_on is LaunchOn.GRADIENT_READY
        self.stages_early = self.launches_in_backward and layout.is_confirmed
        self.full = -1
        self.seen = [False] * len(layout.params)
        self.none: list[int] = []
        self.order: list[int] = []
        self.pending = [len(bucket.params) for bucket in layout.plan.buckets]
        self.staged = [False] * len(layout.plan.buckets)
        self.end: EndOfBackward | None = None
        self.nonfinite: list[int] = []
        self.versions = [layout.params[i]._version for i in layout.plan.order]
