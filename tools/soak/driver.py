"""The soak itself: one episode after the other; orders, faults, deadlines and judgement."""

from __future__ import annotations

import argparse
import random
import signal
import socket
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from tests.nursery import close_nurseries
from tools.soak.crew import Worker, heard
from tools.soak.plan import Fault, Plan, draw
from tools.soak.trainee import Answer, Order

SLACK_S = 30.0  # to start, meet and train, beside the deadline
NOTICED_S = 12.0  # how soon after a death the survivors have all raised; their deadline is much later
MOST_CROWDED = 5.0


class WrongError(Exception):
    """A wrong value, a hang, or an error that no fault explains."""


@dataclass
class Totals:
    """What a soak has done."""

    episodes: int = 0
    steps: int = 0
    faults: int = 0
    lives: int = 0
    slowest_s: float = 0.0  # from a death to the last survivor's error


class Soak:
    """Runs episodes.

    Args:
        folder: Where stores of files are made.
        is_loud: Print a line for each episode.
    """

    def __init__(self, folder: Path, *, is_loud: bool) -> None:
        self.totals = Totals()
        self._folder = folder
        self._is_loud = is_loud
        self._workers: list[Worker] = []
        self._meetings = 0
        self._crowding: deque[float] = deque(maxlen=5)

    def stretch(self) -> float:
        """What every time in a plan is to be multiplied by: this machine may have other things to do."""
        self._crowding.append(crowding())
        return min(MOST_CROWDED, max(self._crowding))

    def close(self) -> None:
        """End all processes."""
        while self._workers:
            self._workers.pop().end()

    def episode(self, seed: int) -> None:
        """Run one.

        Raises:
            WrongError: a value was wrong, a rank hung, or an error came that no fault explains.
        """
        plan = draw(seed)
        began = time.monotonic()
        while len(self._workers) < plan.world_size:
            self._workers.append(Worker({"BAGUA_RT_FLIGHT_DIR": str(self._folder / "flight")}))
        crew = self._workers[: plan.world_size]
        for life in range(len(plan.faults) + 1):
            fault = plan.faults[life] if life < len(plan.faults) else None
            answers = _Life(self, plan, life, crew, fault).run()
            self._judge(plan, life, answers)
            crew = [crew[rank] for rank in sorted(answers) if crew[rank] in self._workers]
            if all(answer.kind == "done" for answer in answers.values()) or not crew:
                break
        self.totals.episodes += 1
        if self._is_loud:
            print(f"{seed}: {plan}: {time.monotonic() - began:.1f} s", flush=True)

    def _judge(self, plan: Plan, life: int, answers: dict[int, Answer]) -> None:
        self.totals.lives += 1
        self.totals.steps += max((len(answer.digests) for answer in answers.values()), default=0)
        for rank, answer in answers.items():
            if answer.kind == "wrong":
                raise WrongError(f"rank {rank} of life {life}, step {answer.step}: {answer.text}")
        if not plan.keeps_ranks_equal:
            return
        seen: dict[int, tuple[int, str]] = {}
        for rank, answer in answers.items():
            for step, digest in answer.digests.items():
                first, right = seen.setdefault(step, (rank, digest))
                if digest != right:
                    raise WrongError(f"ranks {first} and {rank} differ after step {step} of life {life}")

    def meeting(self, plan: Plan) -> str | int:
        """Where the ranks of a life meet."""
        self._meetings += 1
        if plan.meets_by == "file":
            return str(self._folder / f"store{self._meetings}")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return int(listener.getsockname()[1])

    def bury(self, worker: Worker) -> None:
        """A worker's process has ended, or is to."""
        if worker in self._workers:
            self._workers.remove(worker)
            worker.end()


