"""What calls cost the host: ``python tools/comm_bench.py --host``.

Measured over a libcuda and a libnccl whose calls do nothing, so that nothing but our own work is left: those
of tests/emulator in its no-op mode, or others by --libraries. Tensors are the CPU's, for no kernel runs.

Two processes are the two ranks. The calls are measured on rank 0 while rank 1 sleeps; the training step, and
a bucket's way through the event loop, on both at once, which wants four free cores. The first row is the
yardstick: on the machine that the bars are for it takes 0.37 us. So on any other machine compare multiples of
the yardstick: the best round of a row over the yardstick's best round, and the bar over 0.37 us.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import bagua_rt as bagua
from bagua_rt.algorithms import Algorithm, AlgorithmState, Context
from bagua_rt.backend import Communicator, Stream, Views
from bagua_rt.bucket import Bucket

RANK, STORE = "COMM_BENCH_RANK", "COMM_BENCH_STORE"
CALLS, ROUNDS = 100, 200
BUCKETS, WIDTH, STEPS = 100, 64, 100
YARDSTICK = "ncclAllReduce by ctypes, its arguments converted before (the yardstick)"
YARDSTICK_US = 0.37  # on the machine that the bars are for


@dataclass(frozen=True)
class Cost:
    """One row, in microseconds.

    Attributes:
        name: What was called.
        us: The median.
        other_us: The best, or what `other` says.
        other: What `other_us` is.
        bar_us: The most that it should cost, on free cores; None where nobody said.
    """

    name: str
    us: float
    other_us: float
    other: str = "best"
    bar_us: float | None = None

    def in_yardsticks(self, yardstick_us: float) -> str:
        """What it costs, and what it should: in yardsticks of this machine, and of the bars'."""
        found = f"{(self.other_us if self.other == 'best' else self.us) / yardstick_us:,.1f}"
        return found if self.bar_us is None else f"{found} (bar {self.bar_us / YARDSTICK_US:,.1f})"


class HostTorch:
    """`bagua_rt.backends._cuda_torch.TorchSide` on the CPU's tensors, which no kernel touches."""

    torch_device = torch.device("cpu")

    def __init__(self, index: int) -> None:
        from cuda.core import Device, StreamOptions

        device = Device(index)
        device.set_current()
        self._compute = device.create_stream(options=StreamOptions(nonblocking=True))
        self._handle = int(self._compute.handle)

    def current_stream(self) -> int:
        return self._handle

    def is_capturing(self) -> bool:
        return False

    def run(self, stream: int, fn: Callable[[], object]) -> None:
        fn()

    def empty_on(self, stream: int, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


# ---- calls


def timed(name: str, call: Callable[[], object], bar_us: float | None = None, calls: int = CALLS) -> Cost:
    """Time a call, in rounds of some."""
    for _ in range(calls):
        call()
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter_ns() - begin) / calls / 1e3)
    return Cost(name, statistics.median(rounds), min(rounds), bar_us=bar_us)


def calls_of_the_api(pg: bagua.ProcessGroup) -> Iterator[Cost]:
    """The low-level communication API, everything checked."""
    comm, lane, n = pg.world, pg.world.lanes[0], pg.world_size
    t, u, wide = torch.ones(1000), torch.ones(1000), torch.ones(1000 * n)
    yield timed("all_reduce_ on a lane", lambda: comm.all_reduce_(t, "sum", stream=lane), 3.0)
    yield timed("all_reduce_, behind the compute stream", lambda: comm.all_reduce_(t, "sum"))
    prepared = comm.prepare_all_reduce_(t, "sum", stream=lane)
    yield timed("all_reduce_, prepared: launch()", prepared.launch, 1.0)
    yield timed("all_reduce, out of place", lambda: comm.all_reduce(u, t, "sum", stream=lane))
    yield timed("broadcast_", lambda: comm.broadcast_(t, stream=lane))
    yield timed("all_gather", lambda: comm.all_gather(wide, t, stream=lane))
    yield timed("reduce_scatter", lambda: comm.reduce_scatter(t, wide, "sum", stream=lane))
    yield timed("send_recv", lambda: comm.send_recv(t, 1, u, 1, stream=lane))


