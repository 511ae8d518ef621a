"""Does it still learn? Train two small models with every algorithm, and compare their validation losses.

    python examples/convergence.py                           what is missing, on two ranks; then the report
    python examples/convergence.py --task digits --seeds 1   a part of it
    python examples/convergence.py --only bytegrad --again   anew, though it is there
    python examples/convergence.py --report                  no training: merge, and write table and plots
    torchrun --nproc-per-node 4 examples/convergence.py      is one of the ranks; so it is under srun, mpirun

Each algorithm takes the same steps from the same weights on the same batches as gradient_allreduce, with the
same optimizer: AdamW, or for onebit_adam and qadam their own one with its settings. On the larger task those
that have no warm-up of their own are switched to, after a part of the steps. Replicas that differ between
ranks are averaged before they are validated. Results go into one JSON file after every run, so the
script can be stopped and goes on where it was; `--merge` adds another machine's file.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bagua_rt as bagua
from convergence_report import BASELINE, Record, key_of, missed_bars, put_table, table, write_plot
from launching import is_launched, start_ranks
from learning_tasks import TASKS, Learning, Task

DOCS = Path(__file__).resolve().parents[1] / "docs"
WARMUP_SHARE = 0.3  # of onebit_adam's, qadam's and async_model_average's steps
SWITCHED_TO = ("decentralized", "local_sgd", "low_precision_decentralized", "powersgd")
POINTS = 12  # of each curve
BETAS = (0.9, 0.99)
OWN_OPTIMIZERS = {"onebit_adam": bagua.optim.OneBitAdam, "qadam": bagua.optim.QAdam}

# A variant's name, its algorithm and the settings that differ from the defaults. Algorithms that are not
# named here are run as they are.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "local_sgd": ("local_sgd", {"interval": 4}),
    "local_sgd, outer step": ("local_sgd", {"interval": 8, "outer_step": True, "outer_momentum": 0.5}),
    "async_model_average": ("async_model_average", {"interval_s": 0.0}),
}


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """What is compared, by name: every registered algorithm, and some in more than one way."""
    covered = {algorithm for algorithm, _ in VARIANTS.values()}
    plain: dict[str, tuple[str, dict[str, Any]]] = {
        name: (name, {}) for name in bagua.algorithms.names() if name not in covered
    }
    rest = {**plain, **VARIANTS}
    return {BASELINE: rest.pop(BASELINE), **dict(sorted(rest.items()))}


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=formatter)
    add = parser.add_argument
    add("--task", choices=TASKS, action="append", help="may be given again (all)")
    add("--only", choices=variants(), action="append", metavar="NAME", help="may be given again (all)")
    add("--seeds", type=int, default=3, help="seeds 0, 1, … (3)")
    add("--steps", type=int, help="optimizer steps, in place of each task's own")
    add("--ranks", type=int, default=2, help="ranks to start on this machine (2)")
    add("--out", type=Path, default=DOCS / "figures", help="folder of the JSON file and the plots")
    add("--table", type=Path, default=DOCS / "algorithms.md", help="file that has a place for the table")
    add("--again", action="store_true", help="run what is there already, too")
    add("--report", action="store_true", help="train nothing")
    add("--merge", type=Path, action="append", default=[], metavar="JSON", help="take these results as well")
    options = parser.parse_args()
    if min(options.ranks, options.seeds, options.steps or 1) < 1:
        parser.error("--ranks, --seeds and --steps are 1 or more")
    return options


def load(path: Path) -> dict[str, Record]:
    """The results in a file; none if it isn't there."""
    return {k: Record(**v) for k, v in json.loads(path.read_text()).items()} if path.exists() else {}


def save(path: Path, records: dict[str, Record]) -> None:
    """Write the results, so that a run that is stopped leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    lines = [f"{json.dumps(key)}: {json.dumps(vars(records[key]))}" for key in sorted(records)]
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    part.replace(path)


def to_run(options: argparse.Namespace, records: dict[str, Record], ranks: int) -> list[tuple[str, str, int]]:
    """(task, variant, seed) of what is asked for and not there with these settings; the baseline first."""
    wanted = []
    for task in options.task or TASKS:
        names = [name for name in variants() if name in (options.only or variants())]
        wanted += [(task, name, seed) for seed in range(options.seeds) for name in names]
    return [
        each
        for each in wanted
        if options.again
        or (record := records.get(key_of(*each))) is None
        or (record.steps, record.ranks) != (options.steps or TASKS[each[0]].steps, ranks)
    ]


def make_optimizer(algorithm: str, model: nn.Module, task: Task, steps: int) -> torch.optim.Optimizer:
    """AdamW, or the algorithm's own optimizer with the same settings."""
    if (own := OWN_OPTIMIZERS.get(algorithm)) is None:
        return torch.optim.AdamW(model.parameters(), lr=task.lr, betas=BETAS, weight_decay=task.weight_decay)
    optimizer: torch.optim.Optimizer = own(
        model.parameters(),
        task.lr,
        BETAS,
        weight_decay=task.weight_decay,
        warmup_steps=max(1, round(WARMUP_SHARE * steps)),
        decoupled_weight_decay=True,
    )
    return optimizer


