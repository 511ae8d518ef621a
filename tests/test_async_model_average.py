"""AsyncModelAverage: weights by a float64 simulation of what happened; pauses, ends, safe points."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.algorithms import AsyncModelAverage
from tests import zoo
from tests.micro import caught, group, on
from tests.ranks import RankContext, RankPool
from tests.zoo import LR, SHAPES, Array, Trainer

NEVER_S = 1e5  # rounds are those of pauses and ends only

Weights = dict[str, Array]
Event = tuple[str, int]


class Recorder:
    """What one rank's training did, in order: its steps, and the snapshots and results of rounds."""

    def __init__(self, run: bagua.Attached) -> None:
        self.events: list[Event] = []
        self.state: Any = run._attachment.engine.state
        self._steps = self._taken = self._applied = 0
        stage, commit = self.state.stage, self.state.commit

        def recorded_stage(bucket: Any, present: Any) -> None:
            if bucket.index == 0:
                self.events.append(("snapshot", self._taken))
                self._taken += 1
            stage(bucket, present)

        def recorded_commit() -> None:
            self.events.append(("result", self._applied))
            self._applied += 1
            commit()

        def after_step(_: Any) -> None:
            self.events.append(("step", self._steps))
            self._steps += 1

        vars(self.state).update(stage=recorded_stage, commit=recorded_commit, after_step=after_step)


def simulate(schedules: list[list[Event]], seed: int) -> list[Weights]:
    """All ranks in float64, each going through its own schedule; a result waits for everyone's snapshot."""
    n = len(schedules)
    x = [{name: zoo.start(name) for name in SHAPES} for _ in range(n)]
    snapshots: dict[int, dict[int, Weights]] = {}
    todo = [list(schedule) for schedule in schedules]
    while any(todo):
        before = sum(map(len, todo))
        for rank, events in enumerate(todo):
            while events:
                kind, number = events[0]
                if kind == "step":
                    for name in SHAPES:
                        x[rank][name] = x[rank][name] - LR * (
                            x[rank][name] - zoo.target(name, rank, number, seed)
                        )
                elif kind == "snapshot":
                    snapshots.setdefault(number, {})[rank] = dict(x[rank])
                elif len(snapshots.get(number, {})) < n:
                    break
                else:
                    for name in SHAPES:
                        mean = sum(snapshots[number][r][name] for r in range(n)) / n
                        x[rank][name] = x[rank][name] + mean - snapshots[number][rank][name]
                events.pop(0)
        assert sum(map(len, todo)) < before, "a result without everyone's snapshot"
    return x


def recorded(ctx: RankContext, algorithm: AsyncModelAverage, how: str, seed: int) -> Any:
    with group(ctx, **zoo.nodes(ctx)):
        trainer = Trainer(algorithm, cap_mb=2**-12)
        recorder = Recorder(trainer.run)
        for t in range(6 + 5 * ctx.rank):  # uneven
            trainer.step(ctx.rank, t, seed, how)
            if t == 3:
                trainer.run.pause()
                trainer.run.resume()
        trainer.run.close()
        return recorder.events, trainer.weights(), trainer.bits()


@pytest.mark.parametrize(
    "algorithm",
    [AsyncModelAverage(0.0), AsyncModelAverage(NEVER_S), AsyncModelAverage(0.0, hierarchical=True)],
    ids=repr,
)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_weights_are_those_of_the_simulation(
    pool: RankPool, world_size: int, algorithm: AsyncModelAverage
) -> None:
    for how in ("plain", "accumulated"):
        seed = zoo.seed_of_today()
        answers = on(pool, world_size, recorded, algorithm, how, seed)
        schedules = [events for events, _, _ in answers]
        right = simulate(schedules, seed)
        for rank, (events, weights, bits) in enumerate(answers):
            rounds = sum(kind == "result" for kind, _ in events)
            assert rounds == sum(kind == "result" for kind, _ in schedules[0])
            assert rounds >= 2 if world_size > 1 else rounds == 0
            for name in SHAPES:
                text = f"{name} rank {rank} {seed=} {events}"
                np.testing.assert_allclose(
                    weights[name], right[rank][name], rtol=1e-9, atol=1e-9, err_msg=text
                )
            assert bits == answers[0][2], f"bit-equal once all ranks have stopped, {seed=}"


