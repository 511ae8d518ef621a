"""A real training step: the weights, what attaching costs, and how much of the communication was hidden."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bagua_rt as bagua
from bagua_rt.trace import Span
from gpt import GPT, Shape
from tools.gpu_check.steps import Bench, Step

COMMITS = ("host", "stream")
_STEPS, _WARM_UP = 30, 5
_LR = 0.05


def knows(commit: str) -> bool:
    """Does this version's `attach` know this way to commit?"""
    return repr(commit) in str(inspect.signature(bagua.attach).parameters["commit"].annotation).replace(
        '"', "'"
    )


def network() -> nn.Module:
    """A small MLP, the same for everyone."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    """A rank's samples in a step."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 24, generator=source)


def by_one_process(worlds: Sequence[int]) -> list[torch.Tensor]:
    """The weights after a step for each of `worlds`, of one process on the batches of that many ranks."""
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9)
    for step, ranks in enumerate(worlds):
        optimizer.zero_grad()
        whole = torch.cat([batch(rank, step) for rank in range(ranks)]).double()
        model(whole).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def weights(bench: Bench, commit: str = "host") -> None:
    """Train the MLP over all ranks of the step; compare with one process on the whole batches."""
    if not knows(commit):
        bench.skip(f"weights, commit={commit!r}", "this version's attach() does not know it")
        return
    options: dict[str, Any] = {"bucket_cap_mb": 0.004, "first_bucket_mb": 0.002, "commit": commit}
    with bench.group() as group, bench.computing(group.backend):
        model = network().to(group.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9)
        run = bagua.attach(model, optimizer, **options)
        buckets = len(run.buckets)
        for step in range(6):
            optimizer.zero_grad()
            model(batch(bench.rank, step).to(group.device)).square().mean().backward()
            optimizer.step()
        run.close()
        group.backend.device.synchronize(group.backend.device.record(group.backend.device.compute_stream()))
        found = [p.detach().cpu().double() for p in model.parameters()]
    right = by_one_process([bench.world_size] * 6)
    worst = max(float((a - b).abs().max()) for a, b in zip(found, right, strict=True))
    bench.check(
        f"weights, commit={commit!r}",
        worst < 1e-5,
        f"{bench.world_size} rank(s), {buckets} buckets, 6 steps: {worst:.1e} off one process in float64",
        worst=worst,
    )


# ---- time


def _shape(bench: Bench) -> tuple[Shape, int]:
    if bench.options.is_small:
        return Shape(layers=1, width=32, heads=2, context=16), 2
    return Shape(layers=6, width=384, heads=6, context=256), 32


@contextmanager
def _trainer(bench: Bench, group: bagua.ProcessGroup) -> Iterator[tuple[GPT, torch.optim.Optimizer, Any]]:
    shape, size = _shape(bench)
    torch.manual_seed(7)
    model = GPT(shape).to(group.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = torch.Generator().manual_seed(bench.rank)
    tokens = torch.randint(256, (size, shape.context + 1), generator=source).to(group.device)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    yield model, optimizer, step


def _step_ms(bench: Bench, group: bagua.ProcessGroup, step: Any) -> float:
    """The median time of a step, the device's share included."""
    device = group.backend.device
    times = []
    for _ in range(2 if bench.options.is_small else _STEPS):
        begin = time.perf_counter()
        step()
        device.synchronize(device.record(device.compute_stream()))
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[-_STEPS + _WARM_UP :])


def step_time(bench: Bench, commit: str) -> None:
    """Time a GPT's step, alone and attached, and trace some steps."""
    name = f"GPT, commit={commit!r}"
    if not knows(commit):
        bench.skip(name, "this version's attach() does not know it")
        return
    way: Any = commit
    with bench.group() as group, bench.computing(group.backend):
        with _trainer(bench, group) as (_, _, step):
            plain = _step_ms(bench, group, step)
        with _trainer(bench, group) as (model, optimizer, step):
            run = bagua.attach(model, optimizer, commit=way)
            attached = _step_ms(bench, group, step)
            path = Path(bench.options.out) / f"trace_{commit}_{bench.world_size}.rank{bench.rank}.json"
            with run.tracing(path) as trace:
                for _ in range(3):
                    step()
                run.state_dict()  # completes what is under way
            found = overlap(trace.spans)
            loss_is_finite = bool(model.position.isfinite().all().item())
            buckets, sent = len(run.buckets), run.statistics().bytes_sent
            run.close()
    bench.check(f"{name}: weights are finite", loss_is_finite)
    bench.figure(
        f"{name}: a step",
        f"{attached:.2f} ms attached, {plain:.2f} ms alone ({attached - plain:+.2f}), {buckets} buckets, "
        f"{sent / 2**20:.0f} MiB sent",
        attached_ms=attached, plain_ms=plain, buckets=buckets, bytes_sent=sent,
    )  # fmt: skip
    bench.check(f"{name}: the trace has a span for each bucket", found["spans"] >= buckets, f"{path.name}")
    bench.figure(
        f"{name}: overlap",
        f"{found['lanes_us']:.0f} us in lanes in 3 steps, {found['exposed_us']:.0f} us of them while the "
        "trainer waited",
        **found,
    )


def overlap(spans: Sequence[Span]) -> dict[str, float]:
    """How long buckets were in lanes, and for how much of that the trainer waited for them."""
    waits = [(s.start_us, s.end_us) for s in spans if s.name == "exposed communication"]
    lanes = [s for s in spans if s.track not in ("trainer", "queue")]
    exposed = sum(
        max(0.0, min(s.end_us, end) - max(s.start_us, begin)) for s in lanes for begin, end in waits
    )
    return {
        "spans": len(lanes),
        "lanes_us": sum(s.end_us - s.start_us for s in lanes),
        "exposed_us": exposed,
        "waited_us": sum(end - begin for begin, end in waits),
    }


STEPS = (
    *(Step(f"weights {commit}", partial(weights, commit=commit)) for commit in COMMITS),
    *(Step(f"step {commit}", partial(step_time, commit=commit), deadline_s=30.0) for commit in COMMITS),
)
