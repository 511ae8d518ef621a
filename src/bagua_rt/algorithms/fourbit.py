"""FourBit: the mean gradient, at half a byte an element, with error feedback.

Both phases of the mean are compressed in blocks of 64 elements, each with a step of its own; what a phase
loses is added to what it compresses next. Sources: Wang et al. 2023, "ZeRO++" (qgZ: blocks of 4 bits); Tang
et al. 2021, "1-bit Adam" (errors of both phases).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua_rt.algorithms.base import Algorithm, Context
from bagua_rt.algorithms.compression import CompressedGradients, CompressedMeans, keep_error_
from bagua_rt.backend import Device, Stream

BLOCK = 64  # elements: the step's 4 bytes are then 1/16 of what the block costs
_HIGHEST = 7.0


@dataclass(frozen=True)
class FourBit(Algorithm):
    """The mean of the gradients over all ranks, compressed to a seventh of float32's bytes.

    Args:
        error_feedback: Add what was lost to the next round; without, small gradients beside large ones
            never arrive.
        hierarchical: Sum within each node in full precision, and compress among the nodes' leaders only;
            the result is the mean over ranks also for nodes of unequal sizes.
    """

    name: ClassVar[str] = "fourbit"
    error_feedback: bool = True
    hierarchical: bool = False

    def bind(self, context: Context) -> CompressedGradients:
        codec = FourBitCodec(context.device)
        means = CompressedMeans(context, codec, hierarchical=self.hierarchical, feedback=self.error_feedback)
        return CompressedGradients(context, means)


class FourBitCodec:
    """Blocks of 64 elements: ``step = max|x| / 7`` in float32, and ``code = rint(x / step)`` in -7 … 7.

    A row is all its steps, then its codes: ``code + 8``, the earlier element of two in the lower half of
    their byte. Zero is exact. A block that holds NaN or an infinity decodes to NaN; one whose step is below
    the smallest normal float32 decodes to 0. Padding is 0, and so changes no step.

    Written in torch operations, so it is the same on every device.
    """

    unit = BLOCK

    def __init__(self, device: Device) -> None:
        self._device = device

    def row_bytes(self, columns: int, dtype: torch.dtype) -> int:
        """How many bytes a row of `columns` elements becomes."""
        return columns // BLOCK * 4 + columns // 2

    def encode(
        self,
        values: torch.Tensor,
        error: torch.Tensor | None,
        numel: int,
        first: int,
        wire: torch.Tensor,
        stream: Stream,
    ) -> None:
        """Compress each row of ``values + error``; `error` becomes what the compression lost."""
        self._device.run(stream, lambda: _encode(values, error, wire))

    def decode(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """The values of the rows of `wire`; 0 on padding."""
        self._device.run(stream, lambda: out.copy_(_decoded(wire, out.shape[1], _wide(out))))

    def decode_mean(self, wire: torch.Tensor, out: torch.Tensor, stream: Stream) -> None:
        """The mean of the rows of `wire`, in row order."""
        self._device.run(stream, lambda: _decode_mean(wire, out))


def _wide(values: torch.Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


@torch.no_grad()
def _encode(values: torch.Tensor, error: torch.Tensor | None, wire: torch.Tensor) -> None:
    rows, columns = values.shape
    wanted = values.to(_wide(values)) if error is None else error.add_(values)
    blocks = wanted.view(rows, columns // BLOCK, BLOCK)
    peak = blocks.abs().amax(2, keepdim=True)
    step = (peak / _HIGHEST).to(torch.float32)
    is_tiny = step < torch.finfo(torch.float32).tiny
    # x / inf = 0: the code of a block that is tiny, or not finite.
    divisor = torch.where(is_tiny | ~step.isfinite(), torch.inf, step)
    levels = torch.nan_to_num((blocks / divisor).round_().clamp_(-_HIGHEST, _HIGHEST), nan=0.0)
    step = torch.where(step.isfinite(), step.masked_fill(is_tiny, 0.0), torch.nan)
    steps_end = columns // BLOCK * 4
    wire[:, :steps_end] = step.view(rows, -1).view(torch.uint8)
    codes = (levels + 8).to(torch.uint8).view(rows, columns // 2, 2)
    wire[:, steps_end:] = codes[:, :, 0] | (codes[:, :, 1] << 4)
    if error is not None:
        keep_error_(error, (levels * step).view(rows, columns))


def _decoded(wire: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    rows, steps_end = wire.shape[0], columns // BLOCK * 4
    step = wire[:, :steps_end].contiguous().view(torch.float32).view(rows, -1, 1)
    packed = wire[:, steps_end:]
    codes = torch.stack((packed & 15, packed >> 4), 2).view(rows, -1, BLOCK)
    return ((codes.to(dtype) - 8) * step).view(rows, columns)


@torch.no_grad()
def _decode_mean(wire: torch.Tensor, out: torch.Tensor) -> None:
    total = torch.zeros_like(out, dtype=_wide(out))
    for row in wire:  # each term is scaled before it is added: no overflow where the mean has none
        total.add_(_decoded(row[None], out.numel(), total.dtype)[0].mul_(1.0 / wire.shape[0]))
    out.copy_(total)
