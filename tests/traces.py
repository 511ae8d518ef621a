"""Traces whose times are chosen by hand, for tests of the tools that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bagua_rt.trace import Trace


def write(
    folder: Path, rank: int, way: dict[tuple[int, int], tuple[str, float, float, float]], **file: Any
) -> None:
    """Write a trace of ``{(round, bucket): (lane, ready, launched, done)}``; waits take the last 10 us."""
    trace = Trace(rank, 2, "model0")
    trace.start()
    for (number, bucket), (lane, ready, launched, done) in way.items():
        which = {"round": number, "bucket": bucket, "bytes": 1000 * (bucket + 1), "sent": 500 * (bucket + 1)}
        trace.add(f"bucket {bucket} in queue", "queue", ready, launched, **which)
        trace.add(f"bucket {bucket}", lane, launched, done, **which, parameters=[f"p{bucket}", "q"])
    for number in {number for number, _ in way}:
        end = max(done for (n, _), (*_, done) in way.items() if n == number)
        trace.add("exposed communication", "trainer", end - 10, end, round=number)
    path = trace.write_chrome(folder)
    path.write_text(json.dumps({**json.loads(path.read_text()), **file}))
