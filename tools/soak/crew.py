"""The processes of a soak's ranks: forked from one that has imported torch, fed with orders through pipes."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import struct
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from tests.nursery import nursery
from tests.ranks import rank_environment
from tools.soak.trainee import Answer, Order, Trainee, follow

_PROGRAM = "import sys; from tools.soak.crew import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"


class Worker:
    """One rank's process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        orders, self._orders = os.pipe()
        self.answers, answers = os.pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        output = self._output.fileno()
        env = rank_environment(environment)
        self.process = nursery(env).start(_PROGRAM, [], env, output, output, orders, answers)
        os.close(orders)
        os.close(answers)

    def order(self, order: Order) -> None:
        """Give it something to do."""
        data = pickle.dumps(order)
        os.write(self._orders, struct.pack("<Q", len(data)) + data)

    def hear(self) -> str | Answer | None:
        """What it says next; None if it has ended. Blocks: ask `select` before."""
        data = _read(self.answers)
        return None if data is None else pickle.loads(data)

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
        os.close(self._orders)
        os.close(self.answers)
        self._output.close()


def heard(workers: Mapping[int, Worker], timeout_s: float) -> list[tuple[int, str | Answer | None]]:
    """What some of the workers say, within a time."""
    of = {worker.answers: number for number, worker in workers.items()}
    ready = select.select(list(of), [], [], max(0.0, timeout_s))[0] if of else []
    return [(of[fd], workers[of[fd]].hear()) for fd in ready]


def _read(fd: int) -> bytes | None:
    def exactly(count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = os.read(fd, count - len(parts))
            if not part:
                return None
            parts += part
        return bytes(parts)

    head = exactly(8)
    return None if head is None else exactly(struct.unpack("<Q", head)[0])


def serve(orders: int, answers: int) -> None:
    """Follow orders until there are none. The life of a worker."""
    import torch

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)

    def say(what: Any) -> None:
        data = pickle.dumps(what)
        os.write(answers, struct.pack("<Q", len(data)) + data)

    trainee: Trainee | None = None
    while (data := _read(orders)) is not None:
        trainee, answer = follow(pickle.loads(data), trainee, say)
        say(answer)
    os._exit(0)
