"""docs/communication.md is a program: its blocks run in order on every backend, and its assertions hold."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest

from bagua_rt.backend import Communicator, ReduceOp, Work
from tests.emulator import product
from tests.ranks import RankContext, RankPool

PAGE = Path(__file__).parents[1] / "docs" / "communication.md"
RUNTIMES_OWN = {"use_board"}


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def run_page(ctx: RankContext, sources: list[str], backend: str, port: int) -> list[str]:
    """Run the blocks under torchrun's variables; what the emulator reports."""
    launcher = {"RANK": ctx.rank, "WORLD_SIZE": ctx.world_size}
    launcher |= {f"LOCAL_{name}": value for name, value in launcher.items()}
    variables = {name: str(value) for name, value in launcher.items()}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if backend == "emulated":
        product.install()
        product.findings()
    first, *middle, last = (
        compile(source, f"communication.md, block {number}", "exec") for number, source in enumerate(sources)
    )
    page: dict[str, Any] = {}
    with mock.patch.dict(os.environ, variables):
        exec(first, page)
    with nullcontext() if backend == "gloo" else product.computing(page["pg"].backend):
        for block in middle:
            exec(block, page)
    exec(last, page)
    assert page["pg"].is_closed
    return [] if backend == "gloo" else product.findings()


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    """The emulator, with operations delayed at random."""
    return product.environment(base={}, delay=(0.3, 500, 1))


@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 1), ("gloo", 3), ("emulated", 2)])
def test_the_pages_blocks_run(
    request: pytest.FixtureRequest, port: int, backend: str, world_size: int
) -> None:
    variables: Mapping[str, str] = {} if backend == "gloo" else request.getfixturevalue("environment")
    sources = blocks()
    assert sum(source.count("assert ") for source in sources) >= 10
    assert (
        RankPool(world_size, variables).run(run_page, sources, backend, port, timeout=60) == [[]] * world_size
    )


def test_the_page_names_every_call() -> None:
    text = PAGE.read_text()
    calls = {name for name in vars(Communicator) if not name.startswith("_")} - RUNTIMES_OWN
    for name in (*calls, *get_args(ReduceOp), *(name for name in vars(Work) if not name.startswith("_"))):
        assert re.search(rf"\b{name}\b", text), f"{name} is not on the page"
