"""One pool of five ranks for all tests of attaching: to start a rank costs more than most of them do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Five ranks; `tests.micro.on` runs a function on the first few of them."""
    with RankPool(5) as pool:
        yield pool
