"""The training thread's half of an attachment: from gradient hooks to buckets, one generation at a time.

A generation is one synchronised backward. It opens at its first gradient hook (or at the forward, for
algorithms that launch there), and ends with the backward: missing gradients are filled in, the ledger is
agreed with all ranks, and gradients become the bucket's views. `Engine` owns that course of events; which
buckets hold what, and which operations run on them, the algorithm's state decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from bagua_rt.algorithms.base import AlgorithmState, LaunchOn
from bagua_rt.attach import refusals, verdict
from bagua_rt.attach.accord import Accord, Ledger
from bagua_rt.attach.background import BackgroundRounds
from bagua_rt.attach.backward import EndOfBackward, is_running
from bagua_rt.attach.by_hand import GradientsByHand
from bagua_rt.attach.generation import Generation, Options
from bagua_rt.attach.layout import Layout
from bagua_rt.attach.local import LocalGradients
from bagua_rt.attach.place import place_of
from bagua_rt.attach.untraced import skip_frames, untraced, untraced_frame
from bagua_rt.bucket import Bucket
from bagua_rt.control import NONE, UNSEEN, Control, LedgerResult, Place
from bagua_rt.errors import BaguaError, InternalError
from bagua_rt.scheduler import Pipeline

if TYPE_CHECKING:
    from bagua_rt.attach.join import Join


class Engine:
    """Drives the generations of one attachment. Everything runs on the training thread.

    Args:
        layout: The plan in force, and the algorithm's state on it.
        pipeline: Launches and waits.
        control: The control lane.
        options: What attach() was asked for.

    Attributes:
        ready_order: The parameters in the order of the last generation's gradients.
        join: The join() that is in force.
        accord: What this rank and the others tell each other.
        background: The rounds that run beside the training.
    """

    def __init__(self, layout: Layout, pipeline: Pipeline, control: Control, options: Options) -> None:
        skip_frames()
        self.layout = layout
        self.pipeline = pipeline
        self._local_depth = 0  # a count: contexts that generators hold may end in any order
        self.join: Join | None = None
        self.accord = Accord(layout, pipeline, control)
        self.background = BackgroundRounds(layout, pipeline, control)
        self._control = control
        self._options = options
        self._generation: Generation | None = None
        self._generations_alone = 0
        self.ready_order: Sequence[int] = layout.plan.order
        self._local = LocalGradients(layout.params)
        self._by_hand = GradientsByHand(layout, self.accord, control)
        self._step_is_due = False
        self._round_after_step_is_due = False
        self._stepped: set[int] = set()
        self._step_error: BaguaError | None = None
        self._step_ledger: Ledger | None = None
        self._thread = threading.get_ident()

    @property
    def generations(self) -> int:
        """How many generations there were, together with the other ranks or not: this rank's own count."""
        return self.accord.generation + self._generations_alone

    @property
    def is_synchronised(self) -> bool:
        """False within no_sync()."""
        return not self._local_depth

    @property
    def is_in_step(self) -> bool:
        """Does this rank go through its generations together with the others?"""
        return not self.background.are_in_force

    @property
    def state(self) -> AlgorithmState:
        """The algorithm's state."""
        return self.layout.state

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in launch order."""
        return self.layout.plan.buckets

    def replace_state(self, state: AlgorithmState) -> None:
        """Go on with another algorithm's state; no weights are moved. As `Layout.replace_state`."""
        self.layout.stop_search()
        self.layout.replace_state(state)
        self.background.is_paused = False
        self._step_is_due = False
        self.accord.steps.forget()

    # ---- a generation -----------------------------------------------------------------------------------

    @untraced_frame
    def on_gradient(self, index: int, param: torch.Tensor) -> None:
        """The gradient of parameter `index` was accumulated. Hot: all but the first and last only count."""
        if self.pipeline.failure is not None:
            self.pipeline.raise_failure()
        if self._local_depth:
            self._local.add(index)
            return
        generation = self._generation
        if generation is None or generation.end is None or generation.end.callback() is None:
            generation = self._begin_backward()
        if generation.full >= 0:  # every hook of its last parameter has run now, the user's too
            self._stage_bucket(generation, generation.full)
        bucket = self.layout.plan.bucket_of[index]
        if generation.seen[index] or bucket < 0:
            if not param.requires_grad:  # frozen since its forward: autograd has dropped the gradient
                return
            self._accept_without_bucket(generation, index)
        generation.seen[index] = True
        if param.grad is None:
            generation.none.append(index)
        generation.order.append(index)
        if bucket >= 0:
            generation.pending[bucket] -= 1
            if not generation.pending[bucket] and generation.stages_early:
                generation.full = bucket

    @untraced
    def _begin_backward(self) -> Generation:
        self.give_up_lost_backward()
        generation = self._generation or self._open()
        generation.end = EndOfBackward(self._end)
        return generation

    def _accept_without_bucket(self, generation: Generation, index: int) -> None:
        if generation.launch_on is LaunchOn.TIMER:  # gradients are this rank's own
            return
        if generation.seen[index]:
            raise refusals.second_gradient(self.layout.names[index])
        if index not in self.layout.plan.sparse:
            raise refusals.gradient_of_frozen(self.layout.names[index])

    def _open(self) -> Generation:
        if self.join is not None and self.accord.has_data:
            self.join.announce()
        if self._step_is_due:  # skipped: on all ranks, or one alone would never meet the others again
            self.accord.meet(Place.BEGINNING)
        self.settle()
        if self.is_in_step:  # else the plan changes at a safe point only
            self.layout.follow_into_generation()
        self.layout.enter_stage()
        if self.join is not None and not self.join.can_go_on:
            raise refusals.join_out_of_step()
        with self.accord.fatal():
            if self.layout.takes_order(self.accord.generation):
                self.accord.meet(Place.ORDER)
            self.layout.improve(self.accord.generation, self.ready_order)
        self._step_error = None
        self._step_is_due = False
        number = self.accord.generation if self.is_in_step else self.generations
        communicates = self.state.begin_generation(number)
        generation = self._generation = Generation(self.layout, communicates=communicates)
        if communicates and generation.launch_on in (LaunchOn.GRADIENT_READY, LaunchOn.FORWARD):
            self.pipeline.begin()
            if generation.launch_on is LaunchOn.FORWARD:
                self._stage_rest(generation)
        return generation

    @untraced
    def _stage_bucket(self, generation: Generation, index: int) -> None:
        generation.full = -1
        ready = self.layout.gradients.stage(self.state, index, generation.seen)
        if self._options.check:
            generation.nonfinite += self.layout.gradients.nonfinite(self.state, index)
        self.pipeline.ready(index, ready)
        generation.staged[index] = True

    def _stage_rest(self, generation: Generation) -> None:
        for index, staged in enumerate(generation.staged):
            if not staged:
                self._stage_bucket(generation, index)

    @untraced
    def _end(self) -> None:
        """The backward has computed all its gradients."""
        generation = self._generation
        if generation is None:
            raise InternalError("a backward ended outside of a generation")
        if generation.launch_on is LaunchOn.TIMER:
            self._end_alone(generation)
            return
        missing = self._missing(generation)
        result = self._complete(generation, missing)
        unseen = (i for i in self.layout.plan.order if not generation.seen[i])
        self.ready_order = (*generation.order, *unseen)
        self._close_generation()
        try:
            self._judge(result, missing, generation)
        except BaguaError as error:
            self._step_error = error
            self.state.rollback()
            if self._control.failure is not None:
                self.pipeline.fail(error)
            raise
        unused = frozenset(result.missing_everywhere)
        if generation.launches_in_backward:
            self.layout.gradients.expose(unused, self._correction())
            self.state.commit()
        elif self.state.source == "gradient":
            if result.any_nonfinite:
                self.layout.gradients.make_nonfinite()
            self._step_is_due = generation.communicates
        if generation.launch_on is LaunchOn.STEP_POST:
            self._round_after_step_is_due = generation.communicates
            self._stepped.clear()
        self.state.after_backward(frozenset(self.layout.params[i] for i in unused))

    def _end_alone(self, generation: Generation) -> None:
        self._close_generation()
        try:
            self._refuse_moved_weights(generation)
        except BaguaError as error:
            self._step_error = error
            raise
        self.state.after_backward(frozenset())

    def _complete(self, generation: Generation, missing: bytearray) -> LedgerResult:
        """Launch what is left, and the ledger beside it; wait for both."""
        if generation.stages_early:
            self._stage_rest(generation)
        nonfinite = bool(generation.nonfinite)
        if generation.launch_on is LaunchOn.STEP_PRE and self.state.source == "gradient":
            nonfinite = not self.layout.gradients.are_finite()
        return self._exchange(
            generation,
            lambda: self.accord.launch(missing, nonfinite=nonfinite),
            lambda: self._stage_rest(generation),
            lambda: self.layout.sparse.add_up(self.state.sparse_scale * self._correction()),
        )

    def _exchange(
        self,
        generation: Generation,
        say: Callable[[], Ledger],
        stage: Callable[[], None],
        add_up: Callable[[], None],
    ) -> LedgerResult:
        """Agree, and communicate what is left: in one order, whether the backward went well or not."""
        launches = generation.launches_in_backward
        with self.accord.fatal():
            ledger = say()
            if not self.layout.is_confirmed:  # else ranks with different buckets would meet in one collective
                self.accord.read(ledger)
                self.layout.is_confirmed = True
            if launches:
                stage()
            if self.layout.plan.sparse:
                add_up()
            if launches:
                self.pipeline.wait(lambda: self.accord.look_into(ledger))
            return self.accord.read(ledger)

    def _correction(self) -> float:
        return 1.0 if self.join is None else self.join.correction

    def _missing(self, generation: Generation) -> bytearray:
        missing = bytearray(len(self.layout.params))
        if self.state.source == "gradient":
            for i in self.layout.plan.order:
                if not generation.seen[i] and not self._local.holds(i):
                    missing[i] = UNSEEN
            for i in generation.none:
                missing[i] = NONE
        return missing

    def _close_generation(self) -> None:
        self._generation = None
        self._local.clear(self.layout.plan.order)
        if self.is_in_step:
            self.accord.generation += 1
        else:
            self._generations_alone += 1
        if self.join is not None:
            self.join.after_generation()

    def _judge(self, result: LedgerResult, missing: bytearray, generation: Generation) -> None:
        self.accord.has_loaded |= result.any_loaded and result.any_aborted
        verdict.raise_if_given_up(result, self._control, self.accord.generation - 1, is_mine=False)
        if result.any_loaded:
            self.accord.compare_what_was_loaded(result)
        if self._options.check:
            mine = [self.layout.names[i] for i in generation.nonfinite]
            verdict.raise_if_not_finite(result, self._control, mine)
        if not self._options.find_unused_parameters:
            verdict.raise_if_unused(result, self._control, self.layout.names, missing)
        self._refuse_moved_weights(generation)

    def _refuse_moved_weights(self, generation: Generation) -> None:
        """A step inside of backward (in a user's gradient hook) moves by local gradients, unnoticed."""
        for i, version in zip(self.layout.plan.order, generation.versions, strict=True):
            if self.layout.params[i]._version != version:
                raise refusals.weights_moved(self.layout.names[i])

    def give_up_lost_backward(self) -> None:
        """If the backward of the open generation raised, see the generation through with all ranks.

        Every rank launches every bucket of a generation, or they would pair up wrongly in the next.
        """
        generation = self._generation
        if generation is None or generation.end is None or self.pipeline.failure is not None:
            return
        if is_running() and generation.end.callback() is not None:
            return
        is_alone = generation.launch_on is LaunchOn.TIMER
        result = None if is_alone else self._complete_with_zeros(generation, aborted=True)
        self._close_generation()
        self._step_error = refusals.step_after_exception()
        if result is None:
            return
        self.state.rollback()
        verdict.raise_if_given_up(result, self._control, self.accord.generation - 1, is_mine=True)

    def shadow_generation(self) -> None:
        """Go through a generation of the other ranks with nothing to add: this rank has no more data."""
        self.accord.has_data = False
        try:
            result = self._complete_with_zeros(self._open())
        finally:
            self.accord.has_data = True
        self._close_generation()
        verdict.raise_if_given_up(result, self._control, self.accord.generation - 1, is_mine=False)
        self.state.commit()

    def _complete_with_zeros(self, generation: Generation, *, aborted: bool = False) -> LedgerResult:
        def stage() -> None:
            for index, staged in enumerate(generation.staged):
                if not staged:
                    self.buckets[index].flat.zero_()
                    self.pipeline.ready(index)

        say = partial(self.accord.launch, aborted=aborted)
        return self._exchange(generation, say, stage, self.layout.sparse.add_nothing)

    # ---- forward and step -------------------------------------------------------------------------------

    @untraced
    def on_forward(self, training: bool) -> None:
        """The attached module's own forward is about to run, outside of a backward."""
        self.pipeline.raise_failure()
        self.give_up_lost_backward()
        trains = training and torch.is_grad_enabled()
        if self.state.launch_on is LaunchOn.STEP_POST and (trains or self._stepped):
            self.settle()  # weights that this forward uses must not move under its backward
        if self.is_in_step and not self.pipeline.is_open and self._generation is None:
            self.layout.follow_the_model(trains=trains)
            self.layout.enter_stage()
        if (
            self.is_synchronised
            and trains
            and self._generation is None
            and self.state.launch_on is LaunchOn.FORWARD
        ):
            self._open()

    def meet_before_buffers(self) -> None:
        """All ranks will send buffers now; where they may be in a step instead, make sure that none is."""
        if self._step_is_due:
            self.accord.meet(Place.FORWARD)

    def settle(self) -> None:
        """Wait for the round that is outstanding, if one is, and do the one that follows the step."""
        if not self.is_in_step:  # for rounds in the background only `halt` waits
            return
        self._finish_round()
        if self._round_after_step_is_due:
            self._launch_round()
            self._finish_round()

    def halt(self, *, takes: bool) -> None:
        """Between steps: settle, and stop the rounds in the background.

        Args:
            takes: Let results of rounds in the background move the weights; else they are dropped.
        """
        self.pipeline.raise_failure()
        self.give_up_lost_backward()
        self.settle()
        if self.is_in_step and self.state.interval_s is not None:
            self.layout.enter_stage()  # other ranks may be in it already, and wait for this one
        self.background.stop(takes=takes)

    def _finish_round(self) -> None:
        if self.pipeline.is_open:
            if (ledger := self._step_ledger) is None:
                self.pipeline.wait()
            else:
                with self.accord.fatal():
                    self.pipeline.wait(lambda: self.accord.look_into(ledger))
                    self.accord.read(ledger)
                self._step_ledger = None
            self.state.commit()

    def _launch_round(self) -> None:
        if self._step_is_due:  # a rank that skips this step alone says so with its next generation's ledger
            self._step_ledger = self.accord.launch(place=Place.STEP)
        self._step_is_due = self._round_after_step_is_due = False
        self.pipeline.begin()
        for bucket in self.buckets:
            self.pipeline.ready(bucket.index, self.layout.gradients.stage(self.state, bucket.index, None))

    @untraced
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The commit gate: nothing moves unless the gradients are agreed and the communication is complete.

        With ``commit="stream"`` only the compute stream waits for the communication; what fails there is
        raised when the next round begins.

        Raises:
            UsageError: gradients were not synchronised, or their backward raised.
            BaguaError: what ended the generation, or the attachment.
        """
        self.pipeline.raise_failure()
        if is_running():
            raise refusals.step_in_backward()
        self.give_up_lost_backward()
        if self._step_error is not None:
            raise self._step_error
        if self.state.source == "gradient":
            self._local.refuse_step(self.layout.names)
        if self.join is None:
            self._by_hand.compare(optimizer, self.generations)
        if self._step_is_due:
            self._launch_round()
        if self.is_in_step:
            self._finish_round()
        else:
            self.background.look()
        if self._options.commit == "host":
            self.pipeline.confirm()
        self.state.before_step(optimizer)

    @untraced
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` has stepped."""
        self._stepped.add(id(optimizer))
        self.state.after_step(optimizer)
        if any(id(each) not in self._stepped for each in self.state.context.optimizers):
            return
        if self._round_after_step_is_due:
            (self.settle if self.layout.is_called_in_parts else self._launch_round)()
        elif not self.is_in_step:
            self._stepped.clear()
            self.background.at_safe_point()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside only accumulate; it is the backward's place that counts."""
        self.give_up_lost_backward()
        self._local_depth += 1
        try:
            yield
        finally:
            self._local_depth -= 1

    def describe(self) -> str:
        """What this rank is doing, for ranks that wait for it. Called on the ticker's thread."""
        generation = self._generation
        if generation is None:
            doing = f"between generations, the last one was {self.generations - 1}"
        else:
            came, count = len(generation.order), len(self.layout.plan.order)
            doing = f"in generation {self.generations}, {came} of {count} gradients came"
        return f"{doing}; its trainer is at {place_of(self._thread)}"

    def close(self, *, orderly: bool) -> None:
        """End the attachment: gradients leave the buckets, the state lets go.

        Args:
            orderly: Wait for what is outstanding; without, nothing is waited for.
        """
        if self.accord.is_waiting or (is_running() and self._generation):  # in another thread, or below this
            self.pipeline.fail(refusals.closed_under_way())
        try:
            if orderly and self.pipeline.failure is None:
                self.halt(takes=True)
                self.pipeline.synchronize()
        finally:
            self.layout.plan.release_gradients(has_failed=self.pipeline.failure is not None)
            self.state.close()