def paused(ctx: RankContext, dtype: torch.dtype, seed: int) -> Any:
    """The weights before and after two pauses; rank r trains 2 (r + 1) steps before each."""
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(NEVER_S), dtype=dtype, cap_mb=2**-12)
        found = []
        for part in range(2):
            for t in range(2 * (ctx.rank + 1)):
                trainer.step(ctx.rank, 100 * part + t, seed)
            before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
            trainer.run.pause()
            trainer.run.pause()  # once more is nothing
            found.append((before, {n: p.detach().clone() for n, p in trainer.model.named_parameters()}))
            trainer.run.resume()
        trainer.run.close()
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_after_a_pause_all_ranks_hold_the_mean(pool: RankPool, dtype: torch.dtype) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, 3, paused, dtype, seed)
    for part in range(2):
        for name in SHAPES:
            after = [answer[part][1][name] for answer in answers]
            assert all(torch.equal(value, after[0]) for value in after), f"{name} {seed=}"
            before = torch.stack([answer[part][0][name].double() for answer in answers])
            # The sum's rounding in float32 at least, then the mean's to the weights' dtype.
            sum_error = 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * before.abs().amax(0)
            unit = torch.finfo(dtype).eps / 2
            tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            bound = unit * before.mean(0).abs() + sum_error + tiny
            assert bool(((after[0].double() - before.mean(0)).abs() <= bound).all()), f"{name} {seed=}"
        wide = [answer[part][0]["inner.wide"] for answer in answers]
        assert all(not torch.equal(value, wide[0]) for value in wide[1:]), "they differed before"


def resting(ctx: RankContext, dtype: torch.dtype) -> bool:
    """Ranks that are equal and do not move stay as they are, whatever a third rounds to."""
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(NEVER_S), lambda m: torch.optim.SGD(m.parameters(), 0.0), dtype)
        before = trainer.bits()
        for t in range(4):
            trainer.step(0, t, 1)
            trainer.run.pause()
            trainer.run.resume()
        same = trainer.bits() == before
        trainer.run.close()
        return same


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounds_do_not_move_equal_weights_of_16_bits(pool: RankPool, dtype: torch.dtype) -> None:
    assert on(pool, 3, resting, dtype) == [True] * 3


def still(ctx: RankContext, seed: int) -> int:
    """Trains while rounds run; nothing but optimizer.step() may move a weight. Returns the rounds taken."""
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(0.0))
        recorder = Recorder(trainer.run)
        model, optimizer, run = trainer.model, trainer.optimizer, trainer.run
        for t in range(12):
            before = trainer.bits()
            optimizer.zero_grad()
            loss = model(ctx.rank, t, seed)
            model(ctx.rank, t, seed)  # without a backward
            model.eval()
            with torch.no_grad():
                model(ctx.rank, 0, seed)
            model.train()
            run.state_dict()  # of this rank alone
            if t % 3 == 1:
                with run.no_sync():
                    (0.5 * loss).backward(retain_graph=True)
            loss.backward()
            assert trainer.bits() == before, f"{t=} {seed=}"
            if t % 3 == 2:
                continue  # as a GradScaler skips
            optimizer.step()
            assert trainer.bits() != before, f"{t=} {seed=}"
        for t in range(3):  # no_sync() is nothing special
            with run.no_sync():
                trainer.step(ctx.rank, t, seed)
        run.close()
        return sum(kind == "result" for kind, _ in recorder.events)


def test_nothing_moves_but_in_a_step(pool: RankPool) -> None:
    rounds = on(pool, 2, still, zoo.seed_of_today())
    assert rounds[0] == rounds[1] >= 1


# ---- the warm-up ----------------------------------------------------------------------------------------


def warmed(ctx: RankContext, warmup_steps: int, seed: int) -> Any:
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(NEVER_S, warmup_steps), dtype=torch.float32, cap_mb=2**-12)
        plain = Trainer(bagua.GradientAllReduce(), dtype=torch.float32, cap_mb=2**-12)
        state: Any = trainer.run._attachment.engine.state
        setup, stages = state.setup, []

        def counted(buckets: Any) -> None:
            setup(buckets)
            stages.append(state.launch_on.value)

        state.setup = counted
        same = []
        for t in range(warmup_steps + 2):
            for each in (trainer, plain):
                each.model.eval()
                with torch.no_grad():
                    each.model(ctx.rank, t, seed)
                each.model.train()
                each.step(ctx.rank, t, seed, "accumulated" if t % 2 else "plain")
            same.append(trainer.bits() == plain.bits())
        trainer.run.close()
        plain.run.close()
        return same, stages, trainer.bits()


@pytest.mark.parametrize("warmup_steps", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_warm_up_is_gradient_all_reduce_and_ends_once(
    pool: RankPool, world_size: int, warmup_steps: int
) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, world_size, warmed, warmup_steps, seed)
    for same, stages, bits in answers:
        assert same == [True] * warmup_steps + [world_size == 1] * 2, f"{seed=}"
        assert stages == ["timer"], "set up once more, for the second stage"
        assert bits == answers[0][2], f"{seed=}"


