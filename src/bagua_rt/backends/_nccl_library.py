"""Find libnccl, load it, and say which one it was.

[Note: NCCL search]
    The order is: the path that the caller names, the path in ``BAGUA_RT_NCCL``, a library that is in the
    process already (torch's), the wheel, the system. The first two are orders, not hints: if that library
    can't be used the search ends there, because a job that silently runs on another NCCL than its
    neighbours hangs or corrupts. The others fall through, and the error lists every place and its reason.
    One in the process goes before the wheel because two copies of NCCL in one process each believe that
    they own the device.

A library that was ordered may have another NCCL beside it, torch's. NCCL's exported functions call one
another by name, so without RTLD_DEEPBIND the one that was ordered would call into the other.

The path that is reported is asked of the loader (``dladdr`` of a function in the library), never what the
search had meant to load.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bagua_rt.config import RuntimeConfig
from bagua_rt.errors import BackendUnavailableError

_SONAME = "libnccl.so.2"
_FILE_NAME = re.compile(r"libnccl\.so(\.\d+)*")  # not libnccl-net.so and the other plugins
_NO_LOAD: int | None = getattr(os, "RTLD_NOLOAD", None)  # absent where dlopen is
_DEEP_BIND: int = getattr(os, "RTLD_DEEPBIND", 0)


def version_text(code: int) -> str:
    """Spell NCCL's version code: 23203 is "2.32.3", and 2804, in the encoding used up to 2.8, is "2.8.4".

    Args:
        code: What ncclGetVersion gives.

    **Source:** ``NCCL_VERSION(X,Y,Z)`` in nccl.h.
    """
    thousands = 1000 if code < 10_000 else 10_000
    major, rest = divmod(code, thousands)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


@dataclass(frozen=True)
class NcclLibrary:
    """A libnccl that is loaded.

    Attributes:
        path: The file, as the loader knows it.
        version: Its version code, as ncclGetVersion gives it.
        origin: The place of the search that it came from.
        cdll: The handle; its calls release the GIL.
    """

    path: Path
    version: int
    origin: str
    cdll: ctypes.CDLL = field(repr=False, compare=False)

    @property
    def version_text(self) -> str:
        """The version as people write it."""
        return version_text(self.version)

    def __str__(self) -> str:
        return f"NCCL {self.version_text} from {self.path} ({self.origin})"

    def lacks(self, what: str, since: int) -> BackendUnavailableError:
        """The error for `what`, which this library is too old for.

        Args:
            what: A function or an option, by NCCL's name.
            since: The version code of the first release that has it.
        """
        return BackendUnavailableError(
            f"{what} needs NCCL >= {version_text(since)}, loaded {self.version_text} from {self.path}",
            fix="install a newer nvidia-nccl wheel, or name a newer library in BAGUA_RT_NCCL",
        )


@dataclass(frozen=True)
class _Place:
    """Somewhere to look: a name for dlopen, or none and the reason why not."""

    origin: str
    name: str | None
    why_not: str = ""
    mode: int = ctypes.DEFAULT_MODE


def find_nccl(path: str | Path | None = None, *, config: RuntimeConfig | None = None) -> NcclLibrary:
    """Load NCCL, from the first place that has it ([Note: NCCL search]).

    Args:
        path: The library to load; no other one is tried then.
        config: Where the path in BAGUA_RT_NCCL comes from; None reads the environment.

    Returns:
        The library, with its path and version.

    Raises:
        BackendUnavailableError: no place has a library that is NCCL; every place is listed, and why.
    """
    if path is None:
        config = RuntimeConfig.from_environment() if config is None else config
        ordered = config.nccl_path
        order = "the path in BAGUA_RT_NCCL"
    else:
        ordered, order = Path(path), "the path given"
    if ordered is not None:
        # Made absolute: dlopen searches for a name without a slash, and might come back with another library.
        places: Iterator[_Place] = iter([_Place(order, str(ordered.absolute()), mode=_DEEP_BIND)])
    else:
        places = _places()
    tried = []
    for place in places:
        loaded = _load(place, exact=ordered is not None)
        if isinstance(loaded, NcclLibrary):
            return loaded
        tried.append(f"{place.origin}: {loaded}")
    if ordered is not None:
        tried.append("no other place was tried, because this one was asked for")
        fix = "name the file of a libnccl.so.2, or name none to have it searched for"
    else:
        fix = "install your torch's nvidia-nccl wheel (cu12 or cu13), or set BAGUA_RT_NCCL to a libnccl.so.2"
    raise BackendUnavailableError("no usable NCCL library", got="; ".join(tried), fix=fix)


def loaded_paths() -> list[Path]:
    """The files of all NCCL libraries in this process, by /proc/self/maps (empty where there is none)."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    paths: dict[Path, None] = {}
    for line in maps.splitlines():
        columns = line.split(maxsplit=5)
        if len(columns) == 6:
            path = Path(columns[5].removesuffix(" (deleted)"))
            if _FILE_NAME.fullmatch(path.name):
                paths[path] = None
    return list(paths)


