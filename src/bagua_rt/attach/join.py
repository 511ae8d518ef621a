"""Uneven inputs: a rank without data takes part in the others' generations with zeros, until all are done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua_rt.algorithms.base import LaunchOn
from bagua_rt.errors import PeerError, UsageError
from bagua_rt.replicate import replicate_optimizers, replicate_tensors

if TYPE_CHECKING:
    from bagua_rt.attach.attached import Attachment


class Join:
    """One use of ``with run.join():`` on one rank.

    Before each generation all ranks say whether they still have data. A rank that has none goes through the
    generation beside the others, and the ranks that finish last give their model to all.

    Args:
        attachment: What trains.
        divide_by_initial: Divide by the number of all ranks; else by those that still have data.
        throw_on_early_termination: Raise on all ranks as soon as one has no more data.

    Raises:
        UsageError: the algorithm can't be joined.
    """

    def __init__(
        self, attachment: Attachment, *, divide_by_initial: bool, throw_on_early_termination: bool
    ) -> None:
        engine = attachment.engine
        if engine.state.source != "gradient" or engine.state.launch_on is not LaunchOn.GRADIENT_READY:
            raise UsageError(
                f"{attachment.algorithm.name} can't be joined in its present stage",
                expected="an algorithm that communicates gradients in backward",
                fix="give every rank the same number of batches",
            )
        self._attachment = attachment
        self._divide_by_initial = divide_by_initial
        self._throws = throw_on_early_termination
        self._active = list(range(attachment.context.world_size))
        self._announced = -1

    def announce(self) -> bool:
        """This rank is about to begin a generation; False if it has said so before.

        Raises:
            PeerError: another rank has no more data, in the throwing mode.
        """
        generation = self._attachment.engine.generations
        if self._announced == generation:
            return False
        self._announced = generation
        self._exchange(has_data=True)
        return True

    @property
    def correction(self) -> float:
        """What a mean over all ranks is to be multiplied by."""
        world_size = self._attachment.context.world_size
        return 1.0 if self._divide_by_initial else world_size / max(1, len(self._active))

    def finish(self) -> None:
        """This rank has no more data: go through the others' generations, then take the last one's model.

        Raises:
            PeerError: in the throwing mode, if other ranks still have data.
        """
        while True:
            before = self._active
            self._exchange(has_data=False)
            if not self._active:
                break
            self._attachment.broadcast_buffers()
            self._attachment.engine.shadow_generation()
        self._take_model(root=before[-1])
        self._attachment.engine.accord.steps.forget()

    def _exchange(self, *, has_data: bool) -> None:
        answers = self._attachment.resources.control.agree("join", b"1" if has_data else b"0")
        self._active = [rank for rank, answer in enumerate(answers) if answer == b"1"]
        if self._throws and 0 < len(self._active) < len(answers):
            done = [rank for rank in range(len(answers)) if rank not in self._active]
            raise PeerError(
                "a rank has no more data",
                expected="as many batches on every rank (throw_on_early_termination=True)",
                got=f"ranks without data: {', '.join(map(str, done))}",
                fix="end the epoch on all ranks",
            )

    def _take_model(self, root: int) -> None:
        attachment = self._attachment
        tensors = [*attachment.named.parameters.values(), *attachment.current_buffers()]
        world, device = attachment.context.world, attachment.context.device
        replicate_tensors(tensors, world, device, root)
        control = attachment.resources.control
        replicate_optimizers(attachment.context.optimizers, world, device, control, root)