class Normed(nn.Module):
    """With buffers, which are broadcast before each forward as long as the ranks are in step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(x))
        return out


def unevenly(ctx: RankContext, warmup_steps: int, steps: list[int]) -> list[float]:
    with group(ctx):
        torch.manual_seed(ctx.rank)
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = bagua.attach(model, optimizer, AsyncModelAverage(0.0, warmup_steps))
        for _ in range(steps[ctx.rank]):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        run.close()
        found: list[float] = model.out.weight.flatten().tolist()
        return found


@pytest.mark.parametrize("steps", [[2, 9, 4], [2, 3, 2], [11, 2, 2], [2, 2, 2]], ids=str)
def test_ranks_may_stop_at_any_step_after_the_warm_up(pool: RankPool, steps: list[int]) -> None:
    for warmup_steps in (2, 1, 0):
        first, *others = on(pool, 3, unevenly, warmup_steps, steps)
        assert all(weights == first for weights in others)


def joined(ctx: RankContext, seed: int) -> tuple[str, str]:
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(NEVER_S, 2))

        def train() -> None:
            with trainer.run.join():
                for t in range(3):
                    trainer.step(ctx.rank, t, seed)

        found = caught(train)
        trainer.run.close()
        return found


def test_join_ends_with_the_warm_up(pool: RankPool) -> None:
    for kind, text in on(pool, 2, joined, zoo.seed_of_today()):
        assert kind == "UsageError"
        assert "join() can't go on" in text


# ---- other cases ----------------------------------------------------------------------------------------


def odd(ctx: RankContext, seed: int) -> list[bytes]:
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(0.0), dtype=torch.float32, extras=True, cap_mb=2**-10)
        for t in range(4 + ctx.rank):
            trainer.step(ctx.rank, t, seed, "accumulated" if t == 1 else "plain")
        trainer.run.close()
        assert trainer.model.unused.grad is None
        assert trainer.model.unused.tolist() == [3.0] * 4
        assert trainer.model.frozen.tolist() == [1.0] * 3
        assert trainer.model.inner.twin is trainer.model.w
        kept = {k: v.detach() for k, v in trainer.model.named_parameters() if k != "ignored" and v.numel()}
        real = [torch.view_as_real(v) if v.is_complex() else v for v in kept.values()]
        assert all(bool(torch.isfinite(v).all()) for v in real)
        return [v.clone().reshape(-1).view(torch.uint8).numpy().tobytes() for v in kept.values()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_parameters_and_mixed_dtypes(pool: RankPool, world_size: int) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, world_size, odd, seed)
    assert answers == [answers[0]] * world_size, f"{seed=}"


def make() -> Trainer:
    return Trainer(AsyncModelAverage(NEVER_S, 2), dtype=torch.float32, cap_mb=2**-12)


@pytest.mark.parametrize("save_at", [1, 2, 3])
def test_a_checkpoint_resumes_bit_equal(pool: RankPool, save_at: int) -> None:
    seed = zoo.seed_of_today()
    assert on(pool, 2, zoo.resumed, make, save_at, 5, seed) == [True] * 2, f"{seed=}"


def loaded(ctx: RankContext, seed: int) -> Any:
    """Rounds run while a checkpoint of the warm-up is loaded: they end and move nothing."""
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(0.0, 2), dtype=torch.float32)
        trainer.step(ctx.rank, 0, seed)
        saved = copy.deepcopy((trainer.model.state_dict(), trainer.run.state_dict()))
        right = trainer.bits()
        for t in range(1, 6 + ctx.rank):
            trainer.step(ctx.rank, t, seed)
        trainer.model.load_state_dict(saved[0])
        trainer.run.load_state_dict(saved[1])
        same = trainer.bits() == right
        trainer.step(ctx.rank, 1, seed)
        bits = trainer.bits()
        trainer.run.close()
        return same, bits


def test_a_checkpoint_is_loaded_while_rounds_run(pool: RankPool) -> None:
    answers = on(pool, 3, loaded, zoo.seed_of_today())
    assert answers == [answers[0]] * 3, "the warm-up is gradient all-reduce again"
    assert answers[0][0]


def test_switches_to_and_from_others(pool: RankPool) -> None:
    settings: list[tuple[str, dict[str, Any]]] = [
        ("async_model_average", {"interval_s": 0.0}),
        ("gradient_allreduce", {}),
        ("local_sgd", {"interval": 1}),
        ("async_model_average", {"warmup_steps": 1, "interval_s": 0.0}),
        ("decentralized", {}),
    ]
    on(pool, 3, zoo.switched, settings, zoo.seed_of_today())


def uneven(ctx: RankContext, seed: int) -> Any:
    """Ranks that have made different numbers of steps save, load and switch; then they go in step."""
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(0.0, 1), dtype=torch.float32)
        for t in range(3 + 2 * ctx.rank):
            trainer.step(ctx.rank, t, seed)
        trainer.run.load_state_dict(copy.deepcopy(trainer.run.state_dict()))
        trainer.step(ctx.rank, 7, seed)
        trainer.run.pause()
        trainer.run.switch(bagua.LocalSGD(interval=2))
        for t in range(3):
            trainer.step(ctx.rank, t, seed)
        trainer.run.switch(bagua.GradientAllReduce())
        for t in range(3):
            trainer.step(ctx.rank, t, seed)
        generations = trainer.run.statistics().generations
        trainer.run.close()
        return generations, trainer.bits()


def test_ranks_with_different_numbers_of_steps_go_in_step_again(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, 3, uneven, seed)
    assert [generations for generations, _ in answers] == [10, 12, 14]
    assert all(bits == answers[0][1] for _, bits in answers), f"{seed=}"


def cycled(ctx: RankContext, seed: int) -> list[tuple[int, int, int]]:
    """After each switch: threads that ask the store, other threads, hooks."""
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(0.0))
        found = []
        for t in range(12):
            trainer.step(ctx.rank, t, seed)
            trainer.step(ctx.rank, t, seed)
            trainer.run.switch(bagua.GradientAllReduce() if t % 2 else AsyncModelAverage(0.0, t % 3))
            asking = sum(thread.name == "bagua_rt-store" for thread in threading.enumerate())
            hooks = len(trainer.model.get_parameter("w")._post_accumulate_grad_hooks or ())
            found.append((asking, threading.active_count() - asking, hooks))
        trainer.run.close()
        return found


def test_switches_leave_no_thread_or_hook_behind(pool: RankPool) -> None:
    for found in on(pool, 2, cycled, zoo.seed_of_today()):
        asking = [count for count, _, _ in found[2:]]
        # A client of the store has its thread from its first question on, which one may ask late.
        assert max(asking) <= asking[0] + 1
        assert [rest for _, *rest in found[2:]] == [[found[2][1], 1]] * 10


def broken(ctx: RankContext, seed: int) -> Any:
    """A backward raises on one rank: that is nobody else's business."""
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(NEVER_S))
        trainer.step(ctx.rank, 0, seed)
        found: list[Any] = []
        if ctx.rank == 1:
            before = trainer.bits()

            def fail(_: torch.Tensor) -> None:
                raise KeyError("planted")

            handle = trainer.model.get_parameter("w").register_hook(fail)
            found.append(caught(trainer.model(ctx.rank, 1, seed).backward)[0])
            handle.remove()
            found += [caught(trainer.optimizer.step)[0], trainer.bits() == before]
        trainer.step(ctx.rank, 1, seed)
        trainer.run.close()
        return found, trainer.weights()


