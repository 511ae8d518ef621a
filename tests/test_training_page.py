"""docs/training.md is a program: it learns, and a run that was stopped ends with the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.micro import group, on
from tests.ranks import RankContext, RankPool

PAGE = Path(__file__).parents[1] / "docs" / "training.md"


def trained(ctx: RankContext, folder: str) -> dict[str, Any]:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    page: Any = ModuleType("training")
    exec(compile(source, PAGE.name, "exec"), page.__dict__)
    through, stopped = Path(folder) / "through", Path(folder) / "stopped"
    with group(ctx) as pg:
        for path in (through, stopped):
            path.mkdir(exist_ok=True)
        models = {"through": page.train(pg, through, 12)}
        page.train(pg, stopped, 9)  # its last checkpoint is of step 8
        models["stopped"] = page.train(pg, stopped, 12)
        x, y = page.batch(pg, -1, 0)
        error = float(torch.nn.functional.mse_loss(models["through"].eval()(x), y))
    bits = {name: [p.tolist() for p in model.state_dict().values()] for name, model in models.items()}
    weights = [p.tolist() for p in models["through"].parameters()]
    return {**bits, "weights": weights, "error": error, "spread": float(y.square().mean())}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_learns_and_goes_on_where_it_stopped(pool: RankPool, world_size: int, tmp_path: Path) -> None:
    answers = on(pool, world_size, trained, str(tmp_path))
    for found in answers:
        assert found["error"] < 0.9 * found["spread"]
        assert found["stopped"] == found["through"]
        assert found["weights"] == answers[0]["weights"], "buffers are each rank's own after the last forward"
    assert {path.name for path in (tmp_path / "through").iterdir()} == {
        "model.pt",
        *(f"rank{rank}.pt" for rank in range(world_size)),
    }
