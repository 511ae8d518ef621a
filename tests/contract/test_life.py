"""Begin and end: nothing leaks or hangs, exit codes are kept, fork is refused in the child."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bagua_rt.backends import open_backend
from bagua_rt.backends._nccl_comm import NcclComm
from bagua_rt.config import RuntimeConfig
from bagua_rt.errors import BackendUnavailableError, ClosedError, CollectiveError, UsageError
from tests.contract.world import world
from tests.ranks import RankContext, RankPool, run_scripts

Pools = Callable[[int], RankPool]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def os_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def settled(count: Callable[[], int], at_most: int) -> int:
    """The count once it is at most that, or after 5 s."""
    deadline = time.monotonic() + 5
    while count() > at_most and time.monotonic() < deadline:
        time.sleep(0.01)
    return count()


def cycles(ctx: RankContext, backend: str) -> None:
    """Twenty communicators later, file descriptors and threads are what they were."""
    with world(ctx, backend) as w:
        t = w.tensor([1.0])
        files = threads = 0
        for k in range(22):
            comm = w.backend.connect(ctx.store(), w.rank, w.size, f"c{k % 5}", w.lanes, timeout_s=20)
            for lane in w.lanes:
                comm.all_reduce_(t, "avg", stream=lane).wait()
            comm.close()
            if k == 1:
                w.comm.barrier().wait()
                files, threads = open_files(), os_threads()
        w.comm.barrier().wait()
        assert settled(open_files, files) <= files
        assert settled(os_threads, threads) <= threads
        assert t.item() == 1.0


def backends_come_and_go(ctx: RankContext, backend: str) -> None:
    before = None
    for _ in range(5):
        with world(ctx, backend) as w:
            w.comm.all_reduce_(w.tensor([1.0])).wait()
        now = threading.active_count()
        before = now if before is None else before
    assert before is not None
    assert settled(threading.active_count, 1) <= before


def in_flight(ctx: RankContext, backend: str) -> None:
    """B66: a tensor that nobody else holds lives until its operation is complete, and no longer."""
    with world(ctx, backend) as w:
        growth = []
        for k in range(120):
            t = torch.full((250_000,), float(w.rank + k), device=w.device.torch_device)
            out = torch.empty_like(t)
            work = w.comm.all_reduce(out, t, "sum", stream=w.lanes[k % 2])
            given = weakref.ref(t)
            del t
            junk = [torch.full_like(out, -1.0) for _ in range(3)]
            work.wait()
            assert out.eq(k * w.size + sum(range(w.size))).all()
            assert given() is None
            del junk
            growth.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        if backend == "gloo":  # the emulator keeps what it has sent for a while
            # The first ones warm malloc's arenas up; one tensor kept by each operation would be 80 MB.
            assert growth[-1] - growth[40] < 40_000_000, growth
        t = w.tensor([0.0] * 10)
        work = w.comm.all_reduce_(t)
        work.wait()
        kept = weakref.ref(t)
        del t
        assert kept() is None, "the work, or its lane, still holds the tensor"


def fork(ctx: RankContext, backend: str) -> None:
    """The child is refused and ends; the parent goes on."""
    with world(ctx, backend) as w:
        t = w.tensor([1.0])
        w.comm.all_reduce_(t).wait()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                w.comm.all_reduce_(t)
            except ClosedError as error:
                code = 0 if "fork" in str(error) else 2
            try:
                w.device.run(w.lanes[0], gc.collect)
                code = 3
            except ClosedError:
                pass
            w.comm.close()
            w.comm.abort()
            os._exit(code)
        for _ in range(5):
            w.comm.all_reduce_(t).wait()
        deadline = time.monotonic() + 10
        ended, status = os.waitpid(child, os.WNOHANG)
        while ended == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
        if ended == 0:
            os.kill(child, signal.SIGKILL)
        assert ended == child
        assert os.waitstatus_to_exitcode(status) == 0
        w.comm.all_reduce_(t).wait()


def forgotten(ctx: RankContext, backend: str) -> None:
    """Dropping a communicator warns and does nothing else: its peers may still use theirs."""
    with world(ctx, backend) as w:
        comm = w.comm.duplicate("forgotten", w.lanes)
        comm.barrier().wait()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del comm
            gc.collect()
        assert any("never closed" in str(c.message) for c in caught)
        w.comm.barrier().wait()


@pytest.mark.parametrize("fn", [cycles, backends_come_and_go, in_flight, fork, forgotten])
def test_life(pools: Pools, backend: str, fn: Callable[..., None]) -> None:
    pools(2).run(fn, backend, timeout=90)


class BodyError(Exception):
    pass


def registered(ctx: RankContext, backend: str) -> None:
    """Registered memory gives the same sums; each registration is taken back, whatever ends its context."""
    with world(ctx, backend) as w, counted() as calls:
        t, right = w.tensor([float(w.rank)] * 1000), float(sum(range(w.size)))
        with w.comm.register(t), w.comm.register(t[500:]):
            for op, value in (("sum", right), ("avg", right), ("max", right)):
                w.comm.all_reduce_(t, op).wait()  # type: ignore[arg-type]
                assert t[0].item() == t[-1].item() == value
            w.comm.broadcast_(t[500:], w.size - 1, stream=w.lanes[1]).wait()
        with pytest.raises(BodyError), w.comm.register(t):
            raise BodyError
        w.comm.all_reduce_(t, "max").wait()
        assert t[0].item() == right
        with w.comm.register(t[:0]):  # there is nothing to register
            pass
        with pytest.raises(UsageError, match="contiguous"), w.comm.register(t[::2]):
            pass
        assert calls == ([3, 3] if w.size > 1 and not w.device.host_is_compute else [0, 0])
        other = w.comm.duplicate("other", w.lanes)
        w.comm.barrier().wait()
        with other.register(t):
            other.abort()  # takes its registrations along
        with pytest.raises(CollectiveError), other.register(t):
            pass
        other.close()
        w.comm.barrier().wait()


@contextmanager
def counted() -> Iterator[list[int]]:
    """How often NCCL was asked to register memory, and to forget it."""
    calls = [0, 0]

    def counting(index: int, right: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            calls[index] += 1
            return right(*args)

        return count

    with (
        mock.patch.object(NcclComm, "register", counting(0, NcclComm.register)),
        mock.patch.object(NcclComm, "deregister", counting(1, NcclComm.deregister)),
    ):
        yield calls


@pytest.mark.parametrize("size", [1, 2])
def test_registered_memory(pools: Pools, backend: str, size: int) -> None:
    pools(size).run(registered, backend)


def eager_close(ctx: RankContext, backend: str) -> None:
    """A rank that closes at once after its last wait does not break the last operation of a slower one."""
    with world(ctx, backend) as w:
        for k in range(25):
            comm = w.backend.connect(ctx.store(), w.rank, w.size, "eager", w.lanes, timeout_s=20)
            t = w.tensor([1.0] * (100_000 if k % 2 else 3))
            work = comm.broadcast_(t) if k % 2 else comm.all_reduce_(t)
            work.wait()
            comm.close()


def test_eager_close(pools: Pools, backend: str) -> None:
    pools(3).run(eager_close, backend, timeout=90)


SCRIPT = """
import os, sys, threading, time
import torch, torch.distributed as dist
from tests.contract.world import open_for
rank, way, path, name = int(os.environ["TEST_RANK"]), *sys.argv[1:]
store = dist.FileStore(path, 2)
backend = open_for(name, rank, timeout_s=30)
lanes = [backend.device.new_stream(f"lane{i}") for i in range(2)]
comm = backend.connect(store, rank, 2, "world", lanes, timeout_s=60)
t = torch.ones(10, device=backend.device.torch_device)
comm.all_reduce_(t).wait()
pending = []
if way.startswith("pending"):
    pending = [comm.recv(torch.ones_like(t), 1 - rank, stream=lane) for lane in lanes]
