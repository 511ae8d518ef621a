"""The kernels of ``kernels/``, compiled by NVRTC for one device and kept on disk.

A kernel's text is put together here: which element types, then ``prelude.cuh``, then the operation's file.
`KernelCache` compiles it through cuda.core's ``Program`` when it is first asked for, and keeps the result
under the hash of everything that it depends on. Nothing here is imported, and no CUDA library is looked
for, before that first call.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from bagua_rt.errors import BackendUnavailableError, NvrtcError, UsageError

_log = logging.getLogger(__name__)

# Names of the element types in prelude.cuh, by torch's names.
ELEMENTS = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32", "float64": "Float64"}

_PAIR = ("SRC", "DST")
_ONE = ("DTYPE",)
# Every operation, with the macros that choose its element types.
OPERATIONS = {
    "copy_in": _PAIR,
    "copy_out": _PAIR,
    "minmax_encode": _ONE,
    "minmax_decode": _ONE,
    "minmax_decode_mean": _ONE,
    "sign_encode": _ONE,
    "sign_decode": _ONE,
    "sign_decode_mean": _ONE,
    "mean_rows": _ONE,
    "ring_difference": _ONE,
    "add_difference": _ONE,
}

# -default-device: a generic lambda in a kernel counts as host code otherwise.
_OPTIONS = "-std=c++17 -default-device"
_MAGIC = b"bagua_rt kernel 1\n"
# cuda.core puts another module in its own place while it is imported: two threads at once leave it broken.
_import_lock = threading.Lock()


@dataclass(frozen=True)
class Variant:
    """An operation for particular element types.

    Attributes:
        operation: Its file in ``kernels/``, without the suffix.
        elements: Names of prelude.cuh's element types, one for each of the operation's macros.
    """

    operation: str
    elements: tuple[str, ...]

    @classmethod
    def of(cls, operation: str, *dtypes: str) -> Variant:
        """The variant for torch dtypes given by name (``"bfloat16"``).

        Raises:
            UsageError: there is no such operation, or it can't carry a dtype.
        """
        macros = OPERATIONS.get(operation)
        if macros is None or len(macros) != len(dtypes) or not set(dtypes) <= ELEMENTS.keys():
            raise UsageError(
                f"no kernel {operation} for {', '.join(dtypes) or 'no dtype'}",
                expected=f"one of {', '.join(OPERATIONS)}, for {', '.join(ELEMENTS)}",
                fix="the two copies take two dtypes, source and target; all others one",
            )
        return cls(operation, tuple(ELEMENTS[dtype] for dtype in dtypes))

    def entry(self, operation: str = "") -> str:
        """The kernel's name; `operation` where the file's kernel of another name is meant."""
        return "_".join((operation or self.operation, *self.elements))

    def source(self, folder: Path | None = None) -> str:
        """The whole text that is compiled: it needs nothing else (also the emulator's g++ takes it).

        Raises:
            BackendUnavailableError: the kernels are not where they should be.
        """
        folder = folder or kernels_folder()
        macros = zip(OPERATIONS[self.operation], self.elements, strict=True)
        parts = [f"#define {macro} {element}\n" for macro, element in macros]
        for file in ("prelude.cuh", f"{self.operation}.cu"):
            parts += [f'#line 1 "{file}"\n', (folder / file).read_text(encoding="utf-8")]
        return "".join(parts)


def variants() -> Iterator[Variant]:
    """Every operation for every choice of element types."""
    for operation, macros in OPERATIONS.items():
        for elements in itertools.product(ELEMENTS.values(), repeat=len(macros)):
            yield Variant(operation, elements)


@dataclass(frozen=True)
class Target:
    """What to compile for.

    Attributes:
        architecture: As NVRTC names it: ``sm_90`` for machine code, ``compute_90`` for PTX.
        code_type: ``cubin``, or ``ptx`` where the driver has to finish the work.
    """

    architecture: str
    code_type: Literal["cubin", "ptx"] = "cubin"


def kernels_folder() -> Path:
    """Where the kernels' sources lie: in the package (a wheel) or at the top of the repository.

    Raises:
        BackendUnavailableError: they are in neither place.
    """
    here = Path(__file__).resolve()
    places = [here.parents[1] / "kernels", here.parents[3] / "kernels"]
    for place in places:
        if (place / "prelude.cuh").is_file():
            return place
    raise BackendUnavailableError(
        "the CUDA kernels' sources are missing",
        expected="prelude.cuh in " + " or ".join(map(str, places)),
        fix="install bagua-rt again",
    )


def target_for(capability: tuple[int, int], known: Sequence[int] | None = None) -> Target:
    """What to compile for a device of this compute capability.

    Machine code runs on its own major version, from its minor version on. So that is taken where NVRTC
    knows a member of the family; a device newer than all that it knows gets PTX of the newest.

    Args:
        capability: Major and minor version, (9, 0) for an H200.
        known: The architectures that NVRTC knows, as 90 for 9.0; None asks the library.

    Raises:
        BackendUnavailableError: NVRTC is missing, or the device is older than all that it knows.
    """
    known = _supported_architectures() if known is None else known
    wanted = capability[0] * 10 + capability[1]
    older = [architecture for architecture in sorted(known) if architecture <= wanted]
    if not older:
        raise BackendUnavailableError(
            f"NVRTC can't compile for a device of compute capability {capability[0]}.{capability[1]}",
            expected=f"{min(known, default=0) / 10:.1f} or newer",
            fix="install an NVRTC that knows the device (for old ones: CUDA 12)",
        )
    if older[-1] // 10 == capability[0]:
        return Target(f"sm_{older[-1]}")
    return Target(f"compute_{older[-1]}", "ptx")


class KernelCache:
    """Compiled kernels of one target: in memory, then on disk, then from NVRTC. Threads may share it."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self._folder = folder
        self._kernels: dict[tuple[Variant, str], Any] = {}
        self._lock = threading.Lock()

    def kernel(self, variant: Variant, operation: str = "") -> Any:
        """The cuda.core kernel, ready to launch on the current device.

        Args:
            variant: The operation and its element types.
            operation: The kernel's name, without element types, where the file holds several.

        Raises:
            NvrtcError: the kernel does not compile.
            BackendUnavailableError: cuda.core or NVRTC is missing.
        """
        with self._lock:
            kernel = self._kernels.get((variant, operation))
            if kernel is None:
                object_code = _cuda("core").ObjectCode
                load = object_code.from_cubin if self.target.code_type == "cubin" else object_code.from_ptx
                kernel = load(self.binary(variant)).get_kernel(variant.entry(operation))
                self._kernels[variant, operation] = kernel
            return kernel

    def binary(self, variant: Variant) -> bytes:
        """The compiled code: from disk, or compiled now and put there.

        An entry that is damaged, or can't be read, is compiled again. A cache that can't be written costs
        a warning in the log, and a compilation in the next process.

        Raises:
            NvrtcError: the kernel does not compile.
            BackendUnavailableError: cuda.core or NVRTC is missing.
        """
        source = variant.source()
        key = f"{source}\0{_OPTIONS}\0{nvrtc_version()}"  # the name says the rest
        digest = hashlib.sha256(key.encode()).hexdigest()[:24]
        name = f"{variant.entry()}-{self.target.architecture}-{digest}.{self.target.code_type}"
        path = self._folder / name
        code = _read_entry(path)
        if code is None:
            code = compile_source(source, f"{variant.operation}.cu", self.target)
            _write_entry(path, code)
        return code


def compile_source(source: str, name: str, target: Target) -> bytes:
    """Compile CUDA C, without the cache. Needs NVRTC, but for machine code no device and no driver.

    Raises:
        NvrtcError: it does not compile; the message holds NVRTC's log and the options.
        BackendUnavailableError: cuda.core or NVRTC is missing.
    """
    core = _cuda("core")
    try:
        options = core.ProgramOptions(
            name=name, arch=target.architecture, std="c++17", device_as_default_execution_space=True
        )
        program = core.Program(source, "c++", options)
        try:
            code = program.compile(target.code_type).code
        finally:
            program.close()
    except Exception as error:  # cuda.core's own type is private; the log is in its text
        raise NvrtcError(
            f"NVRTC {nvrtc_version()} could not compile {name}: {str(error).strip()}",
            got=f"options -arch={target.architecture} {_OPTIONS}, for {target.code_type}",
            fix="report it with this text, the device's name and the driver's version",
        ) from error
    return code.encode() if isinstance(code, str) else bytes(code)


def nvrtc_version() -> str:
    """NVRTC's version, as ``12.9``.

    Raises:
        BackendUnavailableError: cuda.core or NVRTC is missing.
    """
    major, minor = _nvrtc_call("nvrtcVersion")
    return f"{major}.{minor}"


def _supported_architectures() -> list[int]:
    return [int(architecture) for architecture in _nvrtc_call("nvrtcGetSupportedArchs")[0]]


def _nvrtc_call(name: str) -> tuple[Any, ...]:
    nvrtc = _cuda("bindings.nvrtc")
    try:
        status, *results = getattr(nvrtc, name)()
    except RuntimeError as error:  # cuda.pathfinder's DynamicLibNotFoundError
        raise BackendUnavailableError(
            f"the library NVRTC was not found: {error}",
            fix="install bagua-rt[cu12] or bagua-rt[cu13], whichever generation torch is built for",
        ) from error
    if int(status) != 0:
        raise NvrtcError(f"{name} failed", got=str(status))
    return tuple(results)


def _cuda(module: str) -> ModuleType:
    import importlib

    try:
        with _import_lock:
            return importlib.import_module(f"cuda.{module}")
    except ImportError as error:
        raise BackendUnavailableError(
            f"cuda.{module} can't be imported: {error}",
            expected="the packages cuda-core and cuda-bindings",
            fix="install bagua-rt[cu12] or bagua-rt[cu13], whichever generation torch is built for",
        ) from error


def _read_entry(path: Path) -> bytes | None:
    """The code in a cache entry; None where there is none, or not what was once written there."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None  # absent, or unreadable: compiled again, and written anew if that can be done
    digest, code = entry[len(_MAGIC) : len(_MAGIC) + 32], entry[len(_MAGIC) + 32 :]
    if not entry.startswith(_MAGIC) or hashlib.sha256(code).digest() != digest:
        _log.warning("the cached kernel %s is damaged; it is compiled again", path)
        return None
    return code


def _write_entry(path: Path, code: bytes) -> None:
    """Put an entry in place by a rename: processes that compile the same kernel see all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(code).digest() + code)
            Path(temporary).replace(path)  # os.replace: atomic
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        _log.warning("the kernel cache %s can't be written (%s); set BAGUA_RT_CACHE_DIR", path.parent, error)
