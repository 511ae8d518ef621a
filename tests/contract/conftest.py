"""Every contract test runs on every backend; a new backend is one more parameter here."""

from __future__ import annotations

import pytest

from tests.ranks import rank_pools

pools = pytest.fixture(scope="module")(rank_pools)


@pytest.fixture(params=["gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of the backend under test."""
    return str(request.param)
