"""What a run has cost: statistics that are always on, and spans that are recorded on request.

Definitions, all for this rank and in microseconds of the host's clock:

* *communication*: the time that lanes were busy with collectives and codecs, summed over lanes. Time in
  which a collective waits for a slower rank counts.
* *exposed*: the time that the training thread was blocked because communication had not ended.
* *hidden*: communication while the training thread was not blocked: what ran beside the trainer's own work.

Spans become one Chrome trace per rank (chrome://tracing, Perfetto): "bucket 0 in queue" is from when
its contents are in place to its launch, "bucket 0" from there to its end. tools/trace_report.py reads the
traces of all ranks together: which part of it was the wire, and which was waiting for a slower rank.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Statistics:
    """Totals of an attachment since attach.

    Attributes:
        generations: Synchronised backwards; not those that a checkpoint brought along.
        buckets: Buckets in the present plan.
        bytes_sent: Payload bytes that this rank has put on the wire for this attachment.
        communication_us: Time that lanes were busy, summed over them.
        exposed_us: Time that the training thread was blocked by communication: also while it waited for a
            launch, or another rank, and no lane was busy.
        hidden_us: Time that lanes were busy while it was not blocked.
    """

    generations: int
    buckets: int
    bytes_sent: int
    communication_us: float
    exposed_us: float
    hidden_us: float

    def __sub__(self, before: Statistics) -> Statistics:
        """What came since `before`."""
        return Statistics(
            generations=self.generations - before.generations,
            buckets=self.buckets,
            bytes_sent=self.bytes_sent - before.bytes_sent,
            communication_us=self.communication_us - before.communication_us,
            exposed_us=self.exposed_us - before.exposed_us,
            hidden_us=max(0.0, self.hidden_us - before.hidden_us),
        )

    @property
    def hidden_share(self) -> float:
        """Hidden part of the communication, 0 to 1; nan where nothing was communicated."""
        return self.hidden_us / self.communication_us if self.communication_us else math.nan


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        name: What.
        track: The thread or lane it is shown on.
        start_us: Start, on the host clock.
        end_us: End, on the host clock.
        details: What else is shown with it.
    """

    name: str
    track: str
    start_us: float
    end_us: float
    details: dict[str, Any]


class Trace:
    """A bounded recording of spans; recording nothing until started.

    Args:
        rank: The rank, which becomes the trace's process.
        world_size: How many ranks there are.
        name: What was traced; files in a folder are called by it.
        capacity: Spans kept; older ones are dropped.
    """

    def __init__(
        self, rank: int, world_size: int, name: str = "bagua_rt", *, capacity: int = 100_000
    ) -> None:
        self._world_size = world_size
        self._rank, self._name = rank, name.replace(os.sep, "_")
        self._spans: deque[Span] = deque(maxlen=capacity)
        self.is_on = False

    def start(self) -> None:
        """Record from now on."""
        self.is_on = True

    def stop(self) -> None:
        """Record no more; what was recorded stays."""
        self.is_on = False

    def add(self, name: str, track: str, start_us: float, end_us: float, **details: Any) -> None:
        """Record a span, if the trace is on."""
        if self.is_on:
            self._spans.append(Span(name, track, start_us, end_us, details))

    @property
    def spans(self) -> tuple[Span, ...]:
        """What was recorded, oldest first."""
        return tuple(self._spans)

    def write_chrome(self, path: str | Path, *, since_us: float = -math.inf) -> Path:
        """Write the spans as a Chrome trace.

        Beside the events it has `world_size`, `host`, and `clock_start_us`, the Unix time at which the host's
        clock was 0: it brings the traces of several hosts onto one timeline, as well as their clocks agree.

        Args:
            path: A folder, which gets ``{name}.rank{rank}.json``; or a file that ends in ``.json``, where
                several ranks write one each, with ``.rank{rank}`` before that unless its name says the rank.
            since_us: Leave out what began before, on the host clock.

        Returns:
            The file written.

        Raises:
            OSError: it can't be written.
        """
        path = Path(path)
        rank = f"rank{self._rank}"
        if path.suffix != ".json" or path.is_dir():
            path = path / f"{self._name}.{rank}.json"
        elif self._world_size > 1 and rank not in path.stem:
            path = path.with_name(f"{path.stem}.{rank}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        spans = [span for span in self._spans if span.start_us >= since_us]
        tracks = sorted({span.track for span in spans})
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": self._rank, "name": "process_name", "args": {"name": f"rank {self._rank}"}}
        ]
        for number, track in enumerate(tracks):
            events.append(
                {"ph": "M", "pid": self._rank, "tid": number, "name": "thread_name", "args": {"name": track}}
            )
        events += [
            {
                "ph": "X",
                "pid": self._rank,
                "tid": tracks.index(span.track),
                "name": span.name,
                "ts": span.start_us,
                "dur": span.end_us - span.start_us,
                "args": span.details,
            }
            for span in spans
        ]
        clock_start_us = (time.time_ns() - time.perf_counter_ns()) / 1000
        about = {"world_size": self._world_size, "host": socket.gethostname()}
        path.write_text(json.dumps({"traceEvents": events, **about, "clock_start_us": clock_start_us}))
        return path
