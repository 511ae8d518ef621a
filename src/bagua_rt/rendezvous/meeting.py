"""Seats and verdicts: how the ranks of one init agree that they are all here.

Each rank claims its number, writes what it knows about itself (its `Seat`), and reads the verdict:
"complete", with all seats, or the error that every rank raises alike.

[Note: one verdict]
    Whoever counts the key ``verdict-claims`` from 0 to 1 writes the verdict; everybody else reads it. After
    "complete" nothing can turn the job back, so a process that comes later is refused alone, and the running
    job does not notice.

[Note: the server is nobody's client]
    Rank 0 holds the server apart from the client that it works with. Anything that keeps a client alive (a
    group leaked on purpose, say) then can't keep the port taken after shutdown.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from bagua_rt.errors import BaguaError, CollectiveTimeoutError, PeerError, UsageError
from bagua_rt.rendezvous.connection import connected
from bagua_rt.rendezvous.store import Pace, StoreClient, within
from bagua_rt.rendezvous.topology import Seat

_CONTEST_S = 3.0  # how long a rank 0 whose port is taken asks who is there
GOODBYE_S = 2.0  # how long rank 0 keeps its server up for ranks that have not said goodbye
_token = uuid.uuid4().hex
_left_servers: set[str] = set()  # nonces of the servers that this process has said goodbye to


def forget_after_fork() -> None:
    """Give a forked child an identity of its own."""
    global _token
    _token = uuid.uuid4().hex
    _left_servers.clear()


def process_token() -> str:
    """A text that no other process has."""
    return _token


def host_identity() -> str:
    """A text that is equal for two processes on one machine: its boot id, or else its name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


@dataclass(frozen=True)
class Verdict:
    """What the ranks of one init decided: complete, or the error that each of them raises."""

    kind: str  # "complete" · "usage" · "timeout"
    what: str = ""
    expected: str = ""
    got: str = ""
    fix: str = ""
    seats: tuple[Seat, ...] = ()  # of all ranks if complete, else of those that disagree

    def dumps(self) -> str:
        """As a text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: bytes) -> Verdict:
        """From the store's text."""
        fields = json.loads(text)
        fields["seats"] = tuple(Seat(**seat) for seat in fields["seats"])
        return cls(**fields)

    def error(self) -> BaguaError:
        """The error of a verdict that is not "complete"."""
        kind = UsageError if self.kind == "usage" else CollectiveTimeoutError
        return kind(self.what, expected=self.expected, got=self.got, fix=self.fix)


def claimed_twice(rank: int, address: str) -> Verdict:
    """The verdict on two processes that claim one rank."""
    return Verdict(
        "usage",
        f"rank {rank} is claimed by two processes at {address}",
        expected="one process for each rank",
        fix="give every process its own rank, and every job its own MASTER_PORT",
    )


def disagreement(mine: Seat, other: Seat) -> Verdict | None:
    """What makes two seats unfit for one job, if anything does."""
    for name, text in (("world_size", "world sizes"), ("device", "kinds of device"), ("lanes", "lanes")):
        here, there = getattr(mine, name), getattr(other, name)
        if here != there:
            low, high = sorted((mine, other), key=lambda seat: seat.rank)
            return Verdict(
                "usage",
                f"rank {low.rank} and rank {high.rank} state different {text}",
                expected=f"one {name} on every rank",
                got=f"{getattr(low, name)} on rank {low.rank}, {getattr(high, name)} on rank {high.rank}",
                fix="start every rank with the same arguments, and every job on its own MASTER_PORT",
                seats=(low, high),
            )
    return None


