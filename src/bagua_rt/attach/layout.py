"""What an attachment has in force now: the plan, its memory, and the algorithm's state on it.

It changes when the ready order is first known, when parameters are frozen or unfrozen, when the algorithm
enters another stage, and when it is replaced. Each time gradients leave the old buckets, and `setup` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from bagua_rt.algorithms.base import AlgorithmState, Context, LaunchOn
from bagua_rt.attach import refusals
from bagua_rt.attach.agreement import on_all_ranks
from bagua_rt.attach.generation import Options
from bagua_rt.attach.gradients import Gradients
from bagua_rt.attach.plan import Plan
from bagua_rt.attach.sparse import SparseGradients
from bagua_rt.attach.watch import ParameterWatch
from bagua_rt.autotune import BucketSizeSearch
from bagua_rt.control import Control
from bagua_rt.errors import UsageError
from bagua_rt.scheduler import Pipeline


class Layout:
    """The plan in force, and what depends on it. Changed between generations only.

    Every rank plans for itself, from what is equal on all; the ledger of each generation compares the plans.

    Args:
        params: The parameters by name, frozen ones too, in registration order.
        watch: Tells which of them take part.
        context: What the algorithm may use.
        state: The algorithm's state.
        pipeline: Launches and waits.
        control: The control lane.
        options: What attach() was asked for.

    Attributes:
        names: The parameters' names. A parameter's index is its place in this list.
        params: The parameters.
        state: The algorithm's state.
        stage: Its stage, as `setup` has seen it.
        plan: The plan.
        gradients: Moves gradients between parameters and buckets.
        sparse: Adds up sparse gradients.
        is_confirmed: Has a ledger shown that all ranks have this plan? Not yet, after a change on this rank.
        cap_bytes: Most bytes in a bucket.
        has_ready_order: Is the plan in the order in which gradients become ready?
        search: The search for the best bucket size, if there was one.
        install_hooks: Called with the parameters that take part; some may have no hook yet, or none any more.
        is_called_in_parts: Was there a backward without a forward of the model itself before it? The trainer
            calls its submodules, so no forward tells when the weights must not move any more.
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
        self.state = state
        self.stage = state.stage_wanted()
        self.has_ready_order = False
        self.is_confirmed = True
        self.search: BucketSizeSearch | None = None
        self.install_hooks: Callable[[Sequence[int]], None] | None = None
        self.is_called_in_parts = False
        self._was_called = self._was_followed = False
        self._watch = watch
        self._context = context
        self._pipeline = pipeline
        self._control = control
        self._options = options
        self.cap_bytes = options.cap_bytes
        self.plan = self._planned(list(reversed(watch.trainable())))
        self._install()

    def _planned(self, order: Sequence[int]) -> Plan:
        sparse = self._watch.sparse if self.state.source == "gradient" else set()
        return Plan(
            self.names,
            self.params,
            order,
            sparse,
            cap_bytes=self.cap_bytes,
            first_cap_bytes=min(self.cap_bytes, self._options.first_cap_bytes),
            alignment=self.state.alignment(),
            lanes=len(self._context.communicators.lanes),
        )

    def _install(self) -> None:
        plan, names, params = self.plan, self.names, self.params
        self.gradients = Gradients(plan, self._context, self._options)
        self.sparse = SparseGradients(
            [names[i] for i in plan.sparse],
            [params[i] for i in plan.sparse],
            self._context,
            self._control,
            self._pipeline,
        )
        self.state.setup(plan.buckets)
        self._pipeline.install(self.state, plan.buckets)
        if plan.sparse and not (self.state.takes_sparse and self.state.launch_on is LaunchOn.GRADIENT_READY):
            raise UsageError(
                f"the gradient of {names[plan.sparse[0]]!r} is sparse",
                expected="dense gradients, for an algorithm that doesn't communicate them in each backward",
                fix="build the embedding with sparse=False, or use GradientAllReduce",
            )

    @torch.inference_mode(False)  # a forward for evaluation may be the first to see a change
    @torch.no_grad()
    def _replan(self, order: Sequence[int]) -> None:
        self.plan.release_gradients()
        self.plan = self._planned(order)
        self._install()

    def replace_state(self, state: AlgorithmState) -> None:
        """Go on with another algorithm's state, on buckets of its own, on all ranks or on none. Collective.

        No weights are moved.

        Raises:
            Exception: what its setup met; the old state stays in force.
        """
        former, stage, saved = self.state, self.stage, self.state.state_dict()
        try:
            on_all_ranks("switch()", self._control, lambda: self._use_state(state, state.stage_wanted()))
        except Exception:
            self._use_state(former, stage)
            former.load_state_dict(saved)
            state.close()
            raise
        former.close()

    def _use_state(self, state: AlgorithmState, stage: int) -> None:
        self.state, self.stage = state, stage
        self._replan(self.plan.order)

    def enter_stage(self) -> None:
        """If the algorithm wants another stage, set it up for that."""
        if self.state.stage_wanted() != self.stage:
            self.stage = self.state.stage_wanted()
            self._replan(self.plan.order)

    def load_algorithm_state(self, state: Mapping[str, Any]) -> None:
        """Take up the algorithm's part of a checkpoint, in the stage that it was saved in."""
        self.state.load_state_dict(state)
        if self.state.stage_wanted() != self.stage:
            self.enter_stage()
            self.state.load_state_dict(state)

    def use_order(self, order: Sequence[int]) -> None:
        """Plan for gradients that come in `order`; what the algorithm remembers goes along."""
        if tuple(order) != self.plan.order:
            self._replan_keeping_state(order)

    def use_cap(self, cap_bytes: int) -> None:
        """Plan for buckets of another size; what the algorithm remembers goes along."""
        self.cap_bytes = cap_bytes
        self._replan_keeping_state(self.plan.order)

    @property
    def _searching(self) -> BucketSizeSearch | None:
        """The search that is under way."""
        return self.search if self.search is not None and self.search.found is None else None

    @property
    def found_cap_bytes(self) -> int | None:
        """The bucket size that a search has found, not one that it tries; None where it is attach()'s."""
        cap_bytes = self.cap_bytes if self._searching is None else self._searching.present_bytes
        return None if cap_bytes == self._options.cap_bytes else cap_bytes

    def _replan_keeping_state(self, order: Sequence[int]) -> None:
        saved = self.state.state_dict()
        self._replan(order)
        self.state.load_state_dict(saved)

    def improve(self, generation: int, ready_order: Sequence[int]) -> None:
        """Before a generation: plan by what those before have shown. Collective now and then.

        Args:
            generation: Its number.
            ready_order: The order in which this rank's gradients became ready in the last one.

        Raises:
            CollectiveError: a rank did not take part.
        """
        if self.takes_order(generation):
            self.adopt_ready_order(ready_order)
        elif self._searching is not None:
            self._searching.step()

    def takes_order(self, generation: int) -> bool:
        """Is it before this generation that the ranks take the order of rank 0's gradients?"""
        return generation == 1 and not self.has_ready_order and self.state.source == "gradient"

    def new_search(self, candidates_mb: Sequence[float], steps: int) -> BucketSizeSearch:
        """A search for the best bucket size, among the dense tensors of this plan.

        Raises:
            UsageError: it can't be.
        """
        if not self.state.cuts_freely:
            raise refusals.buckets_matter()
        if self._searching is not None:
            raise refusals.search_under_way()
        return BucketSizeSearch(
            [slot.spec.nbytes for bucket in self.plan.buckets for slot in bucket.plan.slots],
            self.cap_bytes,
            candidates_mb,
            steps,
            use=self.use_cap,
            agree=partial(self._control.agree, "the bucket size"),
        )

    def stop_search(self) -> None:
        """End a search that is under way: the size is as it was before."""
        if self._searching is not None:
            self._searching.cancel()
            self.search = None

    def adopt_ready_order(self, mine: Sequence[int]) -> None:
        """Plan by the order in which rank 0's gradients really became ready. Collective.

        Raises:
            CollectiveError: a rank did not take part.
        """
        self.has_ready_order = True
        payload = np.asarray(mine, dtype=np.int32).tobytes()
        theirs = self._control.broadcast(payload if self._control.rank == 0 else None)
        order: list[int] = np.frombuffer(theirs, dtype=np.int32).tolist()
        now = dict.fromkeys(self.plan.order)  # frozen or unfrozen since
        known = set(order)
        self.use_order([*(i for i in order if i in now), *(i for i in now if i not in known)])

    @property
    def changes(self) -> int:
        """How often the model was found to have changed: its modules, parameters or buffers."""
        return self._watch.changes

    @property
    def is_borrowed(self) -> bool:
        """As `ParameterWatch.is_borrowed`."""
        return self._watch.is_borrowed()

    def describe(self) -> list[tuple[str, str]]:
        """What each parameter's place is, for comparing with other ranks."""
        buckets = self.plan.bucket_of
        taking_part = set(self.plan.order)
        return [
            (
                f"the part that parameter {name!r} takes",
                f"bucket {buckets[i]}, strides {tuple(self.params[i].stride())}"
                if buckets[i] >= 0
                else "sparse"
                if i in taking_part
                else "none (frozen)",
            )
            for i, name in enumerate(self.names)
        ]

    def follow_the_model(
        self, before_change: Callable[[], None] | None = None, *, trains: bool = False
    ) -> None:
        """Parameters may have been frozen, unfrozen, tied or laid out otherwise since; the plan follows.

        Args:
            before_change: Called before the plan changes, if it does.
            trains: Is this the model's own forward, and a backward may come?

        Raises:
            UsageError: they were changed in another way; it ends the attachment on all ranks.
        """
        self._was_followed = True
        self._was_called |= trains
        if self._watch.has_changed():
            self._follow(before_change)

    def follow_into_generation(self) -> None:
        """As `follow_the_model`, with half the look where the forward has just taken a whole one."""
        has_changed = self._watch.takes_others() if self._was_followed else self._watch.has_changed()
        self.is_called_in_parts |= not self._was_called
        self._was_called = self._was_followed = False
        if has_changed:
            self._follow()

    def _follow(self, before_change: Callable[[], None] | None = None) -> None:
        try:
            trainable = self._watch.trainable()
            is_laid_out = self.plan.is_laid_out_as(self.params)
        except UsageError as error:
            self._pipeline.fail(error)
            raise
        if self.install_hooks is not None:
            self.install_hooks(trainable)
        before, now = set(self.plan.order), set(trainable)
        if before != now or not is_laid_out:
            if before_change is not None:
                before_change()
            new = [i for i in trainable if i not in before]
            try:
                self._replan_keeping_state([*(i for i in self.plan.order if i in now), *reversed(new)])
            except UsageError as error:  # the algorithm can't do these
                self._pipeline.fail(error)
                raise
            self.is_confirmed = False
