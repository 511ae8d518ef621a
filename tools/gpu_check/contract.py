"""tests/contract on the device: pytest in a process of its own, a line for each test that failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu_check.steps import Bench, Step

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 75.0
_END_S = 6.0  # for pytest to be ended, and its lines to be read
_PYTEST = """
import sys, pytest
from tests.nursery import die_with_parent
die_with_parent()
sys.exit(pytest.main(sys.argv[1:]))
"""
# What shows, where there is no GPU, that this section works: tests that start no ranks.
SMALL = ("-k", "device_that_is_not_there or opens_no_port")


def contract(bench: Bench, name: str, most_ranks: int, small: Sequence[str]) -> None:
    """Run the suite for worlds of up to `most_ranks` ranks.

    Args:
        bench: Gets a line that counts, and one for each test that failed.
        name: What the lines are called.
        most_ranks: Tests of more ranks are skipped.
        small: pytest's arguments in place of ``-m gpu`` where something stands in for a GPU.
    """
    lines, log = (Path(bench.options.out) / f"{name}.{suffix}" for suffix in ("jsonl", "log"))
    lines.unlink(missing_ok=True)
    command = [sys.executable, "-c", _PYTEST, "tests/contract", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tools.gpu_check.pytest_lines", "--lines", str(lines.absolute())]
    command += small if bench.options.stand_in else ["-m", "gpu"]
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "BAGUA_RT_GPU_RANKS": str(most_ranks)}
    limit_s = min(bench.limit_s, DEADLINE_S) - _END_S
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    tests = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    _tell(bench, name, tests, status, f"ended after {limit_s:.0f} s", log.name)


def _tell(
    bench: Bench, name: str, tests: list[dict[str, Any]], status: int | None, cut: str, log: str
) -> None:
    count = {outcome: sum(t.get("outcome") == outcome for t in tests) for outcome in ("passed", "skipped")}
    failed = [t for t in tests if t.get("outcome") == "failed"]
    collected = sum(t.get("collected", 0) for t in tests)
    detail = f"{count['passed']} of {collected} tests passed, {count['skipped']} skipped"
    if status is None:
        reached = sum(count.values()) + len(failed)
        detail += f"; {cut}, {collected - reached} tests not reached"
    elif status not in (0, 1):
        detail += f"; pytest ended with {status}, see {log}"
    bench.check(name, status == 0 and count["passed"] > 0, detail, **count, collected=collected)
    for test in failed:
        bench.check(test["test"], False, test["text"].strip().splitlines()[-1][:300], text=test["text"])


def one_device_a_rank(bench: Bench) -> None:
    """Worlds of as many ranks as there are devices."""
    contract(bench, "contract", max(1, bench.options.devices), SMALL)


STEPS = (Step("contract", one_device_a_rank, deadline_s=DEADLINE_S),)