class Rendezvous:
    """A complete rendezvous: the seats of all ranks, and the store until `leave`."""

    def __init__(self, client: StoreClient, seat: Seat, server: Store | None, nonce: str) -> None:
        self.client = client
        self.seat = seat
        self.seats: tuple[Seat, ...] = ()
        self._ranks_to_tell = 0
        self._server = server
        self._nonce = nonce

    def sit(self, timeout_s: float, check: Callable[[list[Seat]], None]) -> None:
        """Claim this rank and wait for the verdict.

        Args:
            timeout_s: How long to wait for the other ranks.
            check: Called on rank 0 with all seats; raises `UsageError` where they don't fit together.

        Raises:
            UsageError: the ranks contradict each other (raised on every rank), or this process came to a job
                that is complete without it (raised here only).
            CollectiveTimeoutError: ranks are missing; names them.
            PeerError: the store is gone.
        """
        client, seat = self.client, self.seat
        client.add("claims")
        if client.add(f"claim/{seat.rank}") == 1:
            client.set(f"seat/{seat.rank}", json.dumps(asdict(seat)))
        else:
            client.write_once("verdict", claimed_twice(seat.rank, client.address).dumps())
        verdict = self._await_verdict(Pace(timeout_s), timeout_s, check)
        if verdict.kind != "complete":
            with contextlib.suppress(PeerError, CollectiveTimeoutError):  # rank 0 may be through already
                client.add("verdicts-read", timeout_s=GOODBYE_S)
            if verdict.kind == "usage":
                self._ranks_to_tell = max(other.world_size for other in (seat, *verdict.seats))
            raise verdict.error()
        if not any(other.token == seat.token and other.rank == seat.rank for other in verdict.seats):
            raise self._refused(verdict)
        self.seats = verdict.seats

    def _refused(self, verdict: Verdict) -> UsageError:
        """The error of a process that came to a job that is complete without it."""
        different = disagreement(self.seat, verdict.seats[0])
        return UsageError(
            f"rank {self.seat.rank} came to {self.client.address}, where a job is running without it",
            expected="a rank that nobody has claimed, or an address of its own",
            got=different.got if different else f"rank {self.seat.rank} is claimed by two processes",
            fix="give this job another MASTER_PORT; the running job goes on",
        )

    def _await_verdict(self, pace: Pace, timeout_s: float, check: Callable[[list[Seat]], None]) -> Verdict:
        client, seat, seats = self.client, self.seat, {self.seat.rank: self.seat}
        # Rank 0 looks at every seat, the others at rank 0's: n reads in all, not n * n.
        awaited = list(range(seat.world_size)) if seat.rank == 0 else [0]
        while True:
            answer_s = max(GOODBYE_S, pace.left_s)
            text = client.peek("verdict", timeout_s=answer_s)
            if text is not None:
                return Verdict.loads(text)
            for rank in awaited:
                key = f"seat/{rank}"
                found = client.peek(key, timeout_s=answer_s) if rank not in seats else None
                if found is not None:
                    seats[rank] = Seat(**json.loads(found))
                    problem = disagreement(seat, seats[rank])
                    if problem is not None:
                        client.write_once("verdict", problem.dumps())
            if seat.rank == 0 and len(seats) == seat.world_size:
                client.write_once("verdict", _judge([seats[rank] for rank in awaited], check).dumps())
            elif pace.is_over:
                client.write_once("verdict", self._missing(timeout_s).dumps(), timeout_s=GOODBYE_S)
            else:
                pace.pause()

    def _missing(self, timeout_s: float) -> Verdict:
        ranks = range(self.seat.world_size)
        missing = [rank for rank in ranks if self.client.peek(f"seat/{rank}") is None]
        return Verdict(
            "timeout",
            f"rank {', '.join(map(str, missing))} did not come to the rendezvous at {self.client.address}",
            expected=f"all {self.seat.world_size} ranks within {timeout_s:g} s",
            got=f"{self.seat.world_size - len(missing)}",
            fix="look at the missing ranks' own output; timeout_s of init() is how long to wait",
        )

    def leave(self) -> None:
        """Say goodbye; rank 0 closes its server last, after the others' goodbyes or `GOODBYE_S`."""
        with contextlib.suppress(PeerError, CollectiveTimeoutError):
            if self.seat.rank == 0:
                self.client.set("closed", "1", timeout_s=GOODBYE_S)
            self.client.add("goodbyes", timeout_s=GOODBYE_S)
            if self._server is not None:
                self._linger("goodbyes", lambda: self.seat.world_size)
        self._drop()

    def give_up(self) -> None:
        """Leave after a `sit` that failed; rank 0 keeps its server up until the others know why.

        Those that came; and where ranks contradict each other, those that are still to come.
        """
        with contextlib.suppress(PeerError, CollectiveTimeoutError):
            if self._server is not None:
                self._linger("verdicts-read", lambda: max(self._ranks_to_tell, self.client.add("claims", 0)))
        self._drop()

    def _linger(self, key: str, enough: Callable[[], int]) -> None:
        pace = Pace(GOODBYE_S)
        while not pace.is_over and self.client.add(key, 0) < enough():
            pace.pause()

    def _drop(self) -> None:
        if self._nonce:
            _left_servers.add(self._nonce)
        self.client.close()
        self._server = None


def _judge(seats: list[Seat], check: Callable[[list[Seat]], None]) -> Verdict:
    try:
        check(seats)
    except UsageError as error:
        return Verdict("usage", str(error))
    return Verdict("complete", seats=tuple(seats))


