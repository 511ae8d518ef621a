"""tools/compare_ddp.py, small: it compares what it says, and writes the figures down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import launched, run_scripts

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "compare_ddp.py"


@pytest.mark.parametrize("against", ["ddp", "traced"])
def test_every_model_is_timed_in_rounds(port: int, tmp_path: Path, against: str) -> None:
    program = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    options = ["--rounds", "3", "--steps", "1", "--device", "cpu", "--against", against]
    args = [*options, "--model", "scalars", "--json", str(tmp_path / "found.json")]
    results = run_scripts([program] * 2, env=launched(port, 2), args=args, timeout=100.0)
    assert [each.exit_code for each in results] == [0, 0], results[0].stderr + results[1].stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["model"] == "scalars"
    assert found["ratios"] == sorted(found["ratios"])
    assert len(found["ratios"]) == 3
    assert f"{found['ours_ms']:.2f} ms" in results[0].stdout
    assert results[1].stdout == ""
