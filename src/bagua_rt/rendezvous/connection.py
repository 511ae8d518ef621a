"""The connection of a store's client, which torch keeps to itself."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from torch._C._distributed_c10d import Store

_FDS = Path("/proc/self/fd")


class Connection:
    """One socket of this process, known by its number and its inode, so that it is not kept open.

    Args:
        fd: Its file descriptor.
        inode: ``socket:[…]``, which tells it apart from a later one of that number.
    """

    def __init__(self, fd: int, inode: str) -> None:
        self._fd = fd
        self._inode = inode

    def shut_down(self) -> None:
        """Let whoever waits for an answer on it get an error instead."""
        # An OSError says that it is closed already.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as connection:
            if _name(self._fd) == self._inode:
                connection.shutdown(socket.SHUT_RDWR)


def connected(make: Callable[[], Store], port: int | None) -> tuple[Store, Connection | None]:
    """Make a client of the store that is served at `port`.

    Returns:
        The client, and its connection where it can be told.
    """
    before = _connections(port)
    store = make()
    new = _connections(port) - before
    return store, Connection(*new.pop()) if len(new) == 1 else None


def _connections(port: int | None) -> set[tuple[int, str]]:
    found = set()
    for fd in [int(path.name) for path in _FDS.iterdir()] if port is not None and _FDS.exists() else ():
        # An OSError says: not connected, or closed meanwhile.
        with contextlib.suppress(OSError):
            if (name := _name(fd)).startswith("socket:"):
                with socket.socket(fileno=os.dup(fd)) as other:
                    if other.getpeername()[1:2] == (port,):
                        found.add((fd, name))
    return found


def _name(fd: int) -> str:
    """``socket:[inode]``."""
    return str((_FDS / str(fd)).readlink())
