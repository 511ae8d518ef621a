"""An NCCL communicator's states: in progress, failed, revoked, closed, aborted (case B67)."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from bagua_rt.backends import _nccl_comm
from bagua_rt.backends import _nccl_functions as functions
from bagua_rt.backends._nccl import NcclStatusError
from bagua_rt.backends._nccl_comm import NcclComm
from bagua_rt.errors import ClosedError, CollectiveTimeoutError
from tests import fake_nccl
from tests.fake_nccl import CHILD, COMM, UNIQUE_ID, Fake
from tools import nccl_layouts

TABLE: dict[str, Any] = json.loads(nccl_layouts.TABLE.read_text())
FLOAT32 = functions.datatype("float32")
SUM = functions.OPS["sum"]
SEND, RECV, STREAM = 0x7F12_3456_7000, 0x7F98_7654_3000, 0x5555_0000_1110


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return Fake(fake_nccl.build(tmp_path_factory.mktemp("fake")))


@pytest.fixture
def fake(newest: Fake) -> Fake:
    newest.reset()
    return newest


@contextmanager
def a_thread_inside(fake: Fake, comm: NcclComm, how: str, milliseconds: int) -> Iterator[threading.Thread]:
    """A thread that stays in NCCL for so long, in an operation of `comm`: a "call", or one "prepared"."""
    with comm.prepare() as prepared:
        comm.all_reduce(SEND, RECV, 1, FLOAT32, SUM, STREAM)
    call = partial(comm.all_reduce, SEND, RECV, 1, FLOAT32, SUM, STREAM)
    fake.block(milliseconds)
    thread = threading.Thread(target=prepared if how == "prepared" else call)
    thread.start()
    while thread.is_alive() and not fake.inside:
        time.sleep(0.001)
    assert fake.inside
    yield thread
    thread.join()


class TestProgress:
    """[Note: NCCL in progress] and case B67."""

    def test_init_hands_over_id_and_config_and_waits(self, fake: Fake) -> None:
        fake.answer(functions.IN_PROGRESS, polls=3)
        comm = fake.nccl.init_rank(5, UNIQUE_ID, 2, timeout_s=5, commName="lane", maxCTAs=8)
        (line,) = fake.calls()
        name, nranks, rank, _, unique_id, _, config = line.split()
        assert (name, nranks, rank, bytes.fromhex(unique_id)) == (
            "ncclCommInitRankConfig",
            "5",
            "2",
            UNIQUE_ID,
        )
        raw, fields = bytes.fromhex(config), TABLE["versions"]["2.32.3"]["fields"]
        size, magic, version = struct.unpack("=QII", raw[:16])
        assert (size, magic, version, len(raw)) == (120, 0xCAFEBEEF, 23203, 120)
        at = {name: offset for name, (offset, _) in fields.items()}
        assert raw[at["blocking"] : at["blocking"] + 4] == bytes(4)
        assert raw[at["maxCTAs"] : at["maxCTAs"] + 4] == b"\x08\0\0\0"
        assert comm.handle == COMM
        assert comm.all_reduce(SEND, RECV, 1, FLOAT32, SUM, STREAM)

    def test_init_that_nobody_joins_is_aborted(self, fake: Fake) -> None:
        fake.answer(functions.IN_PROGRESS, polls=10**9)
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"within 0\.2 s on rank 2 of 5"):
            fake.nccl.init_rank(5, UNIQUE_ID, 2, timeout_s=0.2)
        assert time.monotonic() - begin < 2
        assert fake.calls()[1:] == [f"ncclCommAbort {COMM}"]

    def test_init_that_fails_later_is_aborted_and_raised(self, fake: Fake) -> None:
        fake.answer(functions.IN_PROGRESS, polls=2, final=functions.REMOTE_ERROR)
        with pytest.raises(NcclStatusError, match="ncclRemoteError") as caught:
            fake.nccl.init_rank(5, UNIQUE_ID, 2, timeout_s=5)
        assert caught.value.status == functions.REMOTE_ERROR
        assert fake.calls()[1:] == [f"ncclCommAbort {COMM}"]

    @pytest.mark.parametrize("how", ["call", "prepared", "group"])
    def test_nothing_is_called_until_the_launch_is_complete(self, fake: Fake, how: str) -> None:
        comm = fake.comm()
        with comm.prepare() as prepared:
            comm.all_reduce(SEND, RECV, 1, FLOAT32, SUM, STREAM)
        fake.answer(functions.IN_PROGRESS, polls=3)
        if how == "group":
            with comm.group():
                comm.send(SEND, 1, FLOAT32, 0, STREAM)
                comm.recv(RECV, 1, FLOAT32, 0, STREAM)
        elif how == "prepared":
            assert not prepared()
        else:
            assert not comm.all_reduce(SEND, RECV, 1, FLOAT32, SUM, STREAM)
        before = fake.calls()
        operations: list[Callable[[], object]] = [
            prepared,
            lambda: comm.all_reduce(SEND, RECV, 1, FLOAT32, SUM, STREAM),
            lambda: comm.broadcast(SEND, RECV, 1, FLOAT32, 0, STREAM),
            lambda: comm.split(0, 0, 1.0),
            lambda: comm.register(SEND, 1),
        ]
        if how != "group":  # the fake's answer was taken by the first call of the group, here by the only one
            assert [comm.poll(), comm.poll()] == [False, False]
        for operation in operations:
            with pytest.raises(ClosedError, match="wait_ready"):
                operation()
        assert fake.calls() == before
        comm.wait_ready(5)
        assert comm.poll()
        assert prepared()
        assert len(fake.calls()) == len(before) + 1

    def test_an_error_after_in_progress_is_raised_and_stays(self, fake: Fake) -> None:
        comm = fake.comm()
        fake.answer(functions.IN_PROGRESS, polls=3, final=functions.REMOTE_ERROR)
        assert not comm.all_reduce(SEND, RECV, 1, FLOAT32, SUM, STREAM)
        with pytest.raises(NcclStatusError, match=r"asynchronously.*ncclRemoteError \(6\)"):
            comm.wait_ready(5)
        with pytest.raises(ClosedError, match="ncclRemoteError"):
            comm.all_reduce(SEND, RECV, 1, FLOAT32, SUM, STREAM)
        comm.abort(1)
        assert fake.calls()[-1] == f"ncclCommAbort {COMM}"

    def test_wait_ready_has_a_deadline(self, fake: Fake) -> None:
        comm = fake.comm()
        fake.answer(functions.IN_PROGRESS, polls=10**9)
        comm.all_reduce(SEND, RECV, 1, FLOAT32, SUM, STREAM)
        with pytest.raises(CollectiveTimeoutError):
            comm.wait_ready(0.05)

    @pytest.mark.parametrize("status", [functions.SUCCESS, functions.IN_PROGRESS])
    def test_split_and_shrink_give_children_also_late(self, fake: Fake, status: int) -> None:
        comm = fake.comm()
        fake.answer(status, polls=3)
        child = comm.split(1, 7, 5.0)
        assert child is not None
        assert (child.handle, child.rank, child.nranks) == (CHILD, 2, 5)
        fake.answer(status, polls=3)
        excluded = [3, 1]
        shrunk = comm.shrink(excluded, 5.0, abort=True, maxCTAs=3)
        assert (shrunk.handle, shrunk.rank, excluded) == (CHILD, 2, [3, 1])
        calls = [line for line in fake.calls() if "Split" in line or "Shrink" in line]
        assert calls[0] == f"ncclCommSplit {COMM} 1 7 config NULL"
        assert calls[1].startswith(f"ncclCommShrink {COMM} [3,1,] 1 config 7800")
        assert comm.split(None, 0, 5.0) is None
        assert fake.calls()[-1] == f"ncclCommSplit {COMM} -1 0 config NULL"

    @pytest.mark.parametrize("blocking", [False, True])
    def test_a_child_blocks_as_its_parent_does_unless_told(self, fake: Fake, blocking: bool) -> None:
        comm = fake.comm(blocking=blocking)
        options: list[dict[str, int]] = [{}, {"maxCTAs": 3}, {"blocking": not blocking}]
        children = [comm.split(0, 0, 5.0, **option) for option in options]
        assert [child and child.blocking for child in children] == [blocking, blocking, not blocking]
        at, _ = TABLE["versions"]["2.32.3"]["fields"]["blocking"]
        configs = [
            bytes.fromhex(line.split()[-1]) for line in fake.calls() if "Split" in line and "NULL" not in line
        ]
        assert [config[at] for config in configs] == [blocking, not blocking]

    def test_a_child_shares_its_parents_lock(self, fake: Fake) -> None:
        comm = fake.comm()
        child = comm.split(0, 0, 5.0)
        assert child is not None
        assert child._lock is comm._lock  # NCCL lets them share resources


class TestEnd:
    def test_close_finalizes_waits_and_destroys_once(self, fake: Fake) -> None:
        comm = fake.comm()
        fake.answer(functions.IN_PROGRESS, polls=3)
        comm.close(5)
        comm.close(5)
        comm.abort(5)
        assert fake.calls() == [f"ncclCommFinalize {COMM}", f"ncclCommDestroy {COMM}"]
        assert comm.handle == 0
        with pytest.raises(ClosedError, match="one that was aborted"):
            comm.poll()
        with pytest.raises(ClosedError):
            comm.send(SEND, 1, FLOAT32, 0, STREAM)

    def test_nothing_is_destroyed_unless_finalizing_has_ended_well(self, fake: Fake) -> None:
        comm = fake.comm()
        fake.answer(functions.IN_PROGRESS, polls=3, final=functions.REMOTE_ERROR)
        with pytest.raises(NcclStatusError, match="ncclRemoteError"):
            comm.close(5)
        assert fake.calls() == [f"ncclCommFinalize {COMM}"]
        assert comm.handle == COMM

    def test_nothing_is_finalized_before_a_launch_has_ended_well(self, fake: Fake) -> None:
        comm = fake.comm()
        fake.answer(functions.IN_PROGRESS, polls=3, final=functions.REMOTE_ERROR)
        comm.send(SEND, 1, FLOAT32, 0, STREAM)
        with pytest.raises(NcclStatusError, match="ncclRemoteError"):
            comm.close(5)
        assert [line.split()[0] for line in fake.calls()] == ["ncclSend"]

    @pytest.mark.parametrize("end", ["Destroy", "Abort"])
    def test_what_ends_badly_is_raised_and_over(self, fake: Fake, end: str) -> None:
        comm = fake.comm()
        comm.revoke(5)  # no finalizing, then
        fake.answer(functions.REMOTE_ERROR)
        with pytest.raises(NcclStatusError, match=f"ncclComm{end}"):
            comm.close(5) if end == "Destroy" else comm.abort(5)
        assert comm.handle == 0

    def test_what_nccl_may_still_write_to_is_never_freed(self, fake: Fake) -> None:
        calls: list[Callable[[NcclComm], object]] = [
            lambda comm: comm.split(0, 0, 0.02),
            lambda comm: comm.shrink([0], 0.02),
            lambda comm: comm.window_register(SEND, 64, 0, 0.02),
        ]
        for call in calls:
            kept, comm = len(_nccl_comm._abandoned_outputs), fake.comm()
            fake.answer(functions.IN_PROGRESS, polls=10**9)
            with pytest.raises(CollectiveTimeoutError):
                call(comm)
            assert len(_nccl_comm._abandoned_outputs) == kept + 1
            fake.reset()

    def test_after_revoke_no_finalize(self, fake: Fake) -> None:
        comm = fake.comm()
        fake.answer(functions.IN_PROGRESS, polls=3)
        comm.revoke(5)
        with pytest.raises(ClosedError, match="revoked"):
            comm.send(SEND, 1, FLOAT32, 0, STREAM)
        comm.shrink([0], 5.0)
        comm.close(5)
        names = [line.split()[0] for line in fake.calls()]
        assert names[0] == "ncclCommRevoke"
        assert names[-1] == "ncclCommDestroy"
        assert "ncclCommFinalize" not in names


class Watched:
    """NCCL's functions, and whether a lock was held when they were called."""

    def __init__(self, functions: Any, lock: threading.Lock) -> None:
        self._functions, self._lock = functions, lock
        self.was_locked: dict[str, bool] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.was_locked[name] = self._lock.locked()
            status: int = getattr(self._functions, name)(*arguments)
            return status

        return call


