#!/usr/bin/env python3
"""What a step would take on another network, by replaying the traces of all ranks.

    python tools/whatif.py traces                        at 1, 10, 25, 100 Gbit/s, and with all ranks in step
    python tools/whatif.py plain bytegrad --gbps 0.5 1   two trainings beside each other: which is faster?
                                                         (each ran with BAGUA_RT_TRACE_DIR=plain, =bytegrad)
    python tools/whatif.py traces --latency-us 30 --json figures.json

A round is replayed from when the trainer last ceased to wait. Each rank computes for as long as it did, its
buckets are ready when they were, and each bucket takes its time on the traced wire, in which its codecs run.
Then it sends, at the rate that is asked about, the bytes that it really sent; lanes share the rate. So trace
on a network that is much faster than those in question: one machine, or one switch. What it leaves out: work
of the network that takes cores from the computation, and sending while a codec still runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.traces import Passage, RankTrace, keep_common_rounds, load, median


@dataclass(frozen=True)
class Network:
    """What a rank sends through.

    Attributes:
        bytes_per_us: Each rank's rate; all its lanes share it.
        latency_us: What each bucket waits besides.
    """

    bytes_per_us: float = math.inf
    latency_us: float = 0.0


@dataclass(frozen=True)
class Bucket:
    """One bucket of a round, microseconds since the trainer last ceased to wait.

    Attributes:
        ready_us: Its contents are in place, on each rank.
        wire_us: Its time on the traced wire.
        sent: Bytes that a rank sends for it.
        lane: Where it runs.
    """

    ready_us: tuple[float, ...]
    wire_us: float
    sent: int
    lane: str


@dataclass(frozen=True)
class Round:
    """What a round is made of, microseconds.

    Attributes:
        compute_us: From the end of the last wait to the begin of this one, on each rank.
        buckets: Its buckets, in launch order.
        tail_us: From the end of the last bucket to the end of the wait.
        period_us: What it took, from the end of the last wait to the end of this one.
    """

    compute_us: tuple[float, ...]
    buckets: tuple[Bucket, ...]
    tail_us: float
    period_us: float

    def in_step(self) -> Round:
        """The same, with every rank as fast as their mean."""
        buckets = tuple(replace(each, ready_us=(statistics.fmean(each.ready_us),)) for each in self.buckets)
        return replace(self, compute_us=(statistics.fmean(self.compute_us),), buckets=buckets)


def rounds(traces: Sequence[RankTrace]) -> Iterator[Round]:
    """The rounds of which the one before is known too."""
    for before, number in pairwise(traces[0].rounds):
        if number != before + 1 or any(not {before, number} <= set(trace.waits) for trace in traces):
            continue
        begins = [trace.waits[before][1] for trace in traces]
        order = sorted(traces[0].rounds[number], key=lambda b: traces[0].rounds[number][b].launched_us)
        of_bucket = [[trace.rounds[number][index] for trace in traces] for index in order]
        done_us = [max(each.done_us for each in trace.rounds[number].values()) for trace in traces]
        waits = [trace.waits[number] for trace in traces]
        yield Round(
            tuple(wait[0] - begin for wait, begin in zip(waits, begins, strict=True)),
            tuple(_bucket(passages, begins) for passages in of_bucket),
            median(max(0.0, wait[1] - done) for wait, done in zip(waits, done_us, strict=True)),
            median(wait[1] - begin for wait, begin in zip(waits, begins, strict=True)),
        )


def _bucket(passages: Sequence[Passage], begins: Sequence[float]) -> Bucket:
    return Bucket(
        tuple(each.ready_us - begin for each, begin in zip(passages, begins, strict=True)),
        median(each.parts().wire_us for each in passages),
        max(each.sent for each in passages),
        passages[0].lane,
    )


# ---- the replay -------------------------------------------------------------------------------------------


@dataclass
class _Transfer:
    """A bucket under way: first its time on the traced wire, then its bytes."""

    own_us: float
    bytes_left: float

    def left_us(self, rate: float) -> float:
        """Until its next change, at `rate` bytes per microsecond."""
        return self.own_us if self.own_us > 0 else self.bytes_left / rate

    def advance(self, time_us: float, rate: float) -> None:
        """Let `time_us` pass, no more than `left_us`."""
        if self.own_us > 0:
            self.own_us = 0.0 if time_us >= self.own_us else self.own_us - time_us
        else:
            self.bytes_left = 0.0 if time_us >= self.bytes_left / rate else self.bytes_left - time_us * rate

    @property
    def is_over(self) -> bool:
        return self.own_us <= 0 and self.bytes_left <= 0


@dataclass
class _Lane:
    """A lane, and what is to pass through it: when each bucket is launched, and the bucket."""

    queue: deque[tuple[float, Bucket]] = field(default_factory=deque)
    under_way: _Transfer | None = None


def replay(round_: Round, network: Network) -> float:
    """How long the round takes on `network`, microseconds."""
    lanes: dict[str, _Lane] = {}
    launches = accumulate((max(bucket.ready_us) for bucket in round_.buckets), max)
    for launch_us, bucket in zip(launches, round_.buckets, strict=True):
        lanes.setdefault(bucket.lane, _Lane()).queue.append((launch_us, bucket))
    now_us = 0.0
    while any(lane.queue or lane.under_way for lane in lanes.values()):
        now_us = _next(lanes, now_us, network)
    return max(*round_.compute_us, now_us) + round_.tail_us


def _next(lanes: dict[str, _Lane], now_us: float, network: Network) -> float:
    """Go on to the next moment at which something changes."""
    for lane in lanes.values():
        if lane.under_way is None and lane.queue and lane.queue[0][0] <= now_us:
            bucket = lane.queue.popleft()[1]
            lane.under_way = _Transfer(bucket.wire_us + network.latency_us, bucket.sent)
    under_way = [lane.under_way for lane in lanes.values() if lane.under_way is not None]
    rate = network.bytes_per_us / max(1, sum(each.own_us <= 0 for each in under_way))
    idle = [lane.queue[0][0] for lane in lanes.values() if lane.under_way is None and lane.queue]
    step_us = min([each.left_us(rate) for each in under_way] + [launch_us - now_us for launch_us in idle])
    for lane in lanes.values():
        if lane.under_way is not None:
            lane.under_way.advance(step_us, rate)
            if lane.under_way.is_over:
                lane.under_way = None
    return now_us + step_us


# ---- the report -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a round takes, median over the rounds.

    Attributes:
        what_if: The question.
        step_us: The round, microseconds.
        compute_us: Of these the slowest rank computes.
    """

    what_if: str
    step_us: float
    compute_us: float