class _Life:
    """An episode from one fault to the next."""

    def __init__(self, soak: Soak, plan: Plan, life: int, crew: list[Worker], fault: Fault | None) -> None:
        self._soak = soak
        self._plan = plan
        self._life = life
        self._crew = dict(enumerate(crew))
        self._fault = fault
        self._stretch = soak.stretch()
        self._timeout_s = plan.timeout_s * self._stretch
        self._due: list[tuple[float, int]] = []  # when which signal goes to the victim
        self._died = 0.0
        self._training: set[int] = set()
        self._answers: dict[int, Answer] = {}

    def run(self) -> dict[int, Answer]:
        """The survivors' answers."""
        plan, fault = self._plan, self._fault
        meeting = self._soak.meeting(plan)
        for rank, worker in self._crew.items():
            worker.order(Order(plan, self._life, rank, len(self._crew), meeting, self._timeout_s))
        if fault is not None and fault.kind == "kill early":
            self._due = [(time.monotonic() + fault.after_s, signal.SIGKILL)]
        ends = time.monotonic() + self._timeout_s + (SLACK_S + plan.steps) * self._stretch
        waiting = dict(self._crew)
        while waiting:
            if time.monotonic() > ends:
                raise WrongError(self._stuck(waiting))
            self._send_what_is_due()
            for rank, said in heard(waiting, self._pause_s()):
                self._hear(rank, said, waiting)
            if self._is_stopped() and set(waiting) == {fault.victim if fault else -1}:
                break  # all others have given it up
        if fault is not None and fault.kind == "pause":
            self._crew[fault.victim].signal(signal.SIGCONT)  # it may have answered before it was stopped
        self._check_times()
        return self._answers

    def _pause_s(self) -> float:
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else 0.2

    def _hear(self, rank: int, said: str | Answer | None, waiting: dict[int, Worker]) -> None:
        if isinstance(said, str):
            self._training.add(rank)
            if len(self._training) == len(self._crew):
                self._plan_the_fault()
            return
        del waiting[rank]
        if said is not None:
            self._answers[rank] = said
        elif self._fault is None or rank != self._fault.victim or not self._died:
            raise WrongError(f"rank {rank} of life {self._life} ended by itself\n{self._crew[rank].stacks()}")
        else:
            self._soak.bury(self._crew[rank])

    def _plan_the_fault(self) -> None:
        fault, now = self._fault, time.monotonic()
        if fault is None or fault.kind == "kill early":
            return
        first = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
        self._due = [(now + fault.after_s, first)]
        if fault.kind == "pause":
            self._due.append((now + fault.after_s + fault.for_s, signal.SIGCONT))

    def _send_what_is_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic() and self._fault is not None:
            _, number = self._due.pop(0)
            self._crew[self._fault.victim].signal(number)
            if self._fault.kind != "pause":
                self._died = time.monotonic()
            self._soak.totals.faults += number != signal.SIGCONT

    def _is_stopped(self) -> bool:
        return bool(self._died) and self._fault is not None and self._fault.kind == "stop"

    def _check_times(self) -> None:
        fault = self._fault
        if any(answer.kind == "wrong" for answer in self._answers.values()):
            return  # the others' errors come from that
        failed = [answer for answer in self._answers.values() if answer.kind == "failed"]
        if failed and not self._died:
            raise WrongError("\n".join(["an error that no fault explains", *(a.text for a in failed)]))
        if fault is not None and fault.kind != "pause":
            self._soak.bury(self._crew[fault.victim])  # stopped, or done before it was to die
            self._answers.pop(fault.victim, None)
        if failed and fault is not None:
            ends = sorted(answer.ended for answer in failed)
            late_s, spread_s = ends[-1] - self._died, ends[-1] - ends[0]
            noticed_s = NOTICED_S * self._stretch
            # Ranks that meet have no connections yet that the death would end.
            is_seen = fault.kind == "kill" and not self._plan.reattaches
            allowed_s = noticed_s + (0.0 if is_seen else self._timeout_s)
            self._soak.totals.slowest_s = max(self._soak.totals.slowest_s, late_s)
            if late_s > allowed_s or spread_s > noticed_s:
                texts = [f"the last survivor raised {late_s:.1f} s after the {fault.kind},"]
                texts += [f"{spread_s:.1f} s after the first", *(answer.text for answer in failed)]
                raise WrongError("\n".join(texts))

    def _stuck(self, waiting: dict[int, Worker]) -> str:
        texts = [f"--- rank {rank}\n{worker.stacks()}" for rank, worker in waiting.items()]
        return "\n".join([f"ranks {sorted(waiting)} of life {self._life} hang", *texts])


def crowding() -> float:
    """How many times longer than on a machine of its own this process needs for some work now."""
    began, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.03:
        pass
    return (time.monotonic() - began) / (time.process_time() - used)


def main() -> int:
    """Parse the arguments, run, and say how it went."""
    about = "Random trainings on ranks that are killed, stopped or made to raise; every step is compared."
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long (2)")
    parser.add_argument("--episodes", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--seed", type=int, help="of the first episode; the next has the next number")
    parser.add_argument("--quiet", action="store_true", help="print no line for each episode")
    options = parser.parse_args()
    if options.minutes <= 0 or options.episodes < 1:
        parser.error("--minutes is above 0, and --episodes 1 or more")
    seed = random.SystemRandom().randrange(10**8) if options.seed is None else options.seed
    print(f"soak: seed {seed}, {options.minutes:g} minutes", flush=True)
    ends = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), is_loud=not options.quiet)
        try:
            while time.monotonic() < ends and soak.totals.episodes < options.episodes:
                soak.episode(seed + soak.totals.episodes)
        except WrongError as error:
            failed = seed + soak.totals.episodes
            print(f"FAILED in episode {failed}: {draw(failed)}\n{error}")
            print(f"again: python tools/soak --episodes 1 --seed {failed}")
            return 1
        finally:
            soak.close()
            close_nurseries()
    done = soak.totals
    print(
        f"soak: {done.steps} steps in {done.episodes} episodes, {done.faults} faults in {done.lives} lives, "
        f"the slowest notice took {done.slowest_s:.1f} s; no hang, no wrong value"
    )
    return 0
