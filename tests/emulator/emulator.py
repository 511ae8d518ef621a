"""The Python side: build, load, and ask the emulated libraries what they found.

A process that is to run on the emulator either starts with `environment()`, or calls `preload()`
before anything has loaded a libcuda or a libnccl.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import secrets
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from . import build as _build
from .build import BuildError, Built

__all__ = [
    "BuildError",
    "Built",
    "RaceReports",
    "StreamTask",
    "TensorLike",
    "assert_clean",
    "assert_loaded",
    "build",
    "collect_reports",
    "declare_host_access",
    "drain",
    "environment",
    "forget_accesses",
    "preload",
    "race_reports",
    "reports",
    "reset",
    "run_on_stream",
    "unique_id",
    "unknown_functions",
]

LIBRARIES = ("libcuda.so", "libnccl.so")
REPORT_TEXT_BYTES = 2000
READ, WRITE = 0, 1


class TensorLike(Protocol):
    """What a torch tensor offers; enough to know which memory it holds."""

    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...


MemoryRange = tuple[int, int] | TensorLike
"""A pair (pointer, bytes), or a contiguous tensor."""


def build(kernels: Iterable[Path] = ()) -> Built:
    """Builds the libraries and the host versions of the .cu files of some folders (cached)."""
    built = _build.build()
    for folder in kernels:
        _build.build_kernels(folder)
    return built


def environment(
    *,
    ndev: int = 1,
    cc: int = 90,
    kernels: Sequence[Path] = (),
    race: bool = True,
    noop: bool = False,
    delay: tuple[float, int, int] | None = None,
    nccl_version: int | None = None,
    nccl_delay_us: int = 0,
    enqueue_delay_us: int = 0,
    peer_death: Literal["error", "hang"] = "error",
    serial: bool = False,
    multi_rank_gpu: bool = False,
    init_timeout_s: float | None = None,
    host_is_device: bool = False,
    report_dir: Path | None = None,
    quiet: bool = False,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a process that runs on the emulator (README.md explains each setting).

    Args:
        ndev: devices of the emulated machine; CUDA_VISIBLE_DEVICES selects and renumbers them.
        kernels: folders of .cu files whose host versions are built and loaded.
        delay: probability, most microseconds and seed of random delays before operations.
        base: the environment to start from; os.environ if not given.
    """
    built = _build.build()
    start = dict(os.environ if base is None else base)
    env = {k: v for k, v in start.items() if not k.startswith("EMU_") or k == "EMU_CACHE"}
    paths = [str(built.directory), *filter(None, [env.get("LD_LIBRARY_PATH")])]
    env["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(paths))
    env["BAGUA_RT_NCCL"] = str(built.libnccl)
    # cuda.bindings 13 warns about the emulated driver's version, which is a 12.
    env["CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING"] = "1"
    env["EMU_CUDA_NDEV"] = str(ndev)
    env["EMU_CUDA_CC"] = str(cc)
    env["EMU_RACE"] = str(int(race))
    env["EMU_KERNELS"] = ":".join(str(_build.build_kernels(folder)) for folder in kernels)
    env["EMU_NCCL_PEER_DEATH"] = peer_death
    optional: dict[str, object] = {
        "EMU_NOOP": "1" if noop else None,
        "EMU_DELAY": ",".join(map(str, delay)) if delay else None,
        "EMU_NCCL_VERSION": nccl_version,
        "EMU_NCCL_DELAY_US": nccl_delay_us or None,
        "EMU_NCCL_ENQUEUE_DELAY_US": enqueue_delay_us or None,
        "EMU_NCCL_SERIAL": "1" if serial else None,
        "EMU_NCCL_INIT_TIMEOUT": init_timeout_s,
        "EMU_HOST_IS_DEVICE": "1" if host_is_device else None,
        "EMU_REPORT_DIR": report_dir,
        "EMU_QUIET": "1" if quiet else None,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1" if multi_rank_gpu else None,
    }
    for name, value in optional.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = str(value)
    return env


def unique_id() -> bytes:
    """An ncclUniqueId as the emulated ncclGetUniqueId makes it, for a process without a library."""
    return b"EMUNCCL\0" + secrets.token_hex(8).encode() + bytes(128 - 24)


def preload(env: Mapping[str, str] | None = None) -> None:
    """Loads the emulated libraries into this process, and sets its environment.

    Loaders look for a loaded library of the same soname first, so no process has to be started
    anew; LD_LIBRARY_PATH is set for child processes. `env` is what `environment()` returned.
    """
    wanted = dict(environment() if env is None else env)
    directory = _build.build().directory
    for path in _mapped_libraries():
        if path.parent != directory:
            raise RuntimeError(f"{path} was loaded before the emulator could be")
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
    _libcuda()
    assert_loaded()


def assert_loaded() -> None:
    """Fails unless this process has the emulated libcuda and libnccl, and no other."""
    _libcuda()
    mapped = _mapped_libraries()
    directory = _build.build().directory
    foreign = [str(path) for path in mapped if path.parent != directory]
    assert not foreign, f"not the emulator's: {foreign}"
    names = {path.name for path in mapped}
    assert names == {"libcuda.so.1", "libnccl.so.2"}, f"mapped: {sorted(names)}"


def _mapped_libraries() -> set[Path]:
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(LIBRARIES):
            found.add(path)
    return found


# ---- what the emulator found -------------------------------------------------------------------


@dataclass(frozen=True)
class RaceReports:
    """The races found in this process since the last reset."""

    count: int
    texts: list[str]


def drain(timeout_s: float = 30.0) -> bool:
    """Waits until all streams are idle, which the race check does not take for a synchronisation.

    Accesses are checked when operations run. False: some stream is stuck.
    """
    return bool(_libcuda().emu_drain(int(timeout_s * 1000)))


def reports(kind: str | None = None) -> list[str]:
    """What was found so far: kind "race", "unknown", "kernel", "memory", "mismatch", "callback"."""
    lib = _libcuda()
    key = None if kind is None else kind.encode()
    buffer = ctypes.create_string_buffer(REPORT_TEXT_BYTES)

    def text(index: int) -> str:
        lib.emu_report_get(key, index, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    return [text(index) for index in range(lib.emu_report_count(key))]


def race_reports(timeout_s: float = 30.0) -> RaceReports:
    """The races, once all streams are idle."""
    drain(timeout_s)
    texts = reports("race")
    return RaceReports(len(texts), texts)


def unknown_functions() -> list[str]:
    """Functions that were called and are not emulated; a run with any proves nothing."""
    return reports("unknown")


def assert_clean(timeout_s: float = 30.0) -> None:
    """Fails if a stream is stuck or anything at all was reported."""
    assert drain(timeout_s), "a stream is stuck"
    found = reports()
    assert not found, "the emulator reports:\n" + "\n".join(found)


def reset() -> None:
    """Forgets reports, the history of accesses and sticky errors (drains the streams first)."""
    drain()
    _libcuda().emu_reset()


def collect_reports(report_dir: Path) -> dict[int, list[str]]:
    """The reports of all processes that ran with this `report_dir`, by process id."""
    files = [file for file in report_dir.iterdir() if file.name.isdigit()]
    return {
        int(file.name): [line.replace("\t", ": ", 1) for line in file.read_text().splitlines()]
        for file in files
    }


# ---- what tests declare ------------------------------------------------------------------------


class _Range(ctypes.Structure):
    _fields_ = (("ptr", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("access", ctypes.c_int))


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass
class StreamTask:
    """A Python function on an emulated stream; see `run_on_stream`."""

    function: Callable[[], object]
    label: str
    done: bool = False
    exception: BaseException | None = None


_tasks: dict[int, StreamTask] = {}
_task_ids = itertools.count(1)


def _run_task(key: int) -> None:
    task = _tasks.pop(key)
    try:
        task.function()
    except BaseException as error:
        task.exception = error
        text = "".join(traceback.format_exception(error))
        _libcuda().emu_report(b"callback", f"'{task.label}' raised:\n{text}".encode())
    task.done = True


_run_task_callback = _Callback(_run_task)


def declare_host_access(pointer: int, size_bytes: int, write: bool, label: str = "host") -> None:
    """Tells the race check that the host reads or writes this memory now."""
    _libcuda().emu_host_access(pointer, size_bytes, WRITE if write else READ, label.encode())


def forget_accesses(pointer: int, size_bytes: int) -> None:
    """Tells the race check that this memory was allocated anew: what it held before is no conflict."""
    _libcuda().emu_race_forget(pointer, size_bytes)


def run_on_stream(
    stream_handle: int,
    fn: Callable[[], object],
    reads: Iterable[MemoryRange] = (),
    writes: Iterable[MemoryRange] = (),
    label: str = "callback",
) -> StreamTask:
    """Enqueues a Python function (torch operations on CPU tensors, say) on an emulated stream.

    The memory that it reads and writes is declared to the race check. An exception is kept in the
    task and reported, kind "callback".
    """
    ranges = [_Range(*_pointer_and_bytes(r), READ) for r in reads]
    ranges += [_Range(*_pointer_and_bytes(r), WRITE) for r in writes]
    key = next(_task_ids)
    task = _tasks[key] = StreamTask(fn, label)
    array = (_Range * len(ranges))(*ranges)
    error = _libcuda().emu_enqueue(
        int(stream_handle), label.encode(), _run_task_callback, key, array, len(ranges)
    )
    if error:
        del _tasks[key]
        raise RuntimeError(f"emu_enqueue returned CUresult {error}: not a stream?")
    return task


def _pointer_and_bytes(memory: MemoryRange) -> tuple[int, int]:
    if isinstance(memory, tuple):
        return memory
    return memory.data_ptr(), memory.numel() * memory.element_size()


# ---- the libraries themselves ------------------------------------------------------------------

_loaded: ctypes.CDLL | None = None


def _libcuda() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        built = _build.build()
        lib = ctypes.CDLL(str(built.libcuda), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(built.libnccl), mode=ctypes.RTLD_GLOBAL)
        lib.emu_drain.argtypes = [ctypes.c_int]
        lib.emu_report.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        lib.emu_report_count.argtypes = [ctypes.c_char_p]
        lib.emu_report_count.restype = ctypes.c_long
        lib.emu_report_get.argtypes = [
            *(ctypes.c_char_p, ctypes.c_long),
            *(ctypes.c_char_p, ctypes.c_size_t),
        ]
        lib.emu_host_access.argtypes = [
            *(ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_int, ctypes.c_char_p),
        ]
        lib.emu_race_forget.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        lib.emu_enqueue.argtypes = [
            *(ctypes.c_void_p, ctypes.c_char_p, _Callback, ctypes.c_void_p),
            *(ctypes.POINTER(_Range), ctypes.c_int),
        ]
        # A task that is still queued must not enter Python while the interpreter goes away.
        atexit.register(lib.emu_drain, 1000)
        _loaded = lib
    return _loaded
