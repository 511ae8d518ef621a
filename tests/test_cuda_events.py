"""Streams and events of CUDA in situations that seldom come by themselves: each turn is taken by hand."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bagua_rt.backend import Work
from bagua_rt.backends._nccl import NcclStatusError
from bagua_rt.backends.cuda_copies import _Pinned
from bagua_rt.backends.cuda_stream import CudaStream
from bagua_rt.errors import ClosedError, CollectiveError, PeerError, UsageError
from tests.contract.world import open_for, world
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


class WhileRemoving(deque[Any]):
    """What a stream keeps, and what somebody does just before an entry is taken out."""

    def __init__(self, kept: Iterable[Any], meanwhile: Callable[[], object]) -> None:
        super().__init__(kept)
        self._meanwhile = meanwhile

    def remove(self, value: Any) -> None:
        self._meanwhile()
        super().remove(value)


class WhileRecording:
    """A stream of cuda.core's, and what somebody does just before an event is recorded in it."""

    def __init__(self, raw: Any, meanwhile: Callable[[], object]) -> None:
        self._raw, self._meanwhile = raw, meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def record(self, event: Any) -> None:
        self._meanwhile()
        self._raw.record(event)


def launched_anew_meanwhile(ctx: RankContext) -> tuple[list[bool], bool]:
    """Whether a prepared call is under way that is launched as the launch before is found landed, and whether
    it is done where that is asked in the middle of a launch."""
    with world(ctx, "emulated") as w:
        lane: Any = w.lanes[0]
        gate = threading.Event()
        prepared = w.comm.prepare_all_reduce_(w.tensor([1.0]), "avg", stream=lane)
        work = prepared.launch()
        work.wait()
        w.hold(lane, gate)
        lane.kept = WhileRemoving(lane.kept, prepared.launch)
        lane.prune()
        is_pending = [each is work for each in lane.pending()]
        gate.set()
        work.wait()
        gate = threading.Event()
        w.hold(lane, gate)
        lane.raw = WhileRecording(lane.raw, work.is_done)
        prepared.launch()
        is_done = work.is_done()
        gate.set()
        work.wait()
        return is_pending, is_done


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
        calls: list[Callable[[], object]] = [
            prepared.launch,
            lambda: w.comm.all_reduce_(t, "sum", stream=w.lanes[0]),
            lambda: w.backend.kernels.copy_in([t], [t], 0.5, w.lanes[0]),
        ]
        for call in calls:
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


def apart_from_the_default_stream(ctx: RankContext) -> list[Any]:
    """Whether lanes go on while the legacy stream is held up; their priorities, and another stream's."""
    with world(ctx, "emulated") as w:
        gate, device = threading.Event(), w.device
        legacy: Any = SimpleNamespace(handle=0)
        w.hold(legacy, gate)
        t, other = w.tensor([1.0]), device.new_stream("other", high_priority=False)
        for stream in (*w.lanes, other):
            device.run(stream, partial(t.add_, 1))
            device.synchronize(device.record(stream), 5)
        gate.set()
        streams: Any = (*w.lanes, other)
        return [t.item(), [stream.raw.priority for stream in streams]]


def launched_late(ctx: RankContext) -> dict[str, float]:
    """What operations have left in memory once they are waited for, where NCCL launches all of them late."""
    with world(ctx, "emulated") as w:
        me, n = w.rank, w.size
        t, u, out = w.tensor([0.0] * n), w.tensor([0.0] * n), w.tensor([0.0] * n)
        parts = list(t.split(1)), list(out.split(1))
        lane = w.lanes[0]

        def grouped() -> Work:
            with w.comm.group():
                w.comm.all_reduce_(t, "sum", stream=lane)
                return w.comm.all_reduce(out, u, "sum", stream=lane)

        calls: dict[str, Callable[[], Work]] = {
            "all_reduce": lambda: w.comm.all_reduce(out, t, "sum", stream=lane),
            "group": grouped,
            "send_recv": lambda: w.comm.send_recv(t, (me + 1) % n, out, (me - 1) % n, stream=lane),
            "all_to_all_v": lambda: w.comm.all_to_all_v(parts[1], parts[0], stream=lane),
            "all_gather": lambda: w.comm.all_gather(out, t[:1], stream=lane),
            "reduce_scatter": lambda: w.comm.reduce_scatter(out[:1], t, "sum", stream=lane),
            "all_to_all": lambda: w.comm.all_to_all(out, t, stream=lane),
        }
        found = {}
        for name, call in calls.items():
            for each, value in ((t, me + 1.0), (u, me + 1.0), (out, -1.0)):
                each.fill_(value)
            call().wait()
            found[name] = out[0].item()
        return found


