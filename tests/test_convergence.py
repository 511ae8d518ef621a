"""examples/convergence.py: its runs on one rank, its table, and what it leaves out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bagua_rt as bagua
import convergence
from convergence_report import MARKS, Record, key_of, missed_bars, put_table, rows_of, table, write_plot

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # matplotlib's own


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The script takes one thread for each rank."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def script(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    places = ["--out", str(folder), "--table", str(folder / "table.md")]
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--ranks", "1", *places, *arguments])
    return convergence.main()


def test_results_are_kept_and_only_what_is_missing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    some = ("--task", "digits", "--steps", "24")
    chosen = ("--only", "gradient_allreduce", "--only", "async_model_average", "--only", "qadam")
    script(monkeypatch, tmp_path, *some, *chosen, "--seeds", "2")
    first = json.loads((tmp_path / "convergence.json").read_text())
    assert len(first) == 6
    for record in first.values():
        assert [step for step, _ in record["curve"]] == list(range(2, 25, 2))
        assert record["curve"][-1][1] < record["curve"][0][1], "it learns"
    seeds = [first[f"digits/gradient_allreduce/{seed}"]["curve"] for seed in range(2)]
    assert seeds[0] != seeds[1]
    same = [first[f"digits/{name}/0"]["curve"] for name in ("gradient_allreduce", "async_model_average")]
    assert same[0] == same[1], "one rank steps as if alone"
    capfd.readouterr()
    script(monkeypatch, tmp_path, *some, *chosen, "--only", "bytegrad", "--seeds", "2")
    assert "[2/2] digits, bytegrad, seed 1" in capfd.readouterr().out
    script(monkeypatch, tmp_path / "other", "--report", "--merge", str(tmp_path / "convergence.json"))
    merged = json.loads((tmp_path / "other" / "convergence.json").read_text())
    assert {key: merged[key] for key in first} == first
    assert len(merged) == 8
    text = (tmp_path / "other" / "table.md").read_text()
    assert "24 steps on 1 ranks, 2 seed(s)" in text
    assert "| qadam |" in text
    assert "<svg" in (tmp_path / "other" / "convergence_digits.svg").read_text()


def test_every_registered_algorithm_is_compared() -> None:
    assert {algorithm for algorithm, _ in convergence.variants().values()} == set(bagua.algorithms.names())
    assert next(iter(convergence.variants())) == "gradient_allreduce"


def record(loss: float, steps: int = 10, sent: int = 100) -> Record:
    return Record(steps, 2, [(steps // 2, 2 * loss), (steps, loss)], sent, 1.0)


RECORDS = {
    key_of("digits", "gradient_allreduce", 0): record(1.0),
    key_of("digits", "gradient_allreduce", 1): record(3.0),
    key_of("digits", "bytegrad", 0): record(1.05, sent=25),
    key_of("digits", "bytegrad", 1): record(3.03, sent=27),
    key_of("digits", "bytegrad", 2): record(9.0),  # a seed that the baseline hasn't got
    key_of("digits", "local_sgd", 0): record(1.04),
    key_of("digits", "local_sgd, outer step", 1): record(3.2),
    key_of("digits", "fourbit", 0): record(1.0, steps=11),  # other settings
    key_of("digits", "onebit_adam", 0): record(float("nan")),
    key_of("gpt", "qadam", 0): record(1.0),
}


def test_ratios_are_to_the_same_seeds_of_the_baseline() -> None:
    rows = {row.variant: row for row in rows_of(RECORDS, "digits")}
    assert list(rows) == [
        "gradient_allreduce",
        "bytegrad",
        "local_sgd",
        "local_sgd, outer step",
        "onebit_adam",
    ]
    assert rows["bytegrad"].losses == [1.05, 3.03]
    assert rows["bytegrad"].ratios == pytest.approx([1.05, 1.01])
    assert rows["bytegrad"].ratio == pytest.approx(4.08 / 4.0)
    assert rows["bytegrad"].sent == pytest.approx(0.26)
    assert rows["local_sgd"].ratio == pytest.approx(1.04)
    assert rows_of(RECORDS, "gpt") == []


def test_bars_are_for_the_mean_and_looser_where_ranks_differ() -> None:
    assert missed_bars(RECORDS) == ["digits, local_sgd, outer step: 1.067", "digits, onebit_adam: nan"]
    worse = {**RECORDS, key_of("digits", "bytegrad", 0): record(1.06)}
    assert missed_bars(worse)[0] == "digits, bytegrad: 1.022"


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    text = table(RECORDS, {"digits": "Digits", "gpt": "Text"})
    assert "| bytegrad | 2.0400 (1.0500 to 3.0300) | 1.020 (1.010 to 1.050) | 1.02 | 0.260 |" in text
    assert "Text" not in text
    page = tmp_path / "page.md"
    page.write_text(f"above\n{MARKS[0]}\nold\n{MARKS[1]}\nbelow\n")
    for _ in range(2):
        put_table(text, page)
        assert page.read_text() == f"above\n{MARKS[0]}\n{text}\n{MARKS[1]}\nbelow\n"
    put_table(text, tmp_path / "new.md")
    assert (tmp_path / "new.md").read_text() == text


def test_the_plot_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        write_plot(RECORDS, "digits", "Digits", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    write_plot({}, "digits", "Digits", tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
