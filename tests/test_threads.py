"""Several threads of a trainer: what they may share, what is refused, and what others hear of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua_rt as bagua
from tests.micro import Two, backward, caught, grad, group, on, wrap
from tests.ranks import RankContext, RankPool


def together(*bodies: Callable[[], object]) -> list[tuple[str, str]]:
    """Run each on a thread of its own; what each has raised."""
    errors = [("", "")] * len(bodies)

    def call(index: int) -> None:
        errors[index] = caught(bodies[index])

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


# ---- threads that communicate side by side


def low_level(ctx: RankContext, how: str) -> dict[str, Any]:
    """Each thread adds up; on one lane their order is the rank's own."""
    sums: tuple[list[float], list[float]] = ([], [])
    with group(ctx, timeout_s=3.0 if how == "one lane" else 40.0) as made:
        groups = [made, made.new_group(range(ctx.world_size)) if how == "two groups" else made]
        both = threading.Barrier(2)

        def add_up(thread: int) -> None:
            comm = groups[thread].world  # type: ignore[union-attr]
            lane = comm.lanes[thread] if how == "two lanes" else None
            both.wait()
            if how == "one lane" and ctx.rank == 1:
                time.sleep(0.3)  # meanwhile rank 0's first operation is under way
            for number in range(10):
                t = torch.full((4,), 10.0 * thread + number)
                comm.all_reduce_(t, "sum", stream=lane).wait()
                sums[thread].append(t[0].item())

        errors = together(lambda: add_up(0), lambda: add_up(1))
        made.world.abort()
        return {"errors": errors, "sums": sums}


@pytest.mark.parametrize("how", ["two lanes", "two groups"])
def test_threads_with_a_lane_or_a_group_of_their_own(pool: RankPool, how: str) -> None:
    for found in on(pool, 2, low_level, how):
        assert found["errors"] == [("", "")] * 2
        assert found["sums"] == tuple([2 * (10.0 * thread + k) for k in range(10)] for thread in range(2))


def test_threads_that_share_a_lane_are_refused(pool: RankPool) -> None:
    found = on(pool, 2, low_level, "one lane")[0]
    refused = [text for kind, text in found["errors"] if kind == "UsageError"]
    assert len(refused) == 1
    assert "two threads use job/group#1/lane0 of 'job/group#1/world' at once" in refused[0]


def two_models(ctx: RankContext) -> list[Any]:
    with group(ctx):
        models = [Two(), Two()]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        wrapped = [wrap("attach", *both) for both in zip(models, optimizers, strict=True)]

        def train(index: int) -> None:
            for _ in range(5):
                optimizers[index].zero_grad()
                backward(wrapped[index], ctx)
                optimizers[index].step()
                time.sleep(0.002 * ((ctx.rank + index) % 2))

        errors = together(lambda: train(0), lambda: train(1))
        return [errors, [grad(model.a.weight) for model in models], [m.a.weight.item() for m in models]]


def test_two_models_train_on_two_threads(pool: RankPool) -> None:
    for errors, grads, weights in on(pool, 2, two_models):
        assert errors == [("", "")] * 2
        assert grads == [1.5, 1.5]
        assert weights == [pytest.approx(0.25, abs=1e-6)] * 2


# ---- a thread that ends what another one waits in


def ended(ctx: RankContext, what: str) -> dict[str, Any]:
    """Rank 0 leaves while its own main thread waits for rank 1, which comes afterwards."""
    with group(ctx, timeout_s=60.0):
        model = Two()
        wrapped = None if what == "shutdown in attach" else wrap("attach", model)
        end = bagua.shutdown if wrapped is None or "shutdown" in what else wrapped.run.close

        def wait() -> None:
            if wrapped is None:
                bagua.attach(model)
            else:
                backward(wrapped, ctx)

        began = time.monotonic()
        if ctx.rank == 0:
            timer = threading.Timer(0.3, end)
            timer.start()
            error = caught(wait)
            timer.join()
        else:
            time.sleep(0.8)
            error = caught(wait)
            if error == ("", ""):  # rank 0 had given all that was needed
                assert grad(model.a.weight) == 1.5
                error = caught(wait)
        return {"error": error, "seconds": time.monotonic() - began}


@pytest.mark.parametrize("what", ["close in backward", "shutdown in backward", "shutdown in attach"])
def test_the_others_hear_of_a_rank_that_left_under_way(pool: RankPool, what: str) -> None:
    results = on(pool, 2, ended, what)
    assert results[0]["error"][0] in ("ClosedError", "CollectiveError", "PeerError")
    assert results[1]["error"][0] == "PeerError"
    assert max(found["seconds"] for found in results) < 15.0


# ---- processes that a rank forks, as a DataLoader does


def forking(ctx: RankContext, algorithm: str) -> tuple[list[str], list[float | None]]:
    """What a child of rank 1 gets for each that it does with what its parent made, and the gradients."""
    options = {"interval": 1} if algorithm == "local_sgd" else {}
    with group(ctx, timeout_s=10.0) as made:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        wrapped = wrap("attach", model, optimizer, algorithm=bagua.algorithms.create(algorithm, **options))
        held = [wrapped.run]

        def train() -> None:
            optimizer.zero_grad()
            backward(wrapped, ctx)
            optimizer.step()

        train()
        uses: list[Callable[[], object]] = [
            train,
            held[0].close,
            lambda: bagua.attach(Two(), process_group=made),
            lambda: made.world.all_reduce_(torch.ones(1)).wait(),
        ]
        said = []
        for use in uses:
            if ctx.rank == 1:
                said.append(of_child(use))
            train()  # on all ranks: nothing that a child does is heard of
        return said, [grad(model.a.weight), grad(model.b.weight)]


def of_child(use: Callable[[], object]) -> str:
    """The error that `use` raises in a forked child, or an empty text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, ": ".join(caught(use)).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        return answer.read()


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd"])
def test_what_a_forked_child_does_is_refused_there_and_its_parent_trains_on(
    pool: RankPool, algorithm: str
) -> None:
    (_, first), (said, second) = on(pool, 2, forking, algorithm)
    for text in [said[0], *said[2:]]:
        assert text.startswith("ClosedError"), said
        assert "forked this one" in text
    assert said[1].startswith(("ClosedError", ": ")), said  # close() may find nothing to wait for
    assert (first, second) == (
        ([1.5, 1.5], [1.5, 1.5]) if algorithm == "gradient_allreduce" else ([1.0, 1.0], [2.0, 2.0])
    )
