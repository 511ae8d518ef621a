"""tools/trace_report.py: its figures, against traces whose times are chosen by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.traces import write
from tools import trace_report

QUEUED, BEHIND, PEERS, WIRE = "queued_us", "behind_us", "peers_us", "wire_us"


def report(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["trace_report.py", *map(str, arguments)])
    trace_report.main()


# Two rounds, 1,000 us apart. On rank 0 both buckets share a lane, and the second comes while the first runs.
RANK_0 = {
    (0, 0): ("lane0", 100.0, 110.0, 200.0),
    (0, 1): ("lane0", 150.0, 160.0, 300.0),
    (1, 0): ("lane0", 1100.0, 1110.0, 1200.0),
    (1, 1): ("lane0", 1150.0, 1160.0, 1300.0),
}
RANK_1 = {
    (0, 0): ("lane0", 140.0, 150.0, 200.0),
    (0, 1): ("lane0", 210.0, 230.0, 300.0),
    (1, 0): ("lane0", 1140.0, 1150.0, 1200.0),
    (1, 1): ("lane0", 1210.0, 1230.0, 1300.0),
}


def test_a_way_is_split_into_its_four_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces, figures = tmp_path / "traces", tmp_path / "figures.json"
    write(traces, 0, RANK_0)
    write(traces, 1, {**RANK_1, (2, 0): ("lane0", 2000.0, 2001.0, 2002.0)})  # a round that rank 0 has not
    report(monkeypatch, traces, "--json", figures)
    found = json.loads(figures.read_text())
    zero, one = found["ranks"]
    # Rank 0: bucket 0 is queued 10, waits 40 for rank 1, is 50 on the wire; bucket 1 is queued 10, 40 behind
    # bucket 0, waits 30 for rank 1, and is 70 on the wire.
    assert zero["parts"] == {QUEUED: 20, BEHIND: 40, PEERS: 70, WIRE: 120}
    assert one["parts"] == {QUEUED: 30, BEHIND: 0, PEERS: 0, WIRE: 120}
    assert (zero["rounds"], zero["period_us"], zero["exposed_us"], zero["last_share"]) == (2, 1000, 10, 0)
    assert (one["rounds"], one["last_share"]) == (2, 1)
    assert [bucket["number_of_bytes"] for bucket in found["buckets"]] == [1000, 2000]
    assert found["buckets"][1]["parts"] == {QUEUED: 15, BEHIND: 20, PEERS: 15, WIRE: 70}, "medians of both"
    assert [bucket["ends_last_share"] for bucket in found["buckets"]] == [0, 1]
    text = capsys.readouterr().out
    assert "The trainer waits for 1% of a step." in text
    assert "23% is waiting for other ranks; rank 1 comes last to 100% of the buckets" in text
    assert "Bucket 1 ends 100% of the rounds." in text


def test_clocks_of_several_machines_are_brought_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces, figures, whole = tmp_path / "traces", tmp_path / "figures.json", tmp_path / "all.json"
    write(traces, 0, RANK_0, host="a", clock_start_us=5000.0)
    later = {key: (lane, *(time - 700 for time in times)) for key, (lane, *times) in RANK_1.items()}
    write(traces, 1, later, host="b", clock_start_us=5700.0)  # type: ignore[arg-type]  # three times each
    report(monkeypatch, traces, "--json", figures, "--merge", whole)
    parts = [rank["parts"][PEERS] for rank in json.loads(figures.read_text())["ranks"]]
    assert parts == [70, 0]
    assert "on 2 machines" in capsys.readouterr().out
    spans = [event for event in json.loads(whole.read_text())["traceEvents"] if event["ph"] == "X"]
    first = {event["pid"]: event["ts"] for event in reversed(spans) if event["name"] == "bucket 0"}
    assert first == {0: 10, 1: 50}, "the merged trace begins at 0"


def test_traces_that_do_not_belong_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(folder: Path, *options: str) -> str:
        with pytest.raises(SystemExit) as error:
            report(monkeypatch, folder, *options)
        return str(error.value)

    assert "no folder" in refused(tmp_path / "nowhere")
    (empty := tmp_path / "empty").mkdir()
    assert "it holds none" in refused(empty)
    write(alone := tmp_path / "alone", 1, RANK_1)
    assert "those of ranks [1], of runs of 2 ranks" in refused(alone)
    write(stale := tmp_path / "stale", 0, RANK_0)
    write(stale, 1, RANK_1)
    write(stale, 2, RANK_1, world_size=3)
    assert "those of ranks [0, 1, 2], of runs of 2 and 3 ranks" in refused(stale)
    write(apart := tmp_path / "apart", 0, RANK_0)
    write(apart, 1, {(7, 0): ("lane0", 1.0, 2.0, 3.0)})
    assert "no round is in the traces of all ranks" in refused(apart)
    (apart / "model1.rank0.json").write_text("{}")
    assert "model0, model1: --name says which" in refused(apart)
    assert "no round is" in refused(apart, "--name", "model0")
    (empty / "model0.rank0.json").write_text("[]")
    assert "is no trace of bagua_rt" in refused(empty)
