#!/usr/bin/env python3
"""What bagua_rt finds on this machine, and whether ranks of it can talk: run it before you ask for help.

    python tools/doctor.py             the machine, then two ranks that meet and add up
    python tools/doctor.py --ranks 0   only the machine
    srun python tools/doctor.py        is one of the ranks; so it is under torchrun and mpirun

Exit code 1 where something is broken that a training needs. What a CPU does without is only told.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

import bagua_rt as bagua
from bagua_rt.backends import _cuda_device_count
from bagua_rt.backends._nccl_library import find_nccl
from bagua_rt.config import Launch, RuntimeConfig
from bagua_rt.errors import BaguaError

PACKAGES = ("torch", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "cuda-core", "cuda-bindings")
MIB = 2**20
Finding = tuple[str, str]


def versions() -> Iterator[Finding]:
    """What is installed, and from where."""
    yield "bagua_rt", f"{bagua.__version__}, {Path(bagua.__file__).parent}"
    yield "system", f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores"
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    for package in PACKAGES:
        yield package, installed.get(package, "not installed")
    if {"nvidia-nccl-cu12", "nvidia-nccl-cu13"} <= set(installed):
        yield (
            "NCCL's wheels",
            "two that own the same files: uninstall both, then install the one of torch's CUDA",
        )
    yield "torch's CUDA", str(torch.version.cuda or "none: a CPU build")


def cuda() -> Iterator[Finding]:
    """The driver, NCCL and the kernels' cache; a CPU needs none of them."""
    count = _cuda_device_count()
    yield "CUDA devices", "no driver" if count < 0 else str(count)
    try:
        yield "NCCL", str(find_nccl(RuntimeConfig.from_environment().nccl_path))
    except BaguaError as error:
        yield "NCCL", f"not found: {error}"
    yield "kernels' cache", str(RuntimeConfig.from_environment().cache_dir)
    yield "ptxas", shutil.which("ptxas") or "not found: `make kernels` tells no registers"


def launch() -> Iterator[Finding]:
    """What the launcher says, and the settings from the environment.

    Raises:
        UsageError: a variable holds what it can't.
    """
    said = Launch.from_environment()
    yield "launcher", f"{said.launcher}: rank {said.rank} of {said.world_size}, local rank {said.local_rank}"
    if said.master_addr:
        yield "rendezvous", f"{said.master_addr}:{said.master_port} is {address_of(said.master_addr)}"
    yield "this host", f"{socket.gethostname()} is {address_of(socket.gethostname())}"
    settings = {name: value for name, value in os.environ.items() if name.startswith(("BAGUA_RT_", "NCCL_"))}
    yield "settings", ", ".join(f"{name}={value}" for name, value in sorted(settings.items())) or "none"
    yield (
        "threads",
        f"{torch.get_num_threads()} for torch; OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}",
    )
    RuntimeConfig.from_environment()


def address_of(host: str) -> str:
    """Its address; what is wrong with it, where it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        return f"unknown ({error})"


def together(device: str | None) -> Iterator[Finding]:
    """Meet, add up, and train a step. Collective.

    Raises:
        BaguaError: what went wrong.
        ArithmeticError: a result is.
    """
    began = time.perf_counter()
    with bagua.init(device, timeout_s=60) as pg:
        met_s = time.perf_counter() - began
        t = torch.full((4 * MIB,), pg.rank + 1.0, device=pg.device)
        pg.world.all_reduce_(t, "sum").wait()
        wrong = int((t != pg.world_size * (pg.world_size + 1) / 2).sum())
        began = time.perf_counter()
        pg.world.all_reduce_(t, "avg").wait()
        gigabytes = t.nbytes / (time.perf_counter() - began) / 1e9
        model = torch.nn.Linear(8, 1).to(pg.device)
        with bagua.attach(model):
            model(torch.full((1, 8), float(pg.rank), device=pg.device)).sum().backward()
            gradient = float(model.weight.grad.mean()) if model.weight.grad is not None else float("nan")
        if wrong or abs(gradient - (pg.world_size - 1) / 2) > 1e-6:
            raise ArithmeticError(f"{wrong} of {t.numel()} sums are wrong; the mean gradient is {gradient}")
        yield (
            "ranks",
            f"{pg.world_size} over {pg.device.type}, {pg.local_world_size} here; met in {met_s:.2f} s",
        )
        yield "all_reduce_", f"16 MiB at {gigabytes:.2f} GB/s; every sum is right, and so is a gradient"


def told(section: Callable[[], Iterator[Finding]], *, quiet: bool) -> bool:
    """Print what a section finds. Returns whether it came to its end."""
    try:
        for subject, finding in section():
            if not quiet:
                print(f"{subject:18s} {finding}", flush=True)
    except (BaguaError, ArithmeticError) as error:
        print(f"{'BROKEN':18s} {type(error).__name__}: {error}", flush=True)
        return False
    return True


def start(options: argparse.Namespace) -> bool:
    """Start ranks on this machine, which meet and no more. Returns whether all went well."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    script = [
        str(Path(__file__).resolve()),
        "--together",
        *(("--device", options.device) if options.device else ()),
    ]
    variables = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        subprocess.run([sys.executable, *torchrun, *script], check=True, env=variables, timeout=120)
    except subprocess.CalledProcessError:  # it has said why
        return False
    except subprocess.TimeoutExpired:
        print(f"{'BROKEN':18s} the ranks have not ended within 120 s", flush=True)
        return False
    return True


def main() -> int:
    """Be one rank, or look at the machine and start all of them."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=formatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start on this machine (2)")
    parser.add_argument("--device", help="cpu or cuda (cuda where there is one)")
    parser.add_argument("--together", action="store_true", help="don't look at the machine")
    options = parser.parse_args()
    is_good, said = True, Launch()
    try:
        said = Launch.from_environment()
    except BaguaError:
        is_good = options.together  # else `launch` says so
    if not options.together:
        is_good = all(told(section, quiet=said.rank > 0) for section in (versions, launch, cuda))
    if said.launcher != "none":
        is_good &= told(partial(together, options.device), quiet=said.rank > 0)
    elif is_good and options.ranks > 0:
        is_good = start(options)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
