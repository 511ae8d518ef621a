"""The emulator makes every statement of conformance.py true (and a GPU may refute them)."""

from __future__ import annotations

import pytest

from . import conformance
from .helpers import KERNELS, on_emulator

pytestmark = pytest.mark.timeout(60, func_only=True)


def test_every_statement_holds() -> None:
    results = on_emulator(rank_conformance, kernels=[KERNELS], quiet=True)
    assert [r for r in results if not r.held] == []
    assert len(results) == len(conformance.STATEMENTS) >= 25


def test_a_statement_can_fail() -> None:
    """In the no-op mode events order nothing."""
    results = on_emulator(rank_conformance, kernels=[KERNELS], quiet=True, noop=True)
    broken = [r.statement for r in results if not r.held]
    assert "a wait takes the record made before it, not a later one" in broken


def rank_conformance(_rank: int, _world: int) -> list[conformance.Result]:
    return conformance.run_all()
