"""Builds the emulated libraries and the host versions of kernels, once, into a cache.

Needs g++ and the headers of two wheels: cuda.h (nvidia-cuda-runtime-cu12) and nccl.h
(nvidia-nccl-cu12). What is built is keyed by a hash of everything that goes in, and put in place by
a rename, so that processes may build at the same time and a second run finds everything done.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
LIBCUDA_SOURCES = (
    "cuda_api.cpp",
    "cuda_core.cpp",
    "cuda_kernels.cpp",
    "cuda_memory.cpp",
    "images.cpp",
    "kernel_check.cpp",
    "kernel_rt.cpp",
    "proc_table.cpp",
    "race.cpp",
    "reports.cpp",
)
LIBNCCL_SOURCES = (
    "nccl_api.cpp",
    "nccl_bootstrap.cpp",
    "nccl_manage.cpp",
    "nccl_memory.cpp",
    "nccl_progress.cpp",
    "nccl_reduce.cpp",
)
CXX_FLAGS = ("-std=c++17", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-fvisibility-inlines-hidden")
# No contraction: NVRTC contracts where it likes, so kernels that must be bit-equal say where.
# No scalar replacement: a 16-byte access stays one, and its alignment is checked.
KERNEL_FLAGS = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-w",
    "-nostdinc",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-tree-sra",
    "-fno-exceptions",
    "-fno-threadsafe-statics",
    "-fvisibility=hidden",
    "-fsanitize=thread",
)
JOBS = 2


class BuildError(RuntimeError):
    """The compiler is missing, a header is missing, or the compiler said no (the text says what)."""


@dataclass(frozen=True)
class Built:
    """Where the emulated libraries lie."""

    directory: Path

    @property
    def libcuda(self) -> Path:
        return self.directory / "libcuda.so.1"

    @property
    def libnccl(self) -> Path:
        return self.directory / "libnccl.so.2"


def cache_directory() -> Path:
    """EMU_CACHE, or a folder of this user in the usual cache place."""
    if explicit := os.environ.get("EMU_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bagua_rt_emulator"


def build() -> Built:
    """Builds libcuda.so.1 and libnccl.so.2, or finds them built."""
    sources = [SOURCES / name for name in (*LIBCUDA_SOURCES, *LIBNCCL_SOURCES)]
    includes = [wheel_include("cuda_runtime", "cuda.h"), wheel_include("nccl", "nccl.h")]
    key = _digest([*sources, *_headers(includes)], repr((CXX_FLAGS, _compiler())))
    target = cache_directory() / f"libs-{key}"
    if not target.exists():
        _into_place(target, lambda work: _build_libraries(work, includes))
    return Built(target)


def build_kernels(folder: Path) -> Path:
    """Builds the host version of each .cu file of a folder; returns a folder of shared objects.

    The files must be self-contained (no #include) with extern "C" kernels.
    """
    built = build()
    files = sorted(folder.glob("*.cu"))
    if not files:
        raise BuildError(f"no .cu files in {folder}")
    shim = SOURCES / "cuda_shim.h"
    key = _digest([*files, shim], repr((KERNEL_FLAGS, _compiler())))
    target = cache_directory() / f"kernels-{key}"
    if not target.exists():

        def make(work: Path) -> None:
            with ThreadPoolExecutor(JOBS) as pool:
                for _ in pool.map(lambda file: _build_kernel(file, work, built), files):
                    pass

        _into_place(target, make)
    return target


def wheel_include(package: str, header: str) -> Path:
    """The include folder of an nvidia.* wheel."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations if spec else None) or ():
        folder = Path(root) / package / "include"
        if (folder / header).exists():
            return folder
    wheel = {"cuda_runtime": "nvidia-cuda-runtime-cu12", "nccl": "nvidia-nccl-cu12"}[package]
    raise BuildError(f"{header} not found: the emulator's build needs the wheel {wheel}")


def _compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(f"the emulator's build needs a C++ compiler; {compiler} was not found")
    return compiler


def _digest(files: Sequence[Path], flags: str) -> str:
    digest = hashlib.sha256(flags.encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _into_place(target: Path, make: object) -> None:
    """Runs make(work) and renames work to target; whoever is second throws its work away."""
    assert callable(make)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    try:
        make(work)
        try:
            work.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\nfailed:\n{done.stderr[-8000:]}")
    return done.stdout


def _build_libraries(work: Path, includes: Sequence[Path]) -> None:
    def link(soname: str, objects: Sequence[Path], *libraries: str) -> None:
        command = [_compiler(), "-shared", f"-Wl,-soname,{soname}", "-Wl,-Bsymbolic-functions"]
        command += ["-o", soname, *map(str, objects), "-L.", *libraries, "-lpthread", "-ldl"]
        _run(command, cwd=work)

    with ThreadPoolExecutor(JOBS) as pool:
        names = (*LIBCUDA_SOURCES, *LIBNCCL_SOURCES)
        objects = list(pool.map(lambda name: _compiled(SOURCES / name, includes), names))
    link("libcuda.so.1", objects[: len(LIBCUDA_SOURCES)])
    link("libnccl.so.2", objects[len(LIBCUDA_SOURCES) :], "-l:libcuda.so.1")


def _compiled(source: Path, includes: Sequence[Path]) -> Path:
    """The object file of one source, from the cache if its text and the headers are the same."""
    # nccl.h wants cuda_runtime.h and cuda_fp16.h: the stubs give it the few types that it uses.
    folders = [SOURCES / "stubs", *includes]
    flags = [*CXX_FLAGS, *(f"-I{folder}" for folder in folders)]
    key = _digest([source, *_headers(includes)], repr((CXX_FLAGS, _compiler())))
    target = cache_directory() / "objects" / f"{source.stem}-{key}.o"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        _run([_compiler(), *flags, "-c", str(source), "-o", str(partial)])
        partial.rename(target)
    return target


def _headers(includes: Sequence[Path]) -> list[Path]:
    own = sorted([*SOURCES.glob("*.h"), *(SOURCES / "stubs").glob("*.h")])
    own.remove(SOURCES / "cuda_shim.h")  # for kernels only
    return [*own, includes[0] / "cuda.h", includes[1] / "nccl.h"]


def host_source(preprocessed: str) -> tuple[str, list[str]]:
    """Replaces the shim's markers in a preprocessed .cu file; returns the text and the kernels."""
    # Dynamic shared memory: the one array of the runtime, under whatever name and type.
    text = re.sub(
        r"extern\s+EMU_MARK_SHARED\s+([^;\[\]]*?)(\w+)\s*\[\s*\]\s*;",
        r'extern \1 \2[] __asm__("emu_dynamic_shared");',
        preprocessed,
    )
    # Static shared memory: a section of its own, whose bounds the linker gives.
    text = text.replace("EMU_MARK_SHARED", 'static __attribute__((section("emu_shared")))')
    attributes = r"(?:__attribute__\s*\(\(.*?\)\)\s*)*"
    kernels = re.findall(r"EMU_MARK_GLOBAL\s+" + attributes + r"void\s+(\w+)\s*\(", text)
    marks = text.count("EMU_MARK_GLOBAL")
    text = text.replace("EMU_MARK_GLOBAL", "__attribute__((noinline))")
    if len(kernels) != marks:
        raise BuildError(f"{marks} __global__ marks, but only these kernels: {kernels}")
    return text, list(dict.fromkeys(kernels))


def _build_kernel(file: Path, work: Path, built: Built) -> None:
    shim = str(SOURCES / "cuda_shim.h")
    preprocessed = _run([_compiler(), "-E", "-x", "c++", *KERNEL_FLAGS, "-include", shim, str(file)])
    text, kernels = host_source(preprocessed)
    text += "".join(f'\nstatic EmuKernel<&{name}> emu_registered_{name}("{name}");' for name in kernels)
    source = work / f"{file.stem}.ii"
    source.write_text(text + "\n")
    _run(
        [
            *(_compiler(), "-x", "c++-cpp-output", *KERNEL_FLAGS, "-c", str(source)),
            *("-o", str(work / f"{file.stem}.o")),
        ]
    )
    # -fsanitize=thread must not be given when linking: libtsan is replaced by the emulator.
    _run(
        [
            *(_compiler(), "-shared", "-Wl,-Bsymbolic", "-o", str(work / f"{file.stem}.so")),
            *(str(work / f"{file.stem}.o"), f"-L{built.directory}", "-l:libcuda.so.1"),
        ]
    )
    (work / f"{file.stem}.o").unlink()


def main() -> None:
    """Builds the libraries, and the host versions of the kernels in the folders that are given."""
    print(build().directory)
    for folder in sys.argv[1:]:
        print(build_kernels(Path(folder)))


if __name__ == "__main__":
    main()
