"""Streams and events of CUDA in situations that seldom come by themselves: each turn is taken by hand."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest

from bagua_rt.backends.cuda_stream import CudaStream
from bagua_rt.errors import ClosedError, CollectiveError, UsageError
from tests.contract.world import world
from tests.emulator import product
from tests.ranks import RankContext, RankPool


class Meanwhile:
    """A stream of cuda.core's during whose waits another thread lets go of what has landed."""

    def __init__(self, raw: Any, other: CudaStream) -> None:
        self._raw, self._other = raw, other
        self.was_spare: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def wait(self, event: Any) -> None:
        self._other.prune()
        self.was_spare.append(any(each is event for each in self._other.events.spare))
        self._raw.wait(event)


def waited_for(ctx: RankContext) -> list[bool]:
    """Whether the driver's event that a wait is about to take was given to others meanwhile."""
    with world(ctx, "emulated") as w:
        one: Any
        two: Any
        one, two = w.lanes
        gate = threading.Event()
        w.hold(one, gate)
        event: Any = w.device.record(one)
        gate.set()
        deadline = time.monotonic() + 10
        while not event.raw.is_done and time.monotonic() < deadline:
            time.sleep(0.001)
        two.raw = meanwhile = Meanwhile(two.raw, one)
        w.device.wait(two, event)
        return meanwhile.was_spare


def failed_meanwhile(ctx: RankContext) -> list[str]:
    """What the works say of a communicator that fails between a launch and the event behind it."""
    said = []
    for is_remembered in (False, True):
        with world(ctx, "emulated") as w:
            comm: Any = w.comm
            t, out = w.tensor([1.0]), w.tensor([0.0])
            for _ in range(2):
                comm.all_reduce_(t, "sum", stream=w.lanes[0]).wait()
            (call,) = comm._remembered.values()
            make, primitive = call._make, comm._all_reduce

            def fail_behind(launch: Any, *args: Any, comm: Any = comm) -> Any:
                result = launch(*args)
                comm.fail(CollectiveError("it failed meanwhile"))
                return result

            call._make = lambda make=make: fail_behind(make)
            comm._all_reduce = lambda *args, primitive=primitive: fail_behind(primitive, *args)
            if is_remembered:
                work = comm.all_reduce_(t, "sum", stream=w.lanes[0])
            else:
                work = comm.all_reduce(out, t, "sum", stream=w.lanes[0])
            with pytest.raises(CollectiveError) as caught:
                work.wait()
            said.append(str(caught.value))
            ctx.store().set(f"done/{is_remembered}/{w.rank}", "")
            ctx.store().get(f"done/{is_remembered}/{1 - w.rank}")
    return said


def closed_early(ctx: RankContext) -> list[Any]:
    """Whether what a stream holds outlives the stream that is closed over it; what a closed lane says."""
    with world(ctx, "emulated") as w:
        gate, stream = threading.Event(), w.device.new_stream("early")
        w.hold(stream, gate)
        fn = partial(w.tensor([1.0]).add_, 1)
        given = weakref.ref(fn)
        w.device.run(stream, fn)
        w.device.close_stream(stream)
        del fn, stream
        gc.collect()
        lives = given() is not None
        gate.set()
        deadline = time.monotonic() + 10
        while given() is not None and time.monotonic() < deadline:
            w.device.close_stream(w.device.new_stream("another"))  # which looks at what has landed
        t = w.tensor([1.0])
        prepared = w.comm.prepare_all_reduce_(t, "sum", stream=w.lanes[0])
        prepared.launch().wait()
        w.comm.barrier().wait()
        w.device.close_stream(w.lanes[0])
        for call in (prepared.launch, lambda: w.comm.all_reduce_(t, "sum", stream=w.lanes[0])):
            with pytest.raises(ClosedError, match="'lane0' was closed"):
                call()
        return [lives, given() is not None]


def captured(ctx: RankContext) -> list[str]:
    """What is said to whoever communicates within a capture, where nothing is launched."""
    said = []
    with world(ctx, "emulated") as w:
        device: Any = w.device
        t, sequence = w.tensor([1.0]), vars(w.comm)["sequence"]
        calls = (lambda: w.comm.all_reduce_(t, "sum"), device.compute_stream, w.comm.barrier)
        for call in calls:
            with (
                mock.patch.object(device.torch_side, "is_capturing", return_value=True),
                pytest.raises(UsageError) as caught,
            ):
                call()
            said.append(str(caught.value))
        assert vars(w.comm)["sequence"] == sequence
        w.comm.all_reduce_(t, "sum").wait()
        assert t.item() == w.size
    return said


def test_what_is_under_way_outlives_a_stream_that_is_closed() -> None:
    answers = RankPool(2, product.environment(base={})).run(closed_early)
    assert answers == [[True, False]] * 2


def test_a_capture_into_a_cuda_graph_is_refused() -> None:
    for said in RankPool(2, product.environment(base={})).run(captured):
        assert len(set(said)) == 1
        assert "CUDA graph" in said[0]
        assert "outside of torch.cuda.graph()" in said[0]


def test_an_event_that_is_waited_for_is_not_recorded_anew() -> None:
    assert RankPool(1, product.environment(base={})).run(waited_for) == [[False]]


def test_a_failure_between_a_launch_and_its_event_is_the_works() -> None:
    answers = RankPool(2, product.environment(base={})).run(failed_meanwhile)
    assert answers == [["it failed meanwhile"] * 2] * 2
