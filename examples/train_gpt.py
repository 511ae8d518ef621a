"""Train a byte-level GPT data-parallel on the source of Python's own standard library.

    python examples/train_gpt.py --ranks 2                      starts its ranks with torchrun
    torchrun --nproc-per-node 2 examples/train_gpt.py           is one of them; so it is under srun and mpirun

Three lines embed the runtime, and the rest is an ordinary training script: `bagua.init` joins the ranks,
`bagua.attach` makes them train one model together, `run.statistics()` says what that cost.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, distributed, nn
from torch.optim import AdamW, Optimizer

import bagua_rt as bagua
from checks import compare_step_times, join_torch_group, replicas_report
from gpt import GPT, Batch, Corpus, Shape, batches, bits_per_byte
from launching import start_ranks

SHAPES = {
    "tiny": Shape(layers=2, width=64, heads=2, context=64),
    "small": Shape(layers=3, width=256, heads=4, context=128),
    "medium": Shape(layers=6, width=384, heads=6, context=256),
}

CORPUS_BYTES = 8_000_000
VALIDATION_WINDOWS = 256
PROMPT, SAMPLE_BYTES, TEMPERATURE = b"\nclass ", 300, 0.8


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT data-parallel on the source of Python's standard library.",
        epilog="Under torchrun, srun or mpirun the launcher sets the number of ranks, not --ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names, count = sorted(bagua.algorithms.names()), whole_number
    add = parser.add_argument
    add("--algorithm", default="gradient_allreduce", choices=names, help="how the ranks agree")
    add("--ranks", type=count, default=2, metavar="N", help="processes to start on this machine")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    add("--size", choices=tuple(SHAPES), default="small", help="0.1, 2.7 or 11 million parameters")
    add("--steps", type=count, default=600, metavar="N", help="optimizer steps")
    add("--batch-size", type=count, default=4, metavar="N", help="sequences per rank and step")
    add("--lr", type=float, default=2e-3, metavar="X", help="peak learning rate, after 20 steps")
    add(
        "--warmup-share",
        type=float,
        default=0.3,
        metavar="X",
        help="of the steps: warm-up of onebit_adam, qadam",
    )
    add("--bucket-cap-mb", type=float, default=10.0, metavar="MB", help="largest bucket, in MiB")
    add("--trace", default=argparse.SUPPRESS, metavar="DIR", help="folder for a Chrome trace per rank")
    add("--seed", type=int, default=0, metavar="N", help="of weights, order of the data, and sample")
    on_or_off = argparse.BooleanOptionalAction
    add("--compare-ddp", action=on_or_off, default=True, help="measure torch DDP's step time too")
    return parser.parse_args()


def whole_number(text: str) -> int:
    """Parse a count."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def make_optimizer(options: argparse.Namespace, model: nn.Module, warmup_steps: int) -> Optimizer:
    """The optimizer, which for some algorithms is a part of them."""
    if options.algorithm == "onebit_adam":
        return bagua.optim.OneBitAdam(model.parameters(), lr=options.lr, warmup_steps=warmup_steps)
    if options.algorithm == "qadam":
        return bagua.optim.QAdam(model.parameters(), lr=options.lr, warmup_steps=warmup_steps)
    return AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))


def attach(options: argparse.Namespace, model: nn.Module, optimizer: Optimizer, name: str) -> bagua.Attached:
    """Embed the runtime; an optimizer of bagua.optim brings its algorithm along."""
    comes_along = isinstance(optimizer, bagua.optim.PairedOptimizer)
    algorithm = None if comes_along else bagua.algorithms.create(options.algorithm)
    return bagua.attach(model, optimizer, algorithm, bucket_cap_mb=options.bucket_cap_mb, name=name)


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch, device: torch.device) -> Tensor:
    """One step, with nothing in it that knows of other ranks."""
    tokens, targets = (part.to(device) for part in batch)
    optimizer.zero_grad()
    loss: Tensor = model(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


class Monitor:
    """Shows how training goes: on a terminal a bar, elsewhere plain lines, on rank 0 alone."""

    def __init__(self, console: Console, pg: bagua.ProcessGroup, run: bagua.Attached, steps: int) -> None:
        self.console, self.pg, self.run, self.steps = console, pg, run, steps
        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, disable=pg.rank != 0 or not console.is_terminal)
        self.task = self.bar.add_task("first steps", total=steps)
        self.since, self.before = time.perf_counter(), run.statistics()
        self.losses: list[Tensor] = []

    def after(self, step: int, loss: Tensor) -> None:
        """Report a step: every one to the bar, and twenty in all in words."""
        self.bar.advance(self.task)
        self.losses.append(loss)
        if step % math.ceil(self.steps / 20) and step != self.steps:
            return
        mean = torch.stack(self.losses).mean()
        self.losses.clear()
        self.pg.world.all_reduce_(mean, "avg").wait()
        now, at = self.run.statistics(), time.perf_counter()
        latest = now - self.before
        sent = latest.bytes_sent / (at - self.since) / 1e6
        hidden = f"{latest.hidden_share:4.0%}" if latest.communication_us else "   –"
        bits = float(mean) / math.log(2)
        line = f"step {step:4d}/{self.steps}  loss {bits:.3f} bits  wire {sent:6.1f} MB/s  hidden {hidden}"
        self.bar.update(self.task, description=line)
        if not self.console.is_terminal:
            self.console.print(line)
        self.since, self.before = at, now


