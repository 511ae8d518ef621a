"""The traces of all ranks of one attachment, as tools/trace_report.py and tools/whatif.py read them."""

from __future__ import annotations

import glob
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Parts:
    """The four parts of a bucket's way, microseconds.

    Attributes:
        queued_us: Ready, not launched.
        behind_us: Launched, but its lane was busy.
        peers_us: Waiting for the last rank whose turn came.
        wire_us: What is left.
    """

    queued_us: float
    behind_us: float
    peers_us: float
    wire_us: float

    @staticmethod
    def each(combine: Callable[[list[float]], float], all_parts: Iterable[Parts]) -> Parts:
        """Combine the same part of all: their sum, or their median."""
        columns = zip(*(astuple(parts) for parts in all_parts), strict=True)
        return Parts(*(combine(list(column)) for column in columns))

    def in_ms(self) -> list[str]:
        """As columns of a table."""
        return [f"{time_us / 1000:.2f}" for time_us in astuple(self)]


@dataclass
class Passage:
    """One bucket in one round on one rank: host clock, microseconds.

    Attributes:
        ready_us: Its contents were in place.
        launched_us: It was launched.
        begin_us: Its turn in its lane came.
        all_began_us: Its turn had come on every rank.
        done_us: It was complete.
        number_of_bytes: Its size.
        sent: Bytes that the rank put on the wire for it.
        parameters: What it holds.
        lane: Where it ran.
    """

    ready_us: float
    launched_us: float = 0.0
    begin_us: float = 0.0
    all_began_us: float = 0.0
    done_us: float = 0.0
    number_of_bytes: int = 0
    sent: int = 0
    parameters: Sequence[str] = ()
    lane: str = ""

    def parts(self) -> Parts:
        """Its way."""
        wire_begin_us = min(max(self.begin_us, self.all_began_us), self.done_us)
        points = [self.ready_us, self.launched_us, self.begin_us, wire_begin_us, self.done_us]
        return Parts(*(end - begin for begin, end in pairwise(points)))


class RankTrace:
    """What one rank's file holds, on the common timeline.

    Attributes:
        rank: The rank.
        host: Its machine.
        events: The Chrome events as they are.
        shift_us: What brings them to the common timeline.
        rounds: For each round, its passages by bucket.
        waits: For each round, when the trainer began and ended to wait for it.
    """

    def __init__(self, path: Path) -> None:
        try:
            whole = json.loads(path.read_text())
            self.host, self._clock_start_us = str(whole["host"]), float(whole["clock_start_us"])
            self.events: list[dict[str, Any]] = whole["traceEvents"]
            self.rank, self.world_size = int(self.events[0]["pid"]), int(whole["world_size"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SystemExit(f"{path} is no trace of bagua_rt: {type(error).__name__}: {error}") from error
        self.shift_us = 0.0
        self.rounds: dict[int, dict[int, Passage]] = {}
        self.waits: dict[int, tuple[float, float]] = {}

    def read(self, *, by_wall_clock: bool) -> None:
        """Find the passages.

        Args:
            by_wall_clock: The ranks are on several machines, whose own clocks have nothing in common.
        """
        self.shift_us = self._clock_start_us if by_wall_clock else 0.0
        lanes = {e["tid"]: e["args"]["name"] for e in self.events if e["name"] == "thread_name"}
        spans = [event for event in self.events if event["ph"] == "X" and "round" in event["args"]]
        for span in spans:
            begin = span["ts"] + self.shift_us
            if "bucket" not in span["args"]:
                self.waits[span["args"]["round"]] = begin, begin + span["dur"]
            elif "parameters" not in span["args"]:
                self._passages(span)[span["args"]["bucket"]] = Passage(begin)
        for span in spans:
            if "parameters" in span["args"]:
                passage = self._passages(span)[span["args"]["bucket"]]
                passage.launched_us = span["ts"] + self.shift_us
                passage.done_us = passage.launched_us + span["dur"]
                passage.number_of_bytes = span["args"]["bytes"]
                passage.sent = span["args"]["sent"]
                passage.parameters = span["args"]["parameters"]
                passage.lane = lanes[span["tid"]]
        self._find_turns()

    def _passages(self, span: dict[str, Any]) -> dict[int, Passage]:
        return self.rounds.setdefault(span["args"]["round"], {})

    def _find_turns(self) -> None:
        free_us: dict[str, float] = {}
        for passage in sorted(self.passages(), key=lambda each: each.launched_us):
            passage.begin_us = max(passage.launched_us, free_us.get(passage.lane, 0.0))
            free_us[passage.lane] = passage.done_us

    def passages(self) -> list[Passage]:
        """All of them."""
        return [passage for buckets in self.rounds.values() for passage in buckets.values()]


def load(folder: Path, name: str | None) -> list[RankTrace]:
    """Read the traces of all ranks of one attachment; `name` says which, where there are several."""
    if not folder.is_dir():
        raise SystemExit(f"{folder} is no folder of traces")
    names = sorted({path.name.rpartition(".rank")[0] for path in folder.glob("*.rank*.json")})
    if name is None and len(names) != 1:
        found = f"those of {', '.join(names)}: --name says which" if names else "none"
        raise SystemExit(f"{folder} must hold the traces of one attachment; it holds {found}")
    paths = folder.glob(f"{glob.escape(name or names[0])}.rank*.json")
    traces = sorted((RankTrace(path) for path in paths), key=lambda each: each.rank)
    ranks = [trace.rank for trace in traces]
    sizes = sorted({trace.world_size for trace in traces})
    if len(sizes) != 1 or ranks != list(range(sizes[0])):
        found = f"it holds those of ranks {ranks}, of runs of {' and '.join(map(str, sizes))} ranks"
        raise SystemExit(f"{folder} must hold a trace of every rank of one run; {found}")
    by_wall_clock = len({trace.host for trace in traces}) > 1
    for trace in traces:
        trace.read(by_wall_clock=by_wall_clock)
    return traces


def keep_common_rounds(traces: Sequence[RankTrace]) -> None:
    """Drop the rounds that some rank has not recorded whole, and find when every rank's turn had come."""
    plans = [{number: frozenset(buckets) for number, buckets in each.rounds.items()} for each in traces]
    common = {number for number, plan in plans[0].items() if all(p.get(number) == plan for p in plans)}
    if not common:
        raise SystemExit("no round is in the traces of all ranks: trace the same steps everywhere")
    for trace in traces:
        trace.rounds = {number: trace.rounds[number] for number in sorted(common)}
        trace.waits = {number: wait for number, wait in sorted(trace.waits.items()) if number in common}
    for number in common:
        for bucket in traces[0].rounds[number]:
            passages = [trace.rounds[number][bucket] for trace in traces]
            for passage in passages:
                passage.all_began_us = max(each.begin_us for each in passages)


def median(values: Iterable[float]) -> float:
    """The median; 0 of nothing."""
    known = list(values)
    return float(statistics.median(known)) if known else 0.0
