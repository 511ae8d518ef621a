"""Making gloo groups within a deadline, and when they may be destroyed.

[Note: born leaked]
    Destroying a gloo group joins its threads, which never ends while an operation waits for a peer. So a
    group is made immortal when it is made (one reference too many) and becomes mortal only when its
    communicator closes and nothing of it runs. The end of the process, a garbage collection at a bad time
    and the child of a fork thus never destroy one, whatever is pending.

[Note: gloo's own timeout]
    It counts per receive and kills the group, so it is set out of reach. The deadlines are ours, kept by
    the thread that waits for the lane.
"""

from __future__ import annotations

import ctypes
import threading
import time
from datetime import timedelta
from typing import Any, TypeAlias

from torch.distributed import PrefixStore, ProcessGroupGloo
from torch.distributed import Store as TorchStore

from bagua_rt.backend import Store
from bagua_rt.errors import CollectiveTimeoutError, PeerError, UsageError

GlooGroup: TypeAlias = Any  # torch's stubs leave ProcessGroupGloo without its methods
OUT_OF_REACH = timedelta(days=365)


def make_immortal(group: GlooGroup) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def make_mortal(group: GlooGroup) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


class _Meeting:
    """The groups of one connect, made on a thread of its own: the deadline holds whatever gloo does."""

    def __init__(
        self, store: TorchStore, rank: int, world_size: int, name: str, lanes: int, timeout_s: float
    ) -> None:
        self.groups: list[GlooGroup] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._args = (store, rank, world_size, name, lanes, timeout_s)

    def run(self) -> None:
        store, rank, world_size, name, lanes, timeout_s = self._args
        limit = timedelta(seconds=timeout_s)
        try:
            # The same name may be used again: the n-th connect of each rank meets the n-th of the others.
            turn = store.add(f"bagua/{name}/turn/{rank}", 1)
            for lane in range(lanes):
                prefix = PrefixStore(f"bagua/{name}/{turn}/lane{lane}", store)
                group: GlooGroup = ProcessGroupGloo(prefix, rank, world_size, limit)
                make_immortal(group)
                group._set_default_timeout(OUT_OF_REACH)
                self.groups.append(group)
        except BaseException as error:  # raised again, translated, where it is waited for
            self.error = error
        finally:
            self.ended.set()


def meet(
    store: Store | None, rank: int, world_size: int, name: str, lanes: int, timeout_s: float
) -> list[GlooGroup]:
    """Make one gloo group per lane, within the deadline."""
    if not isinstance(store, TorchStore):
        raise UsageError(
            f"communicator {name!r}: gloo can't meet through this store",
            expected="a torch.distributed.Store",
            got=type(store).__name__,
        )
    begin = time.monotonic()
    meeting = _Meeting(store, rank, world_size, name, lanes, timeout_s)
    threading.Thread(target=meeting.run, name=f"bagua-connect-{name}", daemon=True).start()
    in_time = meeting.ended.wait(timeout_s)
    if in_time and meeting.error is None:
        return meeting.groups
    if in_time:
        for group in meeting.groups:
            make_mortal(group)
    error, text = meeting.error, str(meeting.error).splitlines()[0] if meeting.error else ""
    late = not in_time or "timed out" in text.lower() or "timeout" in text.lower()
    if late or time.monotonic() - begin >= timeout_s:
        raise CollectiveTimeoutError(
            f"communicator {name!r}: rank {rank} of {world_size} met not all others within {timeout_s:g} s",
            expected=f"{world_size} ranks to connect under this name, with {lanes} lanes each",
            got=text,
            fix="look for a rank that did not start or died, or raise timeout_s",
        ) from error
    raise PeerError(
        f"communicator {name!r}: rank {rank} of {world_size} could not connect",
        got=f"{type(error).__name__}: {text}",
        fix="look for a rank that died, and whether the store's process lives",
    ) from error
