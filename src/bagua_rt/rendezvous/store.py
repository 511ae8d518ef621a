"""The rendezvous store, asked and never waited for.

[Note: polls, never waits]
    A blocking ``TCPStore.wait`` or ``get`` holds up every other thread that uses the same client, and its
    deadline is not ours. So this package only asks "is the key there?", with its own deadline, and gives
    each thread a client of its own (`StoreClient.clone`).

[Note: the sentinel]
    Beside each client lies a plain socket, connected to the same server and silent. The kernel closes it
    when the server dies, so looking at it tells a dead store apart without torch's C++ stack trace.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

# torch.distributed re-exports these names without telling type checkers.
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from bagua_rt.errors import ClosedError, CollectiveTimeoutError, PeerError, UsageError
from bagua_rt.rendezvous.asker import Asker, NoAnswerError
from bagua_rt.rendezvous.connection import Connection, connected

_T = TypeVar("_T")

_CLONE_S = 30.0  # generous: on a live server it takes 1 ms
_NEWS_S = 0.2  # how often a rank that meets others looks for news of them
_LOOK_S = 0.5  # for an answer that may as well be none; as generous
_GRACE_S = 0.15  # the same, from a store whose last answer did not come


def lone_store() -> Store:
    """A store for a world of one rank: in memory, without a port."""
    return HashStore()


class Pace:
    """The pauses of a poll: 1 ms at first, growing to 50 ms, and a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._pause_s = 0.001

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._deadline - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Has the deadline passed?"""
        return self.left_s <= 0

    def pause(self) -> None:
        """Sleep until the next poll, but not past the deadline."""
        time.sleep(max(0.0, min(self._pause_s, self.left_s)))
        self._pause_s = min(self._pause_s * 1.5, 0.05)


def within(timeout_s: float, fn: Callable[[], _T], may_go_on: Callable[[], bool] = lambda: True) -> _T:
    """Call `fn`, which has no deadline of its own, in a daemon thread.

    Name lookups and the constructor of a TCPStore client can block for as long as the other side likes.

    Args:
        timeout_s: The deadline.
        fn: What to call.
        may_go_on: Asked meanwhile; when it says no, the wait ends as if the deadline had passed.

    Raises:
        TimeoutError: `fn` is not done after `timeout_s`; it is left behind.
        BaseException: what `fn` raised.
    """
    done: list[_T] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            done.append(fn())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call, name="bagua_rt-lookup", daemon=True)
    thread.start()
    pace = Pace(timeout_s)
    while thread.is_alive() and not pace.is_over and may_go_on():
        thread.join(max(0.0, min(0.05, pace.left_s)))
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError
    return done[0]


class StoreClient:
    """One thread's client of the rendezvous store, that knows whether the store is alive.

    Args:
        store: The client itself.
        address: ``host:port`` for messages; a description where the store has no address.
        prefix: Put before every key.
        endpoint: Where the server listens; None where it can't die before this process does.
        sentinel: A connection to `endpoint` that is there already.
        connection: The client's own, which ends with `close` if the store is silent then.
        timeout_s: How long to wait for an answer that must come ([Note: a store that is silent]).
    """

    def __init__(
        self,
        store: Store,
        address: str,
        prefix: str = "",
        endpoint: tuple[str, int] | None = None,
        sentinel: socket.socket | None = None,
        *,
        connection: Connection | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.store = store
        self.address = address
        self.prefix = prefix
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._asker = Asker() if connection is None else Asker(connection.shut_down)
        self._sentinel = sentinel
        if endpoint is not None and sentinel is None:
            try:
                self._sentinel = socket.create_connection(endpoint, timeout=5.0)
            except OSError as error:
                raise self.gone() from error
        if self._sentinel is not None:
            self._sentinel.setblocking(False)

    def under(self, prefix: str) -> StoreClient:
        """The same client and sentinel, with `prefix` put before its keys as well."""
        inner = object.__new__(StoreClient)
        inner.__dict__.update(self.__dict__, prefix=f"{self.prefix}{prefix}/")
        return inner

    def clone(self) -> StoreClient:
        """A client with a connection of its own, for another thread."""
        if not self.is_alive():
            raise self.gone()
        clone: Callable[[], Store] = self.store.clone  # type: ignore[attr-defined]  # missing in torch's stub
        try:
            # A clone connects anew, and goes on trying when the server has died.
            make = partial(connected, clone, self._endpoint[1] if self._endpoint else None)
            store, connection = within(min(_CLONE_S, self._timeout_s), make, self.is_alive)
        except TimeoutError as error:
            raise self._silent() if self.is_alive() else self.gone() from error
        except RuntimeError as error:
            raise self.gone() from error
        return StoreClient(
            store,
            self.address,
            self.prefix,
            self._endpoint,
            connection=connection,
            timeout_s=self._timeout_s,
        )

    def is_alive(self) -> bool:
        """Does the server still hold its end of the sentinel ([Note: the sentinel])?"""
        if self._sentinel is None:
            return True
        try:
            return self._sentinel.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def gone(self) -> PeerError:
        """The error for a store that died."""
        return PeerError(
            f"the store at {self.address} is gone (rank 0 died?)",
            fix="look at rank 0's own error; the ranks that are left need a new address to init again",
        )

    @property
    def is_silent(self) -> bool:
        """Does the store owe this client an answer for longer than it should?"""
        return self._asker.is_stuck

    def _silent(self) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"the store at {self.address} does not answer (does rank 0 hang?)",
            fix="look at the process that serves it: rank 0, or the launcher",
        )

    def peek(self, key: str, *, timeout_s: float | None = None) -> bytes | None:
        """The value of `key`, or None where it has none yet. Never waits for it.

        Raises:
            PeerError: the store is gone.
            CollectiveTimeoutError: it is silent.
        """
        name = self.prefix + key
        return self._ask(lambda: self.store.get(name) if self.store.check([name]) else None, timeout_s)

    def grace_s(self, usual_s: float) -> float:
        """How long to wait for an answer that may as well be none: less where the last one did not come."""
        return min(usual_s, _GRACE_S) if self.is_silent else usual_s

    def glance(self, key: str) -> bytes | None:
        """As `peek`, for those who look again and again: None, too, if the store is silent.

        Raises:
            PeerError: the store is gone.
        """
        try:
            return self.peek(key, timeout_s=0.0 if self.is_silent else _LOOK_S)
        except CollectiveTimeoutError:
            return None

    def add(self, key: str, amount: int = 1, *, timeout_s: float | None = None) -> int:
        """Add to the counter `key`, atomically; returns its new value.

        Raises:
            PeerError: the store is gone.
            CollectiveTimeoutError: it is silent.
        """
        return self._ask(lambda: self.store.add(self.prefix + key, amount), timeout_s)

    def set(self, key: str, value: str, *, timeout_s: float | None = None) -> None:
        """Write `key`.

        Raises:
            PeerError: the store is gone.
            CollectiveTimeoutError: it is silent.
        """
        self._ask(lambda: self.store.set(self.prefix + key, value), timeout_s)

    def tell(self, key: str, value: str) -> None:
        """Write `key` for whoever may want to know; a store that is silent gets it later, or never.

        Raises:
            PeerError: the store is gone.
        """
        with contextlib.suppress(CollectiveTimeoutError):
            self.set(key, value, timeout_s=0.0 if self.is_silent else _LOOK_S)

    def write_once(self, key: str, value: str, *, timeout_s: float | None = None) -> bool:
        """Write `key` unless somebody did; says whether this call was the first.

        Raises:
            PeerError: the store is gone.
            CollectiveTimeoutError: it is silent; it gets this later, if this process lives on.
        """

        def claim_and_write() -> bool:
            if self.store.add(f"{self.prefix}{key}-claims", 1) != 1:
                return False
            self.store.set(self.prefix + key, value)
            return True

        # One question: between two, this client might give up, and a key that is claimed is never written.
        return self._ask(claim_and_write, timeout_s, late_too=True)

    def keys_under(self, *prefixes: str) -> list[str]:
        """The keys that begin with one of `prefixes`; none where the store can't list its keys.

        Raises:
            PeerError: the store is gone.
        """
        list_keys: Callable[[], list[str]] | None = getattr(self.store, "list_keys", None)  # of newer torch
        if list_keys is None:
            return []
        begins = tuple(self.prefix + prefix for prefix in prefixes)
        return [key[len(self.prefix) :] for key in self._ask(list_keys) if key.startswith(begins)]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete `keys`.

        Raises:
            PeerError: the store is gone.
        """
        for key in keys:
            self._ask(partial(self.store.delete_key, self.prefix + key))

    def prefixed(self, name: str) -> Store:
        """A torch store whose keys lie under `name`, for a library that makes its own rendezvous."""
        return PrefixStore(self.prefix + name, self.store)

    def close(self) -> None:
        """Close the sentinel, and ask no more; the client itself closes when nobody refers to it."""
        self._asker.close()
        if self._sentinel is not None:
            self._sentinel.close()

    def _ask(
        self, question: Callable[[], _T], timeout_s: float | None = None, *, late_too: bool = False
    ) -> _T:
        if self._pid != os.getpid():  # on one connection the two would read each other's answers
            raise ClosedError(f"the store at {self.address} is asked by the process that forked this one")
        if not self.is_alive():
            raise self.gone()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return self._asker.ask(question, limit_s, late_too=late_too)
        except NoAnswerError as error:
            raise self._silent() from error
        except RuntimeError as error:  # torch's DistError tree; the server went between look and question
            raise self.gone() from error


