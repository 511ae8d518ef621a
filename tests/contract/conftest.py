"""Every contract test runs on every backend; a new backend is one more parameter here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import pytest

from bagua_rt.backends import _cuda_device_count
from tests.emulator import product
from tests.ranks import RankPool

# "2-4": run the tests of two to four ranks on the devices here, however many these are.
RANKS = "BAGUA_RT_GPU_RANKS"


@pytest.fixture(scope="module", params=["gloo", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of the backend under test; "emulated" is cuda on the emulated libraries."""
    if request.param == "cuda" and _cuda_device_count() < 1:
        pytest.skip("there is no CUDA device")
    return str(request.param)


@pytest.fixture(scope="session")
def emulated_environment() -> Mapping[str, str]:
    """The variables of a process on the emulator, which is built here."""
    return product.environment(base={})


@pytest.fixture(scope="module")
def environment(backend: str, request: pytest.FixtureRequest) -> Mapping[str, str]:
    """The variables that a rank of the backend needs beside the inherited ones."""
    if backend != "emulated":
        return {}
    variables: Mapping[str, str] = request.getfixturevalue("emulated_environment")
    return variables


@pytest.fixture(scope="module")
def require_ranks(backend: str) -> Callable[[int], None]:
    """A function that skips a test of so many ranks where they can't meet."""
    least, most = map(int, os.environ.get(RANKS, f"1-{max(0, _cuda_device_count())}").split("-"))

    def require(world_size: int) -> None:
        if backend == "cuda" and not least <= world_size <= most:
            pytest.skip(f"{world_size} ranks on the CUDA device(s) here: {RANKS} is {least}-{most}")

    return require


@pytest.fixture(scope="module")
def pools(environment: Mapping[str, str], require_ranks: Callable[[int], None]) -> Callable[[int], RankPool]:
    """A function from the world size to the pool of that size, on the backend under test."""

    def pool(world_size: int) -> RankPool:
        require_ranks(world_size)
        return RankPool(world_size, environment)

    return pool
