"""tests/contract on the device: pytest in a process of its own, a line for each test that failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu_check.steps import Bench, Step

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 75.0
_END_S = 6.0  # for pytest to be ended, and its lines to be read
_HANGS_S = 20.0
_PYTEST = """
import sys, pytest
from tests.nursery import die_with_parent
die_with_parent()
sys.exit(pytest.main(sys.argv[1:]))
"""
# What shows, where there is no GPU, that this section works: tests that start no ranks.
SMALL = ("-k", "device_that_is_not_there or opens_no_port")


def contract(bench: Bench, name: str, ranks: str, small: Sequence[str]) -> None:
    """Run the suite for worlds of some sizes.

    Args:
        bench: Gets a line that counts, one for each test that failed, and one for what was not reached.
        name: What the lines are called.
        ranks: Least and most ranks of a world, as "1-4"; tests of other sizes are skipped.
        small: pytest's arguments in place of ``-m gpu`` where something stands in for a GPU.
    """
    lines, log = (Path(bench.options.out) / f"{name}.{suffix}" for suffix in ("jsonl", "log"))
    lines.unlink(missing_ok=True)
    command = [sys.executable, "-c", _PYTEST, "tests/contract", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tools.gpu_check.pytest_lines", "--lines", str(lines.absolute())]
    command += small if bench.options.stand_in else ["-m", "gpu"]
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "BAGUA_RT_GPU_RANKS": ranks}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            status: int | None = process.wait(min(bench.limit_s, DEADLINE_S) - _END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    tell(bench, name, lines, status, log.name)


def tell(bench: Bench, name: str, lines: Path, status: int | None, log: str) -> None:
    """Report what pytest_lines.py has written.

    Args:
        bench: Gets the lines.
        name: What they are called.
        lines: The file.
        status: pytest's exit status; None if it was ended.
        log: Where its output is.
    """
    said = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    tests = [line for line in said if "test" in line]
    outcomes = ("passed", "skipped", "failed")
    count = {outcome: sum(test["outcome"] == outcome for test in tests) for outcome in outcomes}
    collected = sum(line.get("collected", 0) for line in said)
    detail = f"{count['passed']} of {collected} tests passed, {count['skipped']} skipped"
    if status not in (None, 0, 1):
        detail += f"; pytest ended with {status}, see {log}"
    is_well = status in (None, 0) and count["passed"] > 0 and not count["failed"]
    bench.check(name, is_well, detail, **count, collected=collected)
    for test in (test for test in tests if test["outcome"] == "failed"):
        bench.check(test["test"], False, test["text"].strip().splitlines()[-1][:300], text=test["text"])
    if status is None:
        _tell_cut(bench, name, said, collected - len(tests))


def _tell_cut(bench: Bench, name: str, said: list[dict[str, Any]], missing: int) -> None:
    """What was not reached, and whether that is because of a test that hangs."""
    last = said[-1] if said else {}
    seconds = time.time() - last["at"] if "began" in last else 0.0
    if seconds > _HANGS_S:
        bench.check(last["began"], False, f"had not ended after {seconds:.0f} s")
    if missing:
        bench.skip(f"{name}: {missing} tests", "not reached, for the time was up")


def one_device_a_rank(bench: Bench) -> None:
    """Worlds of as many ranks as there are devices."""
    contract(bench, "contract", f"1-{max(1, bench.options.devices)}", SMALL)


STEPS = (Step("contract", one_device_a_rank, deadline_s=DEADLINE_S),)
