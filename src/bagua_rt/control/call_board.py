"""What the ranks of a communicator call: compared before each call on request, told when a wait is too long.

[Note: calls are compared]
    With ``init(check=True)`` a rank writes what it is about to launch into the store. A collective has the
    same number on every rank: each waits for the others' texts and compares, and nothing is launched unless
    they agree. One that a rank refuses by itself, for its arguments, counts as well, and the others hear it.
    A send and the receive that it meets are numbered by their ordered pair of ranks; neither waits for the
    other, and whoever comes second compares. A difference found then, or a collective that waits for a rank
    which itself waits for a message that will not come, is posted as news: the next call of every rank raises
    it, and so does a wait that is under way. A send or receive that a rank refuses has launched nothing there
    and may be made again; until it is, the other side's wait raises why.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from bagua_rt.backend import Call, Message
from bagua_rt.errors import CollectiveTimeoutError, UsageError
from bagua_rt.rendezvous import Pace, StoreClient

_LOOK_S = 0.2  # how often a rank that waits looks for news
_HEARD_S = 1.0  # how long whoever posted some waits for the others to have read it
_WAY_OUT = "make all ranks take the same way; abort() the communicator, or shut down, to go on"


@dataclass(frozen=True)
class _Waiting:
    """What a rank waits for."""

    text: str
    messages: list[tuple[int, int, int]]  # source, destination, number


class CallBoard:
    """The calls of one communicator's ranks, in the store. Any thread may use it.

    Args:
        client: Its keys belong to this communicator alone.
        name: The communicator's, for messages.
        rank: This rank in it.
        world_size: Number of ranks in it.
        timeout_s: How long a collective waits for the others' calls.
        is_comparing: Compare every call ([Note: calls are compared])?
    """

    def __init__(
        self, client: StoreClient, name: str, rank: int, world_size: int, timeout_s: float, is_comparing: bool
    ) -> None:
        self._client, self._name, self._rank, self._timeout_s = client, name, rank, timeout_s
        self._others = [other for other in range(world_size) if other != rank]
        self._lock = threading.RLock()  # calls of several threads are compared one after the other
        self._collectives = 0
        self._messages: Counter[tuple[int, int]] = Counter()  # by source and destination
        self._refused: set[str] = set()  # keys of messages that this rank refused, and may make yet
        self.is_comparing = is_comparing

    def child(self, name: str, rank: int, world_size: int) -> CallBoard:
        """The board of a communicator made of this one's ranks, called `name`."""
        client = self._client.under(f"child/{name}")
        return CallBoard(client, name, rank, world_size, self._timeout_s, self.is_comparing)

    # ---- comparing

    @contextmanager
    def telling_refusals(self) -> Iterator[None]:
        """Around a collective: where its arguments are refused here, the others, who made it, hear so."""
        before = self._collectives
        try:
            yield
        except UsageError as error:
            with self._lock:
                if self._collectives == before:  # else it came as far as the others
                    self._collectives += 1
                    self._client.tell(f"refused/{self._rank}/{self._collectives}", str(error))
            raise

    def refuse_messages(self, pairs: Sequence[tuple[int, int]], text: str) -> None:
        """Tell the other sides that this rank refuses a send, a receive or both.

        Args:
            pairs: Their sources and destinations, as the caller gave them.
            text: Why.
        """
        with self._lock:
            for source, destination in pairs:
                other = destination if source == self._rank else source
                if type(other) is int and other in self._others:  # else it was refused for being no rank
                    number = self._messages[source, destination] + 1
                    key = f"{_key(source, destination, number)}/refused"
                    self._refused.add(key)
                    self._client.tell(key, text)

    def compare(self, calls: Sequence[Call]) -> None:
        """Compare what this rank is about to launch, a call or those of a group; blocks for collectives.

        Raises:
            UsageError: the ranks' calls differ; names the call's number and the field, on every rank.
            CollectiveTimeoutError: a rank did not make its call.
            PeerError: the store is gone.
        """
        with self._lock:
            self.look()
            for call in calls:
                for message in call.messages:
                    self._announce(call, message)
            for call in calls:
                if call.is_collective:
                    self._meet(call)

    def look(self) -> None:
        """Raise what another rank found.

        Raises:
            UsageError: a rank found that calls differ.
            PeerError: the store is gone.
        """
        if (news := self._client.glance("news")) is not None:
            self._client.tell(f"read/{self._rank}", "1")
            raise UsageError(news.decode(errors="replace"), fix=_WAY_OUT)

    def _meet(self, call: Call) -> None:
        """Wait for the other ranks' collectives of this number, and compare."""
        number = self._collectives = self._collectives + 1
        # Two slots are enough: nobody writes number + 2 before all have written number + 1, having read this.
        slot = f"call/{number % 2}"
        self._client.set(f"{slot}/{self._rank}", json.dumps([number, call.fields]))
        found = {self._rank: dict(call.fields)}
        pace, look = Pace(self._timeout_s), Pace(_LOOK_S)
        while missing := [other for other in self._others if other not in found]:
            for other in missing:
                written = self._read(f"{slot}/{other}")
                if written is not None and written[0] == number:
                    found[other] = written[1]
            if look.is_over:
                look = Pace(_LOOK_S)
                self.look()
                self._find_refusal(call, number, missing)
                self._find_deadlock(call, number, missing)
            if pace.is_over:
                raise self._late(call, number, missing)
            if len(found) <= len(self._others):
                pace.pause()
        self._require_equal(number, found)

    def _require_equal(self, number: int, found: Mapping[int, Mapping[str, Any]]) -> None:
        for field in dict.fromkeys(field for rank in sorted(found) for field in found[rank]):
            values = {rank: found[rank].get(field) for rank in sorted(found)}
            if field in ("sends", "receives"):
                continue
            if len({json.dumps(value) for value in values.values()}) > 1:
                raise UsageError(
                    f"collective #{number} of communicator {self._name!r} differs between ranks: {field}",
                    expected="the same call on every rank",
                    got="; ".join(f"rank {rank}: {_spell(found[rank])}" for rank in sorted(found)),
                    fix="nothing was launched: make every rank take the same way through the program",
                )
        for rank, fields in sorted(found.items()):
            for other, count in enumerate(fields.get("sends", ())):
                if found[other]["receives"][rank] != count:
                    raise UsageError(
                        f"collective #{number} of communicator {self._name!r} differs between ranks: numel",
                        expected=f"rank {other} to receive the {count} elements that rank {rank} sends it",
                        got=f"room for {found[other]['receives'][rank]} elements",
                    )

    def _announce(self, call: Call, message: Message) -> None:
        """Compare a send or receive with the other side's, if that was called before."""
        pair = message.source, message.destination
        number = self._messages[pair] = self._messages[pair] + 1
        call.numbers.append(number)
        own = {"operation": call.fields["operation"], **message._asdict()}
        key = _key(*pair, number)
        if (refused := f"{key}/refused") in self._refused:
            self._refused.remove(refused)
            self._client.set(refused, "")
        mine, theirs = ("from", "to") if self._rank == message.source else ("to", "from")
        self._client.set(f"{key}/{mine}", json.dumps(own))
        met = self._read(f"{key}/{theirs}")
        if met is None:
            return
        for side in (mine, theirs):
            self._client.set(f"{key}/{side}", "")
        differing = [name for name in ("numel", "dtype", "lane") if met[name] != own[name]]
        if differing:
            other = message.destination if self._rank == message.source else message.source
            self._post(
                f"message #{number} from rank {message.source} to rank {message.destination} of communicator "
                f"{self._name!r} differs between them: {differing[0]}; rank {self._rank}: {_spell(own)}; "
                f"rank {other}: {_spell(met)}"
            )

    def _find_refusal(self, call: Call, number: int, missing: Sequence[int]) -> None:
        for other in missing:
            if (text := self._client.glance(f"refused/{other}/{number}")) is not None:
                raise UsageError(
                    f"collective #{number} of communicator {self._name!r} was refused on rank {other}",
                    expected=f"{_spell(call.fields)}, as on rank {self._rank}",
                    got=text.decode(errors="replace"),
                    fix="nothing was launched: mend the call on that rank",
                )

    def _find_refused_message(self, messages: Sequence[tuple[int, int, int]]) -> None:
        for source, destination, number in messages:
            if text := self._client.glance(f"{_key(source, destination, number)}/refused"):
                raise UsageError(
                    f"message #{number} from rank {source} to rank {destination} of communicator "
                    f"{self._name!r} was refused on rank {source + destination - self._rank}",
                    got=text.decode(errors="replace"),
                    fix="mend the call on that rank; this one is still under way",
                )

    def _find_deadlock(self, call: Call, number: int, missing: Sequence[int]) -> None:
        """Post it if a missing rank waits for a message that this rank, waiting here, won't launch."""
        for other in missing:
            if (waiting := self._waiting(other)) is None:
                continue
            for source, destination, message in waiting.messages:
                if self._rank in (source, destination) and message > self._messages[source, destination]:
                    self._post(
                        f"operations of communicator {self._name!r} differ between ranks: "
                        f"rank {other} waits for {waiting.text} with rank {self._rank}, "
                        f"which called {_spell(call.fields)} (collective #{number}) instead"
                    )

    def _post(self, text: str) -> NoReturn:
        self._client.write_once("news", text)
        pace, unread = Pace(_HEARD_S), list(self._others)
        while unread and not pace.is_over:  # this rank may serve the store, and end with the error
            unread = [other for other in unread if self._client.glance(f"read/{other}") is None]
            pace.pause()
        raise UsageError(text, fix=_WAY_OUT)

    def _late(self, call: Call, number: int, missing: Sequence[int]) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"collective #{number} of communicator {self._name!r}: "
            f"rank {', '.join(map(str, missing))} did not call it within {self._timeout_s:g} s",
            expected=_spell(call.fields),
            got=self.told(missing),
            fix="nothing was launched; look for a rank that died, is slow or took another way",
        )

    # ---- waiting

    def wait(
        self, wait: Callable[[float], bool], timeout_s: float, text: Callable[[], str], call: Call | None
    ) -> bool:
        """Wait for an operation, telling the other ranks about it if it takes long.

        Args:
            wait: Waits for so many seconds; is it complete?
            timeout_s: The deadline.
            text: Says what the ranks are told: this rank's queue.
            call: The operation as it was compared, if it was.

        Returns:
            Whether it is complete.

        Raises:
            UsageError: a rank found that calls differ, or refused the other side of this message.
            PeerError: the store is gone.
        """
        first_s = min(_LOOK_S, timeout_s / 2) if self.is_comparing else timeout_s / 2
        if wait(first_s):
            return True
        numbered = []
        if call is not None:
            places = zip(call.messages, call.numbers, strict=True)
            numbered = [(m.source, m.destination, number) for m, number in places]
        self._client.tell(f"waiting/{self._rank}", json.dumps([text(), numbered]))
        pace = Pace(timeout_s - first_s)
        while not (is_complete := wait(min(_LOOK_S, max(0.0, pace.left_s)))) and not pace.is_over:
            if self.is_comparing:
                self.look()
                self._find_refused_message(numbered)
        if is_complete:  # at the deadline it stays, for those whose deadline is later
            self._client.tell(f"waiting/{self._rank}", "")
        return is_complete

    def told(self, ranks: Sequence[int] | None = None) -> str:
        """What the other ranks wait for, of those that have waited long enough to say so."""
        found = {other: self._waiting(other) for other in (self._others if ranks is None else ranks)}
        return "; ".join(
            f"rank {other} waits for {waiting.text if waiting else 'nothing here'}"
            for other, waiting in found.items()
        )

    def _waiting(self, rank: int) -> _Waiting | None:
        written = self._read(f"waiting/{rank}")
        return None if written is None else _Waiting(*written)

    def _read(self, key: str) -> Any:
        text = self._client.glance(key)
        return json.loads(text) if text else None


def _key(source: int, destination: int, number: int) -> str:
    return f"message/{source}to{destination}/{number}"


def _spell(fields: Mapping[str, Any]) -> str:
    """``all_reduce, numel 10, dtype torch.float32, …``."""
    hidden = ("operation", "source", "destination")
    return ", ".join([fields["operation"], *(f"{k} {v}" for k, v in fields.items() if k not in hidden)])
