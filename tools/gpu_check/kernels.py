"""Each kernel on the device against its oracle, bit for bit; the outputs are kept as golden ones.

The inputs come from raw random bits by arithmetic that is exact, so they are the same on every machine.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bagua_rt.backend import Backend, Kernels, Stream
from tests import kernel_oracles as oracles
from tests.kernel_host import Buffers, same_bits
from tools.gpu_check.steps import Bench, Step

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PAIRS = (
    *zip(DTYPES, DTYPES, strict=True),
    *((torch.bfloat16, torch.float32), (torch.float32, torch.float16)),
    *((torch.float64, torch.bfloat16), (torch.float16, torch.float64)),
)
LENGTHS = (0, 1, 7, 8, 9, 257, 2049, 4096, 9001)
# Rows, columns, elements of the bucket, place of the first one in it: whole rows, padding, odd columns.
SIGN_SHAPES = ((3, 64, 192, 0), (2, 128, 150, 0), (2, 8, 13, 8), (1, 20_000, 20_000, 0))
MINMAX_SHAPES = ((3, 64, 192, 0), (2, 13, 20, 3), (2, 4112, 8200, 0), (1, 2048, 9000, 4096))
SIZES = (1, 257, 6000, 20_011)
_SMALL = (torch.float32,)
_POWERS = np.array([float(f"1e{power}") for power in range(-6, 5)])
_PARTS = "golden.parts"
Arrays = dict[str, np.ndarray[Any, Any]]


def short(dtype: torch.dtype) -> str:
    """A dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def _as_they_are(_: np.ndarray[Any, Any]) -> None:
    pass


