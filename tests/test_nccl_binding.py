"""NCCL operations and groups against a fake that writes them down, and the real library (case B35)."""

from __future__ import annotations

import ctypes
import json
import math
import pickle
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_rt.backends import _nccl_functions as functions
from bagua_rt.backends._nccl import Nccl, NcclStatusError
from bagua_rt.backends._nccl_comm import NcclComm
from bagua_rt.errors import BackendUnavailableError, NcclError, UsageError
from tests import fake_nccl
from tests.fake_nccl import COMM, UNIQUE_ID, Fake
from tools import nccl_layouts

TABLE: dict[str, Any] = json.loads(nccl_layouts.TABLE.read_text())
FLOAT32, BFLOAT16, INT64 = (functions.datatype(name) for name in ("float32", "bfloat16", "int64"))
SUM, AVG = functions.OPS["sum"], functions.OPS["avg"]
INVALID_ARGUMENT = functions.STATUS_NAMES.index("ncclInvalidArgument")
COUNT = 3_000_000_000
SEND, RECV, STREAM = 0x7F12_3456_7000, 0x7F98_7654_3000, 0x5555_0000_1110


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return Fake(fake_nccl.build(tmp_path_factory.mktemp("fake")))


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    folder = tmp_path_factory.mktemp("old")
    return Fake(fake_nccl.build(folder, "FAKE_VERSION=22703", "FAKE_BEFORE_228", "FAKE_WITHOUT_SHRINK"))


@pytest.fixture
def fake(newest: Fake) -> Fake:
    newest.reset()
    return newest


@pytest.fixture(scope="module")
def real() -> Nccl:
    header = nccl_layouts.installed_header()
    if header is None:
        pytest.skip("no nvidia-nccl wheel is installed")
    return Nccl(header.parents[1] / "lib" / "libnccl.so.2")


OPERATIONS: dict[str, tuple[Callable[[NcclComm], bool], str]] = {
    "all_reduce": (
        lambda comm: comm.all_reduce(SEND, RECV, COUNT, FLOAT32, AVG, STREAM),
        f"ncclAllReduce {SEND} {RECV} {COUNT} 7 4 {COMM} {STREAM}",
    ),
    "reduce": (
        lambda comm: comm.reduce(SEND, RECV, COUNT, FLOAT32, SUM, 3, STREAM),
        f"ncclReduce {SEND} {RECV} {COUNT} 7 0 3 {COMM} {STREAM}",
    ),
    "broadcast": (
        lambda comm: comm.broadcast(SEND, RECV, COUNT, INT64, 1, STREAM),
        f"ncclBroadcast {SEND} {RECV} {COUNT} 4 1 {COMM} {STREAM}",
    ),
    "all_gather": (
        lambda comm: comm.all_gather(SEND, RECV, COUNT, BFLOAT16, STREAM),
        f"ncclAllGather {SEND} {RECV} {COUNT} 9 {COMM} {STREAM}",
    ),
    "reduce_scatter": (
        lambda comm: comm.reduce_scatter(SEND, RECV, COUNT, BFLOAT16, AVG, STREAM),
        f"ncclReduceScatter {SEND} {RECV} {COUNT} 9 4 {COMM} {STREAM}",
    ),
    "all_to_all": (
        lambda comm: comm.all_to_all(SEND, RECV, COUNT, FLOAT32, STREAM),
        f"ncclAlltoAll {SEND} {RECV} {COUNT} 7 {COMM} {STREAM}",
    ),
    "gather": (
        lambda comm: comm.gather(SEND, RECV, COUNT, FLOAT32, 2, STREAM),
        f"ncclGather {SEND} {RECV} {COUNT} 7 2 {COMM} {STREAM}",
    ),
    "scatter": (
        lambda comm: comm.scatter(SEND, RECV, COUNT, FLOAT32, 2, STREAM),
        f"ncclScatter {SEND} {RECV} {COUNT} 7 2 {COMM} {STREAM}",
    ),
    "send": (
        lambda comm: comm.send(SEND, COUNT, FLOAT32, 4, STREAM),
        f"ncclSend {SEND} {COUNT} 7 4 {COMM} {STREAM}",
    ),
    "recv": (
        lambda comm: comm.recv(RECV, COUNT, FLOAT32, 4, STREAM),
        f"ncclRecv {RECV} {COUNT} 7 4 {COMM} {STREAM}",
    ),
}


