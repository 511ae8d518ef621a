"""A rank is killed while training: the others raise, shrink or init again, and end at the right weights."""

from __future__ import annotations

from functools import partial

from tests import survivors
from tools.gpu_check.steps import Bench, Step

RANKS = 3


def lose_a_rank(way: survivors.Way, bench: Bench) -> None:
    """Run tests/survivors.py, and compare with one process."""
    name = f"killed, then {way}"
    if bench.options.is_small and way != "shrink":
        bench.skip(name, "the small run shrinks only")
        return
    bench.prepare()
    found = survivors.lose_a_rank(bench.ctx, bench.device, way, bench.computing)
    off = survivors.worst(found.weights, survivors.by_one_process(bench.world_size))
    bench.check(f"{name}: the error", found.error == "PeerError", found.error or "none was raised")
    bench.check(f"{name}: the step that failed moved nothing", not found.moved)
    bench.check(f"{name}: weights", off < 1e-5, f"{off:.1e} off one process in float64", worst=off)


STEPS = tuple(
    Step(f"killed, then {way}", partial(lose_a_rank, way), RANKS, 45.0, survivors.EXIT_CODE)
    for way in survivors.WAYS
)
