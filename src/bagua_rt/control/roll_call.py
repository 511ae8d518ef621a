"""Who is there, and doing what: asked by a rank that waits, answered by a ticker of each other rank.

It answers while the rank's training thread computes, sleeps or waits itself; so a rank that does not
answer is dead, stopped, or cut off. Nothing is written unless somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bagua_rt.errors import CollectiveTimeoutError, PeerError
from bagua_rt.rendezvous import StoreClient

_PAUSE_S = 0.02


class RollCall:
    """Questions and answers of one attachment's ranks, through the store.

    Args:
        client: A store client; None in a world of one rank.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        problem: Why the last question could not be asked; empty if it could.
    """

    def __init__(self, client: StoreClient | None, rank: int, world_size: int) -> None:
        self._client = client
        self._rank = rank
        self._world_size = world_size
        self._answered = 0
        self.problem = ""

    def answer(self, describe: Callable[[], str]) -> None:
        """Answer the questions that were asked since the last call. Cheap; called now and then.

        Args:
            describe: Says what this rank is doing.
        """
        client = self._client
        if client is None:
            return
        try:
            asked = int(client.glance("roll/asked") or 0)
            while self._answered < asked:  # several ranks may have asked since
                self._answered += 1
                client.tell(f"roll/{self._answered}/{self._rank}", describe())
        except PeerError:
            self._client = None  # the store is gone: there is nobody to answer

    def ask(self, wait_s: float) -> dict[int, str | None]:
        """Ask all other ranks what they are doing.

        Args:
            wait_s: How long to wait for answers.

        Returns:
            For each other rank what it says; None where it does not answer. Empty where nobody can be asked.
        """
        client = self._client
        if client is None:
            return {}
        try:
            number = client.add("roll/asked", timeout_s=client.grace_s(wait_s))
            answers: dict[int, str | None] = {r: None for r in range(self._world_size) if r != self._rank}
            deadline = time.monotonic() + wait_s
            while None in answers.values() and time.monotonic() < deadline:
                for rank in [rank for rank, text in answers.items() if text is None]:
                    found = client.glance(f"roll/{number}/{rank}")
                    answers[rank] = None if found is None else found.decode(errors="replace")
                time.sleep(_PAUSE_S)
        except PeerError:
            return {}
        except CollectiveTimeoutError as error:  # no way to ask anybody
            self.problem = str(error)
            return {}
        return answers

    def close(self) -> None:
        """Let the client go. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def told(answers: dict[int, str | None]) -> str:
    """The answers as a text: the silent ranks first."""
    silent = [rank for rank, text in answers.items() if text is None]
    parts = [f"no answer from rank {', '.join(map(str, silent))}"] if silent else []
    parts += [f"rank {rank} is {text}" for rank, text in answers.items() if text is not None]
    return "; ".join(parts)
