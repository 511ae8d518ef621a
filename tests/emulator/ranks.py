"""Runs a function in several processes, one for each rank, and always ends them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import emulator

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: its exit status (negative: a signal), what it returned, its stderr."""

    exit_status: int | None
    value: Any
    stderr: str


def run_ranks(
    function: Callable[..., object],
    world_size: int,
    env: Mapping[str, str],
    *args: object,
    timeout_s: float = 30.0,
    per_rank_env: Sequence[Mapping[str, str]] = (),
    check: bool = True,
) -> list[Outcome]:
    """Calls function(rank, world_size, *args) in a process for each rank.

    The function must be importable, its arguments and its result picklable. With `check`, any
    rank that does not exit with 0 fails the call.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes: list[subprocess.Popen[bytes]] = []
        files = [Path(folder) / f"rank{rank}" for rank in range(world_size)]
        try:
            for rank, file in enumerate(files):
                job = (function.__module__, function.__qualname__, rank, world_size, args)
                file.with_suffix(".in").write_bytes(pickle.dumps(job))
                extra = per_rank_env[rank] if per_rank_env else {}
                with file.with_suffix(".err").open("wb") as stderr:
                    processes.append(_start(file, {**env, **extra}, stderr))
            late = _wait(processes, timeout_s)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()
        outcomes = [_outcome(*pair) for pair in zip(processes, files, strict=True)]
    if check:
        stands = "\n".join(f"--- rank {rank}\n{outcomes[rank].stderr}" for rank in late)
        assert not late, f"ranks {late} had not ended after {timeout_s:g} s\n{stands}"
        for rank, outcome in enumerate(outcomes):
            assert outcome.exit_status == 0, f"rank {rank}: {outcome.exit_status}\n{outcome.stderr}"
    return outcomes


def run_emulated(
    function: Callable[..., object],
    world_size: int = 1,
    *args: object,
    timeout_s: float = 30.0,
    expect: Sequence[str] = (),
    per_rank_env: Sequence[Mapping[str, str]] = (),
    check: bool = True,
    **settings: Any,
) -> list[Outcome]:
    """run_ranks on the emulator, which must report nothing but the kinds in `expect`.

    `settings` are those of emulator.environment(); by default there is a device for each rank,
    and rank r sees device r alone.
    """
    settings.setdefault("ndev", world_size)
    if not per_rank_env:
        per_rank_env = [{"CUDA_VISIBLE_DEVICES": str(r)} for r in range(world_size)]
    with tempfile.TemporaryDirectory(prefix="reports-") as folder:
        env = emulator.environment(report_dir=Path(folder), **settings)
        limits: dict[str, Any] = {"timeout_s": timeout_s, "per_rank_env": per_rank_env}
        outcomes = run_ranks(function, world_size, env, *args, check=check, **limits)
        found = [text for texts in emulator.collect_reports(Path(folder)).values() for text in texts]
    unexpected = [text for text in found if text.partition(":")[0] not in expect]
    assert not unexpected, "the emulator reports:\n" + "\n".join(unexpected)
    return outcomes


def _start(file: Path, env: Mapping[str, str], stderr: Any) -> subprocess.Popen[bytes]:
    package = __name__.rpartition(".")[0]
    root = Path(__file__).resolve().parents[package.count(".") + 1]
    python_path = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import child; child({str(file)!r})"],
        env={**env, "PYTHONPATH": python_path, "PYTHONFAULTHANDLER": "1"},
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """Which ranks have not ended in time; their stderr says where they stood."""
    until, late = time.monotonic() + timeout_s, []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # for faulthandler
            late.append(rank)
    for rank in late:
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[rank].wait(5.0)
    return late


def _outcome(process: subprocess.Popen[bytes], file: Path) -> Outcome:
    result = file.with_suffix(".out")
    value = pickle.loads(result.read_bytes()) if result.exists() else None
    stderr = file.with_suffix(".err").read_text(errors="replace")
    return Outcome(process.returncode, value, stderr)


def child(path: str) -> None:
    """What a rank's process runs."""
    # If the test run itself is killed, its ranks go too.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    file = Path(path)
    module, name, rank, world_size, args = pickle.loads(file.with_suffix(".in").read_bytes())
    function = getattr(importlib.import_module(module), name)
    value = function(rank, world_size, *args)
    partial = file.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(file.with_suffix(".out"))
