"""One rank of a soak: trains by the plan, compares each step, and tells how it went."""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import bagua_rt as bagua
from bagua_rt.errors import BaguaError, InternalError, PeerError, UsageError
from tools.soak.model import Batch, Net, batches, has_inf, loss_of
from tools.soak.plan import Plan
from tools.soak.reference import INTERVAL, Reference, clip, make_optimizer, toggle


@dataclass(frozen=True)
class Order:
    """What the driver wants of a rank: an episode's first life, or the next one of the ranks that are left.

    Attributes:
        plan: The episode.
        life: How many faults there were.
        rank: This rank, in this life.
        world_size: Number of ranks in this life.
        meeting: A path for a store of files, or a port.
        timeout_s: The deadline, as it is to be on this machine now.
    """

    plan: Plan
    life: int
    rank: int
    world_size: int
    meeting: str | int
    timeout_s: float


@dataclass
class Answer:
    """How it went.

    Attributes:
        kind: "done", "failed" (as it may with a fault), or "wrong".
        text: The error.
        step: How many steps are done.
        digests: Of the weights after each step of this life.
        ended: When, on the monotonic clock that all processes share.
    """

    kind: str
    text: str = ""
    step: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    ended: float = 0.0


class Planned(Exception):  # noqa: N818  # raised on purpose, in a gradient hook
    """The trainer's own error."""


