"""The codec MinMaxUInt8 in torch operations: the same bytes as ``kernels/minmax_*.cu``.

One byte an element, and a minimum and maximum for every 2,048. The wire format and the arithmetic are
written down in ``kernels/README.md``; each operation here rounds where the kernel's does.

[Note: blocks in the cache]
    The work goes through blocks of 64 chunks (512 KiB of float32), so that the five passes over a block read
    it from the processor's cache. The scratch is a block or two, whatever the tensors' size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bagua_rt.errors import LayoutMismatchError, UsageError

CHUNK = 2048
VERSION = 1
_ROW_HEADER = 16
_BLOCK = 64  # chunks: [Note: blocks in the cache]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def minmax_row_bytes(columns: int, dtype: torch.dtype) -> int:
    """How many bytes a row of `columns` elements has on the wire.

    Raises:
        UsageError: the codec can't carry this dtype.
    """
    return _codes_at(columns, _wide(dtype)) + _round_up(columns, 16)


def minmax_encode(values: torch.Tensor, numel: int, first: int, wire: torch.Tensor) -> None:
    """Compress rows of a bucket to one byte an element.

    ``code = rint(x/step) - rint(min/step)`` where zero lies in the chunk's range, so that zero is exact, and
    ``code = rint((x - min)/step)`` elsewhere; ``step = max/254 - min/254``. A chunk that holds NaN or an
    infinity decodes to NaN. Every byte of `wire` is written.

    Args:
        values: The rows, contiguous, lying one after the other in a bucket.
        numel: The bucket's elements; those at or past it are padding, and enter no minimum or maximum.
        first: Where in the bucket the rows begin.
        wire: Receives the rows.

    Raises:
        UsageError: a shape or a dtype is not as stated.

    **Shapes:** `values` ``[rows, columns]``; `wire` uint8 ``[rows, minmax_row_bytes(columns, dtype)]``.
    **Source:** docs/algorithms.md, the codec MinMaxUInt8.
    """
    rows, columns = _check(values, wire)
    wide = _wide(values.dtype)
    codes_at = _codes_at(columns, wide)
    scratch = torch.empty((min(_BLOCK, _chunks(columns)), CHUNK), dtype=wide)
    for r in range(rows):
        valid = min(columns, max(0, numel - first - r * columns))
        headers = torch.zeros((_chunks(columns), 2), dtype=wide)
        codes = wire[r, codes_at:]
        for begin, chunks in _blocks(valid):
            at, size = begin * CHUNK, min(chunks * CHUNK, valid - begin * CHUNK)
            lows_highs = headers[begin : begin + chunks]
            _encode_block(values[r, at : at + size], lows_highs, codes[at : at + size], scratch[:chunks])
        codes[valid:] = 0
        _write_headers(wire[r, :codes_at], headers, valid)


def minmax_decode(wire: torch.Tensor, out: torch.Tensor) -> None:
    """The values of rows compressed by `minmax_encode`; padding becomes 0.

    ``|x' - x| <= (max - min)/508 + 1 ulp`` of the chunk's largest magnitude, and x' lies in [min, max].

    Args:
        wire: The rows as they were compressed, possibly by another rank.
        out: Receives the values.

    Raises:
        UsageError: a shape or a dtype is not as stated.
        LayoutMismatchError: a row is of another version or of another format.

    **Shapes:** `wire` uint8 ``[rows, minmax_row_bytes(columns, dtype)]``; `out` ``[rows, columns]``.
    """
    rows, columns = _check(out, wire)
    wide = _wide(out.dtype)
    scratch = torch.empty((min(_BLOCK, _chunks(columns)), CHUNK), dtype=wide)
    for r in range(rows):
        row = _Row(wire[r], columns, wide)
        for begin, chunks in _blocks(row.valid):
            at, size = begin * CHUNK, min(chunks * CHUNK, row.valid - begin * CHUNK)
            # Whole chunks of a row are decoded where they belong; the rest goes through the scratch.
            target = out[r, at : at + size]
            direct = out.dtype is wide and size == chunks * CHUNK
            block = target.view(chunks, CHUNK) if direct else scratch[:chunks]
            row.decode_block(begin, block, size)
            if not direct:
                target.copy_(block.view(-1)[:size])
        out[r, row.valid :] = 0


def minmax_decode_mean(wire: torch.Tensor, out: torch.Tensor) -> None:
    """The mean of rows compressed by `minmax_encode`: ``sum over k of x'[k] * (1/rows)``, in row order.

    Each term is scaled before it is added, so nothing overflows that the mean itself does not, and every
    rank gets the same bits.

    Args:
        wire: The rows, one from each rank.
        out: Receives the mean.

    Raises:
        UsageError: a shape or a dtype is not as stated.
        LayoutMismatchError: a row is of another version or of another format.

    **Shapes:** `wire` uint8 ``[rows, minmax_row_bytes(columns, dtype)]``; `out` ``[columns]``.
    """
    columns = out.numel()
    _check(out.expand(wire.shape[0], columns) if out.dim() == 1 else out, wire)
    wide = _wide(out.dtype)
    rows = [_Row(row, columns, wide) for row in wire]
    weight = torch.ones((), dtype=wide) / len(rows)
    scratch, total = torch.empty((2, min(_BLOCK, _chunks(columns)), CHUNK), dtype=wide)
    for begin, chunks in _blocks(columns):
        at, size = begin * CHUNK, min(chunks * CHUNK, columns - begin * CHUNK)
        total[:chunks] = 0
        for row in rows:
            here = min(max(row.valid - at, 0), size)
            if here == 0:
                continue
            used = _chunks(here)
            row.decode_block(begin, scratch[:used], here)
            terms = scratch[:used].view(-1)[:here].mul_(weight)
            total.view(-1)[:here].add_(terms)
        out[at : at + size] = total.view(-1)[:size]


@dataclass(frozen=True)
class _Grid:
    """Chunks' grids, one row each: ``value = (code + shift) * step + origin``, clamped into [low, high]."""

    low: torch.Tensor
    high: torch.Tensor
    step: torch.Tensor
    shift: torch.Tensor
    origin: torch.Tensor
    has_origin: bool

    @classmethod
    def of(cls, headers: torch.Tensor) -> _Grid:
        low, high = headers[:, :1], headers[:, 1:]
        through_zero = (low <= 0) & (high >= 0)
        step = high / 254 - low / 254
        # A constant; or NaN, which origin carries on.
        step = torch.where(step >= torch.finfo(step.dtype).tiny, step, 0.0)
        shift = torch.where(through_zero & (step > 0), (low / step).round(), 0.0)
        origin = torch.where(through_zero, 0.0, low)
        return cls(low, high, step, shift, origin, not bool(through_zero.all()))


