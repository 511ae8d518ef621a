"""What the machine has: device, driver, torch, NVRTC, NCCL; and whether the backend opens on it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.ranks import RankContext
from tools.gpu_check.steps import Bench, Step

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "numpy", "cuda-core", "cuda-bindings", "cuda-pathfinder", "pytest", "pytest-timeout")
_MULTI_RANK = 23000  # the first NCCL that takes several ranks on a device
_RANKS_ON_ONE = 4


def machine_facts(_: RankContext) -> dict[str, Any]:
    """What the other sections must know; nothing here raises or starts a CUDA context."""
    from bagua_rt.backends import _cuda_device_count
    from bagua_rt.backends._nccl_library import find_nccl
    from bagua_rt.errors import BackendUnavailableError

    devices = max(0, _cuda_device_count())
    facts: dict[str, Any] = {"devices": devices, "nccl_version": 0, "nccl": "", "most_ranks": 0}
    try:
        library = find_nccl()
    except BackendUnavailableError as error:
        facts["nccl"] = str(error)
        facts["most_ranks"] = min(devices, 1)
        return facts
    facts["nccl_version"], facts["nccl"] = library.version, str(library)
    facts["nccl_path"] = str(library.path)
    shared = _RANKS_ON_ONE if devices and library.version >= _MULTI_RANK else 0
    facts["most_ranks"] = max(devices, shared)
    return facts


def software(bench: Bench) -> None:
    """Versions; torch and the CUDA packages must be there."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    needed = [package for package in _PACKAGES if not found[package]]
    texts = [f"{name} {version}" for name, version in found.items() if version]
    detail = ", ".join(texts) + (f"; not installed: {', '.join(needed)}" if needed else "")
    bench.check("packages", not needed, detail, **found)
    import bagua_rt

    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "no git"
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    bench.figure("bagua_rt", f"{bagua_rt.__version__} at {commit}, {system}", python=sys.version)


def driver(bench: Bench) -> None:
    """The driver and its devices."""
    library = ctypes.CDLL("libcuda.so.1")
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    bench.check(
        "driver", version.value > 0, f"libcuda for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    )
    query = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,compute_mode,mig.mode.current"
    answer = _output("nvidia-smi", query, "--format=csv,noheader")
    if answer:
        bench.figure("nvidia-smi", answer)
    else:
        bench.skip("nvidia-smi", "not there, or it answered nothing")


def device(bench: Bench) -> None:
    """The backend opens, its kernels have a target, and work that is queued gets done."""
    import torch

    backend = bench.backend()
    raw: Any = vars(backend.device)["raw"]
    capability, properties = raw.compute_capability, raw.properties
    bench.figure(
        "device",
        f"{raw.name}, sm_{capability.major}{capability.minor}, {properties.multiprocessor_count} "
        f"multiprocessors, {properties.l2_cache_size >> 20} MiB of L2",
        multiprocessors=properties.multiprocessor_count,
    )
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if bench.options.stand_in:
        bench.skip("torch", "something stands in for torch on a GPU")
    else:
        bench.check("torch", seen > 0, f"built for CUDA {torch.version.cuda}, sees {seen} device(s)")
    with bench.computing(backend):
        t = torch.zeros(1000, device=backend.device.torch_device)
        t.add_(1)
        stream = backend.device.compute_stream()
        backend.device.synchronize(backend.device.record(stream))
        bench.check("a sum on the compute stream", float(t.sum().item()) == 1000.0)


def nvrtc(bench: Bench) -> None:
    """NVRTC is there, and compiles for the device."""
    from bagua_rt.backends._nvrtc import Variant, compile_source, nvrtc_version

    cache: Any = vars(bench.backend().kernels)["_cache"]
    code = compile_source(Variant.of("mean_rows", "float32").source(), "mean_rows.cu", cache.target)
    detail = f"{nvrtc_version()}, {len(code)} bytes of mean_rows for {cache.target.architecture}"
    bench.check("NVRTC", len(code) > 0, detail)


def nccl(bench: Bench) -> None:
    """NCCL is there, and the package's table of ncclConfig_t is its header's, where that can be compiled."""
    from bagua_rt.backends._nccl_config import OLDEST
    from bagua_rt.backends._nccl_library import find_nccl
    from tools import nccl_layouts

    library = find_nccl()
    bench.check("NCCL", library.version >= OLDEST, str(library), version=library.version)
    header = nccl_layouts.installed_header()
    if header is None or shutil.which("gcc") is None:
        bench.skip("nccl.h", "no header beside the wheel" if header is None else "no gcc")
        return
    read = nccl_layouts.read_header(header)
    found = nccl_layouts.layout_differences(read.version, read.layout)
    found += nccl_layouts.signature_differences(read.prototypes)
    bench.check("nccl.h", not found, "; ".join(found) or f"of {read.version}: the package's own layout")


def _output(*command: str) -> str:
    """What a program prints; nothing where it isn't there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(done.stdout.split("\n")).strip("; ")


STEPS = (
    Step("software", software),
    Step("driver", driver),
    Step("device", device, deadline_s=40.0),
    Step("NVRTC", nvrtc),
    Step("NCCL", nccl),
)
