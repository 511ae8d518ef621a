"""The training thread's half of an attachment: from gradient hooks to buckets, one generation at a time.

A generation is one synchronised backward. It opens at its first gradient hook (or at the forward, for
algorithms that launch there), and ends with the backward: missing gradients are filled in, the ledger is
agreed with all ranks, and gradients become the bucket's views. `Engine` owns that course of events; which
buckets hold what, and which operations run on them, the algorithm's state decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bagua_rt.algorithms.base import AlgorithmState, Context, LaunchOn
from bagua_rt.attach import verdict
from bagua_rt.attach.backward import EndOfBackward, is_running
from bagua_rt.attach.gradients import Gradients
from bagua_rt.attach.plan import Plan
from bagua_rt.attach.watch import ParameterWatch
from bagua_rt.bucket import Bucket
from bagua_rt.control import Control, LedgerEntry, LedgerResult, PendingMax, pack, unpack
from bagua_rt.errors import BaguaError, InternalError, UsageError
from bagua_rt.scheduler import Pipeline


@dataclass(frozen=True)
class Options:
    """What attach() was asked for, as far as generations depend on it."""

    cap_bytes: int
    first_cap_bytes: int
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    check: bool


class Generation:
    """What has happened so far in the generation that is open.

    Attributes:
        launch_on: When its buckets are launched.
        communicates: Whether they are.
        seen: For each parameter, whether its gradient came.
        order: The parameters in the order in which their gradients came.
        pending: For each bucket, how many of its gradients are still to come.
        staged: For each bucket, whether its contents are in place.
        end: The end of its backward; None before the first gradient.
        nonfinite: Parameters whose local gradient is not finite (with ``check=True``).
    """

    def __init__(
        self, buckets: Sequence[Bucket], count: int, launch_on: LaunchOn, communicates: bool
    ) -> None:
        self.launch_on = launch_on
        self.communicates = communicates
        self.seen = [False] * count
        self.order: list[int] = []
        self.pending = [len(bucket.params) for bucket in buckets]
        self.staged = [False] * len(buckets)
        self.end: EndOfBackward | None = None
        self.nonfinite: list[int] = []


class Engine:
    """Drives the generations of one attachment. Everything runs on the training thread.

    `on_new_parameters` is told of parameters that take part for the first time.

    Args:
        params: The parameters by name, frozen ones too, in registration order.
        watch: Tells which of them take part.
        context: What the algorithm may use.
        state: The algorithm's state.
        pipeline: Launches and waits.
        control: The control lane.
        options: What attach() was asked for.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        watch: ParameterWatch,
        context: Context,
        state: AlgorithmState,
        pipeline: Pipeline,
        control: Control,
        options: Options,
    ) -> None:
        self.names = list(params)
        self.params = list(params.values())
        self.on_new_parameters: Callable[[Sequence[int]], None] | None = None
        self._watch = watch
        self._context = context
        self.state = state
        self.pipeline = pipeline
        self._control = control
        self._options = options
        self.generations = 0
        self.is_synchronised = True
        self.has_real_order = False
        self._generation: Generation | None = None
        self._unsynchronised: set[int] = set()
        self._stage = state.stage_wanted()
        self._step_is_due = False
        self._step_error: BaguaError | None = None
        self.plan = self._planned(list(reversed(watch.trainable())))
        self._ready_order = self.plan.order
        self._install()

    # ---- plan -------------------------------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in launch order."""
        return self.plan.buckets

    def _planned(self, order: Sequence[int]) -> Plan:
        return Plan(
            self.names,
            self.params,
            order,
            cap_bytes=self._options.cap_bytes,
            first_cap_bytes=self._options.first_cap_bytes,
            alignment=self.state.alignment(),
            lanes=len(self._context.communicators.lanes),
        )

    def _install(self) -> None:
        self._gradients = Gradients(self.plan, self._context, self._options)
        self.state.setup(self.buckets)
        self.pipeline.install(self.state, self.buckets)

    def replan(self, order: Sequence[int]) -> None:
        """Plan anew for gradients that come in `order`; what the algorithm remembers goes along.

        Every rank plans for itself; the ledger of the generation compares the plans.
        """
        saved = self.state.state_dict()
        self.plan.release_gradients()
        self.plan = self._planned(order)
        self._install()
        self.state.load_state_dict(saved)

    def replace_state(self, state: AlgorithmState) -> None:
        """Go on with another algorithm's state, on buckets of its own. No weights are moved."""
        self.settle()
        self.state.close()
        self.state = state
        self._step_is_due = False
        self._enter_stage()

    def _enter_stage(self) -> None:
        self._stage = self.state.stage_wanted()
        self.plan.release_gradients()
        self.plan = self._planned(self.plan.order)
        self._install()

    def load_algorithm_state(self, state: Mapping[str, Any]) -> None:
        """Take up the algorithm's part of a checkpoint, in the stage that it was saved in."""
        self.state.load_state_dict(state)
        if self.state.stage_wanted() != self._stage:
            self._enter_stage()
            self.state.load_state_dict(state)

    def use_order(self, order: Sequence[int]) -> None:
        """Plan by a ready order that is known, and the same on every rank."""
        self.has_real_order = True
        if tuple(order) != self.plan.order:
            self.replan(order)

    def _adopt_ready_order(self) -> None:
        """Plan by the order in which rank 0's gradients really became ready in the first generation."""
        if self.has_real_order or self.generations != 1 or self.state.source != "gradient":
            return
        mine = np.asarray(self._ready_order, dtype=np.int32).tobytes()
        theirs = self._control.broadcast(mine if self._control.rank == 0 else None)
        self.use_order(np.frombuffer(theirs, dtype=np.int32).tolist())

    def _follow_the_model(self) -> None:
        """Parameters may have been frozen, unfrozen or tied since; anything else is an error on all ranks."""
        if not self._watch.has_changed():
            return
        try:
            trainable = self._watch.trainable()
        except UsageError as error:
            self.pipeline.fail(error)
            raise
        before = set(self.plan.order)
        new = [i for i in trainable if i not in before]
        now = set(trainable)
        if new or len(now) != len(before):
            if self.on_new_parameters is not None:
                self.on_new_parameters(new)
            self.replan([i for i in self.plan.order if i in now] + list(reversed(new)))

    # ---- a generation -----------------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """The gradient of parameter `index` was accumulated."""
        self.pipeline.raise_failure()
        if not self.is_synchronised:
            self._unsynchronised.add(index)
            return
        generation = self._generation
        if generation is None or (generation.end is not None and generation.end.is_lost):
            self.give_up_lost_backward()
            generation = self._open()
        if generation.end is None:
            generation.end = EndOfBackward(self._end)
        if generation.seen[index]:
            raise UsageError(
                f"the gradient of {self.names[index]!r} came twice in one backward",
                expected="each parameter's gradient once",
                got="a second one, as reentrant activation checkpoints give for a parameter used twice",
                fix="use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )
        bucket = self.plan.bucket_of[index]
        if bucket < 0:
            raise UsageError(
                f"{self.names[index]!r} got a gradient, but it was frozen when the backward began",
                expected="requires_grad to change between steps",
                fix="unfreeze it before the model's forward, on every rank",
            )
        generation.seen[index] = True
        generation.order.append(index)
        generation.pending[bucket] -= 1
        if (
            not generation.pending[bucket]
            and generation.communicates
            and generation.launch_on is LaunchOn.GRADIENT_READY
        ):
            self._stage_bucket(generation, bucket)

    def _open(self) -> Generation:
        self.settle()
        self._follow_the_model()
        self._adopt_ready_order()
        if self.state.stage_wanted() != self._stage:
            self._enter_stage()
        self._step_error = None
        self._step_is_due = False
        communicates = self.state.begin_generation(self.generations)
        generation = Generation(self.buckets, len(self.params), self.state.launch_on, communicates)
        self._generation = generation
        if communicates and generation.launch_on is not LaunchOn.STEP_PRE:
            self.pipeline.begin()
            if generation.launch_on is LaunchOn.FORWARD:
                self._stage_rest(generation)
        return generation

    def _stage_bucket(self, generation: Generation, index: int) -> None:
        generation.staged[index] = True
        generation.nonfinite += self._gradients.stage(self.state, index, generation.seen)
        self.pipeline.ready(index)

    def _stage_rest(self, generation: Generation) -> None:
        for index, staged in enumerate(generation.staged):
            if not staged:
                self._stage_bucket(generation, index)

    def _end(self) -> None:
        """The backward has computed all its gradients."""
        generation = self._generation
        if generation is None:
            raise InternalError("a backward ended outside of a generation")
        missing = self._missing(generation)
        launches = generation.communicates and generation.launch_on is LaunchOn.GRADIENT_READY
        if launches:
            self._stage_rest(generation)
        is_local = generation.launch_on is LaunchOn.STEP_PRE and self.state.source == "gradient"
        nonfinite = bool(generation.nonfinite) or (is_local and not self._gradients.are_finite())
        ledger = self._control.launch_max(pack(self._entry(missing, nonfinite=nonfinite)))
        if launches:
            self.pipeline.wait(lambda: self._look_into(ledger))
        result = self._read(ledger)
        unseen = (i for i in self.plan.order if not generation.seen[i])
        self._ready_order = (*generation.order, *unseen)
        self._close_generation()
        self._judge(result, missing, generation)
        unused = frozenset(result.missing_everywhere)
        if launches:
            self._gradients.expose(unused)
            self.state.commit()
        if is_local and result.any_nonfinite:
            self._gradients.make_nonfinite()
        self._step_is_due = generation.communicates and generation.launch_on is LaunchOn.STEP_PRE
        self.state.after_backward(frozenset(self.params[i] for i in unused))

    def _missing(self, generation: Generation) -> list[bool]:
        missing = [False] * len(self.params)
        if self.state.source == "gradient":
            for i in self.plan.order:
                accumulated = i in self._unsynchronised and self.params[i].grad is not None
                missing[i] = not generation.seen[i] and not accumulated
        return missing

    def _entry(
        self, missing: Sequence[bool], *, nonfinite: bool = False, aborted: bool = False
    ) -> LedgerEntry:
        return LedgerEntry(
            generation=self.generations,
            stage=self._stage,
            plan_digest=self.plan.digest,
            missing=missing,
            aborted=aborted,
            nonfinite=nonfinite,
            finished=False,
        )

    def _look_into(self, ledger: PendingMax) -> None:
        """While data is waited for: ranks that differ launch different things, so say so at once."""
        if ledger.is_done():
            verdict.raise_if_out_of_step(unpack(ledger.wait()))

    def _read(self, ledger: PendingMax) -> LedgerResult:
        try:
            result = unpack(ledger.wait())
            verdict.raise_if_out_of_step(result)
        except BaguaError as error:
            self.pipeline.fail(error)
            raise
        return result

    def _close_generation(self) -> None:
        self._generation = None
        self._unsynchronised.clear()
        self.generations += 1

    def _judge(self, result: LedgerResult, missing: Sequence[bool], generation: Generation) -> None:
        try:
            verdict.raise_if_given_up(result, self._control, self.generations - 1, is_mine=False)
            if self._options.check:
                mine = [self.names[i] for i in generation.nonfinite]
                verdict.raise_if_not_finite(result, self._control, mine)
            if not self._options.find_unused_parameters:
                verdict.raise_if_unused(result, self._control, self.names, missing)
        except BaguaError as error:
            self._step_error = error
            raise

    def give_up_lost_backward(self) -> None:
        """If the backward of the open generation raised, see the generation through with all ranks.

        Every rank launches every bucket of a generation, or they would pair up wrongly in the next.
        """
        generation = self._generation
        if generation is None or generation.end is None or self.pipeline.failure is not None:
            return
        if is_running() and not generation.end.is_lost:
            return
        launches = generation.communicates and generation.launch_on is LaunchOn.GRADIENT_READY
        if launches:
            for index, staged in enumerate(generation.staged):
                if not staged:
                    self.buckets[index].flat.zero_()
                    self.pipeline.ready(index)
        nothing_missing = [False] * len(self.params)
        ledger = self._control.launch_max(pack(self._entry(nothing_missing, aborted=True)))
        if launches:
            self.pipeline.wait(lambda: self._look_into(ledger))
            self.state.rollback()
        result = self._read(ledger)
        self._close_generation()
        self._step_error = UsageError(
            "optimizer.step() after a backward that raised",
            expected="a backward that ran to its end",
            got="gradients of which only some are there, and only some are averaged",
            fix="call zero_grad() and repeat the step",
        )
        verdict.raise_if_given_up(result, self._control, self.generations - 1, is_mine=True)

    # ---- forward and step -------------------------------------------------------------------------------

    def on_forward(self, training: bool) -> None:
        """The attached module's own forward is about to run, outside of a backward."""
        self.pipeline.raise_failure()
        self.give_up_lost_backward()
        if not self.pipeline.is_open and self._generation is None:
            self._follow_the_model()
        if (
            self.is_synchronised
            and training
            and torch.is_grad_enabled()
            and self._generation is None
            and self.state.launch_on is LaunchOn.FORWARD
        ):
            self._open()

    def settle(self) -> None:
        """Wait for the round that is outstanding, if one is."""
        if self.pipeline.is_open:
            self.pipeline.wait()
            self.state.commit()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The commit gate: nothing moves unless the gradients are agreed and the communication is complete.

        Raises:
            UsageError: gradients were not synchronised, or their backward raised.
            BaguaError: what ended the generation, or the attachment.
        """
        self.pipeline.raise_failure()
        self.give_up_lost_backward()
        if self._step_error is not None:
            raise self._step_error
        self._refuse_unsynchronised()
        if self._step_is_due:
            self._step_is_due = False
            self.pipeline.begin()
            for bucket in self.buckets:
                self._gradients.stage(self.state, bucket.index, None)
                self.pipeline.ready(bucket.index)
        self.settle()
        self.state.before_step(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` has stepped."""
        self.state.after_step(optimizer)

    def _refuse_unsynchronised(self) -> None:
        if self.state.source != "gradient":
            return
        local = [self.names[i] for i in sorted(self._unsynchronised) if self.params[i].grad is not None]
        if local:
            raise UsageError(
                "optimizer.step() with gradients that were accumulated under no_sync() only",
                expected="a backward outside of no_sync() before the step",
                got=f"local gradients of {', '.join(local[:3])}",
                fix="run the last backward outside of no_sync(), or call zero_grad()",
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside only accumulate; it is the backward's place that counts."""
        before = self.is_synchronised
        self.give_up_lost_backward()
        self.is_synchronised = False
        try:
            yield
        finally:
            self.is_synchronised = before

    def close(self, *, orderly: bool) -> None:
        """End the attachment: gradients leave the buckets, the state lets go.

        Args:
            orderly: Wait for what is outstanding; without, nothing is waited for.
        """
        try:
            if orderly and self.pipeline.failure is None:
                self.give_up_lost_backward()
                self.settle()
        finally:
            self.plan.release_gradients()
            self.state.close()
