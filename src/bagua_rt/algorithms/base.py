"""The algorithm contract: a declaration, and the state that one attachment makes of it.

An algorithm decides what the buckets hold and which operations run on them; hooks, threads, launch order,
deadlines and failure belong to the runtime. To write one, subclass `Algorithm` (a frozen dataclass with its
settings) and `AlgorithmState` (whose `communicate` is the only method it must have); docs/tutorial.md
builds one.

When the methods of a state run, and where::

    method           thread     stream    when
    setup            training   compute   buckets were made: at attach, re-plan, switch, change of stage
    begin_generation training   compute   a generation begins
    stage, missing   training   compute   a bucket's contents are to be put in place (`launch_on` says when)
    communicate      loop       a lane    after stage, in bucket order on every rank
    after_backward   training   compute   a generation's gradients are final; its ledger has been agreed
    before_step      training   compute   a given optimizer is about to step; the communication is complete
    after_step       training   compute   a given optimizer has stepped
    commit           training   compute   a round of communication completed on this rank
    rollback         training   compute   a round failed; what `communicate` changed must be undone or reset
    state_dict       training   compute   a checkpoint, a re-plan or a switch; nothing is outstanding
    load_state_dict  training   compute   after `setup`, once the buckets are those of a re-plan or checkpoint
    close            training   compute   the attachment ends, or switches to another algorithm

A *generation* is one synchronised backward. A *round* is one communication of all buckets. With
`LaunchOn.TIMER` a generation is each rank's own, and rounds run beside them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal

import torch

from bagua_rt.backend import Communicator, Device, Event, Kernels, Stream
from bagua_rt.bucket import Bucket
from bagua_rt.process_group import Communicators


class LaunchOn(Enum):
    """What makes a bucket's contents ready, so that it is staged and its communication launched."""

    GRADIENT_READY = "gradient_ready"
    """The last gradient of the bucket, in backward."""
    FORWARD = "forward"
    """The forward of a generation (or its first gradient, if the model's own forward was not called)."""
    STEP_PRE = "step_pre"
    """The step of the first given optimizer, before it moves anything."""
    STEP_POST = "step_post"
    """The step of the last given optimizer, after it has moved everything; where that does not come (a
    GradScaler's skip), the next forward for training. The round is complete before the next generation,
    forward, state_dict(), switch or close(); at once, where the trainer calls the model's parts, and no
    forward of the model itself tells when."""

    TIMER = "timer"
    """`interval_s` after the round before was complete, at the next safe point: when the last given
    optimizer has stepped. `commit` comes at a later one. Nothing of a rank's training waits for other ranks:
    its generations have no ledger, and buffers are not broadcast. A state that launches so goes on like that
    until it ends."""


@dataclass(frozen=True)
class Context:
    """What a state may use.

    Attributes:
        communicators: The attachment's own: ``world``, ``intra_node``, ``inter_node``, ``lanes``.
        device: Streams and events.
        kernels: Fused operations on buckets.
        optimizers: The optimizers given to attach.
        names: The name of each attached parameter, frozen ones too.
        chunk_bytes: Most bytes in one collective of a plain sum, or None (see `operations.sum_`).
    """

    communicators: Communicators
    device: Device
    kernels: Kernels
    optimizers: tuple[torch.optim.Optimizer, ...]
    names: Mapping[torch.Tensor, str]
    chunk_bytes: int | None = None

    @property
    def world(self) -> Communicator:
        return self.communicators.world

    @property
    def world_size(self) -> int:
        return self.communicators.world.world_size


