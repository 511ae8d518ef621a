"""tools/gpu_check on the emulated libraries: it runs, finds what is wrong, and is stopped by nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulator import product
from tests.emulator.helpers import KERNELS
from tests.ranks import RankContext

ROOT = Path(__file__).resolve().parents[1]
UNPROTECTED = ("mean_rows",)  # no backend calls it: the codecs take their means while they decode


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    """One device, and an NCCL that lets several ranks share it."""
    extra = product.kernels(UNPROTECTED, ("Float32",), "gpu_check_kernels")
    return product.environment(ndev=1, quiet=True, kernels=[product.kernels(), extra, KERNELS])


def run(env: Mapping[str, str], out: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the report's JSON, and what was printed."""
    done = subprocess.run(
        [sys.executable, "tools/gpu_check", "--small", "--out", str(out), *arguments],
        cwd=ROOT, env=dict(env), capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    path = out / "report.json"
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(path.read_text()), done.stdout


def verdicts(report: dict[str, Any], section: str) -> dict[str, str]:
    return {line["name"]: line["verdict"] for line in report["sections"][section]["lines"]}


def emulated(env: Mapping[str, str], out: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    return run(env, out, "--stand-in", "tests.emulator.product", *arguments)


@pytest.mark.slow
def test_every_section_runs_on_the_emulator(environment: Mapping[str, str], tmp_path: Path) -> None:
    status, report, text = emulated(environment, tmp_path)
    failed = [
        f"{name}: {line['name']}: {line['detail']}"
        for name, section in report["sections"].items()
        for line in section["lines"]
        if line["verdict"] == "FAILED"
    ]
    assert failed == []
    assert status == 0, text
    assert {section["verdict"] for section in report["sections"].values()} == {"ok"}
    assert "nothing here says anything about a GPU" in text.splitlines()[-13]
    assert "0 of 9 sections failed" in text
    check_kernels(report, tmp_path)
    check_ranks(report)
    assert (tmp_path / "trace_host_1.rank0.json").exists()


def check_kernels(report: dict[str, Any], out: Path) -> None:
    lines = verdicts(report, "kernels")
    for kernel in ("copy_in float32 to float32", "minmax_encode float32", "sign_mean float32", *UNPROTECTED):
        assert "ok" in [verdict for name, verdict in lines.items() if name.startswith(kernel)], kernel
    with np.load(out / "golden.npz") as golden:
        assert len(golden) > 40
        assert any(array.size > 10_000 for array in golden.values())


def check_ranks(report: dict[str, Any]) -> None:
    lines = verdicts(report, "several_ranks")
    assert lines["all_reduce_ of 2 ranks"] == "ok"
    assert lines["weights, commit='host'"] == "ok"
    lines = verdicts(report, "failure")
    assert lines["killed, then shrink: weights"] == "ok"
    assert sum(test["collected"] for test in data(report, "contract")) >= 2


def data(report: dict[str, Any], section: str) -> list[dict[str, Any]]:
    return [line["data"] for line in report["sections"][section]["lines"]]


def test_what_goes_wrong_stops_nothing_and_is_told(environment: Mapping[str, str], tmp_path: Path) -> None:
    plants = "tests.gpu_check_plants"
    older = {**environment, "EMU_NCCL_VERSION": "22809"}
    status, report, text = emulated(older, tmp_path, "--only", plants, "kernels.none", "several_ranks")
    assert status == 1
    lines = verdicts(report, plants)
    assert lines == {
        "good": "ok", "wrong": "FAILED", "before it raises": "ok", "raises": "FAILED", "crashes": "FAILED",
        "hangs": "FAILED", "two ranks": "skipped", "measured": "figure",
    }  # fmt: skip
    details = {line["name"]: line["detail"] for line in report["sections"][plants]["lines"]}
    assert "planted" in details["raises"]
    assert f"exit code {-11}" in details["crashes"]
    assert "did not answer within 1 s" in details["hangs"]
    pids = [line["data"]["pid"] for line in report["sections"][plants]["lines"] if line["name"] == "good"]
    assert pids[0] == pids[1] != pids[2], "a process goes on until something fails in it"
    assert "No module named" in report["sections"]["kernels.none"]["lines"][0]["detail"]
    assert set(verdicts(report, "several_ranks").values()) == {"skipped"}
    assert "2.30" in text
    assert "2 of 3 sections failed" in text


def test_what_can_not_run_says_why() -> None:
    from tools.gpu_check.runner import Run
    from tools.gpu_check.steps import Options, Outline

    step, soon = Outline("step", 2, 20.0, None), time.monotonic() + 100

    def why(section: str = "several_ranks", ends_at: float = soon, **options: int) -> str:
        lines = Run(Options(out=".", **options), {}, ends_at).why_not(section, step)  # type: ignore[arg-type]
        return lines[0].detail if lines else ""

    assert "no CUDA device" in why()
    assert why("environment") == ""  # tells what is missing
    assert "needs NCCL 2.30" in why(devices=1, nccl_version=22809)
    assert "--budget-s" in why(devices=2, most_ranks=2, ends_at=time.monotonic() + 1)
    assert why(devices=1, most_ranks=4) == ""


def test_what_pytest_has_told_is_reported_also_when_it_was_cut_short(tmp_path: Path) -> None:
    from tools.gpu_check.contract import tell
    from tools.gpu_check.steps import Bench, Options

    def report(status: int | None, *said: dict[str, object]) -> list[tuple[str, str]]:
        file = tmp_path / "lines"
        file.write_text("".join(json.dumps(line) + "\n" for line in said))
        bench = Bench(RankContext(0, 1, 0, str(tmp_path)), Options(out=str(tmp_path)))
        tell(bench, "contract", file, status, "log")
        return [(line.name, line.verdict) for line in bench.lines]

    count: dict[str, object] = {"collected": 3}
    good: dict[str, object] = {"test": "a", "outcome": "passed", "text": ""}
    bad: dict[str, object] = {"test": "b", "outcome": "failed", "text": "E  why"}
    assert report(0, count, good) == [("contract", "ok")]
    assert report(1, count, good, bad) == [("contract", "FAILED"), ("b", "FAILED")]
    assert report(0, count, {**good, "outcome": "skipped"}) == [("contract", "FAILED")], "nothing was run"
    assert report(4) == [("contract", "FAILED")]
    now = {"began": "c", "at": time.time()}
    assert report(None, count, good, now) == [("contract", "ok"), ("contract: 2 tests", "skipped")]
    hung = {"began": "c", "at": time.time() - 60}
    assert ("c", "FAILED") in report(None, count, good, hung)


def test_golden_outputs_are_compared(environment: Mapping[str, str], tmp_path: Path) -> None:
    from tools.gpu_check.kernels import differences

    a = {"x": np.arange(9, dtype=np.uint8), "y": np.zeros(3, np.uint8)}
    b = {"x": np.arange(9, dtype=np.uint8), "z": np.zeros(3, np.uint8)}
    b["x"][4] = 9
    assert differences(a, a) == []
    assert differences(a, b) == ["x: byte 4 of 9", "y: only in this run", "z: only in the file"]
