"""News: a rank that failed, or left in good order, says so, and the ranks that wait look."""

from __future__ import annotations

import contextlib

from bagua_rt.errors import ClosedError, CollectiveTimeoutError, PeerError
from bagua_rt.rendezvous import StoreClient

_TELL_S = 2.0  # how long a store may hold up a rank that fails; less where it is known not to answer


class FailureBoard:
    """Where a rank that failed says so, and the others look while they wait. Any thread may use it.

    Args:
        client: A store client of the board's own; None in a job of one rank, which has nobody to tell.

    Attributes:
        is_known: Does this rank know of a failure: its own, or one that it has read of?
    """

    KEY = "failure"

    def __init__(self, client: StoreClient | None) -> None:
        self._client = client
        self._seen: str | None = None
        self.is_known = False

    def post(self, text: str) -> None:
        """Tell the other ranks why this one failed. The first post stays; later ones are dropped."""
        client = self._client
        self.is_known = True
        if client is None:
            return
        try:
            client.write_once(self.KEY, text, timeout_s=client.grace_s(_TELL_S))
        except ClosedError:  # a forked child's failure is not this rank's
            return
        except (PeerError, CollectiveTimeoutError) as error:  # there is nobody left to tell, or no way
            self._seen = self._seen or str(error)

    def poll(self) -> str | None:
        """What a rank posted, or that the store is gone; None while there is no news. Never waits."""
        client = self._client
        if self._seen is not None or client is None:
            return self._seen
        try:
            found = client.glance(self.KEY)
            self._seen = None if found is None else found.decode(errors="replace")
            self.is_known |= found is not None
        except PeerError as error:
            # A board that was closed meanwhile has no news: its own end of the line is shut.
            self._seen = None if self._client is None else str(error)
        return self._seen

    def close(self) -> None:
        """Let the client go. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class DepartureBoard:
    """Where a rank says that it leaves in good order, to ranks that can do without. Any thread may use it.

    Args:
        client: A store client; None in a job of one rank.
    """

    def __init__(self, client: StoreClient | None) -> None:
        self._client = client
        self._seen: str | None = None

    def post(self, text: str) -> None:
        """Tell the other ranks. The first post stays; later ones are dropped."""
        if (client := self._client) is not None:
            with contextlib.suppress(PeerError, CollectiveTimeoutError, ClosedError):  # nobody to tell
                client.write_once("departure", text, timeout_s=client.grace_s(_TELL_S))

    def poll(self) -> str | None:
        """What a rank posted; None while there is no news. Never waits. A store that died is no departure."""
        if self._seen is None and self._client is not None:
            with contextlib.suppress(PeerError):
                found = self._client.glance("departure")
                self._seen = None if found is None else found.decode(errors="replace")
        return self._seen