class AlgorithmState(ABC):
    """One attachment's state of an algorithm. Override what the algorithm needs.

    Args:
        context: What the state may use.
    """

    source: Literal["gradient", "weight"] = "gradient"
    """What `stage` puts into a bucket. With "gradient", a parameter without one is an error in the same
    backward (or zero, with ``find_unused_parameters``); with "weight", gradients stay each rank's own."""

    launch_on: LaunchOn = LaunchOn.GRADIENT_READY
    """Read when a generation begins."""

    scale: float = 1.0
    """Factor applied while gradients are copied in; ``1 / world_size`` makes a sum an average that
    overflows only where the average does."""

    @property
    def sparse_scale(self) -> float:
        """Factor applied to sparse gradients, which the runtime itself sums over ranks."""
        return self.scale

    takes_sparse: bool = True
    """May gradients be sparse, in every stage? They are refused at attach else."""

    interval_s: float | None = None
    """Least time between two rounds, with `LaunchOn.TIMER`; None for an algorithm that never launches so."""

    bit_equal: bool = True
    """Do all ranks hold the same bits after a step, given the same start?"""

    cuts_freely: bool = False
    """May buckets be cut anywhere? Yes where every generation communicates alike, and an element's result
    depends on no other element; so a search for the best bucket size may change them."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def alignment(self) -> int:
        """Flat buffers are padded with zeros to a multiple of this many elements."""
        return 1

    def setup(self, buckets: Sequence[Bucket]) -> None:
        """Make what the algorithm keeps for each bucket. A later call replaces what an earlier one made."""

    def stage_wanted(self) -> int:
        """The stage for the generation that begins, equal on all ranks (the ledger compares it).

        When it differs from the stage of the generation before, gradients leave the buckets and `setup`
        runs again, once.
        """
        return 0

    def begin_generation(self, generation: int) -> bool:
        """A generation begins; whether it communicates: the same answer on every rank.

        Args:
            generation: Counted from 0 at attach; goes on where a loaded checkpoint stopped.
        """
        return True

    def stage(self, bucket: Bucket, present: Sequence[int]) -> Event | None:
        """Put the contents of `bucket` in place.

        Args:
            bucket: The bucket.
            present: Indices of its parameters that have a gradient (all of them, with weights as source).

        Returns:
            The point in the compute stream behind which they are; None: behind all that is queued there.
        """
        if self.source == "weight":
            tensors = [bucket.params[i].detach() for i in present]
        else:
            tensors = [gradient(bucket.params[i]) for i in present]
        is_full = len(present) == len(bucket.views)
        views = bucket.views if is_full else [bucket.views[i] for i in present]
        device = self.context.device
        return self.context.kernels.copy_in(tensors, views, self.scale, device.compute_stream())

    def missing(self, bucket: Bucket, absent: Sequence[int]) -> None:
        """Fill in for the parameters of `bucket` that have no gradient on this rank: zero, in the mean."""
        for i in absent:
            bucket.views[i].zero_()

    @abstractmethod
    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        """Queue the operations of `bucket` on `stream`, a lane of `comm`; never wait on the host."""

    def after_backward(self, unused: frozenset[torch.Tensor]) -> None:
        """A generation's backward is complete; `unused` had no gradient on any rank."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to step; all communication launched for this step is complete."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` has stepped."""

    def commit(self) -> None:
        """A round is complete on this rank: what it changed in this state holds."""

    def rollback(self) -> None:
        """A round failed: undo what it changed in this state, or reset it."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, besides weights and the optimizers' own states: copies of it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, on this rank of as many ranks."""

    def load_from_other_world(self, state: Mapping[str, Any]) -> str:
        """Take up what still holds of what `state_dict` gave in a world of another size.

        Args:
            state: Another one on each rank, maybe: only what was equal on all ranks holds.

        Returns:
            What starts anew, for the log; empty if nothing does.
        """
        return "all that it keeps" if state else ""

    def close(self) -> None:
        """Let go of everything that was made or installed. Idempotent; runs on failure too."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """The declaration of an algorithm: its name and settings. Picklable, and reusable for many models."""

    name: ClassVar[str]

    @abstractmethod
    def bind(self, context: Context) -> AlgorithmState:
        """Make the state of one attachment.

        Raises:
            UsageError: the algorithm can't do this model, world or optimizer; the text says why.
        """


def gradient(param: torch.Tensor) -> torch.Tensor:
    """The gradient of `param`, as a tensor that is there.

    Raises:
        AttributeError: it has none; `stage` is only called with parameters that have.
    """
    grad = param.grad
    if grad is None:
        raise AttributeError("this parameter has no gradient; use `missing` for it")
    return grad
