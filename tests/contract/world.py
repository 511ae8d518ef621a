"""What a contract test's rank opens: a backend, its lanes and a communicator, seen through the seam alone."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bagua_rt.backend import Backend, Communicator, Device, Stream
from bagua_rt.backends import _cuda_device_count, open_backend
from bagua_rt.config import RuntimeConfig
from tests.ranks import RankContext

REDUCED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
    *(torch.bool, torch.complex64, torch.complex128),
)
MOVED = (
    *REDUCED,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass
class World:
    """An open backend and its first communicator."""

    ctx: RankContext
    backend: Backend
    device: Device
    lanes: Sequence[Stream]
    comm: Communicator

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.world_size

    def hold(self, lane: Stream, gate: threading.Event) -> None:
        """Keep `lane` busy until `gate` is set."""
        if self.device.host_is_compute:
            self.device.run(lane, lambda: gate.wait(10))
            return
        handle: Any = vars(lane)["handle"]
        body = _HostFunction(lambda _: gate.wait(10) and None)
        _held.append(body)  # the driver calls it later
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuLaunchHostFunc(ctypes.c_void_p(handle), body, None) == 0

    def tensor(self, values: object, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device.torch_device)


_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_held: list[Any] = []


def open_for(backend: str, rank: int, timeout_s: float = 20.0) -> Backend:
    """Open the backend of that name, on the rank's own device; ranks share one where there are too few."""
    device = "cpu"
    if backend == "emulated":
        from tests.emulator import product

        device = f"cuda:{rank}"
        product.install()
    elif backend == "cuda":
        device = f"cuda:{rank % max(1, _cuda_device_count())}"
    config = RuntimeConfig.from_environment()
    return open_backend(device, timeout_s=timeout_s, config=config, local_rank=rank)


@contextmanager
def world(ctx: RankContext, backend: str, *, timeout_s: float = 20.0, lanes: int = 2) -> Iterator[World]:
    """Open everything, and close it also if the body raises.

    On the emulator nothing may have been reported: no race, no call that it doesn't know, no mismatch. Its
    tensors are the CPU's; the first rank uses them as if they were a GPU's (tests/emulator/two_places.py).
    """
    if backend == "emulated":
        from tests.emulator import emulator
        from tests.emulator.two_places import as_on_a_gpu

        with as_on_a_gpu() if ctx.rank == 0 else nullcontext(), _opened(ctx, backend, timeout_s, lanes) as w:
            yield w
        emulator.assert_clean()
        emulator.reset()
        return
    with _opened(ctx, backend, timeout_s, lanes) as w:
        yield w


@contextmanager
def _opened(ctx: RankContext, backend: str, timeout_s: float, lanes: int) -> Iterator[World]:
    opened = open_for(backend, ctx.rank, timeout_s)
    streams = [opened.device.new_stream(f"lane{i}") for i in range(lanes)]
    comm = opened.connect(ctx.store(), ctx.rank, ctx.world_size, "world", streams, timeout_s=timeout_s)
    try:
        yield World(ctx, opened, opened.device, streams, comm)
    finally:
        comm.close()
        opened.close()


def inputs(w: World, dtype: torch.dtype, numel: int, label: str) -> list[torch.Tensor]:
    """One random tensor per rank, the same list on every rank."""
    seed = zlib.crc32(f"{label}/{dtype}/{numel}".encode())
    print(f"seed {seed}: {label} {dtype} {numel}")
    source = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(w.size):
        if dtype is torch.bool:
            t = torch.randint(0, 2, (numel,), generator=source).to(dtype)
        elif dtype.is_floating_point or dtype.is_complex:
            real = torch.randn(numel, 2, generator=source, dtype=torch.float64)
            t = (torch.view_as_complex(real) if dtype.is_complex else real[:, 0].clone()).to(dtype)
        else:
            t = torch.randint(0, 5, (numel,), generator=source).to(dtype)
        result.append(t.to(w.device.torch_device))
    return result


def poisoned(t: torch.Tensor, numel: int | None = None) -> torch.Tensor:
    """A tensor of `t`'s dtype whose every byte is 0xff (NaN, -1): an output nobody wrote shows."""
    count = t.numel() if numel is None else numel
    raw = torch.full((count * t.element_size(),), 255, dtype=torch.uint8, device=t.device)
    return raw.view(t.dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are all bytes equal?"""
    return a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def raw(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, also of one whose only element has an odd stride."""
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def same_everywhere(w: World, t: torch.Tensor) -> bool:
    """Has every rank the same bytes in `t`?"""
    mine = raw(t)
    everyone = poisoned(mine, mine.numel() * w.size)
    w.comm.all_gather(everyone, mine).wait()
    return all(torch.equal(part, mine) for part in everyone.chunk(w.size)) if mine.numel() else True
