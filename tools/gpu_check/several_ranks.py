"""Several ranks: on as many devices, or on the one device where the NCCL that is loaded allows it.

Ranks of different processes take turns on one device, so times here say little about several devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tools.gpu_check import contract, training
from tools.gpu_check.host_cost import per_call_us, tell
from tools.gpu_check.steps import Bench, Step

SIZES_BYTES = (1 << 10, 1 << 20, 64 << 20)
_SMALL_BYTES = (1 << 10,)
CALLS, ROUNDS = 20, 5  # a collective of processes that take turns on a device may take milliseconds


def values(bench: Bench) -> None:
    """Each kind of collective gives what its closed form says."""
    with bench.group() as group, bench.computing(group.backend):
        comm, n, me, dev = group.world, bench.world_size, bench.rank, group.device
        mine = torch.arange(1000, dtype=torch.float32, device=dev) + me
        everyone = torch.empty(n * 1000, device=dev)
        part = torch.empty(1000 // n, device=dev)
        after, before = (me + 1) % n, (me - 1) % n
        received = torch.empty(1000, device=dev)
        device = group.backend.device
        device.synchronize(device.record(device.compute_stream()))
        works = [
            comm.all_gather(everyone, mine),
            comm.reduce_scatter(part, mine[: 1000 // n * n], "sum"),
            comm.send_recv(mine, after, received, before),
            comm.all_reduce_(mine, "avg"),
        ]
        for work in works:
            work.wait()
        base = torch.arange(1000, dtype=torch.float32, device=dev)
        right = {
            "all_gather": torch.equal(everyone, torch.cat([base + rank for rank in range(n)])),
            "reduce_scatter": torch.equal(
                part, (n * base + sum(range(n)))[me * part.numel() :][: part.numel()]
            ),
            "send_recv": torch.equal(received, base + before),
            "all_reduce_": torch.allclose(mine, base + (n - 1) / 2),
        }
        for name, is_right in right.items():
            bench.check(f"{name} of {n} ranks", is_right)
        bench.check("broadcast_object", comm.broadcast_object({"from": me}, n - 1) == {"from": n - 1})


def rates(bench: Bench) -> None:
    """all_reduce_: what a call costs the host, and how long it takes until it is complete."""
    with bench.group() as group, bench.computing(group.backend):
        device, comm = group.backend.device, group.world
        lane = comm.lanes[0]

        def settle() -> None:
            device.synchronize(device.record(lane))

        for size_bytes in _SMALL_BYTES if bench.options.is_small else SIZES_BYTES:
            t = torch.zeros(size_bytes // 4, device=group.device)
            device.synchronize(device.record(device.compute_stream()))
            label = f"all_reduce_ of {size_bytes >> 10} KiB, {bench.world_size} ranks"
            calls: dict[str, Callable[[], object]] = {
                "enqueued": partial(comm.all_reduce_, t, "sum"),
                "prepared, enqueued": comm.prepare_all_reduce_(t, "sum").launch,
            }
            for name, call in calls.items():
                tell(bench, f"{label}: {name}", per_call_us(call, settle, bench, CALLS, ROUNDS))
            times = 2 if bench.options.is_small else 10
            begin: Any = device.record(lane, timed=True)
            for _ in range(times):
                comm.all_reduce_(t, "sum")
            end: Any = device.record(lane, timed=True)
            device.synchronize(end)
            us = max(float(end.raw - begin.raw), 1e-6) * 1e3 / times
            rate = size_bytes * 2 * (bench.world_size - 1) / bench.world_size / us / 1e3
            bench.figure(f"{label}: complete", f"{us:.0f} us each, bus bandwidth {rate:.1f} GB/s", us=us)


def suite(bench: Bench) -> None:
    """tests/contract with worlds of several ranks."""
    if bench.options.most_ranks < 2:
        bench.skip("contract, several ranks", "ranks can't meet on this machine: see above")
    elif bench.options.stand_in:
        bench.skip("contract, several ranks", "the suite has emulated ranks of its own")
    else:
        least = bench.options.devices + 1 if bench.options.devices < bench.options.most_ranks else 2
        contract.contract(bench, "contract, several ranks", f"{least}-{bench.options.most_ranks}", ())


STEPS = (
    Step("values", values, ranks=2, deadline_s=40.0),
    *(
        Step(f"weights {commit}", partial(training.weights, commit=commit), ranks=2, deadline_s=30.0)
        for commit in training.COMMITS
    ),
    Step("rates", rates, ranks=2, deadline_s=30.0),
    Step("step host", partial(training.step_time, commit="host"), ranks=2, deadline_s=40.0),
    Step("contract", suite, deadline_s=contract.DEADLINE_S),
)
