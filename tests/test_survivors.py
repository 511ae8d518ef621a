"""A rank dies while training; the survivors shrink or init again, and end at the right weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import pytest

from tests import survivors
from tests.emulator import product
from tests.ranks import RankContext, RankDiedError, RankPool


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    """The emulator, with operations delayed at random."""
    return product.environment(base={}, delay=(0.2, 300, 1))


def run(ctx: RankContext, backend: str, way: survivors.Way) -> tuple[survivors.Survived, list[str]]:
    if backend == "gloo":
        return survivors.lose_a_rank(ctx, "cpu", way, lambda _: nullcontext()), []
    product.install()
    found = survivors.lose_a_rank(ctx, f"cuda:{ctx.rank}", way, product.computing)
    return found, product.findings()


# On gloo, test_failure.py inits again.
@pytest.mark.parametrize(
    ("backend", "way"), [("gloo", "shrink"), ("emulated", "shrink"), ("emulated", "init again")]
)
def test_survivors_end_at_the_right_weights(
    request: pytest.FixtureRequest, backend: str, way: survivors.Way
) -> None:
    world_size = 3
    variables: Mapping[str, str] = {} if backend == "gloo" else request.getfixturevalue("environment")
    *answers, victim = RankPool(world_size, variables).run(run, backend, way, timeout=60, expect_errors=True)
    assert isinstance(victim, RankDiedError)
    assert victim.exit_code == survivors.EXIT_CODE
    right = survivors.by_one_process(world_size)
    for answer in answers:
        assert isinstance(answer, tuple), answer
        survived, reports = answer
        assert reports == []
        assert survived.error == "PeerError"
        assert not survived.moved
        assert survived.weights == answers[0][0].weights, "the survivors differ"
        assert survivors.worst(survived.weights, right) < 1e-5
        assert survivors.worst(survived.weights, survivors.by_one_process(world_size + 1)) > 1e-3, "vacuous"
