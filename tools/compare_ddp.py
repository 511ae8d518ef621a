#!/usr/bin/env python3
"""Time training steps of a model attached to bagua_rt against the same model in torch's DDP, in one run.

Both kinds of steps alternate in short rounds, so that other load hits both alike; what counts is the ratio
of each round, its median and its spread. Every rank's first steps, which plan buckets, are not counted.

    python tools/compare_ddp.py                            two ranks of this machine, every model
    python tools/compare_ddp.py --ranks 3 --model mlp --algorithm bytegrad --rounds 20 --json out.json
    torchrun --nproc-per-node 8 tools/compare_ddp.py       is one of the ranks; so it is under srun and mpirun
    python tools/compare_ddp.py --against traced           the same steps with and without tracing, no DDP
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as distributed
from torch import nn

import bagua_rt as bagua

Step = Callable[[], None]


class Scalars(nn.Module):
    """5,000 parameters of one element: what a hook costs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(5000)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.parts)).sum() * x.mean()


def make_mlp() -> nn.Module:
    """25 MB in 24 layers, each a full bucket's tenth."""
    return nn.Sequential(*[layer for _ in range(24) for layer in (nn.Linear(512, 512), nn.ReLU())])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (make_mlp, (64, 512)),
    "scalars": (Scalars, (1,)),
}


# Those that an optimizer brings along take other steps than DDP's SGD does.
ALGORITHMS = [name for name in bagua.algorithms.names() if name not in ("onebit_adam", "qadam")]


@dataclass(frozen=True)
class Comparison:
    """Step times of one model.

    Attributes:
        ours_ms: Median of the rounds.
        theirs_ms: Median of the rounds.
        ratios: ours / theirs of each round, sorted.
    """

    model: str
    ours_ms: float
    theirs_ms: float
    ratios: list[float]

    def __str__(self) -> str:
        low, high = self.ratios[0], self.ratios[-1]
        return (
            f"{self.model:8s} ours {self.ours_ms:7.2f} ms, theirs {self.theirs_ms:7.2f} ms, "
            f"median ratio {statistics.median(self.ratios):.3f} "
            f"({low:.3f} to {high:.3f}, {len(self.ratios)} rounds)"
        )


def parse_options() -> argparse.Namespace:
    """The command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=formatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start on this machine (2)")
    parser.add_argument("--model", choices=MODELS, action="append", help="may be given again (all)")
    parser.add_argument(
        "--algorithm", default="gradient_allreduce", choices=ALGORITHMS, help="by its registry name"
    )
    parser.add_argument(
        "--against", choices=("ddp", "traced"), default="ddp", help="what to compare with (ddp)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="alternations (15)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each kind in a round (5)")
    parser.add_argument("--device", help="cpu or cuda (cuda where there is one)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    if min(options.ranks, options.rounds, options.steps) < 1:
        parser.error("--ranks, --rounds and --steps are 1 or more")
    return options


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Step:
    """A whole training step."""

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


@contextmanager
def torch_group(pg: bagua.ProcessGroup) -> Iterator[None]:
    """Make torch's default group of the same ranks."""
    from checks import join_torch_group

    join_torch_group(pg)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def compare(pg: bagua.ProcessGroup, options: argparse.Namespace, name: str) -> Comparison:
    """Time both kinds of steps of one model. Collective."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    ours, theirs = make().to(pg.device), make().to(pg.device)
    x = torch.randn(shape, device=pg.device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in (ours, theirs)]
    with (
        bagua.attach(ours, optimizers[0], bagua.algorithms.create(options.algorithm), name=f"{name}/ours"),
        tempfile.TemporaryDirectory() as folder,
    ):
        first = step_of(ours, optimizers[0], x)
        if options.against == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(theirs, gradient_as_bucket_view=True)
            return alternate(pg, options, name, first, step_of(wrapped, optimizers[1], x))
        with (
            bagua.attach(
                theirs, optimizers[1], bagua.algorithms.create(options.algorithm), name=f"{name}/theirs"
            ) as traced,
            traced.tracing(folder),
        ):
            return alternate(pg, options, name, first, step_of(theirs, optimizers[1], x))


def alternate(
    pg: bagua.ProcessGroup, options: argparse.Namespace, name: str, ours: Step, theirs: Step
) -> Comparison:
    """Time rounds of both kinds in turn. Collective."""

    def timed(step: Step) -> float:
        pg.world.barrier().wait()
        start = time.perf_counter()
        for _ in range(options.steps):
            step()
        if pg.device.type == "cuda":
            torch.cuda.synchronize()
        steps: int = options.steps
        return (time.perf_counter() - start) / steps * 1e3

    for step in (ours, theirs):
        timed(step)
    pairs = [(timed(ours), timed(theirs)) for _ in range(options.rounds)]
    ours_ms, theirs_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Comparison(name, ours_ms, theirs_ms, sorted(mine / other for mine, other in pairs))


def main() -> None:
    """Be one rank, or start all of them."""
    options = parse_options()
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "examples")]
    from launching import start_ranks

    start_ranks(options.ranks)
    found = []
    with bagua.init(options.device, timeout_s=120) as pg, torch_group(pg):
        for name in options.model or MODELS:
            found.append(compare(pg, options, name))
            if pg.rank == 0:
                print(found[-1], flush=True)
        if pg.rank == 0 and options.json:
            options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
