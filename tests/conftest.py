"""Ranks live as long as the session: to start one costs more than most tests do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks import RankPool, close_crews


@pytest.fixture(scope="session")
def pools() -> Callable[[int], RankPool]:
    """A function from the world size to a pool of that size."""
    return RankPool


@pytest.fixture(scope="session")
def pool() -> RankPool:
    """Five ranks; `tests.micro.on` runs a function on the first few of them."""
    return RankPool(5)


def pytest_sessionfinish() -> None:
    """End the ranks."""
    close_crews()
