"""tools/whatif.py: replays whose course is worked out by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.traces import write
from tools import whatif
from tools.whatif import Bucket, Network, Round, replay

SLOW = Network(bytes_per_us=10.0)


def of(*buckets: Bucket, compute_us: tuple[float, ...] = (100.0, 120.0), tail_us: float = 5.0) -> Round:
    return Round(compute_us, buckets, tail_us, 0.0)


def test_a_bucket_waits_for_the_last_rank_then_codes_then_sends() -> None:
    round_ = of(Bucket((90.0, 110.0), wire_us=30.0, sent=1000, lane="lane0"))
    assert replay(round_, Network()) == 110 + 30 + 5
    assert replay(round_, SLOW) == 110 + 30 + 100 + 5
    assert replay(round_, Network(10.0, latency_us=7.0)) == 110 + 7 + 30 + 100 + 5


def test_what_ends_within_the_computation_costs_nothing() -> None:
    assert replay(of(Bucket((10.0, 20.0), 30.0, 500, "lane0")), SLOW) == 120 + 5
    assert replay(of(), SLOW) == 120 + 5


def test_a_lane_takes_its_buckets_one_by_one_and_none_before_those_ahead_of_it() -> None:
    first, second = Bucket((100.0, 100.0), 10.0, 0, "lane0"), Bucket((50.0, 50.0), 20.0, 0, "lane0")
    assert replay(of(first, second), Network()) == 100 + 10 + 20 + 5
    apart = Bucket((50.0, 50.0), 20.0, 0, "lane1")  # a lane of its own, but launched behind the first
    assert replay(of(first, apart), Network()) == 100 + 20 + 5


def test_lanes_share_the_rate_while_both_send() -> None:
    # From 200 both send at 5 bytes a us; the first is through at 300, the second sends its last 500 alone.
    first, second = Bucket((200.0,), 0.0, 500, "lane0"), Bucket((200.0,), 0.0, 1000, "lane1")
    assert replay(of(first, second, compute_us=(0.0,)), SLOW) == 300 + 50 + 5
    # A codec takes no rate: the first sends alone for 40 us, then both share, then the second is alone.
    coded = Bucket((200.0,), 40.0, 1000, "lane1")
    assert replay(of(first, coded, compute_us=(0.0,)), SLOW) == 240 + 20 + 90 + 5


def test_ranks_in_step_are_as_fast_as_their_mean() -> None:
    round_ = of(Bucket((90.0, 110.0), 30.0, 0, "lane0"))
    assert replay(round_.in_step(), Network()) == 100 + 30 + 5
    assert round_.in_step().compute_us == (110,)


# Waits begin 10 us before the last bucket's end: rank 0 computes from 300 to 1290, rank 1 from 300 to 1290.
RANK_0 = {
    (0, 0): ("lane0", 100.0, 110.0, 300.0),
    (1, 0): ("lane0", 1100.0, 1110.0, 1300.0),
}
RANK_1 = {
    (0, 0): ("lane0", 140.0, 150.0, 300.0),
    (1, 0): ("lane0", 1140.0, 1150.0, 1300.0),
}


def test_questions_are_answered_from_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick, figures = tmp_path / "quick", tmp_path / "figures.json"
    write(quick, 0, RANK_0)
    write(quick, 1, RANK_1)
    write(slow := tmp_path / "slow", 0, {**RANK_0, (1, 0): ("lane0", 1100.0, 1110.0, 1400.0)})
    write(slow, 1, {**RANK_1, (1, 0): ("lane0", 1140.0, 1150.0, 1400.0)})
    command = ["whatif.py", quick, slow, "--gbps", 0.004, "8", "--json", figures]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    whatif.main()
    found = json.loads(figures.read_text())
    steps = {row["what_if"]: row["step_us"] for row in found[str(quick)]}
    # Ready 840 after the last wait, on rank 1; 150 on the wire from its launch on; then 500 bytes.
    assert steps == {
        "as traced": 1000,
        "as replayed": 990,
        "all ranks in step": 990,
        "at 0.004 Gbit/s": 840 + 150 + 1000,
        "at 8 Gbit/s": 990.5,
    }
    assert [row["step_us"] for row in found[str(slow)]][:2] == [1100, 1090]
    assert "1.99 (50%) *" in capsys.readouterr().out


def test_what_cannot_be_answered_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "one", 0, {(0, 0): ("lane0", 1.0, 2.0, 30.0)}, world_size=1)
    monkeypatch.setattr(sys, "argv", ["whatif.py", str(tmp_path / "one")])
    with pytest.raises(SystemExit, match="no two rounds in succession"):
        whatif.main()
    for wrong in (["--gbps", "0"], ["--gbps", "nan"], ["--latency-us", "-1"]):
        monkeypatch.setattr(sys, "argv", ["whatif.py", str(tmp_path / "one"), *wrong])
        with pytest.raises(SystemExit) as caught:
            whatif.main()
        assert caught.value.code == 2
