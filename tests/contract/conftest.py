"""Every contract test runs on every backend; a new backend is one more parameter here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from tests.emulator import product
from tests.ranks import RankPool


@pytest.fixture(scope="module", params=["gloo", "emulated"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of the backend under test; "emulated" is cuda on the emulated libraries."""
    return str(request.param)


@pytest.fixture(scope="session")
def emulated_environment() -> Mapping[str, str]:
    """The variables of a process on the emulator, which is built here."""
    return product.environment(base={})


@pytest.fixture(scope="module")
def environment(backend: str, request: pytest.FixtureRequest) -> Mapping[str, str]:
    """The variables that a rank of the backend needs beside the inherited ones."""
    if backend == "gloo":
        return {}
    variables: Mapping[str, str] = request.getfixturevalue("emulated_environment")
    return variables


@pytest.fixture(scope="module")
def pools(environment: Mapping[str, str]) -> Callable[[int], RankPool]:
    """A function from the world size to the pool of that size, on the backend under test."""
    return lambda world_size: RankPool(world_size, environment)