class Trainee:
    """What a rank keeps from one life to the next.

    Args:
        plan: The episode.
        rank: The first rank.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        torch.manual_seed(plan.seed + rank)  # attach() makes them equal
        self.model = Net(plan)
        self.optimizer = make_optimizer(plan.optimizer, list(self.model.parameters()))
        self.reference = Reference(plan)
        self.step = 0
        self.digests: dict[int, str] = {}
        self.is_attached = False  # in this life: before, the weights are no other rank's business
        self._raising = False
        self._scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=plan.scales)
        for param in (self.model.head.weight, self.model.stem.weight):
            param.register_post_accumulate_grad_hook(self._hook(param))

    def _hook(self, param: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def raise_if_planned(_: torch.Tensor) -> None:
            where = self.plan.raises.get(self.step, (0, ""))[1]
            if self._raising and param is getattr(self.model, where).weight:
                self._raising = False
                raise Planned

        return raise_if_planned

    # ---- a life -----------------------------------------------------------------------------------------

    def live(self, order: Order, say: Callable[[str], None]) -> None:
        """Meet the other ranks, and train until the end or an error.

        Args:
            order: What to do.
            say: Tells the driver that this rank trains now.
        """
        plan = self.plan
        self.order, self.digests, self.is_attached = order, {}, False
        with self._group(order) as group:
            if order.life:
                self.optimizer.zero_grad(set_to_none=True)
                self.step = int(group.world.broadcast_object(self.step))
            self._attach()
            if order.life:
                self.reference.all_from(self.model, self.optimizer, order.world_size)
            self.is_attached = True
            self.reference.compare(self.model, order.rank, "")
            say("trains")
            if plan.joins:
                self._join()
            while self.step < plan.steps and not plan.joins:
                self._step()
            self.run.close()

    @contextmanager
    def _group(self, order: Order) -> Any:
        arguments: dict[str, Any] = {"timeout_s": order.timeout_s, "lanes": self.plan.lanes}
        if order.world_size > 1:
            arguments |= {"rank": order.rank, "world_size": order.world_size}
            if isinstance(order.meeting, str):
                arguments["store"] = dist.FileStore(order.meeting, order.world_size)
            else:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(order.meeting))
        group = bagua.init("cpu", **arguments)
        try:
            yield group
        finally:
            bagua.shutdown()

    def _algorithm(self) -> str:
        return [name for step, name in self.plan.algorithms if step <= self.step][-1]

    def _attach(self) -> None:
        algorithm = _algorithm(self._algorithm())
        options = {"find_unused_parameters": self.plan.finds_unused, **self.plan.options}
        if self.plan.kind == "attach":
            self.forward: Any = self.model
            self.run = bagua.attach(self.model, self.optimizer, algorithm, **options)
        else:
            self.forward = bagua.DistributedDataParallel(
                self.model, optimizers=self.optimizer, algorithm=algorithm, **options
            )
            self.run = self.forward.attached

    # ---- a step -----------------------------------------------------------------------------------------

    def _step(self) -> None:
        step, plan, order = self.step, self.plan, self.order
        if step in plan.toggles:
            toggle(self.model, plan.toggles[step])
            self.reference.toggle(plan.toggles[step])
        if step in [at for at, _ in plan.algorithms if at]:
            self.run.switch(_algorithm(self._algorithm()))
            self.reference.round = 0
        if step in plan.reattaches:
            self.run.close()
            self.optimizer.zero_grad(set_to_none=True)
            self._attach()
            self.reference.all_from_first(order.world_size)
        if step in plan.checkpoints:
            self.run.load_state_dict(self.run.state_dict())
        is_cleared = self._backward_with_exceptions()
        self._update(is_cleared, range(order.world_size))
        self.run.state_dict()  # what follows the step is over
        self._check()

    def _backward_with_exceptions(self) -> bool:
        """Whether this step had to be repeated."""
        victim = self.plan.raises.get(self.step, (-1, ""))[0]
        if victim < 0 or victim >= self.order.world_size or self.order.world_size == 1:
            self._backward()
            return False
        try:
            self._backward(raises=victim == self.order.rank)
        except Planned:
            pass
        except PeerError as error:
            if f"in the backward of rank {victim}" not in str(error):
                raise
        else:
            raise AssertionError(f"rank {victim} raised in its backward, and nobody heard of it")
        self.optimizer.zero_grad(set_to_none=True)
        self._backward()
        return True

    def _backward(self, *, raises: bool = False) -> None:
        mine = batches(self.plan, self.step, self.order.rank, self.order.life)
        self._raising = False  # a life may have ended before it came to the exception
        for batch in mine[:-1]:
            with self.run.no_sync():
                self._one_backward(batch)
        self._raising = raises
        self._one_backward(mine[-1])

    def _one_backward(self, batch: Batch) -> None:
        loss = loss_of(self.forward(batch.x, batch.used), batch)
        if has_inf(self.plan, self.step, self.order.life) == self.order.rank:
            loss = loss * float("inf")
        self._scaler.scale(loss).backward()

    def _update(self, is_cleared: bool, ranks: Sequence[int]) -> None:
        if self.plan.clips:
            clip(list(self.model.parameters()))
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.reference.step(self.step, self._algorithm(), self.order.life, ranks, is_cleared=is_cleared)
        self.optimizer.zero_grad(set_to_none=self.plan.sets_to_none)

    def _check(self) -> None:
        self.reference.compare(self.model, self.order.rank, self._algorithm())
        weights = hashlib.sha256()
        for param in self.model.parameters():
            weights.update(param.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        self.digests[self.step] = weights.hexdigest()
        self.step += 1

    def _join(self) -> None:
        plan = self.plan
        with self.run.join(divide_by_initial=plan.divides_by_initial):
            for _ in range(plan.steps_of(self.order.rank)):
                self._backward()
                self._update(False, self._with_data())
                self._check()
        while self.step < plan.steps:  # the others went on; their last one's model is everybody's now
            self.reference.step(self.step, self._algorithm(), self.order.life, self._with_data())
            self.step += 1
        self.step -= 1
        self._check()

    def _with_data(self) -> list[int]:
        return [r for r in range(self.order.world_size) if self.plan.steps_of(r) > self.step]

    # ---- the end of a life ------------------------------------------------------------------------------

    def look_back(self) -> None:
        """After a failure: no step was half taken.

        Raises:
            AssertionError: the weights are neither those before the step nor those after it.
        """
        algorithm = self._algorithm()
        if self.plan.keeps_ranks_equal:
            self.reference.compare(self.model, self.order.rank, algorithm)


def _algorithm(name: str) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "mean": bagua.GradientAllReduce,
        "sum": lambda: bagua.GradientAllReduce(average=False),
        "hierarchical": lambda: bagua.GradientAllReduce(hierarchical=True),
        "bytegrad": lambda: bagua.algorithms.create("bytegrad"),
        "decentralized": bagua.Decentralized,
        "shift_one": lambda: bagua.Decentralized(peers="shift_one"),
        "local_sgd": lambda: bagua.LocalSGD(interval=INTERVAL),
        "paired": lambda: None,
    }
    return makers[name]()


def follow(
    order: Order, trainee: Trainee | None, say: Callable[[str], None]
) -> tuple[Trainee | None, Answer]:
    """Do what an order says.

    Returns:
        The trainee for the next life, and the answer.
    """
    try:
        trainee = Trainee(order.plan, order.rank) if order.life == 0 or trainee is None else trainee
        trainee.live(order, say)
        answer = Answer("done")
    except BaguaError as error:
        is_fault = not isinstance(error, (UsageError, InternalError))
        answer = Answer("failed" if is_fault else "wrong", f"{type(error).__name__}: {error}")
        if not is_fault:
            answer.text += "\n" + traceback.format_exc()
    except Exception:
        answer = Answer("wrong", traceback.format_exc())
    answer.ended = time.monotonic()
    if trainee is not None:
        answer.step, answer.digests = trainee.step, trainee.digests
        if answer.kind == "failed" and trainee.is_attached:
            try:
                trainee.look_back()
            except AssertionError as error:
                answer = Answer("wrong", f"after {answer.text}: {error}", answer.step)
    return trainee, answer
