"""What each kernel moves per second, beside a copy on the device that is timed in the same breath."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bagua_rt.backend import Stream
from bagua_rt.errors import CudaError
from tools.gpu_check.kernels import Workplace, short
from tools.gpu_check.steps import Bench, Step

LARGE_BYTES = 256 << 20  # several times any L2
BUCKET_BYTES = 10 << 20  # a bucket of the default size: in L2, and launches count
SMALL_BYTES = 16 << 10
ROWS = 8  # of what is gathered
PARAMETERS = 40  # tensors in a bucket
ROUNDS = 7
_ROUND_BYTES = 4 << 30  # about a millisecond at 4 TB/s
_HOST_US = 60  # more than a launch costs the host
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Moved:
    """A launch, and the bytes that it reads and writes by its file's header in kernels/."""

    launch: Callable[[], object]
    size_bytes: int


def _parts(numel: int) -> list[int]:
    """Sizes of a bucket's tensors: unequal ones that add up."""
    weights = [1 + i % 7 for i in range(PARAMETERS)]
    sizes = [numel * weight // sum(weights) for weight in weights]
    return [sizes[0] + numel - sum(sizes), *sizes[1:]]


def copies(place: Workplace, dtype: torch.dtype, numel: int, stream: Stream) -> dict[str, Moved]:
    """copy_in and copy_out of a bucket of many tensors; the bucket has their dtype, or is float32."""
    kernels, device = place.kernels, place.device.torch_device
    tensors = [torch.ones(n, dtype=dtype, device=device) for n in _parts(numel)]
    found = {}
    for target in {dtype, torch.float32}:
        views = torch.empty(numel, dtype=target, device=device).split([t.numel() for t in tensors])
        size_bytes = numel * (dtype.itemsize + target.itemsize)
        pair = f"{short(dtype)} to {short(target)}"
        found[f"copy_in {pair}"] = Moved(partial(kernels.copy_in, tensors, views, 0.5, stream), size_bytes)
        out = partial(kernels.copy_out, views, tensors, stream)
        found[f"copy_out {short(target)} to {short(dtype)}"] = Moved(out, size_bytes)
    return found


def codecs(place: Workplace, dtype: torch.dtype, numel: int, stream: Stream) -> dict[str, Moved]:
    """Both codecs, on rows as a gather would leave them."""
    kernels, device, size = place.kernels, place.device.torch_device, dtype.itemsize
    columns = numel // ROWS // 8 * 8
    values = torch.randn(ROWS, columns, dtype=torch.float32, device=device).to(dtype)
    error = torch.zeros(ROWS, columns, device=device)
    mean = torch.empty(columns, dtype=dtype, device=device)
    numel = ROWS * columns
    row_bytes = kernels.minmax_row_bytes(columns, dtype)
    wire = torch.empty(ROWS, row_bytes, dtype=torch.uint8, device=device)
    signs = torch.empty(ROWS, 8 + columns // 8, dtype=torch.uint8, device=device)
    encode = partial(kernels.minmax_encode, values, numel, 0, wire, stream)
    encode_signs = partial(kernels.sign_encode, values, error, numel, 0, signs, stream)
    moved = {
        "minmax_encode": Moved(encode, numel * size + wire.nbytes),
        "minmax_decode": Moved(
            partial(kernels.minmax_decode, wire, values, stream), numel * size + wire.nbytes
        ),
        f"minmax_decode_mean of {ROWS}": Moved(
            partial(kernels.minmax_decode_mean, wire, mean, stream), wire.nbytes + mean.nbytes
        ),
        # Twice read, for its scale comes first.
        "sign_encode": Moved(encode_signs, numel * (2 * size + 3 * error.itemsize) + signs.nbytes),
        "sign_decode": Moved(
            partial(kernels.sign_decode, signs, values, stream), numel * size + signs.nbytes
        ),
        f"sign_decode_mean of {ROWS}": Moved(
            partial(kernels.sign_decode_mean, signs, mean, stream), signs.nbytes + mean.nbytes
        ),
    }
    return {f"{name} {short(dtype)}": each for name, each in moved.items()}


def elementwise(place: Workplace, dtype: torch.dtype, numel: int, _: Stream) -> dict[str, Moved]:
    """mean_rows, ring_difference and add_difference."""
    device, size = place.device.torch_device, dtype.itemsize
    columns = numel // ROWS // 8 * 8
    rows = torch.ones(ROWS, columns, dtype=dtype, device=device)
    mean = torch.empty(columns, dtype=dtype, device=device)
    x, left, right, weights = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(4))
    units, kernels, stream = -(-columns * size // 4096), place.kernels, place.stream
    average = partial(place.launch, "mean_rows", dtype, units, rows, mean, ROWS, columns)
    ring = partial(kernels.ring_difference, x, left, right, weights, (1 / 3, 1 / 3), stream)
    add = partial(kernels.add_difference, x, left, right, stream)
    return {
        f"mean_rows of {ROWS} {short(dtype)}": Moved(average, rows.nbytes + mean.nbytes),
        f"ring_difference {short(dtype)}": Moved(ring, 5 * numel * size),
        f"add_difference {short(dtype)}": Moved(add, 4 * numel * size),
    }


Makes = Callable[[Workplace, torch.dtype, int, Stream], dict[str, Moved]]


def measure(kinds: Sequence[Makes], dtype: torch.dtype, size_bytes: int, bench: Bench) -> None:
    """Time every launch that `kinds` make of `size_bytes` of values, each round beside a copy of as much."""
    if bench.options.is_small:
        if size_bytes != LARGE_BYTES or dtype is not torch.float32:
            bench.skip(f"{short(dtype)}, {size_bytes >> 20} MiB", "the small run takes one size of float32")
            return
        size_bytes = SMALL_BYTES
    backend = bench.backend()
    with bench.computing(backend):
        place = Workplace(bench)
        for make in kinds:
            for name, moved in make(place, dtype, size_bytes // dtype.itemsize, place.stream).items():
                _tell(bench, place, name, moved, size_bytes)


def _tell(bench: Bench, place: Workplace, name: str, moved: Moved, size_bytes: int) -> None:
    device: Any = place.device
    source, target = (
        torch.zeros(size_bytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)
    )
    copy = Moved(
        partial(device.copy, target.data_ptr(), source.data_ptr(), size_bytes, place.stream), 2 * size_bytes
    )
    rates: dict[str, list[float]] = {"copy": [], "kernel": []}
    rounds = 2 if bench.options.is_small else ROUNDS
    for _ in range(rounds):
        for kind, each in (("copy", copy), ("kernel", moved)):
            times = 1 if bench.options.is_small else max(4, min(40, _ROUND_BYTES // each.size_bytes))
            rates[kind].append(times * each.size_bytes / _elapsed_ms(place, each.launch, times) / 1e6)
    kernel, copied = (statistics.median(rates[kind]) for kind in ("kernel", "copy"))
    us = moved.size_bytes / kernel / 1e3
    detail = f"{kernel:7.0f} GB/s, {kernel / copied:4.0%} of a copy's {copied:.0f}; {us:.1f} us a launch"
    label = f"{name}, {size_bytes / 2**20:g} MiB"
    bench.figure(label, detail, gb_s=kernel, copy_gb_s=copied, us=us, moved_bytes=moved.size_bytes)


def _elapsed_ms(place: Workplace, launch: Callable[[], object], times: int) -> float:
    """How long the device takes for some launches, all of which are queued before the first one begins."""
    device, stream = place.device, place.stream
    launch()
    _hold(stream, times * _HOST_US)
    begin: Any = device.record(stream, timed=True)
    for _ in range(times):
        launch()
    end: Any = device.record(stream, timed=True)
    device.synchronize(end)
    return max(float(end.raw - begin.raw), 1e-6)


def _hold(stream: Any, us: int) -> None:
    """Keep a stream busy, without the GIL."""
    usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
    status = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(
        ctypes.c_void_p(stream.handle), usleep, ctypes.c_void_p(us)
    )
    if status:
        raise CudaError("cuLaunchHostFunc failed", got=f"CUresult {status}")


def _steps() -> list[Step]:
    steps = []
    for size_bytes in (LARGE_BYTES, BUCKET_BYTES):
        for dtype in DTYPES:
            for kinds in ((copies,), (codecs,), (elementwise,)):
                name = f"{kinds[0].__name__} {short(dtype)}, {size_bytes >> 20} MiB"
                steps.append(Step(name, partial(measure, kinds, dtype, size_bytes)))
    return steps


STEPS = tuple(_steps())
