"""This rank's side of the generation ledger: it writes the entries, and reads what all ranks say together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bagua_rt.attach import fingerprint, verdict
from bagua_rt.attach.agreement import Line, agree_on
from bagua_rt.attach.layout import Layout
from bagua_rt.attach.steps import Steps
from bagua_rt.control import Control, LedgerEntry, LedgerResult, PendingMax, Place, pack, unpack
from bagua_rt.errors import interrupted
from bagua_rt.scheduler import Pipeline

_MOST_BESIDE = 8  # forwards that a rank may be ahead of the others'


@dataclass(frozen=True)
class Ledger:
    """An entry of this rank that was launched, to be read together with the others'."""

    pending: PendingMax
    place: Place


class Accord:
    """What the ranks of an attachment tell each other, beside the data.

    Args:
        layout: The plan in force.
        pipeline: Fails where the ranks turn out to be in different places.
        control: The control lane.

    Attributes:
        generation: Number of the generation that is open, or comes next.
        generations_loaded: How many of them a checkpoint brought along.
        has_data: False while this rank only goes along with the others' generations (join).
        steps: How far the optimizers have gone.
        has_loaded: State was loaded into the model or an optimizer, and the other ranks don't know it yet.
        describe_buffers: Says what the buffers are.
    """

    def __init__(self, layout: Layout, pipeline: Pipeline, control: Control) -> None:
        self.generation = self.generations_loaded = 0
        self.has_data = True
        self.steps = Steps(layout.state.context.optimizers, layout.params)
        self._layout = layout
        self._pipeline = pipeline
        self._control = control
        self.has_loaded = False
        self.describe_buffers: Callable[[], list[Line]] = list
        self._waits = 0
        self._beside: deque[Ledger] = deque()

    def launch(
        self,
        missing: bytes | bytearray | None = None,
        *,
        nonfinite: bool = False,
        aborted: bool = False,
        place: Place = Place.BACKWARD,
    ) -> Ledger:
        """Say where this rank is, and begin to hear where the others are.

        Args:
            missing: As `LedgerEntry.missing`; None: nothing to say about that.
            nonfinite: Is a gradient of this rank not finite?
            aborted: Did its backward raise?
            place: Where it is.
        """
        layout = self._layout
        says_loaded = self.has_loaded and layout.state.bit_equal and place is Place.BACKWARD
        entry = LedgerEntry(
            generation=self.generation,
            stage=layout.stage,
            plan_digest=layout.plan.digest,
            missing=bytes(len(layout.params)) if missing is None else missing,
            aborted=aborted,
            nonfinite=nonfinite,
            finished=not self.has_data,
            loaded=says_loaded,
            steps=self.steps.digest() if layout.state.bit_equal else bytes(8),
            place=place,
        )
        self.has_loaded &= not says_loaded
        return Ledger(self._control.launch_max(pack(entry)), place)

    def launch_beside(self, place: Place) -> None:
        """Say where this rank is, on the way to something that waits for nobody: it is read later on."""
        self._beside.append(self.launch(place=place))

    def look_beside(self) -> None:
        """Read what has come of `launch_beside`; wait only if much is outstanding."""
        while self._beside and (self._beside[0].pending.is_done() or len(self._beside) > _MOST_BESIDE):
            self._read(self._beside.popleft())

    def read(self, ledger: Ledger) -> LedgerResult:
        """Wait for what all ranks say together.

        Raises:
            LayoutMismatchError: they are in different places, or their optimizers have gone apart.
            CollectiveError: a rank did not come.
        """
        while self._beside:
            self._read(self._beside.popleft())
        return self._read(ledger)

    def _read(self, ledger: Ledger) -> LedgerResult:
        result = unpack(ledger.pending.wait())
        verdict.raise_if_out_of_step(result, self._control, lambda: self._lines(ledger.place))
        verdict.raise_if_steps_differ(
            result, self._control, lambda: self.steps.describe() if self.has_data else []
        )
        return result

    def compare_what_was_loaded(self, result: LedgerResult) -> None:
        """Some rank has loaded state: make sure that all ranks hold the same.

        Raises:
            LayoutMismatchError: they don't.
        """
        if result.any_finished:  # a rank without data lags behind, and takes the last one's model later
            return
        context = self._layout.state.context
        weights = fingerprint.of_weights(dict(zip(self._layout.names, self._layout.params, strict=True)))
        states = fingerprint.of_optimizers(context.optimizers, context.names)
        with self.fatal():
            agree_on(
                [*weights, *states],
                self._control,
                "the ranks hold different state since load_state_dict()",
                "load the same on every rank; close() and attach() again start from rank 0's",
            )

    def look_into(self, ledger: Ledger) -> None:
        """While data is waited for: ranks that differ launch different things, so say so at once."""
        if ledger.pending.is_done():
            self.read(ledger)

    def meet(self, place: Place) -> None:
        """Make sure that all ranks are at one place, before they communicate there.

        Raises:
            LayoutMismatchError: they are not.
        """
        with self.fatal():
            self.read(self.launch(place=place))

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """An error in here leaves the ranks in different places: it ends the attachment on all of them."""
        self._waits += 1
        try:
            yield
        except BaseException as error:
            self._pipeline.fail(interrupted(error))
            raise
        finally:
            self._waits -= 1

    @property
    def is_waiting(self) -> bool:
        """Is a thread in `fatal`?"""
        return self._waits > 0

    def go_on_at(self, generation: int) -> None:
        """The next generation is that of a checkpoint."""
        self.generations_loaded += generation - self.generation
        self.generation = generation

    def describe(self) -> list[Line]:
        """Where this rank is, between two generations."""
        steps = self.steps.describe() if self._layout.state.bit_equal else []
        return [("the generation", str(self.generation)), *steps]

    def _lines(self, place: Place) -> list[Line]:
        """Where this rank is, for comparing with the others once they are known to differ."""
        return [
            ("the generation", str(self.generation)),
            ("the stage of the algorithm", str(self._layout.stage)),
            *self.describe_buffers(),
            ("the place", place.value),
            *self._layout.describe(),
        ]