class _Row:
    """One compressed row, checked."""

    def __init__(self, row: torch.Tensor, columns: int, wide: torch.dtype) -> None:
        expected = [VERSION, wide.itemsize, CHUNK % 256, CHUNK // 256]
        found = row[:4].tolist()
        if found != expected:
            raise LayoutMismatchError(
                "a rank's compressed data is of another version or format",
                expected=f"the header bytes {expected}",
                got=f"{found}",
                fix="install the same bagua-rt on every rank",
            )
        self.valid = min(columns, int.from_bytes(bytes(row[8:_ROW_HEADER].tolist()), "little"))
        headers = row[_ROW_HEADER : _ROW_HEADER + _chunks(columns) * 2 * wide.itemsize]
        self._headers = headers.clone().view(wide).view(-1, 2)  # a copy: the bytes may lie unaligned
        self._codes = row[_codes_at(columns, wide) :]

    def decode_block(self, begin: int, block: torch.Tensor, size: int) -> None:
        """Decode `size` elements from chunk `begin` on; what else `block` has room for is left undefined."""
        chunks = block.shape[0]
        grid = _Grid.of(self._headers[begin : begin + chunks])
        at = begin * CHUNK
        if size == chunks * CHUNK:
            block.copy_(self._codes[at : at + size].view(chunks, CHUNK))
        else:
            block.view(-1)[:size] = self._codes[at : at + size]
        block.add_(grid.shift).mul_(grid.step)
        if grid.has_origin:
            block.add_(grid.origin)
        # A grid point may lie half a step outside, and so past the format's largest number.
        torch.maximum(block, grid.low, out=block)
        torch.minimum(block, grid.high, out=block)


def _encode_block(
    values: torch.Tensor, headers: torch.Tensor, codes: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Encode the chunks of `values`, the last of which may be short; `headers` receives their ranges."""
    chunks, size = scratch.shape[0], values.numel()
    if size == chunks * CHUNK and values.dtype is scratch.dtype:
        block = values.view(chunks, CHUNK)
    else:
        scratch.view(-1)[:size] = values
        scratch.view(-1)[size:] = values[-1:]  # repeats a valid element: no range changes
        block = scratch
    torch.amin(block, 1, keepdim=True, out=headers[:, :1])
    torch.amax(block, 1, keepdim=True, out=headers[:, 1:])
    headers.add_(0)  # -0 becomes +0, as in the kernel: equal input, equal bytes
    finite = headers.isfinite().all(1, keepdim=True)
    all_finite = bool(finite.all())
    if not all_finite:
        headers.copy_(torch.where(finite, headers, torch.nan))
    grid = _Grid.of(headers)
    if grid.has_origin:
        block = torch.sub(block, grid.origin, out=scratch)
    # x / inf = 0: the code of a constant chunk.
    torch.div(block, torch.where(grid.step > 0, grid.step, torch.inf), out=scratch)
    # To int8 first, 128 lower: torch turns float32 into uint8 at a quarter of that speed.
    scratch.round_().sub_(grid.shift + 128)
    if grid.has_origin:
        scratch.clamp_(-128, 127)  # through zero, monotone rounding keeps the codes in 0 … 255
    if not all_finite:
        scratch.masked_fill_(~finite, -128)
    codes.view(torch.int8).copy_(scratch.view(-1)[:size])
    codes.bitwise_xor_(128)


def _write_headers(row: torch.Tensor, headers: torch.Tensor, valid: int) -> None:
    start = bytes([VERSION, headers.element_size(), CHUNK % 256, CHUNK // 256, 0, 0, 0, 0])
    row[:_ROW_HEADER] = torch.tensor(list(start + valid.to_bytes(8, "little")), dtype=torch.uint8)
    numbers = headers.view(torch.uint8).view(-1)
    row[_ROW_HEADER : _ROW_HEADER + numbers.numel()] = numbers
    row[_ROW_HEADER + numbers.numel() :] = 0


def _blocks(valid: int) -> Iterator[tuple[int, int]]:
    """The first chunk of each block, and how many chunks it has, that hold `valid` elements."""
    for begin in range(0, _chunks(valid), _BLOCK):
        yield begin, min(_BLOCK, _chunks(valid) - begin)


def _check(values: torch.Tensor, wire: torch.Tensor) -> tuple[int, int]:
    wide_rows = values.shape[0] if values.dim() == 2 else -1
    columns = values.shape[-1] if values.dim() == 2 else 0
    expected = (wide_rows, minmax_row_bytes(columns, values.dtype))
    if values.dim() != 2 or wire.dtype is not torch.uint8 or tuple(wire.shape) != expected:
        raise UsageError(
            "the codec MinMaxUInt8 got tensors that don't fit each other",
            expected=f"values [rows, columns] and wire uint8 {list(expected)}",
            got=f"values {list(values.shape)} and wire {wire.dtype} {list(wire.shape)}",
            fix="size the wire with minmax_row_bytes(columns, dtype)",
        )
    return wide_rows, columns


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DTYPES:
        raise UsageError(
            "the codec MinMaxUInt8 can't carry this dtype",
            expected=", ".join(map(str, _DTYPES)),
            got=str(dtype),
            fix="send it through plain all-reduce",
        )
    return torch.float64 if dtype is torch.float64 else torch.float32


def _codes_at(columns: int, wide: torch.dtype) -> int:
    return _ROW_HEADER + _round_up(_chunks(columns) * 2 * wide.itemsize, 16)


def _chunks(columns: int) -> int:
    return -(-columns // CHUNK)


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