def behind_a_failure(ctx: RankContext) -> None:
    """What is asked of a lane while a communicator that failed there is not aborted yet."""
    for launched_before in (0, 2):  # twice: the third is a remembered call
        with world(ctx, "emulated") as w:
            comm: Any = w.comm
            other, lane, gate = w.comm.duplicate("other", w.lanes), w.lanes[0], threading.Event()
            t, u = w.tensor([1.0]), w.tensor([1.0])
            w.comm.broadcast_(t, stream=lane).wait()
            for _ in range(launched_before):
                w.comm.all_reduce_(t, "avg", stream=lane).wait()
            w.hold(lane, gate)
            w.comm.all_reduce_(t, "avg", stream=lane)
            comm.fail(CollectiveError("it failed"))
            with pytest.raises(PeerError, match=r"'world/other' is behind a failed operation.*it failed"):
                other.all_reduce_(u, "sum", stream=lane)
            assert w.device.query(w.device.record(lane)), "its outcome is known"
            gate.set()
            w.comm.abort()
            other.all_reduce_(u, "sum", stream=lane).wait()
            assert u.item() == w.size
            other.close()


def behind_a_failure_elsewhere(ctx: RankContext) -> None:
    """A lane that waits for another one is behind what fails there, also after launches in between."""
    for launches_between in range(2):
        with world(ctx, "emulated") as w:
            other: Any = w.comm.duplicate("other", w.lanes)
            lane, elsewhere, gate = *w.lanes, threading.Event()
            t, u = w.tensor([1.0]), w.tensor([1.0])
            for _ in range(2):  # from now on it is a remembered call, and its communicator's lane alone
                w.comm.all_reduce_(t, "avg", stream=lane).wait()
            w.hold(elsewhere, gate)
            w.device.wait(lane, other.all_reduce_(u, "avg", stream=elsewhere).event)
            for _ in range(launches_between):
                w.comm.all_reduce_(t, "avg", stream=lane)
            other.fail(CollectiveError("it failed"))
            with pytest.raises(PeerError, match=r"'world' is behind a failed operation.*it failed"):
                w.comm.all_reduce_(t, "avg", stream=lane)
            gate.set()
            other.abort()
            w.comm.all_reduce_(t, "avg", stream=lane).wait()


def refused_by_nccl(ctx: RankContext) -> None:
    """The other ranks count on an operation that NCCL refuses: the communicator is done with."""
    with world(ctx, "emulated") as w:
        nccl, t, out = vars(w.comm)["_nccl"], w.tensor([1.0]), w.tensor([0.0])
        refusal = NcclStatusError("ncclAllReduce failed with ncclSystemError")
        with mock.patch.object(nccl, "all_reduce", side_effect=refusal):
            with pytest.raises(PeerError, match="ncclSystemError"):
                w.comm.all_reduce(out, t, "sum")
            with pytest.raises(PeerError, match="ncclSystemError"):
                w.comm.barrier()
        with pytest.raises(PeerError, match="ncclSystemError"):
            w.comm.broadcast_(t)


def one_thread_issues(ctx: RankContext) -> None:
    """A thread is not let into NCCL while another one is on its way through, on whatever communicator."""
    with world(ctx, "emulated") as w:
        one: Any = w.comm
        two: Any = w.comm.duplicate("two", w.lanes)
        t, u, out = w.tensor([1.0]), w.tensor([1.0]), w.tensor([0.0])
        prepared = two.prepare_all_reduce_(u, "sum", stream=w.lanes[1])
        call = prepared._launch.__self__
        make, primitive, is_out, entered = call._make, one._all_reduce, threading.Event(), []
        thread = threading.Thread(target=prepared.launch)

        def noting() -> Any:
            entered.append(is_out.is_set())
            return make()

        def slow(*args: Any) -> None:
            thread.start()
            thread.join(0.2)
            primitive(*args)
            is_out.set()

        call._make, one._all_reduce = noting, slow
        one.all_reduce(out, t, "sum", stream=w.lanes[0])
        thread.join(10)
        assert entered == [True]
        w.device.synchronize(w.device.record(w.lanes[0]))
        w.device.synchronize(w.device.record(w.lanes[1]))
        assert (out.item(), u.item()) == (w.size, w.size)
        another: Any = open_for("emulated", ctx.rank)
        assert another.device.issue_lock is vars(w.device)["issue_lock"]
        another.close()
        two.close()


def under_a_side_stream(ctx: RankContext) -> None:
    """The compute stream is the one that the calling thread's torch uses now."""
    with world(ctx, "emulated") as w:
        device: Any = w.device
        t, gate = w.tensor([1.0]), threading.Event()
        side: Any = device.new_stream("side")
        outer = device.compute_stream()
        w.comm.all_reduce_(t, "sum").wait()
        with mock.patch.object(device.torch_side, "current_stream", return_value=side.handle):
            assert device.compute_stream().handle == side.handle
            w.hold(side, gate)
            work = w.comm.all_reduce_(t, "sum")
            assert not work.is_done()
        assert device.compute_stream() is outer
        gate.set()
        work.wait()
        assert t.item() == w.size**2


def timed_long_after_the_base(ctx: RankContext) -> list[bool]:
    """Whether times far from the base of a device get a new one, and agree over the change."""
    with world(ctx, "emulated") as w:
        device: Any = w.device
        events = [device.record(w.lanes[0], timed=True) for _ in range(3)]
        device.synchronize(events[-1])
        times_us, bases = [], []
        for event in reversed(events):
            with mock.patch("bagua_rt.backends.cuda_device._BASE_IS_OLD_MS", -1e9):
                times_us.append(device.time_us(event))
            bases.append(device._base)
        return [len({id(base) for base in bases}) == 3, max(times_us) - min(times_us) < 1e5]


