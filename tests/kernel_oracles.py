"""What each kernel of ``kernels/`` must compute, in numpy, operation by operation as its header says.

Written for being read against those headers, not for speed, and without any code of the package. Arrays are
"wide": float64 for float64 elements, float32 for all others; `wide` and `narrow` go between them and tensors.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Wide = NDArray[np.floating]
Bytes = NDArray[np.uint8]

CHUNK = 2048


def wide_type(dtype: torch.dtype) -> type[np.floating]:
    return np.float64 if dtype is torch.float64 else np.float32


def wide(tensor: torch.Tensor) -> Wide:
    values: Wide = tensor.to(torch.float64 if tensor.dtype is torch.float64 else torch.float32).numpy().copy()
    return values


def narrow(values: Wide, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def round_up(n: int, unit: int) -> int:
    return (n + unit - 1) // unit * unit


def copy_in(source: torch.Tensor, target_dtype: torch.dtype, scale: float) -> torch.Tensor:
    either_double = torch.float64 in (source.dtype, target_dtype)
    kind = np.float64 if either_double else np.float32
    return narrow(wide(source).astype(kind) * kind(scale), target_dtype)


def copy_out(source: torch.Tensor, target_dtype: torch.dtype) -> torch.Tensor:
    return source.clone() if source.dtype is target_dtype else narrow(wide(source), target_dtype)


def mean_rows(rows: Wide) -> Wide:
    weight = rows.dtype.type(1) / rows.dtype.type(len(rows))
    total: Wide = np.zeros_like(rows[0])
    for row in rows:
        total += row * weight
    return total


def ring_difference(
    x: Wide, left: Wide, right: Wide, weights: Wide, *, shares: tuple[float, float] = (1 / 3, 1 / 3)
) -> Wide:
    of_left, of_right = map(x.dtype.type, shares)
    difference: Wide = (x - weights) + (left - weights) * of_left + (right - weights) * of_right
    return difference


def add_difference(x: Wide, mean: Wide, y: Wide) -> Wide:
    moved: Wide = np.where(x == y, mean, x + (mean - y))
    return moved


# ── MinMaxUInt8 ──────────────────────────────────────────────────────────────────────────────────────────


def minmax_layout(columns: int, size: int) -> tuple[int, int]:
    """Where the codes begin in a row, and how many bytes a row has; size: bytes of a header's number."""
    codes_at = 16 + round_up((columns + CHUNK - 1) // CHUNK * 2 * size, 16)
    return codes_at, codes_at + round_up(columns, 16)


def step_of(low: np.floating, high: np.floating) -> np.floating:
    kind = type(low)
    step: np.floating = high / kind(254) - low / kind(254)
    return step if step >= np.finfo(kind).tiny else kind(0)


def encode_chunk(x: Wide) -> tuple[np.floating, np.floating, Bytes]:
    kind = x.dtype.type
    codes = np.zeros(len(x), np.uint8)
    if len(x) == 0:
        return kind(0), kind(0), codes
    if not np.isfinite(x).all():
        return kind(np.nan), kind(np.nan), codes
    low, high = x.min() + kind(0), x.max() + kind(0)
    step = step_of(low, high)
    if step == 0:
        return low, high, codes
    levels = np.rint(x / step) - np.rint(low / step) if low <= 0 <= high else np.rint((x - low) / step)
    return low, high, np.clip(levels, 0, 255).astype(np.uint8)


def decode_chunk(low: np.floating, high: np.floating, codes: Bytes) -> Wide:
    kind = type(low)
    if np.isnan(low):
        return np.full(len(codes), np.nan, kind)
    step = step_of(low, high)
    if step == 0:
        return np.full(len(codes), kind(0) if low <= 0 <= high else low, kind)
    code = codes.astype(kind)
    values = (code + np.rint(low / step)) * step if low <= 0 <= high else low + code * step
    clamped: Wide = np.clip(values, low, high) + kind(0)
    return clamped


def minmax_encode(values: Wide, numel: int, first: int) -> Bytes:
    rows, columns = values.shape
    kind = values.dtype.type
    size = values.dtype.itemsize
    codes_at, row_bytes = minmax_layout(columns, size)
    wire = np.zeros((rows, row_bytes), np.uint8)
    for r in range(rows):
        valid = min(columns, max(0, numel - first - r * columns))
        wire[r, :4] = 1, size, CHUNK % 256, CHUNK // 256
        wire[r, 8:16] = np.array([valid], "<i8").view(np.uint8)
        for chunk, begin in enumerate(range(0, columns, CHUNK)):
            x = values[r, begin : min(begin + CHUNK, valid)]
            low, high, codes = encode_chunk(x)
            at = 16 + chunk * 2 * size
            wire[r, at : at + 2 * size] = np.array([low, high], kind).view(np.uint8)
            wire[r, codes_at + begin : codes_at + begin + len(x)] = codes
    return wire


def minmax_decode(wire: Bytes, columns: int, kind: type[np.floating]) -> Wide:
    size = np.dtype(kind).itemsize
    codes_at, _ = minmax_layout(columns, size)
    out = np.zeros((len(wire), columns), kind)
    for r, row in enumerate(wire):
        if tuple(row[:4]) != (1, size, CHUNK % 256, CHUNK // 256):
            out[r] = np.nan
            continue
        valid = int(row[8:16].view("<i8")[0])
        for chunk, begin in enumerate(range(0, columns, CHUNK)):
            low, high = row[16 + chunk * 2 * size :][: 2 * size].copy().view(kind)
            end = min(begin + CHUNK, columns)
            values = decode_chunk(low, high, row[codes_at + begin : codes_at + end])
            stop = min(end, max(valid, begin))
            out[r, begin:stop] = values[: stop - begin]
    return out


# ── the sign codec ───────────────────────────────────────────────────────────────────────────────────────


def sign_scales(values: Wide, error: Wide, numel: int, first: int) -> NDArray[np.float32]:
    rows, columns = values.shape
    scales = np.zeros(rows, np.float32)
    for r in range(rows):
        valid = min(columns, max(0, numel - first - r * columns))
        u = (values[r, :valid] + error[r, :valid]).astype(np.float64)
        scales[r] = np.float32(np.abs(u).sum() / valid) if valid else np.float32(0)
    return scales


def sign_encode(
    values: Wide, error: Wide, numel: int, first: int, scales: NDArray[np.float32]
) -> tuple[Bytes, Wide]:
    """Wire and new error, for scales that are given (their sum's order is a kernel's own affair)."""
    rows, columns = values.shape
    wire = np.zeros((rows, 8 + columns // 8), np.uint8)
    left = np.zeros_like(values)
    for r in range(rows):
        valid = min(columns, max(0, numel - first - r * columns))
        u = values[r] + error[r]
        wire[r, :4] = scales[r : r + 1].view(np.uint8)
        wire[r, 8:] = np.packbits(u >= 0, bitorder="little")
        scale = values.dtype.type(scales[r])
        left[r] = u - np.where(u >= 0, scale, -scale)
        left[r, valid:] = 0
    return wire, left


def sign_decode(wire: Bytes) -> NDArray[np.float32]:
    scales = wire[:, :4].copy().view(np.float32)
    positive = np.unpackbits(wire[:, 8:], axis=1, bitorder="little") == 1
    values: NDArray[np.float32] = np.where(positive, scales, np.float32(0) - scales)
    return values


def sign_decode_mean(wire: Bytes) -> NDArray[np.float32]:
    total = np.zeros((wire.shape[1] - 8) * 8, np.float32)
    for row in sign_decode(wire):
        total += row
    mean: NDArray[np.float32] = total / np.float32(len(wire))
    return mean
