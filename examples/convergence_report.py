"""What convergence.py makes of its results: a table, plots, and whether the bars are met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MARKS = ("<!-- made by examples/convergence.py -->", "<!-- end -->")
BASELINE = "gradient_allreduce"
# How much larger the mean of the validation losses may be than the baseline's.
BAR, LOOSE_BAR = 0.02, 0.05
LOOSE = ("decentralized", "low_precision_decentralized", "async_model_average", "local_sgd")


@dataclass
class Record:
    """One run.

    Attributes:
        steps: Optimizer steps.
        ranks: Number of ranks.
        curve: ``(step, validation loss)``.
        bytes_sent: By one rank.
        seconds: How long it took.
    """

    steps: int
    ranks: int
    curve: list[tuple[int, float]]
    bytes_sent: int
    seconds: float

    @property
    def loss(self) -> float:
        """The last validation loss."""
        return self.curve[-1][1]


@dataclass(frozen=True)
class Row:
    """One variant on one task, over the seeds that both it and the baseline have.

    Attributes:
        variant: Its name.
        losses: Of each seed.
        ratios: Of each seed, to the baseline's loss with that seed.
        ratio: Of the means.
        sent: Bytes, as a share of the baseline's.
    """

    variant: str
    losses: list[float]
    ratios: list[float]
    ratio: float
    sent: float

    @property
    def bar(self) -> float:
        """How much worse than the baseline it may be."""
        return LOOSE_BAR if self.variant.partition(",")[0] in LOOSE else BAR

    @property
    def is_within(self) -> bool:
        """Is it?"""
        return self.ratio <= 1 + self.bar


def key_of(task: str, variant: str, seed: int) -> str:
    """The key of a run in the JSON file."""
    return f"{task}/{variant}/{seed}"


def by_seed(records: Mapping[str, Record], task: str) -> dict[str, dict[int, Record]]:
    """The runs of a task, by variant and seed; the baseline first."""
    found: dict[str, dict[int, Record]] = {BASELINE: {}}
    for key in sorted(records, key=lambda key: key.split("/")):
        name, variant, seed = key.split("/")
        if name == task:
            found.setdefault(variant, {})[int(seed)] = records[key]
    return found


def rows_of(records: Mapping[str, Record], task: str) -> list[Row]:
    """A row for each variant that can be compared: same seeds, steps and number of ranks as the baseline."""
    found = by_seed(records, task)
    rows = []
    for variant, runs in found.items():
        pairs = [
            (run, base)
            for seed, run in sorted(runs.items())
            if (base := found[BASELINE].get(seed)) and (run.steps, run.ranks) == (base.steps, base.ranks)
        ]
        if not pairs:
            continue
        losses, theirs = [run.loss for run, _ in pairs], [base.loss for _, base in pairs]
        ratios = [mine / other for mine, other in zip(losses, theirs, strict=True)]
        sent = sum(run.bytes_sent for run, _ in pairs) / max(1, sum(base.bytes_sent for _, base in pairs))
        rows.append(Row(variant, losses, ratios, statistics.mean(losses) / statistics.mean(theirs), sent))
    return rows


def table(records: Mapping[str, Record], titles: Mapping[str, str]) -> str:
    """The table, in Markdown."""
    lines = []
    for task, title in titles.items():
        rows = rows_of(records, task)
        if not rows:
            continue
        base = by_seed(records, task)[BASELINE]
        run = next(iter(base.values()))
        lines += [
            f"**{title}**: {run.steps} steps on {run.ranks} ranks, {len(rows[0].losses)} seed(s).",
            "",
            f"| algorithm | validation loss, mean (min to max) | to {BASELINE} (by seed) | bar | bytes |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            losses = f"{statistics.mean(row.losses):.4f} ({min(row.losses):.4f} to {max(row.losses):.4f})"
            ratios = f"{row.ratio:.3f} ({min(row.ratios):.3f} to {max(row.ratios):.3f})"
            bar = f"{1 + row.bar:.2f}{'' if row.is_within else ', **missed**'}"
            if row.variant == BASELINE:
                ratios, bar = "1", ""
            lines.append(f"| {row.variant} | {losses} | {ratios} | {bar} | {row.sent:.3f} |")
        lines.append("")
    return "\n".join(lines)


def put_table(text: str, path: Path) -> None:
    """Write the table into a file: between the marks, if it has them, else as all of it."""
    before, begin, rest = path.read_text().partition(MARKS[0]) if path.exists() else ("", "", "")
    _, end, after = rest.partition(MARKS[1])
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}" if end else text)


def missed_bars(records: Mapping[str, Record]) -> list[str]:
    """The variants that are worse than their bar, with their task and ratio."""
    tasks = dict.fromkeys(key.split("/")[0] for key in sorted(records))
    return [
        f"{task}, {row.variant}: {row.ratio:.3f}"
        for task in tasks
        for row in rows_of(records, task)
        if not row.is_within
    ]


def write_plot(records: Mapping[str, Record], task: str, title: str, path: Path) -> None:
    """Draw the mean validation loss of each variant over the steps; nothing, where there are no runs."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found = {variant: runs for variant, runs in by_seed(records, task).items() if runs}
    if not found:
        return
    with mpl.rc_context({"svg.hashsalt": task, "font.size": 9}):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.subplots()
        for number, (variant, runs) in enumerate(found.items()):
            steps = [step for step, _ in next(iter(runs.values())).curve]
            losses = [statistics.mean(each) for each in zip(*map(_losses, runs.values()), strict=False)]
            colour, width = ("black", 2.2) if variant == BASELINE else (f"C{number % 10}", 1.1)
            dashes = "--" if number > 10 else "-"
            axes.plot(steps[: len(losses)], losses, dashes, color=colour, linewidth=width, label=variant)
        axes.set(xlabel="step", ylabel="validation loss", yscale="log", title=title)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, ncols=2)
        figure.savefig(path, metadata={"Date": None})


def _losses(run: Record) -> list[float]:
    return [loss for _, loss in run.curve]
