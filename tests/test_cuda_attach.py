"""The whole runtime on the CUDA backend over the emulator: the weights that gloo gives, and no race.

The emulator delays operations at random, and answers ncclInProgress to every call. Ordering bugs, planted one
by one in the backend, must be reported whatever the weights are.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.backends import open_backend
from bagua_rt.config import RuntimeConfig
from bagua_rt.errors import BackendUnavailableError, BaguaError
from tests.emulator import emulator, product
from tests.ranks import RankContext, RankPool

STEPS = 5
COUNT = 20_000


class Net(nn.Module):
    """Three layers with biases: three buckets at the sizes that the tests use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def gradients(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, bagua.algorithms.create("gradient_allreduce")


def signs(model: nn.Module) -> tuple[Any, Any]:
    optimizer = bagua.optim.OneBitAdam(model.parameters(), lr=0.01, warmup_steps=2)
    return optimizer, optimizer.algorithm


def peers(model: nn.Module) -> tuple[Any, Any]:
    return torch.optim.SGD(model.parameters(), lr=0.1), bagua.algorithms.create("decentralized")


ALGORITHMS: dict[str, Callable[[nn.Module], tuple[Any, Any]]] = {
    "gradient_allreduce": gradients,
    "onebit_adam": signs,
    "decentralized": peers,
}


# ---- planted bugs: each takes one piece of order out of the backend


def no_wait(of_lanes: bool, *, gate_is_open: bool = True) -> Iterator[None]:
    """Waits of lanes, or of the compute stream, are forgotten, and the host has seen nothing instead."""
    from bagua_rt.backends.cuda_device import CudaDevice
    from bagua_rt.backends.cuda_stream import CudaStream
    from bagua_rt.scheduler import Pipeline

    right = CudaDevice.wait

    def wait(self: CudaDevice, stream: Any, event: Any) -> None:
        if isinstance(stream, CudaStream) and stream.is_ours != of_lanes:
            right(self, stream, event)

    # The host's commit gate would order the optimizer behind the lanes by itself.
    opens = gate_is_open and not of_lanes
    gate = mock.patch.object(Pipeline, "confirm", return_value=None) if opens else nullcontext()
    with mock.patch.object(CudaDevice, "wait", wait), unseen(), gate:
        yield


def unseen() -> Any:
    """Events that the scheduler asks are never complete already."""
    from bagua_rt.backends.cuda_device import CudaDevice

    return mock.patch.object(CudaDevice, "query", return_value=False)


def recorded_elsewhere(of_lanes: bool) -> Iterator[None]:
    """Events of lanes, or of the compute stream, are recorded on a stream that has nothing to do."""
    from bagua_rt.backends.cuda_device import CudaDevice
    from bagua_rt.backends.cuda_stream import CudaEvent, CudaStream

    right = CudaDevice.record_holding
    kept: list[object] = []  # nothing but the order is wrong

    def record(self: CudaDevice, stream: CudaStream, holds: object, **options: Any) -> CudaEvent:
        if stream.is_ours == of_lanes:
            kept.append(holds)
            stream = self.new_stream("idle")
        return right(self, stream, holds, **options)

    with mock.patch.object(CudaDevice, "record_holding", record), unseen():
        yield


def not_ready() -> Iterator[None]:
    """Events are recorded while NCCL is still in progress; the wait comes with the next operation."""
    from bagua_rt.backends._cuda_calls import AllReduceCall
    from bagua_rt.backends.cuda import CudaCommunicator

    queue, launch = CudaCommunicator._queue, AllReduceCall.launch
    kept: list[object] = []  # NCCL really writes too late here: not into memory that is another's by then

    def queue_late(self: CudaCommunicator, lane: Any, work: Any) -> Any:
        kept.append(work.args)
        if self._nccl is not None:
            self._nccl.wait_ready(10)
        return queue(self, lane, work)

    def launch_late(self: AllReduceCall, holds: object) -> Any:
        kept.append(holds)
        if self.communicator._nccl is not None:
            self.communicator._nccl.wait_ready(10)
        return launch(self, holds)

    with (
        mock.patch.object(CudaCommunicator, "_queue", queue_late),
        mock.patch.object(AllReduceCall, "launch", launch_late),
        mock.patch.object(CudaCommunicator, "wait_launched", return_value=None),
        unseen(),
    ):
        yield
    emulator.drain()


def nothing_kept() -> Iterator[None]:
    """Tensors are not kept alive until their event."""
    from bagua_rt.backends.cuda_stream import CudaEvent, CudaStream

    right = CudaEvent.queue_on

    def queue_on(self: CudaEvent, stream: CudaStream, sequence: int = 0) -> None:
        self.holds = ()
        right(self, stream, sequence)

    with mock.patch.object(CudaEvent, "queue_on", queue_on):
        yield


BUGS: dict[str, Callable[[], Iterator[None]]] = {
    "none": lambda: iter([None]),
    "a lane does not wait for the gradients": lambda: no_wait(of_lanes=True),
    "the optimizer does not wait for the lanes": lambda: no_wait(of_lanes=False),
    "ready recorded on another stream": lambda: recorded_elsewhere(of_lanes=False),
    "done recorded on another stream": lambda: recorded_elsewhere(of_lanes=True),
    "recorded before NCCL has launched": not_ready,
    "tensors let go at once": nothing_kept,
}
HOST_HIDES = {"only the compute stream does not wait": lambda: no_wait(of_lanes=False, gate_is_open=False)}
planted = {name: contextmanager(make) for name, make in (BUGS | HOST_HIDES).items()}


# ---- what ranks run


@contextmanager
def open_group(ctx: RankContext, backend: str) -> Iterator[bagua.ProcessGroup]:
    options: dict[str, Any] = {"timeout_s": 30.0}
    if ctx.world_size > 1:
        options.update(store=ctx.store(), rank=ctx.rank, world_size=ctx.world_size)
    if backend == "gloo":
        with bagua.init("cpu", **options) as group:
            yield group
        return
    product.install()
    emulator.reset()
    with bagua.init(f"cuda:{ctx.rank}", **options) as group:
        device: Any = group._job.backend.device
        with device.torch_side.on_compute_stream():
            yield group


def found() -> list[str]:
    """What the emulator has reported, once everything has run."""
    assert emulator.drain()
    texts = emulator.reports()
    emulator.reset()
    return texts


def train(ctx: RankContext, backend: str, algorithm: str, bug: str = "none", commit: str = "host") -> Any:
    """Train a few steps; the weights, and the emulator's reports."""
    with planted[bug](), open_group(ctx, backend) as group:
        torch.manual_seed(3)
        model = Net()
        optimizer, chosen = ALGORITHMS[algorithm](model)
        options: dict[str, Any] = {"bucket_cap_mb": 0.004, "first_bucket_mb": 0.002, "process_group": group}
        options["commit"] = commit
        run = bagua.attach(model, optimizer, chosen, **options)
        assert len(run.buckets) == 3
        source = torch.Generator().manual_seed(100 + ctx.rank)
        for _ in range(STEPS):
            inputs = torch.randn(8, 24, generator=source)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.close()
        weights = [p.detach().clone() for p in model.parameters()]
    return [w.numpy() for w in weights], [] if backend == "gloo" else found()


def reports_of_training(ctx: RankContext, bug: str, commit: str = "host") -> list[str]:
    """The emulator's reports; a rank that orders too little may also leave the other in an operation."""
    with suppress(BaguaError):
        return list(train(ctx, "emulated", "gradient_allreduce", bug, commit)[1])
    return found()


def train_sparse(ctx: RankContext, backend: str) -> Any:
    """Train an embedding whose gradients are sparse, and a layer behind it."""
    with open_group(ctx, backend) as group:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Embedding(30, 8, sparse=True), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = bagua.attach(model, optimizer, process_group=group)
        source = torch.Generator().manual_seed(100 + ctx.rank)
        for _ in range(STEPS):
            model(torch.randint(30, (6,), generator=source)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.close()
        weights = [p.detach().clone() for p in model.parameters()]
    return [w.numpy() for w in weights], [] if backend == "gloo" else found()


def let_go(ctx: RankContext, bug: str) -> list[tuple[bool, bool]]:
    """Whether a tensor that nobody holds lives while its operation waits for rank 1, and after it."""
    answers = []
    with planted[bug](), open_group(ctx, "emulated") as group:
        device, comm = group._job.backend.device, group.world
        comm.barrier().wait()
        for _ in range(3):
            t, out = torch.ones(COUNT), torch.empty(COUNT)
            device.wait(comm.lanes[0], device.record(device.compute_stream()))
            if ctx.rank == 1:
                time.sleep(0.3)
            work = comm.all_reduce(out, t, "sum")
            given = weakref.ref(t)
            del t
            lives = given() is not None
            work.wait()
            answers.append((lives, given() is not None))
    assert not found()
    return answers


# ---- tests


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    """Random delays everywhere, and NCCL calls that are in progress for a while."""
    return product.environment(
        base={}, delay=(0.2, 300, 1), nccl_delay_us=100, enqueue_delay_us=200, quiet=True
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_weights_are_gloos(environment: Mapping[str, str], algorithm: str, world_size: int) -> None:
    expected = RankPool(world_size).run(train, "gloo", algorithm, timeout=60)
    answers = RankPool(world_size, environment).run(train, "emulated", algorithm, timeout=100)
    for (right, _), (weights, reports) in zip(expected, answers, strict=True):
        assert not reports, "\n".join(reports)
        for mine, its in zip(weights, right, strict=True):
            # The kernels sum a scale in float64, gloo's in float32, and three ranks' sums have another order.
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_stream_alone_may_be_the_commit_gate(environment: Mapping[str, str], algorithm: str) -> None:
    pool = RankPool(2, environment)
    expected = pool.run(train, "emulated", algorithm, timeout=100)
    answers = pool.run(train, "emulated", algorithm, "none", "stream", timeout=100)
    for (right, _), (weights, reports) in zip(expected, answers, strict=True):
        assert not reports, "\n".join(reports)
        for mine, its in zip(weights, right, strict=True):
            assert (mine == its).all()


def test_with_the_stream_as_gate_the_host_orders_nothing(environment: Mapping[str, str]) -> None:
    """Without the compute stream's wait there is a race then, and none where the host waits."""
    bug = "only the compute stream does not wait"
    pool = RankPool(2, environment)
    for commit, races in (("host", False), ("stream", True)):
        answers = pool.run(reports_of_training, bug, commit, timeout=100)
        found = [any(text.startswith("race") for text in reports) for reports in answers]
        assert found == [races] * 2, commit


def test_sparse_gradients_are_gloos(environment: Mapping[str, str]) -> None:
    expected = RankPool(2).run(train_sparse, "gloo", timeout=60)
    answers = RankPool(2, environment).run(train_sparse, "emulated", timeout=100)
    for (right, _), (weights, reports) in zip(expected, answers, strict=True):
        assert not reports, "\n".join(reports)
        for mine, its in zip(weights, right, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-6, atol=1e-6)


ORDER_BUGS = [name for name in BUGS if name not in ("none", "tensors let go at once")]


@pytest.mark.parametrize("bug", ORDER_BUGS)
def test_a_planted_ordering_bug_is_reported(environment: Mapping[str, str], bug: str) -> None:
    answers = RankPool(2, environment).run(reports_of_training, bug, timeout=100)
    assert all(any(text.startswith("race") for text in reports) for reports in answers), answers


@pytest.mark.parametrize("bug", ["none", "tensors let go at once"])
def test_tensors_live_until_their_event(environment: Mapping[str, str], bug: str) -> None:
    first, _ = RankPool(2, environment).run(let_go, bug, timeout=60)
    assert first == [(bug == "none", False)] * 3


def test_a_cpu_build_of_torch_is_an_error_that_says_so(environment: Mapping[str, str]) -> None:
    (text,) = RankPool(1, environment).run(open_without_torch)
    assert "torch can't use the CUDA device" in text or not text


def open_without_torch(ctx: RankContext) -> str:
    from bagua_rt.backends import _cuda_torch, cuda

    with mock.patch.object(cuda, "CudaTorch", _cuda_torch.CudaTorch):
        if torch.cuda.is_available():
            return ""
        with pytest.raises(BackendUnavailableError) as caught:
            open_backend("cuda", timeout_s=5, config=RuntimeConfig.from_environment(), local_rank=0)
    return str(caught.value)


def traced(ctx: RankContext, commit: Any, path: str) -> tuple[dict[str, int], list[str]]:
    """How many spans of each kind two steps leave, after one that is not traced and before another."""
    with open_group(ctx, "emulated"):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = bagua.attach(model, optimizer, commit=commit)

        def step() -> None:
            model(torch.ones(2, 24)).sum().backward()
            optimizer.step()

        step()
        with run.tracing(path) as trace:
            step()
            step()
        step()
        run.close()
        kinds = [span.name if span.name.startswith("exposed") else span.track for span in trace.spans]
    return {kind: kinds.count(kind) for kind in kinds}, found()


@pytest.mark.parametrize("commit", ["host", "stream"])
def test_a_trace_has_the_rounds_within_it(
    environment: Mapping[str, str], tmp_path: Path, commit: str
) -> None:
    ((spans, reports),) = RankPool(1, environment).run(traced, commit, str(tmp_path / "trace.json"))
    assert not reports
    assert spans.pop("exposed communication") == 2
    assert spans.pop("queue") == 2
    assert sum(spans.values()) == 2, spans  # the one bucket, in its lane
    assert (tmp_path / "trace.json").exists()