def join(
    seat: Seat,
    *,
    host: str = "",
    port: int = 0,
    store: Store | None = None,
    is_served: bool = False,
    timeout_s: float,
    search_s: float,
    check: Callable[[list[Seat]], None],
) -> Rendezvous:
    """Meet the other ranks of this job.

    Args:
        seat: What this rank says about itself.
        host: Where rank 0 serves, or where the launcher does.
        port: Likewise.
        store: A store that the caller has made; host and port are not used then.
        is_served: The launcher serves the store at host:port.
        timeout_s: How long to wait for the other ranks.
        search_s: How long to look for the store.
        check: See `Rendezvous.sit`.

    Raises:
        UsageError: the port is in use, the host has no address, or the ranks contradict each other.
        CollectiveTimeoutError: nobody listens, or ranks are missing.
        PeerError: the store died during the rendezvous.
    """
    prefix = f"bagua_rt/{seat.job}/" if seat.job else "bagua_rt/"
    if store is not None:
        client = StoreClient(store, _describe(store), prefix, _endpoint(store), timeout_s=timeout_s)
        return _sit(Rendezvous(_next_round(client, seat), seat, None, ""), timeout_s, check)
    pace = Pace(search_s)
    families = _resolve(host, port, pace.left_s)
    if is_served:
        client = _connect(host, port, pace, timeout_s, prefix)
        return _sit(Rendezvous(_next_round(client, seat), seat, None, ""), timeout_s, check)
    if seat.rank == 0:
        return _sit(_serve(host, port, families, seat, timeout_s), timeout_s, check)
    while True:
        rendezvous = _visit(host, port, seat, pace, timeout_s)
        try:
            return _sit(rendezvous, timeout_s, check)
        except PeerError:  # an old server that was closing; the new one comes, or the search ends
            if pace.is_over:
                raise
            pace.pause()


def _sit(rendezvous: Rendezvous, timeout_s: float, check: Callable[[list[Seat]], None]) -> Rendezvous:
    try:
        rendezvous.sit(timeout_s, check)
    except BaseException:
        rendezvous.give_up()
        raise
    return rendezvous


def _next_round(client: StoreClient, seat: Seat) -> StoreClient:
    """On a store that outlives an init: the first round that is neither closed nor ours already."""
    number = 1
    while True:
        keys = client.under(str(number))
        if keys.peek("closed") is None and keys.peek(f"sat/{seat.rank}/{seat.token}") is None:
            keys.set(f"sat/{seat.rank}/{seat.token}", "1")
            return keys
        number += 1


def _endpoint(store: Store) -> tuple[str, int] | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def _describe(store: Store) -> str:
    endpoint = _endpoint(store)
    return f"{endpoint[0]}:{endpoint[1]}" if endpoint else f"the {type(store).__name__} given to init()"


