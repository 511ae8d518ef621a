"""Uneven inputs: a rank without data takes part in the others' generations with zeros, until all are done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from bagua_rt.algorithms.base import LaunchOn
from bagua_rt.attach.agreement import agree_on
from bagua_rt.errors import BaguaError, PeerError, UsageError
from bagua_rt.replicate import replicate_optimizers, replicate_tensors

_log = logging.getLogger("bagua_rt")
_HAS_DATA, _HAS_NONE, _LEFT = b"1", b"0", b"2"

if TYPE_CHECKING:
    from bagua_rt.attach.attached import Attachment


# [Note: joins end together]
# A rank that is done with two models would wait in the end of one join for ranks that wait for it in the
# other model's next generation. So the ends of joins that a thread has nested run at once, when the outermost
# ends.
_nested = threading.local()


@contextmanager
def ending_together(attachment: Attachment) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Around a join: takes what is to be done at its end, and does it when the outermost of this thread ends.

    Raises:
        Exception: the first that the ends have met, unless the body has raised.
    """
    is_outermost = not hasattr(_nested, "ends")
    if is_outermost:
        _nested.ends = {}
    ends: dict[Attachment, Callable[[], None]] = _nested.ends
    try:
        if (former := ends.pop(attachment, None)) is not None:  # joined once more within the same outer one
            former()
        yield partial(ends.__setitem__, attachment)
    except Exception:
        for error in _end(list(ends.values())) if is_outermost else ():
            _log.warning("while leaving join(): %s", error)
        raise
    finally:
        if is_outermost:
            del _nested.ends
    if is_outermost and (errors := _end(list(ends.values()))):
        raise errors[0]


def _end(ends: Sequence[Callable[[], None]]) -> list[Exception]:
    """Call all of `ends` at once; each waits for other ranks. Returns what they have raised."""
    errors: list[Exception] = []

    def attempt(end: Callable[[], None]) -> None:
        try:
            end()
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=attempt, args=(end,), name="bagua_rt-join", daemon=True) for end in ends[:-1]
    ]
    for thread in threads:
        thread.start()
    for end in ends[-1:]:
        attempt(end)
    for thread in threads:
        thread.join()
    return errors


class Join:
    """One use of ``with run.join():`` on one rank. Collective to make.

    Before each generation (not before each forward: one may come to nothing) all ranks say whether they still
    have data. A rank that has none goes through the generation beside the others, and the ranks that finish
    last give their model to all. Forwards send nothing: buffers are made equal after each generation.

    Args:
        attachment: What trains.
        divide_by_initial: Divide by the number of all ranks; else by those that still have data.
        throw_on_early_termination: Raise on all ranks as soon as one has no more data.

    Raises:
        UsageError: the algorithm can't be joined.
        LayoutMismatchError: the ranks' arguments differ.
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
        self._is_over = False
        self._active = list(range(attachment.context.world_size))
        settings = {
            "divide_by_initial": divide_by_initial,
            "throw_on_early_termination": throw_on_early_termination,
        }
        lines = [(f"the argument {key} of join()", str(value)) for key, value in settings.items()]
        agree_on([*lines, *engine.accord.describe()], attachment.resources.control)
        attachment.broadcast_buffers()

    def announce(self) -> None:
        """This rank begins a generation.

        Raises:
            PeerError: another rank has no more data, in the throwing mode.
        """
        self._exchange(_HAS_DATA)

    def after_generation(self) -> None:
        """A generation is over, on ranks with and without data: buffers become those of a rank that has."""
        self._attachment.broadcast_buffers(root=self._active[0])

    @property
    def correction(self) -> float:
        """What a mean over all ranks is to be multiplied by."""
        world_size = self._attachment.context.world_size
        return 1.0 if self._divide_by_initial else world_size / max(1, len(self._active))

    @property
    def can_go_on(self) -> bool:
        """Does the algorithm still communicate in backward? False where all ranks that are left know it."""
        engine = self._attachment.engine
        if not engine.is_in_step:
            return False
        # A rank without data doesn't step, and may be in an earlier stage: then the ledger tells all ranks.
        is_whole = len(self._active) == self._attachment.context.world_size
        return engine.state.launch_on is LaunchOn.GRADIENT_READY or not is_whole

    def finish(self) -> None:
        """This rank has no more data: go through the others' generations, then take the last one's model.

        Raises:
            PeerError: in the throwing mode, if other ranks still have data.
        """
        engine = self._attachment.engine
        try:
            while True:
                before = self._active
                self._exchange(_HAS_NONE)
                if not self._active:
                    break
                engine.shadow_generation()
            self._take_model(root=before[-1])
        except Exception:
            self.leave()
            raise
        finally:
            engine.join = None
        engine.accord.steps.forget()

    def leave(self) -> None:
        """This rank leaves by an exception: see its generation through, and let the others leave as well."""
        try:
            self._attachment.engine.give_up_lost_backward()
            if not self._is_over and self._attachment.engine.pipeline.failure is None:
                self._exchange(_LEFT)
        except BaguaError as error:  # the trainer's own error is the one to raise
            _log.warning("while leaving join(): %s", error)
        finally:
            self._attachment.engine.join = None

    def _exchange(self, mine: bytes) -> None:
        answers = self._attachment.resources.control.agree("join", mine)
        self._active = [rank for rank, answer in enumerate(answers) if answer == _HAS_DATA]
        if left := [rank for rank, answer in enumerate(answers) if answer == _LEFT]:
            self._is_over = True
            if mine == _LEFT:
                return
            raise PeerError(
                "a rank left join() by an exception",
                got=f"ranks that left: {', '.join(map(str, left))}",
                fix="look at that rank's own error; join again on all ranks to go on",
            )
        if self._throws and 0 < len(self._active) < len(answers):
            self._is_over = True
            done = [rank for rank in range(len(answers)) if rank not in self._active]
            raise PeerError(
                "a rank has no more data",
                expected="as many batches on every rank (throw_on_early_termination=True)",
                got=f"ranks without data: {', '.join(map(str, done))}",
                fix="end the epoch on all ranks",
            )

    def _take_model(self, root: int) -> None:
        attachment = self._attachment
        tensors = [*attachment.named.parameters.values(), *attachment.buffers.current()]
        world, device = attachment.context.world, attachment.context.device
        replicate_tensors(tensors, world, device, root)
        control = attachment.resources.control
        replicate_optimizers(attachment.context.optimizers, world, device, control, root)