time.sleep(0.2)
if way.endswith("return"): code = 0
if way.endswith("close"): comm.close(); comm.close(); backend.close()
if way.endswith("abort"): comm.abort()
if way.endswith("one") and rank == 0: comm.close()
if way.endswith("exit"): sys.exit(3)
if way.endswith("raise"): raise KeyError("the test's own")
if way.endswith("timeout"): pending[0].wait(0.1)
"""
WAYS = {
    "idle-return": 0,
    "idle-exit": 3,
    "idle-raise": 1,
    "idle-close": 0,
    "idle-one": 0,
    "pending-return": 0,
    "pending-exit": 3,
    "pending-raise": 1,
    "pending-close": 0,
    "pending-abort": 0,
    "pending-timeout": 1,
}


@pytest.mark.parametrize("way", WAYS)
def test_b58_the_process_ends_with_its_own_exit_code(
    backend: str,
    environment: Mapping[str, str],
    require_ranks: Callable[[int], None],
    way: str,
    tmp_path: Path,
) -> None:
    require_ranks(2)
    results = run_scripts(
        [SCRIPT] * 2,
        timeout=100,
        env=[{**environment, "TEST_RANK": str(rank)} for rank in range(2)],
        args=[way, str(tmp_path / "store"), backend],
    )
    for result in results:
        assert result.exit_code == WAYS[way], result.stderr
        assert ("Traceback" in result.stderr) == (WAYS[way] == 1), result.stderr


def test_a_device_that_is_not_there_is_an_error_that_lists_what_was_looked_for() -> None:
    with pytest.raises(BackendUnavailableError, match=r"libcuda\.so\.1.*device.*cuda-bindings"):
        open_backend("cuda:63", timeout_s=5, config=RuntimeConfig(), local_rank=0)
    for wrong in ("meta", "gpu", "xpu"):
        with pytest.raises(UsageError, match="device"):
            open_backend(wrong, timeout_s=5, config=RuntimeConfig(), local_rank=0)
    with pytest.raises(UsageError, match="timeout_s"):
        open_backend("cpu", timeout_s=0, config=RuntimeConfig(), local_rank=0)


def test_one_rank_opens_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    files, tasks = open_files(), threading.active_count()
    opened = open_backend("cpu", timeout_s=5, config=RuntimeConfig(), local_rank=0)
    no_store: object = None
    comm = opened.connect(no_store, 0, 1, "w", [opened.device.new_stream("lane0")], timeout_s=5)  # type: ignore[arg-type]
    comm.all_reduce_(torch.ones(3)).wait()
    assert open_files() == files
    comm.close()
    opened.close()
    assert settled(threading.active_count, tasks) == tasks
