"""docs/tutorial.md is a program: its blocks run in order, and give what the page says."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests import zoo
from tests.micro import group
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


def topk(context: RankContext, source: str, seed: int) -> tuple[list[bytes], bool]:
    """Weights by a float64 simulation of all ranks; is a resumed run bit-equal?"""
    import sys

    import bagua_rt as bagua

    module: Any = ModuleType("tutorial")
    sys.modules["tutorial"] = module
    exec(compile(source, "tutorial.md", "exec"), module.__dict__)
    n, share, steps = context.world_size, 0.2, 4
    with group(context):
        trainer = zoo.Trainer(bagua.algorithms.create("topk", share=share), cap_mb=2**-12)
        for t in range(steps):
            trainer.step(context.rank, t, seed)
        plans = trainer.run.buckets
        trainer.run.close()
    x = {name: zoo.start(name) for name in zoo.SHAPES}
    memories = [[np.zeros(plan.padded_numel) for plan in plans] for _ in range(n)]
    for t in range(steps):
        means = [np.zeros(plan.padded_numel) for plan in plans]
        for rank, memory in enumerate(memories):
            gradients = {name: x[name] - zoo.target(name, rank, t, seed) for name in x}
            for index, flat in enumerate(zoo.flats(plans, gradients.__getitem__)):
                memory[index] += flat / n
                count = math.ceil(share * plans[index].numel) if n > 1 else flat.size
                places = np.argsort(-np.abs(memory[index]))[:count]
                means[index][places] += memory[index][places]
                memory[index][places] = 0
        x.update({name: x[name] - zoo.LR * g for name, g in zoo.unflat(plans, means).items()})
    for name, ours in trainer.weights().items():
        np.testing.assert_allclose(ours, x[name], rtol=1e-9, atol=1e-9, err_msg=f"{name} {seed=}")

    def make() -> zoo.Trainer:
        return zoo.Trainer(bagua.algorithms.create("topk"), dtype=torch.float32, cap_mb=2**-12)

    return trainer.bits(), zoo.resumed(context, make, 3, 5, seed)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_tutorials_second_algorithm_is_right_and_resumes(pool: RankPool, world_size: int) -> None:
    seed = zoo.seed_of_today()
    answers = pool.first(world_size).run(topk, "\n\n".join(blocks()), seed, timeout=60)
    assert answers == [(answers[0][0], True)] * world_size, f"{seed=}"


def test_the_example_is_what_the_tutorial_builds() -> None:
    program = SIGNSGD.read_text().split('"""\n\n', 1)[1]
    built = "\n\n".join(block.strip() + "\n" for block in blocks()[:2])
    assert program == built
    assert len(SIGNSGD.read_text().splitlines()) <= 40
