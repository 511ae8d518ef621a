"""tools/doctor.py: what it finds, on a machine where all is well and where something is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import launched, run_scripts

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "doctor.py"
PROGRAM = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"


def test_launched_ranks_meet_and_rank_0_tells(port: int) -> None:
    results = run_scripts([PROGRAM] * 2, env=launched(port, 2), args=["--device", "cpu"], timeout=60.0)
    assert [each.exit_code for each in results] == [0, 0], results[0].stderr + results[1].stderr
    text = results[0].stdout
    for part in (
        "bagua_rt ",
        "torch ",
        "NCCL ",
        "torchrun: rank 0 of 2",
        "2 over cpu, 2 here",
        "every sum is right",
    ):
        assert part in text, text
    assert results[1].stdout == ""


def test_alone_it_starts_the_ranks_itself(tmp_path: Path) -> None:
    nowhere = tmp_path / "libnccl.so.2"
    (found,) = run_scripts(
        [PROGRAM], env={"BAGUA_RT_NCCL": str(nowhere)}, args=["--ranks", "1", "--device", "cpu"], timeout=60.0
    )
    assert found.exit_code == 0, found.stdout + found.stderr
    assert f"not found: no usable NCCL library · got the path given: {nowhere}" in found.stdout
    assert f"BAGUA_RT_NCCL={nowhere}" in found.stdout
    assert "1 over cpu, 1 here" in found.stdout


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
        ({"BAGUA_RT_RENDEZVOUS_TIMEOUT_S": "soon"}, "BAGUA_RT_RENDEZVOUS_TIMEOUT_S"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "doesn't know where to meet"),
    ],
)
def test_what_is_broken_is_named(variables: dict[str, str], text: str) -> None:
    (found,) = run_scripts([PROGRAM], env=variables, args=["--ranks", "1", "--device", "cpu"], timeout=60.0)
    assert found.exit_code == 1
    (broken,) = [line for line in found.stdout.splitlines() if line.startswith("BROKEN")]
    assert "UsageError" in broken
    assert text in broken
