"""The fused bucket operations on the CPU, in torch and numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bagua_rt.backend import Event, Stream
from bagua_rt.backends import _codec_cpu
from bagua_rt.backends.gloo_device import CpuDevice

# Above this many elements per tensor one call each is as fast as a batch, and needs no second pass.
_BIG = 16_384
_HEADER_BYTES = 8


class CpuKernels:
    """`bagua_rt.backend.Kernels` on the CPU: inline on the compute stream, queued on a lane.

    **Source:** the docstrings of the protocol.
    """

    def __init__(self, device: CpuDevice) -> None:
        self._device = device

    def copy_in(
        self, tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor], scale: float, stream: Stream
    ) -> Event:
        """``views[i] = tensors[i] * scale``; a tensor that already is its view is scaled in place."""
        self._device.run(stream, lambda: _copy_in(tensors, views, scale))
        return self._device.record(stream)

    def copy_out(
        self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        """``tensors[i] = views[i]``."""
        self._device.run(stream, lambda: _copy_in(views, tensors, 1.0))

    def sign_encode(
        self,
        values: torch.Tensor,
        error: torch.Tensor,
        numel: int,
        first: int,
        wire: torch.Tensor,
        stream: Stream,
    ) -> None:
        """Compress each row of ``values + error`` to its signs and its mean magnitude."""
        self._device.run(stream, lambda: _sign_encode(values, error, numel, first, wire))

    def sign_decode(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """``out[k] = scale[k] * sign[k]`` for each row k."""
        self._device.run(stream, lambda: _sign_decode(wire, out))

    def sign_decode_mean(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """``out = mean over k of scale[k] * sign[k]``, in row order."""
        self._device.run(stream, lambda: _sign_decode_mean(wire, out))

    def minmax_row_bytes(self, columns: int, dtype: torch.dtype) -> int:
        """How many bytes a row of `columns` elements has in the codec MinMaxUInt8."""
        return _codec_cpu.minmax_row_bytes(columns, dtype)

    def minmax_encode(
        self, values: torch.Tensor, numel: int, first: int, wire: torch.Tensor, stream: Stream
    ) -> None:
        """Compress each row of `values` to one byte an element, with a range for every 2,048 elements."""
        self._device.run(stream, lambda: _codec_cpu.minmax_encode(values, numel, first, wire))

    def minmax_decode(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """The values of rows that `minmax_encode` made; padding becomes 0."""
        self._device.run(stream, lambda: _codec_cpu.minmax_decode(wire, out))

    def minmax_decode_mean(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """``out = mean over k of row k``, in row order."""
        self._device.run(stream, lambda: _codec_cpu.minmax_decode_mean(wire, out))

    def ring_difference(
        self,
        x: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        agreed: torch.Tensor,
        shares: tuple[float, float],
        stream: Stream,
    ) -> None:
        """``x = (x - agreed) + (left - agreed) * shares[0] + (right - agreed) * shares[1]``."""
        self._device.run(stream, lambda: _ring_difference(x, (left, right), agreed, shares))

    def add_difference(self, x: torch.Tensor, mean: torch.Tensor, y: torch.Tensor, stream: Stream) -> None:
        """``x += mean - y``; `mean` itself where x is still y."""
        self._device.run(stream, lambda: _add_difference(x, mean, y))


@torch.no_grad()
def _copy_in(tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor], scale: float) -> None:
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    scaled: list[torch.Tensor] = []  # of these, the ones already in place
    for t, view in zip(tensors, views, strict=True):
        is_there, is_alike = t.data_ptr() == view.data_ptr(), t.dtype == view.dtype
        if is_there and is_alike and t.stride() == view.stride():
            if scale != 1.0 and view.itemsize > 2:
                scaled.append(view)
            elif scale != 1.0:
                view.mul_(scale)
        elif scale != 1.0 and is_alike and not is_there and (t.numel() >= _BIG or t.itemsize <= 2):
            torch.mul(t, scale, out=view)  # in 16 bits always: the batch would round the scale first
        else:
            sources.append(t.clone() if is_there else t)  # the same memory in another order
            targets.append(view)
            if scale != 1.0:
                scaled.append(view)
    if targets:
        torch._foreach_copy_(targets, sources)
    if scaled:
        torch._foreach_mul_(scaled, scale)


@torch.no_grad()
def _sign_encode(
    values: torch.Tensor, error: torch.Tensor, numel: int, first: int, wire: torch.Tensor
) -> None:
    rows, columns = values.shape
    out = wire.numpy()
    out[:, 4:_HEADER_BYTES] = 0
    work = torch.float64 if torch.float64 in (values.dtype, error.dtype) else torch.float32
    for k in range(rows):
        # Rows one by one: the scratch of a row stays in the cache.
        valid = min(max(numel - first - k * columns, 0), columns)
        u = values[k].to(work, copy=True).add_(error[k])
        scale = np.float32(u[:valid].abs().mean().item()) if valid else np.float32(0.0)
        positive = u.numpy() >= 0
        out[k, :4] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
        out[k, _HEADER_BYTES:] = np.packbits(positive, bitorder="little")
        u.sub_(_signs(positive, u.dtype).mul_(float(scale)))
        u[valid:] = 0
        error[k].copy_(u)


def _signs(positive: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(positive).to(dtype).mul_(2).sub_(1)


def _row(wire: torch.Tensor, k: int, columns: int) -> torch.Tensor:
    """Row k of `wire` as float32 values."""
    raw = wire.numpy()[k]
    scale = float(raw[:4].copy().view(np.float32)[0])
    bits = np.unpackbits(raw[_HEADER_BYTES:], count=columns, bitorder="little")
    return torch.from_numpy(bits).to(torch.float32).mul_(2 * scale).sub_(scale)


@torch.no_grad()
def _sign_decode(wire: torch.Tensor, out: torch.Tensor) -> None:
    for k in range(wire.shape[0]):
        out[k].copy_(_row(wire, k, out.shape[1]))


@torch.no_grad()
def _sign_decode_mean(wire: torch.Tensor, out: torch.Tensor) -> None:
    rows = wire.shape[0]
    total = _row(wire, 0, out.numel())
    for k in range(1, rows):
        total.add_(_row(wire, k, out.numel()))
    out.copy_(total.div_(rows))


@torch.no_grad()
def _ring_difference(
    x: torch.Tensor, sides: Sequence[torch.Tensor], agreed: torch.Tensor, shares: Sequence[float]
) -> None:
    wide = torch.promote_types(x.dtype, torch.float32)
    middle = agreed.to(wide)
    difference = x.to(wide) - middle
    for side, share in zip(sides, shares, strict=True):
        difference += (side.to(wide) - middle).mul_(share)
    x.copy_(difference)


@torch.no_grad()
def _add_difference(x: torch.Tensor, mean: torch.Tensor, y: torch.Tensor) -> None:
    wide = torch.promote_types(x.dtype, torch.float32)
    moved = (mean.to(wide) - y.to(wide)).add_(x)
    x.copy_(torch.where(x == y, mean.to(wide), moved))