def _places() -> Iterator[_Place]:
    """The places of an open search, in order; each is looked at only if all before it failed."""
    origin = "already in this process"
    loaded = loaded_paths() if _NO_LOAD is not None else []
    if loaded and _NO_LOAD is not None:
        # By soname first: of several, the loader then answers with the one that it bound others to first.
        for name in (_SONAME, *map(str, loaded)):
            yield _Place(origin, name, mode=_NO_LOAD)
    else:
        yield _Place(origin, None, "none is loaded")

    origin = "the wheel"
    wheels = _wheel_files()
    for file in wheels:
        yield _Place(origin, str(file))
    if not wheels:
        yield _Place(origin, None, "no nvidia-nccl wheel is installed beside this Python")

    for name in (_SONAME, "libnccl.so"):  # dlopen looks in LD_LIBRARY_PATH, then in ldconfig's cache
        yield _Place("the system", name)


def _wheel_files() -> list[Path]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:  # a module of that name was put into sys.modules by hand, without a spec
        return []
    roots = spec.submodule_search_locations if spec is not None else None
    return [file for root in roots or () if (file := Path(root) / "nccl" / "lib" / _SONAME).exists()]


def _load(place: _Place, *, exact: bool) -> NcclLibrary | str:
    """Load what `place` names; returns the reason where it can't be used."""
    if place.name is None:
        return place.why_not
    if exact and not Path(place.name).is_file():
        return f"{place.name}: no such file"
    try:
        cdll = ctypes.CDLL(place.name, mode=place.mode)
    except OSError as error:
        return _without_prefix(place.name, str(error))
    code = ctypes.c_int(0)
    try:
        # ncclResult_t ncclGetVersion(int* version);
        get_version = cdll.ncclGetVersion
    except AttributeError:
        return f"{place.name}: exports no ncclGetVersion, so it is not NCCL"
    get_version.argtypes = [ctypes.POINTER(ctypes.c_int)]
    get_version.restype = ctypes.c_int
    status = get_version(ctypes.byref(code))
    if status != 0 or code.value <= 0:
        return f"{place.name}: ncclGetVersion returned status {status} and version {code.value}"
    path = _file_of(get_version) or Path(place.name)
    if exact and not path.samefile(place.name):
        return f"{place.name}: the loader gave {path} instead"
    return NcclLibrary(path=path, version=code.value, origin=place.origin, cdll=cdll)


def _without_prefix(name: str, reason: str) -> str:
    """`reason`, with `name` before it once: dlopen's own text begins with the file, most of the time."""
    reason = reason.removeprefix(f"{name}: ")
    if "invalid ELF header" in reason or "file too short" in reason:
        reason = f"not a shared library ({reason})"
    return f"{name}: {reason}"


class _DlInfo(ctypes.Structure):
    # typedef struct { const char* dli_fname; void* dli_fbase; const char* dli_sname; void* dli_saddr; }
    #     Dl_info;
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(function: object) -> Path | None:
    """The file that holds a loaded function, asked of the loader."""
    # int dladdr(const void* addr, Dl_info* info);
    dladdr = getattr(ctypes.CDLL(None), "dladdr", None)
    if dladdr is None:
        return None
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    info = _DlInfo()
    found = dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))  # type: ignore[arg-type]
    return Path(os.fsdecode(info.file)) if found and info.file else None
