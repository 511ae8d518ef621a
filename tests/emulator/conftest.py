"""Builds the emulator once, before any of its tests (whose timeouts leave fixtures out)."""

from __future__ import annotations

import pytest

from . import build
from .helpers import KERNELS


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    build.build()
    build.build_kernels(KERNELS)
