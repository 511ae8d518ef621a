"""The control lane itself: agreements and maxima over a gloo group of CPU tensors.

[Note: a group is leaked on purpose]
    A gloo group that is destroyed with an operation pending waits for the peer, for ever if need be; at
    interpreter exit that hangs the process. So a group holds one reference to itself (Py_IncRef) that only
    a clean close takes back; after a failure it stays.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch

# torch.distributed re-exports these names without telling type checkers.
from torch._C import _DistError
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    ReduceOp,
)

from bagua_rt.control.failure_board import DepartureBoard, FailureBoard
from bagua_rt.control.patience import Patience
from bagua_rt.control.roll_call import RollCall
from bagua_rt.errors import (
    BaguaError,
    ClosedError,
    CollectiveTimeoutError,
    LayoutMismatchError,
    PeerError,
    interrupted,
)
from bagua_rt.rendezvous import Pace, StoreClient, meet, within

# gloo's own deadline would kill the group, and counts per message; ours is kept on the host.
_GLOO_TIMEOUT = timedelta(days=10)
_LOOK_S = 0.1  # how often a waiting rank looks at the failure board
_RECORD = struct.Struct("<QQH")  # sequence number, bytes of payload, bytes of topic
_RECORD_BYTES = 1024
_TOPIC_BYTES = 200


class _Gloo:
    """A gloo group whose deadline is ours, and that never holds up the interpreter's exit."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self._pid = os.getpid()
        # This deadline holds for the making, where a peer may die too; each operation brings its own.
        make = partial(_immortal, store, rank, world_size, timedelta(seconds=timeout_s))
        self.group: Any = within(timeout_s, make)  # [Note: a store that is silent]

    def close(self, *, is_sound: bool) -> None:
        group, self.group = self.group, None
        if group is not None and is_sound and self._pid == os.getpid():
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def _immortal(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    group = ProcessGroupGloo(store, rank, world_size, timeout)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # [Note: a group is leaked on purpose]
    return group


class PendingMax:
    """A MAX over all ranks that was launched.

    Attributes:
        result: The tensor that holds the maximum once `wait` has returned.
        sequence: Number of this operation on its control lane, from 0.
    """

    def __init__(self, control: Control, result: torch.Tensor, work: Any, sequence: int) -> None:
        self.result = result
        self.sequence = sequence
        self._control = control
        self._work = work

    def is_done(self) -> bool:
        """Has the operation ended (with or without an error)? Never blocks."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """Block until the maximum is there.

        Args:
            timeout_s: The deadline from now on; None takes the control lane's.

        Returns:
            The maximum over all ranks.

        Raises:
            CollectiveTimeoutError: the deadline passed.
            PeerError: another rank died, or posted a failure.
            ClosedError: the control lane was closed, or belongs to the process that forked this one.
        """
        if self._work is not None:
            self._control.finish(self._work, f"control operation {self.sequence} (MAX)", timeout_s)
            self._work = None
        return self.result


class Control:
    """The control lane of a group of ranks. Collective over them to make, and in `agree` and `broadcast`.

    Agreements and maxima run on two groups, so a training thread that agrees and a loop thread that launches
    ledgers need no common order.

    Args:
        client: A store client for the making, with keys of this lane alone; None where world_size is 1.
        rank: This rank in the group.
        world_size: Size of the group.
        name: The lane's name in messages.
        timeout_s: The deadline of every wait that names none, and of the making.
        news: Says why another rank won't come to the making, if that is known.

    Attributes:
        failures: The failure board, which every wait of this lane looks at.
        departures: Where a rank says that it left in good order, to ranks that need not go with it.
        roll_call: Asks the other ranks what they are doing.

    Raises:
        CollectiveTimeoutError: a rank did not come to make it; names it.
        PeerError: the store is gone.
    """

    def __init__(
        self,
        client: StoreClient | None,
        rank: int,
        world_size: int,
        name: str,
        *,
        timeout_s: float,
        news: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self.timeout_s = timeout_s
        self.failures = FailureBoard(None)
        self.departures = DepartureBoard(None)
        self.roll_call = RollCall(None, rank, world_size)
        self._pid = os.getpid()
        self._is_closed = False
        self._failure: BaguaError | None = None
        self._agreements = self._maxima = 0  # sequence numbers
        self._agree_lock, self._max_lock = threading.Lock(), threading.Lock()
        self._groups: tuple[_Gloo, ...] = ()
        self._outstanding: list[Any] = []  # maxima
        self._agreement: Any = None  # what an agreement waits for; still there if it was interrupted
        if client is not None and world_size > 1:
            meet(client, rank, world_size, timeout_s, f"the control lane {name}", news)
            try:
                self._groups = tuple(
                    _Gloo(client.prefixed(f"gloo/{part}"), rank, world_size, timeout_s)
                    for part in ("agree", "max")
                )
            except RuntimeError as error:
                raise _peer_error(f"making the control lane {name}", error, "") from error
            except TimeoutError as error:
                raise CollectiveTimeoutError(
                    f"making the control lane {name}: no answer within {timeout_s:g} s",
                    expected="all ranks, and the process that serves the store, to go on",
                    fix="look for a rank that hangs",
                ) from error
            board = client.clone()
            self.failures = FailureBoard(board)
            self.departures = DepartureBoard(board)
            self.roll_call = RollCall(client.clone(), rank, world_size)

    def agree(self, topic: str, payload: bytes = b"", timeout_s: float | None = None) -> list[bytes]:
        """Give every rank's payload to every rank.

        Args:
            topic: What this is about; all ranks have to be about the same.
            payload: This rank's bytes, of any length.
            timeout_s: The deadline; None takes the lane's.

        Returns:
            The payloads, by rank.

        Raises:
            LayoutMismatchError: the ranks are about different topics; names them.
            CollectiveTimeoutError: the deadline passed.
            PeerError: another rank died, or posted a failure.
            ClosedError: the lane was closed, or belongs to the process that forked this one.
        """
        self._check()
        if not self._groups:
            return [payload]
        with self._agree_lock:
            self._check()
            pace = Pace(self.timeout_s if timeout_s is None else timeout_s)
            what = f"agreement {self._agreements} ({topic})"
            records = self._gather(_record(self._agreements, topic, payload), what, pace)
            self._agreements += 1
            lengths = self._compare(records)
            return [
                self._fetch(rank, length, records[rank], payload, what, pace)
                for rank, length in enumerate(lengths)
            ]

    def broadcast(self, payload: bytes | None, root: int = 0, timeout_s: float | None = None) -> bytes:
        """Give one rank's payload to every rank.

        Args:
            payload: The bytes, on `root`; ignored elsewhere.
            root: The rank that gives.
            timeout_s: The deadline; None takes the lane's.

        Returns:
            The root's payload.

        Raises:
            LayoutMismatchError: the ranks are about different things, or name different roots.
            CollectiveTimeoutError: the deadline passed.
            PeerError: another rank died, or posted a failure.
            ClosedError: the lane was closed, or belongs to the process that forked this one.
        """
        mine = payload if self.rank == root and payload is not None else b""
        return self.agree(f"broadcast from rank {root}", mine, timeout_s)[root]

    def launch_max(self, vector: torch.Tensor) -> PendingMax:
        """Start a MAX over all ranks; several may be outstanding. All ranks launch them in one order.

        Args:
            vector: uint8, of one size on all ranks; it is read now, and not changed.

        Returns:
            A handle to wait on.

        Raises:
            PeerError: the lane has failed before.
            ClosedError: the lane was closed, or belongs to the process that forked this one.
        """
        self._check()
        result = vector.clone()
        with self._max_lock:
            self._check()
            sequence, self._maxima = self._maxima, self._maxima + 1
            if not self._groups:
                return PendingMax(self, result, None, sequence)
            options = AllreduceOptions()
            options.reduceOp = ReduceOp(ReduceOp.MAX)
            options.timeout = _GLOO_TIMEOUT
            work = self._launch(lambda: self._groups[1].group.allreduce([result], options), "MAX")
            self._outstanding = [other for other in self._outstanding if not other.is_completed()]
            self._outstanding.append(work)
            return PendingMax(self, result, work, sequence)

    def finish(self, work: Any, what: str, timeout_s: float | None = None) -> None:
        """Wait for gloo's `work` with our deadline, looking at the failure board meanwhile.

        Raises:
            CollectiveTimeoutError: the deadline passed.
            PeerError: another rank died, or posted a failure.
            ClosedError: the lane was closed, or belongs to the process that forked this one.
        """
        self._check()
        patience = self.patience(lambda: f"rank {self.rank} waited for {what} on {self.name}", timeout_s)
        try:
            self._finish(work, what, patience)
        except BaguaError as error:
            raise self._fail(error) from error.__cause__
        except BaseException as error:  # the ranks are in different places now
            self.failures.post(f"rank {self.rank}: {self._fail(interrupted(error))}")
            raise

    def _finish(self, work: Any, what: str, patience: Patience) -> None:
        has_ended = False
        while True:
            try:
                work.wait(timedelta(seconds=max(0.001, min(_LOOK_S, patience.left_s))))
                return
            except RuntimeError as error:
                if type(error) is not RuntimeError and not isinstance(error, _DistError):
                    raise  # a signal handler's
                if has_ended:
                    others = self.failures.poll() or patience.who_is_there()  # who went may have said why
                    raise _peer_error(what, error, others) from error
            has_ended = work.is_completed()
            if not has_ended:  # else with an error, or well, just after the wait was over: the next one tells
                patience.look()

    def patience(self, where: Callable[[], str], timeout_s: float | None = None) -> Patience:
        """Begin to wait for other ranks.

        Args:
            where: Says what is waited for, as "rank 0 waited for …".
            timeout_s: The deadline; None takes the lane's.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return Patience(self.failures, self.roll_call, timeout_s, where)

    def close(self) -> None:
        """Close the lane. Idempotent; a lane that failed, or has operations pending, is leaked on purpose."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pid != os.getpid():
            return
        pending = [work for work in self._outstanding if not work.is_completed()]
        is_sound = self._failure is None and self._agreement is None and not pending
        if not is_sound and not self.failures.is_known:  # the others wait on connections that stay open
            self.failures.post(f"rank {self.rank} closed {self.name} with an operation under way")
        for group in self._groups:
            group.close(is_sound=is_sound)
        self._outstanding = pending
        self.failures.close()
        self.roll_call.close()

    @property
    def failure(self) -> BaguaError | None:
        """What made this lane unusable, if something did."""
        return self._failure

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the control lane {self.name} is closed")
        if self._pid != os.getpid():
            raise ClosedError(f"the control lane {self.name} belongs to the process that forked this one")
        if self._failure is not None:
            raise type(self._failure)(
                f"the control lane {self.name} has failed before", got=str(self._failure)
            )

    def _fail(self, error: BaguaError) -> BaguaError:
        """Remember the first failure: what comes later on a failed group would be garbage."""
        self._failure = self._failure or error
        return error

    def _launch(self, call: Any, what: str) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise self._fail(_peer_error(what, error, self.failures.poll() or "")) from error

    def _gather(self, record: torch.Tensor, what: str, pace: Pace) -> list[bytes]:
        out = torch.empty(self.world_size * _RECORD_BYTES, dtype=torch.uint8, device="cpu")
        group, options = self._groups[0].group, AllgatherOptions()
        options.timeout = _GLOO_TIMEOUT
        work = self._launch(lambda: group._allgather_base(out, record, options), what)
        self._await(work, what, pace)
        text = out.numpy().tobytes()
        return [text[i : i + _RECORD_BYTES] for i in range(0, len(text), _RECORD_BYTES)]

    def _await(self, work: Any, what: str, pace: Pace) -> None:
        self._agreement = work
        self.finish(work, what, pace.left_s)
        self._agreement = None

    def _compare(self, records: list[bytes]) -> list[int]:
        """The lengths of the payloads, once all ranks are known to be about the same."""
        heads = [_RECORD.unpack_from(record) for record in records]
        said = [record[_RECORD.size :][: head[2]] for record, head in zip(records, heads, strict=True)]
        odd = [
            rank for rank in range(self.world_size) if (heads[rank][0], said[rank]) != (heads[0][0], said[0])
        ]
        if odd:
            texts = [
                f"{said[rank].decode(errors='replace')!r} (number {heads[rank][0]}) on rank {rank}"
                for rank in (0, odd[0])
            ]
            raise self._fail(
                LayoutMismatchError(
                    f"the ranks agree about different things on {self.name}",
                    expected="every rank to make the same calls in the same order",
                    got=" and ".join(texts),
                    fix="look for a call that only some ranks make",
                )
            )
        return [head[1] for head in heads]

    def _fetch(self, rank: int, length: int, record: bytes, payload: bytes, what: str, pace: Pace) -> bytes:
        """One rank's payload: out of its record where it fits there, else broadcast by it."""
        start = _RECORD.size + _RECORD.unpack_from(record)[2]
        if start + length <= _RECORD_BYTES:
            return record[start : start + length]
        if rank == self.rank:
            wire = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
        else:
            wire = torch.empty(length, dtype=torch.uint8, device="cpu")
        options = BroadcastOptions()
        options.rootRank = rank
        options.timeout = _GLOO_TIMEOUT
        work = self._launch(lambda: self._groups[0].group.broadcast([wire], options), what)
        self._await(work, what, pace)
        return wire.numpy().tobytes()


def _record(sequence: int, topic: str, payload: bytes) -> torch.Tensor:
    """Sequence number, topic, and as much of the payload as fits if all of it fits."""
    said = topic.encode()
    if len(said) > _TOPIC_BYTES:  # still told apart, by a digest in place of the tail
        said = said[: _TOPIC_BYTES - 17] + b"~" + hashlib.sha256(said).hexdigest()[:16].encode()
    text = _RECORD.pack(sequence, len(payload), len(said)) + said
    text += payload if len(text) + len(payload) <= _RECORD_BYTES else b""
    return torch.from_numpy(np.frombuffer(text.ljust(_RECORD_BYTES, b"\0"), dtype=np.uint8).copy())


def _peer_error(what: str, error: RuntimeError, others: str) -> PeerError:
    return PeerError(
        f"{what} failed",
        expected="every rank to take part until the end",
        got="; ".join(filter(None, [others, str(error).splitlines()[0]])),
        fix="look at the other ranks' own output: one of them has died or closed its group",
    )
