"""Ranks live as long as the session: to start one costs more than most tests do."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable

import pytest

from bagua_rt.backends import _cuda_device_count
from tests.nursery import close_nurseries
from tests.ranks import RankPool, close_crews


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a CUDA device where there is none; ``-m gpu`` skips it by name instead."""
    if config.getoption("markexpr") or _cuda_device_count() > 0:
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def pools() -> Callable[[int], RankPool]:
    """A function from the world size to a pool of that size."""
    return RankPool


@pytest.fixture(scope="session")
def pool() -> RankPool:
    """Five ranks; `tests.micro.on` runs a function on the first few of them."""
    return RankPool(5)


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    while True:  # below the ports that the system gives to whoever asks for any: those may be taken meanwhile
        number = random.randrange(15_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("", number)):
            return number


def pytest_sessionfinish() -> None:
    """End the ranks, and what they were forked from."""
    close_crews()
    close_nurseries()
