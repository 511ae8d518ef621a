"""What calls cost the host: the runtime's own operations, NCCL's binding, and a launch of a kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tools.gpu_check.kernels import Workplace
from tools.gpu_check.steps import Bench, Step

CALLS, ROUNDS = 100, 30  # a hundred launches fit into every queue: nothing waits for the device in a round
COUNT = 256


def per_call_us(
    call: Callable[[], object],
    settle: Callable[[], object],
    bench: Bench,
    calls: int = CALLS,
    rounds: int = ROUNDS,
) -> list[float]:
    """Microseconds a call, a number for each round; `settle` lets the device catch up in between."""
    if bench.options.is_small:
        calls, rounds = 5, 2
    call()
    settle()
    found = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        found.append((time.perf_counter_ns() - begin) / 1000 / calls)
        settle()
    return found


def tell(bench: Bench, name: str, rounds: list[float]) -> None:
    """Report the median and the slowest round."""
    middle, slowest = statistics.median(rounds), max(rounds)
    bench.figure(name, f"{middle:.2f} us a call, slowest round {slowest:.2f}", us=middle, slowest_us=slowest)


def launches(bench: Bench) -> None:
    """Kernels, events and torch's own launch, for comparison."""
    backend = bench.backend()
    with bench.computing(backend):
        place = Workplace(bench)
        device, stream, dev = place.device, place.stream, place.device.torch_device
        lane = bench.share("lane", lambda: device.new_stream("lane0"))

        def settle() -> None:
            for each in (stream, lane):
                device.synchronize(device.record(each))

        t = torch.zeros(COUNT, device=dev)
        many = [torch.zeros(COUNT, device=dev) for _ in range(100)]
        flat = torch.zeros(100 * COUNT, device=dev).split(COUNT)
        kernels = place.kernels
        calls: dict[str, Callable[[], object]] = {
            "record and wait": lambda: device.wait(lane, device.record(stream)),
            "torch add_": lambda: t.add_(1),
            "copy_in of 1 tensor": lambda: kernels.copy_in(many[:1], flat[:1], 0.5, stream),
            "copy_in of 100 tensors": lambda: kernels.copy_in(many, flat, 0.5, stream),
            "copy_out of 100 tensors": lambda: kernels.copy_out(flat, many, stream),
        }
        for name, call in calls.items():
            tell(bench, name, per_call_us(call, settle, bench))


def collectives(bench: Bench) -> None:
    """all_reduce_ of the API in a world of one rank, where NCCL is not asked: what the checks cost."""
    backend = bench.backend()
    device = backend.device
    lane = bench.share("lane", lambda: device.new_stream("lane0"))
    no_store: Any = None
    comm = backend.connect(no_store, 0, 1, "alone", [lane], timeout_s=20.0)
    with bench.computing(backend):
        t = torch.zeros(COUNT, device=device.torch_device)
        device.synchronize(device.record(device.compute_stream()))

        def settle() -> None:
            device.synchronize(device.record(lane))

        prepared = comm.prepare_all_reduce_(t, "sum")
        calls: dict[str, Callable[[], object]] = {
            "all_reduce_": lambda: comm.all_reduce_(t, "sum"),
            "all_reduce_ on a lane": lambda: comm.all_reduce_(t, "sum", stream=lane),
            "a prepared all_reduce_": prepared.launch,
        }
        for name, call in calls.items():
            tell(bench, f"{name}, alone, without NCCL", per_call_us(call, settle, bench))
    comm.close()


def nccl(bench: Bench) -> None:
    """NCCL's all-reduce by the binding, on communicators of one rank: blocking, and not."""
    from bagua_rt.backends import _nccl_functions as c
    from bagua_rt.backends._nccl import Nccl

    backend = bench.backend()
    device: Any = backend.device
    lane = bench.share("lane", lambda: device.new_stream("lane0"))
    library = Nccl()
    with bench.computing(backend):
        t = torch.zeros(COUNT, device=device.torch_device)
        device.synchronize(device.record(device.compute_stream()))
        for blocking in (True, False):
            comm = library.init_rank(1, library.unique_id(), 0, timeout_s=20.0, blocking=blocking)
            settle = partial(_settled, comm, device, lane)
            pointer, handle = t.data_ptr(), vars(lane)["handle"]
            arguments = (pointer, pointer, COUNT, c.DATATYPES["float32"], c.OPS["sum"], handle)

            def call(comm: Any = comm, arguments: tuple[int, ...] = arguments) -> None:
                if not comm.all_reduce(*arguments):
                    comm.wait_ready(20.0)

            how = "blocking" if blocking else "non-blocking, until it is launched"
            tell(bench, f"ncclAllReduce, one rank, {how}", per_call_us(call, settle, bench))
            with comm.prepare() as prepared:
                comm.all_reduce(*arguments)

            def again(comm: Any = comm, prepared: Callable[[], bool] = prepared) -> None:
                if not prepared():
                    comm.wait_ready(20.0)

            tell(bench, f"the same, prepared, {how}", per_call_us(again, settle, bench))
            comm.close(20.0)


def _settled(comm: Any, device: Any, lane: Any) -> None:
    comm.wait_ready(20.0)
    device.synchronize(device.record(lane))


STEPS = (Step("launches", launches), Step("collectives", collectives), Step("NCCL", nccl))