def _resolve(host: str, port: int, timeout_s: float) -> set[int]:
    """The families of the host's addresses."""
    try:
        found = within(timeout_s, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:  # a TimeoutError is an OSError
        raise UsageError(
            f"the rendezvous at {host}:{port} can't be found: the name {host!r} does not resolve",
            expected="MASTER_ADDR to be the name or the address of rank 0's machine",
            got=str(error) or "no answer from the name service",
            fix="set MASTER_ADDR to an address that every rank can reach",
        ) from error
    return {int(family) for family, *_ in found}


def _connect(host: str, port: int, pace: Pace, timeout_s: float, prefix: str) -> StoreClient:
    """A client of the store at host:port, once somebody listens there."""
    while True:
        refusal = "no answer"
        with contextlib.ExitStack() as undo:
            try:
                # A plain socket first: torch's own client reports every refused try on stderr. It stays, as
                # the sentinel, and says which of the host's addresses answers.
                sentinel = undo.enter_context(
                    socket.create_connection((host, port), timeout=max(pace.left_s, 0.01))
                )
                refusal = "a program that does not answer as a store"
                endpoint = (str(sentinel.getpeername()[0]), port)
                make = partial(_client, endpoint, pace.left_s, timeout_s)
                store, connection = within(pace.left_s, partial(connected, make, port))
                undo.pop_all()
                return StoreClient(
                    store,
                    f"{host}:{port}",
                    prefix,
                    endpoint,
                    sentinel,
                    connection=connection,
                    timeout_s=timeout_s,
                )
            except TimeoutError:
                pass  # `refusal` says how far it came
            except (OSError, RuntimeError) as error:
                refusal = str(error).splitlines()[0]
        if pace.is_over:
            raise CollectiveTimeoutError(
                f"the rendezvous at {host}:{port} can't be reached",
                expected="rank 0, or the launcher's store, to be listening there",
                got=refusal,
                fix="check MASTER_ADDR and MASTER_PORT, and that rank 0 has started "
                "(BAGUA_RT_RENDEZVOUS_TIMEOUT_S is how long the others look for it)",
            )
        pace.pause()


def _client(endpoint: tuple[str, int], connect_s: float, timeout_s: float) -> Store:
    """A client of torch's; a thread that is left behind in here ends soon after `connect_s`."""
    limit = timedelta(seconds=connect_s)
    store = TCPStore(endpoint[0], endpoint[1], None, False, limit, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _listen(port: int, families: set[int]) -> socket.socket:
    """A listening socket on all interfaces.

    IPv4 where the host has such an address: behind a socket for both, torch's server asks the name service
    about every peer (::ffff:a.b.c.d is in no hosts file), and each lost answer stops it for 5 s.
    """
    if socket.AF_INET in families or not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET, backlog=2048)
    return socket.create_server(("", port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)


def _serve(host: str, port: int, families: set[int], seat: Seat, timeout_s: float) -> Rendezvous:
    """Serve the store, as rank 0.

    Raises:
        UsageError: the port is in use, or this process may not have it.
    """
    try:
        listener = _listen(port, families)
    except OSError as error:
        found = _contest(host, port, seat) if error.errno == errno.EADDRINUSE else str(error)
        in_use = "in use" if error.errno == errno.EADDRINUSE else "not to be had"
        raise UsageError(
            f"rank 0 can't serve the rendezvous at {host}:{port}: the port is {in_use}",
            expected="a free port",
            got=found,
            fix="give every job its own MASTER_PORT, and rank 0 to one process only",
        ) from error
    limit = timedelta(seconds=timeout_s)
    server = TCPStore(
        "127.0.0.1", port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    own = _client(("127.0.0.1", port), timeout_s, timeout_s)
    keys = StoreClient(own, f"{host}:{port}", "bagua_rt/", timeout_s=timeout_s)
    nonce = uuid.uuid4().hex
    keys.set("server", json.dumps({"nonce": nonce, "job": seat.job}))
    return Rendezvous(keys, seat, server, nonce)


def _visit(host: str, port: int, seat: Seat, pace: Pace, timeout_s: float) -> Rendezvous:
    """Come to the store that rank 0 serves, as another rank.

    Raises:
        UsageError: another job is there.
        CollectiveTimeoutError: no store of this package is there.
    """
    while True:
        client = _connect(host, port, pace, timeout_s, "bagua_rt/")
        with contextlib.suppress(PeerError):
            server = _server_there(client, pace)
            if server["job"] != seat.job:
                raise UsageError(
                    f"another job holds the rendezvous at {host}:{port}",
                    expected=f"job {seat.job or '(no name)'}",
                    got=f"job {server['job'] or '(no name)'}",
                    fix="give every job its own MASTER_PORT",
                )
            # A rank that inits again may be faster than rank 0 is in closing the old server.
            if server["nonce"] not in _left_servers and client.peek("closed") is None:
                return Rendezvous(client, seat, None, server["nonce"])
        client.close()
        pace.pause()


def _server_there(client: StoreClient, pace: Pace) -> dict[str, str]:
    """What the server says about itself.

    Raises:
        CollectiveTimeoutError: it is a store, but says nothing.
        PeerError: the store is gone.
    """
    while True:
        text = client.peek("server")
        if text is not None:
            return {str(key): str(value) for key, value in json.loads(text).items()}
        if pace.is_over:
            raise CollectiveTimeoutError(
                f"the store at {client.address} was not made by bagua_rt",
                expected="rank 0 of this job to serve there",
                fix="give every job its own MASTER_PORT",
            )
        pace.pause()


def _contest(host: str, port: int, seat: Seat) -> str:
    """Rank 0 found its port taken: tell the job there, if its init is still open, and say what was found.

    Without a launcher's word the two jobs can't tell each other's ranks apart, so neither may go on.
    """
    pace = Pace(_CONTEST_S)
    try:
        client = _connect("127.0.0.1", port, pace, GOODBYE_S, "bagua_rt/")
        server = _server_there(client, pace)
        name = server["job"] or "(no name)"
        if server["job"] == seat.job and server["nonce"] not in _left_servers:
            client.write_once("verdict", claimed_twice(0, f"{host}:{port}").dumps())
            client.add("verdicts-read")
        client.close()
    except BaguaError:
        return "another program listens there"
    return f"a bagua_rt job {name} is served there: rank 0 is claimed by two processes, or two jobs share it"
