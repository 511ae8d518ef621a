"""How ranks that are to share an NCCL communicator meet, and how they part."""

from __future__ import annotations

import logging
import threading
import time

from bagua_rt.backend import Store
from bagua_rt.backends._nccl import Nccl
from bagua_rt.backends._nccl_comm import NcclComm
from bagua_rt.errors import BaguaError, CollectiveTimeoutError, UsageError

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
_ABORT_S = 5.0
# Communicators that could not be aborted: a thread is inside a call on them for good.
_leaked: list[NcclComm] = []


def meet(
    nccl: Nccl, store: Store | None, rank: int, world_size: int, name: str, timeout_s: float
) -> NcclComm:
    """Share rank 0's unique id through the store, see that all ranks are there, and connect.

    Raises:
        UsageError: there is no store.
        CollectiveTimeoutError: a rank did not come within `timeout_s`.
        NcclError: NCCL could not connect.
    """
    if store is None:
        raise UsageError(
            f"communicator {name!r}: ranks can't meet without a store", expected="a Store", got="None"
        )
    deadline = time.monotonic() + timeout_s
    # The same name may be used again: the n-th connect of each rank meets the n-th of the others.
    turn = store.add(f"bagua/{name}/nccl/turn/{rank}", 1)
    keys = [f"bagua/{name}/nccl/{turn}/{other}" for other in range(world_size)]
    store.set(keys[rank], nccl.unique_id().hex() if rank == 0 else "here")
    pause_s = 1e-3
    while not store.check(keys):
        if time.monotonic() >= deadline:
            missing = [other for other in range(world_size) if not store.check([keys[other]])]
            raise CollectiveTimeoutError(
                f"communicator {name!r}: rank {rank} met not all {world_size} ranks within {timeout_s:g} s",
                expected="each of them to connect under this name",
                got=f"nothing from rank {', '.join(map(str, missing))}",
                fix="look for a rank that did not start or died, or raise timeout_s",
            )
        time.sleep(pause_s)
        pause_s = min(0.02, 2 * pause_s)
    unique_id = bytes.fromhex(store.get(keys[0]).decode())
    return nccl.init_rank(world_size, unique_id, rank, timeout_s=max(deadline - time.monotonic(), 0.1))


def end(nccl: NcclComm, name: str) -> None:
    """Abort, or leak a communicator that can't be aborted."""
    try:
        nccl.abort(_ABORT_S)
    except BaguaError as error:
        _leaked.append(nccl)
        _log.error("the NCCL communicator of %r is left as it is: %s", name, error)


def finalize(nccl: NcclComm, name: str) -> None:
    """Close an idle communicator, and abort it if the other ranks don't close theirs.

    In a thread of its own, for finalizing waits for the other ranks of the node, and the caller for nobody.
    """
    thread = threading.Thread(target=_close, args=(nccl, name), name=f"bagua-close-{name}", daemon=True)
    thread.start()


def _close(nccl: NcclComm, name: str) -> None:
    try:
        nccl.close(_CLOSE_S)
    except BaguaError as error:
        _log.debug("the NCCL communicator of %r is aborted: %s", name, error)
        end(nccl, name)
