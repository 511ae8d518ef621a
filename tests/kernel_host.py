"""Runs the kernels of ``kernels/`` on the CPU: the text that NVRTC gets, compiled by g++ (kernel_host.h).

Only for the values that a kernel computes. What surrounds kernels on a device (streams, copies, races between
blocks) is the emulator's subject, in tests/emulator.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bagua_rt.backends._nvrtc import Variant

SHIM = Path(__file__).with_name("kernel_host.h")
COMPILER = shutil.which("g++")
# No contraction: the kernels say where an operation rounds. The shim calls kernels through a plain C type.
# Compiled and linked apart: the shim is what the sanitizers call, so that their libraries are not needed.
# -fno-gnu-unique: or the loader would make one of all libraries' shared arrays of one name.
FLAGS = "-std=c++17 -O1 -fPIC -w -ffp-contract=off -fno-strict-aliasing -fno-gnu-unique"
FLAGS += " -fsanitize=thread,bounds,alignment"
GUARD = 64  # poisoned bytes on both sides of every buffer
POISON = 0xA5
COUNTS = ("misaligned", "outside", "first_outside", "bytes_outside")  # kernel_host.h


@functools.cache
def _library(variant: Variant) -> ctypes.CDLL:
    assert COMPILER is not None
    source = variant.source()
    key = hashlib.sha256(f"{source}\0{SHIM.read_text()}\0{FLAGS}".encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"bagua_rt_kernel_host_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{variant.entry()}-{key}.so"
    if not target.exists():
        text = target.with_suffix(f".{os.getpid()}.{threading.get_ident()}.cpp")
        text.write_text(source)
        compiled, built = text.with_suffix(".o"), text.with_suffix(".so")
        _run(COMPILER, *FLAGS.split(), "-include", str(SHIM), "-c", "-o", str(compiled), str(text))
        _run(COMPILER, "-shared", "-o", str(built), str(compiled))
        built.replace(target)
        text.unlink()
        compiled.unlink()
    return ctypes.CDLL(str(target))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def build(variants: Iterable[Variant]) -> None:
    """Compile what is not compiled yet, on every core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(_library, variants):
            pass


def launch(
    variant: Variant,
    *arguments: torch.Tensor | int,
    blocks: int,
    reals: Sequence[float] = (),
    operation: str = "",
    reached: Iterable[torch.Tensor] = (),
) -> None:
    """Run a kernel, and check that it touches its tensors alone, with the alignment that its accesses need.

    Args:
        arguments: Tensors and integers, in the kernel's own order.
        reals: The kernel's floats, two at most.
        operation: The kernel's name, where a file has several.
        reached: What it finds in a table of addresses.
    """
    library = _library(variant)
    tensors = [*(a for a in arguments if isinstance(a, torch.Tensor)), *reached]
    assert all(t.is_contiguous() for t in tensors)
    ranges = [word for t in tensors for word in (t.data_ptr(), t.numel() * t.itemsize)]
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
    kernel = ctypes.cast(getattr(library, variant.entry(operation)), ctypes.c_void_p)
    counts = {name: ctypes.c_longlong.in_dll(library, name) for name in COUNTS}
    for count in counts.values():
        count.value = 0
    library.launch(
        kernel,
        ctypes.c_uint(blocks),
        (ctypes.c_longlong * 10)(*values),
        (ctypes.c_double * 2)(*reals),
        (ctypes.c_longlong * len(ranges))(*ranges),
        len(tensors),
    )
    misaligned, outside, first, size = (count.value for count in counts.values())
    assert not outside, f"{variant}: {outside} accesses outside of its tensors, first {size} B at {first:#x}"
    assert not misaligned, f"{variant}: {misaligned} accesses are not aligned"


class Buffers:
    """Memory at a chosen misalignment, poisoned, with guards that must survive."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._all: list[tuple[torch.Tensor, int, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A poisoned tensor, `offset` elements past a 64-byte boundary."""
        numel = int(torch.Size(shape).numel())
        begin = GUARD + offset * dtype.itemsize
        size = begin + numel * dtype.itemsize + GUARD
        memory = torch.full((size,), POISON, dtype=torch.uint8, device=self._device)
        assert memory.data_ptr() % 64 == 0
        self._all.append((memory, begin, begin + numel * dtype.itemsize))
        return memory[begin : begin + numel * dtype.itemsize].view(dtype).view(shape)

    def put(self, values: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """A copy of `values` at such a place."""
        return self.empty(tuple(values.shape), values.dtype, offset).copy_(values)

    def check(self) -> None:
        """Nothing around the tensors was written."""
        for memory, begin, end in self._all:
            assert (memory[:begin] == POISON).all(), "written before the beginning of a buffer"
            assert (memory[end:] == POISON).all(), "written past the end of a buffer"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are two tensors equal bit for bit, any NaN standing for any other?"""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.contiguous().view(kind) == b.contiguous().view(kind)
    if a.is_floating_point():
        equal |= a.isnan() & b.isnan()
    return bool(equal.all())