def calls_of_the_binding(pg: bagua.ProcessGroup) -> Iterator[Cost]:
    """NCCL's, below the API; nccl4py's, where it is installed."""
    from bagua_rt.backends import _nccl_functions as c

    comm: Any = pg.world
    t, lane, nccl = torch.ones(1000), comm.lanes[0], comm._nccl
    numbers = (t.data_ptr(), t.data_ptr(), t.numel(), c.DATATYPES["float32"], c.OPS["sum"])
    arguments = c.convert("ncclAllReduce", (*numbers, nccl.handle, lane.handle))
    function = nccl.nccl.untyped("ncclAllReduce")
    yield timed(YARDSTICK, lambda: function(*arguments))
    yield timed("NcclComm.all_reduce", lambda: nccl.all_reduce(*numbers, lane.handle))
    with nccl.prepare() as prepared:
        nccl.all_reduce(*numbers, lane.handle)
    yield timed("NcclComm.all_reduce, prepared", prepared)
    yield from calls_of_nccl4py(nccl.handle, numbers, lane)


def calls_of_nccl4py(handle: int, numbers: tuple[int, ...], lane: Any) -> Iterator[Cost]:
    """The same by nccl4py, on our communicator: only where it calls the library that made it."""
    if importlib.util.find_spec("nccl") is None:
        return
    from cuda.core import Device
    from nccl import core
    from nccl.bindings import nccl as binding

    binding.get_version()
    maps = Path("/proc/self/maps").read_text().splitlines()
    if len({line.split()[-1] for line in maps if "libnccl.so" in line}) != 1:
        return
    memory, stream = Device().allocate(4 * numbers[2], stream=lane.raw), lane.handle
    theirs = partial(core.Communicator(handle).allreduce, memory, memory, core.SUM, stream=lane.raw)
    yield timed("nccl4py's Communicator.allreduce", theirs)
    bare = binding.Comm(handle) if hasattr(binding, "Comm") else handle  # a type of its own since 0.6
    yield timed("nccl4py's bare binding", lambda: binding.all_reduce(*numbers, bare, stream))


