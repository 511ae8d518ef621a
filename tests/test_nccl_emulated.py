"""The binding's communicators on the emulated NCCL: children, revoked ones, memory that it is told about."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import pytest

from bagua_rt.backends import _nccl_functions as c
from bagua_rt.backends._nccl import Nccl, NcclStatusError
from bagua_rt.backends._nccl_comm import NcclComm
from bagua_rt.errors import ClosedError
from tests.contract.world import open_for
from tests.emulator import product
from tests.ranks import RankContext, RankPool

FLOAT32, SUM = c.DATATYPES["float32"], c.OPS["sum"]
LIMIT_S = 20.0


class Place:
    """A device, one of its streams, and floats that NCCL has allocated there."""

    def __init__(self, ctx: RankContext) -> None:
        self.backend = open_for("emulated", ctx.rank)
        self.device: Any = self.backend.device
        self.lane: Any = self.device.new_stream("lane")
        self.nccl = Nccl()
        self.address = self.nccl.mem_alloc(4096)
        self.values = (ctypes.c_float * 4).from_address(self.address)  # the emulator's memory is the host's

    def total(self, comm: NcclComm, mine: float, op: int = SUM) -> float:
        """The first element after an all-reduce of four times `mine`."""
        self.values[:] = [mine] * 4
        if not comm.all_reduce(self.address, self.address, 4, FLOAT32, op, self.lane.handle):
            comm.wait_ready(LIMIT_S)
        self.device.synchronize(self.device.record(self.lane))
        return float(self.values[3])

    def close(self) -> None:
        self.nccl.mem_free(self.address)
        self.backend.close()


def connected(ctx: RankContext, place: Place) -> NcclComm:
    store = ctx.store()
    if ctx.rank == 0:
        store.set("id", place.nccl.unique_id().hex())
    unique_id = bytes.fromhex(store.get("id").decode())
    return place.nccl.init_rank(ctx.world_size, unique_id, ctx.rank, timeout_s=LIMIT_S)


def family(ctx: RankContext) -> dict[str, Any]:
    """Split, shrink with and without an abort, and revoke; who is who in each, and what they sum to."""
    place, me, store = Place(ctx), ctx.rank, ctx.store()
    parent = connected(ctx, place)
    found: dict[str, Any] = {}

    def tell(name: str, comm: NcclComm | None) -> None:
        found[name] = None
        if comm is not None:
            found[name] = (comm.rank, comm.nranks, place.total(comm, me + 1.0))
            comm.close(LIMIT_S)

    tell("odd and even, in reverse", parent.split(me % 2, -me, LIMIT_S))
    tell("all but the first", parent.split(None if me == 0 else 5, me, LIMIT_S, maxCTAs=4))
    if me != 1:
        tell("shrunk", parent.shrink([1], LIMIT_S))
        store.set(f"shrunk/{me}", "")
    else:  # no operation of the parent's may be under way while it is shrunk
        store.wait(["shrunk/0", "shrunk/2"], timedelta(seconds=LIMIT_S))
    found["parent"] = place.total(parent, me + 1.0)
    parent.revoke(LIMIT_S)
    with pytest.raises(ClosedError, match="revoked"):
        place.total(parent, 1.0)
    if me != 2:
        tell("shrunk after revoke", parent.shrink([2], LIMIT_S))
    parent.close(LIMIT_S)
    place.close()
    assert not product.findings()
    return found


def memory(ctx: RankContext) -> dict[str, Any]:
    """Registered buffers, windows, and an operator of one's own."""
    place = Place(ctx)
    comm = connected(ctx, place)
    found: dict[str, Any] = {}
    handle = comm.register(place.address, 4096)
    found["registered"] = place.total(comm, 2.0)
    comm.deregister(handle)
    window = comm.window_register(place.address, 4096, c.WINDOW_SYMMETRIC, LIMIT_S)
    assert window
    found["in a window"] = place.total(comm, 3.0)
    comm.window_deregister(window)
    with pytest.raises(NcclStatusError, match="ncclCommWindowDeregister"):
        comm.window_deregister(window)
    halves = comm.create_pre_mul_sum(0.5, FLOAT32)
    found["halves"] = place.total(comm, 4.0, halves)
    comm.destroy_op(halves)
    comm.close(LIMIT_S)
    place.close()
    assert not product.findings()
    return found


def test_children_and_revoked_ones() -> None:
    first, second, third = RankPool(3, product.environment(base={})).run(family)
    assert first == {
        "odd and even, in reverse": (1, 2, 4.0),
        "all but the first": None,
        "shrunk": (0, 2, 4.0),
        "parent": 6.0,
        "shrunk after revoke": (0, 2, 3.0),
    }
    assert second == {
        "odd and even, in reverse": (0, 1, 2.0),
        "all but the first": (0, 2, 5.0),
        "parent": 6.0,
        "shrunk after revoke": (1, 2, 3.0),
    }
    assert third == {
        "odd and even, in reverse": (0, 2, 4.0),
        "all but the first": (1, 2, 5.0),
        "shrunk": (1, 2, 4.0),
        "parent": 6.0,
    }


def test_memory_that_nccl_is_told_about() -> None:
    answers = RankPool(2, product.environment(base={})).run(memory)
    assert answers == [{"registered": 4.0, "in a window": 6.0, "halves": 4.0}] * 2
