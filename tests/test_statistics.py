"""Statistics by formula, and the Chrome traces."""

from __future__ import annotations

import json
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.trace import Statistics, Trace
from tests.micro import KINDS, SIZES, backward, caught, group, on, wrap
from tests.ranks import RankContext, RankPool

NUMEL = (40, 24, 8)  # elements of three parameters, fp32


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterList([torch.ones(n) for n in NUMEL])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.p)).sum() * x


def sent_by_all_reduce(numel: int, n: int) -> int:
    return 2 * (n - 1) * 4 * numel // n


def counted(ctx: RankContext, kind: str, steps: int) -> dict[str, Any]:
    with group(ctx):
        model = Three()
        wrapped = wrap(kind, model, bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
        before = wrapped.run.statistics()
        with wrapped.run.no_sync():
            backward(wrapped, ctx)
        quiet = wrapped.run.statistics()
        for _ in range(steps):
            backward(wrapped, ctx)
        after = wrapped.run.statistics()
        plan = [p.nbytes for p in wrapped.run.buckets]
        wrapped.run.close()
        return {"before": before, "quiet": quiet, "after": after, "plan": plan}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", SIZES)
def test_bytes_and_generations_by_formula(pool: RankPool, world_size: int, kind: str) -> None:
    steps = 4
    for found in on(pool, world_size, counted, kind, steps):
        before, quiet, after = found["before"], found["quiet"], found["after"]
        assert sum(found["plan"]) == 4 * sum(NUMEL)
        assert before.buckets == after.buckets == len(found["plan"]) == 3
        assert (before.generations, quiet.generations, after.generations) == (0, 0, steps)
        assert quiet.bytes_sent == before.bytes_sent, "no_sync() sends nothing"
        right = steps * sum(sent_by_all_reduce(n, world_size) for n in NUMEL)
        assert after.bytes_sent - before.bytes_sent == pytest.approx(right, abs=steps * 3 * 4)
        assert after.exposed_us > before.exposed_us
        assert 0 <= after.hidden_us <= after.communication_us
        if world_size > 1:
            assert after.communication_us > before.communication_us
            assert 0 <= after.hidden_share <= 1


def test_the_hidden_share_is_of_the_communication() -> None:
    totals = {"generations": 1, "buckets": 1, "bytes_sent": 0}
    some = Statistics(**totals, communication_us=100.0, exposed_us=30.0, hidden_us=70.0)
    assert some.hidden_share == 0.7
    nothing = Statistics(**totals, communication_us=0.0, exposed_us=0.0, hidden_us=0.0)
    assert math.isnan(nothing.hidden_share)


def launched_before_the_step(ctx: RankContext) -> float:
    """The hidden share of OneBitAdam's second stage, whose communication the trainer waits for at once."""
    with group(ctx):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
        optimizer = bagua.optim.OneBitAdam(model.parameters(), warmup_steps=1)
        wrapped = wrap("attach", model, optimizer, bucket_cap_mb=0.02, first_bucket_mb=0.02)
        start = wrapped.run.statistics()
        for step in range(8):
            if step == 2:
                start = wrapped.run.statistics()
            optimizer.zero_grad()
            wrapped.forward(torch.ones(4, 64)).square().mean().backward()
            optimizer.step()
        end = wrapped.run.statistics()
        return (end.hidden_us - start.hidden_us) / (end.communication_us - start.communication_us)


def test_communication_that_is_waited_for_at_once_is_not_hidden(pool: RankPool) -> None:
    assert max(on(pool, 2, launched_before_the_step)) < 0.25


def onebit_bytes(ctx: RankContext) -> tuple[int, int, list[tuple[int, int]]]:
    """Bytes of one step in either stage."""
    with group(ctx):
        model = Three()
        optimizer = bagua.optim.OneBitAdam(model.parameters(), 0.1, warmup_steps=2)
        run = bagua.attach(model, optimizer, bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
        sent = []
        for _ in range(5):
            before = run.statistics().bytes_sent
            model(torch.ones(1) * (ctx.rank + 1)).sum().backward()
            optimizer.step()
            sent.append(run.statistics().bytes_sent - before)
        plan = [(p.numel, p.padded_numel) for p in run.buckets]
        return sent[1], sent[4], plan


@pytest.mark.parametrize("world_size", [2, 3])
def test_onebit_adam_sends_a_bit_per_element_each_way(pool: RankPool, world_size: int) -> None:
    n = world_size
    for warm, compressed, plan in on(pool, world_size, onebit_bytes):
        assert warm == pytest.approx(sum(sent_by_all_reduce(size, n) for size in NUMEL), abs=12)
        rows = [padded // n // 8 + 8 for _, padded in plan]
        assert compressed == sum(2 * (n - 1) * row for row in rows)


# ---- traces ---------------------------------------------------------------------------------------------


def traced(ctx: RankContext, kind: str, folder: str, steps: int) -> dict[str, Any]:
    with group(ctx):
        model = Three()
        wrapped = wrap(kind, model, bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
        backward(wrapped, ctx)
        off = len(wrapped.run.trace.spans)
        with wrapped.run.tracing(folder):
            for _ in range(steps):
                backward(wrapped, ctx)
        recorded = len(wrapped.run.trace.spans)
        backward(wrapped, ctx)
        pipeline = wrapped.run._attachment.engine.pipeline
        return {
            "off": off,
            "still": len(wrapped.run.trace.spans) - recorded,
            "timed": pipeline.is_timed,
            "hook": pipeline.on_round_complete,
            "names": [list(plan.names) for plan in wrapped.run.buckets],
        }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_chrome_trace_per_rank_has_a_span_per_bucket_and_round(
    pool: RankPool, world_size: int, kind: str, tmp_path: Path
) -> None:
    steps = 3
    answers = on(pool, world_size, traced, kind, str(tmp_path / "traces"), steps)
    files = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert files == [f"model0.rank{rank}.json" for rank in range(world_size)]
    for rank, found in enumerate(answers):
        assert (found["off"], found["still"], found["timed"], found["hook"]) == (0, 0, False, None)
        text = (tmp_path / "traces" / files[rank]).read_text()
        events = json.loads(text)["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        spans = [event for event in events if event["ph"] == "X"]
        assert all(span["dur"] >= 0 and span["ts"] > 0 for span in spans)
        for index, names in enumerate(found["names"]):
            own = [span for span in spans if span["name"] == f"bucket {index}"]
            assert len(own) == steps
            assert all(span["args"]["parameters"] == names for span in own)
            assert len([span for span in spans if span["name"] == f"bucket {index} in queue"]) == steps
        assert len([span for span in spans if span["name"] == "exposed communication"]) == steps
        tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"trainer", "queue"} < tracks


def traced_from_start(ctx: RankContext, folder: str) -> int:
    os.environ["BAGUA_RT_TRACE_DIR"] = folder
    try:
        with group(ctx):
            runs = [bagua.attach(model := Three(), name="a/b"), bagua.attach(Three())]
            for _ in range(2):
                model(torch.ones(1)).sum().backward()
            for run in runs:
                run.close()
            return len(runs[0].trace.spans)
    finally:
        del os.environ["BAGUA_RT_TRACE_DIR"]


def test_the_variable_traces_whole_runs(pool: RankPool, tmp_path: Path) -> None:
    counts = on(pool, 2, traced_from_start, str(tmp_path / "new"))
    for rank, count in enumerate(counts):
        files = sorted((tmp_path / "new").glob(f"*rank{rank}*.json"))
        names = [f"a_b.rank{rank}.json", f"model1.rank{rank}.json"]
        assert [file.name for file in files] == names, "one for each attachment"
        events = json.loads(files[0].read_text())["traceEvents"]
        assert len([event for event in events if event["ph"] == "X"]) == count == 2 * 3


def traced_in_parts(ctx: RankContext, folder: str, whole: bool) -> None:
    """Rounds 1 and 3 of 5 are parts of their own."""
    if whole:
        os.environ["BAGUA_RT_TRACE_DIR"] = f"{folder}/whole"
    try:
        with group(ctx):
            run = bagua.attach(model := Three())
            for number in range(5):
                part = run.tracing(f"{folder}/parts/{number}.v1.json") if number in (1, 3) else nullcontext()
                with part:
                    model(torch.ones(1)).sum().backward()
            run.close()
    finally:
        os.environ.pop("BAGUA_RT_TRACE_DIR", None)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_part_is_traced_by_itself(pool: RankPool, world_size: int, whole: bool, tmp_path: Path) -> None:
    def rounds(path: Path) -> set[int]:
        events = json.loads(path.read_text())["traceEvents"]
        return {event["args"]["round"] for event in events if event["ph"] == "X"}

    on(pool, world_size, traced_in_parts, str(tmp_path), whole)
    for rank in range(world_size):
        own = f".rank{rank}" if world_size > 1 else ""
        for number in (1, 3):
            assert rounds(tmp_path / "parts" / f"{number}.v1{own}.json") == {number}
        if whole:
            assert rounds(tmp_path / "whole" / f"model0.rank{rank}.json") == set(range(5))


def test_a_folder_that_takes_no_trace_fails_no_training(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert on(pool, 2, traced_from_start, str(tmp_path / "file" / "folder")) == [6, 6]


def test_a_trace_that_is_off_records_nothing_and_is_bounded(tmp_path: Path) -> None:
    trace = Trace(rank=3, world_size=4, capacity=2)
    trace.add("a", "t", 0.0, 1.0)
    assert [span.name for span in trace.spans] == []
    trace.start()
    for name in ("a", "b", "c"):
        trace.add(name, "t", 0.0, 1.0, size=1)
    trace.stop()
    trace.add("d", "t", 0.0, 1.0)
    assert [span.name for span in trace.spans] == ["b", "c"]
    path = trace.write_chrome(tmp_path / "one.json")
    assert [e["name"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"] == ["b", "c"]
    assert trace.write_chrome(tmp_path).name == "bagua_rt.rank3.json"
    (tmp_path / "file").write_text("")
    assert "Error" in caught(lambda: trace.write_chrome(tmp_path / "file" / "below.json"))[0]