def test_every_function_is_called_under_the_lock(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = fake.comm()
    watched = Watched(comm.nccl.functions, comm._lock)
    monkeypatch.setattr(comm.nccl, "functions", watched)
    for fact in ("ncclCommCount", "ncclCommUserRank", "ncclCommCuDevice"):
        comm.query(fact)
    comm.deregister(comm.register(SEND, 1))
    comm.window_deregister(comm.window_register(SEND, 64, 0, 5.0))
    comm.destroy_op(comm.create_pre_mul_sum(0.5, FLOAT32))
    comm.poll()
    child = comm.split(0, 0, 5.0)
    assert child is not None
    child.close(5.0)
    comm.shrink([0], 5.0)
    comm.revoke(5.0)
    comm.abort(5.0)
    assert [name for name, was_locked in watched.was_locked.items() if not was_locked] == []
    assert len(watched.was_locked) == 16


@pytest.mark.parametrize("how", ["call", "prepared"])
class TestThreadInside:
    """[Note: one thread in NCCL]"""

    def test_a_poll_never_runs_beside_it(self, fake: Fake, how: str) -> None:
        comm = fake.comm()
        with a_thread_inside(fake, comm, how, 300):
            assert comm.poll()
            assert not fake.inside

    def test_abort_waits_for_it_and_never_runs_beside_it(self, fake: Fake, how: str) -> None:
        comm = fake.comm()
        with a_thread_inside(fake, comm, how, 400):
            with pytest.raises(CollectiveTimeoutError, match="a thread is inside a call"):
                comm.abort(0.02)
            with pytest.raises(ClosedError, match="aborted"):  # refused, although nothing was aborted yet
                comm.send(SEND, 1, FLOAT32, 0, STREAM)
            comm.abort(5)
        assert fake.calls()[1:] == [f"ncclCommAbort {COMM}"]

    def test_it_has_released_the_gil(self, fake: Fake, how: str) -> None:
        seen = 0
        with a_thread_inside(fake, fake.comm(), how, 300) as thread:
            while thread.is_alive():
                seen += fake.inside
                time.sleep(0.001)
        assert seen > 20