def train(
    options: argparse.Namespace, model: GPT, optimizer: Optimizer, data: Iterator[Batch], monitor: Monitor
) -> None:
    """Train for `options.steps` steps."""
    start = time.perf_counter()
    with monitor.bar:
        for step in range(1, options.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = options.lr * min(step / 20, 1.05 - step / options.steps)
            loss = train_step(model, optimizer, next(data), model.device)
            monitor.after(step, loss)
    total, seconds = monitor.run.statistics(), time.perf_counter() - start
    monitor.console.print(
        f"trained: {options.steps} steps in {seconds:.0f} s, {total.bytes_sent / 1e6:.0f} MB sent per rank, "
        f"{total.hidden_share:.0%} of communication hidden behind backward"
    )


def validate(pg: bagua.ProcessGroup, model: GPT, text: Tensor, batch_size: int) -> float:
    """Bits per byte on the held-out files, of which each rank takes its share."""
    share, windows = text.chunk(pg.world_size)[pg.rank], math.ceil(VALIDATION_WINDOWS / pg.world_size)
    mean = torch.tensor(
        bits_per_byte(model, share, windows=windows, batch_size=batch_size), device=model.device
    )
    pg.world.all_reduce_(mean, "avg").wait()
    return float(mean)


def compare_with_ddp(
    options: argparse.Namespace, pg: bagua.ProcessGroup, model: GPT, data: Iterator[Batch]
) -> str:
    """Time some steps more of two copies of the model, one of them in torch's DDP."""
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    our_optimizer = make_optimizer(options, ours, warmup_steps=1)
    their_optimizer = AdamW(theirs.parameters(), lr=options.lr, betas=(0.9, 0.95))
    run = attach(options, ours, our_optimizer, "comparison")
    join_torch_group(pg)
    wrapped = nn.parallel.DistributedDataParallel(theirs)
    try:
        return compare_step_times(
            pg,
            lambda: train_step(ours, our_optimizer, next(data), model.device),
            lambda: train_step(wrapped, their_optimizer, next(data), model.device),
        )
    finally:
        run.close()
        distributed.destroy_process_group()


def train_and_show(options: argparse.Namespace, pg: bagua.ProcessGroup, console: Console) -> bool:
    """Train, and show what came of it. Returns whether the replicas are what they must be."""
    corpus = Corpus.from_standard_library(CORPUS_BYTES)
    torch.manual_seed(options.seed)
    model = GPT(SHAPES[options.size]).to(pg.device)
    context, batch_size = model.shape.context, options.batch_size
    data = batches(corpus.train, context, batch_size, seed=options.seed, rank=pg.rank)
    optimizer = make_optimizer(options, model, round(options.warmup_share * options.steps))
    run = attach(options, model, optimizer, "gpt")
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    console.print(
        f"{options.algorithm}, {pg.world_size} rank(s), {pg.device}: {millions:.1f} M parameters, "
        f"{len(corpus.train) / 1e6:.1f} MB of text, {batch_size} x {context} bytes per rank and step"
    )
    with run.tracing(options.trace) if "trace" in options else nullcontext():
        train(options, model, optimizer, data, Monitor(console, pg, run, options.steps))
    bits = validate(pg, model, corpus.validation, batch_size)
    console.print(f"validation: {bits:.3f} bits per byte on held-out files")
    right, report = replicas_report(pg, model, must_be_equal=run.bit_equal)
    console.print(report)
    run.close()
    if pg.rank == 0:
        sample = model.generate(PROMPT, SAMPLE_BYTES, temperature=TEMPERATURE, seed=options.seed)
        console.print("sample:", (PROMPT + sample).decode(errors="replace"), sep="")
    if options.compare_ddp and pg.world_size > 1:
        console.print(compare_with_ddp(options, pg, model, data))
    return right


def main() -> int:
    """Be one rank, or start all of them."""
    options = parse_options()
    start_ranks(options.ranks)
    try:
        group = bagua.init(None if options.device == "auto" else options.device)
    except bagua.errors.BaguaError as error:
        print(error, file=sys.stderr)
        return 2
    with group as pg:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // pg.local_world_size))
        console = Console(quiet=pg.rank != 0, highlight=False, markup=False, soft_wrap=True)
        return 0 if train_and_show(options, pg, console) else 1


if __name__ == "__main__":
    sys.exit(main())