class TestOperations:
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_every_argument_arrives_exactly(self, fake: Fake, name: str) -> None:
        call, line = OPERATIONS[name]
        comm = fake.comm()
        assert call(comm)
        assert fake.calls() == [line]

        fake.reset()
        with comm.prepare() as prepared:
            assert not call(comm)
        assert fake.calls() == []
        assert prepared()
        assert prepared()
        assert fake.calls() == [line, line]

        fake.reset()
        with comm.group():
            assert not call(comm)
            assert not call(comm)
            assert not prepared()
        assert fake.calls() == ["ncclGroupStart", line, line, line, "ncclGroupEnd"]
        assert fake.submitted == 3

    @pytest.mark.parametrize("name", OPERATIONS)
    def test_a_32_bit_count_in_a_row_shows(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call, line = OPERATIONS[name]
        function = line.split()[0]
        row = functions.ROWS[function]
        narrow = tuple(ctypes.c_int if each is ctypes.c_size_t else each for each in row.arguments)
        monkeypatch.setitem(functions.ROWS, function, functions.Row(row.since, narrow))
        fake = Fake(fake_nccl.build(tmp_path))  # a binding that has not bound this function yet
        call(fake.comm())
        assert fake.calls() != [line]

    def test_before_2_28_blocks_are_sent_and_received(self, oldest: Fake) -> None:
        block = COUNT * 4
        comm = oldest.comm(nranks=3, rank=1)
        comm.all_to_all(SEND, RECV, COUNT, FLOAT32, STREAM)
        pairs = [
            line
            for peer in range(3)
            for line in (
                f"ncclSend {SEND + peer * block} {COUNT} 7 {peer} {COMM} {STREAM}",
                f"ncclRecv {RECV + peer * block} {COUNT} 7 {peer} {COMM} {STREAM}",
            )
        ]
        assert oldest.calls() == ["ncclGroupStart", *pairs, "ncclGroupEnd"]

        oldest.reset()
        comm.gather(SEND, RECV, COUNT, FLOAT32, 1, STREAM)
        assert oldest.calls()[1:-1] == [f"ncclSend {SEND} {COUNT} 7 1 {COMM} {STREAM}", *pairs[1::2]]
        oldest.reset()
        comm.scatter(SEND, RECV, COUNT, FLOAT32, 1, STREAM)
        assert oldest.calls()[1:-1] == [*pairs[::2], f"ncclRecv {RECV} {COUNT} 7 1 {COMM} {STREAM}"]
        oldest.reset()
        comm.gather(SEND, 0, COUNT, FLOAT32, 0, STREAM)  # no root: one call, and so no group
        comm.scatter(0, RECV, COUNT, FLOAT32, 0, STREAM)
        assert oldest.calls() == [
            f"ncclSend {SEND} {COUNT} 7 0 {COMM} {STREAM}",
            f"ncclRecv {RECV} {COUNT} 7 0 {COMM} {STREAM}",
        ]
        oldest.reset()
        with comm.group():
            comm.all_to_all(SEND, RECV, COUNT, FLOAT32, STREAM)
            comm.send(SEND, 1, FLOAT32, 0, STREAM)
        assert oldest.calls().count("ncclGroupStart") == 1
        assert oldest.submitted == 7

    def test_dtypes(self) -> None:
        for name, code in functions.DATATYPES.items():
            assert functions.ITEM_BYTES[code] == getattr(torch, name).itemsize
        assert functions.datatype("torch.bfloat16") == 9
        assert functions.datatype("float8_e4m3fn") == 10
        assert functions.datatype("float8_e5m2") == 11
        assert functions.datatype("bool") == functions.datatype("uint8") == 1
        assert len(functions.ITEM_BYTES) == 12
        for name in ("complex64", "int16", "float8_e4m3fnuz"):
            with pytest.raises(UsageError, match=name):
                functions.datatype(name)

    def test_an_error_names_function_status_and_reasons(self, fake: Fake) -> None:
        comm = fake.comm()
        fake.answer(INVALID_ARGUMENT)
        with pytest.raises(NcclError) as caught:
            comm.broadcast(SEND, RECV, 1, FLOAT32, 0, STREAM)
        text = str(caught.value)
        assert "ncclBroadcast failed with ncclInvalidArgument (4): invalid argument" in text
        assert "the fake's last error" in text
        assert isinstance(caught.value, NcclStatusError)
        assert (caught.value.function, caught.value.status) == ("ncclBroadcast", INVALID_ARGUMENT)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (str(copy), copy.status) == (text, INVALID_ARGUMENT)
        assert "unknown ncclResult_t (77)" in str(fake.nccl.status_error("ncclX", 77))


def send_and_fail(comm: NcclComm) -> None:
    with comm.group():
        comm.send(SEND, 3, FLOAT32, 2, STREAM)
        raise ZeroDivisionError


def send_and_receive(comm: NcclComm) -> None:
    with comm.group():
        comm.send(SEND, 1, FLOAT32, 0, STREAM)
        comm.recv(RECV, 1, FLOAT32, 0, STREAM)


class TestGroups:
    def test_a_body_that_raises_submits_nothing(self, fake: Fake) -> None:
        comm = fake.comm()
        with pytest.raises(ZeroDivisionError):
            send_and_fail(comm)
        assert fake.calls() == []
        with comm.group():  # and nothing of it is left over
            comm.recv(RECV, 1, FLOAT32, 0, STREAM)
        assert fake.submitted == 1

    def test_an_inner_group_joins_the_outer_one(self, fake: Fake) -> None:
        comm = fake.comm()
        with comm.group():
            comm.send(SEND, 1, FLOAT32, 0, STREAM)
            with comm.group():
                comm.send(SEND, 2, FLOAT32, 1, STREAM)
            with pytest.raises(ZeroDivisionError):
                send_and_fail(comm)
            comm.send(SEND, 4, FLOAT32, 3, STREAM)
        counts = [line.split()[2] for line in fake.calls() if line.startswith("ncclSend")]
        assert counts == ["1", "2", "4"]
        assert fake.calls().count("ncclGroupStart") == 1

    def test_an_empty_group_calls_nothing(self, fake: Fake) -> None:
        comm = fake.comm()
        with comm.group():
            pass
        assert fake.calls() == []

    def test_a_call_that_fails_cancels_the_group(self, fake: Fake) -> None:
        comm = fake.comm()
        fake.answer(INVALID_ARGUMENT)
        with pytest.raises(NcclStatusError, match="ncclSend failed with ncclInvalidArgument"):
            send_and_receive(comm)
        assert [line.split()[0] for line in fake.calls()] == ["ncclGroupStart", "ncclSend", "ncclGroupEnd"]
        assert fake.submitted == 0
        assert comm.send(SEND, 1, FLOAT32, 0, STREAM)  # the group is closed: this one goes at once
        assert fake.submitted == 1

    def test_an_interrupt_between_the_calls_cancels_the_group(self, fake: Fake) -> None:
        comm = fake.comm()
        with comm.prepare() as prepared:
            comm.send(SEND, 1, FLOAT32, 0, STREAM)
            comm.recv(RECV, 1, FLOAT32, 0, STREAM)

        def interrupted() -> int:
            raise KeyboardInterrupt

        prepared._calls.insert(1, ("ncclRecv", interrupted))
        with pytest.raises(KeyboardInterrupt):
            prepared()
        assert [line.split()[0] for line in fake.calls()][-2:] == ["ncclAllReduce", "ncclGroupEnd"]
        assert fake.submitted == 0

    def test_another_thread_is_not_collected(self, fake: Fake) -> None:
        comm = fake.comm()
        refused = []

        def other() -> None:
            comm.all_reduce(SEND, RECV, 1, FLOAT32, SUM, STREAM)
            try:
                with comm.group():
                    pass
            except UsageError as error:
                refused.append(error)

        with comm.group():
            comm.send(SEND, 1, FLOAT32, 0, STREAM)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert [line.split()[0] for line in fake.calls()] == ["ncclAllReduce"]
        assert "two threads" in str(refused[0])

    def test_prepared_calls_are_not_made_within_their_body(self, fake: Fake) -> None:
        comm = fake.comm()
        with comm.prepare() as prepared:
            pass
        assert prepared()  # nothing, and that is launched
        with comm.prepare() as prepared:
            comm.send(SEND, 1, FLOAT32, 0, STREAM)
            with pytest.raises(UsageError, match="after the with block"):
                prepared()
        assert fake.calls() == []

    def test_simulate(self, fake: Fake) -> None:
        comm = fake.comm(blocking=True)
        with comm.prepare() as prepared:
            comm.all_reduce(SEND, RECV, COUNT, FLOAT32, SUM, STREAM)
        assert prepared.simulate() == 12.5
        info = TABLE["versions"]["2.32.3"]["sim_info"][:40]
        assert fake.calls()[::2] == ["ncclGroupStart", f"ncclGroupSimulateEnd {info}"]
        assert fake.submitted == 0
        with fake.comm().prepare() as prepared, pytest.raises(UsageError, match="non-blocking"):
            prepared.simulate()


class TestRest:
    def test_memory_registration_and_facts(self, fake: Fake) -> None:
        comm = fake.comm()
        size = 5 * 2**32
        pointer = fake.nccl.mem_alloc(size)
        handle = comm.register(pointer, size)
        comm.deregister(handle)
        window = comm.window_register(pointer, size, functions.WINDOW_SYMMETRIC, 5.0)
        comm.window_deregister(window)
        fake.nccl.mem_free(pointer)
        assert [comm.query(f"ncclComm{name}") for name in ("Count", "CuDevice", "UserRank")] == [5, 6, 2]
        assert fake.calls() == [
            f"ncclMemAlloc {size}",
            f"ncclCommRegister {COMM} {pointer} {size}",
            f"ncclCommDeregister {COMM} {handle}",
            f"ncclCommWindowRegister {COMM} {pointer} {size} 1",
            f"ncclCommWindowDeregister {COMM} {window}",
            f"ncclMemFree {pointer}",
            f"ncclCommCount {COMM}",
            f"ncclCommCuDevice {COMM}",
            f"ncclCommUserRank {COMM}",
        ]
        assert min(pointer, handle, window) > 2**32 - 2**31

    def test_pre_mul_sum(self, fake: Fake) -> None:
        comm = fake.comm()
        op = comm.create_pre_mul_sum(1 / 3, FLOAT32)
        comm.destroy_op(op)
        assert fake.calls() == [
            f"ncclRedOpCreatePreMulSum {struct.pack('=f', 1 / 3).hex()} 7 1 {COMM}",
            f"ncclRedOpDestroy 5 {COMM}",
        ]

    @pytest.mark.parametrize(
        ("value", "name", "raw"),
        [
            (0.5, "float16", struct.pack("=e", 0.5)),
            (1.0, "bfloat16", b"\x80\x3f"),
            (1 / 3, "bfloat16", b"\xab\x3e"),  # 0x3eaaaaab rounds up
            (1.0 + 2**-8, "bfloat16", b"\x80\x3f"),  # a tie goes to the even one
            (math.inf, "bfloat16", b"\x80\x7f"),
            (-2, "int8", b"\xfe"),
            (2**63, "uint64", b"\0\0\0\0\0\0\0\x80"),
            (0.1, "float64", struct.pack("=d", 0.1)),
        ],
    )
    def test_scalars(self, value: float, name: str, raw: bytes) -> None:
        assert functions.scalar_bytes(value, functions.datatype(name)) == raw

    @pytest.mark.parametrize(
        ("value", "name"), [(0.5, "int32"), (300, "uint8"), (1e30, "float16"), (1, "float8_e5m2")]
    )
    def test_scalars_that_do_not_fit(self, value: float, name: str) -> None:
        with pytest.raises(UsageError, match="can't be written"):
            functions.scalar_bytes(value, functions.datatype(name))

    def test_unique_id_with_its_zero_bytes(self, fake: Fake) -> None:
        assert fake.nccl.unique_id() == UNIQUE_ID
        with pytest.raises(UsageError, match="128 bytes"):
            fake.nccl.init_rank(2, UNIQUE_ID[:-1], 0, timeout_s=1)
        with pytest.raises(UsageError, match="0 <= rank < 2"):
            fake.nccl.init_rank(2, UNIQUE_ID, 2, timeout_s=1)

    def test_what_the_library_lacks_is_named_at_its_first_use(self, oldest: Fake) -> None:
        comm = oldest.comm()
        path = oldest.nccl.library.path
        with pytest.raises(BackendUnavailableError) as caught:
            comm.revoke(1.0)
        assert f"ncclCommRevoke needs NCCL >= 2.28.7, loaded 2.27.3 from {path}" in str(caught.value)
        with pytest.raises(BackendUnavailableError, match=r"ncclCommShrink needs NCCL >= 2\.27\.0"):
            comm.shrink([1], 1.0)
        assert comm.all_reduce(SEND, RECV, 1, FLOAT32, SUM, STREAM)  # neither call left a trace
        with pytest.raises(AttributeError):
            _ = oldest.nccl.functions.ncclNoSuchThing  # type: ignore[attr-defined]


class TestRealLibrary:
    """What a real libnccl answers without a GPU."""

    def test_version_and_path(self, real: Nccl) -> None:
        assert real.library.version >= 22_700
        assert str(real.library.path) in str(real.library)

    def test_every_function_is_there(self, real: Nccl) -> None:
        for name, row in functions.ROWS.items():
            assert functions.exports(real.library, name) == (row.since <= real.library.version), name

    def test_error_strings(self, real: Nccl) -> None:
        texts = [real.functions.ncclGetErrorString(status) for status in range(8)]
        assert all(texts)
        assert len(set(texts)) == 8
        assert texts[0] == b"no error"

    def test_unique_ids(self, real: Nccl) -> None:
        first, second = real.unique_id(), real.unique_id()
        assert len(first) == len(second) == 128
        assert first != second

    def test_without_a_communicator(self, real: Nccl) -> None:
        with pytest.raises(NcclStatusError, match=r"ncclInvalidArgument.*AllReduce : comm argument is NULL"):
            real.check("ncclAllReduce", real.functions.ncclAllReduce(1, 1, 1, 7, 0, 0, 0))
        assert real.functions.ncclCommDestroy(0) == 0
        assert real.functions.ncclCommAbort(0) == 0

    def test_groups(self, real: Nccl) -> None:
        assert real.functions.ncclGroupEnd() == functions.STATUS_NAMES.index("ncclInvalidUsage")
        assert real.functions.ncclGroupStart() == real.functions.ncclGroupEnd() == 0

    def test_a_failed_call_cancels_a_group(self, real: Nccl) -> None:
        """[Note: NCCL groups] rests on it."""
        assert real.functions.ncclGroupStart() == 0
        assert real.functions.ncclAllReduce(0, 0, 0, 0, 0, 0, 0) == INVALID_ARGUMENT
        assert real.functions.ncclGroupEnd() == INVALID_ARGUMENT
        assert real.functions.ncclGroupStart() == real.functions.ncclGroupEnd() == 0

    def test_init_without_a_device_raises_with_the_reason(self, real: Nccl) -> None:
        if Path("/dev/nvidiactl").exists():
            pytest.skip("there is a device")
        with pytest.raises(NcclStatusError, match="ncclCommInitRankConfig failed") as caught:
            real.init_rank(1, real.unique_id(), 0, timeout_s=5)
        assert "NCCL's last error" in str(caught.value)
