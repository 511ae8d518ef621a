"""The driver: memory checks, fork, unknown functions, no-op mode, delays, loaded libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from . import build
from .helpers import on_emulator
from .native import INVALID_VALUE
from .rank_driver import (
    run_callback,
    run_delayed,
    run_fork,
    run_memory,
    run_noop,
    run_nothing_loaded,
    run_unknown,
    run_wrong_library,
)
from .ranks import run_ranks

pytestmark = pytest.mark.timeout(60, func_only=True)


def test_memory() -> None:
    settings: dict[str, Any] = {"expect": ["memory", "race"], "quiet": True}
    assert on_emulator(run_memory, **settings) == {
        "fresh memory is NaN": True,
        "set past the end": INVALID_VALUE,
        "overrun is found at the free": True,
        "freed memory is overwritten": True,
        "use after free": INVALID_VALUE,
        "free twice": INVALID_VALUE,
        "pool memory used on another stream": True,
    }


def test_fork_child_may_not_use_cuda() -> None:
    assert on_emulator(run_fork) == (0, 0)


def test_unknown_functions_are_recorded() -> None:
    assert on_emulator(run_unknown, expect=["unknown"], quiet=True) == {
        "before": [],
        "code": 801,
        "names": ["cuGraphLaunch (version 10000)"],
        "versions differ": True,
    }
    with pytest.raises(AssertionError, match="cuGraphLaunch"):
        on_emulator(run_unknown, quiet=True)


def test_noop_mode_checks_and_does_nothing() -> None:
    assert on_emulator(run_noop, noop=True) == (4, 0, True)


def test_delays() -> None:
    assert on_emulator(run_delayed, delay=(1.0, 20_000, 1)) > 0.05


def test_callback_errors_are_reported() -> None:
    done, exception, texts = on_emulator(run_callback, expect=["callback"], quiet=True)
    assert done
    assert "ZeroDivisionError" in exception
    assert len(texts) == 1
    assert texts[0].startswith("'division' raised:")


def test_preload() -> None:
    assert run_ranks(run_nothing_loaded, 1, dict(os.environ))[0].value == [True] * 3


def test_assert_loaded_notices_another_library(tmp_path: Any) -> None:
    impostor = tmp_path / "libnccl.so.2"
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", impostor], check=True)
    assert str(impostor) in on_emulator(run_wrong_library, str(impostor))


def test_second_build_is_instant_and_builds_may_race(tmp_path: Any) -> None:
    started = time.monotonic()
    assert build.build().libcuda.exists()
    assert time.monotonic() - started < 1
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k(int* x) { x[0] = 1; }\n')
    code = (
        f"import sys; from pathlib import Path; from {build.__name__} import build_kernels; "
        f"print(build_kernels(Path({str(tmp_path)!r})))"
    )
    root = str(build.SOURCES.parents[build.__name__.count(".")])
    env = {**os.environ, "PYTHONPATH": root}
    jobs = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        outputs = {job.communicate(timeout=30)[0] for job in jobs}
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [0, 0, 0]
    assert len(outputs) == 1
