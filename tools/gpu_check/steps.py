"""What a section consists of, and what its steps are given. Imports nothing heavy: the parent has it too.

A section is a module with ``STEPS``; its name has a dot where it isn't one of this package. Each step runs in
a process that earlier steps of its section have used, unless one of them failed: then in a new one.
"""

from __future__ import annotations

import importlib
import math
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tests.ranks import RankContext
from tools.gpu_check.report import Line

if TYPE_CHECKING:
    from bagua_rt.backend import Backend
    from bagua_rt.process_group import ProcessGroup

_TRACE_CHARACTERS = 1500
_shared: dict[str, Any] = {}  # what the steps of a process share: its backend, say


class StandIn(Protocol):
    """What stands in for torch on a GPU where there is none: a module, named by ``--stand-in``."""

    def install(self) -> None:
        """Let ``open_backend("cuda")`` of this process meet something else than torch on a GPU."""
        ...

    def computing(self, backend: Backend) -> AbstractContextManager[object]:
        """Let the body's torch operations run on the backend's compute stream."""
        ...

    def findings(self) -> list[str]:
        """What was noticed since this was last asked, that should not have been."""
        ...


@dataclass(frozen=True)
class Options:
    """What the command line and the machine say, the same in every process.

    Attributes:
        out: Folder of the files that are written.
        devices: Number of CUDA devices.
        nccl_version: Version code of the NCCL that the ranks load; 0 where there is none.
        most_ranks: How many ranks can meet over NCCL.
        is_small: Sizes for a run that is to show that the tool works, not what the device does.
        stand_in: Module that stands in for torch on a GPU; "" on one.
        golden: File of earlier outputs to compare the kernels' with; "" for none.
    """

    out: str
    devices: int = 0
    nccl_version: int = 0
    most_ranks: int = 1
    is_small: bool = False
    stand_in: str = ""
    golden: str = ""


@dataclass(frozen=True)
class Step:
    """A part of a section.

    Attributes:
        name: What the report calls it.
        run: Called on each rank.
        ranks: How many.
        deadline_s: When its processes are ended.
        dies: Exit code with which the last rank is to end.
    """

    name: str
    run: Callable[[Bench], None]
    ranks: int = 1
    deadline_s: float = 20.0
    dies: int | None = None


@dataclass(frozen=True)
class Outline:
    """A step as the parent knows it."""

    name: str
    ranks: int
    deadline_s: float
    dies: int | None


@dataclass
class Bench:
    """What a step works with, on one rank; its lines are the report's."""

    ctx: RankContext
    options: Options
    limit_s: float = math.inf  # until the processes of the step are ended
    lines: list[Line] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.ctx.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the step."""
        return self.ctx.world_size

    @property
    def device(self) -> str:
        """The device of this rank; ranks share devices where there are too few."""
        return f"cuda:{self.rank % max(1, self.options.devices)}"

    def check(self, name: str, held: bool, detail: str = "", **data: Any) -> None:
        """Report whether something holds."""
        self.lines.append(Line(name, "ok" if held else "FAILED", detail, data))

    def skip(self, name: str, why: str) -> None:
        """Report what was not looked at."""
        self.lines.append(Line(name, "skipped", why))

    def figure(self, name: str, detail: str, **data: Any) -> None:
        """Report a measurement."""
        self.lines.append(Line(name, "figure", detail, data))

    def share(self, key: str, make: Callable[[], Any]) -> Any:
        """What earlier steps of this process have made under this key, or else `make` makes now."""
        if key not in _shared:
            _shared[key] = make()
        return _shared[key]

    def prepare(self) -> StandIn | None:
        """Put the stand-in in place, if there is one."""
        name = self.options.stand_in
        if not name:
            return None
        stand_in: StandIn = self.share("stand-in", lambda: importlib.import_module(name))
        stand_in.install()
        return stand_in

    def backend(self) -> Backend:
        """The CUDA backend on this rank's device; one for all steps of a process."""
        self.prepare()

        def make() -> Backend:
            from bagua_rt.backends import open_backend
            from bagua_rt.config import RuntimeConfig

            config = RuntimeConfig.from_environment()
            return open_backend(self.device, timeout_s=20.0, config=config, local_rank=self.rank)

        backend: Backend = self.share("backend", make)
        return backend

    def computing(self, backend: Backend) -> AbstractContextManager[object]:
        """Let the body's torch operations run on the compute stream: they do, on a GPU."""
        stand_in = self.prepare()
        return nullcontext() if stand_in is None else stand_in.computing(backend)

    def group(self, **options: Any) -> ProcessGroup:
        """The group of all ranks of the step."""
        import bagua_rt as bagua

        self.prepare()
        if self.world_size > 1:
            options = {"store": self.ctx.store(), "rank": self.rank, "world_size": self.world_size} | options
        return bagua.init(self.device, **{"timeout_s": 20.0, **options})


def _module(section: str) -> Any:
    return importlib.import_module(section if "." in section else f"tools.gpu_check.{section}")


def step_outlines(_: RankContext, section: str) -> list[Outline]:
    """The steps of a section; runs where its imports may fail."""
    return [Outline(step.name, step.ranks, step.deadline_s, step.dies) for step in _module(section).STEPS]


def run_step(
    ctx: RankContext, section: str, index: int, options: Options, limit_s: float
) -> tuple[list[Line], bool]:
    """Run one step on this rank.

    Returns:
        Its lines, and whether it ended by itself: what comes next needs a new process if not.
    """
    step: Step = _module(section).STEPS[index]
    bench = Bench(ctx, options, limit_s)
    ended = False
    try:
        step.run(bench)
        ended = True
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        bench.check(step.name, False, f"{type(error).__name__}: {error}", trace=text[-_TRACE_CHARACTERS:])
    stand_in = bench.prepare()
    for finding in [] if stand_in is None else stand_in.findings():
        bench.check(step.name, False, f"the emulator reports {finding}")
    return bench.lines, ended