def outgrown(ctx: RankContext) -> list[list[bool]]:
    """Whether memory that kernels of a lane share lives while they run, and after, once there is more."""
    with world(ctx, "emulated") as w:
        lane: Any = w.lanes[0]
        memory: list[weakref.ref[torch.Tensor]] = []
        gate, torch_side = threading.Event(), vars(w.device)["torch_side"]

        def empty_on(stream: int, size_bytes: int) -> torch.Tensor:
            assert stream == lane.handle
            found = torch.empty(size_bytes, dtype=torch.uint8)
            memory.append(weakref.ref(found))
            return found

        w.hold(lane, gate)
        with mock.patch.object(torch_side, "empty_on", empty_on):
            for rows in (4, 8):
                values, error = w.tensor([[0.0] * 8] * rows), w.tensor([[0.0] * 8] * rows)
                wire = w.tensor([[0] * 9] * rows, torch.uint8)
                w.backend.kernels.sign_encode(values, error, values.numel(), 0, wire, lane)
        living = [[each() is not None for each in memory]]
        gate.set()
        w.device.synchronize(w.device.record(lane))
        w.device.record(lane)
        return [*living, [each() is not None for each in memory]]


def collected_beside_a_hang(ctx: RankContext) -> bool:
    """Is all memory of a backend given back while something on the device doesn't end?"""
    with world(ctx, "emulated") as w:
        other = open_for("emulated", ctx.rank)
        t, flat = w.tensor([1.0, 2.0]), w.tensor([0.0, 0.0])
        stream = other.device.compute_stream()
        other.kernels.copy_in([t], [flat], 2.0, stream)
        other.device.synchronize(other.device.record(stream))
        assert flat.tolist() == [2.0, 4.0]
        gate = threading.Event()
        w.hold(w.lanes[0], gate)
        late = threading.Timer(5.0, gate.set)  # or nobody would ever open it
        late.start()
        other.close()
        del other, stream
        gc.collect()
        waited = gate.is_set()
        gate.set()
        late.cancel()
        late.join()
        return not waited


def test_an_old_base_of_times_is_renewed() -> None:
    assert RankPool(1, product.environment(base={})).run(timed_long_after_the_base) == [[True, True]]


def test_scratch_memory_lives_until_its_kernels_have_run() -> None:
    answers = RankPool(1, product.environment(base={})).run(outgrown)
    assert answers == [[[True, True], [False, True]]]


def pinned_again(ctx: RankContext) -> list[Any]:
    """The size of pinned memory that is asked for when a smaller piece was given back, and who gets that."""
    from cuda import core

    with world(ctx, "emulated") as w:
        device: Any = w.device
        address = _Pinned(core, device, 4096).address
        larger, again = _Pinned(core, device, 8192), _Pinned(core, device, 4096)
        return [larger._buffer.size, again.address == address]


def test_pinned_memory_is_used_again_by_its_size() -> None:
    assert RankPool(1, product.environment(base={})).run(pinned_again) == [[8192, True]]


def test_the_garbage_collector_does_not_wait_for_the_device() -> None:
    assert RankPool(1, product.environment(base={})).run(collected_beside_a_hang) == [True]


@pytest.mark.parametrize("fn", [one_thread_issues, under_a_side_stream])
def test_threads_and_side_streams(fn: Callable[[RankContext], None]) -> None:
    RankPool(2, product.environment(base={})).run(fn)


@pytest.mark.parametrize("fn", [behind_a_failure, behind_a_failure_elsewhere, refused_by_nccl])
def test_what_comes_after_a_failure_is_refused(fn: Callable[[RankContext], None]) -> None:
    RankPool(2, product.environment(base={})).run(fn)


def test_lanes_do_not_wait_for_torchs_default_stream() -> None:
    assert RankPool(1, product.environment(base={})).run(apart_from_the_default_stream) == [
        [4.0, [-1, -1, 0]]
    ]


def test_an_operation_is_not_over_before_nccl_has_launched_it() -> None:
    late = product.environment(base={}, enqueue_delay_us=20_000)
    for rank, found in enumerate(RankPool(2, late).run(launched_late)):
        sums = dict.fromkeys(("all_reduce", "group", "reduce_scatter"), 3.0)
        firsts = dict.fromkeys(("all_to_all_v", "all_gather", "all_to_all"), 1.0)
        assert found == {**sums, **firsts, "send_recv": 2.0 - rank}


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


def test_a_prepared_call_that_is_launched_anew_is_under_way() -> None:
    assert RankPool(2, product.environment(base={})).run(launched_anew_meanwhile) == [([True], False)] * 2


def test_a_failure_between_a_launch_and_its_event_is_the_works() -> None:
    answers = RankPool(2, product.environment(base={})).run(failed_meanwhile)
    assert answers == [["it failed meanwhile"] * 2] * 2