def calls_of_the_kernels(pg: bagua.ProcessGroup) -> Iterator[Cost]:
    """Launches, and events between streams."""
    backend: Any = pg.backend
    device, kernels = backend.device, backend.kernels
    lane, compute = pg.world.lanes[0], device.compute_stream()
    yield timed("record and wait", lambda: device.wait(lane, device.record(compute)))
    for count in (1, 10, 1000):
        tensors = [torch.ones(100 + k % 7) for k in range(count)]
        flat = torch.zeros(sum(map(torch.numel, tensors)))
        views = Views(flat.split([t.numel() for t in tensors]))
        calls = max(1, CALLS // count)
        what = f"of {count:,} tensor{'s' * (count > 1)}"
        yield timed(f"copy_in {what}", lambda: kernels.copy_in(tensors, views, 0.5, compute), None, calls)  # noqa: B023
        yield timed(f"copy_out {what}", lambda: kernels.copy_out(views, tensors, compute), None, calls)  # noqa: B023


# ---- a step


class Chain(nn.Module):
    """As many matrices as there are to be buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(BUCKETS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in self.matrices:
            x = x @ matrix
        return x


class Enqueued(AlgorithmState):
    """Sums, and notes when each bucket's collective was enqueued."""

    at_ns: ClassVar[dict[int, int]] = {}

    def communicate(self, bucket: Bucket, comm: Communicator, stream: Stream) -> None:
        comm.all_reduce_(bucket.flat, "sum", stream=stream)
        self.at_ns[id(bucket.params[-1])] = time.perf_counter_ns()


@dataclass(frozen=True)
class Noting(Algorithm):
    """`Enqueued`, declared."""

    name: ClassVar[str] = "noting"

    def bind(self, context: Context) -> AlgorithmState:
        return Enqueued(context)


def step_of(model: nn.Module) -> Callable[[], None]:
    """Forward and backward, gradients dropped."""
    x = torch.randn(8, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        for p in model.parameters():
            p.grad = None

    return step


def clocks(step: Callable[[], None]) -> list[tuple[float, float, float]]:
    """For each step, in us: wall clock, this thread's time on a core, and all threads' of the process."""
    found = []
    for _ in range(STEPS):
        before = time.perf_counter(), time.thread_time(), time.process_time()
        step()
        after = time.perf_counter(), time.thread_time(), time.process_time()
        found.append(tuple((b - a) * 1e6 for a, b in zip(before, after, strict=True)))
    return found  # type: ignore[return-value]


def steps(pg: bagua.ProcessGroup) -> Iterator[Cost]:
    """A step of many buckets beyond the same step without us; and each bucket's way through the loop."""
    plain = clocks(step_of(Chain()))
    model, megabytes = Chain(), WIDTH * WIDTH * 4 / 2**20
    run = bagua.attach(
        model, algorithm=Noting(), process_group=pg, bucket_cap_mb=megabytes, first_bucket_mb=megabytes
    )
    step = step_of(model)
    for _ in range(20):
        step()
    attached = clocks(step)
    for name, index in (("wall clock", 0), ("the training thread's time", 1), ("all threads' time", 2)):
        ours, without = ([each[index] for each in found] for found in (attached, plain))
        cost = statistics.median(ours) - statistics.median(without)
        title, bar = f"a step of {BUCKETS} buckets beyond autograd: {name}", None if index else 3000.0
        yield Cost(title, cost, min(ours) - min(without), bar_us=bar)
    ready_ns: dict[int, int] = {}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: ready_ns.__setitem__(id(p), time.perf_counter_ns()))
    waits = []
    for _ in range(STEPS // 2):
        step()
        waits += [(Enqueued.at_ns[key] - ready_ns[key]) / 1e3 for key in ready_ns]
    run.close()
    waits.sort()
    p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    yield Cost("last gradient ready → collective enqueued: median", p50, waits[0], bar_us=60.0)
    yield Cost("last gradient ready → collective enqueued: 99th percentile", p99, waits[-1], "worst", 300.0)


# ---- ranks


def be_a_rank(json_path: Path | None) -> int:
    """Measure; tell on rank 0."""
    from bagua_rt.backends import cuda

    vars(cuda)["CudaTorch"] = HostTorch
    torch.set_num_threads(1)
    rank = int(os.environ[RANK])
    store = dist.FileStore(os.environ[STORE], 2)
    with bagua.init(f"cuda:{rank}", store=store, rank=rank, world_size=2, timeout_s=120) as pg:
        found = measure(pg)
    if rank == 0:
        tell(found, json_path)
    return 0


def measure(pg: bagua.ProcessGroup) -> list[Cost]:
    """Every row. Collective, over two ranks; rank 1 has those of the step alone."""
    found: list[Cost] = []
    if pg.rank == 0:
        for rows in (calls_of_the_binding, calls_of_the_api, calls_of_the_kernels):
            found += rows(pg)
        pg.store.set("comm_bench/calls", "measured")
    pg.store.get("comm_bench/calls")
    return [*found, *steps(pg)]


def tell(found: list[Cost], json_path: Path | None) -> None:
    """Print a table, and write the JSON file."""
    load = os.getloadavg()[0]
    table = Table(box=box.SIMPLE_HEAD, caption=f"microseconds; load {load:.1f} on {os.cpu_count()} cores")
    table.add_column("")
    yardstick_us = next(each.other_us for each in found if each.name == YARDSTICK)
    for column in ("median", "best", "bar", "in yardsticks"):
        table.add_column(column, justify="right")
    for each in found:
        bar = "" if each.bar_us is None else f"{each.bar_us:g}"
        other = f"{each.other_us:,.2f}" + (f" ({each.other})" if each.other != "best" else "")
        table.add_row(each.name, f"{each.us:,.2f}", other, bar, each.in_yardsticks(yardstick_us))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if json_path is not None:
        about = {"load": load, "cores": os.cpu_count(), "torch": torch.__version__, "python": sys.version}
        figures = {**about, "rows": [asdict(each) for each in found]}
        json_path.write_text(json.dumps(figures, indent=1) + "\n")


def environment(libraries: Path | None) -> dict[str, str]:
    """The variables of processes that load libraries which do nothing."""
    if libraries is None:
        from tests.emulator import product

        return product.environment(noop=True)
    paths = [str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    nccl = libraries / "libnccl.so.2"
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths), "BAGUA_RT_NCCL": str(nccl)}


def main(libraries: Path | None, json_path: Path | None) -> int:
    """Start the two ranks, or be one.

    Args:
        libraries: Where libcuda.so.1 and libnccl.so.2 are; None takes tests/emulator's.
        json_path: Where to write the figures; None: nowhere.

    Returns:
        The exit code.
    """
    if RANK in os.environ:
        return be_a_rank(json_path)
    with tempfile.TemporaryDirectory() as folder:
        variables = {**environment(libraries), STORE: f"{folder}/store", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv], env={**variables, RANK: str(rank)})
            for rank in range(2)
        ]
        try:
            while all(rank.poll() is None for rank in ranks):
                time.sleep(0.1)
            failed = any(rank.returncode for rank in ranks)  # the other waits for it then
            return 1 if failed else max(rank.wait(timeout=30.0) for rank in ranks)
        except subprocess.TimeoutExpired:
            return 1
        finally:
            for rank in ranks:
                rank.kill()
