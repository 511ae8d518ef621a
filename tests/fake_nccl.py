"""Build fake_nccl.c and talk to it: a libnccl that writes down every call."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from bagua_rt.backends._nccl import Nccl
from bagua_rt.backends._nccl_comm import NcclComm

COMM = 0xC0FFEE0000  # the handle that the fake gives
CHILD = 0xC41D0000  # the one that its split and shrink give
UNIQUE_ID = bytes(i if i % 7 else 0 for i in range(128))


def build(folder: Path, *defines: str, soname: str = "libnccl.so.2") -> Path:
    """Compile a fake of its own into `folder`; the defines are fake_nccl.c's."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnccl.so.2"
    source = Path(__file__).with_suffix(".c")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    flags += [f"-Wl,-soname,{soname}"] if soname else []
    command = ["gcc", *flags, *(f"-D{each}" for each in defines), "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library


class Fake:
    """A loaded fake, and what it has written down."""

    def __init__(self, path: Path) -> None:
        self.nccl = Nccl(path)
        self._c = self.nccl.library.cdll
        self._c.fake_calls.restype = ctypes.c_char_p

    def reset(self) -> None:
        """Forget the calls and what was told by `answer` and `block`."""
        self._c.fake_reset()

    def calls(self) -> list[str]:
        """The calls so far, a line each: name and arguments in decimal."""
        text: bytes = self._c.fake_calls()
        return text.decode().splitlines()

    def answer(self, status: int, polls: int = 0, final: int = 0) -> None:
        """The next call answers `status`; then `polls` polls say in progress, and all later ones `final`."""
        self._c.fake_answer(status, polls, final)

    def block(self, milliseconds: int) -> None:
        """The next call stays inside the library for so long."""
        self._c.fake_block(milliseconds)

    @property
    def inside(self) -> bool:
        """Is a call inside the library now?"""
        return bool(self._c.fake_inside())

    @property
    def submitted(self) -> int:
        """Number of operations that really were launched."""
        return int(self._c.fake_submitted())

    def comm(self, *, blocking: bool = False, nranks: int = 5, rank: int = 2) -> NcclComm:
        """A ready communicator, the calls of its making forgotten."""
        comm = self.nccl.init_rank(nranks, UNIQUE_ID, rank, timeout_s=5, blocking=blocking)
        self.reset()
        return comm