def make_algorithm(
    algorithm: str, settings: dict[str, Any], task: Task, steps: int
) -> bagua.Algorithm | None:
    """The algorithm; None where the optimizer brings it along."""
    if algorithm in OWN_OPTIMIZERS:
        return None
    if algorithm == "async_model_average":
        settings = {**settings, "warmup_steps": round(WARMUP_SHARE * steps)}
    if algorithm == "powersgd":
        settings = {**settings, "rank": task.powersgd_rank}
    return bagua.algorithms.create(algorithm, **settings)


def validate(pg: bagua.ProcessGroup, learning: Learning, model: nn.Module) -> float:
    """The loss of the mean of all ranks' weights on data that is held out. Collective."""
    mean = copy.deepcopy(model)
    for param in mean.parameters():
        pg.world.all_reduce_(param.detach(), "avg").wait()
    return learning.validation(mean)


def train(
    pg: bagua.ProcessGroup, learning: Learning, task: Task, variant: str, seed: int, steps: int
) -> Record:
    """One run. Collective."""
    algorithm, settings = variants()[variant]
    torch.manual_seed(seed)
    model = learning.model()
    data = learning.batches(seed, pg.rank, task.batch_size)
    optimizer = make_optimizer(algorithm, model, task, steps)
    chosen = make_algorithm(algorithm, settings, task, steps)
    switch_at = round(task.switch_share * steps) if algorithm in SWITCHED_TO else 0
    run = bagua.attach(model, optimizer, bagua.GradientAllReduce() if switch_at else chosen)
    curve, start = [], time.perf_counter()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = task.lr * min(step / (0.05 * steps), 1.05 - step / steps)
        optimizer.zero_grad()
        learning.loss(model, next(data)).backward()
        optimizer.step()
        if step == switch_at and chosen is not None:
            run.switch(chosen)
        if step * POINTS // steps > (step - 1) * POINTS // steps and step < steps:
            curve.append((step, validate(pg, learning, model)))
    seconds = time.perf_counter() - start
    sent = run.statistics().bytes_sent
    run.close()  # completes what is outstanding
    curve.append((steps, validate(pg, learning, model)))
    return Record(steps, pg.world_size, curve, sent, round(seconds, 2))


def train_all(options: argparse.Namespace, path: Path) -> None:
    """Be one rank of all runs that are missing."""
    torch.set_num_threads(1)
    with bagua.init("cpu", timeout_s=120) as pg:
        records = load(path)
        todo = pg.world.broadcast_object(to_run(options, records, pg.world_size))
        learnings = {name: TASKS[name].open() for name in dict.fromkeys(name for name, _, _ in todo)}
        for number, (name, variant, seed) in enumerate(todo, 1):
            task = TASKS[name]
            record = train(pg, learnings[name], task, variant, seed, options.steps or task.steps)
            if pg.rank == 0:
                records[key_of(name, variant, seed)] = record
                save(path, records)
                text = f"[{number}/{len(todo)}] {name}, {variant}, seed {seed}: "
                print(f"{text}validation loss {record.loss:.4f}, {record.seconds:.1f} s", flush=True)


def report(options: argparse.Namespace, records: dict[str, Record]) -> bool:
    """Write table and plots. Returns whether all that was run met its bar."""
    titles = {name: TASKS[name].title for name in TASKS}
    text = table(records, titles)
    put_table(text, options.table)
    for name in TASKS:
        write_plot(records, name, titles[name], options.out / f"convergence_{name}.svg")
    missed = missed_bars(records)
    print(text + "".join(f"outside its bar: {each}\n" for each in missed), end="")
    return not missed


def main() -> int:
    """Be one rank, or start all of them, or write the report."""
    options = parse_options()
    path: Path = options.out / "convergence.json"
    rank = next(
        (int(os.environ[n]) for n in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") if n in os.environ), 0
    )
    if options.merge and rank == 0:
        merged = load(path)
        for other in options.merge:
            merged.update(load(other))
        save(path, merged)
    if not options.report and (is_launched() or to_run(options, load(path), options.ranks)):
        start_ranks(options.ranks)
        train_all(options, path)
    return 0 if rank or report(options, load(path)) else 1


if __name__ == "__main__":
    sys.exit(main())
