"""docs/tutorial.md is a program: its blocks run in order, and give what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.ranks import RankContext, RankPool

ROOT = Path(__file__).parents[1]
SIGNSGD = ROOT / "examples" / "signsgd.py"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), flags=re.DOTALL)


def run_tutorial(context: RankContext, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    import sys

    import bagua_rt as bagua

    module: Any = ModuleType("tutorial")
    sys.modules["tutorial"] = module
    exec(compile(source, "tutorial.md", "exec"), module.__dict__)
    with bagua.init(
        "cpu", store=context.store(), rank=context.rank, world_size=context.world_size, timeout_s=30
    ) as pg:
        before, after = module.train(pg)
    return before, after


@pytest.mark.parametrize(("world_size", "move"), [(1, -0.01), (2, 0.0), (3, 0.01)])
def test_the_tutorials_blocks_train(pool: RankPool, world_size: int, move: float) -> None:
    results = pool.first(world_size).run(run_tutorial, "\n\n".join(blocks()), timeout=60)
    for before, after in results:
        torch.testing.assert_close(after - before, torch.full((1, 8), move), rtol=0, atol=1e-7)
        assert torch.equal(after, results[0][1])


def test_the_example_is_what_the_tutorial_builds() -> None:
    program = SIGNSGD.read_text().split('"""\n\n', 1)[1]
    built = "\n\n".join(block.strip() + "\n" for block in blocks()[:2])
    assert program == built
    assert len(SIGNSGD.read_text().splitlines()) <= 40