def numbers(
    label: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    change: Callable[[np.ndarray[Any, Any]], None] = _as_they_are,
) -> torch.Tensor:
    """Numbers of very different sizes, and zeros; a label gives the same everywhere. `change` edits them."""
    count = int(np.prod(shape))
    raw = np.random.PCG64(zlib.crc32(label.encode())).random_raw(2 * count)
    mantissa = (raw[:count] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    how = raw[count:] >> np.uint64(32)
    values = mantissa * _POWERS[(how >> np.uint64(8)) % np.uint64(len(_POWERS))]
    values = np.where(how & np.uint64(1), values, -values) * (how % np.uint64(16) != 3)
    values = values.reshape(shape)
    change(values)
    return torch.from_numpy(values).to(dtype)


def three_odd_chunks(values: np.ndarray[Any, Any]) -> None:
    """One with NaN, a constant one, and one far from zero, where there are that many."""
    if values.shape[0] > 1 and values.shape[1] > oracles.CHUNK:
        values[0, -1], values[1, : oracles.CHUNK] = np.nan, -1.5
        values[1, oracles.CHUNK : 2 * oracles.CHUNK] += 30_000


class Workplace:
    """The kernels, a stream, and memory whose surroundings must survive."""

    def __init__(self, bench: Bench) -> None:
        self.backend: Backend = bench.backend()
        self.device = self.backend.device
        self.kernels: Kernels = self.backend.kernels
        self.stream: Stream = self.device.compute_stream()
        self.memory = Buffers(self.device.torch_device)
        self.kept: Arrays = {}

    def put(self, values: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """A copy on the device, `offset` elements past an aligned address."""
        return self.memory.put(values, offset)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Poisoned memory on the device."""
        return self.memory.empty(shape, dtype, offset)

    def launch(self, operation: str, dtype: torch.dtype, units: int, *arguments: torch.Tensor | int) -> None:
        """Launch a kernel that `Kernels` has no method for."""
        own: Any = self.kernels
        plain = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
        own._launch(self.stream, own._variant(operation, dtype), own._blocks(units), plain)

    def read(self, label: str, t: torch.Tensor) -> torch.Tensor:
        """What stands in `t` now, on the CPU; kept as golden."""
        self.device.synchronize(self.device.record(self.stream))
        here = t.detach().cpu().contiguous().clone()
        if here.is_floating_point():  # a NaN's other bits are the device's own
            here = torch.where(here.isnan(), torch.full_like(here, float("nan")), here)
        self.kept[label] = here.view(-1).view(torch.uint8).numpy().copy()
        return here


class Tally:
    """How the cases of one kernel went."""

    def __init__(self, name: str) -> None:
        self.name, self.cases = name, 0
        self.wrong: list[str] = []

    def compare(self, case: str, found: torch.Tensor, right: torch.Tensor) -> None:
        """Count a case; all bits must be equal, any NaN standing for any other."""
        self.cases += 1
        if not same_bits(found, right):
            kind = torch.uint8 if found.dtype is torch.uint8 else torch.float64
            a, b = found.reshape(-1).to(kind), right.reshape(-1).to(kind)
            differ = (a != b) & ~(a.isnan() & b.isnan())
            at = int(differ.nonzero()[0]) if differ.any() else 0
            got, wanted = (float(t[at]) if t.numel() else None for t in (a, b))
            self.wrong.append(f"{case}: {int(differ.sum())} differ, first [{at}]: {got!r}, not {wanted!r}")

    def tell(self, bench: Bench) -> None:
        """Report it."""
        detail = "; ".join(self.wrong[:3]) or f"{self.cases} cases, bit for bit"
        bench.check(self.name, not self.wrong and self.cases > 0, detail, wrong=self.wrong)


def on_device(
    step: str, dtypes: tuple[torch.dtype, ...], run: Callable[[Workplace], list[Tally]], bench: Bench
) -> None:
    """Run the cases of a step and report them; keep what came out."""
    if bench.options.is_small and not set(dtypes) <= set(_SMALL):
        bench.skip(step, "the small run takes float32 only")
        return
    backend = bench.backend()
    with bench.computing(backend), np.errstate(all="ignore"):
        place = Workplace(bench)
        tallies = run(place)
        place.device.synchronize(place.device.record(place.stream))
        place.memory.check()
    for tally in tallies:
        tally.tell(bench)
    folder = Path(bench.options.out) / _PARTS
    folder.mkdir(exist_ok=True)
    kept: Any = {f"{step}/{label}": array for label, array in place.kept.items()}
    np.savez(folder / f"{step.replace(' ', '_')}.npz", **kept)


def copies(source: torch.dtype, target: torch.dtype, place: Workplace) -> list[Tally]:
    """copy_in with a scale, and copy_out, of one pair of dtypes."""
    pair = f"{short(source)} to {short(target)}"
    tallies = [Tally(f"copy_in {pair}"), Tally(f"copy_out {pair}")]
    values = [numbers(f"copy {pair} {n}", (n,), source) for n in LENGTHS]
    for scale in (1.0, 1 / 3, -7.0):
        views = place.empty((sum(LENGTHS),), target, 3).split(LENGTHS)
        place.kernels.copy_in([place.put(v, i) for i, v in enumerate(values)], views, scale, place.stream)
        for n, view, value in zip(LENGTHS, views, values, strict=True):
            found = place.read(f"in {scale:.2f} {n}", view)
            tallies[0].compare(f"{n} times {scale:.2f}", found, oracles.copy_in(value, target, scale))
    bucket = place.put(torch.cat(values), 1)
    outs = [place.empty((n,), target, i) for i, n in enumerate(LENGTHS)]
    place.kernels.copy_out(bucket.split(LENGTHS), outs, place.stream)
    for n, out, value in zip(LENGTHS, outs, values, strict=True):
        tallies[1].compare(f"{n}", place.read(f"out {n}", out), oracles.copy_out(value, target))
    return tallies


def minmax(dtype: torch.dtype, place: Workplace) -> list[Tally]:
    """The codec MinMaxUInt8."""
    encode, decode, mean = (Tally(f"minmax_{what} {short(dtype)}") for what in ("encode", "decode", "mean"))
    kernels, real = place.kernels, oracles.wide_type(dtype)
    for shape in MINMAX_SHAPES:
        rows, columns, numel, first = shape
        values = numbers(f"minmax {short(dtype)} {shape}", (rows, columns), dtype, three_odd_chunks)
        right = oracles.minmax_encode(oracles.wide(values), numel, first)
        wire = place.empty(right.shape, torch.uint8)
        kernels.minmax_encode(place.put(values, 1), numel, first, wire, place.stream)
        encode.compare(f"{shape}", place.read(f"{shape} wire", wire), torch.from_numpy(right))
        decoded = oracles.minmax_decode(right, columns, real)
        out, middle = place.empty((rows, columns), dtype, 1), place.empty((columns,), dtype, 2)
        kernels.minmax_decode(wire, out, place.stream)
        decode.compare(f"{shape}", place.read(f"{shape} out", out), oracles.narrow(decoded, dtype))
        kernels.minmax_decode_mean(wire, middle, place.stream)
        expected = oracles.narrow(oracles.mean_rows(decoded), dtype)
        mean.compare(f"{shape}", place.read(f"{shape} mean", middle), expected)
    return [encode, decode, mean]


def signs(dtype: torch.dtype, place: Workplace) -> list[Tally]:
    """The sign codec: bits and error exact given the scale, which is within an ulp."""
    encode, decode, mean = (Tally(f"sign_{what} {short(dtype)}") for what in ("encode", "decode", "mean"))
    for shape in SIGN_SHAPES:
        rows, columns, numel, first = shape
        label = f"sign {short(dtype)} {shape}"
        values = numbers(label, (rows, columns), dtype)
        before = numbers(f"{label} error", (rows, columns), torch.promote_types(dtype, torch.float32))
        wide, old = oracles.wide(values), oracles.wide(before)
        error = place.put(before, 1)
        wire = place.empty((rows, 8 + columns // 8), torch.uint8, 3)
        place.kernels.sign_encode(place.put(values, 2), error, numel, first, wire, place.stream)
        raw = place.read(f"{shape} wire", wire)
        scales = raw.numpy()[:, :4].copy().view(np.float32)[:, 0]
        exact = oracles.sign_scales(wide, old, numel, first)
        if not np.allclose(scales, exact, rtol=2**-23, atol=1e-45):
            encode.wrong.append(f"{shape}: scales {scales}, not {exact}")
        right, left = oracles.sign_encode(wide, old, numel, first, scales)
        encode.compare(f"{shape}", raw, torch.from_numpy(right))
        encode.compare(f"{shape} error", place.read(f"{shape} error", error), torch.from_numpy(left))
        out, middle = place.empty((rows, columns), dtype, 1), place.empty((columns,), dtype, 3)
        place.kernels.sign_decode(wire, out, place.stream)
        expected = oracles.narrow(oracles.sign_decode(raw.numpy()), dtype)
        decode.compare(f"{shape}", place.read(f"{shape} out", out), expected)
        place.kernels.sign_decode_mean(wire, middle, place.stream)
        expected = oracles.narrow(oracles.sign_decode_mean(raw.numpy()), dtype)
        mean.compare(f"{shape}", place.read(f"{shape} mean", middle), expected)
    return [encode, decode, mean]


def elementwise(dtype: torch.dtype, place: Workplace) -> list[Tally]:
    """mean_rows, ring_difference and add_difference."""
    names = ("mean_rows", "ring_difference", "add_difference")
    mean, ring, add = (Tally(f"{name} {short(dtype)}") for name in names)
    for n in SIZES:
        label = f"elementwise {short(dtype)} {n}"
        rows = numbers(label, (3, n), dtype)
        out, units = place.empty((n,), dtype, n % 3), -(-n * dtype.itemsize // 4096)
        place.launch("mean_rows", dtype, units, place.put(rows, n % 2), out, 3, n)
        right = oracles.narrow(oracles.mean_rows(oracles.wide(rows)), dtype)
        mean.compare(f"{n}", place.read(f"{n} mean", out), right)
        given = [numbers(f"{label} {part}", (n,), dtype) for part in range(4)]
        x, left, other, weights, copy = (
            place.put(t, i % 4 * (n % 2)) for i, t in enumerate([*given, given[0]])
        )
        wides = [oracles.wide(t) for t in given]
        place.kernels.ring_difference(copy, left, other, weights, (1 / 3, 1 / 6), place.stream)
        right = oracles.narrow(oracles.ring_difference(*wides, shares=(1 / 3, 1 / 6)), dtype)
        ring.compare(f"{n}", place.read(f"{n} ring", copy), right)
        place.kernels.add_difference(x, left, other, place.stream)
        right = oracles.narrow(oracles.add_difference(*wides[:3]), dtype)
        add.compare(f"{n}", place.read(f"{n} add", x), right)
    return [mean, ring, add]


# ---- golden outputs


def differences(mine: Arrays, golden: Arrays) -> list[str]:
    """The arrays that are not the same in both, or are in one of them only."""
    found = [f"{name}: only in {'this run' if name in mine else 'the file'}" for name in mine.keys() ^ golden]
    for name in mine.keys() & golden.keys():
        a, b = mine[name], golden[name]
        if a.shape != b.shape or not np.array_equal(a, b):
            where = int(np.flatnonzero(a != b)[0]) if a.shape == b.shape else -1
            found.append(f"{name}: byte {where} of {b.size}")
    return sorted(found)


def golden(bench: Bench) -> None:
    """Put what the steps kept into one file; compare it with another one where one is named."""
    parts = Path(bench.options.out) / _PARTS
    arrays: dict[str, Any] = {}
    for file in sorted(parts.glob("*.npz")):
        with np.load(file) as part:
            arrays.update(part)
    shutil.rmtree(parts, ignore_errors=True)
    path = Path(bench.options.out) / "golden.npz"
    np.savez_compressed(path, **arrays)
    bench.check("golden outputs", bool(arrays), f"{len(arrays)} arrays in {path.name}")
    if bench.options.golden:
        with np.load(bench.options.golden) as file:
            found = differences(arrays, dict(file))
        text = "; ".join(found[:3]) or f"{len(arrays)} arrays, the same bytes"
        bench.check(f"as in {bench.options.golden}", not found, text, differences=found)


def _step(name: str, dtypes: tuple[torch.dtype, ...], run: Callable[[Workplace], list[Tally]]) -> Step:
    return Step(name, partial(on_device, name, dtypes, run), deadline_s=30.0)


STEPS = (
    *(_step(f"copies {short(a)} {short(b)}", (a, b), partial(copies, a, b)) for a, b in PAIRS),
    *(_step(f"minmax {short(dtype)}", (dtype,), partial(minmax, dtype)) for dtype in DTYPES),
    *(_step(f"signs {short(dtype)}", (dtype,), partial(signs, dtype)) for dtype in DTYPES),
    *(_step(f"elementwise {short(dtype)}", (dtype,), partial(elementwise, dtype)) for dtype in DTYPES),
    Step("golden", golden),
)