def answers(traced: Sequence[Round], gbps: Sequence[float], latency_us: float) -> list[Answer]:
    """All questions, answered for one training."""
    slowest_us = median(max(each.compute_us) for each in traced)
    in_step = [each.in_step() for each in traced]
    rows = [
        Answer("as traced", median(each.period_us for each in traced), slowest_us),
        Answer("as replayed", median(replay(each, Network()) for each in traced), slowest_us),
        Answer(
            "all ranks in step",
            median(replay(each, Network()) for each in in_step),
            median(each.compute_us[0] for each in in_step),
        ),
    ]
    for rate in gbps:
        network = Network(rate * 1e3 / 8, latency_us)
        step_us = median(replay(each, network) for each in traced)
        rows.append(Answer(f"at {rate:g} Gbit/s", step_us, slowest_us))
    return rows


def show(console: Console, found: dict[str, list[Answer]]) -> None:
    """A row for each question, the trainings beside each other."""
    table = Table(title="median ms of a round (of these not computing)", box=box.SIMPLE, title_justify="left")
    table.add_column("what if")
    for name in found:
        table.add_column(name, justify="right")
    for row in zip(*found.values(), strict=True):
        fastest = min(row, key=lambda each: each.step_us)
        cells = [
            f"{each.step_us / 1000:.2f} ({max(0.0, 1 - each.compute_us / each.step_us):.0%})"
            + (" *" if len(row) > 1 and each is fastest else "")
            for each in row
        ]
        table.add_row(row[0].what_if, *cells)
    console.print(table)
    if len(found) > 1:
        console.print("* the fastest; a round is a step where the algorithm communicates in each")


def main() -> None:
    """Read, replay, and print."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=formatter)
    parser.add_argument("traces", type=Path, nargs="+", help="a folder with a file of every rank")
    parser.add_argument("--name", help="the attachment's, where a folder holds several")
    parser.add_argument("--gbps", type=float, nargs="+", default=[1.0, 10.0, 25.0, 100.0], metavar="RATE")
    parser.add_argument("--latency-us", type=float, default=0.0, help="what each bucket waits besides (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    if any(not rate > 0 for rate in options.gbps) or not options.latency_us >= 0:
        parser.error("rates are positive, a latency is not negative")
    found: dict[str, list[Answer]] = {}
    for folder in options.traces:
        traces = load(folder, options.name)
        keep_common_rounds(traces)
        traced = list(rounds(traces))
        if not traced:
            raise SystemExit(f"{folder} holds no two rounds in succession that a trainer waited for")
        found[str(folder)] = answers(traced, options.gbps, options.latency_us)
    if options.json:
        figures = {name: [asdict(row) for row in rows] for name, rows in found.items()}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    show(Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140), found)


if __name__ == "__main__":
    main()
