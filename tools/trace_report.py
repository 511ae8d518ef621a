#!/usr/bin/env python3
"""Where the time of a training's communication goes, from the Chrome traces of its ranks.

    BAGUA_RT_TRACE_DIR=traces torchrun … train.py     traces of the whole run; run.tracing("traces") of a part
    python tools/trace_report.py traces               a line for each rank, and one for each bucket
    python tools/trace_report.py traces --merge all.json     also all ranks on one timeline, for Perfetto
    python tools/trace_report.py traces --json figures.json  also the figures

A bucket's way has four parts. *Queued*: its contents are in place, but buckets before it are not, or the loop
is late. *Behind*: launched, but its lane is busy with the bucket before. *Peers*: its turn on this rank, not
yet on all others; that is imbalance, which no faster network mends. *Wire*: the rest, in which the collective
and its codecs run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.traces import Parts, RankTrace, keep_common_rounds, load, median

# ---- figures ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfRank:
    """One rank. Times are medians over the rounds, microseconds.

    Attributes:
        rank: The rank.
        rounds: Rounds that all ranks have recorded.
        period_us: From the end of one wait to the end of the next: a step.
        exposed_us: The trainer was blocked.
        parts: Of all buckets of a round together.
        last_share: Share of the bucket passages at which this rank's turn came last.
    """

    rank: int
    rounds: int
    period_us: float
    exposed_us: float
    parts: Parts
    last_share: float


@dataclass(frozen=True)
class OfBucket:
    """One bucket. Times are medians over rounds and ranks, microseconds.

    Attributes:
        bucket: Its index.
        number_of_bytes: Its size.
        parameters: What it holds.
        parts: Of its way.
        ends_last_share: Share of the rounds that it was the last to be complete: what the trainer waited for.
    """

    bucket: int
    number_of_bytes: int
    parameters: Sequence[str]
    parts: Parts
    ends_last_share: float

    @property
    def gigabytes_per_second(self) -> float:
        """Its size by its time on the wire."""
        return self.number_of_bytes / self.parts.wire_us / 1e3 if self.parts.wire_us > 0 else 0.0


def of_rank(trace: RankTrace) -> OfRank:
    """What one rank's rounds have cost it."""
    waits, passages = list(trace.waits.values()), trace.passages()
    wholes = [Parts.each(sum, (p.parts() for p in buckets.values())) for buckets in trace.rounds.values()]
    return OfRank(
        rank=trace.rank,
        rounds=len(wholes),
        period_us=median(later[1] - earlier[1] for earlier, later in pairwise(waits)),
        exposed_us=median(end - begin for begin, end in waits),
        parts=Parts.each(median, wholes),
        last_share=sum(each.begin_us == each.all_began_us for each in passages) / len(passages),
    )


def of_bucket(traces: Sequence[RankTrace], bucket: int) -> OfBucket:
    """What one bucket has cost, in the rounds whose plan has it."""
    rounds = [buckets for trace in traces for buckets in trace.rounds.values() if bucket in buckets]
    passages = [buckets[bucket] for buckets in rounds]
    last = sum(buckets[bucket].done_us == max(p.done_us for p in buckets.values()) for buckets in rounds)
    return OfBucket(
        bucket=bucket,
        number_of_bytes=passages[-1].number_of_bytes,
        parameters=passages[-1].parameters,
        parts=Parts.each(median, (passage.parts() for passage in passages)),
        ends_last_share=last / len(rounds),
    )


# ---- the report -------------------------------------------------------------------------------------------


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Figures to the right, text to the left."""
    made = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in columns:
        made.add_column(column, justify="left" if column == "parameters" else "right")
    for row in rows:
        made.add_row(*row)
    return made


def show(console: Console, ranks: Sequence[OfRank], buckets: Sequence[OfBucket], hosts: int) -> None:
    """Print the tables, and what they come to."""
    console.print(
        table(
            f"{ranks[0].rounds} rounds on {len(ranks)} ranks: medians in ms of a round",
            ["rank", "step", "exposed", "queued", "behind", "peers", "wire", "comes last"],
            [
                [
                    str(row.rank),
                    f"{row.period_us / 1000:.2f}",
                    f"{row.exposed_us / 1000:.2f}",
                    *row.parts.in_ms(),
                    f"{row.last_share:.0%}",
                ]
                for row in ranks
            ],
        ),
        table(
            "buckets: medians in ms",
            ["bucket", "MiB", "queued", "behind", "peers", "wire", "GB/s", "ends last", "parameters"],
            [
                [
                    str(row.bucket),
                    f"{row.number_of_bytes / 2**20:.2f}",
                    *row.parts.in_ms(),
                    f"{row.gigabytes_per_second:.2f}",
                    f"{row.ends_last_share:.0%}",
                    f"{row.parameters[0]} … {row.parameters[-1]} ({len(row.parameters)})",
                ]
                for row in buckets
            ],
        ),
    )
    for line in conclusions(ranks, buckets):
        console.print(line)
    if hosts > 1:
        console.print(f"on {hosts} machines: peers and wire are as exact as their clocks agree")


def conclusions(ranks: Sequence[OfRank], buckets: Sequence[OfBucket]) -> list[str]:
    """What the figures come to, in sentences."""
    exposed, period = median(row.exposed_us for row in ranks), median(row.period_us for row in ranks)
    whole = Parts.each(sum, (row.parts for row in ranks))
    peers, wire = whole.peers_us, whole.wire_us
    lines = []
    if period:
        lines.append(f"The trainer waits for {exposed / period:.0%} of a step.")
    if len(ranks) > 1 and peers + wire:
        slowest = max(ranks, key=lambda row: row.last_share)
        lines.append(
            f"Of the communication {peers / (peers + wire):.0%} is waiting for other ranks; "
            f"rank {slowest.rank} comes last to {slowest.last_share:.0%} of the buckets."
        )
    awaited = max(buckets, key=lambda row: row.ends_last_share)
    lines.append(f"Bucket {awaited.bucket} ends {awaited.ends_last_share:.0%} of the rounds.")
    return lines


def merged(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """All ranks in one Chrome trace that begins at 0."""
    begin = min(e["ts"] + trace.shift_us for trace in traces for e in trace.events if e["ph"] == "X")
    return {
        "traceEvents": [
            {**event, "ts": event["ts"] + trace.shift_us - begin} if event["ph"] == "X" else event
            for trace in traces
            for event in trace.events
        ]
    }


def main() -> None:
    """Read, print, and write what was asked for."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=formatter)
    parser.add_argument("traces", type=Path, help="the folder with a file of every rank")
    parser.add_argument("--name", help="the attachment's, where the folder holds several")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="write one trace of all ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    traces = load(options.traces, options.name)
    if options.merge:
        options.merge.write_text(json.dumps(merged(traces)))
    keep_common_rounds(traces)
    ranks = [of_rank(trace) for trace in traces]
    indices = sorted({bucket for buckets in traces[0].rounds.values() for bucket in buckets})
    buckets = [of_bucket(traces, index) for index in indices]
    if options.json:
        figures = {"ranks": [asdict(row) for row in ranks], "buckets": [asdict(row) for row in buckets]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    show(console, ranks, buckets, len({trace.host for trace in traces}))


if __name__ == "__main__":
    main()
