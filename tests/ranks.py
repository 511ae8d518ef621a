"""Rank processes for multi-rank tests: spawned once per session, fed with functions, always reaped.

A rank is a process that reads pickled calls from a pipe. It dies with its parent (PR_SET_PDEATHSIG and
the end of the pipe), so neither a failing test nor a killed pytest leaves one behind. Use it so::

    def average(ctx: RankContext, value: float) -> float: ...  # runs on a rank

    def test_average(): assert RankPool(2).run(average, 1.0) == [1.0, 1.0]
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import itertools
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from tests.nursery import Child, die_with_parent, nursery

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"
# A rank knows this file by the name that the tests know it by, so that the classes here are the same ones.
_BOOT = """
import importlib.util, sys
name, path, calls, answers = sys.argv[1:]
spec = importlib.util.spec_from_file_location(name, path)
sys.modules[name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.serve(int(calls), int(answers))
"""
_START_S = 100.0


class RankFailedError(Exception):
    """One rank or more failed; the text holds every rank's traceback or exit code."""


class RankDiedError(Exception):
    """A rank's process ended during a call.

    Attributes:
        exit_code: Its exit code; minus the signal's number where a signal ended it.
    """

    def __init__(self, rank: int, exit_code: int | None, output: str = "") -> None:
        super().__init__(f"rank {rank} ended with exit code {exit_code}" + (f"\n{output}" if output else ""))
        self.exit_code = exit_code


@dataclass
class RankContext:
    """What a function that runs on a rank is given first.

    Attributes:
        rank: This rank.
        world_size: Number of ranks of this run.
        run: The number of this run, the same on every rank.
        folder: A folder that the ranks share.
    """

    rank: int
    world_size: int
    run: int
    folder: str
    _stores: dict[str, Any] = field(default_factory=dict, repr=False)

    def store(self, name: str = "main", world_size: int | None = None) -> Any:
        """A store that no other run uses: a file of its own for each name."""
        if name not in self._stores:
            import torch.distributed as dist

            path = Path(self.folder) / f"store-{self.run}-{name}"
            self._stores[name] = dist.FileStore(str(path), world_size or self.world_size)
        return self._stores[name]


@dataclass
class _Rank:
    process: Child
    calls: Connection
    answers: Connection
    output: IO[bytes]
    loaded: set[str] = field(default_factory=set)  # modules that it has imported

    def text(self) -> str:
        """What the rank has printed since it started; the last 8,000 characters."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-8000:]


class _Crew:
    """Rank processes that all pools with one environment share; started when first needed."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self.runs = itertools.count()
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.members: list[_Rank] = []

    def of(self, size: int) -> list[_Rank]:
        """The first `size` ranks, all alive."""
        if any(member.process.poll() is not None for member in self.members):
            self.kill()
        self.members += [_start(self.env) for _ in range(size - len(self.members))]
        return self.members[:size]

    def kill(self) -> None:
        """End all ranks; the next call has new ones."""
        for member in self.members:
            member.process.kill()
            member.process.wait(10.0)
            member.calls.close()
            member.answers.close()
            member.output.close()
        self.members = []

    def close(self) -> None:
        """End the ranks, and remove what they shared."""
        for member in self.members:
            member.calls.close()
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and any(m.process.poll() is None for m in self.members):
            time.sleep(0.01)
        self.kill()
        self.folder.cleanup()


_crews: dict[frozenset[tuple[str, str]], _Crew] = {}


def close_crews() -> None:
    """End every rank of every pool; for the end of the session."""
    while _crews:
        _crews.popitem()[1].close()


class RankPool:
    """`world_size` rank processes that run functions of a test module.

    Pools with the same environment share their processes, since to start one costs more than most tests do:
    a world of two is the first two of a world of three.

    Args:
        world_size: How many.
        env: Variables set in the ranks, beside the inherited ones.
    """

    def __init__(self, world_size: int, env: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        key = frozenset((env or {}).items())
        self._env = dict(env or {})
        self._crew = _crews.get(key) or _crews.setdefault(key, _Crew(self._env))

    def first(self, world_size: int) -> RankPool:
        """A pool of the first `world_size` of these ranks."""
        return RankPool(world_size, self._env)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 30.0,
        expect_errors: bool = False,
    ) -> list[Any]:
        """Call ``fn(ctx, *args)`` on every rank.

        Args:
            fn: A module-level function.
            timeout: Seconds until all stacks are dumped and the ranks are killed; the next run has new ones.
            expect_errors: Return exceptions instead of raising them; `RankDiedError` for a rank that ended.

        Returns:
            Each rank's result.

        Raises:
            RankFailedError: a rank raised or died.
            TimeoutError: a rank did not answer; the text holds every rank's stacks.
        """
        members = self._crew.of(self.world_size)
        name = fn.__qualname__
        if any(fn.__module__ not in member.loaded for member in members):
            # A loaded machine may import slowly: not the test's time.
            self._call(members, fn.__module__, "", ())
            self._collect(members, max(timeout, _START_S))
            for member in members:
                member.loaded.add(fn.__module__)
        self._call(members, fn.__module__, name, args)
        answers = self._collect(members, timeout)
        if any(isinstance(a, RankDiedError) for a in answers):
            self._crew.kill()  # the others may be stuck with the dead one: the next run starts new ranks
        failed = [a for a in answers if isinstance(a, RankDiedError | _Raised)]
        if failed and not expect_errors:
            texts = [
                f"--- rank {r}\n{a}" for r, a in enumerate(answers) if isinstance(a, RankDiedError | _Raised)
            ]
            raise RankFailedError(
                "\n".join([f"{name} failed on {len(failed)} of {self.world_size} ranks", *texts])
            )
        return [a.error if isinstance(a, _Raised) else a for a in answers]

    def _call(self, members: Sequence[_Rank], module: str, name: str, args: tuple[Any, ...]) -> None:
        number = next(self._crew.runs)
        path = getattr(sys.modules.get(module), "__file__", None)
        for rank, member in enumerate(members):
            context = RankContext(rank, self.world_size, number, self._crew.folder.name)
            with contextlib.suppress(BrokenPipeError):  # a dead rank is found by its missing answer
                member.calls.send_bytes(pickle.dumps((module, path, name, context, args)))

    def _collect(self, members: Sequence[_Rank], timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        waiting = {member.answers: rank for rank, member in enumerate(members)}
        dead_since: float | None = None
        while waiting:
            left = deadline - time.monotonic()
            if dead_since is not None:
                left = min(left, dead_since + max(5.0, timeout / 2) - time.monotonic())
            if left <= 0:
                raise self._timed_out(members, timeout, sorted(waiting.values()))
            for answered in select.select(list(waiting), [], [], left)[0]:
                rank = waiting.pop(answered)
                answers[rank] = _answer(members[rank], rank)
                if isinstance(answers[rank], RankDiedError):
                    dead_since = time.monotonic()
        return [answers[rank] for rank in range(self.world_size)]

    def _timed_out(self, members: Sequence[_Rank], timeout: float, late: list[int]) -> TimeoutError:
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                member.process.send_signal(signal.SIGUSR1)  # faulthandler writes all stacks
        time.sleep(0.3)
        texts = [f"--- rank {rank}\n{member.text()}" for rank, member in enumerate(members)]
        self._crew.kill()
        return TimeoutError("\n".join([f"ranks {late} did not answer within {timeout:g} s", *texts]))


def _answer(member: _Rank, rank: int) -> Any:
    try:
        return pickle.loads(member.answers.recv_bytes())
    except (EOFError, OSError):  # the end; OSError: within an answer
        return RankDiedError(rank, member.process.wait(10), member.text())


def _start(env: Mapping[str, str]) -> _Rank:
    theirs, calls = Pipe(duplex=False)
    answers, their_answers = Pipe(duplex=False)
    output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the rank
    whole = rank_environment(env)
    files = (output.fileno(), output.fileno(), theirs.fileno(), their_answers.fileno())
    process = nursery(whole).start(_BOOT, [__name__, __file__], whole, *files)
    theirs.close()
    their_answers.close()
    return _Rank(process, calls, answers, output)


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a rank or a script: no launcher's variables, src and tests importable."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in dropped}
    paths = [str(SOURCE), str(TESTS.parent), str(TESTS.parent / "examples"), env.get("PYTHONPATH", "")]
    env.update(PYTHONPATH=os.pathsep.join(p for p in paths if p), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    env.update(extra or {})
    return env


def launched(port: int, ranks: int) -> list[dict[str, str]]:
    """The variables that a launcher gives to each rank on one machine."""
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    return [
        {**job, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    ]


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended.

    Attributes:
        exit_code: Its exit code; minus the signal's number where one ended it; None: killed at the deadline.
        stdout: What it wrote.
        stderr: What it wrote there.
        seconds: How long it ran.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    seconds: float


def run_scripts(
    sources: Sequence[str],
    *,
    timeout: float = 30.0,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    args: Sequence[str] = (),
) -> list[ScriptResult]:
    """Run Python texts as processes side by side and wait for them all.

    Args:
        sources: One program text per process; ``sys.argv[1:]`` is `args`.
        timeout: Seconds until those that still run are killed, each by its pid.
        env: Variables for all, or a mapping per process.
    """
    begin = time.monotonic()
    files = [(tempfile.TemporaryFile(), tempfile.TemporaryFile()) for _ in sources]  # noqa: SIM115
    running: list[Child] = []
    ended: dict[int, float] = {}
    try:
        for index, source in enumerate(sources):
            own = rank_environment(env[index] if isinstance(env, Sequence) else env)
            streams = (file.fileno() for file in files[index])
            running.append(nursery(own).start(source, args, own, *streams))
        while len(ended) < len(running) and time.monotonic() - begin < timeout:
            for index, process in enumerate(running):
                if index not in ended and process.poll() is not None:
                    ended[index] = time.monotonic() - begin
            time.sleep(0.01)
        codes = [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait(10.0)
    return [
        ScriptResult(code, _text(out), _text(err), ended.get(index, timeout))
        for index, (code, (out, err)) in enumerate(zip(codes, files, strict=True))
    ]


def _text(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


@dataclass
class _Raised:
    """An exception of a rank, on its way to the test."""

    error: BaseException
    text: str

    def __str__(self) -> str:
        return self.text


def _load(module: str, path: str | None) -> Any:
    """The module, under the name that the test has it by, wherever pytest found the file."""
    if module not in sys.modules and path is not None:
        spec = importlib.util.spec_from_file_location(module, path)
        if spec is None or spec.loader is None:
            raise ImportError(path)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return importlib.import_module(module)


def _find(found: Any, name: str) -> Callable[..., Any]:
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _call(module: str, path: str | None, name: str, context: RankContext, args: tuple[Any, ...]) -> Any:
    try:
        loaded = _load(module, path)
        if not name:
            return None
        return _find(loaded, name)(context, *args)
    except BaseException as error:  # the test decides what it means
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RankFailedError(f"{type(error).__name__}: {error}")
        return _Raised(error, text)


def serve(calls: int, answers: int) -> None:
    """Run calls until the pipe ends. The life of a rank."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    torch.set_num_threads(1)
    orders, out = Connection(calls, writable=False), Connection(answers, readable=False)
    while True:
        try:
            call = pickle.loads(orders.recv_bytes())
        except EOFError:
            break
        try:
            answer = pickle.dumps(_call(*call))
        except Exception as error:
            failed = RankFailedError(f"the answer can't be pickled: {error}")
            answer = pickle.dumps(_Raised(failed, traceback.format_exc()))
        with contextlib.suppress(BrokenPipeError):  # whoever asked has given up
            out.send_bytes(answer)
    os._exit(0)  # what a test left pending must not hold up the module's end
