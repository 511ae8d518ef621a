"""This rank's side of the generation ledger: it writes the entries, and reads what all ranks say together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bagua_rt.attach import verdict
from bagua_rt.attach.agreement import Line
from bagua_rt.attach.layout import Layout
from bagua_rt.attach.steps import Steps
from bagua_rt.control import Control, LedgerEntry, LedgerResult, PendingMax, Place, pack, unpack
from bagua_rt.errors import BaguaError
from bagua_rt.scheduler import Pipeline


class Accord:
    """What the ranks of an attachment tell each other, beside the data.

    Args:
        layout: The plan in force.
        pipeline: Fails where the ranks turn out to be in different places.
        control: The control lane.

    Attributes:
        generation: Number of the generation that is open, or comes next.
        has_data: False while this rank only goes along with the others' generations (join).
        steps: How far the optimizers have gone.
    """

    def __init__(self, layout: Layout, pipeline: Pipeline, control: Control) -> None:
        self.generation = 0
        self.has_data = True
        self.steps = Steps(layout.state.context.optimizers, layout.params)
        self._layout = layout
        self._pipeline = pipeline
        self._control = control
        self._place = Place.BACKWARD

    def launch(
        self,
        missing: Sequence[bool] | bytes | None = None,
        *,
        nonfinite: bool = False,
        aborted: bool = False,
        place: Place = Place.BACKWARD,
    ) -> PendingMax:
        """Say where this rank is, and begin to hear where the others are.

        Args:
            missing: For each parameter, had it no gradient? None: nothing to say about that.
            nonfinite: Is a gradient of this rank not finite?
            aborted: Did its backward raise?
            place: Where it is.
        """
        self._place = place
        layout = self._layout
        entry = LedgerEntry(
            generation=self.generation,
            stage=layout.stage,
            plan_digest=layout.plan.digest,
            missing=bytes(len(layout.params)) if missing is None else missing,
            aborted=aborted,
            nonfinite=nonfinite,
            finished=not self.has_data,
            steps=self.steps.digest() if layout.state.bit_equal else bytes(8),
            place=place,
        )
        return self._control.launch_max(pack(entry))

    def read(self, ledger: PendingMax) -> LedgerResult:
        """Wait for what all ranks say together.

        Raises:
            LayoutMismatchError: they are in different places, or their optimizers have gone apart.
            CollectiveError: a rank did not come.
        """
        result = unpack(ledger.wait())
        verdict.raise_if_out_of_step(result, self._control, self._lines)
        verdict.raise_if_steps_differ(
            result, self._control, lambda: self.steps.describe() if self.has_data else []
        )
        return result

    def look_into(self, ledger: PendingMax) -> None:
        """While data is waited for: ranks that differ launch different things, so say so at once."""
        if ledger.is_done():
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
        try:
            yield
        except BaguaError as error:
            self._pipeline.fail(error)
            raise

    def describe(self) -> list[Line]:
        """Where this rank is, between two generations."""
        steps = self.steps.describe() if self._layout.state.bit_equal else []
        return [("the generation", str(self.generation)), *steps]

    def _lines(self) -> list[Line]:
        """Where this rank is, for comparing with the others once they are known to differ."""
        mine = {
            "the generation": self.generation,
            "the stage of the algorithm": self._layout.stage,
            "the place": self._place.value,
        }
        return [*((what, str(value)) for what, value in mine.items()), *self._layout.describe()]
