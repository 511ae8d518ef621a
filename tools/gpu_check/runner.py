"""Run the sections: a step at a time, with deadlines, never stopped by one that fails, crashes or hangs."""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.nursery import close_nurseries
from tests.ranks import RankDiedError, RankFailedError, RankPool, close_crews
from tools.gpu_check.environment import machine_facts
from tools.gpu_check.report import Line, SectionReport, as_json, table
from tools.gpu_check.steps import Options, Outline, run_step, step_outlines

SECTIONS = (
    *("environment", "conformance", "kernels", "bandwidth", "host_cost", "training"),
    *("contract", "several_ranks", "failure"),
)
# These need several ranks: on one device with an NCCL that allows it, the one of --nccl.
OF_SEVERAL_RANKS = ("several_ranks", "failure")
_ONE_DEVICE = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    # Several ranks' kernels share the multiprocessors, and NVLS joins devices.
    "NCCL_MAX_CTAS": "8",
    "NCCL_NVLS_ENABLE": "0",
}
_START_S = 60.0  # imports, on a machine that has never done them
_LEAST_S = 3.0


@dataclass
class Run:
    """One run of the tool.

    Attributes:
        options: What every step is given.
        env: Variables for the processes of sections of several ranks.
        ends_at: When everything must have ended, on the monotonic clock.
    """

    options: Options
    env: Mapping[str, str]
    ends_at: float

    def section(self, name: str) -> SectionReport:
        """Run all steps of a section."""
        begin = time.monotonic()
        report = SectionReport(name)
        env = self.env if name in OF_SEVERAL_RANKS else {}
        outlines: list[Outline] = []
        try:
            outlines = RankPool(1, env).run(step_outlines, name, timeout=_START_S)[0]
        except (RankFailedError, TimeoutError) as error:
            report.lines.append(Line(name, "FAILED", _last_line(error), {"trace": str(error)}))
        for index, outline in enumerate(outlines):
            report.lines += self.why_not(name, outline) or self._step(name, index, outline, env)
        close_crews()  # the next section finds a device that nobody has used
        report.seconds = time.monotonic() - begin
        return report

    def why_not(self, section: str, step: Outline) -> list[Line]:
        """A line that says why a step can't run; none if it can."""
        why = ""
        if not self.options.devices and section != "environment":
            why = "no CUDA device"
        elif self.options.devices and step.ranks > self.options.most_ranks:
            why = (
                f"{step.ranks} ranks can't meet on {self.options.devices} device(s): that needs NCCL 2.30 or "
                f"newer, and this is {self.options.nccl_version or 'none'}; --nccl names another one"
            )
        elif self.ends_at - time.monotonic() < _LEAST_S:
            why = "no time left; --budget-s gives more"
        return [Line(step.name, "skipped", why)] if why else []

    def _step(self, section: str, index: int, step: Outline, env: Mapping[str, str]) -> list[Line]:
        limit = min(step.deadline_s, self.ends_at - time.monotonic())
        call = (run_step, section, index, self.options, limit)
        try:
            answers = RankPool(step.ranks, env).run(*call, timeout=limit, expect_errors=True)
        except TimeoutError as error:  # the text has every rank's stacks
            return [_failed(step.name, str(error))]
        lines: list[Line] = []
        for rank, answer in enumerate(answers):
            where = f", rank {rank}" if rank else ""
            if isinstance(answer, RankDiedError) and rank == step.ranks - 1 and answer.exit_code == step.dies:
                continue
            if isinstance(answer, BaseException):
                lines.append(_failed(step.name + where, str(answer)))
                continue
            found, ended = answer
            # The first rank speaks for all, as far as they agree.
            lines += [
                replace(line, name=line.name + where) for line in found if not rank or _is_failure(line)
            ]
            if not ended:
                close_crews()  # an error of the device stays with its process
        return lines


def _is_failure(line: Line) -> bool:
    return line.verdict == "FAILED"


def _failed(name: str, text: str) -> Line:
    return Line(name, "FAILED", text.strip().splitlines()[0][:300], {"trace": text[-6000:]})


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:300]


def _section(text: str) -> str:
    if text not in SECTIONS and "." not in text:  # with a dot it is a module with steps
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(SECTIONS)}")
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Check on a GPU what no machine without one can show. docs/gpu/README.md explains it.",
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/gpu_check"), metavar="FOLDER", help="for the files written")
    add("--json", type=Path, metavar="FILE", help="the report's JSON; default: report.json in --out")
    add("--nccl", type=Path, metavar="PATH", help="libnccl.so.2 (or .xz) for several ranks on one device")
    add("--only", nargs="+", type=_section, default=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    add("--budget-s", type=float, default=225.0, metavar="S", help="seconds for everything (225)")
    add(
        "--golden", type=Path, metavar="FILE", help="outputs of an earlier run: the kernels' must be the same"
    )
    add("--small", action="store_true", help="small sizes: shows that the tool works, measures nothing")
    add("--stand-in", default="", metavar="MODULE", help="what stands in for torch on a GPU, in tests")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a section failed."""
    given = parse(arguments)
    ends_at = time.monotonic() + given.budget_s
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as scratch:
        try:
            reports, machine, facts = _run(given, ends_at, Path(scratch))
        finally:
            close_crews()
            close_nurseries()
    text = table(reports, machine)
    path = given.json or given.out / "report.json"
    path.write_text(as_json(reports, machine, facts))
    print(f"\n{text}\nwritten: {path} and what is beside it in {given.out}", flush=True)
    return int(any(report.verdict == "FAILED" for report in reports))


def _run(
    given: argparse.Namespace, ends_at: float, scratch: Path
) -> tuple[list[SectionReport], str, dict[str, Any]]:
    ranked: dict[str, str] = dict(_ONE_DEVICE)
    ranked.update({name: os.environ[name] for name in _ONE_DEVICE if name in os.environ})
    if given.nccl is not None:
        ranked["BAGUA_RT_NCCL"] = str(_unpacked(given.nccl, scratch).absolute())
    facts = RankPool(1).run(machine_facts, timeout=_START_S)[0]
    of_ranks = RankPool(1, ranked).run(machine_facts, timeout=_START_S)[0]
    close_crews()
    options = Options(
        out=str(given.out.absolute()),
        devices=facts["devices"],
        nccl_version=facts["nccl_version"],
        most_ranks=1,
        is_small=given.small,
        stand_in=given.stand_in,
        golden=str(given.golden.absolute()) if given.golden else "",
    )
    several = replace(options, nccl_version=of_ranks["nccl_version"], most_ranks=of_ranks["most_ranks"])
    machine = f"{facts['devices']} CUDA device(s)"
    if given.stand_in:
        machine += f", emulated ({given.stand_in}): nothing here says anything about a GPU"
    if given.small:
        machine += "; small sizes: the figures mean nothing"
    reports = []
    for name in given.only:
        run = Run(several if name in OF_SEVERAL_RANKS else options, ranked, ends_at)
        report = run.section(name)
        reports.append(report)
        print(f"{name}: {report.verdict}, {report.seconds:.1f} s")
        print("\n".join(map(str, report.lines)), flush=True)
    return reports, machine, {"single": facts, "several ranks": of_ranks}


def _unpacked(path: Path, scratch: Path) -> Path:
    """The library itself, where it was packed to be carried."""
    if path.suffix != ".xz":
        return path
    target = scratch / path.stem
    with lzma.open(path) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 24)
    return target