def meet(
    client: StoreClient,
    rank: int,
    world_size: int,
    timeout_s: float,
    what: str,
    news: Callable[[], str | None] = lambda: None,
) -> None:
    """Wait until all ranks of a group are here.

    Args:
        client: A client whose keys belong to this meeting alone.
        rank: This rank, in the group.
        world_size: Size of the group.
        timeout_s: The deadline, from now.
        what: What the ranks meet for, for the message.
        news: Asked now and then: why another rank won't come, if that is known.

    Raises:
        CollectiveTimeoutError: the deadline passed; names the ranks that are missing.
        UsageError: another rank refused to come; tells why.
        PeerError: the store is gone, or there is news.
    """
    pace, look = Pace(timeout_s), Pace(_NEWS_S)
    client.set(f"here/{rank}", "1", timeout_s=timeout_s)
    missing = [other for other in range(world_size) if other != rank]
    while True:
        while missing and client.glance(f"here/{missing[0]}") is not None:
            missing.pop(0)
        if (left := client.glance("left")) is not None:
            raise PeerError(f"{what}: another rank came, and did not stay", got=left.decode(errors="replace"))
        if not missing:
            return
        if (refusal := client.glance("refused")) is not None:
            raise UsageError(f"{what}: another rank refused", got=refusal.decode(errors="replace"))
        if look.is_over:
            look = Pace(_NEWS_S)
            if (failure := news()) is not None:
                client.tell("left", f"rank {rank} had heard this: {failure}")  # or who comes now waits for it
                raise PeerError(f"{what}: another rank has failed meanwhile", got=failure)
        if pace.is_over:
            missing = [other for other in missing if client.glance(f"here/{other}") is None]
            raise CollectiveTimeoutError(
                f"{what}: rank {', '.join(map(str, missing))} did not come",
                expected=f"all {world_size} ranks within {timeout_s:g} s",
                got=f"no answer from the store at {client.address}" if client.is_silent else "",
                fix="look at the missing ranks' own output; every rank has to make the same calls",
            )
        pace.pause()
