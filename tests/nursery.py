"""Processes that start at once: each is forked from one that has imported torch.

A test process costs two seconds of imports; forked from a nursery, a few milliseconds. What is set at exec()
alone, such as LD_LIBRARY_PATH, needs a nursery of its own. A child runs its program as ``python -c`` would,
from its first line to the interpreter's end. Where what was imported has started threads, or the CUDA driver,
children are started anew instead.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BOOT = "import sys; from tests.nursery import serve; exec(serve(int(sys.argv[1])))"
_ANEW = "import sys; from tests.nursery import die_with_parent; die_with_parent(); exec(sys.argv.pop(1))"
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES, _MOST_FDS = 1 << 18, 8
_ANSWER_S = 100.0  # the imports, on a loaded machine
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_SET_AT_EXEC = ("LD_LIBRARY_PATH", "LD_PRELOAD")


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Child:
    """A process of a nursery, as `subprocess.Popen` has it.

    Attributes:
        pid: Its id.
        returncode: Its exit code; minus the signal's number where one ended it; None while it runs.
    """

    nursery: Nursery
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self.nursery.ask(("poll", self.pid))
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code, once it has ended. Raises: TimeoutError."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
            time.sleep(0.01)
        return self.returncode  # type: ignore[return-value]

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop it (SIGSTOP); it has stopped when this returns."""
        self.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + _ANSWER_S
        while "State:\tT" not in Path(f"/proc/{self.pid}/status").read_text():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not stopped within {_ANSWER_S:g} s")
            time.sleep(0.001)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """A process that forks others.

    Args:
        env: Its environment.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-u", "-X", "faulthandler", "-c", _BOOT, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=dict(env)
        )
        theirs.close()

    def start(
        self, program: str, args: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int, *fds: int
    ) -> Child:
        """Run a program's text in a new process.

        Args:
            program: The text.
            args: ``sys.argv[1:]``, followed by the numbers that the process has `fds` under.
            env: Its whole environment.
            stdout: File descriptor.
            stderr: File descriptor.
            fds: Further file descriptors.
        """
        pid = self.ask(("start", program, tuple(args), dict(env)), (stdout, stderr, *fds))
        return Child(self, pid)

    def ask(self, request: tuple[Any, ...], fds: Sequence[int] = ()) -> Any:
        """The nursery's answer."""
        socket.send_fds(self._socket, [pickle.dumps(request)], list(fds))
        if not select.select([self._socket], [], [], _ANSWER_S)[0]:
            raise TimeoutError(f"the nursery did not answer {request[0]!r} within {_ANSWER_S:g} s")
        return pickle.loads(self._socket.recv(_MESSAGE_BYTES))

    def close(self) -> None:
        """End it, and with it what still runs of its children."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


_nurseries: dict[tuple[str, ...], Nursery] = {}


def nursery(env: Mapping[str, str]) -> Nursery:
    """The session's nursery for processes with this environment."""
    key = tuple(env.get(name, "") for name in _SET_AT_EXEC)
    if key not in _nurseries:
        _nurseries[key] = Nursery(env)
    return _nurseries[key]


def close_nurseries() -> None:
    """End all of them; for the end of the session."""
    while _nurseries:
        _nurseries.popitem()[1].close()


# ---- in the nursery


def serve(fd: int) -> Any:
    """Answer until the socket ends. Returns in a child only: with its program, compiled."""
    die_with_parent()
    import gc

    # Imported for its children; their first optimizer imports torch._dynamo, which takes as long as torch.
    import torch._dynamo  # noqa: F401

    import bagua_rt  # noqa: F401

    gc.collect()
    gc.freeze()
    may_fork = len(list(Path("/proc/self/task").iterdir())) == 1 and not has_met_cuda()
    connection = socket.socket(fileno=fd)
    while True:
        data, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _MOST_FDS)
        if not data:
            os._exit(0)
        what, *details = pickle.loads(data)
        if what == "poll":
            answer = _poll(details[0])
        else:
            answer = os.fork() if may_fork else _start_anew(fds, *details)
            if answer == 0:
                connection.close()
                return _become(fds, *details)
            for each in fds:
                os.close(each)
        connection.send(pickle.dumps(answer))


def has_met_cuda() -> bool:
    """Is the CUDA driver initialised in this process? In a fork of it, it would not work."""
    if "libcuda.so" not in Path("/proc/self/maps").read_text():
        return False
    count = ctypes.c_int()
    return bool(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)


_anew: dict[int, subprocess.Popen[bytes]] = {}


def _start_anew(fds: list[int], program: str, args: tuple[str, ...], env: dict[str, str]) -> int:
    stdout, stderr, *others = fds
    command = [sys.executable, "-u", "-X", "faulthandler", "-c", _ANEW, program, *args, *map(str, others)]
    child = subprocess.Popen(command, stdout=stdout, stderr=stderr, pass_fds=others, env=env)
    _anew[child.pid] = child
    return child.pid


def _poll(pid: int) -> int | None:
    if pid in _anew:
        return _anew[pid].poll()
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(fds: list[int], program: str, args: tuple[str, ...], env: dict[str, str]) -> Any:
    die_with_parent()
    stdout, stderr, *others = fds
    for received, own in ((stdout, 1), (stderr, 2)):
        os.dup2(received, own)
        os.close(received)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = ["-c", *args, *map(str, others)]
    main = vars(sys.modules["__main__"])
    del main["serve"], main["sys"]
    return compile(program, "<string>", "exec")