def test_a_backward_that_raised_concerns_its_rank_alone(pool: RankPool) -> None:
    seed = zoo.seed_of_today()
    answers = on(pool, 2, broken, seed)
    assert [found for found, _ in answers] == [[], ["KeyError", "UsageError", True]]
    right = simulate([[("step", 0), ("step", 1), ("snapshot", 0), ("result", 0)]] * 2, seed)
    for rank, (_, weights) in enumerate(answers):
        for name in SHAPES:
            np.testing.assert_allclose(weights[name], right[rank][name], rtol=1e-9, atol=1e-9, err_msg=name)


def in_backward(ctx: RankContext, seed: int) -> list[str]:
    with group(ctx):
        trainer = Trainer(AsyncModelAverage(NEVER_S))
        other = torch.optim.SGD(trainer.model.parameters(), LR)

        def step(_: torch.Tensor) -> None:
            other.step()

        handle = trainer.model.get_parameter("w").register_post_accumulate_grad_hook(step)
        found = [caught(trainer.model(ctx.rank, 0, seed).backward)[0], caught(trainer.optimizer.step)[0]]
        handle.remove()
        trainer.step(ctx.rank, 1, seed)
        trainer.run.close()
        return found


def test_a_step_inside_of_backward_is_refused(pool: RankPool) -> None:
    assert on(pool, 2, in_backward, zoo.seed_of_today()) == [["UsageError"] * 2] * 2
