"""The processes of a soak's ranks: forked from one that has imported torch, fed with orders through pipes."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

from tests.nursery import nursery
from tests.ranks import rank_environment
from tools.soak.trainee import Answer, Order, Trainee, follow

_PROGRAM = "import sys; from tools.soak.crew import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"


class Worker:
    """One rank's process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        orders, self._orders = Pipe(duplex=False)
        self.answers, answers = Pipe(duplex=False)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        output = self._output.fileno()
        env = rank_environment(environment)
        pipes = orders.fileno(), answers.fileno()
        self.process = nursery(env).start(_PROGRAM, [], env, output, output, *pipes)
        orders.close()
        answers.close()

    def order(self, order: Order) -> None:
        """Give it something to do."""
        self._orders.send_bytes(pickle.dumps(order))

    def hear(self) -> str | Answer | None:
        """What it says next; None if it has ended. Blocks: ask `select` before."""
        said: str | Answer | None = _heard(self.answers)
        return said

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self.process.send_signal(number)

    def stacks(self) -> str:
        """What it has printed, and where its threads are."""
        self.signal(signal.SIGUSR1)
        time.sleep(0.3)
        self._output.seek(0)
        return self._output.read().decode(errors="replace")[-6000:]

    def end(self) -> None:
        """End it at once."""
        self.process.kill()
        self._orders.close()
        self.answers.close()
        self._output.close()


def heard(workers: Mapping[int, Worker], timeout_s: float) -> list[tuple[int, str | Answer | None]]:
    """What some of the workers say, within a time."""
    of = {worker.answers: number for number, worker in workers.items()}
    ready = select.select(list(of), [], [], max(0.0, timeout_s))[0] if of else []
    return [(of[answered], workers[of[answered]].hear()) for answered in ready]


def _heard(pipe: Connection) -> Any:
    """What comes next; None at the end."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):  # the end; OSError: within a message
        return None


def serve(orders: int, answers: int) -> None:
    """Follow orders until there are none. The life of a worker."""
    import torch

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)

    heard_from, told_to = Connection(orders, writable=False), Connection(answers, readable=False)

    def say(what: Any) -> None:
        told_to.send_bytes(pickle.dumps(what))

    trainee: Trainee | None = None
    while (order := _heard(heard_from)) is not None:
        trainee, answer = follow(order, trainee, say)
        say(answer)
    os._exit(0)
